/* Open files that notify by a signal of what happens to them (O_ASYNC, F_SETOWN, F_SETSIG). */
#include "workload.h"
#include <netinet/in.h>
#include <sys/socket.h>

static const struct timespec LONG = {20, 0};

static void arm(int file, int signal) {
	must(fcntl(file, F_SETOWN, getpid()) == 0 && fcntl(file, F_SETSIG, signal) == 0);
	must(fcntl(file, F_SETFL, fcntl(file, F_GETFL) | O_ASYNC | O_NONBLOCK) == 0);
}

static int is_armed(int file, int signal) {
	int flags = fcntl(file, F_GETFL);
	return flags & O_ASYNC && flags & O_NONBLOCK && fcntl(file, F_GETOWN) == getpid() &&
	       fcntl(file, F_GETSIG) == signal;
}

static void hears(int signal, int file) {
	sigset_t set;
	siginfo_t info;
	sigemptyset(&set);
	sigaddset(&set, signal);
	must(sigtimedwait(&set, &info, &LONG) == signal && info.si_fd == file);
	while (sigtimedwait(&set, &info, &(struct timespec){0, 0}) == signal)
		;
}

int main(void) {
	int one = SIGRTMIN + 4, other = SIGRTMIN + 5, pair[2], ends[2];
	sigset_t both;
	sigemptyset(&both);
	sigaddset(&both, one);
	sigaddset(&both, other);
	must(sigprocmask(SIG_BLOCK, &both, 0) == 0);
	must(pipe(ends) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
	int udp = socket(AF_INET, SOCK_DGRAM, 0), tcp = socket(AF_INET, SOCK_STREAM, 0);
	struct sockaddr_in at = {.sin_family = AF_INET};
	must(bind(udp, (void *)&at, sizeof at) == 0 && bind(tcp, (void *)&at, sizeof at) == 0);
	must(listen(tcp, 5) == 0);
	arm(ends[0], one);
	arm(pair[0], other);
	arm(udp, one);
	arm(tcp, other);
	/* An owner alone. */
	must(fcntl(pair[1], F_SETOWN, -getpgrp()) == 0);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		char c;
		must(is_armed(ends[0], one) && is_armed(pair[0], other));
		must(is_armed(udp, one) && is_armed(tcp, other));
		must(fcntl(pair[1], F_GETOWN) == -getpgrp() && !(fcntl(pair[1], F_GETFL) & O_ASYNC));
		must(write(ends[1], "x", 1) == 1);
		hears(one, ends[0]);
		must(write(pair[1], "x", 1) == 1);
		hears(other, pair[0]);
		must(read(ends[0], &c, 1) == 1 && read(pair[0], &c, 1) == 1);
	}
	ok();
}
