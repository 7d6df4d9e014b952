/* Process descriptors: of a child, of the process itself, watched by an epoll, in two processes. */
#include "workload.h"
#include <poll.h>
#include <sys/epoll.h>

static int pidfd_open(int pid, int flags) {
	return syscall(SYS_pidfd_open, pid, flags);
}

int main(void) {
	int ask[2], answer[2];
	must(pipe(ask) == 0 && pipe(answer) == 0);
	int child = fork();
	if (child == 0) {
		pause();
		_exit(0);
	}
	int of_child = pidfd_open(child, 0), own = pidfd_open(getpid(), O_NONBLOCK);
	must(of_child >= 0 && own >= 0 && fcntl(own, F_SETFD, 0) == 0);
	must(fcntl(own, F_SETFL, O_NONBLOCK | O_APPEND) == 0);
	int watcher = fork();
	if (watcher == 0) {
		char c;
		while (read(ask[0], &c, 1) == 1) {
			must(syscall(SYS_pidfd_send_signal, of_child, 0, 0, 0) == 0);
			must(syscall(SYS_pidfd_send_signal, own, 0, 0, 0) == 0);
			must(write(answer[1], &c, 1) == 1);
		}
		_exit(0);
	}
	int dead = fork();
	if (dead == 0)
		_exit(3);
	int of_dead = pidfd_open(dead, 0), epoll = epoll_create1(0);
	struct epoll_event e = {.events = EPOLLIN, .data.u64 = 5};
	must(of_dead >= 0 && epoll_ctl(epoll, EPOLL_CTL_ADD, of_child, &e) == 0);
	nap(20);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		char c = 'x';
		struct pollfd p = {of_dead, POLLIN, 0};
		must(write(ask[1], &c, 1) == 1 && read(answer[0], &c, 1) == 1);
		must(syscall(SYS_pidfd_send_signal, of_child, 0, 0, 0) == 0);
		must(fcntl(of_child, F_GETFD) == FD_CLOEXEC && fcntl(own, F_GETFD) == 0);
		must(fcntl(own, F_GETFL) & O_NONBLOCK && !(fcntl(of_child, F_GETFL) & O_NONBLOCK));
		must(fcntl(own, F_GETFL) & O_APPEND);
		must(poll(&p, 1, 0) == 1 && epoll_wait(epoll, &e, 1, 0) == 0);
		siginfo_t info;
		must(waitid(P_PIDFD, of_dead, &info, WEXITED | WNOWAIT) == 0 && info.si_status == 3);
	}
	must(syscall(SYS_pidfd_send_signal, of_child, SIGKILL, 0, 0) == 0);
	must(epoll_wait(epoll, &e, 1, 5000) == 1 && e.data.u64 == 5);
	ok();
}
