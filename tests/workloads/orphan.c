/* A daemon in the session of a leader that has ended, with a zombie in the process group of that leader. */
#include "workload.h"

static void run_daemon(int request) {
	char byte;
	siginfo_t info;
	pid_t child = fork();
	must(child >= 0);
	if (child == 0)
		_exit(5);
	must(waitid(P_PID, child, &info, WEXITED | WNOWAIT) == 0);
	must(read(request, &byte, 1) == 1);
	memset(&info, 0, sizeof(info));
	must(waitid(P_PID, child, &info, WEXITED) == 0 && info.si_pid == child && info.si_status == 5);
	_exit(getsid(0) == getpgrp() ? 0 : 1);
}

int main(void) {
	int request[2], answer[2], status;
	pid_t daemon, leader;
	must(pipe(request) == 0 && pipe(answer) == 0);
	leader = fork();
	must(leader >= 0);
	if (leader == 0) {
		must(setsid() == getpid());
		daemon = fork();
		must(daemon >= 0);
		if (daemon == 0)
			run_daemon(request[0]);
		must(write(answer[1], &daemon, sizeof(daemon)) == sizeof(daemon));
		_exit(0);
	}
	must(read(answer[0], &daemon, sizeof(daemon)) == sizeof(daemon));
	must(waitpid(leader, &status, 0) == leader);
	for (int round = 0; round < ROUNDS; round++)
		ready(round);
	must(getsid(daemon) == leader && getpgid(daemon) == leader);
	must(write(request[1], "x", 1) == 1);
	must(waitpid(daemon, &status, 0) == daemon && status == 0);
	ok();
}
