/* Threads with descriptors of their own (unshare(2) of CLONE_FILES, close_range(2)), alone and together with another
 * thread, and threads that share a directory apart from their process. */
#include "workload.h"
#include <linux/close_range.h>
#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/inotify.h>
#include <sys/socket.h>

enum { OWN, WITH_OWN, CLOSED, PLACE, WITH_PLACE, PLAIN, COUNT };
enum { IS_OPEN, OPEN, CLOSE, IS_AT, GO, CHECK };

static struct {
	volatile int is_up, asked, answered, what, number, result;
	const char *volatile path;
} of[COUNT];
static pthread_t threads[COUNT];
static int lock_file, own_file, own_watch, own_notify, own_memory, own_pid, own_pair[2], own_pipe[2];

static int locked_by(int fd) {
	struct flock lock = {.l_type = F_WRLCK, .l_len = 1};
	must(fcntl(fd, F_GETLK, &lock) == 0);
	return lock.l_type == F_UNLCK ? 0 : lock.l_pid;
}

static void *run(void *me);

static void create(long one) {
	must(pthread_create(&threads[one], 0, run, (void *)one) == 0);
	while (!of[one].is_up)
		nap(1);
}

/* Everything in the table that the thread has to itself. */
static void set_up(void) {
	struct flock lock = {.l_type = F_WRLCK, .l_len = 1};
	struct epoll_event event = {EPOLLIN, {.u32 = 7}};
	own_file = open("/tmp/locked", O_RDWR);
	must(own_file >= 0 && fcntl(own_file, F_SETLK, &lock) == 0);
	must(pipe(own_pipe) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, own_pair) == 0);
	own_watch = epoll_create1(0);
	must(own_watch >= 0 && epoll_ctl(own_watch, EPOLL_CTL_ADD, own_pipe[0], &event) == 0);
	own_notify = inotify_init1(IN_NONBLOCK);
	must(own_notify >= 0 && inotify_add_watch(own_notify, "/tmp/one", IN_CREATE) == 1);
	own_memory = memfd_create("own", MFD_ALLOW_SEALING);
	must(own_memory >= 0 && fcntl(own_memory, F_ADD_SEALS, F_SEAL_GROW) == 0);
	own_pid = syscall(SYS_pidfd_open, 1, 0);
	must(own_pid >= 0);
}

static int check(void) {
	struct epoll_event event;
	char text[512];
	char c = 'x';
	must(write(own_pipe[1], &c, 1) == 1 && epoll_wait(own_watch, &event, 1, 1000) == 1);
	must(event.data.u32 == 7 && read(own_pipe[0], &c, 1) == 1);
	must(epoll_wait(own_watch, &event, 1, 0) == 0);
	must(write(own_pair[0], &c, 1) == 1 && read(own_pair[1], &c, 1) == 1);
	struct ucred peer;
	socklen_t size = sizeof peer;
	must(getsockopt(own_pair[0], SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.pid == getpid());
	must(mkdir("/tmp/one/new", 0700) == 0 && rmdir("/tmp/one/new") == 0);
	must(read(own_notify, text, sizeof text) > 0 && ((struct inotify_event *)text)->wd == 1);
	must(fcntl(own_memory, F_GET_SEALS) == F_SEAL_GROW);
	must(syscall(SYS_pidfd_send_signal, own_pid, 0, 0, 0) == 0);
	return locked_by(own_file) == 0;
}

static int act(int me) {
	char path[64];
	mode_t mask;
	int fd, number = of[me].number;
	switch (of[me].what) {
	case IS_OPEN:
		return fcntl(number, F_GETFD) >= 0;
	case OPEN:
		fd = open("/dev/null", O_RDONLY);
		must(fd >= 0 && dup2(fd, number) == number && close(fd) == 0);
		return 1;
	case CLOSE:
		return close(number) == 0;
	case IS_AT:
		must(getcwd(path, sizeof path) != 0);
		mask = umask(0);
		must(umask(mask) == 0);
		return !strcmp(path, of[me].path) && mask == (mode_t)number;
	case GO:
		umask(number);
		return chdir(of[me].path) == 0;
	case CHECK:
		return check();
	}
	return 0;
}

static int ask(int one, int what, int number, const char *path) {
	of[one].what = what;
	of[one].number = number;
	of[one].path = path;
	for (of[one].asked++; of[one].answered != of[one].asked;)
		nap(1);
	return of[one].result;
}

static void *run(void *arg) {
	long me = (long)arg;
	if (me == OWN) {
		must(unshare(CLONE_FILES) == 0);
		set_up();
		create(WITH_OWN);
	}
	if (me == CLOSED)
		must(syscall(SYS_close_range, 60, ~0u, CLOSE_RANGE_UNSHARE) == 0);
	if (me == PLACE) {
		must(unshare(CLONE_FS) == 0 && chdir("/tmp/one") == 0);
		umask(077);
		create(WITH_PLACE);
	}
	for (of[me].is_up = 1;; nap(1))
		if (of[me].answered != of[me].asked) {
			of[me].result = act(me);
			of[me].answered = of[me].asked;
		}
	return arg;
}

int main(void) {
	mkdir("/tmp", 0777);
	must(mkdir("/tmp/one", 0777) == 0 && mkdir("/tmp/two", 0777) == 0);
	lock_file = open("/tmp/locked", O_CREAT | O_RDWR, 0600);
	must(lock_file >= 0 && dup2(lock_file, 60) == 60);
	create(OWN);
	create(CLOSED);
	create(PLACE);
	create(PLAIN);
	must(dup2(lock_file, 61) == 61);
	for (int round = 0; round < ROUNDS; round++) {
		int number = 100 + round;
		must(ask(OWN, OPEN, number, 0) == 1);
		ready(round);
		/* What a thread has opened in a table of its own is open there alone. */
		must(ask(OWN, IS_OPEN, number, 0) == 1 && ask(WITH_OWN, IS_OPEN, number, 0) == 1);
		must(fcntl(number, F_GETFD) == -1 && ask(CLOSED, IS_OPEN, number, 0) == 0);
		must(ask(PLAIN, IS_OPEN, number, 0) == 0 && ask(PLACE, IS_OPEN, number, 0) == 0);
		must(ask(WITH_OWN, CLOSE, number, 0) == 1 && ask(OWN, IS_OPEN, number, 0) == 0);
		must(ask(OWN, IS_OPEN, 60, 0) == 1 && ask(CLOSED, IS_OPEN, 60, 0) == 0);
		must(ask(OWN, IS_OPEN, 61, 0) == 0 && ask(PLAIN, IS_OPEN, 61, 0) == 1);
		must(ask(CLOSED, OPEN, 70, 0) == 1 && ask(OWN, IS_OPEN, 70, 0) == 0);
		must(fcntl(70, F_GETFD) == -1 && ask(CLOSED, CLOSE, 70, 0) == 1);
		must(ask(WITH_PLACE, OPEN, 71, 0) == 1 && close(71) == 0);
		/* The lock is that of the thread's table. */
		must(locked_by(lock_file) == getpid());
		must(ask(OWN, CHECK, 0, 0) == 1 && ask(WITH_OWN, CHECK, 0, 0) == 1);
		/* Directories. */
		must(ask(PLACE, IS_AT, 077, "/tmp/one") == 1 && ask(WITH_PLACE, IS_AT, 077, "/tmp/one") == 1);
		must(ask(OWN, IS_AT, 022, "/") == 1 && ask(PLAIN, IS_AT, 022, "/") == 1);
		must(ask(WITH_PLACE, GO, 027, "/tmp/two") == 1 && ask(PLACE, IS_AT, 027, "/tmp/two") == 1);
		must(ask(PLACE, GO, 077, "/tmp/one") == 1 && ask(PLAIN, GO, 027, "/tmp/two") == 1);
		must(ask(WITH_OWN, IS_AT, 027, "/tmp/two") == 1 && ask(CLOSED, GO, 022, "/") == 1);
	}
	ok();
}
