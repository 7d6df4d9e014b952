/* Connections to unix sockets in the accept queue, into which something was written: little, much,
 * packets, with an end, with open files, by another process, and by processes that have exited; in
 * order with connections without data. */
#include "workload.h"
#include <grp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/un.h>

#define LONG 150000
#define PACKET 20000

static struct sockaddr_un at = {AF_UNIX, "/embryo"}, packets_at = {AF_UNIX, "/packets"};
static char text[LONG], found[LONG];

static int listening(int type, struct sockaddr_un *where) {
	int fd = socket(AF_UNIX, type, 0), on = 1;
	must(bind(fd, (void *)where, sizeof *where) == 0 && chmod(where->sun_path, 0777) == 0);
	must(listen(fd, 16) == 0 && fcntl(fd, F_SETFL, O_NONBLOCK) == 0);
	must(setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &on, sizeof on) == 0);
	return fd;
}

static int caller(int type, struct sockaddr_un *where) {
	int fd = socket(AF_UNIX, type, 0);
	must(connect(fd, (void *)where, sizeof *where) == 0);
	return fd;
}

static void sends(int fd, const void *what, int n) {
	must(send(fd, what, n, MSG_NOSIGNAL) == n);
}

/* Receives so much at once; returns the number of open files, and stores the sender's
 * credentials. */
static int receives(int fd, const void *what, int n, int *fds, struct ucred *credentials) {
	char control[512];
	struct iovec iov = {found, n};
	struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control,
			   .msg_controllen = sizeof control};
	int count = 0;
	must(recvmsg(fd, &m, MSG_DONTWAIT) == n && memcmp(found, what, n) == 0);
	must(!(m.msg_flags & (MSG_TRUNC | MSG_CTRUNC)));
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c)) {
		must(c->cmsg_level == SOL_SOCKET);
		if (c->cmsg_type == SCM_CREDENTIALS && credentials)
			memcpy(credentials, CMSG_DATA(c), sizeof *credentials);
		if (c->cmsg_type == SCM_RIGHTS) {
			count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
			must(fds);
			memcpy(fds, CMSG_DATA(c), count * sizeof(int));
		}
	}
	return count;
}

static void sends_with(int fd, const char *what, int n, const int *fds, int count) {
	char control[CMSG_SPACE(sizeof(int) * 4)] = {0};
	struct iovec iov = {(void *)what, n};
	struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control,
			   .msg_controllen = CMSG_SPACE(sizeof(int) * count)};
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(sizeof(int) * count);
	memcpy(CMSG_DATA(c), fds, sizeof(int) * count);
	must(sendmsg(fd, &m, 0) == n);
}

/* Checks that no further data waits, and that both sides of the connection continue. */
static void check_both_sides(int accepted, int from) {
	char c;
	must(recv(accepted, &c, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
	must(fcntl(accepted, F_GETFL) == O_RDWR);
	sends(from, "more", 4), receives(accepted, "more", 4, 0, 0);
	sends(accepted, "answer", 6);
	must(recv(from, found, sizeof found, 0) == 6 && memcmp(found, "answer", 6) == 0);
	must(close(from) == 0 && close(accepted) == 0);
}

static int accepted(int listener) {
	int fd = accept(listener, 0, 0);
	must(fd >= 0);
	return fd;
}

int main(void) {
	for (int n = 0; n < LONG; n++)
		text[n] = n * 7 + n / 251;
	int streams = listening(SOCK_STREAM, &at), packets = listening(SOCK_SEQPACKET, &packets_at);
	for (int round = 0; round < ROUNDS; round++) {
		int file = open("/file", O_RDWR | O_CREAT | O_TRUNC, 0600), fds[4], through[2], to[2];
		must(file >= 0 && write(file, "0123456789", 10) == 10 && lseek(file, 3, SEEK_SET) == 3);
		must(pipe(through) == 0 && write(through[1], "piped", 5) == 5);
		must(pipe(to) == 0);
		int silent = caller(SOCK_STREAM, &at), spoken = caller(SOCK_STREAM, &at);
		int much = caller(SOCK_STREAM, &at), ended = caller(SOCK_STREAM, &at);
		int given = caller(SOCK_STREAM, &at), other = caller(SOCK_STREAM, &at);
		int last = caller(SOCK_STREAM, &at), packet = caller(SOCK_SEQPACKET, &packets_at);
		int gone = caller(SOCK_STREAM, &at), silently = caller(SOCK_STREAM, &at);
		sends(gone, "farewell", 8), sends_with(gone, "!", 1, &file, 1);
		must(close(gone) == 0 && close(silently) == 0);
		sends(spoken, "first", 5), sends(spoken, "second", 6);
		sends(much, text, LONG);
		sends(ended, "last words", 10);
		must(shutdown(ended, SHUT_WR) == 0);
		sends(given, "before", 6);
		sends_with(given, "with", 4, (int[]){file, through[0]}, 2);
		sends(given, "after", 5);
		sends_with(packet, "one", 3, &file, 1), sends(packet, text, PACKET), sends(packet, "three", 5);
		/* Another process writes to one of them. */
		pid_t pid = fork();
		must(pid >= 0);
		if (pid == 0) {
			must(setgroups(0, 0) == 0 && setresgid(1000, 1000, 1000) == 0);
			must(setresuid(1000, 1000, 1000) == 0);
			sends(other, "by another", 10);
			int own = caller(SOCK_STREAM, &at);
			sends(own, "mine", 4), close(own);
			must(write(to[1], "", 1) == 1);
			for (;;)
				pause();
		}
		must(read(to[0], found, 1) == 1);
		sends(other, "by the first", 12);
		if (getenv("LOST")) {
			sends_with(last, "lost", 4, &to[0], 1);
			close(to[0]);
			kill(pid, SIGKILL);
			must(waitpid(pid, 0, 0) == pid);
		}

		ready(round);
		if (getenv("LOST"))
			ok();

		struct ucred credentials = {0};
		check_both_sides(accepted(streams), silent);
		int fd = accepted(streams);
		receives(fd, "firstsecond", 11, 0, &credentials);
		must(credentials.pid == getpid() && credentials.uid == 0);
		check_both_sides(fd, spoken);
		fd = accepted(streams);
		for (int n = 0; n < LONG; n += LONG / 10)
			receives(fd, text + n, LONG / 10, 0, 0);
		check_both_sides(fd, much);
		fd = accepted(streams);
		receives(fd, "last words", 10, 0, 0);
		must(recv(fd, found, 1, 0) == 0);
		sends(fd, "heard", 5);
		must(recv(ended, found, 64, 0) == 5);
		must(close(fd) == 0 && close(ended) == 0);
		fd = accepted(streams);
		must(receives(fd, "before", 6, 0, 0) == 0);
		must(receives(fd, "with", 4, fds, 0) == 2);
		must(lseek(fds[0], 0, SEEK_CUR) == 3 && lseek(file, 1, SEEK_CUR) == 4);
		must(lseek(fds[0], 0, SEEK_CUR) == 4); /* the same open file */
		must(read(fds[1], found, 64) == 5 && memcmp(found, "piped", 5) == 0);
		must(close(fds[0]) == 0 && close(fds[1]) == 0);
		must(receives(fd, "after", 5, 0, 0) == 0);
		check_both_sides(fd, given);
		fd = accepted(streams);
		receives(fd, "by another", 10, 0, &credentials);
		must(credentials.pid == pid && credentials.uid == 1000 && credentials.gid == 1000);
		receives(fd, "by the first", 12, 0, &credentials);
		must(credentials.pid == getpid() && credentials.uid == 0);
		check_both_sides(fd, other);
		check_both_sides(accepted(streams), last);
		fd = accepted(streams);
		must(receives(fd, "farewell", 8, 0, 0) == 0 && receives(fd, "!", 1, fds, 0) == 1);
		must(lseek(fds[0], 0, SEEK_CUR) == 4 && close(fds[0]) == 0);
		must(recv(fd, found, 1, 0) == 0 && close(fd) == 0);
		fd = accepted(streams);
		must(recv(fd, found, 1, 0) == 0 && close(fd) == 0);
		fd = accepted(streams);
		socklen_t size = sizeof credentials;
		must(getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &size) == 0);
		must(credentials.pid == pid && credentials.uid == 1000 && credentials.gid == 1000);
		receives(fd, "mine", 4, 0, &credentials);
		must(credentials.pid == pid && credentials.uid == 1000);
		must(recv(fd, found, 1, 0) == 0 && close(fd) == 0);
		must(accept(streams, 0, 0) == -1 && errno == EAGAIN);
		fd = accepted(packets);
		must(receives(fd, "one", 3, fds, 0) == 1 && close(fds[0]) == 0);
		receives(fd, text, PACKET, 0, 0), receives(fd, "three", 5, 0, 0);
		check_both_sides(fd, packet);
		must(accept(packets, 0, 0) == -1 && errno == EAGAIN);
		must(kill(pid, SIGKILL) == 0 && waitpid(pid, 0, 0) == pid);
		close(file), close(through[0]), close(through[1]), close(to[0]), close(to[1]);
	}
	ok();
}
