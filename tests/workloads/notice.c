/* Open files that notify by a signal of what happens to them (O_ASYNC, F_SETOWN, F_SETSIG). */
#include "workload.h"
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <termios.h>

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

static sigset_t set_of(int signal) {
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, signal);
	return set;
}

/* A signal may be sent several times, also for room that a read makes. */
static void forget(int signal) {
	sigset_t set = set_of(signal);
	while (sigtimedwait(&set, NULL, &(struct timespec){0, 0}) == signal)
		;
}

static void hears(int signal, int file) {
	sigset_t set = set_of(signal);
	siginfo_t info;
	must(sigtimedwait(&set, &info, &LONG) == signal && info.si_fd == file);
	forget(signal);
}

/* Makes a terminal in raw mode; returns its master. */
static int terminal(int *slave) {
	char name[32];
	int number, zero = 0, master = open("/dev/ptmx", O_RDWR | O_NOCTTY);
	struct termios modes;
	must(master >= 0 && ioctl(master, TIOCSPTLCK, &zero) == 0);
	must(ioctl(master, TIOCGPTN, &number) == 0);
	snprintf(name, sizeof name, "/dev/pts/%d", number);
	must((*slave = open(name, O_RDWR | O_NOCTTY)) >= 0 && tcgetattr(*slave, &modes) == 0);
	cfmakeraw(&modes);
	must(tcsetattr(*slave, TCSANOW, &modes) == 0);
	return master;
}

int main(void) {
	int one = SIGRTMIN + 4, other = SIGRTMIN + 5, pair[2], ends[2];
	int of_fifo = SIGRTMIN + 6, of_terminal = SIGRTMIN + 7;
	sigset_t all;
	sigemptyset(&all);
	for (int signal = one; signal <= of_terminal; signal++)
		sigaddset(&all, signal);
	must(sigprocmask(SIG_BLOCK, &all, 0) == 0);
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
	must(mkfifo("/fifo", 0600) == 0);
	int fifo = open("/fifo", O_RDWR), slave, unowned, master = terminal(&slave);
	must(fifo >= 0);
	arm(fifo, of_fifo);
	arm(slave, of_terminal);
	/* The kernel itself sets the owner of a terminal. */
	int unowned_master = terminal(&unowned);
	must(fcntl(unowned, F_SETFL, O_RDWR | O_ASYNC) == 0 && fcntl(unowned, F_GETOWN) == getpid());
	must(fcntl(unowned, F_SETOWN, 0) == 0 && fcntl(unowned, F_GETOWN) == 0);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		char c;
		must(is_armed(ends[0], one) && is_armed(pair[0], other));
		must(is_armed(udp, one) && is_armed(tcp, other));
		must(fcntl(pair[1], F_GETOWN) == -getpgrp() && !(fcntl(pair[1], F_GETFL) & O_ASYNC));
		must(is_armed(fifo, of_fifo) && is_armed(slave, of_terminal));
		must(fcntl(unowned, F_GETFL) & O_ASYNC && fcntl(unowned, F_GETOWN) == 0);
		must(write(unowned_master, "x", 1) == 1 && read(unowned, &c, 1) == 1);
		must(write(fifo, "x", 1) == 1);
		hears(of_fifo, fifo);
		must(write(master, "x", 1) == 1);
		hears(of_terminal, slave);
		must(read(fifo, &c, 1) == 1 && read(slave, &c, 1) == 1);
		forget(of_fifo);
		forget(of_terminal);
		must(write(ends[1], "x", 1) == 1);
		hears(one, ends[0]);
		must(write(pair[1], "x", 1) == 1);
		hears(other, pair[0]);
		must(read(ends[0], &c, 1) == 1 && read(pair[0], &c, 1) == 1);
	}
	ok();
}
