/* A subreaper, which reaps orphans below it; and a signal at the death of a parent. */
#include "workload.h"
#include <sys/prctl.h>

struct shared {
	int daemon, daemon_parent, daemon_session, daemon_leader, orphan, orphan_parent, beats;
};

int main(void) {
	volatile struct shared *s =
		mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	int ask[2], answer[2];
	must(pipe(ask) == 0 && pipe(answer) == 0);
	int reaper = fork();
	if (reaper == 0) {
		must(prctl(PR_SET_CHILD_SUBREAPER, 1) == 0);
		int maker = fork();
		if (maker == 0) {
			/* A daemon in a session without its leader. */
			s->daemon_leader = setsid();
			if (fork() == 0) {
				s->daemon = getpid();
				for (;;) {
					s->daemon_parent = getppid();
					s->daemon_session = getsid(0);
					s->beats++;
					nap(2);
				}
			}
			_exit(0);
		}
		must(waitpid(maker, 0, 0) == maker);
		/* A process without its parent, in our session. */
		int between = fork();
		if (between == 0) {
			if (fork() == 0) {
				s->orphan = getpid();
				for (;;) {
					s->orphan_parent = getppid();
					nap(2);
				}
			}
			_exit(0);
		}
		must(waitpid(between, 0, 0) == between);
		char c;
		int is = 0, status;
		while (read(ask[0], &c, 1) == 1) {
			must(prctl(PR_GET_CHILD_SUBREAPER, &is) == 0 && is == 1);
			/* New orphans come here, too. */
			int pid = fork(), got;
			if (pid == 0) {
				if (fork() == 0)
					_exit(9);
				_exit(0);
			}
			must(waitpid(pid, &status, 0) == pid);
			while ((got = waitpid(-1, &status, 0)) == -1 && errno == EINTR)
				;
			must(got > 0 && WEXITSTATUS(status) == 9 && write(answer[1], &c, 1) == 1);
		}
		_exit(0);
	}
	int parent = fork();
	if (parent == 0) {
		int mourner = fork();
		if (mourner == 0) {
			sigset_t set;
			int got;
			sigemptyset(&set);
			sigaddset(&set, SIGUSR1);
			must(sigprocmask(SIG_BLOCK, &set, 0) == 0);
			must(prctl(PR_SET_PDEATHSIG, SIGUSR1) == 0);
			must(sigwait(&set, &got) == 0 && got == SIGUSR1);
			must(write(answer[1], "m", 1) == 1);
			_exit(0);
		}
		pause();
		_exit(0);
	}
	while (!s->daemon || !s->orphan || s->orphan_parent != reaper || s->daemon_parent != reaper)
		nap(2);
	int daemon = s->daemon;
	char c;
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		int beats = s->beats;
		nap(50);
		must(s->beats > beats && s->daemon == daemon && s->daemon_parent == reaper);
		must(s->orphan_parent == reaper && getpgid(daemon) == s->daemon_leader);
		must(s->daemon_session == s->daemon_leader);
		must(write(ask[1], "x", 1) == 1 && read(answer[0], &c, 1) == 1 && c == 'x');
	}
	must(kill(parent, SIGKILL) == 0 && read(answer[0], &c, 1) == 1 && c == 'm');
	ok();
}
