/* Marks of fanotify on a directory and on a file, with events that are ignored, and an epoll. */
#include "workload.h"
#include <sys/epoll.h>
#include <sys/fanotify.h>

/* Returns the mask of the next event, and stores its name; 0 without an event. */
static uint64_t next(int fd, char *name) {
	static char buffer[4096] __attribute__((aligned(8)));
	static ssize_t length, at;
	if (at >= length) {
		at = 0;
		length = read(fd, buffer, sizeof buffer);
		if (length <= 0)
			return 0;
	}
	struct fanotify_event_metadata *event = (void *)(buffer + at);
	struct fanotify_event_info_fid *fid = (void *)(event + 1);
	at += event->event_len;
	must(event->vers == FANOTIFY_METADATA_VERSION && event->fd == FAN_NOFD);
	name[0] = 0;
	if (fid->hdr.info_type == FAN_EVENT_INFO_TYPE_DFID_NAME) {
		struct file_handle *handle = (void *)fid->handle;
		strcpy(name, (char *)handle->f_handle + handle->handle_bytes);
	}
	return event->mask;
}

static void add(int fd, unsigned flags, uint64_t mask, const char *path) {
	must(fanotify_mark(fd, FAN_MARK_ADD | flags, mask, AT_FDCWD, path) == 0);
}

int main(void) {
	char name[256];
	must(mkdir("/watched", 0755) == 0);
	int file = open("/watched/file", O_RDWR | O_CREAT, 0600);
	unsigned kind = FAN_CLASS_NOTIF | FAN_REPORT_DFID_NAME | FAN_NONBLOCK | FAN_CLOEXEC;
	int fd = fanotify_init(kind, O_RDONLY);
	must(file >= 0 && fd >= 0);
	add(fd, 0, FAN_CREATE | FAN_DELETE | FAN_ONDIR, "/watched");
	add(fd, 0, FAN_MODIFY | FAN_OPEN, "/watched/file");
	add(fd, FAN_MARK_IGNORED_MASK | FAN_MARK_IGNORED_SURV_MODIFY, FAN_OPEN, "/watched/file");
	int none = fanotify_init(FAN_CLASS_NOTIF | FAN_REPORT_FID, O_RDONLY);
	int epoll = epoll_create1(0);
	struct epoll_event e = {.events = EPOLLIN, .data.u64 = 9};
	must(none >= 0 && epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &e) == 0);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		/* The restore itself causes no event. */
		must(next(fd, name) == 0 && errno == EAGAIN && epoll_wait(epoll, &e, 1, 0) == 0);
		must(pwrite(file, "x", 1, round) == 1);
		must(epoll_wait(epoll, &e, 1, 0) == 1 && e.data.u64 == 9);
		must(next(fd, name) == FAN_MODIFY && strcmp(name, "file") == 0);
		must(close(open("/watched/file", O_RDONLY)) == 0 && next(fd, name) == 0);
		must(mkdir("/watched/new", 0700) == 0);
		must(next(fd, name) == (FAN_CREATE | FAN_ONDIR) && strcmp(name, "new") == 0);
		must(rmdir("/watched/new") == 0);
		must(next(fd, name) == (FAN_DELETE | FAN_ONDIR) && next(fd, name) == 0);
		must(fcntl(fd, F_GETFD) == FD_CLOEXEC && fcntl(none, F_GETFD) == 0);
		must(fcntl(fd, F_GETFL) & O_NONBLOCK && !(fcntl(none, F_GETFL) & O_NONBLOCK));
	}
	ok();
}
