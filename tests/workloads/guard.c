/* Guards within memory (MADV_GUARD_INSTALL), as the C library puts them below the stacks of threads. */
#include "workload.h"

enum { PAGE = 4096, INSTALL = 102 };

static int is_guarded(volatile char *at) {
	int pid = fork(), status;
	must(pid >= 0);
	if (pid == 0) {
		(void)*at;
		_exit(0);
	}
	must(waitpid(pid, &status, 0) == pid);
	return WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV;
}

int main(void) {
	int access = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
	char *at = mmap(0, 64 * PAGE, access, flags, -1, 0), *locked = mmap(0, 4 * PAGE, access, flags, -1, 0);
	must(at != MAP_FAILED && locked != MAP_FAILED);
	memset(at, 7, 64 * PAGE);
	/* KERNEL(6.13): before, there is none. Before 6.16 the kernel does not tell where they are. */
	if (madvise(at + PAGE, PAGE, INSTALL) == 0) {
		must(madvise(at + 10 * PAGE, 20 * PAGE, INSTALL) == 0);
		must(madvise(locked, PAGE, INSTALL) == 0);
		memset(locked + PAGE, 8, 3 * PAGE);
		/* What a guard keeps from being there is no reason not to lock the rest. */
		must(mlock(locked, 4 * PAGE) == 0 || errno == ENOMEM || errno == EFAULT);
	} else {
		at = 0;
	}
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		for (int page = 0; at && page < 64; page++) {
			int guarded = page == 1 || (page >= 10 && page < 30);
			must(guarded == is_guarded(at + page * PAGE));
			must(guarded || at[page * PAGE + 100] == 7);
		}
		must(!at || (is_guarded(locked) && locked[PAGE] == 8));
	}
	ok();
}
