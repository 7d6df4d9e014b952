/* Locks: of a process, of an open file, of a file as a whole; shared and not; and a blocked
 * waiter. */
#include "workload.h"
#include <sys/file.h>

static int file(void) {
	int fd = open("/locked", O_RDWR | O_CREAT, 0600);
	must(fd >= 0);
	return fd;
}

static struct flock range(int type, int start, int length) {
	return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = start, .l_len = length};
}

int main(void) {
	int own = file(), open_file = file(), other = file();
	int whole = open("/whole", O_RDWR | O_CREAT, 0600);
	int whole_too = open("/whole", O_RDONLY), ask[2], answer[2];
	must(pipe(ask) == 0 && pipe(answer) == 0);
	struct flock l = range(F_WRLCK, 10, 5);
	must(fcntl(own, F_SETLK, &l) == 0);
	l = range(F_RDLCK, 100, 0);
	must(fcntl(own, F_SETLK, &l) == 0);
	l = range(F_WRLCK, 50, 1);
	must(fcntl(open_file, F_OFD_SETLK, &l) == 0);
	must(flock(whole, LOCK_EX) == 0);
	if (fork() == 0) {
		/* A child inherits the open files of its parent, not its locks. */
		char c;
		int mine = file();
		while (read(ask[0], &c, 1) == 1) {
			l = range(F_WRLCK, 12, 1);
			must(fcntl(mine, F_GETLK, &l) == 0 && l.l_type == F_WRLCK);
			must(l.l_start == 10 && l.l_len == 5 && l.l_pid == getppid());
			l = range(F_RDLCK, 200, 1);
			must(fcntl(mine, F_SETLK, &l) == 0);
			l.l_type = F_UNLCK;
			must(fcntl(mine, F_SETLK, &l) == 0);
			l = range(F_WRLCK, 1 << 30, 1);
			must(fcntl(mine, F_SETLK, &l) == -1 && errno == EAGAIN);
			l = range(F_WRLCK, 50, 1);
			must(fcntl(mine, F_OFD_SETLK, &l) == -1 && errno == EAGAIN);
			must(fcntl(open_file, F_OFD_SETLK, &l) == 0);
			must(flock(whole, LOCK_EX | LOCK_NB) == 0 && write(answer[1], &c, 1) == 1);
		}
		_exit(0);
	}
	int waits = fork();
	if (waits == 0) {
		/* Blocks as long as the parent has the lock. */
		l = range(F_WRLCK, 10, 1);
		must(fcntl(file(), F_SETLKW, &l) == 0);
		must(write(answer[1], "w", 1) == 1);
		_exit(0);
	}
	char c;
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		must(write(ask[1], "x", 1) == 1 && read(answer[0], &c, 1) == 1 && c == 'x');
		must(flock(whole_too, LOCK_SH | LOCK_NB) == -1 && errno == EWOULDBLOCK);
		l = range(F_WRLCK, 50, 1);
		must(fcntl(other, F_OFD_SETLK, &l) == -1 && errno == EAGAIN);
		must(waitpid(waits, 0, WNOHANG) == 0);
	}
	l = range(F_UNLCK, 10, 5);
	must(fcntl(own, F_SETLK, &l) == 0);
	must(read(answer[0], &c, 1) == 1 && c == 'w' && waitpid(waits, 0, 0) == waits);
	must(flock(whole, LOCK_UN) == 0 && flock(whole_too, LOCK_SH | LOCK_NB) == 0);
	ok();
}
