/* Restrictions that a process has put upon itself: they are not lost. */
#include "workload.h"
#include <pthread.h>
#include <sys/prctl.h>

static int killed_by(void (*what)(void)) {
	int pid = fork(), status;
	must(pid >= 0);
	if (pid == 0) {
		what();
		_exit(0);
	}
	must(waitpid(pid, &status, 0) == pid);
	return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

static void read_counter(void) {
	__builtin_ia32_rdtsc();
}

static volatile int checks, other_policy, other_counter;

/* One has what its maker has not. */
static void *other(void *arg) {
	must(prctl(PR_MCE_KILL, PR_MCE_KILL_SET, PR_MCE_KILL_LATE, 0, 0) == 0);
	for (;; nap(1)) {
		int access = 0;
		must(prctl(PR_GET_TSC, &access) == 0);
		other_counter = access;
		other_policy = prctl(PR_MCE_KILL_GET, 0, 0, 0, 0);
		checks++;
	}
	return arg;
}

int main(void) {
	enum { SET_MDWE = 65, GET_MDWE, SEAL = 462 };
	int bypass = prctl(PR_GET_SPECULATION_CTRL, PR_SPEC_STORE_BYPASS, 0, 0, 0);
	if (bypass > 0 && bypass & PR_SPEC_PRCTL)
		must(prctl(PR_SET_SPECULATION_CTRL, PR_SPEC_STORE_BYPASS, PR_SPEC_DISABLE, 0, 0) == 0);
	bypass = prctl(PR_GET_SPECULATION_CTRL, PR_SPEC_STORE_BYPASS, 0, 0, 0);
	pthread_t thread;
	must(pthread_create(&thread, 0, other, 0) == 0);
	must(prctl(PR_MCE_KILL, PR_MCE_KILL_SET, PR_MCE_KILL_EARLY, 0, 0) == 0);
	/* KERNEL(6.3, 6.10): before, there are no such restrictions. */
	int writes_or_executes = prctl(SET_MDWE, 1, 0, 0, 0) == 0;
	char *sealed = mmap(0, 8192, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int seals = syscall(SEAL, sealed, 8192, 0) == 0;
	must(prctl(PR_SET_TSC, PR_TSC_SIGSEGV) == 0);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		int all = PROT_READ | PROT_WRITE | PROT_EXEC, flags = MAP_PRIVATE | MAP_ANONYMOUS;
		if (writes_or_executes) {
			must(prctl(GET_MDWE, 0, 0, 0, 0) == 1);
			must(mmap(0, 4096, all, flags, -1, 0) == MAP_FAILED && errno == EACCES);
		}
		if (seals) {
			must(munmap(sealed, 4096) == -1 && errno == EPERM);
			must(mprotect(sealed + 4096, 4096, PROT_READ | PROT_WRITE) == -1);
		}
		must(killed_by(read_counter) == SIGSEGV);
		must(prctl(PR_MCE_KILL_GET, 0, 0, 0, 0) == PR_MCE_KILL_EARLY);
		must(prctl(PR_GET_SPECULATION_CTRL, PR_SPEC_STORE_BYPASS, 0, 0, 0) == bypass);
		for (int before = checks; checks < before + 2;)
			nap(1);
		must(other_policy == PR_MCE_KILL_LATE && other_counter == PR_TSC_ENABLE);
	}
	ok();
}
