/* A thread with a working directory and a umask of its own (unshare(2) of CLONE_FS), as samba's. */
#include "workload.h"
#include <pthread.h>
#include <sched.h>

static volatile int is_apart, asked, answered;

static void check(const char *place, mode_t mask) {
	char text[64];
	must(getcwd(text, sizeof text) != 0 && !strcmp(text, place));
	mode_t found = umask(0);
	must(umask(found) == 0 && found == mask);
}

static void *other(void *arg) {
	must(unshare(CLONE_FS) == 0 && chdir("/tmp/other") == 0);
	umask(077);
	for (is_apart = 1;; nap(1))
		if (answered != asked) {
			check("/tmp/other", 077);
			answered = asked;
		}
	return arg;
}

static void *sharing(void *arg) {
	for (;;)
		nap(1000);
	return arg;
}

int main(void) {
	mkdir("/tmp", 0777);
	must(mkdir("/tmp/own", 0777) == 0 && mkdir("/tmp/other", 0777) == 0 && chdir("/tmp/own") == 0);
	umask(027);
	pthread_t threads[3];
	must(pthread_create(&threads[0], 0, sharing, 0) == 0);
	must(pthread_create(&threads[1], 0, other, 0) == 0);
	while (!is_apart)
		nap(1);
	must(pthread_create(&threads[2], 0, sharing, 0) == 0);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		check("/tmp/own", 027);
		for (asked++; answered != asked;)
			nap(1);
		/* What one of those that share changes, the other has. */
		must(chdir("/tmp") == 0 && chdir("/tmp/own") == 0);
	}
	ok();
}
