/* Periodic timers that have expired, and whose expiry was not taken yet, go on. */
#include "workload.h"
#include <sys/time.h>
#include <sys/timerfd.h>

static const struct timespec LONG = {20, 0};

static void rings(int signal) {
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, signal);
	for (int i = 0; i < 5; i++)
		must(sigtimedwait(&set, 0, &LONG) == signal);
}

int main(void) {
	int number = SIGRTMIN + 3;
	sigset_t both;
	sigemptyset(&both);
	sigaddset(&both, SIGALRM);
	sigaddset(&both, number);
	must(sigprocmask(SIG_BLOCK, &both, 0) == 0);
	int timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
	struct itimerspec each = {{0, 5000000}, {0, 5000000}}, off = {{1, 0}, {0, 0}}, got;
	must(timerfd_settime(timer, 0, &each, 0) == 0);
	/* One that is disarmed stays so, though it has an interval. */
	int disarmed = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
	must(timerfd_settime(disarmed, 0, &off, 0) == 0);
	struct itimerval real = {{0, 5000}, {0, 5000}};
	must(setitimer(ITIMER_REAL, &real, 0) == 0);
	struct sigevent how = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = number};
	timer_t posix;
	must(timer_create(CLOCK_MONOTONIC, &how, &posix) == 0);
	must(timer_settime(posix, 0, &each, 0) == 0);
	for (int round = 0; round < ROUNDS; round++) {
		nap(50);
		ready(round);
		uint64_t ticks = 0;
		must(read(timer, &ticks, 8) == 8 && ticks >= 10);
		double limit = now() + 20;
		for (int reads = 0; reads < 3; nap(1)) {
			must(now() < limit);
			reads += read(timer, &ticks, 8) == 8;
		}
		must(timerfd_gettime(disarmed, &got) == 0 && got.it_value.tv_nsec == 0);
		must(got.it_value.tv_sec == 0 && read(disarmed, &ticks, 8) == -1 && errno == EAGAIN);
		rings(SIGALRM);
		rings(number);
	}
	ok();
}
