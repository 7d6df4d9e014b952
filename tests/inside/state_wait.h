/* How a task of state.c waits, before and after its first report. Part of that file, which includes it. */

static void wait_for(uint32_t phase)
{
	for (;;) {
		uint32_t now = __atomic_load_n(&report->go, __ATOMIC_SEQ_CST);
		if (now >= phase)
			return;
		syscall(SYS_futex, &report->go, FUTEX_WAIT, now, NULL, NULL, 0);
	}
}

/* The final wait: a call that blocks for ever. */
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
	sigset_t all;
	fd_set set;
	sigfillset(&all);
	for (;;) {
		switch (kind) {
		case 1:
			pause();
			break;
		case 2:
			read(fd, &byte, 1);
			break;
		case 3:
			poll(&ask, 1, -1);
			break;
		case 4:
			nanosleep(&long_time, NULL);
			break;
		case 5:
			clock_nanosleep(CLOCK_MONOTONIC, 0, &long_time, NULL);
			break;
		case 6:
			*REMAINING = long_time;
			syscall(SYS_ppoll, &ask, 1, REMAINING, NULL, 8);
			break;
		case 7:
			epoll_wait(fd, &event, 1, -1);
			break;
		case 8:
			epoll_pwait(fd, &event, 1, 100000000, NULL);
			break;
		case 9:
			msgrcv(id, &message, 8, 0, 0);
			break;
		case 10:
			semop(id, &down, 1);
			break;
		case 11:
			recv(fd, &byte, 1, 0);
			break;
		case 12:
			sigsuspend(&all);
			break;
		case 13:
			FD_ZERO(&set);
			select(0, &set, NULL, NULL, NULL);
			break;
		case 14:
			syscall(SYS_futex, &kind, FUTEX_WAIT, kind, &long_time, NULL, 0);
			break;
		case 100:
			/* The stop is one of all threads, which report before. */
			while (__atomic_load_n(&report->first, __ATOMIC_SEQ_CST) <
			       __atomic_load_n(&report->tasks, __ATOMIC_SEQ_CST))
				sched_yield();
			raise(SIGSTOP);
			break;
		default:
			waitpid(-1, NULL, WSTOPPED | __WALL | WNOWAIT);
			pause();
		}
	}
}
