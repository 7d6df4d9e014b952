/* UDP sockets that were shut down in part stay so. */
#include "workload.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

int main(void) {
	signal(SIGPIPE, SIG_IGN);
	int served = socket(AF_INET, SOCK_DGRAM, 0), sockets[3];
	struct sockaddr_in at = {.sin_family = AF_INET};
	at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	socklen_t length = sizeof at;
	must(bind(served, (void *)&at, length) == 0 && getsockname(served, (void *)&at, &length) == 0);
	for (int n = 0; n < 3; n++) {
		sockets[n] = socket(AF_INET, SOCK_DGRAM, 0);
		must(connect(sockets[n], (void *)&at, sizeof at) == 0);
	}
	must(shutdown(sockets[1], SHUT_WR) == 0 && shutdown(sockets[2], SHUT_RD) == 0);
	/* Without a peer, the one with an address, the other without. */
	int alone[2];
	for (int n = 0; n < 2; n++) {
		alone[n] = socket(AF_INET, SOCK_DGRAM, 0);
		at.sin_port = 0;
		must(n || bind(alone[n], (void *)&at, sizeof at) == 0);
		must(shutdown(alone[n], SHUT_RDWR) == -1 && errno == ENOTCONN);
	}
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		char c;
		must(send(sockets[0], "x", 1, 0) == 1 && recv(served, &c, 1, 0) == 1);
		must(send(sockets[1], "x", 1, 0) == -1 && errno == EPIPE);
		must(send(sockets[2], "x", 1, 0) == 1 && recv(served, &c, 1, 0) == 1);
		for (int n = 0; n < 3; n++) {
			struct pollfd polled = {sockets[n], POLLRDHUP};
			must(poll(&polled, 1, 0) == (n == 2));
		}
		for (int n = 0; n < 2; n++) {
			struct pollfd polled = {alone[n], POLLRDHUP};
			must(poll(&polled, 1, 0) == 1 && polled.revents == (POLLRDHUP | POLLHUP));
		}
	}
	ok();
}
