/* Unix sockets with names: paths and abstract ones, listening with waiting connections, accepted
 * ones across processes, datagrams and packets in flight, names with a removed or replaced file, a
 * relative one, half-closed connections, options. */
#include "workload.h"
#include <stddef.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

static socklen_t name(struct sockaddr_un *a, const char *text) {
	memset(a, 0, sizeof *a);
	a->sun_family = AF_UNIX;
	strcpy(a->sun_path, text);
	if (text[0] != '@')
		return offsetof(struct sockaddr_un, sun_path) + strlen(text) + 1;
	a->sun_path[0] = 0;
	return offsetof(struct sockaddr_un, sun_path) + strlen(text);
}

static int bound(int type, const char *text) {
	struct sockaddr_un a;
	socklen_t n = name(&a, text);
	int fd = socket(AF_UNIX, type, 0);
	must(fd >= 0 && bind(fd, (void *)&a, n) == 0);
	return fd;
}

static int listening(int type, const char *text) {
	int fd = bound(type, text);
	must(listen(fd, 5) == 0);
	return fd;
}

static void to(int fd, const char *text) {
	struct sockaddr_un a;
	socklen_t n = name(&a, text);
	must(connect(fd, (void *)&a, n) == 0);
}

static int connected(int type, const char *text) {
	int fd = socket(AF_UNIX, type, 0);
	to(fd, text);
	return fd;
}

static int is_named(const struct sockaddr_un *a, socklen_t n, const char *text) {
	struct sockaddr_un b;
	socklen_t m = name(&b, text);
	return n == m && memcmp(a, &b, n) == 0;
}

static int own_name_is(int fd, const char *text) {
	struct sockaddr_un a;
	socklen_t n = sizeof a;
	must(getsockname(fd, (void *)&a, &n) == 0);
	return is_named(&a, n, text);
}

static int peer_name_is(int fd, const char *text) {
	struct sockaddr_un a;
	socklen_t n = sizeof a;
	must(getpeername(fd, (void *)&a, &n) == 0);
	return is_named(&a, n, text);
}

static void sends(int fd, const char *text) {
	must(write(fd, text, strlen(text)) == (ssize_t)strlen(text));
}

static void receives(int fd, const char *text) {
	char found[64];
	ssize_t n = recv(fd, found, sizeof found, MSG_DONTWAIT);
	must(n == (ssize_t)strlen(text) && memcmp(found, text, n) == 0);
}

static void receives_from(int fd, const char *text, const char *sender) {
	char found[64];
	struct sockaddr_un a;
	socklen_t size = sizeof a;
	ssize_t n = recvfrom(fd, found, sizeof found, MSG_DONTWAIT, (void *)&a, &size);
	must(n == (ssize_t)strlen(text) && memcmp(found, text, n) == 0);
	must(sender ? is_named(&a, size, sender) : size <= 2);
}

static void sends_to(int fd, const char *text, const char *destination) {
	struct sockaddr_un a;
	socklen_t n = name(&a, destination);
	must(sendto(fd, text, strlen(text), 0, (void *)&a, n) == (ssize_t)strlen(text));
}

static void must_hold(const char *path, const char *text) {
	char found[64];
	int fd = open(path, O_RDONLY);
	must(fd >= 0 && read(fd, found, 64) == (ssize_t)strlen(text));
	must(memcmp(found, text, strlen(text)) == 0 && close(fd) == 0);
}

int main(void) {
	must(mkdir("/dir", 0755) == 0 && chdir("/dir") == 0);
	int relative = listening(SOCK_STREAM, "relative");
	int server = listening(SOCK_STREAM, "/server"), packets = listening(SOCK_SEQPACKET, "@packets");
	must(chmod("/server", 0640) == 0);
	must(fcntl(server, F_SETFL, O_NONBLOCK) == 0);

	/* A client in another process. */
	if (fork() == 0) {
		char c;
		int fd = connected(SOCK_STREAM, "/server");
		while (read(fd, &c, 1) == 1 && write(fd, &c, 1) == 1)
			;
		_exit(0);
	}
	int served = -1;
	while ((served = accept(server, 0, 0)) < 0)
		nap(1);

	/* A name with another file by now, and one with a closed socket. */
	int gone = listening(SOCK_STREAM, "/gone"), gone_one = connected(SOCK_STREAM, "/gone");
	int gone_other = accept(gone, 0, 0);
	must(unlink("/gone") == 0);
	int file = open("/gone", O_CREAT | O_WRONLY, 0600);
	must(write(file, "mine", 4) == 4 && close(file) == 0);
	int old = listening(SOCK_STREAM, "/old"), old_one = connected(SOCK_STREAM, "/old");
	int old_other = accept(old, 0, 0);
	must(close(old) == 0);

	int packet = connected(SOCK_SEQPACKET, "@packets"), packet_other = accept(packets, 0, 0);
	int dgram = bound(SOCK_DGRAM, "/dgram"), sender = bound(SOCK_DGRAM, "@sender");
	int speaker = connected(SOCK_DGRAM, "/dgram");
	int fresh = socket(AF_UNIX, SOCK_STREAM, 0), half[2];
	must(socketpair(AF_UNIX, SOCK_STREAM, 0, half) == 0 && shutdown(half[0], SHUT_WR) == 0);

	int size = 65536;
	struct timeval limit = {3, 500000};
	must(setsockopt(served, SOL_SOCKET, SO_RCVBUF, &size, sizeof size) == 0);
	must(setsockopt(served, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
	int on = 1;
	must(setsockopt(sender, SOL_SOCKET, SO_PASSCRED, &on, sizeof on) == 0);

	for (int round = 0; round < ROUNDS; round++) {
		sends(gone_one, "to the other");
		sends(gone_other, "to the one");
		sends(old_one, "old");
		sends(packet, "first packet"), sends(packet, "second");
		sends(packet_other, "back");
		sends_to(sender, "from the sender", "/dgram");
		sends(speaker, "nobody");
		int dead = bound(SOCK_DGRAM, "@dead");
		sends_to(dead, "from the dead", "/dgram");
		close(dead);
		int first = bound(SOCK_STREAM, "@first"), second = socket(AF_UNIX, SOCK_STREAM, 0);
		to(first, "/server"), to(second, "/server");
		int closed[2];
		must(socketpair(AF_UNIX, SOCK_STREAM, 0, closed) == 0);
		sends(closed[1], "last words");
		close(closed[1]);

		ready(round);

		receives(gone_other, "to the other"), receives(gone_one, "to the one");
		must(own_name_is(gone_other, "/gone") && peer_name_is(gone_one, "/gone"));
		must(own_name_is(gone, "/gone"));
		must_hold("/gone", "mine");
		receives(old_other, "old");
		must(own_name_is(old_other, "/old") && peer_name_is(old_one, "/old"));
		must(access("/old", F_OK) == 0 && access("/old.dormouse-aside", F_OK) != 0);
		receives(packet_other, "first packet"), receives(packet_other, "second");
		receives(packet, "back");
		must(own_name_is(packet_other, "@packets"));
		receives_from(dgram, "from the sender", "@sender");
		receives_from(dgram, "nobody", 0);
		receives_from(dgram, "from the dead", "@dead");
		must(recv(dgram, &(char){0}, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
		must(peer_name_is(speaker, "/dgram"));

		/* Waiting connections, in their order. */
		struct sockaddr_un a;
		socklen_t n = sizeof a;
		int fd = accept(server, (void *)&a, &n);
		must(fd >= 0 && is_named(&a, n, "@first"));
		sends(first, "hello"), receives(fd, "hello");
		sends(fd, "there"), receives(first, "there");
		close(fd), close(first);
		fd = accept(server, 0, 0);
		must(fd >= 0);
		sends(second, "hello"), receives(fd, "hello");
		close(fd), close(second);
		must(accept(server, 0, 0) == -1 && errno == EAGAIN);

		receives(closed[0], "last words");
		must(recv(closed[0], &(char){0}, 1, 0) == 0);
		close(closed[0]);
		must(write(half[1], "x", 1) == 1 && read(half[0], &(char){0}, 1) == 1);
		must(read(half[1], &(char){0}, 1) == 0);
		must(send(half[0], "x", 1, MSG_NOSIGNAL) == -1 && errno == EPIPE);

		/* The connection of the other process, and its options. */
		char c = 0;
		struct timeval t;
		must(write(served, "y", 1) == 1 && read(served, &c, 1) == 1 && c == 'y');
		must(own_name_is(served, "/server"));
		must(getsockopt(served, SOL_SOCKET, SO_RCVBUF, &size, &(socklen_t){4}) == 0);
		must(size == 131072);
		must(getsockopt(served, SOL_SOCKET, SO_RCVTIMEO, &t, &(socklen_t){sizeof t}) == 0);
		must(t.tv_sec == 3 && t.tv_usec / 100000 == 5);
		must(getsockopt(sender, SOL_SOCKET, SO_PASSCRED, &on, &(socklen_t){4}) == 0 && on == 1);

		/* Names lead to the same sockets. */
		struct stat s;
		must(stat("/server", &s) == 0 && (s.st_mode & 07777) == 0640 && s.st_uid == 0);
		int here = connected(SOCK_STREAM, "relative"), there = accept(relative, 0, 0);
		sends(here, "near"), receives(there, "near");
		close(here), close(there);
		here = connected(SOCK_SEQPACKET, "@packets"), there = accept(packets, 0, 0);
		sends(here, "new"), receives(there, "new");
		close(here), close(there);
		must(bind(fresh, (void *)&a, name(&a, "@fresh")) == 0 && close(fresh) == 0);
		fresh = socket(AF_UNIX, SOCK_STREAM, 0);
	}
	ok();
}
