/* Pairs of unix sockets: stream, datagram and seqpacket, with data in flight, shared with a
 * child. */
#include "workload.h"
#include <poll.h>
#include <sys/socket.h>

int main(void) {
	int stream[2], dgram[2], seq[2], child[2];
	must(socketpair(AF_UNIX, SOCK_STREAM, 0, stream) == 0);
	must(socketpair(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK, 0, dgram) == 0);
	must(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, seq) == 0);
	must(socketpair(AF_UNIX, SOCK_STREAM, 0, child) == 0);
	if (fork() == 0) {
		char c;
		close(child[0]);
		while (read(child[1], &c, 1) == 1 && write(child[1], &c, 1) == 1)
			;
		_exit(0);
	}
	close(child[1]);
	must(write(stream[0], "to one", 6) == 6 && write(stream[1], "to zero", 7) == 7);
	must(write(dgram[0], "a", 1) == 1 && write(dgram[0], "bcd", 3) == 3);
	must(write(seq[1], "packet", 6) == 6 && write(seq[1], "next", 4) == 4);
	/* An error for the next call: the peer has closed and not read everything. */
	int reset[2], told[2];
	must(socketpair(AF_UNIX, SOCK_STREAM, 0, reset) == 0 && socketpair(AF_UNIX, SOCK_SEQPACKET, 0, told) == 0);
	must(write(reset[0], "unread", 6) == 6 && write(reset[1], "read", 4) == 4 && close(reset[1]) == 0);
	must(write(told[0], "unread", 6) == 6 && close(told[1]) == 0);
	/* A datagram socket that is shut down, without a peer. */
	int shut[2];
	must(socketpair(AF_UNIX, SOCK_DGRAM, 0, shut) == 0 && shutdown(shut[0], SHUT_RD) == 0 && close(shut[1]) == 0);
	char text[64], c;
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		must(recv(stream[1], text, 64, MSG_PEEK) == 6 && memcmp(text, "to one", 6) == 0);
		must(recv(stream[0], text, 64, MSG_PEEK) == 7 && memcmp(text, "to zero", 7) == 0);
		must(recv(dgram[1], text, 64, 0) == 1 && text[0] == 'a');
		must(recv(dgram[1], text, 64, 0) == 3 && memcmp(text, "bcd", 3) == 0);
		must(recv(dgram[1], text, 64, 0) == -1 && errno == EAGAIN);
		must(write(dgram[0], "a", 1) == 1 && write(dgram[0], "bcd", 3) == 3);
		must(recv(seq[0], text, 64, 0) == 6 && recv(seq[0], text, 64, 0) == 4);
		must(write(seq[1], "packet", 6) == 6 && write(seq[1], "next", 4) == 4);
		must(fcntl(seq[0], F_GETFD) == FD_CLOEXEC && fcntl(dgram[0], F_GETFL) & O_NONBLOCK);
		struct pollfd polled[] = {{reset[0], 0, 0}, {told[0], 0, 0}};
		must(poll(polled, 2, 0) == 2 && polled[0].revents & POLLERR && polled[1].revents & POLLERR);
		struct pollfd ended = {shut[0], POLLIN | POLLRDHUP, 0};
		must(poll(&ended, 1, 0) == 1 && ended.revents & POLLRDHUP);
		must(write(child[0], "x", 1) == 1 && read(child[0], &c, 1) == 1 && c == 'x');
	}
	must(read(reset[0], text, 64) == 4 && memcmp(text, "read", 4) == 0);
	must(read(reset[0], text, 64) == -1 && errno == ECONNRESET && read(reset[0], text, 64) == 0);
	must(read(told[0], text, 64) == -1 && errno == ECONNRESET && read(told[0], text, 64) == 0);
	ok();
}
