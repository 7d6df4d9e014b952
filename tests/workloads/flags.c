/* Flags of open files as fcntl(F_GETFL) reports them, and locks of open files that are no regular files. Some
 * calls keep O_CLOEXEC in the flags of the file, and open(2) alone adds O_LARGEFILE. */
#include "workload.h"
#include <mqueue.h>
#include <pty.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

#define FILES_MAX 96
static int files[FILES_MAX], flags[FILES_MAX], count;
static long line[FILES_MAX];

#define keep(fd) add(fd, __LINE__)
static int add(int fd, long at) {
	must(fd >= 0 && count < FILES_MAX);
	files[count] = fd, line[count] = at, count++;
	return fd;
}

/* A descriptor as /proc/self/fd opens it again. */
static int again(int fd, int how) {
	char path[64];
	snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
	return open(path, how);
}

/* The locks of a descriptor that the kernel shows. */
static void locks_of(int fd, char *text, int size) {
	char path[64], info[4096];
	snprintf(path, sizeof path, "/proc/self/fdinfo/%d", fd);
	int opened = open(path, O_RDONLY);
	int n = read(opened, info, sizeof info - 1);
	must(n > 0 && close(opened) == 0);
	info[n] = *text = 0;
	for (char *at = strtok(info, "\n"); at != 0; at = strtok(0, "\n")) {
		char *lock = strstr(at, "FLOCK") ? strstr(at, "FLOCK") : strstr(at, "OFDLCK");
		if (strncmp(at, "lock:", 5) == 0 && lock != 0)
			strncat(text, lock, size - strlen(text) - 1);
	}
}

int main(void) {
	int ends[2], master, slave;
	sigset_t mask;
	mkdir("/tmp", 0777);
	make_file("/tmp/file", "text");
	must(mkdir("/tmp/dir", 0700) == 0);
	for (int how = 0; how <= O_CLOEXEC; how += O_CLOEXEC) {
		keep(open("/tmp/file", O_RDWR | O_APPEND | how));
		keep(open("/tmp/file", O_PATH | how));
		keep(open("/tmp/dir", O_RDONLY | O_DIRECTORY | how));
		keep(open("/dev/null", O_WRONLY | how));
		keep(open("/tmp", O_TMPFILE | O_RDWR | how, 0600));
		keep(open("/tmp", O_TMPFILE | O_WRONLY | O_APPEND | how, 0600));
		keep(again(files[count - 1], O_RDONLY | how));
		make_file("/tmp/gone", "text");
		must(mkdir("/tmp/ended", 0700) == 0);
		keep(open("/tmp/gone", O_RDONLY | how));
		keep(open("/tmp/ended", O_RDONLY | O_DIRECTORY | how));
		must(unlink("/tmp/gone") == 0 && rmdir("/tmp/ended") == 0);
		keep(eventfd(0, how ? EFD_CLOEXEC : 0));
		keep(timerfd_create(CLOCK_MONOTONIC, how ? TFD_CLOEXEC | TFD_NONBLOCK : 0));
		sigemptyset(&mask);
		keep(signalfd(-1, &mask, how ? SFD_CLOEXEC : 0));
		keep(epoll_create1(how ? EPOLL_CLOEXEC : 0));
		keep(inotify_init1(how ? IN_CLOEXEC : 0));
		keep(memfd_create("memory", how ? MFD_CLOEXEC : 0));
		keep(again(files[count - 1], O_RDONLY | how));
		keep(socket(AF_UNIX, SOCK_STREAM | (how ? SOCK_CLOEXEC : 0), 0));
		keep(mq_open("/queue", O_CREAT | O_RDONLY | how, 0600, 0));
		must(fcntl(files[count - 1], F_SETFL, O_NOATIME) == 0);
		must(pipe2(ends, how) == 0);
		/* The end that is opened again comes first. */
		int opened = again(ends[0], O_RDONLY | how), first = dup(ends[0]);
		must(first >= 0 && dup2(opened, ends[0]) == ends[0] && close(opened) == 0);
		keep(ends[0]), keep(first), keep(ends[1]);
		master = keep(posix_openpt(O_RDWR | O_NOCTTY | how));
		must(grantpt(master) == 0 && unlockpt(master) == 0);
		keep(open(ptsname(master), O_RDWR | O_NOCTTY | how));
		must(openpty(&master, &slave, 0, 0, 0) == 0);
		keep(master), keep(slave);
	}
	/* Flags that are set later, where the call that makes the file does not take them. */
	int later = keep(epoll_create1(0)), event = keep(eventfd(0, EFD_NONBLOCK));
	must(fcntl(later, F_SETFL, O_NONBLOCK) == 0 && fcntl(event, F_SETFL, O_NONBLOCK | O_APPEND) == 0);
	for (int n = 0; n < count; n++)
		must((flags[n] = fcntl(files[n], F_GETFL)) >= 0);

	char before[5][256], now[256];
	int pair[2], device = open("/dev/null", O_RDWR), memory = memfd_create("locked", 0);
	must(pipe(ends) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
	struct flock part = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = 3, .l_len = 4};
	int locked[] = {device, ends[0], pair[1], memory, open("/dev/zero", O_RDWR)};
	/* The inode of a device may be that of other containers, which share its locks. */
	must(flock(device, LOCK_SH) == 0 && flock(ends[0], LOCK_EX) == 0 && flock(pair[1], LOCK_SH) == 0);
	must(flock(memory, LOCK_EX) == 0 && fcntl(locked[4], F_OFD_SETLK, &part) == 0);
	for (int n = 0; n < 5; n++) {
		locks_of(locked[n], before[n], sizeof before[n]);
		must(*before[n] != 0);
	}
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		int wrong = 0;
		for (int n = 0; n < count; n++) {
			int got = fcntl(files[n], F_GETFL);
			if (got != flags[n]) {
				print_line("line %ld: flags 0%o became 0%o", line[n], flags[n], got);
				wrong = 1;
			}
		}
		must(!wrong);
		for (int n = 0; n < 5; n++) {
			locks_of(locked[n], now, sizeof now);
			/* The number of the inode may be another. */
			must(strncmp(now, before[n], 22) == 0);
		}
		must(flock(again(ends[0], O_RDONLY), LOCK_SH | LOCK_NB) == -1 && errno == EWOULDBLOCK);
	}
	ok();
}
