/* Sockets bound to an address that no device has, with an option that was taken back since (IP_FREEBIND); and
 * sockets bound to an address without a port (IP_BIND_ADDRESS_NO_PORT). */
#include "workload.h"
#include <arpa/inet.h>
#include <sys/socket.h>

static const int on = 1, off = 0;

static int bound(int type, const char *ip, int port, int option) {
	struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port)};
	int fd = socket(AF_INET, type, 0);
	must(fd >= 0 && inet_pton(AF_INET, ip, &at.sin_addr) == 1);
	must(setsockopt(fd, IPPROTO_IP, option, &on, sizeof on) == 0);
	must(bind(fd, (void *)&at, sizeof at) == 0);
	must(setsockopt(fd, IPPROTO_IP, option, &off, sizeof off) == 0);
	return fd;
}

static int is_at(int fd, const char *ip, int port) {
	struct sockaddr_in at;
	char text[INET_ADDRSTRLEN];
	socklen_t length = sizeof at;
	must(getsockname(fd, (void *)&at, &length) == 0);
	must(inet_ntop(AF_INET, &at.sin_addr, text, sizeof text) != 0);
	return !strcmp(text, ip) && ntohs(at.sin_port) == port;
}

int main(void) {
	int udp = bound(SOCK_DGRAM, "192.0.2.7", 5300, IP_FREEBIND);
	int tcp = bound(SOCK_STREAM, "192.0.2.7", 5301, IP_FREEBIND);
	int listener = bound(SOCK_STREAM, "192.0.2.7", 5302, IP_FREEBIND);
	int late = bound(SOCK_STREAM, "127.0.0.1", 0, IP_BIND_ADDRESS_NO_PORT);
	must(listen(listener, 5) == 0);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		int all[4] = {udp, tcp, listener, late};
		for (int n = 0; n < 4; n++) {
			int value = 9, port = n < 3 ? 5300 + n : 0;
			socklen_t length = sizeof value;
			must(is_at(all[n], n < 3 ? "192.0.2.7" : "127.0.0.1", port));
			must(getsockopt(all[n], IPPROTO_IP, IP_FREEBIND, &value, &length) == 0 && value == 0);
			must(getsockopt(all[n], IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &value, &length) == 0);
			must(value == 0);
		}
		must(listen(listener, 5) == 0);
	}
	ok();
}
