/* eventfd, timerfd, signalfd, and an epoll that watches them, one inside another. */
#include "workload.h"
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
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

/* Counts the items of an epoll that have reported their one event, for which a hang-up is none. */
static int disarmed(int epoll) {
	char path[64], text[2048], *at = text;
	snprintf(path, sizeof path, "/proc/self/fdinfo/%d", epoll);
	int fd = open(path, O_RDONLY), count = 0;
	ssize_t n = read(fd, text, sizeof text - 1);
	must(n > 0 && close(fd) == 0);
	text[n] = 0;
	while ((at = strstr(at, "events: 40000000 ")) != NULL)
		at++, count++;
	return count;
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
	/* Items that have reported, beside one that has an event and has not. */
	int once = epoll_create1(0), pair[2], pipes[2][2];
	must(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
	must(pipe(pipes[0]) == 0 && pipe(pipes[1]) == 0);
	must(write(pipes[0][1], "a", 1) == 1 && write(pipes[1][1], "full", 4) == 4);
	int files[] = {event, pair[0], pipes[0][0], pipes[0][1], pipes[1][0], semaphore};
	enum { LAST = sizeof files / sizeof *files - 1 };
	for (int i = 0; i <= LAST; i++) {
		uint64_t data;
		int all = EPOLLONESHOT | EPOLLIN | EPOLLOUT;
		e = (struct epoll_event){.events = all, .data.u64 = 40 + i};
		must(epoll_ctl(once, EPOLL_CTL_ADD, files[i], &e) == 0);
		must(i == LAST || (poll_one(once, &data) == 1 && data == 40u + i));
	}
	char c, page[4096] = {0};
	must(read(pipes[0][0], &c, 1) == 1);
	/* The write end of a full pipe, and an empty pipe without a writer. */
	int more = epoll_create1(0), full[2], left[2];
	must(pipe2(full, O_NONBLOCK) == 0 && pipe(left) == 0 && write(left[1], "x", 1) == 1);
	e = (struct epoll_event){.events = EPOLLOUT | EPOLLONESHOT | EPOLLET, .data.u64 = 3};
	must(epoll_ctl(more, EPOLL_CTL_ADD, full[1], &e) == 0);
	e = (struct epoll_event){.events = EPOLLIN | EPOLLONESHOT, .data.u64 = 4};
	must(epoll_ctl(more, EPOLL_CTL_ADD, left[0], &e) == 0);
	struct epoll_event taken[4];
	must(epoll_wait(more, taken, 4, 0) == 2 && read(left[0], &c, 1) == 1 && close(left[1]) == 0);
	while (write(full[1], page, sizeof page) > 0)
		;
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		uint64_t value, data = 0;
		must(epoll_wait(more, taken, 4, 0) == 0 && disarmed(more) == 1);
		must(disarmed(once) == LAST && poll_one(once, &data) == 1 && data == 40 + LAST);
		must(disarmed(once) == LAST + 1 && poll_one(once, &data) == 0);
		int unread[2];
		must(ioctl(pipes[0][0], FIONREAD, &unread[0]) == 0 && unread[0] == 0);
		must(ioctl(pipes[1][0], FIONREAD, &unread[1]) == 0 && unread[1] == 4);
		e = (struct epoll_event){.events = EPOLLONESHOT | EPOLLOUT, .data.u64 = 40 + LAST};
		must(epoll_ctl(once, EPOLL_CTL_MOD, semaphore, &e) == 0);
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
	must(epoll_wait(once, taken, 1, 0) == 1 && taken[0].data.u64 == 40 + LAST);
	must(close(pipes[1][1]) == 0 && epoll_wait(once, taken, 1, 0) == 0);
	e = (struct epoll_event){.events = EPOLLIN | EPOLLONESHOT, .data.u64 = 9};
	must(epoll_ctl(once, EPOLL_CTL_MOD, pipes[1][0], &e) == 0);
	must(epoll_wait(once, taken, 4, 0) == 1 && taken[0].events == (EPOLLIN | EPOLLHUP));
	ok();
}
