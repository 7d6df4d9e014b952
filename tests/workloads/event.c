/* eventfd, timerfd, signalfd, and an epoll that watches them, one inside another. */
#include "workload.h"
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <sys/timerfd.h>

static int poll_one(int epoll, uint64_t *data) {
	struct epoll_event event;
	int n = epoll_wait(epoll, &event, 1, 0);
	if (n == 1)
		*data = event.data.u64;
	return n;
}

static double realtime(void) {
	struct timespec t;
	clock_gettime(CLOCK_REALTIME, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

/* Only the kernel's fdinfo shows the flag, as long as the clock is not set. */
static int is_cancelled_at_set(int timer) {
	char path[64], text[512];
	snprintf(path, sizeof path, "/proc/self/fdinfo/%d", timer);
	int fd = open(path, O_RDONLY);
	ssize_t n = read(fd, text, sizeof text - 1);
	must(n > 0 && close(fd) == 0);
	text[n] = 0;
	return strstr(text, "settime flags: 03") != NULL;
}

int main(void) {
	int event = eventfd(5, EFD_NONBLOCK), semaphore = eventfd(3, EFD_SEMAPHORE | EFD_NONBLOCK);
	int timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
	struct itimerspec far = {{0, 0}, {3600, 0}}, near = {{0, 0}, {0, 1000000}}, got;
	must(timerfd_settime(timer, 0, &far, 0) == 0);
	int expired = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
	must(timerfd_settime(expired, 0, &near, 0) == 0);
	/* One is only cancelled by a change of the clock, the other also expires, at a moment. */
	int set = timerfd_create(CLOCK_REALTIME, TFD_NONBLOCK), moment = timerfd_create(CLOCK_REALTIME, 0);
	struct itimerspec never = {{0, 0}, {INT64_MAX, 0}}, later = {{60, 0}, {time(0) + 3600, 0}};
	must(timerfd_settime(set, TFD_TIMER_ABSTIME | TFD_TIMER_CANCEL_ON_SET, &never, 0) == 0);
	must(timerfd_settime(moment, TFD_TIMER_ABSTIME | TFD_TIMER_CANCEL_ON_SET, &later, 0) == 0);
	/* The same, expired and not read. */
	int due = timerfd_create(CLOCK_REALTIME, TFD_NONBLOCK);
	struct itimerspec past = {{0, 0}, {1, 0}};
	must(timerfd_settime(due, TFD_TIMER_ABSTIME | TFD_TIMER_CANCEL_ON_SET, &past, 0) == 0);
	/* Not armed, with the interval of its last setting. */
	int idle = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
	struct itimerspec off = {{7, 5}, {0, 0}};
	must(timerfd_settime(idle, 0, &off, 0) == 0);
	nap(5);
	sigset_t mask;
	sigemptyset(&mask);
	sigaddset(&mask, SIGUSR1);
	must(sigprocmask(SIG_BLOCK, &mask, 0) == 0);
	int sig = signalfd(-1, &mask, SFD_NONBLOCK);
	int inner = epoll_create1(EPOLL_CLOEXEC), outer = epoll_create1(0);
	struct epoll_event e = {.events = EPOLLIN, .data.u64 = 0x100000001ull};
	must(epoll_ctl(inner, EPOLL_CTL_ADD, sig, &e) == 0);
	e = (struct epoll_event){.events = EPOLLIN | EPOLLET, .data.u64 = 77};
	must(epoll_ctl(outer, EPOLL_CTL_ADD, inner, &e) == 0);
	/* Of EPOLLONESHOT, each with its event taken: of a pipe with data, of one that is empty again, of a full one. */
	int once = epoll_create1(0), with[2], empty[2], full[2];
	must(pipe(with) == 0 && pipe(empty) == 0 && pipe2(full, O_NONBLOCK) == 0);
	must(write(with[1], "x", 1) == 1 && write(empty[1], "x", 1) == 1);
	e = (struct epoll_event){.events = EPOLLIN | EPOLLONESHOT, .data.u64 = 1};
	must(epoll_ctl(once, EPOLL_CTL_ADD, with[0], &e) == 0);
	e.data.u64 = 2;
	must(epoll_ctl(once, EPOLL_CTL_ADD, empty[0], &e) == 0);
	e = (struct epoll_event){.events = EPOLLOUT | EPOLLONESHOT | EPOLLET, .data.u64 = 3};
	must(epoll_ctl(once, EPOLL_CTL_ADD, full[1], &e) == 0);
	struct epoll_event taken[4];
	must(epoll_wait(once, taken, 4, 0) == 3);
	char page[4096] = {0};
	must(read(empty[0], page, 1) == 1);
	while (write(full[1], page, sizeof page) > 0)
		;
	/* One that is armed and ready. */
	e = (struct epoll_event){.events = EPOLLOUT | EPOLLONESHOT, .data.u64 = 4};
	must(epoll_ctl(once, EPOLL_CTL_ADD, with[1], &e) == 0);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		must(epoll_wait(once, taken, 4, 0) == 1 && taken[0].data.u64 == 4);
		e = (struct epoll_event){.events = EPOLLOUT | EPOLLONESHOT, .data.u64 = 4};
		must(epoll_ctl(once, EPOLL_CTL_MOD, with[1], &e) == 0);
		uint64_t value, data = 0;
		must(read(event, &value, 8) == 8 && value == 5 && read(event, &value, 8) == -1);
		value = 5;
		must(write(event, &value, 8) == 8);
		must(read(semaphore, &value, 8) == 8 && value == 1);
		value = 1;
		must(write(semaphore, &value, 8) == 8);
		must(timerfd_gettime(timer, &got) == 0 && got.it_value.tv_sec > 3500);
		must(read(timer, &value, 8) == -1 && errno == EAGAIN);
		must(read(set, &value, 8) == -1 && errno == EAGAIN && is_cancelled_at_set(set));
		must(timerfd_gettime(set, &got) == 0 && got.it_value.tv_sec > 7000000000);
		must(timerfd_gettime(idle, &got) == 0 && memcmp(&got, &off, sizeof got) == 0);
		must(is_cancelled_at_set(moment) && timerfd_gettime(moment, &got) == 0);
		double left = later.it_value.tv_sec - realtime();
		double wrong = got.it_value.tv_sec + got.it_value.tv_nsec / 1e9 - left;
		must(got.it_interval.tv_sec == 60 && wrong < 0.1 && wrong > -0.1);
		must(is_cancelled_at_set(due));
		if (round == ROUNDS - 1) {
			must(read(expired, &value, 8) == 8 && value == 1);
			must(read(due, &value, 8) == 8 && value == 1);
		}
		must(poll_one(inner, &data) == 0);
		must(raise(SIGUSR1) == 0);
		must(poll_one(outer, &data) == 1 && data == 77);
		must(poll_one(inner, &data) == 1 && data == 0x100000001ull);
		struct signalfd_siginfo info;
		must(read(sig, &info, sizeof info) == sizeof info && info.ssi_signo == SIGUSR1);
		must(poll_one(inner, &data) == 0 && poll_one(outer, &data) <= 1);
		must(fcntl(inner, F_GETFD) == FD_CLOEXEC && fcntl(outer, F_GETFD) == 0);
	}
	/* Disarmed is disarmed for a hang-up, too, and can be armed again. */
	must(close(with[1]) == 0 && epoll_wait(once, taken, 4, 0) == 0);
	e = (struct epoll_event){.events = EPOLLIN | EPOLLONESHOT, .data.u64 = 9};
	must(epoll_ctl(once, EPOLL_CTL_MOD, with[0], &e) == 0);
	must(epoll_wait(once, taken, 4, 0) == 1 && taken[0].data.u64 == 9);
	must(taken[0].events == (EPOLLIN | EPOLLHUP));
	ok();
}
