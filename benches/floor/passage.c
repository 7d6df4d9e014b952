/* Requests and answers of one byte over connections that stay open.
 *
 * passage serve PORT               one thread serves all connections
 * passage ask ADDRESS PORT TIMES   so many requests, one after the other */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

static int serve(int port)
{
	struct sockaddr_in any = { .sin_family = AF_INET, .sin_port = htons(port) };
	struct epoll_event event = { .events = EPOLLIN };
	int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0), all = epoll_create1(0);
	char byte;

	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	event.data.fd = listener;
	if (bind(listener, (void *)&any, sizeof(any)) || listen(listener, 64) ||
	    epoll_ctl(all, EPOLL_CTL_ADD, listener, &event))
		return 1;
	for (;;) {
		if (epoll_wait(all, &event, 1, -1) != 1)
			continue;
		if (event.data.fd == listener) {
			event.events = EPOLLIN;
			event.data.fd = accept(listener, 0, 0);
			setsockopt(event.data.fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
			epoll_ctl(all, EPOLL_CTL_ADD, event.data.fd, &event);
		} else if (read(event.data.fd, &byte, 1) != 1 || write(event.data.fd, &byte, 1) != 1) {
			close(event.data.fd);
		}
	}
}

static int ask(const char *address, int port, int times)
{
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(port) };
	int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
	char byte = 'x';

	if (inet_pton(AF_INET, address, &to.sin_addr) != 1 || connect(fd, (void *)&to, sizeof(to)))
		return 1;
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	while (times-- > 0)
		if (write(fd, &byte, 1) != 1 || read(fd, &byte, 1) != 1)
			return 1;
	return 0;
}

int main(int argc, char **argv)
{
	if (argc == 3 && !strcmp(argv[1], "serve"))
		return serve(atoi(argv[2]));
	if (argc == 5 && !strcmp(argv[1], "ask"))
		return ask(argv[2], atoi(argv[3]), atoi(argv[4]));
	return 2;
}
