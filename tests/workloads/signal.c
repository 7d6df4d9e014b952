/* Actions, masks, pending signals with their values, alternate stack, interval and POSIX timers. */
#include "workload.h"
#include <sys/time.h>

static volatile int handled, value;
static volatile uintptr_t where;

static void on_usr1(int n, siginfo_t *info, void *context) {
	int here;
	(void)n, (void)context;
	handled++;
	value = info->si_value.sival_int;
	where = (uintptr_t)&here;
}

static char alternate[65536];

int main(void) {
	stack_t stack = {.ss_sp = alternate, .ss_size = sizeof alternate}, found;
	must(sigaltstack(&stack, 0) == 0);
	struct sigaction action = {.sa_sigaction = on_usr1, .sa_flags = SA_SIGINFO | SA_ONSTACK}, got;
	sigaddset(&action.sa_mask, SIGHUP);
	must(sigaction(SIGUSR1, &action, 0) == 0);
	signal(SIGUSR2, SIG_IGN);
	sigset_t one, queued, pending;
	sigemptyset(&one);
	sigaddset(&one, SIGUSR1);
	sigemptyset(&queued);
	sigaddset(&queued, SIGRTMIN + 1);
	must(sigprocmask(SIG_BLOCK, &one, 0) == 0 && sigprocmask(SIG_BLOCK, &queued, 0) == 0);
	for (int i = 0; i < 3; i++)
		must(sigqueue(getpid(), SIGRTMIN + 1, (union sigval){.sival_int = 100 + i}) == 0);
	struct itimerval far = {{0, 0}, {3000, 0}}, left;
	must(setitimer(ITIMER_VIRTUAL, &far, 0) == 0);
	timer_t timer;
	struct sigevent how = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGRTMIN + 2};
	how.sigev_value.sival_int = 4711;
	signal(SIGRTMIN + 2, SIG_IGN);
	/* Not the first timer: ids are kept, also behind a gap. */
	timer_t before;
	must(timer_create(CLOCK_MONOTONIC, 0, &before) == 0);
	must(timer_create(CLOCK_MONOTONIC, &how, &timer) == 0 && timer_delete(before) == 0);
	struct itimerspec when = {{7, 0}, {5000, 0}}, rest;
	must(timer_settime(timer, 0, &when, 0) == 0);
	for (int round = 0; round < ROUNDS; round++) {
		must(sigqueue(getpid(), SIGUSR1, (union sigval){.sival_int = 17 + round}) == 0);
		ready(round);
		must(sigaltstack(0, &found) == 0 && found.ss_sp == alternate &&
		     found.ss_size == sizeof alternate);
		must(sigaction(SIGUSR1, 0, &got) == 0 && got.sa_sigaction == on_usr1);
		must(got.sa_flags & SA_ONSTACK && sigismember(&got.sa_mask, SIGHUP));
		must(sigaction(SIGUSR2, 0, &got) == 0 && got.sa_handler == SIG_IGN);
		must(sigpending(&pending) == 0 && sigismember(&pending, SIGUSR1));
		must(handled == round);
		must(sigprocmask(SIG_UNBLOCK, &one, 0) == 0);
		must(handled == round + 1 && value == 17 + round);
		must(where > (uintptr_t)alternate && where < (uintptr_t)alternate + sizeof alternate);
		must(sigprocmask(SIG_BLOCK, &one, 0) == 0);
		must(getitimer(ITIMER_VIRTUAL, &left) == 0 && left.it_value.tv_sec > 2900);
		must(timer_gettime(timer, &rest) == 0);
		must(rest.it_value.tv_sec > 4900 && rest.it_interval.tv_sec == 7);
	}
	for (int i = 0; i < 3; i++) {
		siginfo_t info;
		must(sigwaitinfo(&queued, &info) == SIGRTMIN + 1 && info.si_value.sival_int == 100 + i);
		must(info.si_code == SI_QUEUE && info.si_pid == getpid());
	}
	ok();
}
