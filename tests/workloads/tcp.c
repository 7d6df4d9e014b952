/* TCP connections: within a process, to a child, and with clients from outside; with data in both
 * queues, more than the peer's window, half closed on either side; not connected at all. */
#include "workload.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

static int listening(int port, int any) {
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};
	int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1;
	a.sin_addr.s_addr = any ? 0 : htonl(INADDR_LOOPBACK);
	must(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0);
	must(bind(fd, (void *)&a, sizeof a) == 0 && listen(fd, 9) == 0);
	return fd;
}

static void pair(int listener, int port, int *one, int *other) {
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};
	a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	*one = socket(AF_INET, SOCK_STREAM, 0);
	must(connect(*one, (void *)&a, sizeof a) == 0);
	*other = accept(listener, 0, 0);
	must(*other >= 0);
}

static void sends(int fd, const char *text) {
	must(send(fd, text, strlen(text), MSG_NOSIGNAL) == (ssize_t)strlen(text));
}

static void receives(int fd, const char *text) {
	char found[64];
	size_t n = strlen(text);
	must(recv(fd, found, n, MSG_WAITALL) == (ssize_t)n && memcmp(found, text, n) == 0);
}

static int state(int fd) {
	struct tcp_info info;
	must(getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &(socklen_t){sizeof info}) == 0);
	return info.tcpi_state;
}

static unsigned char at(size_t n) { return n * 7 + n / 251; }

int main(void) {
	int listener = listening(7000, 0), outside = listening(7001, 1);
	int one, other, full, slow, half, ended, child, on = 1;
	must(fcntl(outside, F_SETFL, O_NONBLOCK) == 0);
	pair(listener, 7000, &one, &other);
	must(setsockopt(one, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) == 0);
	pair(listener, 7000, &child, &half);
	if (fork() == 0) {
		char c;
		close(child);
		while (read(half, &c, 1) == 1 && write(half, &c, 1) == 1)
			;
		_exit(0);
	}
	close(half);
	if (fork() == 0) {
		/* Answers each byte of a client from outside with the next byte value. */
		int caller = -1;
		for (;;) {
			unsigned char c;
			ssize_t n = caller < 0 ? -1 : recv(caller, &c, 1, MSG_DONTWAIT);
			if (n == 1) {
				c++;
				must(write(caller, &c, 1) == 1);
				continue;
			}
			if (n == 0)
				close(caller), caller = -1;
			if (caller < 0)
				caller = accept(outside, 0, 0);
			nap(1);
		}
	}
	for (int round = 0; round < ROUNDS; round++) {
		sends(one, "to the other"), sends(other, "to the one");
		/* As much as both queues hold. */
		pair(listener, 7000, &full, &slow);
		size_t written = 0;
		unsigned char block[4096];
		for (ssize_t n;; written += n) {
			for (size_t k = 0; k < sizeof block; k++)
				block[k] = at(written + k);
			n = send(full, block, sizeof block, MSG_DONTWAIT);
			if (n < 0)
				break;
		}
		must(errno == EAGAIN && written > 100000);
		pair(listener, 7000, &half, &ended);
		sends(half, "last"), sends(ended, "still");
		must(shutdown(half, SHUT_WR) == 0);
		while (state(half) != TCP_FIN_WAIT2)
			nap(1);
		must(state(ended) == TCP_CLOSE_WAIT);
		int fresh = socket(AF_INET, SOCK_STREAM, 0);

		ready(round);

		receives(other, "to the other"), receives(one, "to the one");
		must(getsockopt(one, IPPROTO_TCP, TCP_NODELAY, &on, &(socklen_t){4}) == 0 && on);
		for (int k = 0; k < 100; k++)
			sends(one, "ping"), receives(other, "ping"), sends(other, "pong"), receives(one, "pong");
		struct sockaddr_in a;
		must(getpeername(one, (void *)&a, &(socklen_t){sizeof a}) == 0);
		must(a.sin_port == htons(7000) && a.sin_addr.s_addr == htonl(INADDR_LOOPBACK));

		must(close(full) == 0);
		for (size_t n = 0; n < written;) {
			ssize_t got = read(slow, block, sizeof block);
			must(got > 0);
			for (ssize_t k = 0; k < got; k++, n++)
				must(block[k] == at(n));
		}
		must(read(slow, block, 1) == 0 && close(slow) == 0);

		/* The last segment of either side may have to be sent once more. */
		for (int n = 0;
		     n < 10000 && (state(half) != TCP_FIN_WAIT2 || state(ended) != TCP_CLOSE_WAIT); n++)
			nap(1);
		must(state(half) == TCP_FIN_WAIT2 && state(ended) == TCP_CLOSE_WAIT);
		receives(ended, "last");
		must(read(ended, block, 1) == 0);
		receives(half, "still");
		sends(ended, "more"), receives(half, "more");
		must(close(ended) == 0 && read(half, block, 1) == 0 && close(half) == 0);

		char c = 0;
		must(write(child, "y", 1) == 1 && read(child, &c, 1) == 1 && c == 'y');
		a.sin_port = htons(7000);
		must(connect(fresh, (void *)&a, sizeof a) == 0);
		int accepted = accept(listener, 0, 0);
		sends(fresh, "new"), receives(accepted, "new");
		close(fresh), close(accepted);
	}
	ok();
}
