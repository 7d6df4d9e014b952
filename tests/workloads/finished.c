/* Listeners without SO_REUSEADDR whose program ends connections first: they are in TIME_WAIT, or wait for the end of
 * their peer. By IPv4, IPv6, and IPv4 at a socket of IPv6, at the container's own addresses and at the loopback. With
 * OUTSIDE set, the clients of the own addresses are the driver's. */
#include "workload.h"
#include <arpa/inet.h>
#include <sys/socket.h>

static int listening(int family, int port, int any) {
	struct sockaddr_storage a;
	socklen_t n = loopback(&a, family, port);
	int fd = socket(family, SOCK_STREAM, 0);
	if (any && family == AF_INET)
		((struct sockaddr_in *)&a)->sin_addr.s_addr = 0;
	if (any && family == AF_INET6)
		((struct sockaddr_in6 *)&a)->sin6_addr = in6addr_any;
	must(bind(fd, (void *)&a, n) == 0 && listen(fd, 9) == 0);
	return fd;
}

/* The server is the first to close. */
static void serve(int listener) {
	char c = 0;
	int server = accept(listener, 0, 0);
	must(server >= 0 && read(server, &c, 1) == 1 && c == 'a');
	must(write(server, "b", 1) == 1 && close(server) == 0);
}

/* With `waits`, the client has not closed yet, and is returned. */
static int served(int listener, int family, int port, int waits) {
	struct sockaddr_storage a;
	socklen_t n = loopback(&a, family, port);
	int fd = socket(family, SOCK_STREAM, 0);
	char c = 0;
	must(connect(fd, (void *)&a, n) == 0 && write(fd, "a", 1) == 1);
	serve(listener);
	must(read(fd, &c, 1) == 1 && c == 'b' && read(fd, &c, 1) == 0);
	if (!waits)
		must(close(fd) == 0);
	return fd;
}

int main(void) {
	int four = listening(AF_INET, 7101, 0), six = listening(AF_INET6, 7102, 0);
	int any = listening(AF_INET6, 7103, 1);
	int own = listening(AF_INET, 7104, 1);
	for (int round = 0; round < ROUNDS; round++) {
		served(four, AF_INET, 7101, 0);
		served(six, AF_INET6, 7102, 0);
		served(any, AF_INET6, 7103, 0);
		served(any, AF_INET, 7103, 0);
		int open = getenv("WAITS") != NULL ? served(four, AF_INET, 7101, 1) : -1;
		if (getenv("OUTSIDE") != NULL) {
			print_line("listens %d", round);
			serve(own);
			serve(any);
		}
		ready(round);
		if (open >= 0) {
			char c;
			must(read(open, &c, 1) == 0 && close(open) == 0);
		}
	}
	ok();
}
