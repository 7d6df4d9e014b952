/* System call filters that a process loads itself: for all threads, for one thread, for a child. */
#include "workload.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/prctl.h>

/* Makes one call fail with a given error number. */
static void forbid(int call, int error, int flags) {
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = {4, code};
	must(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &program) == 0);
}

static int fails_with(int call, int error) {
	return syscall(call, -1, 0, 0) == -1 && errno == error;
}

static volatile int requested, answered, quit;

static void *own(void *arg) {
	forbid(SYS_getpgid, 77, 0);
	while (!quit) {
		if (requested > answered) {
			must(fails_with(SYS_getpgid, 77) && fails_with(SYS_getpriority, 88));
			answered++;
		}
		nap(2);
	}
	return arg;
}

static int filters(void) {
	FILE *f = fopen("/proc/thread-self/status", "r");
	char line[256];
	int found = -1;
	while (f && fgets(line, sizeof line, f))
		sscanf(line, "Seccomp_filters: %d", &found);
	fclose(f);
	return found;
}

int main(void) {
	pthread_t thread;
	int ask[2], answer[2];
	must(pipe(ask) == 0 && pipe(answer) == 0 && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
	int before = filters();
	forbid(SYS_getpriority, 88, 0);
	if (fork() == 0) {
		char c;
		forbid(SYS_getpgid, 66, 0);
		forbid(SYS_getpgid, 99, SECCOMP_FILTER_FLAG_LOG);
		int mine = filters();
		while (read(ask[0], &c, 1) == 1) {
			/* The filter loaded last runs first, and the first error wins. */
			must(mine == filters() && fails_with(SYS_getpriority, 88));
			must(fails_with(SYS_getpgid, 99) || fails_with(SYS_getpgid, 66));
			must(write(answer[1], &c, 1) == 1);
		}
		_exit(0);
	}
	must(pthread_create(&thread, 0, own, 0) == 0);
	nap(20);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		char c = 'x';
		must(filters() == before + 1 && fails_with(SYS_getpriority, 88) && getpgid(0) > 0);
		must(write(ask[1], &c, 1) == 1 && read(answer[0], &c, 1) == 1);
		requested++;
		while (answered < requested)
			nap(2);
	}
	quit = 1;
	must(pthread_join(thread, 0) == 0);
	ok();
}
