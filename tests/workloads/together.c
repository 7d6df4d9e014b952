/* Sockets that bind(2) would refuse as they are: listeners at one address without the option that let them
 * (SO_REUSEPORT), and a unix socket of a relative path in a directory that its process has left. */
#include "workload.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

static int reuse(int socket) {
	int value = -1;
	socklen_t length = sizeof value;
	must(getsockopt(socket, SOL_SOCKET, SO_REUSEPORT, &value, &length) == 0);
	return value;
}

int main(void) {
	int listeners[3], on = 1, off = 0;
	struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(7781)};
	at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	for (int n = 0; n < 3; n++) {
		listeners[n] = socket(AF_INET, SOCK_STREAM, 0);
		must(setsockopt(listeners[n], SOL_SOCKET, SO_REUSEPORT, &on, sizeof on) == 0);
		must(bind(listeners[n], (void *)&at, sizeof at) == 0 && listen(listeners[n], 5) == 0);
	}
	must(setsockopt(listeners[1], SOL_SOCKET, SO_REUSEPORT, &off, sizeof off) == 0);
	mkdir("/tmp", 0777);
	must(mkdir("/tmp/above", 0777) == 0 && mkdir("/tmp/above/below", 0777) == 0);
	must(chdir("/tmp/above") == 0);
	struct sockaddr_un name = {.sun_family = AF_UNIX, .sun_path = "relative"};
	int served = socket(AF_UNIX, SOCK_STREAM, 0);
	must(bind(served, (void *)&name, sizeof name) == 0 && listen(served, 5) == 0);
	must(chdir("/tmp/above/below") == 0);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		must(reuse(listeners[0]) == 1 && reuse(listeners[1]) == 0 && reuse(listeners[2]) == 1);
		int client = socket(AF_INET, SOCK_STREAM, 0);
		must(connect(client, (void *)&at, sizeof at) == 0 && close(client) == 0);
		strcpy(name.sun_path, "/tmp/above/relative");
		client = socket(AF_UNIX, SOCK_STREAM, 0);
		must(connect(client, (void *)&name, sizeof name) == 0);
		int accepted = accept(served, 0, 0);
		must(accepted >= 0 && close(accepted) == 0 && close(client) == 0);
		/* Those of the loop above wait at any of the three. */
		for (int n = 0; n < 3; n++) {
			must(fcntl(listeners[n], F_SETFL, O_NONBLOCK) == 0);
			while ((accepted = accept(listeners[n], 0, 0)) >= 0)
				close(accepted);
		}
	}
	ok();
}
