/* How much a segment of a TCP connection holds, and its window at most: as much as before. */
#include "workload.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

static int segment(int socket) {
	int bytes = 0;
	socklen_t length = sizeof bytes;
	must(getsockopt(socket, IPPROTO_TCP, TCP_MAXSEG, &bytes, &length) == 0);
	return bytes;
}

static int window(int socket) {
	int bytes = 0;
	socklen_t length = sizeof bytes;
	must(getsockopt(socket, IPPROTO_TCP, TCP_WINDOW_CLAMP, &bytes, &length) == 0);
	return bytes;
}

/* Both ends of a connection to itself. */
static void connected(int ends[2], struct sockaddr *at, socklen_t length) {
	int listener = socket(at->sa_family, SOCK_STREAM, 0);
	must(listener >= 0 && bind(listener, at, length) == 0 && listen(listener, 5) == 0);
	must(getsockname(listener, at, &length) == 0);
	ends[0] = socket(at->sa_family, SOCK_STREAM, 0);
	must(connect(ends[0], at, length) == 0);
	ends[1] = accept(listener, 0, 0);
	must(ends[1] >= 0 && close(listener) == 0);
}

int main(void) {
	int ends[4];
	struct sockaddr_in four = {.sin_family = AF_INET};
	struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_addr = in6addr_loopback};
	four.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	connected(ends, (void *)&four, sizeof four);
	connected(ends + 2, (void *)&six, sizeof six);
	int narrow = 20000;
	must(setsockopt(ends[0], IPPROTO_TCP, TCP_WINDOW_CLAMP, &narrow, sizeof narrow) == 0);
	/* A window that has grown beyond what TCP_MAXSEG can be set to. */
	static char data[60000];
	for (int n = 0; n < 100 && segment(ends[2]) <= 40000; n++) {
		must(write(ends[2], data, sizeof data) == sizeof data);
		for (size_t got = 0; got < sizeof data;) {
			ssize_t part = read(ends[3], data, sizeof data);
			must(part > 0);
			got += part;
		}
	}
	must(segment(ends[2]) > 40000);
	for (int round = 0; round < ROUNDS; round++) {
		int windows[4], segments[4];
		for (int n = 0; n < 4; n++)
			windows[n] = window(ends[n]), segments[n] = segment(ends[n]);
		ready(round);
		char text[4] = "";
		for (int n = 0; n < 4; n++) {
			must(window(ends[n]) == windows[n]);
			/* Half of a window, which an acknowledgement of a small packet may raise to 65,536 (of version 6 from 65,464). */
			int more = segment(ends[n]) - segments[n];
			must(segments[n] > 16000 && more >= 0 && more <= 40);
			must(write(ends[n], "abc", 3) == 3 && read(ends[n ^ 1], text, 3) == 3);
		}
	}
	ok();
}
