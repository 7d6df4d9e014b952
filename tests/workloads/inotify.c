/* Watches of files and directories, with their numbers and gaps between the numbers, and an
 * epoll. */
#include "workload.h"
#include <poll.h>
#include <sys/epoll.h>
#include <sys/inotify.h>

static struct inotify_event *next(int fd) {
	static char buffer[4096] __attribute__((aligned(8)));
	static ssize_t length, at;
	if (at >= length) {
		at = 0;
		length = read(fd, buffer, sizeof buffer);
		if (length <= 0)
			return 0;
	}
	struct inotify_event *event = (void *)(buffer + at);
	at += sizeof *event + event->len;
	return event;
}

int main(void) {
	must(mkdir("/watched", 0755) == 0 && mkdir("/watched/below", 0755) == 0);
	int file = open("/watched/file", O_RDWR | O_CREAT, 0600);
	int fd = inotify_init1(IN_NONBLOCK | IN_CLOEXEC), none = inotify_init1(0);
	must(file >= 0 && fd >= 0 && none >= 0);
	int gap = inotify_add_watch(fd, "/etc", IN_MODIFY);
	int dir = inotify_add_watch(fd, "/watched", IN_CREATE | IN_DELETE | IN_ONLYDIR);
	int one = inotify_add_watch(fd, "/watched/file", IN_MODIFY);
	int root = inotify_add_watch(fd, "/watched/below", IN_CREATE | IN_ONESHOT);
	must(gap == 1 && dir == 2 && one == 3 && root == 4 && inotify_rm_watch(fd, gap) == 0);
	must(next(fd)->mask & IN_IGNORED);
	int epoll = epoll_create1(0);
	struct epoll_event e = {.events = EPOLLIN, .data.u64 = 9};
	must(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &e) == 0);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		/* The restore itself causes no event. */
		must(next(fd) == 0 && errno == EAGAIN && epoll_wait(epoll, &e, 1, 0) == 0);
		must(pwrite(file, "x", 1, round) == 1);
		must(epoll_wait(epoll, &e, 1, 0) == 1 && e.data.u64 == 9);
		struct inotify_event *event = next(fd);
		must(event && event->wd == one && event->mask == IN_MODIFY);
		must(mknod("/watched/new", S_IFREG | 0600, 0) == 0 && unlink("/watched/new") == 0);
		event = next(fd);
		must(event && event->wd == dir && event->mask == IN_CREATE && !strcmp(event->name, "new"));
		event = next(fd);
		must(event && event->wd == dir && event->mask == IN_DELETE);
		must(next(fd) == 0 && !(fcntl(none, F_GETFL) & O_NONBLOCK));
		must(fcntl(fd, F_GETFD) == FD_CLOEXEC && fcntl(none, F_GETFD) == 0);
	}
	must(close(open("/watched/below/a", O_CREAT | O_WRONLY, 0600)) == 0);
	must(close(open("/watched/below/b", O_CREAT | O_WRONLY, 0600)) == 0);
	struct inotify_event *event = next(fd);
	must(event && event->wd == root && event->mask == IN_CREATE);
	must((event = next(fd)) && event->mask & IN_IGNORED && next(fd) == 0);
	int more = inotify_add_watch(fd, "/etc", IN_MODIFY);
	must(more == 5);
	ok();
}
