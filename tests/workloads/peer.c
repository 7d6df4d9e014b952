/* Credentials of the peer of a unix socket: of accepted connections, of waiting ones, of
 * connections with a closed peer, of pairs, of listeners, and of messages in flight; of processes
 * of several users, some of which have exited. */
#include "workload.h"
#include <grp.h>
#include <sys/socket.h>
#include <sys/un.h>

static struct sockaddr_un at = {AF_UNIX, "/peer"}, letters = {AF_UNIX, "/letters"};
static int go[2];

/* A child changes its user, acts once, and exits or stays. */
enum { STAYS, ENDS };
static pid_t as(uid_t id, int how, void (*act)(int), int fd) {
	int done[2];
	char c;
	must(pipe(done) == 0);
	pid_t pid = fork();
	must(pid >= 0);
	if (pid == 0) {
		close(go[1]);
		must(setgroups(2, (gid_t[]){id + 1, id + 2}) == 0);
		must(setresgid(id, id, id) == 0 && setresuid(id, id, id) == 0);
		act(fd);
		must(write(done[1], "", 1) == 1);
		while (how == STAYS && read(go[0], &c, 1) != 0)
			;
		_exit(0);
	}
	must(read(done[0], &c, 1) == 1 && close(done[0]) == 0 && close(done[1]) == 0);
	if (how == ENDS)
		must(waitpid(pid, 0, 0) == pid);
	return pid;
}

static void is_peer(int fd, pid_t pid, uid_t id) {
	struct ucred credentials;
	socklen_t size = sizeof credentials;
	must(getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &size) == 0);
	must(credentials.uid == id && credentials.gid == id);
	if (pid)
		must(credentials.pid == pid);
	else
		must(credentials.pid > 0 && credentials.pid != getpid());
	gid_t groups[8];
	size = sizeof groups;
	must(getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, groups, &size) == 0);
	if (id)
		must(size == 8 && groups[0] == id + 1 && groups[1] == id + 2);
}

static void connects(int fd) { must(connect(fd, (void *)&at, sizeof at) == 0); }
static void listens(int fd) { must(listen(fd, 8) == 0); }
static void writes(int fd) {
	must(sendto(fd, "letter", 6, 0, (void *)&letters, sizeof letters) == 6);
}
static void speaks(int fd) { must(write(fd, "spoken", 6) == 6); }

static void letter_of(int fd, const char *text, pid_t pid, uid_t id) {
	char data[16], control[CMSG_SPACE(sizeof(struct ucred))];
	struct iovec piece = {data, sizeof data};
	struct msghdr head = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = control};
	head.msg_controllen = sizeof control;
	must(recvmsg(fd, &head, MSG_DONTWAIT) == 6 && memcmp(data, text, 6) == 0);
	struct cmsghdr *one = CMSG_FIRSTHDR(&head);
	must(one && one->cmsg_type == SCM_CREDENTIALS);
	struct ucred credentials;
	memcpy(&credentials, CMSG_DATA(one), sizeof credentials);
	must(credentials.uid == id && credentials.gid == id);
	if (pid)
		must(credentials.pid == pid);
	else
		must(credentials.pid > 0 && credentials.pid != getpid());
}

static int new(int type) {
	int fd = socket(AF_UNIX, type, 0);
	must(fd >= 0);
	return fd;
}

int main(void) {
	must(chmod("/", 0777) == 0 && pipe(go) == 0);
	int server = new(SOCK_STREAM), box = new(SOCK_DGRAM), on = 1;
	must(bind(server, (void *)&at, sizeof at) == 0 && chmod("/peer", 0777) == 0);
	must(bind(box, (void *)&letters, sizeof letters) == 0 && chmod("/letters", 0777) == 0);
	must(setsockopt(box, SOL_SOCKET, SO_PASSCRED, &on, sizeof on) == 0);

	/* Two processes of different users call listen, one after the other. */
	pid_t first = as(1001, STAYS, listens, server);
	int early = new(SOCK_STREAM), dead = new(SOCK_STREAM), mine = new(SOCK_STREAM);
	pid_t caller = as(1002, STAYS, connects, early);
	int of_early = accept(server, 0, 0);
	pid_t second = as(1003, STAYS, listens, server);
	as(1004, ENDS, connects, dead);
	int of_dead = accept(server, 0, 0);
	connects(mine);
	int of_mine = accept(server, 0, 0);
	/* The other side is closed. */
	int lost = new(SOCK_STREAM);
	as(1005, ENDS, connects, lost);
	int of_lost = accept(server, 0, 0);
	must(close(lost) == 0);
	int pair[2];
	must(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
	must(setsockopt(pair[1], SOL_SOCKET, SO_PASSCRED, &on, sizeof on) == 0);

	for (int round = 0; round < ROUNDS; round++) {
		/* Only the waiting client has its connection open. */
		int waits = new(SOCK_STREAM);
		pid_t waiter = as(1006, STAYS, connects, waits);
		must(close(waits) == 0);
		int sender = new(SOCK_DGRAM);
		pid_t writer = as(1007, STAYS, writes, sender);
		as(1008, ENDS, writes, sender);
		writes(sender);
		pid_t speaker = as(1009, STAYS, speaks, pair[0]);
		speaks(pair[0]);

		ready(round);

		is_peer(server, second, 1003);
		is_peer(early, first, 1001), is_peer(of_early, caller, 1002);
		is_peer(dead, second, 1003), is_peer(of_dead, 0, 1004);
		is_peer(mine, second, 1003), is_peer(of_mine, getpid(), 0);
		is_peer(of_lost, 0, 1005);
		is_peer(pair[0], getpid(), 0), is_peer(pair[1], getpid(), 0);
		int of_waits = accept(server, 0, 0);
		must(of_waits >= 0);
		is_peer(of_waits, waiter, 1006);
		letter_of(box, "letter", writer, 1007);
		letter_of(box, "letter", 0, 1008);
		letter_of(box, "letter", getpid(), 0);
		letter_of(pair[1], "spoken", speaker, 1009);
		letter_of(pair[1], "spoken", getpid(), 0);
		must(close(of_waits) == 0 && close(sender) == 0);
		pid_t all[] = {waiter, writer, speaker};
		for (int n = 0; n < 3; n++)
			must(kill(all[n], SIGKILL) == 0 && waitpid(all[n], 0, 0) == all[n]);
	}
	ok();
}
