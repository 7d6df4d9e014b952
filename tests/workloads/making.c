/* TCP connections in the middle of connect: the listeners' queues are full, so no answer comes.
 * Requested by a blocking call and by non-blocking calls, by IPv4, by IPv4 from a socket of IPv6,
 * by IPv6. Afterwards they are established, and one is refused. */
#include "workload.h"
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>

#define PATIENCE_MS 60000
#define FILLERS 5
enum { PLAIN, WAITING, MAPPED, SIX, REFUSED, CALLS };
static const int families[CALLS] = {AF_INET, AF_INET, AF_INET6, AF_INET6, AF_INET};
static const int ports[CALLS] = {7300, 7300, 7300, 7301, 7302};

static socklen_t address(struct sockaddr_storage *a, int family, int port, int mapped) {
	socklen_t n = loopback(a, family, port);
	if (mapped)
		must(inet_pton(AF_INET6, "::ffff:127.0.0.1", &((struct sockaddr_in6 *)a)->sin6_addr) == 1);
	return n;
}

static int request(int fd, int call) {
	struct sockaddr_storage a;
	socklen_t n = address(&a, families[call], ports[call], call == MAPPED);
	return connect(fd, (void *)&a, n);
}

static int state(int fd) {
	struct tcp_info info;
	must(getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &(socklen_t){sizeof info}) == 0);
	return info.tcpi_state;
}

static void comes_to(int fd, int wanted) {
	for (int n = 0; state(fd) != wanted; n++) {
		must(n < PATIENCE_MS);
		nap(1);
	}
}

static int port_of(int fd, int (*name)(int, struct sockaddr *, socklen_t *)) {
	struct sockaddr_in6 a;
	must(name(fd, (void *)&a, &(socklen_t){sizeof a}) == 0);
	return ntohs(a.sin6_port);
}

/* Listens with a full accept queue. */
static int full(int family, int port, int fillers[FILLERS]) {
	struct sockaddr_storage a;
	socklen_t n = address(&a, family, port, 0);
	int fd = socket(family, SOCK_STREAM, 0), on = 1;
	must(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0);
	must(bind(fd, (void *)&a, n) == 0 && listen(fd, FILLERS - 1) == 0);
	for (int k = 0; k < FILLERS; k++) {
		fillers[k] = socket(family, SOCK_STREAM, 0);
		must(connect(fillers[k], (void *)&a, n) == 0);
	}
	return fd;
}

static void *wait_for_it(void *fd) {
	must(request(*(int *)fd, WAITING) == 0);
	return 0;
}

int main(void) {
	for (int round = 0; round < ROUNDS; round++) {
		int fillers[3][FILLERS], calls[CALLS], own[CALLS], n, error;
		int four = full(AF_INET, 7300, fillers[0]), six = full(AF_INET6, 7301, fillers[1]);
		int closed = full(AF_INET, 7302, fillers[2]);
		pthread_t waiting;
		for (n = 0; n < CALLS; n++) {
			int flags = n == WAITING ? 0 : SOCK_NONBLOCK;
			calls[n] = socket(families[n], SOCK_STREAM | flags, 0);
			if (n == WAITING)
				must(pthread_create(&waiting, 0, wait_for_it, &calls[n]) == 0);
			else
				must(request(calls[n], n) == -1 && errno == EINPROGRESS);
			comes_to(calls[n], TCP_SYN_SENT);
			own[n] = port_of(calls[n], getsockname);
		}

		ready(round);

		for (n = 0; n < CALLS; n++) {
			/* A checkpoint takes out waiting connections, so there may be space for a
			 * moment. */
			must(state(calls[n]) == TCP_SYN_SENT || state(calls[n]) == TCP_ESTABLISHED);
			must(port_of(calls[n], getsockname) == own[n]);
			must(!!(fcntl(calls[n], F_GETFL) & O_NONBLOCK) == (n != WAITING));
			must(getsockopt(calls[n], SOL_SOCKET, SO_ERROR, &error, &(socklen_t){4}) == 0);
			must(error == 0);
		}
		must(request(calls[PLAIN], PLAIN) == 0 || errno == EALREADY);
		/* There is space, and the SYN is sent again. */
		must(listen(four, 99) == 0 && listen(six, 99) == 0);
		for (int k = 0; k < 2 * FILLERS + 4; k++) {
			int listener = k < FILLERS + 3 ? four : six;
			struct pollfd p = {listener, POLLIN, 0};
			must(poll(&p, 1, PATIENCE_MS) == 1);
			int fd = accept(listener, 0, 0), port = port_of(fd, getpeername);
			for (n = 0; n < REFUSED; n++) {
				if (own[n] != port)
					continue;
				comes_to(calls[n], TCP_ESTABLISHED);
				char c = 'a' + n;
				must(send(calls[n], &c, 1, 0) == 1 && read(fd, &c, 1) == 1 && c == 'a' + n);
				struct pollfd answer = {calls[n], POLLIN, 0};
				must(write(fd, &c, 1) == 1 && poll(&answer, 1, PATIENCE_MS) == 1);
				must(read(calls[n], &c, 1) == 1 && c == 'a' + n);
				own[n] = 0;
			}
			close(fd);
		}
		must(pthread_join(waiting, 0) == 0);
		for (n = 0; n < REFUSED; n++)
			must(own[n] == 0);
		/* The listener is closed. */
		int was_made = state(calls[REFUSED]) == TCP_ESTABLISHED;
		must(close(closed) == 0);
		comes_to(calls[REFUSED], TCP_CLOSE);
		must(getsockopt(calls[REFUSED], SOL_SOCKET, SO_ERROR, &error, &(socklen_t){4}) == 0);
		must(error == ECONNREFUSED || (was_made && error == ECONNRESET));
		for (n = 0; n < CALLS; n++)
			close(calls[n]);
		for (n = 0; n < 3 * FILLERS; n++)
			close(fillers[n / FILLERS][n % FILLERS]);
		close(four), close(six);
	}
	ok();
}
