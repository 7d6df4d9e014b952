/* Options that a program sets to values of a new socket elsewhere: the settings of this network give a new socket
 * others (net.ipv6.bindv6only = 1, net.ipv4.ip_default_ttl = 77). */
#include "workload.h"
#include <sys/socket.h>

static int get(int fd, int level, int name) {
	int value = -1;
	socklen_t size = sizeof value;
	must(getsockopt(fd, level, name, &value, &size) == 0);
	return value;
}

static void set(int fd, int level, int name, int value) {
	must(setsockopt(fd, level, name, &value, sizeof value) == 0);
}

int main(void) {
	int both[2], ttl[2];
	for (int n = 0; n < 2; n++) {
		must((both[n] = socket(AF_INET6, n ? SOCK_DGRAM : SOCK_STREAM, 0)) >= 0);
		must(get(both[n], IPPROTO_IPV6, IPV6_V6ONLY) == 1);
		set(both[n], IPPROTO_IPV6, IPV6_V6ONLY, 0);
		must((ttl[n] = socket(AF_INET, SOCK_DGRAM, 0)) >= 0);
		must(get(ttl[n], IPPROTO_IP, IP_TTL) == 77);
	}
	set(ttl[1], IPPROTO_IP, IP_TTL, 64);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		for (int n = 0; n < 2; n++)
			must(get(both[n], IPPROTO_IPV6, IPV6_V6ONLY) == 0);
		must(get(ttl[0], IPPROTO_IP, IP_TTL) == 77 && get(ttl[1], IPPROTO_IP, IP_TTL) == 64);
	}
	ok();
}
