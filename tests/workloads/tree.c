/* A tree of processes: sessions, groups, a daemon without its maker, zombies, stopped processes,
 * pipes and memory between them, with kept ids. */
#include "workload.h"

struct shared {
	int counts[8];
	int pids[8];
};
static struct shared *shared;

/* Each child increases its count at each request. */
static void child(int n, int in, int out) {
	shared->pids[n] = getpid();
	char c;
	while (read(in, &c, 1) == 1) {
		shared->counts[n]++;
		if (write(out, &c, 1) != 1)
			_exit(3);
	}
	_exit(4);
}

int main(void) {
	int ask[8][2], answer[2];
	shared = mmap(0, 8192, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	must(shared != MAP_FAILED && pipe(answer) == 0);
	for (int n = 0; n < 8; n++)
		must(pipe(ask[n]) == 0);
	/* 0: a plain child. 1: leads a group. 2: is in that group. 3: leads a session. */
	int plain = fork();
	if (plain == 0)
		child(0, ask[0][0], answer[1]);
	int leader = fork();
	if (leader == 0) {
		setpgid(0, 0);
		child(1, ask[1][0], answer[1]);
	}
	must(setpgid(leader, leader) == 0);
	int member = fork();
	if (member == 0)
		child(2, ask[2][0], answer[1]);
	must(setpgid(member, leader) == 0);
	int session = fork();
	if (session == 0) {
		/* One child before setsid, and one after. */
		if (fork() == 0)
			child(4, ask[4][0], answer[1]);
		setsid();
		if (fork() == 0)
			child(5, ask[5][0], answer[1]);
		child(3, ask[3][0], answer[1]);
	}
	/* A daemon: its maker led the session and has exited. */
	int maker = fork();
	if (maker == 0) {
		setsid();
		if (fork() == 0)
			child(6, ask[6][0], answer[1]);
		_exit(0);
	}
	must(waitpid(maker, 0, 0) == maker);
	/* A member of a group without its leader. */
	int gone = fork();
	if (gone == 0) {
		setpgid(0, 0);
		pause();
		_exit(0);
	}
	must(setpgid(gone, gone) == 0);
	int orphan = fork();
	if (orphan == 0)
		child(7, ask[7][0], answer[1]);
	must(setpgid(orphan, gone) == 0);
	must(kill(gone, SIGKILL) == 0 && waitpid(gone, 0, 0) == gone);
	int dead = fork();
	if (dead == 0)
		_exit(37);
	int killed = fork();
	if (killed == 0) {
		pause();
		_exit(0);
	}
	must(kill(killed, SIGTERM) == 0);
	for (int n = 0; n < 8; n++)
		while (!((volatile struct shared *)shared)->pids[n])
			nap(1);
	nap(20);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		for (int n = 0; n < 8; n++) {
			char c = 'a' + n, got;
			must(write(ask[n][1], &c, 1) == 1 && read(answer[0], &got, 1) == 1 && got == c);
			must(shared->counts[n] == round + 1);
			must(kill(shared->pids[n], 0) == 0);
		}
		must(getsid(plain) == getsid(0) && getpgid(plain) == getpgid(0));
		must(getpgid(leader) == leader && getpgid(member) == leader);
		must(getsid(session) == session && shared->pids[3] == session);
		must(getsid(shared->pids[4]) == getsid(0) && getsid(shared->pids[5]) == session);
		must(getsid(shared->pids[6]) == maker && getpgid(shared->pids[6]) == maker);
		must(getpgid(orphan) == gone);
		siginfo_t info;
		must(waitid(P_PID, dead, &info, WEXITED | WNOWAIT) == 0);
		must(info.si_code == CLD_EXITED && info.si_status == 37);
		must(waitid(P_PID, killed, &info, WEXITED | WNOWAIT) == 0);
		must(info.si_code == CLD_KILLED && info.si_status == SIGTERM);
	}
	int status;
	must(waitpid(dead, &status, 0) == dead && WEXITSTATUS(status) == 37);
	must(waitpid(plain, &status, WNOHANG) == 0);
	ok();
}
