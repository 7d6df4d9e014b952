/* TCP connections that have ended and are not closed; and connections that both sides have ended,
 * with a last segment that waits for space or was lost. */
#include "workload.h"
#include <arpa/inet.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/utsname.h>

static int state(int fd) {
	struct tcp_info info;
	must(getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &(socklen_t){sizeof info}) == 0);
	return info.tcpi_state;
}

static void comes_to(int fd, int wanted) {
	for (int n = 0; state(fd) != wanted; n++) {
		must(n < 60000);
		nap(1);
	}
}

/* Connections that both sides have ended are refused before Linux 6.18. */
static int supports_ended(void) {
	struct utsname system;
	int major, minor;
	must(uname(&system) == 0 && sscanf(system.release, "%d.%d", &major, &minor) == 2);
	return major > 6 || (major == 6 && minor >= 18);
}

static unsigned char at(size_t n) { return n * 7 + n / 251; }

/* Sends as much as both queues hold. */
static size_t sends_much(int fd) {
	unsigned char block[4096];
	size_t written = 0;
	for (ssize_t n;; written += n) {
		for (size_t k = 0; k < sizeof block; k++)
			block[k] = at(written + k);
		n = send(fd, block, sizeof block, MSG_DONTWAIT);
		if (n < 0)
			break;
	}
	must(errno == EAGAIN && written > 100000);
	return written;
}

static void receives_much(int fd, size_t written) {
	unsigned char block[4096];
	for (size_t n = 0; n < written;) {
		ssize_t got = read(fd, block, sizeof block);
		must(got > 0);
		for (ssize_t k = 0; k < got; k++, n++)
			must(block[k] == at(n));
	}
	must(read(fd, block, 1) == 0);
}

static void receives(int fd, const char *text) {
	char found[16];
	must(recv(fd, found, strlen(text), MSG_WAITALL) == (ssize_t)strlen(text));
	must(memcmp(found, text, strlen(text)) == 0);
	must(read(fd, found, 1) == 0);
}

int main(void) {
	struct sockaddr_in at_port = {.sin_family = AF_INET, .sin_port = htons(7200)};
	at_port.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
	must(setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0);
	must(bind(listener, (void *)&at_port, sizeof at_port) == 0 && listen(listener, 9) == 0);
	for (int round = 0; round < ROUNDS; round++) {
		int over = socket(AF_INET, SOCK_STREAM, 0);
		char c;
		must(connect(over, (void *)&at_port, sizeof at_port) == 0);
		int other = accept(listener, 0, 0);
		must(other >= 0 && close(other) == 0);
		must(read(over, &c, 1) == 0 && shutdown(over, SHUT_WR) == 0);
		comes_to(over, TCP_CLOSE);

		/* The first side to end: the peer, own, own. */
		enum { LAST, CLOSING, LOST, PAIRS };
		if (!supports_ended()) {
			ready(round);
			must(read(over, &c, 1) == 0 && state(over) == TCP_CLOSE && close(over) == 0);
			continue;
		}
		int own[PAIRS], peer[PAIRS], n;
		for (n = 0; n < PAIRS; n++) {
			own[n] = socket(AF_INET, SOCK_STREAM, 0);
			must(connect(own[n], (void *)&at_port, sizeof at_port) == 0);
			peer[n] = accept(listener, 0, 0);
			must(peer[n] >= 0 && write(peer[n], "still", 5) == 5);
		}
		must(shutdown(peer[LAST], SHUT_WR) == 0);
		comes_to(own[LAST], TCP_CLOSE_WAIT);
		size_t last = sends_much(own[LAST]), closing = sends_much(own[CLOSING]);
		/* The peer receives nothing any more. */
		struct sock_filter nothing = BPF_STMT(BPF_RET | BPF_K, 0);
		struct sock_fprog filter = {1, &nothing};
		int has = setsockopt(peer[LOST], SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter) == 0;
		must(has || errno == EPERM); /* without CAP_NET_RAW */
		must(write(own[LOST], "last", 4) == 4);
		for (n = 0; n < (has ? PAIRS : LOST); n++)
			must(shutdown(own[n], SHUT_WR) == 0);
		for (n = CLOSING; n < (has ? PAIRS : LOST); n++)
			must(shutdown(peer[n], SHUT_WR) == 0);
		comes_to(own[LAST], TCP_LAST_ACK);
		comes_to(own[CLOSING], TCP_CLOSING);
		if (has)
			comes_to(own[LOST], TCP_CLOSING);

		ready(round);

		must(read(over, &c, 1) == 0 && state(over) == TCP_CLOSE);
		must(send(over, &c, 1, MSG_NOSIGNAL) == -1 && errno == EPIPE);
		close(over);

		/* Segments that the filter dropped are sent again. */
		must(state(own[LAST]) == TCP_LAST_ACK && state(own[CLOSING]) == TCP_CLOSING);
		if (has)
			must(setsockopt(peer[LOST], SOL_SOCKET, SO_DETACH_FILTER, &on, sizeof on) == 0);
		else
			must(shutdown(own[LOST], SHUT_WR) == 0 && shutdown(peer[LOST], SHUT_WR) == 0);
		for (n = 0; n < PAIRS; n++) {
			must(send(own[n], &c, 1, MSG_NOSIGNAL) == -1 && errno == EPIPE);
			receives(own[n], "still");
		}
		receives_much(peer[LAST], last), receives_much(peer[CLOSING], closing);
		receives(peer[LOST], "last");
		for (n = 0; n < PAIRS; n++) {
			comes_to(own[n], TCP_CLOSE);
			must(close(own[n]) == 0 && close(peer[n]) == 0);
		}
	}
	ok();
}
