/* Zombies with a user of their own, in process groups: of their parent, of their own, of a leader that has ended. */
#include "workload.h"

static pid_t ended(uid_t uid, gid_t gid, pid_t group) {
	siginfo_t info;
	pid_t child = fork();
	must(child >= 0);
	if (child == 0) {
		must(group < 0 || setpgid(0, group) == 0);
		must(setresgid(gid, gid, gid) == 0 && setresuid(uid, uid, uid) == 0);
		_exit(uid);
	}
	must(waitid(P_PID, child, &info, WEXITED | WNOWAIT) == 0);
	return child;
}

static void is_reported(idtype_t type, pid_t id, pid_t child, uid_t uid, int options) {
	siginfo_t info = {0};
	must(waitid(type, id, &info, WEXITED | WNOHANG | options) == 0);
	if (info.si_pid != child || info.si_uid != uid)
		print_line("%d of user %d instead of %d of %d", info.si_pid, info.si_uid, child, uid);
	must(info.si_pid == child && info.si_uid == uid && info.si_status == (int)uid);
}

int main(void) {
	pid_t own = ended(7, 8, 0), plain = ended(9, 9, -1);
	pid_t leader = fork();
	must(leader >= 0);
	if (leader == 0) {
		must(setpgid(0, 0) == 0);
		pause();
	}
	while (getpgid(leader) != leader)
		nap(1);
	pid_t orphans[2] = {ended(11, 11, leader), ended(12, 12, leader)};
	must(kill(leader, SIGKILL) == 0 && waitpid(leader, 0, 0) == leader);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		is_reported(P_PGID, own, own, 7, WNOWAIT);
		is_reported(P_PID, plain, plain, 9, WNOWAIT);
		is_reported(P_PID, orphans[1], orphans[1], 12, WNOWAIT);
	}
	must(getpgid(own) == own && getpgid(plain) == getpgrp() && getpgid(orphans[1]) == leader);
	is_reported(P_PGID, leader, orphans[0], 11, 0);
	is_reported(P_PGID, leader, orphans[1], 12, 0);
	is_reported(P_PGID, own, own, 7, 0);
	is_reported(P_PGID, getpgrp(), plain, 9, 0);
	must(waitpid(-1, 0, 0) == -1 && errno == ECHILD);
	ok();
}
