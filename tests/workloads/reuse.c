/* Options of TCP connections that a look at them would change: SO_REUSEADDR, SO_PEEK_OFF. */
#include "workload.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

static int option(int socket, int name) {
	int value = -1;
	socklen_t length = sizeof value;
	must(getsockopt(socket, SOL_SOCKET, name, &value, &length) == 0);
	return value;
}

int main(void) {
	int one = 1, two = 2;
	struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(7779)};
	at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	int listener = socket(AF_INET, SOCK_STREAM, 0);
	must(setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0);
	must(bind(listener, (void *)&at, sizeof at) == 0 && listen(listener, 5) == 0);
	int client = socket(AF_INET, SOCK_STREAM, 0), plain = socket(AF_INET, SOCK_STREAM, 0);
	must(setsockopt(client, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0);
	must(connect(client, (void *)&at, sizeof at) == 0);
	int server = accept(listener, 0, 0);
	must(server >= 0 && connect(plain, (void *)&at, sizeof at) == 0);
	/* KERNEL(6.9): before, it is for unix and UDP sockets alone. */
	int peeks = setsockopt(client, SOL_SOCKET, SO_PEEK_OFF, &two, sizeof two) == 0;
	must(write(server, "abcdef", 6) == 6);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		must(option(client, SO_REUSEADDR) == 1 && option(server, SO_REUSEADDR) == 1);
		must(option(plain, SO_REUSEADDR) == 0);
		if (peeks) {
			char text[8] = "";
			must(option(client, SO_PEEK_OFF) == 2);
			must(recv(client, text, sizeof text, MSG_PEEK) == 4 && !strcmp(text, "cdef"));
			must(setsockopt(client, SOL_SOCKET, SO_PEEK_OFF, &two, sizeof two) == 0);
		}
	}
	char text[8] = "";
	int off = -1;
	must(setsockopt(client, SOL_SOCKET, SO_PEEK_OFF, &off, sizeof off) == 0 || !peeks);
	must(read(client, text, sizeof text) == 6 && !strcmp(text, "abcdef"));
	ok();
}
