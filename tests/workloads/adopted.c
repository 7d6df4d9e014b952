/* A subreaper that became one when an orphan of its session had gone to the first process already; and one that has
 * an orphan. */
#include "workload.h"
#include <sys/prctl.h>

static struct {
	volatile int pid, parent;
} *of;

/* Makes a grandchild whose parent exits. */
static void orphan(int number) {
	int status, parent = fork();
	must(parent >= 0);
	if (parent == 0) {
		if (fork() == 0)
			for (;; nap(1)) {
				of[number].parent = getppid();
				of[number].pid = getpid();
			}
		_exit(0);
	}
	must(waitpid(parent, &status, 0) == parent);
	while (of[number].pid == 0 || of[number].parent == parent)
		nap(1);
}

static int leader(int number, int is_early) {
	int pid = fork();
	must(pid >= 0);
	if (pid == 0) {
		must(setsid() == getpid());
		if (is_early)
			must(prctl(PR_SET_CHILD_SUBREAPER, 1) == 0);
		orphan(number);
		must(prctl(PR_SET_CHILD_SUBREAPER, 1) == 0);
		for (of[number + 2].pid = 1;; nap(1)) {
			int is = 0;
			must(prctl(PR_GET_CHILD_SUBREAPER, &is) == 0 && is == 1);
			of[number + 2].parent++;
		}
	}
	while (of[number + 2].pid == 0)
		nap(1);
	return pid;
}

int main(void) {
	of = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	leader(0, 0);
	int second = leader(1, 1);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		of[0].parent = of[1].parent = 0;
		while (of[0].parent == 0 || of[1].parent == 0)
			nap(1);
		must(of[0].parent == 1 && of[1].parent == second);
		int before[] = {of[2].parent, of[3].parent};
		while (of[2].parent < before[0] + 2 || of[3].parent < before[1] + 2)
			nap(1);
	}
	ok();
}
