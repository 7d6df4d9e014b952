/* Nearly as many open files as the limit allows, each open once: a restore makes them at their numbers. A child has
 * other files at the same numbers. With MORE set, as many files more, of 20,000 that are allowed. */
#include "workload.h"
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>

enum { PIPES = 120, EVENTS = 60, FILES = 60, PAIRS = 40, OF_CHILD = 8 };

static int more, pipes[PIPES][2], events[EVENTS], files[FILES], pairs[PAIRS][2], poller, own[OF_CHILD][2];

static void set_flag(int fd) {
	must(fcntl(fd, F_SETFD, fd % 2 ? FD_CLOEXEC : 0) == 0);
}

static void check_flag(int fd) {
	must(fcntl(fd, F_GETFD) == (fd % 2 ? FD_CLOEXEC : 0));
}

static void live_as_child(int from, int to) {
	char c = 0;
	for (int n = 0; n < OF_CHILD; n++)
		must(pipe(own[n]) == 0 && write(own[n][1], &n, sizeof n) == sizeof n);
	while (write(to, &c, 1) == 1 && read(from, &c, 1) == 1)
		for (int n = 0; n < OF_CHILD; n++) {
			int got = -1;
			must(read(own[n][0], &got, sizeof got) == sizeof got && got == n);
			must(write(own[n][1], &n, sizeof n) == sizeof n);
		}
	_exit(0);
}

static void make(void) {
	char path[32];
	for (int n = 0; n < PIPES; n++) {
		must(pipe(pipes[n]) == 0 && write(pipes[n][1], &n, sizeof n) == sizeof n);
		set_flag(pipes[n][0]);
	}
	for (int n = 0; n < EVENTS; n++) {
		must((events[n] = eventfd(n + 1, EFD_NONBLOCK)) >= 0);
		set_flag(events[n]);
	}
	for (int n = 0; n < FILES; n++) {
		snprintf(path, sizeof path, "/tmp/file-%d", n);
		must((files[n] = open(path, O_RDWR | O_CREAT, 0600)) >= 0 && write(files[n], path, 5 + n % 5) == 5 + n % 5);
		set_flag(files[n]);
	}
	for (int n = 0; n < PAIRS; n++) {
		must(socketpair(AF_UNIX, n % 2 ? SOCK_STREAM : SOCK_SEQPACKET, 0, pairs[n]) == 0);
		must(write(pairs[n][0], &n, sizeof n) == sizeof n);
		set_flag(pairs[n][1]);
	}
	for (int n = 0; n < more; n++)
		must(eventfd(n, EFD_NONBLOCK) == files[FILES - 1] + 2 * PAIRS + 1 + n);
	must((poller = epoll_create1(0)) >= 0);
	for (int n = 0; n < EVENTS; n++) {
		struct epoll_event event = {EPOLLIN, {.u32 = n}};
		must(epoll_ctl(poller, EPOLL_CTL_ADD, events[n], &event) == 0);
	}
}

static void check(void) {
	for (int n = 0; n < PIPES; n++) {
		int got = -1;
		must(read(pipes[n][0], &got, sizeof got) == sizeof got && got == n);
		must(write(pipes[n][1], &n, sizeof n) == sizeof n);
		check_flag(pipes[n][0]);
	}
	struct epoll_event ready[EVENTS];
	must(epoll_wait(poller, ready, EVENTS, 0) == EVENTS);
	for (int n = 0; n < EVENTS; n++) {
		uint64_t count = 0, back = n + 1;
		must(read(events[n], &count, 8) == 8 && count == back && write(events[n], &back, 8) == 8);
		check_flag(events[n]);
	}
	for (int n = 1; n < more; n++) {
		int fd = files[FILES - 1] + 2 * PAIRS + 1 + n;
		uint64_t count = 0, back = n;
		must(read(fd, &count, 8) == 8 && count == back && write(fd, &back, 8) == 8);
	}
	for (int n = 0; n < FILES; n++) {
		must(lseek(files[n], 0, SEEK_CUR) == 5 + n % 5);
		check_flag(files[n]);
	}
	for (int n = 0; n < PAIRS; n++) {
		int got = -1;
		must(read(pairs[n][1], &got, sizeof got) == sizeof got && got == n);
		must(write(pairs[n][0], &n, sizeof n) == sizeof n);
		check_flag(pairs[n][1]);
	}
}

int main(void) {
	int ask[2], answer[2], pid;
	char c = 0;
	/* One more process of the same limit; the files follow. */
	int last = 3 + 4 + PIPES * 2 + EVENTS + FILES + PAIRS * 2 + 1;
	struct rlimit limit = {last + 190, last + 190};
	if (getenv("MORE") != NULL) {
		more = atoi(getenv("MORE"));
		limit.rlim_cur = limit.rlim_max = 20000;
	}
	must(setrlimit(RLIMIT_NOFILE, &limit) == 0);
	must(pipe(ask) == 0 && pipe(answer) == 0 && (pid = fork()) >= 0);
	if (pid == 0)
		live_as_child(ask[0], answer[1]);
	must(read(answer[0], &c, 1) == 1);
	make();
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		check();
		must(write(ask[1], &c, 1) == 1 && read(answer[0], &c, 1) == 1);
	}
	ok();
}
