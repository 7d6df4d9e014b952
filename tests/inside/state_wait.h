/* How a task of state.c waits, before and after its first report. Part of that file, which includes it. */

/* Operations leave this descriptor alone, so that nothing is there to be read. */
static int aside(int fd)
{
	int moved = fcntl(fd, F_DUPFD, FDS + 4);
	if (moved < 0)
		return fd;
	close(fd);
	return moved;
}

static void op_wait(long a, long b, long c, long d)
{
	int p[2];
	wait_kind = pick(a, 16);
	switch (wait_kind) {
	case 2:
	case 3:
	case 6:
		if (pipe(p))
			wait_kind = 0;
		else
			wait_fd = aside(p[0]), aside(p[1]);
		break;
	case 7:
	case 8:
		wait_fd = aside(epoll_create1(0));
		break;
	case 9:
		wait_id = msgget(IPC_PRIVATE, 0600);
		break;
	case 10:
		wait_id = semget(IPC_PRIVATE, 1, 0600);
		break;
	case 11:
		if (socketpair(AF_UNIX, SOCK_STREAM, 0, p))
			wait_kind = 0;
		else
			wait_fd = aside(p[0]), aside(p[1]);
	}
}

static void wait_for(uint32_t phase)
{
	for (;;) {
		uint32_t now = __atomic_load_n(&report->go, __ATOMIC_SEQ_CST);
		if (now >= phase)
			return;
		syscall(SYS_futex, &report->go, FUTEX_WAIT, now, NULL, NULL, 0);
	}
}

/* A system call, which returns -errno: threads here share errno. */
static long call(long number, long a, long b, long c, long d, long e)
{
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	register long r9 __asm__("r9") = 0;
	long got;
	__asm__ volatile("syscall"
			 : "=a"(got)
			 : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
			 : "rcx", "r11", "memory");
	return got;
}

/* The final wait: a call that blocks for ever. Another operation may have closed its file, or made it ready: then
 * the task waits for signals. */
static void wait_otherwise(int kind, int fd, long id)
{
	char byte;
	struct timespec long_time = {500000, 0};
	struct pollfd ask = {fd, POLLIN, 0};
	struct sembuf down = {0, -1, 0};
	struct epoll_event event;
	struct msgbuf {
		long type;
		char text[8];
	} message;
	/* The mask as it is: a signal that only the mask of a call blocks is delivered (docs/state.md). */
	sigset_t mask;
	sigprocmask(SIG_BLOCK, NULL, &mask);
	for (long got = -EINTR; got == -EINTR;) {
		switch (kind) {
		case 1:
			got = call(SYS_pause, 0, 0, 0, 0, 0);
			break;
		case 2:
			got = call(SYS_read, fd, (long)&byte, 1, 0, 0);
			break;
		case 3:
			got = call(SYS_poll, (long)&ask, 1, -1, 0, 0);
			break;
		case 4:
			got = call(SYS_nanosleep, (long)&long_time, 0, 0, 0, 0);
			break;
		case 5:
			got = call(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, (long)&long_time, 0, 0);
			break;
		case 6:
			*REMAINING = long_time;
			got = call(SYS_ppoll, (long)&ask, 1, (long)REMAINING, 0, 8);
			break;
		case 7:
			got = call(SYS_epoll_wait, fd, (long)&event, 1, -1, 0);
			break;
		case 8:
			got = call(SYS_epoll_pwait, fd, (long)&event, 1, 100000000, 0);
			break;
		case 9:
			got = call(SYS_msgrcv, id, (long)&message, 8, 0, 0);
			break;
		case 10:
			got = call(SYS_semop, id, (long)&down, 1, 0, 0);
			break;
		case 11:
			/* What another operation has sent stays: other tasks have reported it. */
			got = call(SYS_recvfrom, fd, (long)&byte, 1, MSG_PEEK, 0);
			break;
		case 12:
			got = call(SYS_rt_sigsuspend, (long)&mask, 8, 0, 0, 0);
			break;
		case 13:
			got = call(SYS_select, 0, 0, 0, 0, 0);
			break;
		case 14:
			got = call(SYS_futex, (long)&kind, FUTEX_WAIT, kind, (long)&long_time, 0);
			break;
		case 100:
			/* The stop is one of all threads, which report before; other processes report after it. */
			while (__atomic_load_n(&report->first, __ATOMIC_SEQ_CST) <
			       __atomic_load_n(&report->stopping, __ATOMIC_SEQ_CST))
				sched_yield();
			raise(SIGSTOP);
			break;
		default:
			got = call(SYS_wait4, -1, 0, WSTOPPED | __WALL | WNOWAIT, 0, 0);
		}
	}
	for (;;)
		pause();
}

/* Calls `act` with the number of each entry of a directory of procfs that has one; the number of entries for which it
 * returned 0. */
static int each_number(const char *path, int (*act)(const char *, long), int but)
{
	char names[2048];
	int others = 0, dir = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	for (long size; dir >= 0 && (size = syscall(SYS_getdents64, dir, names, sizeof names)) > 0;)
		for (long at = 0; at < size; at += *(unsigned short *)(names + at + 16)) {
			long number = strtol(names + at + 19, NULL, 10);
			if (number > 0 && number != but)
				others += act(path, number) == 0;
		}
	close(dir);
	return others;
}

static int is_asleep(const char *path, long tid)
{
	char name[64], text[256];
	snprintf(name, sizeof name, "%s/%ld/stat", path, tid);
	int fd = open(name, O_RDONLY | O_CLOEXEC);
	long size = read(fd, text, sizeof text - 1);
	close(fd);
	text[size > 0 ? size : 0] = 0;
	char *end = strrchr(text, ')');
	return end == NULL || strchr("SItTZX", end[2]) != NULL;
}

static int are_asleep(const char *path, long pid)
{
	char name[64];
	snprintf(name, sizeof name, "%s/%ld/task", path, pid);
	return each_number(name, is_asleep, 0) == 0;
}

/* Waits until all other tasks are blocked, and still are a moment later. */
static void await_sleep(void)
{
	struct timespec moment = {0, 20000000};
	for (int n = 0, asleep = 0; n < 2000 && asleep < 3; n++) {
		asleep = each_number("/proc", are_asleep, 1) == 0 ? asleep + 1 : 0;
		syscall(SYS_nanosleep, &moment, NULL);
	}
}
