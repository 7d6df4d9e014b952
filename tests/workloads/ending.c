/* TCP connections that are being made, and such as both sides have ended, one after the other, with
 * data that the peer has still to read; and one that is over. */
#include "workload.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

static struct sockaddr_in at(int port) {
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};
	a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	return a;
}

static int listening(int port, int backlog) {
	struct sockaddr_in a = at(port);
	int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1;
	must(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0);
	must(bind(fd, (void *)&a, sizeof a) == 0 && listen(fd, backlog) == 0);
	return fd;
}

static void pair(int listener, int port, int *one, int *other) {
	struct sockaddr_in a = at(port);
	*one = socket(AF_INET, SOCK_STREAM, 0);
	must(connect(*one, (void *)&a, sizeof a) == 0);
	*other = accept(listener, 0, 0);
	must(*other >= 0);
}

static int state(int fd) {
	struct tcp_info info;
	must(getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &(socklen_t){sizeof info}) == 0);
	return info.tcpi_state;
}

static void comes_to(int fd, int wanted) {
	for (int n = 0; state(fd) != wanted; n++) {
		must(n < 5000);
		nap(1);
	}
}

static unsigned char at_byte(size_t n) { return n * 7 + n / 251; }

/* As much as both queues hold; gives how much that is. */
static size_t fill(int fd) {
	unsigned char block[4096];
	size_t written = 0;
	int small = 16384;
	must(setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof small) == 0);
	for (ssize_t n;; written += n) {
		for (size_t k = 0; k < sizeof block; k++)
			block[k] = at_byte(written + k);
		struct pollfd p = {.fd = fd, .events = POLLOUT};
		/* The other side may only be slow to take it. */
		if (poll(&p, 1, 300) == 0)
			return written;
		n = send(fd, block, sizeof block, MSG_DONTWAIT);
		must(n > 0);
	}
}

/* Reads all of that, and then the end. */
static void empty(int fd, size_t written) {
	unsigned char block[4096];
	for (size_t n = 0; n < written;) {
		ssize_t got = read(fd, block, sizeof block);
		must(got > 0);
		for (ssize_t k = 0; k < got; k++, n++)
			must(block[k] == at_byte(n));
	}
	must(read(fd, block, 1) == 0);
}

int main(void) {
	int listener = listening(7200, 9);
	for (int round = 0; round < ROUNDS; round++) {
		/* One waits here, and there is no room for more: whoever asks is not answered. */
		struct sockaddr_in a = at(7201);
		int deaf = listening(7201, 0), first = socket(AF_INET, SOCK_STREAM, 0);
		must(connect(first, (void *)&a, sizeof a) == 0);
		int asks = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
		must(connect(asks, (void *)&a, sizeof a) == -1 && errno == EINPROGRESS);
		must(state(asks) == TCP_SYN_SENT);
		int child = fork();
		if (child == 0) {
			int waits = socket(AF_INET, SOCK_STREAM, 0);
			char text[5];
			must(connect(waits, (void *)&a, sizeof a) == 0);
			must(recv(waits, text, 5, MSG_WAITALL) == 5 && memcmp(text, "hello", 5) == 0);
			_exit(0);
		}

		int last, slow, over, other;
		char c;
		pair(listener, 7200, &last, &slow);
		size_t behind = fill(last);
		must(shutdown(slow, SHUT_WR) == 0);
		comes_to(last, TCP_CLOSE_WAIT);
		must(shutdown(last, SHUT_WR) == 0);
		comes_to(last, TCP_LAST_ACK);
		pair(listener, 7200, &over, &other);
		must(close(other) == 0 && read(over, &c, 1) == 0 && shutdown(over, SHUT_WR) == 0);
		comes_to(over, TCP_CLOSE);

		ready(round);

		must(state(asks) == TCP_SYN_SENT && fcntl(asks, F_GETFL) & O_NONBLOCK);
		struct pollfd p = {.fd = asks, .events = POLLOUT};
		must(poll(&p, 1, 0) == 0);
		must(listen(deaf, 9) == 0);
		for (int n = 0; n < 3; n++) {
			int accepted = accept(deaf, 0, 0);
			must(accepted >= 0 && send(accepted, "hello", 5, MSG_NOSIGNAL) == 5);
			close(accepted);
		}
		int status;
		must(poll(&p, 1, 20000) == 1 && p.revents & POLLOUT);
		must(waitpid(child, &status, 0) == child && status == 0);
		must(fcntl(asks, F_SETFL, 0) == 0 && read(asks, &c, 1) == 1 && c == 'h');
		must(read(first, &c, 1) == 1 && c == 'h' && close(first) == 0);
		must(close(asks) == 0 && close(deaf) == 0);

		must(state(last) == TCP_LAST_ACK && read(last, &c, 1) == 0);
		empty(slow, behind), comes_to(last, TCP_CLOSE);
		must(read(over, &c, 1) == 0 && state(over) == TCP_CLOSE);
		must(send(over, &c, 1, MSG_NOSIGNAL) == -1 && errno == EPIPE);
		close(last), close(slow), close(over);
	}
	ok();
}
