/* Registrations of membarrier(2), and ids for files that are none of the process's others. */
#include "workload.h"
#include <grp.h>
#include <linux/membarrier.h>
#include <sys/fsuid.h>

static int barrier(int command) {
	return syscall(SYS_membarrier, command, 0, 0);
}

int main(void) {
	/* KERNEL(6.3): before, the kernel does not tell which there are. */
	int knows = barrier(1 << 9) >= 0;
	must(barrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) == 0);
	must(barrier(MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED) == 0);
	/* A user without privileges, whose ids for files a privileged one had chosen. */
	must(setresgid(1, 2, 3) == 0);
	setfsgid(4);
	must(setfsgid(-1) == 4);
	int registered = knows ? barrier(1 << 9) : 0;
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		must(!knows || barrier(1 << 9) == registered);
		must(!knows || barrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED) == 0);
		must(barrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED_SYNC_CORE) == -1 && errno == EPERM);
		must(setfsgid(-1) == 4 && getegid() == 2);
		if (round == 0)
			must(setresuid(5, 6, 7) == 0);
		must(setfsgid(-1) == 4);
	}
	ok();
}
