/* Calls that wait while their process is away: they go on, and none fails with EINTR. */
#include "workload.h"
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <linux/futex.h>

#define KINDS 8
static volatile int state[KINDS];
static int pipes[KINDS][2];
static int futex_word;

/* Each waits for good, until the end lets it go; any return before is a failure. */
static void *wait_in(void *arg) {
	int n = (long)arg;
	char c;
	struct timespec t = {100, 0};
	struct pollfd p = {pipes[n][0], POLLIN, 0};
	struct epoll_event e = {.events = EPOLLIN};
	fd_set set;
	int epoll;
	sigset_t mask;
	siginfo_t info;
	state[n] = 1;
	switch (n) {
	case 0: must(read(pipes[n][0], &c, 1) == 1); break;
	case 1: must(poll(&p, 1, 100000) == 1); break;
	case 2: must(poll(&p, 1, -1) == 1); break;
	case 3:
		FD_ZERO(&set);
		FD_SET(pipes[n][0], &set);
		must(select(pipes[n][0] + 1, &set, 0, 0, 0) == 1);
		break;
	case 4:
		epoll = epoll_create1(0);
		must(epoll_ctl(epoll, EPOLL_CTL_ADD, pipes[n][0], &e) == 0);
		must(epoll_wait(epoll, &e, 1, -1) == 1);
		break;
	case 5:
		must(syscall(SYS_futex, &futex_word, FUTEX_WAIT_PRIVATE, 0, &t) == 0);
		break;
	case 6:
		sigemptyset(&mask);
		sigaddset(&mask, SIGRTMIN + 5);
		must(sigwaitinfo(&mask, &info) == SIGRTMIN + 5);
		break;
	case 7: must(nanosleep(&(struct timespec){0, 700000000}, 0) == 0); break;
	}
	state[n] = 2;
	return 0;
}

int main(void) {
	pthread_t threads[KINDS];
	sigset_t mask;
	sigemptyset(&mask);
	sigaddset(&mask, SIGRTMIN + 5);
	pthread_sigmask(SIG_BLOCK, &mask, 0);
	for (long n = 0; n < KINDS; n++)
		must(pipe(pipes[n]) == 0 && pthread_create(&threads[n], 0, wait_in, (void *)n) == 0);
	nap(50);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		nap(30);
		for (int n = 0; n < KINDS - 1; n++)
			must(state[n] == 1);
	}
	for (int n = 0; n < 5; n++)
		must(write(pipes[n][1], "x", 1) == 1);
	futex_word = 1;
	must(syscall(SYS_futex, &futex_word, FUTEX_WAKE_PRIVATE, 1) == 1);
	must(kill(getpid(), SIGRTMIN + 5) == 0);
	for (int n = 0; n < KINDS; n++)
		must(pthread_join(threads[n], 0) == 0 && state[n] == 2);
	ok();
}
