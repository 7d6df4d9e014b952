/* Processes and threads without an alternate signal stack have none afterwards. */
#include "workload.h"
#include <pthread.h>

static volatile int handled;

static void on_signal(int n) {
	handled += n == SIGUSR1;
}

static void check(void) {
	stack_t found;
	must(sigaltstack(0, &found) == 0 && found.ss_flags == SS_DISABLE);
	int before = handled;
	must(raise(SIGUSR1) == 0 && handled == before + 1);
}

static volatile int wanted, done;

static void *other(void *arg) {
	for (;; nap(1))
		if (done != wanted) {
			check();
			done = wanted;
		}
	return arg;
}

int main(void) {
	/* A handler that runs on such a stack, where there is one. */
	struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_ONSTACK};
	must(sigaction(SIGUSR1, &action, 0) == 0);
	pthread_t thread;
	must(pthread_create(&thread, 0, other, 0) == 0);
	int ask[2], answer[2];
	must(pipe(ask) == 0 && pipe(answer) == 0);
	int child = fork();
	must(child >= 0);
	if (child == 0)
		for (char c; read(ask[0], &c, 1) == 1;) {
			check();
			must(write(answer[1], &c, 1) == 1);
		}
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		check();
		char c = 0;
		must(write(ask[1], &c, 1) == 1 && read(answer[0], &c, 1) == 1);
		for (wanted++; done != wanted;)
			nap(1);
	}
	ok();
}
