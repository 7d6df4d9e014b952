/* TCP connections that are over, and that nobody has closed. */
#include "workload.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

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

int main(void) {
	struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(7200)};
	at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
	must(setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0);
	must(bind(listener, (void *)&at, sizeof at) == 0 && listen(listener, 9) == 0);
	for (int round = 0; round < ROUNDS; round++) {
		int over = socket(AF_INET, SOCK_STREAM, 0);
		char c;
		must(connect(over, (void *)&at, sizeof at) == 0);
		int other = accept(listener, 0, 0);
		must(other >= 0 && close(other) == 0);
		must(read(over, &c, 1) == 0 && shutdown(over, SHUT_WR) == 0);
		comes_to(over, TCP_CLOSE);

		ready(round);

		must(read(over, &c, 1) == 0 && state(over) == TCP_CLOSE);
		must(send(over, &c, 1, MSG_NOSIGNAL) == -1 && errno == EPIPE);
		close(over);
	}
	ok();
}
