/* Blocked calls over a checkpoint: they continue, and none fails with EINTR. Calls with a time
 * limit end at their original limit. */
#include "workload.h"
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/sem.h>
#include <linux/futex.h>

#define KINDS 8
static volatile int state[KINDS];
static int pipes[KINDS][2];
static int futex_word;

/* Each waits until it is released at the end; an earlier return is a failure. */
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

/* Waits that end by their limit, LIMIT seconds after their start. */
#define LIMITED 9
#define LIMIT 4
static double began[LIMITED], ended[LIMITED];
static volatile double away;

static void *wait_until(void *arg) {
	long n = (long)arg;
	struct timespec t = {LIMIT, 0};
	struct timeval v = {LIMIT, 0};
	struct pollfd p = {pipes[0][0], 0, 0};
	struct epoll_event e;
	struct sembuf take = {0, -1, 0};
	int epoll = epoll_create1(0), semaphore = semget(IPC_PRIVATE, 1, 0600);
	sigset_t mask;
	sigemptyset(&mask);
	sigaddset(&mask, SIGRTMIN + 6);
	must(epoll >= 0 && semaphore >= 0);
	began[n] = now();
	switch (n) {
	case 0: must(poll(&p, 1, LIMIT * 1000) == 0); break;
	case 1: must(syscall(SYS_futex, &futex_word, FUTEX_WAIT_PRIVATE, 0, &t) == -1); break;
	case 2: must(nanosleep(&t, 0) == 0); break;
	case 3: must(clock_nanosleep(CLOCK_BOOTTIME, 0, &t, 0) == 0); break;
	case 4: must(select(0, 0, 0, 0, &v) == 0); break;
	case 5: must(epoll_wait(epoll, &e, 1, LIMIT * 1000) == 0); break;
	case 6: must(epoll_pwait2(epoll, &e, 1, &t, 0) == 0); break;
	case 7: must(sigtimedwait(&mask, 0, &t) == -1 && errno == EAGAIN); break;
	case 8: must(semtimedop(semaphore, &take, 1, &t) == -1 && errno == EAGAIN); break;
	}
	ended[n] = now();
	/* Arguments in the program's memory are unchanged. */
	must(t.tv_sec == LIMIT && t.tv_nsec == 0);
	must(semctl(semaphore, 0, IPC_RMID) == 0);
	return 0;
}

/* Measures the time stopped, which is no part of a wait. */
static void *watch(void *arg) {
	double last = now();
	for (;;) {
		nap(5);
		double t = now();
		if (t - last > 0.05)
			away += t - last;
		last = t;
	}
	return arg;
}

int main(void) {
	pthread_t threads[KINDS];
	sigset_t mask;
	sigemptyset(&mask);
	sigaddset(&mask, SIGRTMIN + 5);
	sigaddset(&mask, SIGRTMIN + 6);
	pthread_sigmask(SIG_BLOCK, &mask, 0);
	for (long n = 0; n < KINDS; n++)
		must(pipe(pipes[n]) == 0 && pthread_create(&threads[n], 0, wait_in, (void *)n) == 0);
	pthread_t limited[LIMITED], watcher;
	must(pthread_create(&watcher, 0, watch, 0) == 0);
	for (long n = 0; n < LIMITED; n++)
		must(pthread_create(&limited[n], 0, wait_until, (void *)n) == 0);
	nap(50);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		nap(400);
		for (int n = 0; n < KINDS - 1; n++)
			must(state[n] == 1);
	}
	for (int n = 0; n < LIMITED; n++) {
		must(pthread_join(limited[n], 0) == 0);
		double took = ended[n] - began[n];
		if (took < LIMIT || took > LIMIT + away + 0.7)
			print_line("wait %d took %f s, of which %f s stopped", n, took, away);
		must(took >= LIMIT && took <= LIMIT + away + 0.7);
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
