/* What is shared, or is not, in a way that is refused: SHARES says which. */
#include "workload.h"
#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>

static char stack[65536] __attribute__((aligned(16)));
static volatile int is_apart;

static int child(void *arg) {
	for (;;)
		nap(1000);
	return arg != 0;
}

static void *with_descriptors(void *arg) {
	must(unshare(CLONE_FILES) == 0);
	is_apart = 1;
	child(0);
	return arg;
}

/* linux/landlock.h: to make sockets is restricted. */
static void *restricted(void *arg) {
	uint64_t rights = 1 << 9;
	int rules = syscall(444, &rights, sizeof rights, 0);
	must(rules >= 0 && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
	must(syscall(446, rules, 0) == 0 && close(rules) == 0);
	is_apart = 1;
	if (arg)
		child(0);
	return arg;
}

int main(void) {
	const char *what = getenv("SHARES");
	int flags = 0;
	pthread_t thread;
	must(what != 0);
	if (!strcmp(what, "memory"))
		flags = CLONE_VM;
	if (!strcmp(what, "descriptors"))
		flags = CLONE_FILES;
	if (!strcmp(what, "directory"))
		flags = CLONE_FS;
	if (flags)
		must(clone(child, stack + sizeof stack, flags | SIGCHLD, 0) > 0);
	if (!strcmp(what, "thread"))
		must(pthread_create(&thread, 0, with_descriptors, 0) == 0);
	if (!strcmp(what, "landlock"))
		restricted(0);
	if (!strcmp(what, "landlock of a thread"))
		must(pthread_create(&thread, 0, restricted, stack) == 0);
	while (!flags && !is_apart)
		nap(1);
	ready(0);
	ok();
}
