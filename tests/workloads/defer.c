/* Clients of listeners with TCP_DEFER_ACCEPT that have sent no data, by IPv4, IPv6, and IPv4 at a socket of IPv6; one
 * listener has a client in its queue, too. With OUTSIDE set, one client of the driver each round. With LIVE set, no
 * client is in a queue before it has sent data. */
#include "workload.h"
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#define LONG 50000

static int deferring(int family, int port, int any) {
	struct sockaddr_storage a;
	socklen_t n = loopback(&a, family, port);
	int fd = socket(family, SOCK_STREAM, 0), on = 1, seconds = 1000;
	if (any && family == AF_INET)
		((struct sockaddr_in *)&a)->sin_addr.s_addr = 0;
	if (any && family == AF_INET6)
		((struct sockaddr_in6 *)&a)->sin6_addr = in6addr_any;
	must(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0);
	must(setsockopt(fd, IPPROTO_TCP, TCP_DEFER_ACCEPT, &seconds, sizeof seconds) == 0);
	must(bind(fd, (void *)&a, n) == 0 && listen(fd, 9) == 0);
	return fd;
}

static int client(int family, int port) {
	struct sockaddr_storage a;
	socklen_t n = loopback(&a, family, port);
	int fd = socket(family, SOCK_STREAM, 0);
	must(connect(fd, (void *)&a, n) == 0);
	return fd;
}

static int port_of(int fd, int (*name)(int, struct sockaddr *, socklen_t *)) {
	struct sockaddr_in6 a;
	must(name(fd, (void *)&a, &(socklen_t){sizeof a}) == 0);
	return ntohs(a.sin6_port);
}

/* More than a segment, from one end to the other. */
static void passes(int from, int to) {
	static char text[LONG], found[LONG];
	for (int n = 0; n < LONG; n++)
		text[n] = n * 7 + n / 251;
	must(send(from, text, LONG, MSG_NOSIGNAL) == LONG);
	must(recv(to, found, LONG, MSG_WAITALL) == LONG && memcmp(found, text, LONG) == 0);
}

static int is_empty(int listener) {
	must(fcntl(listener, F_SETFL, O_NONBLOCK) == 0);
	int fd = accept(listener, 0, 0);
	must(fcntl(listener, F_SETFL, 0) == 0);
	return fd == -1 && errno == EAGAIN;
}

/* All clients send their first data and are accepted, in any order. */
static void answers(int listener, const int *clients, int many) {
	for (int n = 0; n < many; n++)
		must(send(clients[n], "hello", 5, MSG_NOSIGNAL) == 5);
	for (int n = 0; n < many; n++) {
		char text[5];
		int fd = accept(listener, 0, 0), from = -1;
		must(fd >= 0);
		for (int k = 0; k < many; k++)
			if (port_of(clients[k], getsockname) == port_of(fd, getpeername))
				from = clients[k];
		must(from >= 0 && port_of(from, getpeername) == port_of(fd, getsockname));
		must(recv(fd, text, 5, MSG_WAITALL) == 5 && memcmp(text, "hello", 5) == 0);
		passes(from, fd), passes(fd, from);
		must(shutdown(from, SHUT_WR) == 0 && read(fd, text, 1) == 0 && close(fd) == 0);
	}
	for (int n = 0; n < many; n++)
		must(close(clients[n]) == 0);
}

static void serve_outside(void) {
	int listener = deferring(AF_INET, 7003, 1);
	for (int round = 0; round < ROUNDS; round++) {
		char c;
		ready(round);
		int fd = accept(listener, 0, 0);
		must(fd >= 0 && read(fd, &c, 1) == 1);
		c++;
		must(write(fd, &c, 1) == 1 && read(fd, &c, 1) == 0 && close(fd) == 0);
	}
	ok();
}

int main(void) {
	if (getenv("OUTSIDE"))
		serve_outside();
	int four = deferring(AF_INET, 7100, 0), six = deferring(AF_INET6, 7101, 0);
	int both = deferring(AF_INET6, 7102, 1);
	for (int round = 0; round < ROUNDS; round++) {
		int spoken = client(AF_INET, 7100);
		must(send(spoken, "first", 5, MSG_NOSIGNAL) == 5);
		int first = accept(four, 0, 0), queued = client(AF_INET, 7100);
		must(first >= 0 && send(queued, "hello", 5, MSG_NOSIGNAL) == 5);
		int by_four[] = {client(AF_INET, 7100), client(AF_INET, 7100), client(AF_INET, 7100)};
		int by_six[] = {client(AF_INET6, 7101), client(AF_INET6, 7101)}, mapped = client(AF_INET, 7102);
		/* The last segments of the handshakes, and the data, have arrived. */
		nap(100);
		must(is_empty(six) && is_empty(both));

		ready(round);

		must(!getenv("LIVE") || (is_empty(six) && is_empty(both)));
		int fd = accept(four, 0, 0);
		char text[5];
		must(fd >= 0 && port_of(fd, getpeername) == port_of(queued, getsockname));
		must(recv(fd, text, 5, MSG_WAITALL) == 5 && memcmp(text, "hello", 5) == 0);
		must(!getenv("LIVE") || is_empty(four));
		answers(six, by_six, 2), answers(both, &mapped, 1), answers(four, by_four, 3);
		must(is_empty(four) && is_empty(six) && is_empty(both));
		must(close(fd) == 0 && close(queued) == 0 && close(first) == 0 && close(spoken) == 0);
		/* The listeners wait for data as before. */
		int silent = client(AF_INET6, 7101);
		nap(20);
		must(is_empty(six));
		answers(six, &silent, 1);
	}
	ok();
}
