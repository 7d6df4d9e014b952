/* Threads: local storage, blocked in locks, in reads and in waits with a limit; robust locks,
 * floating point and vector registers, joined in the end. */
#include "workload.h"
#include <pthread.h>
#include <poll.h>
#include <sys/prctl.h>

#define WORKERS 6
static __thread int own;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER, robust;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static int round_no, done, spun;
static int quit;
static int tids[WORKERS];

static void *worker(void *arg) {
	int n = (long)arg, seen = 0;
	char name[16];
	own = 1000 + n;
	snprintf(name, sizeof name, "worker-%d", n);
	prctl(PR_SET_NAME, name);
	tids[n] = syscall(SYS_gettid);
	pthread_mutex_lock(&lock);
	for (;;) {
		while (round_no == seen && !quit)
			pthread_cond_wait(&wake, &lock);
		if (quit)
			break;
		seen = round_no;
		char now[16];
		prctl(PR_GET_NAME, now);
		must(own == 1000 + n && strcmp(now, name) == 0);
		must(tids[n] == syscall(SYS_gettid));
		done++;
	}
	pthread_mutex_unlock(&lock);
	return (void *)(long)n;
}

/* Keeps numbers in registers for ever. */
static void *spinner(void *arg) {
	double d = 1.5;
	unsigned long i = 0;
	(void)arg;
	while (!__atomic_load_n(&quit, __ATOMIC_RELAXED)) {
		double was = d;
		__asm__ volatile("" : "+x"(d));
		must(d == was);
		d = d == 1.5 ? 2.25 : 1.5;
		if (++i % 100000 == 0) {
			__atomic_add_fetch(&spun, 1, __ATOMIC_RELAXED);
			nap(1);
		}
	}
	return 0;
}

/* A robust lock dies with its holder. */
static void *holder(void *arg) {
	must(pthread_mutex_lock(&robust) == 0);
	while (!__atomic_load_n(&quit, __ATOMIC_RELAXED))
		nap(5);
	(void)arg;
	return 0;
}

int main(void) {
	pthread_t workers[WORKERS], spin, hold;
	pthread_mutexattr_t attr;
	pthread_mutexattr_init(&attr);
	pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
	pthread_mutex_init(&robust, &attr);
	for (long n = 0; n < WORKERS; n++)
		must(pthread_create(&workers[n], 0, worker, (void *)n) == 0);
	must(pthread_create(&spin, 0, spinner, 0) == 0);
	must(pthread_create(&hold, 0, holder, 0) == 0);
	nap(20);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		int before = __atomic_load_n(&spun, __ATOMIC_RELAXED);
		pthread_mutex_lock(&lock);
		round_no++;
		done = 0;
		pthread_cond_broadcast(&wake);
		pthread_mutex_unlock(&lock);
		for (int i = 0; i < 2000 && __atomic_load_n(&done, __ATOMIC_SEQ_CST) < WORKERS; i++)
			nap(1);
		must(done == WORKERS);
		while (__atomic_load_n(&spun, __ATOMIC_RELAXED) == before)
			nap(1);
		must(pthread_mutex_trylock(&robust) == EBUSY);
	}
	pthread_mutex_lock(&lock);
	__atomic_store_n(&quit, 1, __ATOMIC_RELAXED);
	pthread_cond_broadcast(&wake);
	pthread_mutex_unlock(&lock);
	void *result;
	for (long n = 0; n < WORKERS; n++)
		must(pthread_join(workers[n], &result) == 0 && result == (void *)n);
	must(pthread_join(spin, 0) == 0 && pthread_join(hold, 0) == 0);
	must(pthread_mutex_lock(&robust) == EOWNERDEAD);
	ok();
}
