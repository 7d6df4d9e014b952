/* Listening TCP sockets, for IPv4 and IPv6, with options, one of them shared with a child; in any
 * kind of network. */
#include "workload.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

static int listen_at(int family, int port, int reuse) {
	struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
	struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons(port)};
	int fd = socket(family, SOCK_STREAM, 0), on = 1;
	must(fd >= 0);
	if (reuse)
		must(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0);
	if (family == AF_INET6)
		must(setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on) == 0);
	else
		must(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) == 0);
	must(bind(fd, family == AF_INET ? (void *)&four : (void *)&six,
		  family == AF_INET ? sizeof four : sizeof six) == 0);
	must(listen(fd, 17) == 0);
	return fd;
}

static void call(int family, int port) {
	struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
	struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons(port)};
	four.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	six.sin6_addr = in6addr_loopback;
	int fd = socket(family, SOCK_STREAM, 0);
	must(connect(fd, family == AF_INET ? (void *)&four : (void *)&six,
		     family == AF_INET ? sizeof four : sizeof six) == 0);
	char text[8] = "";
	must(read(fd, text, 8) == 5 && memcmp(text, "hello", 5) == 0);
	close(fd);
}

int main(void) {
	int own = listen_at(AF_INET, 8001, 1), shared = listen_at(AF_INET, 80, 0);
	int six = listen_at(AF_INET6, 8001, 1);
	if (fork() == 0) {
		for (;;) {
			int c = accept(shared, 0, 0);
			must(c >= 0 && write(c, "hello", 5) == 5 && close(c) == 0);
		}
	}
	int epoll = epoll_create1(0);
	struct epoll_event e = {.events = EPOLLIN, .data.fd = own};
	must(epoll_ctl(epoll, EPOLL_CTL_ADD, own, &e) == 0);
	e.data.fd = six;
	must(epoll_ctl(epoll, EPOLL_CTL_ADD, six, &e) == 0);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		int value;
		socklen_t size = sizeof value;
		must(getsockopt(own, IPPROTO_TCP, TCP_NODELAY, &value, &size) == 0 && value == 1);
		must(getsockopt(own, SOL_SOCKET, SO_REUSEADDR, &value, &size) == 0 && value == 1);
		must(getsockopt(shared, SOL_SOCKET, SO_REUSEADDR, &value, &size) == 0 && value == 0);
		call(AF_INET, 80);
		for (int n = 0; n < 2; n++) {
			int family = n ? AF_INET6 : AF_INET;
			int caller = fork();
			if (caller == 0) {
				call(family, 8001);
				_exit(0);
			}
			must(epoll_wait(epoll, &e, 1, 5000) == 1 && e.data.fd == (n ? six : own));
			int c = accept(e.data.fd, 0, 0), status;
			must(c >= 0 && write(c, "hello", 5) == 5 && close(c) == 0);
			must(waitpid(caller, &status, 0) == caller && status == 0);
		}
	}
	ok();
}
