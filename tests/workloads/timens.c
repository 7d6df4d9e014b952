/* Private clocks: of processes in a time namespace with its maker outside, of processes with a
 * maker in another namespace or without one, and of the first process, which has a namespace for
 * its children. A timer of such a clock expires at its moment. */
#include "workload.h"
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/timerfd.h>

#define SECOND 1000000000ll
#define WORKERS 6
static int ask[WORKERS + 1][2], answer[WORKERS + 1][2];

static const clockid_t clocks[] = {CLOCK_MONOTONIC, CLOCK_BOOTTIME};

/* The offsets of clocks from those of the first process. */
struct ahead {
	int64_t ns[2];
};
static const struct ahead none, inner = {{100000 * SECOND + 5, 200000 * SECOND + 999999999}},
				deep = {{50 * SECOND, 300000 * SECOND}}, left = {{0, 5 * SECOND}},
				last = {{7 * SECOND, 0}};

/* The last clock values of each process. */
static volatile int64_t (*reported)[2];

static struct timespec spec(int64_t ns) {
	return (struct timespec){ns / SECOND, ns % SECOND};
}

/* The vdso and the system call agree. */
static void report(int number) {
	for (int n = 0; n < 2; n++) {
		int64_t a = quick(clocks[n]), b = slow(clocks[n]), c = quick(clocks[n]);
		must(a <= b && b <= c);
		reported[number][n] = b;
	}
}

static int64_t base[2];

/* The offsets of later children, from the host's clocks. */
static void offsets(int64_t found[2]) {
	char text[256] = "";
	long long s[2], n[2];
	int fd = open("/proc/self/timens_offsets", O_RDONLY);
	must(fd >= 0 && read(fd, text, sizeof text - 1) > 0 && close(fd) == 0);
	must(sscanf(text, "monotonic %lld %lld boottime %lld %lld", s, n, s + 1, n + 1) == 4);
	for (int i = 0; i < 2; i++)
		found[i] = s[i] * SECOND + n[i];
}

/* Makes a namespace for later children. */
static void make(struct ahead to) {
	char text[256];
	long long s[2], n[2];
	must(unshare(CLONE_NEWTIME) == 0);
	for (int i = 0; i < 2; i++) {
		int64_t all = base[i] + to.ns[i] + 1000000 * SECOND;
		s[i] = all / SECOND - 1000000, n[i] = all % SECOND;
	}
	int length = snprintf(text, sizeof text, "monotonic %lld %lld\nboottime %lld %lld\n", s[0],
			      n[0], s[1], n[1]);
	int fd = open("/proc/self/timens_offsets", O_WRONLY);
	must(fd >= 0 && write(fd, text, length) == length && close(fd) == 0);
}

/* A child reports its clocks. */
static void report_by_child(int number) {
	int status;
	pid_t pid = fork();
	if (pid == 0) {
		report(number);
		_exit(0);
	}
	must(waitpid(pid, &status, 0) == pid && status == 0);
}

/* Waits until moments, and a timer for one. */
#define IN (2 * SECOND)
static int64_t until[2];
static pthread_t waits[2];
static int timer, word;
static timer_t alarm_timer;

static void *sleep_until(void *arg) {
	struct timespec at = spec(until[0]);
	must(clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, 0) == 0);
	must(quick(CLOCK_MONOTONIC) >= until[0] && quick(CLOCK_MONOTONIC) < until[0] + 60 * SECOND);
	return arg;
}

static void *wait_until(void *arg) {
	struct timespec at = spec(until[0]);
	must(syscall(SYS_futex, &word, FUTEX_WAIT_BITSET_PRIVATE, 0, &at, 0, -1) == -1);
	must(errno == ETIMEDOUT);
	must(quick(CLOCK_MONOTONIC) >= until[0] && quick(CLOCK_MONOTONIC) < until[0] + 60 * SECOND);
	return arg;
}

static void begin_to_wait(void) {
	struct sigevent signal = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGRTMIN};
	struct itimerspec at = {};
	sigset_t mask;
	for (int n = 0; n < 2; n++)
		until[n] = quick(clocks[n]) + IN;
	sigemptyset(&mask), sigaddset(&mask, SIGRTMIN);
	must(sigprocmask(SIG_BLOCK, &mask, 0) == 0);
	must(timer_create(CLOCK_MONOTONIC, &signal, &alarm_timer) == 0);
	at.it_value = spec(until[0]);
	must(timer_settime(alarm_timer, TIMER_ABSTIME, &at, 0) == 0);
	must((timer = timerfd_create(CLOCK_BOOTTIME, 0)) >= 0);
	at.it_value = spec(until[1]);
	must(timerfd_settime(timer, TFD_TIMER_ABSTIME, &at, 0) == 0);
	must(pthread_create(&waits[0], 0, sleep_until, 0) == 0);
	must(pthread_create(&waits[1], 0, wait_until, 0) == 0);
}

static void end_to_wait(void) {
	uint64_t count;
	sigset_t mask;
	int signal;
	for (int n = 0; n < 2; n++)
		must(pthread_join(waits[n], 0) == 0);
	sigemptyset(&mask), sigaddset(&mask, SIGRTMIN);
	must(sigwait(&mask, &signal) == 0 && signal == SIGRTMIN && timer_delete(alarm_timer) == 0);
	must(quick(CLOCK_MONOTONIC) >= until[0] && quick(CLOCK_MONOTONIC) < until[0] + 60 * SECOND);
	must(read(timer, &count, 8) == 8 && count == 1 && close(timer) == 0);
	must(quick(CLOCK_BOOTTIME) >= until[1] && quick(CLOCK_BOOTTIME) < until[1] + 60 * SECOND);
}

static void *serve(void *arg) {
	int number = (long)arg;
	char c;
	while (read(ask[number][0], &c, 1) == 1) {
		if (c == 'c')
			report_by_child(number);
		else if (c == 'w')
			begin_to_wait();
		else if (c == 'e')
			end_to_wait();
		else
			report(number);
		must(write(answer[number][1], &c, 1) == 1);
	}
	_exit(0);
}

/* A worker's value lies between earlier and later values of the first process, plus the offset. */
static void is(int number, char c, struct ahead to) {
	int64_t before[2], after[2];
	for (int n = 0; n < 2; n++)
		before[n] = slow(clocks[n]);
	if (number < WORKERS + 1) {
		char got = 0;
		must(write(ask[number][1], &c, 1) == 1);
		must(read(answer[number][0], &got, 1) == 1 && got == c);
	} else {
		report_by_child(number);
	}
	for (int n = 0; n < 2; n++) {
		after[n] = slow(clocks[n]);
		if (c == 'w' || c == 'e')
			continue;
		must(reported[number][n] >= before[n] + to.ns[n]);
		must(reported[number][n] <= after[n] + to.ns[n]);
	}
}

/* A process that waits until a moment by a private clock, while no other process runs. */
static int wait_alone(void) {
	int status;
	pid_t maker = fork();
	if (maker == 0) {
		make(inner);
		pid_t pid = fork();
		if (pid == 0) {
			print_line("ready 0");
			until[0] = quick(CLOCK_MONOTONIC) + 5 * SECOND;
			sleep_until(0);
			print_line("ok");
			_exit(0);
		}
		_exit(waitpid(pid, &status, 0) == pid && status == 0 ? 0 : 1);
	}
	must(waitpid(maker, &status, 0) == maker);
	return status;
}

int main(void) {
	pthread_t thread;
	offsets(base);
	if (getenv("ALONE"))
		return wait_alone();
	reported = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	must(reported != MAP_FAILED);
	for (int n = 0; n < WORKERS + 1; n++)
		must(pipe(ask[n]) == 0 && pipe(answer[n]) == 0);
	if (fork() == 0) {
		make(inner);
		if (fork() == 0) {
			must(pthread_create(&thread, 0, serve, (void *)1) == 0);
			serve((void *)2);
		}
		if (fork() == 0)
			serve((void *)3);
		if (fork() == 0) {
			make(deep);
			if (fork() == 0)
				serve((void *)5);
			serve((void *)4);
		}
		serve((void *)0);
	}
	pid_t gone = fork();
	if (gone == 0) {
		make(left);
		if (fork() == 0)
			serve((void *)6);
		_exit(0);
	}
	must(waitpid(gone, 0, 0) == gone);
	make(last);
	for (int round = 0; round < ROUNDS; round++) {
		is(3, 'w', inner);
		ready(round);
		is(0, 't', none), is(0, 'c', inner);
		is(1, 't', inner), is(2, 't', inner), is(2, 'c', inner);
		is(3, 'e', inner), is(3, 't', inner);
		is(4, 't', inner), is(4, 'c', deep);
		is(5, 't', deep), is(5, 'c', deep);
		is(6, 't', left), is(6, 'c', left);
		is(7, 'c', last);
	}
	ok();
}
