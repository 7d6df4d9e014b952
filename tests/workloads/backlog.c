/* TCP connections in the accept queue: several at one socket, without data, with data, with more
 * than one segment, and ended; by IPv4, IPv6, and IPv4 at a socket of IPv6. */
#include "workload.h"
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#define LONG 50000

static int listening(int family, int port, int any) {
	struct sockaddr_storage a;
	socklen_t n = loopback(&a, family, port);
	int fd = socket(family, SOCK_STREAM, 0), on = 1;
	if (any)
		((struct sockaddr_in6 *)&a)->sin6_addr = in6addr_any;
	must(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0);
	must(bind(fd, (void *)&a, n) == 0 && listen(fd, 9) == 0);
	return fd;
}

static int caller(int family, int port) {
	struct sockaddr_storage a;
	socklen_t n = loopback(&a, family, port);
	int fd = socket(family, SOCK_STREAM, 0);
	must(connect(fd, (void *)&a, n) == 0);
	return fd;
}

static void sends(int fd, const void *text, size_t n) {
	must(send(fd, text, n, MSG_NOSIGNAL) == (ssize_t)n);
}

static void receives(int fd, const void *text, size_t n) {
	static char found[LONG];
	must(recv(fd, found, n, MSG_WAITALL) == (ssize_t)n && memcmp(found, text, n) == 0);
}

static int port_of(int fd, int (*name)(int, struct sockaddr *, socklen_t *)) {
	struct sockaddr_in6 a;
	must(name(fd, (void *)&a, &(socklen_t){sizeof a}) == 0);
	return ntohs(a.sin6_port);
}

/* The next accepted connection is the one made by `from`, with matching addresses. */
static int accepted(int listener, int from) {
	int fd = accept(listener, 0, 0);
	must(fd >= 0);
	must(port_of(fd, getpeername) == port_of(from, getsockname));
	must(port_of(from, getpeername) == port_of(fd, getsockname));
	return fd;
}

int main(void) {
	static char text[LONG];
	for (int n = 0; n < LONG; n++)
		text[n] = n * 7 + n / 251;
	int four = listening(AF_INET, 7100, 0), six = listening(AF_INET6, 7101, 0);
	int both = listening(AF_INET6, 7102, 1);
	for (int round = 0; round < ROUNDS; round++) {
		int silent = caller(AF_INET, 7100), spoken = caller(AF_INET, 7100);
		int much = caller(AF_INET, 7100), ended = caller(AF_INET, 7100);
		int by_six = caller(AF_INET6, 7101), mapped = caller(AF_INET, 7102);
		sends(spoken, "first", 5), sends(much, text, LONG), sends(ended, "last", 4);
		must(shutdown(ended, SHUT_WR) == 0);
		/* One that no process has any more. */
		int closed = caller(AF_INET, 7100);
		sends(closed, "bye", 3);
		must(close(closed) == 0);
		sends(by_six, "six", 3), sends(mapped, "four", 4);
		/* All of it has arrived. */
		for (int waiting = 1; waiting > 0; nap(1))
			must(ioctl(much, TIOCOUTQ, &waiting) == 0);

		ready(round);

		int a = accepted(four, silent), b = accepted(four, spoken), c = accepted(four, much);
		int d = accepted(four, ended), left = accept(four, 0, 0), e = accepted(six, by_six), f = accepted(both, mapped);
		must(fcntl(four, F_SETFL, O_NONBLOCK) == 0);
		must(accept(four, 0, 0) == -1 && errno == EAGAIN && fcntl(four, F_SETFL, 0) == 0);
		char one;
		must(recv(a, &one, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
		receives(b, "first", 5), receives(c, text, LONG), receives(d, "last", 4);
		must(read(d, &one, 1) == 0);
		receives(left, "bye", 3);
		must(read(left, &one, 1) == 0 && close(left) == 0);
		receives(e, "six", 3), receives(f, "four", 4);
		/* Both sides continue, with more than a segment of data each. */
		struct {
			int caller, accepted;
		} all[] = {{silent, a}, {spoken, b}, {much, c}, {by_six, e}, {mapped, f}};
		for (int n = 0; n < 5; n++) {
			sends(all[n].caller, text, LONG), receives(all[n].accepted, text, LONG);
			sends(all[n].accepted, text, LONG), receives(all[n].caller, text, LONG);
			must(close(all[n].caller) == 0 && read(all[n].accepted, &one, 1) == 0);
			close(all[n].accepted);
		}
		sends(d, "still", 5), receives(ended, "still", 5);
		must(close(d) == 0 && read(ended, &one, 1) == 0 && close(ended) == 0);
	}
	ok();
}
