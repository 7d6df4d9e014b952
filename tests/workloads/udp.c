/* UDP sockets: bound, connected, not bound at all, of both families, with unread datagrams: from
 * open sockets, from closed ones, and from connected ones; with options; with a pending error. */
#include "workload.h"
#include <arpa/inet.h>
#include <sys/socket.h>

static int udp(int family, int port) {
	struct sockaddr_storage a;
	int fd = socket(family, SOCK_DGRAM, 0);
	must(fd >= 0);
	if (port)
		must(bind(fd, (void *)&a, loopback(&a, family, port)) == 0);
	return fd;
}

static void send_to(int fd, int family, int port, const char *text) {
	struct sockaddr_storage a;
	socklen_t n = loopback(&a, family, port);
	must(sendto(fd, text, strlen(text), 0, (void *)&a, n) == (ssize_t)strlen(text));
}

static int port_of(int fd) {
	struct sockaddr_in6 a;
	must(getsockname(fd, (void *)&a, &(socklen_t){sizeof a}) == 0);
	return ntohs(a.sin6_port);
}

/* Checks the next datagram and its source port on the loopback. */
static void receives(int fd, const char *text, int family, int port) {
	char found[2000];
	struct sockaddr_storage a, b;
	socklen_t n = sizeof a;
	ssize_t got = recvfrom(fd, found, sizeof found, MSG_DONTWAIT, (void *)&a, &n);
	must(got == (ssize_t)strlen(text) && memcmp(found, text, got) == 0);
	must(n == loopback(&b, family, port));
	if (family == AF_INET)
		must(memcmp(&a, &b, 8) == 0);
	else
		must(memcmp(&a, &b, 24) == 0);
}

int main(void) {
	int four = udp(AF_INET, 5000), other = udp(AF_INET, 5001), six = udp(AF_INET6, 5002);
	int speaker = udp(AF_INET, 0), fresh = udp(AF_INET6, 0), any = socket(AF_INET, SOCK_DGRAM, 0);
	struct sockaddr_in every = {.sin_family = AF_INET, .sin_port = htons(5003)};
	must(bind(any, (void *)&every, sizeof every) == 0);
	struct sockaddr_storage a;
	must(connect(speaker, (void *)&a, loopback(&a, AF_INET, 5000)) == 0);
	int own = port_of(speaker), value = 1, ttl = 33;
	must(own != 0);
	must(setsockopt(four, SOL_SOCKET, SO_BROADCAST, &value, 4) == 0);
	must(setsockopt(four, IPPROTO_IP, IP_TTL, &ttl, 4) == 0);
	char big[1500];
	memset(big, 'b', sizeof big - 1);
	big[sizeof big - 1] = 0;
	for (int round = 0; round < ROUNDS; round++) {
		send_to(other, AF_INET, 5000, "from another");
		must(write(speaker, "connected", 9) == 9);
		int gone = udp(AF_INET, 5010);
		send_to(gone, AF_INET, 5000, big);
		send_to(gone, AF_INET, 5003, "to any");
		close(gone);
		send_to(four, AF_INET, own, "answer");
		gone = udp(AF_INET6, 5011);
		send_to(gone, AF_INET6, 5002, "six");
		close(gone);
		/* No socket at the port: the next call would return the error. */
		int refused[2], families[2] = {AF_INET, AF_INET6};
		for (int n = 0; n < 2; n++) {
			refused[n] = udp(families[n], 5020 + n);
			must(connect(refused[n], (void *)&a, loopback(&a, families[n], 5999)) == 0);
			must(write(refused[n], "x", 1) == 1);
		}
		ready(round);
		for (int n = 0; n < 2; n++) {
			must(recv(refused[n], big, 1, MSG_DONTWAIT) == -1 && errno == ECONNREFUSED);
			must(recv(refused[n], big, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
			close(refused[n]);
		}
		receives(four, "from another", AF_INET, 5001);
		receives(four, "connected", AF_INET, own);
		receives(four, big, AF_INET, 5010);
		must(recv(four, big, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
		receives(any, "to any", AF_INET, 5010);
		receives(speaker, "answer", AF_INET, 5000);
		receives(six, "six", AF_INET6, 5011);
		must(port_of(speaker) == own && port_of(four) == 5000 && port_of(fresh) == 0);
		must(getsockopt(four, SOL_SOCKET, SO_BROADCAST, &value, &(socklen_t){4}) == 0);
		must(getsockopt(four, IPPROTO_IP, IP_TTL, &ttl, &(socklen_t){4}) == 0);
		must(value == 1 && ttl == 33);
		must(getsockname(any, (void *)&every, &(socklen_t){sizeof every}) == 0);
		must(every.sin_addr.s_addr == 0 && every.sin_port == htons(5003));
		/* A connected socket receives from its peer only. */
		send_to(other, AF_INET, own, "not for it");
		must(recv(speaker, big, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
		memset(big, 'b', sizeof big - 1);
	}
	ok();
}
