/* Children that job control has stopped: of one the parent has been told, of the other not yet. */
#include "workload.h"

static int child(void) {
	int pid = fork();
	must(pid >= 0);
	if (pid == 0)
		for (;;)
			nap(1000);
	return pid;
}

static void stop(int pid) {
	siginfo_t info;
	must(kill(pid, SIGSTOP) == 0);
	must(waitid(P_PID, pid, &info, WSTOPPED | WNOWAIT) == 0);
}

int main(void) {
	int told = child(), untold = child(), status;
	stop(told);
	must(waitpid(told, &status, WUNTRACED) == told && WIFSTOPPED(status));
	for (int round = 0; round < ROUNDS; round++) {
		stop(untold);
		ready(round);
		must(waitpid(told, &status, WUNTRACED | WNOHANG) == 0);
		must(waitpid(untold, &status, WUNTRACED | WNOHANG) == untold);
		must(WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP);
		must(waitpid(untold, &status, WUNTRACED | WNOHANG) == 0);
		must(kill(untold, SIGCONT) == 0);
		must(waitpid(untold, &status, WCONTINUED) == untold && WIFCONTINUED(status));
	}
	ok();
}
