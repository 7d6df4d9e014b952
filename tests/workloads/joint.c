/* Processes that share a table of descriptors (CLONE_FILES), or working directory and umask (CLONE_FS): with their
 * parent, with a sibling, across a process that has its own. What one of them changes, the others have. So have two
 * the I/O priority (CLONE_IO) and the undo values of semaphores (CLONE_SYSVSEM). */
#include "workload.h"
#include <sched.h>
#include <sys/epoll.h>
#include <sys/sem.h>

enum { TABLE, GRANDCHILD, CHILD, SIBLING, DIRECTORY, BOTH, UNDER, ALONE, PRIORITY, UNDO, COUNT = UNDO + 16 };
enum { NOTHING, IS_OPEN, CLOSE, OPEN, IS_AT, GO, LOCKED_BY, SET_PRIORITY, IS_PRIORITY, ADD_AND_EXIT };

static struct {
	volatile int asked, answered, what, number, result;
	char path[64];
	pid_t pid;
} * of;

static pid_t locked_by(int fd) {
	struct flock lock = {.l_type = F_WRLCK, .l_len = 1};
	must(fcntl(fd, F_GETLK, &lock) == 0);
	return lock.l_type == F_UNLCK ? 0 : lock.l_pid;
}

static int act(int me) {
	char path[64];
	mode_t mask;
	int fd, number = of[me].number;
	switch (of[me].what) {
	case IS_OPEN:
		return fcntl(number, F_GETFD) >= 0;
	case CLOSE:
		return close(number) == 0;
	case OPEN:
		fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
		must(fd >= 0 && dup3(fd, number, O_CLOEXEC) == number && close(fd) == 0);
		return 1;
	case IS_AT:
		must(getcwd(path, sizeof path) != 0);
		mask = umask(0);
		must(umask(mask) == 0);
		return !strcmp(path, of[me].path) && mask == (mode_t)number;
	case GO:
		umask(number);
		return chdir(of[me].path) == 0;
	case LOCKED_BY:
		return locked_by(number);
	case SET_PRIORITY:
		return syscall(SYS_ioprio_set, 1, 0, number) == 0;
	case IS_PRIORITY:
		return syscall(SYS_ioprio_get, 1, 0) == number;
	case ADD_AND_EXIT:
		_exit(semop(number, &(struct sembuf){0, 1, SEM_UNDO}, 1));
	}
	return 0;
}

static int ask(int one, int what, int number, const char *path) {
	of[one].what = what;
	of[one].number = number;
	strcpy(of[one].path, path);
	for (of[one].asked++; of[one].answered != of[one].asked;)
		nap(1);
	return of[one].result;
}

static void serve(int me) {
	of[me].pid = getpid();
	for (;; nap(1))
		if (of[me].answered != of[me].asked) {
			of[me].result = act(me);
			of[me].answered = of[me].asked;
		}
}

/* Like fork(2), with more in common. */
static pid_t split(int me, int flags) {
	pid_t pid = syscall(SYS_clone, flags | SIGCHLD, 0, 0, 0, 0);
	must(pid >= 0);
	if (pid == 0 && me < COUNT)
		serve(me);
	return pid;
}

/* What one of two has opened, the other has, and not those beside them. */
static void share_table(int one, int other, int number) {
	must(ask(one, OPEN, number, "") == 1 && ask(other, IS_OPEN, number, "") == 1);
	must(ask(ALONE, IS_OPEN, number, "") == 0 && fcntl(number, F_GETFD) == -1);
	must(ask(other, CLOSE, number, "") == 1 && ask(one, IS_OPEN, number, "") == 0);
}

int main(void) {
	must(syscall(SYS_ioprio_set, 1, 0, 2 << 13 | 4) == 0);
	of = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	must(of != MAP_FAILED && COUNT * sizeof *of <= 4096);
	mkdir("/tmp", 0777);
	must(mkdir("/tmp/one", 0777) == 0 && mkdir("/tmp/two", 0777) == 0);
	int ends[2], watch = epoll_create1(EPOLL_CLOEXEC);
	int file = open("/tmp/lock", O_CREAT | O_RDWR, 0600);
	must(pipe(ends) == 0 && file >= 0 && watch >= 0);
	struct epoll_event event = {EPOLLIN, {.u32 = 7}};
	must(epoll_ctl(watch, EPOLL_CTL_ADD, ends[0], &event) == 0);

	/* Those beside this process are made first, before it shares. */
	split(ALONE, 0);
	if (split(COUNT, 0) == 0) {
		/* A pair of siblings, and a child of one of them across a process with a table of its own. */
		split(SIBLING, CLONE_FILES | CLONE_PARENT);
		if (split(COUNT, CLONE_FILES | CLONE_FS) == 0) {
			split(UNDER, CLONE_FILES | CLONE_FS);
			must(unshare(CLONE_FILES | CLONE_FS) == 0 && chdir("/dev") == 0);
			for (;;)
				pause();
		}
		serve(CHILD);
	}
	while (!of[UNDER].pid || !of[SIBLING].pid)
		nap(1);
	if (split(COUNT, CLONE_FILES) == 0) {
		struct flock lock = {.l_type = F_WRLCK, .l_len = 1};
		must(fcntl(file, F_SETLK, &lock) == 0);
		split(GRANDCHILD, CLONE_FILES);
		serve(TABLE);
	}
	split(PRIORITY, CLONE_IO);
	must(ROUNDS <= COUNT - UNDO);
	for (int one = 0; one < ROUNDS; one++)
		split(UNDO + one, CLONE_SYSVSEM);
	int semaphore = semget(IPC_PRIVATE, 1, 0600);
	must(semaphore >= 0);
	split(DIRECTORY, CLONE_FS);
	split(BOTH, CLONE_FILES | CLONE_FS);
	for (int one = 0; one < UNDO + ROUNDS; one++)
		while (!of[one].pid)
			nap(1);
	must(chdir("/tmp/one") == 0);
	umask(077);

	for (int round = 0; round < ROUNDS; round++) {
		int number = 100 + round;
		must(ask(TABLE, OPEN, number, "") == 1);
		ready(round);
		/* It is open for all that share it, and for no other. */
		must(fcntl(number, F_GETFD) == FD_CLOEXEC);
		must(ask(GRANDCHILD, IS_OPEN, number, "") == 1 && ask(BOTH, IS_OPEN, number, "") == 1);
		must(ask(ALONE, IS_OPEN, number, "") == 0 && ask(DIRECTORY, IS_OPEN, number, "") == 0);
		must(ask(CHILD, IS_OPEN, number, "") == 0 && ask(SIBLING, IS_OPEN, number, "") == 0);
		must(ask(BOTH, CLOSE, number, "") == 1 && ask(TABLE, IS_OPEN, number, "") == 0);
		must(close(open("/dev/null", O_RDONLY)) == 0 && fcntl(number, F_GETFD) == -1);
		share_table(CHILD, SIBLING, 120);
		share_table(UNDER, CHILD, 121);
		share_table(SIBLING, UNDER, 122);
		/* The lock is that of the table, and of the process that has set it. */
		must(locked_by(file) == 0 && ask(GRANDCHILD, LOCKED_BY, file, "") == 0);
		must(ask(ALONE, LOCKED_BY, file, "") == of[TABLE].pid);
		char c = 'x';
		must(write(ends[1], &c, 1) == 1 && epoll_wait(watch, &event, 1, 1000) == 1);
		must(event.data.u32 == 7 && read(ends[0], &c, 1) == 1 && epoll_wait(watch, &event, 1, 0) == 0);
		/* Directories. */
		must(ask(DIRECTORY, IS_AT, 077, "/tmp/one") == 1 && ask(BOTH, IS_AT, 077, "/tmp/one") == 1);
		must(ask(TABLE, IS_AT, 022, "/") == 1 && ask(ALONE, IS_AT, 022, "/") == 1);
		must(ask(DIRECTORY, GO, 027, "/tmp/two") == 1 && ask(BOTH, IS_AT, 027, "/tmp/two") == 1);
		must(chdir("/tmp/one") == 0 && umask(077) == 027);
		must(ask(UNDER, GO, 07, "/dev/shm") == 1 && ask(CHILD, IS_AT, 07, "/dev/shm") == 1);
		must(ask(SIBLING, IS_AT, 022, "/") == 1 && ask(CHILD, GO, 022, "/") == 1);
		/* The I/O priority, and the undo values. */
		must(syscall(SYS_ioprio_get, 1, 0) == (2 << 13 | 4));
		must(ask(PRIORITY, SET_PRIORITY, 2 << 13 | 6, "") == 1);
		must(syscall(SYS_ioprio_get, 1, 0) == (2 << 13 | 6) && ask(ALONE, IS_PRIORITY, 2 << 13 | 4, "") == 1);
		must(syscall(SYS_ioprio_set, 1, 0, 2 << 13 | 4) == 0 && ask(PRIORITY, IS_PRIORITY, 2 << 13 | 4, "") == 1);
		/* What one has added is undone when the last that shares them has exited. */
		int status;
		of[UNDO + round].number = semaphore;
		of[UNDO + round].what = ADD_AND_EXIT;
		of[UNDO + round].asked++;
		must(waitpid(of[UNDO + round].pid, &status, 0) > 0 && status == 0);
		must(semctl(semaphore, 0, GETVAL) == round + 1);
	}
	ok();
}
