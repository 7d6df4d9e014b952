/* Builds kernel state as a list of operations describes it, reports it, and waits.
 *
 * state ops          prints the names of all operations, with the weight of each
 * state run          runs the programs of /ctl/program as process 1 of a container
 * state wake         lets all tasks report once more, and waits until they have
 *
 * A program is a list of lines "NAME A B C D" with small numbers. Every list is a program: an
 * operation picks descriptors, files, signals and sizes by its numbers modulo what there is, and an
 * operation that fails is skipped. So any part of a list is a program as well, and a list that shows
 * a fault can be made smaller (tests/state.rs). "program" begins the next one; "fork" and "thread"
 * run the lines up to their "end" in a child, which is complete before its parent goes on.
 *
 * When all programs are complete, every task writes what it sees of itself to its slot of
 * /ctl/report, then process 1 prints "ready". From then on no task executes anything, unless a
 * timer's handler runs, until "state wake". Processes that stop themselves do so before the others
 * write: a parent reports the signal of the stop (SIGCHLD) both times. Reports contain nothing that
 * time changes. Nothing here allocates memory or uses stdio after the start, since a report must not
 * change what it describes.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/futex.h>
#include <linux/magic.h>
#include <linux/memfd.h>
#include <linux/seccomp.h>
#include <mqueue.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SLOTS 64
#define SLOT_BYTES 32768
#define OPS_MAX 4096
#define FDS 96
#define MEMORY 0x100000000000ul
#define PLACES 24
#define PLACE_BYTES 0x10000ul
/* The kernel writes the remaining time of ppoll(2) there whenever the wait is interrupted. */
#define REMAINING ((struct timespec *)(MEMORY - 0x10000))

struct slot {
	char text[2][SLOT_BYTES];
};

/* /ctl/report, mapped by all tasks. */
struct report {
	uint32_t go;	    /* the phase that tasks wait for: STOP, REPORT, AGAIN */
	uint32_t tasks;	    /* slots in use */
	uint32_t stopping;  /* tasks of processes that stop */
	uint32_t first;	    /* first reports */
	uint32_t waiting;   /* tasks that report again */
	uint32_t second;    /* second reports */
	uint32_t complete[SLOTS * 4];
	uint32_t blocks;    /* blocks begun: numbers of `complete` */
	uint32_t umask_lock; /* held while a task reads its umask */
	uint32_t gone;	    /* tasks with a slot that another task of their process has ended */
	uint32_t until_s;   /* when the first process waits no longer for a block */
	char pad[4096 - 4 * (10 + SLOTS * 4)];
	struct slot slots[SLOTS];
};

/* Phases: processes that stop report and stop; the others report; the others report again. */
enum { STOP = 1, REPORT, AGAIN };

static struct report *report;

/* The final wait of the task that is being built: one at a time is. */
static int wait_kind;
static int wait_fd = -1;
static long wait_id = -1;

/* Tasks of this process, those that would report again, and whether one of them stops it: then none does. */
static int all_here;
static int here;
static int is_stopping;

struct op {
	int kind;
	long n[4];
};
static struct op ops[OPS_MAX];
static int op_count;
static int program_number;

static long pick(long n, long count)
{
	return count > 0 ? (n % count + count) % count : 0;
}

/* An open descriptor beyond the standard streams, or -1. */
static int fd_of(long n)
{
	int open[FDS], count = 0;
	for (int fd = 3; fd < FDS; fd++)
		if (fcntl(fd, F_GETFD) >= 0)
			open[count++] = fd;
	return count > 0 ? open[pick(n, count)] : -1;
}

/* An open descriptor of a kind of file (S_IFMT), or any where there is none. */
static int fd_of_type(long n, int type)
{
	int open[FDS], count = 0;
	struct stat st;
	for (int fd = 3; fd < FDS; fd++)
		if (fstat(fd, &st) == 0 && (int)(st.st_mode & S_IFMT) == type)
			open[count++] = fd;
	return count > 0 ? open[pick(n, count)] : fd_of(n);
}

static char *name_of(long n)
{
	static char names[4][16];
	static int next;
	char *name = names[next++ % 4];
	strcpy(name, "f0");
	name[1] = '0' + pick(n, 6);
	return name;
}

static int signal_of(long n)
{
	static const int all[] = {SIGUSR1, SIGUSR2, SIGHUP, SIGALRM, SIGCHLD, SIGIO, SIGTERM, SIGURG,
				  SIGWINCH, SIGVTALRM, SIGPROF, 34, 35, 40, 50, 64};
	return all[pick(n, sizeof all / sizeof *all)];
}

static void handler(int signal)
{
	(void)signal;
}

static void long_handler(int signal, siginfo_t *info, void *context)
{
	(void)signal, (void)info, (void)context;
}

static void set_action(int signal, long how, long flags)
{
	static const int some[] = {0, SA_RESTART, SA_NODEFER, SA_ONSTACK, SA_RESETHAND,
				   SA_RESTART | SA_NOCLDSTOP, SA_RESTART | SA_ONSTACK, SA_RESTART};
	struct sigaction action = {.sa_flags = some[pick(flags, 8)]};
	if (flags & 8) {
		sigaddset(&action.sa_mask, SIGUSR2);
		sigaddset(&action.sa_mask, 45);
	}
	switch (pick(how, 4)) {
	case 0:
		action.sa_handler = SIG_IGN;
		break;
	case 1:
		action.sa_sigaction = long_handler;
		action.sa_flags |= SA_SIGINFO;
		break;
	default:
		action.sa_handler = handler;
	}
	sigaction(signal, &action, NULL);
}

/* A signal that arrives later must not end the process, by another thread either, which may not block it. */
static void survive(int signal)
{
	struct sigaction action;
	sigset_t blocked;
	sigprocmask(SIG_BLOCK, NULL, &blocked);
	if (sigaction(signal, NULL, &action) == 0 && action.sa_handler == SIG_DFL &&
	    (!sigismember(&blocked, signal) || all_here > 0 || gettid() != getpid()))
		set_action(signal, 2, 1);
}

static void block(int how, int signal)
{
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, signal);
	sigprocmask(how, &set, NULL);
}

/* Time until an expiry: far away, or soon and again and again, or soon and once. */
static void times_of(long n, struct timespec *value, struct timespec *interval)
{
	memset(interval, 0, sizeof *interval);
	value->tv_nsec = 0;
	value->tv_sec = 100000 + pick(n, 1000);
	switch (pick(n, 4)) {
	case 0:
		interval->tv_sec = 50000;
		break;
	case 1:
		value->tv_sec = 0;
		value->tv_nsec = 1000;
		break;
	case 2:
		value->tv_sec = 0;
		value->tv_nsec = 1000;
		interval->tv_sec = 3000000;
		break;
	}
}

/* The same by a clock of CPU time, which runs on whenever the task is looked at: far away. */
static void times_of_cpu(long n, struct timespec *value, struct timespec *interval)
{
	times_of(n, value, interval);
	value->tv_nsec = 0;
	value->tv_sec = 100000;
}

/* ---- operations: descriptors and files */

static const int open_flags[] = {O_RDWR | O_CREAT, O_RDONLY | O_CREAT, O_WRONLY | O_CREAT,
				 O_RDWR | O_CREAT | O_APPEND, O_RDWR | O_CREAT | O_NONBLOCK,
				 O_RDWR | O_CREAT | O_CLOEXEC, O_RDWR | O_CREAT | O_SYNC,
				 O_RDWR | O_CREAT | O_NOATIME, O_RDWR | O_CREAT | O_DSYNC};

static void op_open(long a, long b, long c, long d)
{
	int fd = open(name_of(a), open_flags[pick(b, 9)], 0600 | pick(c, 64));
	if (fd >= 0 && d & 1)
		ftruncate(fd, pick(c, 5) * 3000);
}
static void op_tmpfile(long a, long b, long c, long d)
{
	int fd = open(".", O_TMPFILE | O_RDWR | (a & 1 ? O_EXCL : 0), 0600);
	if (fd >= 0 && write(fd, "temporary", 9) > 0)
		ftruncate(fd, pick(b, 3) * 5000 + 9);
}
static void op_directory(long a, long b, long c, long d)
{
	char name[] = "d0";
	name[1] += pick(a, 3);
	mkdir(name, 0700 | pick(b, 64));
	open(name, O_DIRECTORY | (c & 1 ? O_PATH : O_RDONLY) | (d & 1 ? O_CLOEXEC : 0));
}
static void op_path(long a, long b, long c, long d)
{
	open(name_of(a), O_PATH | (b & 1 ? O_NOFOLLOW : 0));
}
static void op_device(long a, long b, long c, long d)
{
	static const char *all[] = {"/dev/null", "/dev/zero", "/dev/full", "/dev/urandom", "/dev/random"};
	open(all[pick(a, 5)], (b & 1 ? O_RDWR : O_RDONLY) | (c & 1 ? O_NONBLOCK : 0));
}
static void op_procfile(long a, long b, long c, long d)
{
	static const char *all[] = {"/proc/1/status", "/proc/1/stat", "/proc/version", "/proc/1/task",
				    "/proc/sys/kernel/ostype"};
	open(all[pick(a, 5)], O_RDONLY);
}
static void op_pipe(long a, long b, long c, long d)
{
	int p[2];
	if (pipe2(p, (a & 1 ? O_NONBLOCK : 0) | (a & 2 ? O_CLOEXEC : 0) | (a & 4 ? O_DIRECT : 0)))
		return;
	char text[200];
	memset(text, 'p', sizeof text);
	fcntl(p[1], F_SETFL, fcntl(p[1], F_GETFL) | O_NONBLOCK);
	for (long n = 0; n < pick(b, 4); n++)
		write(p[1], text, 1 + pick(c * (n + 1), 200));
	if (d & 1)
		fcntl(p[0], F_SETPIPE_SZ, 4096 << pick(d, 6));
	if (d & 2)
		close(p[0]);
	else if (d & 4)
		close(p[1]);
}
static void op_fifo(long a, long b, long c, long d)
{
	char name[] = "p0";
	name[1] += pick(a, 3);
	mkfifo(name, 0640);
	int fd = open(name, O_RDWR | (b & 1 ? O_NONBLOCK : 0));
	if (fd >= 0 && c & 1)
		write(fd, "fifo", 4);
	if (d & 1)
		unlink(name);
}
static void op_dup(long a, long b, long c, long d)
{
	int fd = fd_of(a);
	if (b & 1)
		dup3(fd, 3 + pick(c, 40), d & 1 ? O_CLOEXEC : 0);
	else
		dup(fd);
}
static void op_close(long a, long b, long c, long d)
{
	close(fd_of(a));
}
static void op_fdflags(long a, long b, long c, long d)
{
	static const int flags[] = {O_NONBLOCK, O_APPEND, O_NONBLOCK | O_APPEND, 0, O_NOATIME};
	int fd = fd_of(a);
	if (b & 1)
		fcntl(fd, F_SETFD, c & 1);
	else
		fcntl(fd, F_SETFL, flags[pick(d, 5)]);
}
static void op_notice(long a, long b, long c, long d)
{
	int fd = fd_of(a);
	int signal = signal_of(c);
	survive(signal), survive(SIGIO);
	struct f_owner_ex owner = {pick(b, 3), b & 4 ? getppid() : getpid()};
	if (owner.type == F_OWNER_TID)
		owner.pid = gettid();
	if (owner.type == F_OWNER_PGRP)
		owner.pid = getpgrp();
	fcntl(fd, F_SETOWN_EX, &owner);
	fcntl(fd, F_SETSIG, d & 1 ? 0 : signal);
	/* A TCP connection signals when its packets are let through again, and a pipe when the end by which a checkpoint
	 * has read it is closed (docs/state.md). */
	struct tcp_info info;
	struct stat st;
	socklen_t size = sizeof info;
	int is_pipe = fstat(fd, &st) == 0 && S_ISFIFO(st.st_mode);
	if (d & 2 && !is_pipe && getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0)
		fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_ASYNC);
}
static void op_write(long a, long b, long c, long d)
{
	char text[3000];
	int fd = fd_of_type(a, S_IFREG);
	memset(text, 'a' + pick(b, 26), sizeof text);
	if (d & 1)
		pwrite(fd, text, pick(c * 37, 3000), pick(d * 1000, 20000));
	else
		write(fd, text, pick(c * 37, 3000));
}
static void op_seek(long a, long b, long c, long d)
{
	lseek(fd_of_type(a, S_IFREG), pick(b * 100, 10000), c & 1 ? SEEK_SET : SEEK_END);
}
static void op_truncate(long a, long b, long c, long d)
{
	int fd = fd_of_type(a, S_IFREG);
	if (c & 1)
		fallocate(fd, d & 1 ? FALLOC_FL_KEEP_SIZE : 0, pick(b, 4) * 4096, 8192);
	else
		ftruncate(fd, pick(b * 1111, 30000));
}
static void op_unlink(long a, long b, long c, long d)
{
	unlink(name_of(a));
}
static void op_rename(long a, long b, long c, long d)
{
	rename(name_of(a), name_of(b));
}
static void op_link(long a, long b, long c, long d)
{
	link(name_of(a), name_of(b));
}
static void op_rmdir(long a, long b, long c, long d)
{
	char name[] = "d0";
	name[1] += pick(a, 3);
	rmdir(name);
}
static void op_lock(long a, long b, long c, long d)
{
	int fd = fd_of_type(a, S_IFREG);
	struct flock lock = {c & 1 ? F_WRLCK : F_RDLCK, SEEK_SET, pick(d, 7) * 10, pick(d, 3) * 10, 0};
	if (b % 3 == 0)
		flock(fd, (c & 1 ? LOCK_EX : LOCK_SH) | LOCK_NB);
	else
		fcntl(fd, b % 3 == 1 ? F_SETLK : F_OFD_SETLK, &lock);
}
static void op_lease(long a, long b, long c, long d)
{
	survive(SIGIO);
	fcntl(fd_of_type(a, S_IFREG), F_SETLEASE, b & 1 ? F_WRLCK : F_RDLCK);
}
static void op_memfd(long a, long b, long c, long d)
{
	int fd = syscall(SYS_memfd_create, "name", MFD_ALLOW_SEALING | (a & 1 ? MFD_CLOEXEC : 0));
	if (fd >= 0 && write(fd, "memory file", 11) > 0)
		ftruncate(fd, pick(b, 4) * 6000 + 11);
	static const int seals[] = {0, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE, F_SEAL_SEAL,
				    F_SEAL_FUTURE_WRITE, F_SEAL_SHRINK | F_SEAL_GROW};
	fcntl(fd, F_ADD_SEALS, seals[pick(c, 7)]);
}

/* ---- descriptors that report events */

static void op_eventfd(long a, long b, long c, long d)
{
	int fd = eventfd(pick(a, 100), (b & 1 ? EFD_NONBLOCK : 0) | (b & 2 ? EFD_SEMAPHORE : 0) |
					       (b & 4 ? EFD_CLOEXEC : 0));
	uint64_t more = 0xfffffffffffffff0;
	if (fd >= 0 && c % 8 == 7) {
		fcntl(fd, F_SETFL, O_NONBLOCK);
		write(fd, &more, 8);
	}
}
static void op_timerfd(long a, long b, long c, long d)
{
	static const int clocks[] = {CLOCK_MONOTONIC, CLOCK_REALTIME, CLOCK_BOOTTIME};
	int clock = clocks[pick(a, 3)];
	int fd = timerfd_create(clock, (b & 1 ? TFD_NONBLOCK : 0) | (b & 2 ? TFD_CLOEXEC : 0));
	struct itimerspec t;
	times_of(c, &t.it_value, &t.it_interval);
	int flags = 0;
	if (d & 1) {
		struct timespec now;
		clock_gettime(clock, &now);
		t.it_value.tv_sec += now.tv_sec;
		flags = TFD_TIMER_ABSTIME | (clock == CLOCK_REALTIME && d & 2 ? TFD_TIMER_CANCEL_ON_SET : 0);
	}
	if (d % 8 != 7)
		timerfd_settime(fd, flags, &t, NULL);
}
static void op_signalfd(long a, long b, long c, long d)
{
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, signal_of(a));
	sigaddset(&set, signal_of(b));
	if (d & 1)
		block(SIG_BLOCK, signal_of(a));
	signalfd(-1, &set, (c & 1 ? SFD_NONBLOCK : 0) | (c & 2 ? SFD_CLOEXEC : 0));
}
static void op_epoll(long a, long b, long c, long d)
{
	int fd = epoll_create1(a & 1 ? EPOLL_CLOEXEC : 0);
	static const uint32_t events[] = {EPOLLIN, EPOLLOUT, EPOLLIN | EPOLLET, EPOLLIN | EPOLLONESHOT,
					  EPOLLRDHUP | EPOLLPRI, EPOLLIN | EPOLLOUT | EPOLLEXCLUSIVE, 0};
	for (long n = 0; n < 1 + pick(b, 3); n++) {
		struct epoll_event e = {events[pick(c + n, 7)], {.u64 = 0x123456789abcull * (n + 1)}};
		epoll_ctl(fd, EPOLL_CTL_ADD, fd_of(d + n), &e);
	}
	struct epoll_event taken[4];
	if (a & 2)
		epoll_wait(fd, taken, 1 + pick(a, 4), 0);
}
static void op_inotify(long a, long b, long c, long d)
{
	int fd = inotify_init1((a & 1 ? IN_NONBLOCK : 0) | (a & 2 ? IN_CLOEXEC : 0));
	char name[] = "d0";
	name[1] += pick(b, 3);
	mkdir(name, 0700);
	inotify_add_watch(fd, name, c & 1 ? IN_CREATE | IN_DELETE : IN_ALL_EVENTS);
	if (c & 2)
		inotify_add_watch(fd, "/etc", IN_MODIFY | IN_ONLYDIR);
	if (d & 1) {
		int other = inotify_add_watch(fd, "/bin", IN_MOVED_FROM);
		inotify_rm_watch(fd, other);
		inotify_add_watch(fd, "/usr", IN_CLOSE_WRITE | IN_ONESHOT);
	}
}
static void op_pidfd(long a, long b, long c, long d)
{
	syscall(SYS_pidfd_open, a % 3 == 0 ? getppid() : a % 3 == 1 ? 1 : getpid(), b & 1 ? O_NONBLOCK : 0);
}
static void op_epollmore(long a, long b, long c, long d)
{
	struct epoll_event e = {EPOLLIN | (c & 1 ? EPOLLET : 0), {.u64 = d}};
	for (int fd = 3; fd < FDS; fd++)
		if (epoll_ctl(fd, b & 1 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, fd_of(a), &e) == 0)
			return;
}

/* ---- sockets */

static socklen_t address(struct sockaddr_storage *s, int v6, int port)
{
	memset(s, 0, sizeof *s);
	if (v6) {
		struct sockaddr_in6 *a = (void *)s;
		a->sin6_family = AF_INET6;
		a->sin6_port = htons(port);
		a->sin6_addr = in6addr_loopback;
		return sizeof *a;
	}
	struct sockaddr_in *a = (void *)s;
	a->sin_family = AF_INET;
	a->sin_port = htons(port);
	a->sin_addr.s_addr = htonl(INADDR_LOOPBACK + program_number);
	return sizeof *a;
}
static int next_port(void)
{
	return 20000 + __sync_fetch_and_add(&report->blocks, 1) * 7 % 20000;
}
static void op_pair(long a, long b, long c, long d)
{
	static const int types[] = {SOCK_STREAM, SOCK_DGRAM, SOCK_SEQPACKET};
	int p[2];
	if (socketpair(AF_UNIX, types[pick(a, 3)] | (b & 1 ? SOCK_NONBLOCK : 0) |
					(b & 2 ? SOCK_CLOEXEC : 0), 0, p))
		return;
	char text[300];
	memset(text, 'u', sizeof text);
	for (long n = 0; n < pick(c, 4); n++)
		send(p[n & 1], text, 1 + pick(c * 31 * (n + 1), 299), MSG_DONTWAIT);
	if (d & 1)
		shutdown(p[0], pick(d >> 1, 3));
	if (d & 8)
		close(p[1]);
}
static void op_passfd(long a, long b, long c, long d)
{
	int one = fd_of(b);
	char byte = 'x';
	struct iovec data = {&byte, 1};
	char room[CMSG_SPACE(sizeof(int))] = {0};
	struct msghdr m = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = room,
			   .msg_controllen = sizeof room};
	struct cmsghdr *h = CMSG_FIRSTHDR(&m);
	h->cmsg_level = SOL_SOCKET;
	h->cmsg_type = SCM_RIGHTS;
	h->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(h), &one, sizeof one);
	sendmsg(fd_of_type(a, S_IFSOCK), &m, MSG_DONTWAIT | MSG_NOSIGNAL);
	if (c & 1)
		close(one);
}
static void op_unix(long a, long b, long c, long d)
{
	static const int types[] = {SOCK_STREAM, SOCK_DGRAM, SOCK_SEQPACKET};
	int type = types[pick(a, 3)];
	struct sockaddr_un s = {AF_UNIX, ""};
	snprintf(s.sun_path, sizeof s.sun_path, "%ss%ld.%d", b & 1 ? "?" : "/", pick(b, 5), getpid());
	if (b & 1)
		s.sun_path[0] = 0;
	socklen_t size = offsetof(struct sockaddr_un, sun_path) + strlen(s.sun_path + 1) + 1 + !(b & 1);
	int fd = socket(AF_UNIX, type | SOCK_NONBLOCK, 0);
	bind(fd, (void *)&s, size);
	if (type != SOCK_DGRAM && c % 4 != 3)
		listen(fd, 1 + pick(c, 5));
	int caller = -1;
	if (d & 1) {
		caller = socket(AF_UNIX, type | SOCK_NONBLOCK, 0);
		connect(caller, (void *)&s, size);
		if (d & 2)
			send(caller, "hello", 5, MSG_DONTWAIT | MSG_NOSIGNAL);
		if (d & 4)
			accept4(fd, NULL, NULL, d & 8 ? SOCK_NONBLOCK : 0);
		if (d & 16)
			close(caller);
	}
	if (d & 32 && !(b & 1))
		unlink(s.sun_path);
}
static void op_udp(long a, long b, long c, long d)
{
	int v6 = a & 1;
	struct sockaddr_storage s;
	socklen_t size = address(&s, v6, next_port());
	int fd = socket(v6 ? AF_INET6 : AF_INET, SOCK_DGRAM | (a & 2 ? SOCK_NONBLOCK : 0), 0);
	if (b % 4 != 0)
		bind(fd, (void *)&s, size);
	int other = socket(v6 ? AF_INET6 : AF_INET, SOCK_DGRAM, 0);
	if (c & 1)
		connect(other, (void *)&s, size);
	for (long n = 0; n < pick(d, 4); n++)
		sendto(other, "datagram", 1 + n * 2, MSG_DONTWAIT, (void *)&s, size);
	if (c & 2)
		close(other);
	if (c & 4)
		shutdown(other, SHUT_WR);
}
static void op_tcp(long a, long b, long c, long d)
{
	int v6 = a & 1;
	struct sockaddr_storage s;
	socklen_t size = address(&s, v6, next_port());
	int family = v6 ? AF_INET6 : AF_INET;
	int one = 1;
	int fd = socket(family, SOCK_STREAM | (a & 2 ? SOCK_NONBLOCK : 0), 0);
	if (b & 1)
		setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
	if (b % 8 == 7)
		return;
	bind(fd, (void *)&s, size);
	if (b % 8 == 6)
		return;
	listen(fd, 1 + pick(c, 9));
	if (!(d & 1))
		return;
	int caller = socket(family, SOCK_STREAM, 0);
	if (connect(caller, (void *)&s, size))
		return;
	char text[500];
	memset(text, 't', sizeof text);
	if (d & 2)
		send(caller, text, 1 + pick(c * 13, 499), MSG_NOSIGNAL);
	if (!(d & 4))
		return;
	int server = accept4(fd, NULL, NULL, SOCK_NONBLOCK);
	if (d & 8)
		send(server, text, 1 + pick(c * 17, 499), MSG_NOSIGNAL);
	if (d & 16)
		shutdown(caller, SHUT_WR);
	if (d & 32)
		shutdown(server, SHUT_WR);
	if (d & 64)
		close(fd);
}
static void op_netlink(long a, long b, long c, long d)
{
	socket(AF_NETLINK, SOCK_RAW | (a & 1 ? SOCK_CLOEXEC : 0), 0);
}
static void op_option(long a, long b, long c, long d)
{
	static const int all[][2] = {
		{SOL_SOCKET, SO_REUSEADDR}, {SOL_SOCKET, SO_REUSEPORT}, {SOL_SOCKET, SO_KEEPALIVE},
		{SOL_SOCKET, SO_BROADCAST}, {SOL_SOCKET, SO_OOBINLINE}, {SOL_SOCKET, SO_DONTROUTE},
		{SOL_SOCKET, SO_PRIORITY}, {SOL_SOCKET, SO_PASSCRED}, {SOL_SOCKET, SO_RCVLOWAT},
		{SOL_SOCKET, SO_TIMESTAMP}, {SOL_SOCKET, SO_TIMESTAMPNS}, {SOL_SOCKET, SO_SNDBUF},
		{SOL_SOCKET, SO_RCVBUF}, {SOL_SOCKET, SO_PEEK_OFF}, {IPPROTO_IP, IP_TOS},
		{IPPROTO_IP, IP_TTL}, {IPPROTO_IP, IP_PKTINFO}, {IPPROTO_IP, IP_RECVERR},
		{IPPROTO_IP, IP_RECVTTL}, {IPPROTO_IP, IP_MTU_DISCOVER}, {IPPROTO_IP, IP_FREEBIND},
		{IPPROTO_IP, IP_MULTICAST_TTL}, {IPPROTO_IPV6, IPV6_V6ONLY},
		{IPPROTO_IPV6, IPV6_UNICAST_HOPS}, {IPPROTO_IPV6, IPV6_TCLASS},
		{IPPROTO_IPV6, IPV6_RECVPKTINFO}, {IPPROTO_TCP, TCP_NODELAY}, {IPPROTO_TCP, TCP_CORK},
		{IPPROTO_TCP, TCP_KEEPIDLE}, {IPPROTO_TCP, TCP_KEEPINTVL}, {IPPROTO_TCP, TCP_KEEPCNT},
		{IPPROTO_TCP, TCP_SYNCNT}, {IPPROTO_TCP, TCP_LINGER2}, {IPPROTO_TCP, TCP_USER_TIMEOUT},
		{IPPROTO_TCP, TCP_NOTSENT_LOWAT}, {IPPROTO_TCP, TCP_MAXSEG}, {IPPROTO_TCP, TCP_QUICKACK}};
	int value = d & 1 ? 1 + pick(d, 3) : 40 + pick(d, 60);
	const int *one = all[pick(b, sizeof all / sizeof *all)];
	setsockopt(fd_of_type(a, S_IFSOCK), one[0], one[1], &value, sizeof value);
}
static void op_linger(long a, long b, long c, long d)
{
	struct linger linger = {b & 1, pick(c, 60)};
	struct timeval time = {pick(d, 50), 500000};
	int fd = fd_of_type(a, S_IFSOCK);
	if (d & 1)
		setsockopt(fd, SOL_SOCKET, d & 2 ? SO_RCVTIMEO : SO_SNDTIMEO, &time, sizeof time);
	else
		setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger);
}
static void op_shutdown(long a, long b, long c, long d)
{
	shutdown(fd_of_type(a, S_IFSOCK), pick(b, 3));
}
static void op_receive(long a, long b, long c, long d)
{
	char text[64];
	recv(fd_of_type(a, S_IFSOCK), text, 1 + pick(b, 63), MSG_DONTWAIT | (c & 1 ? MSG_PEEK : 0));
}
static void op_send(long a, long b, long c, long d)
{
	char text[2000];
	memset(text, 's', sizeof text);
	send(fd_of_type(a, S_IFSOCK), text, 1 + pick(b * 41, 1999), MSG_DONTWAIT | MSG_NOSIGNAL);
}

/* ---- memory */

static void *place_of(long n)
{
	return (void *)(MEMORY + (program_number * 64 + pick(n, PLACES)) * PLACE_BYTES);
}
static size_t length_of(long n)
{
	return 4096 * (1 + pick(n, 16));
}
/* A part of a place: first page and length. */
static void *part_of(long a, long b, size_t *length)
{
	long first = pick(b, 12);
	*length = 4096 * (1 + pick(b / 12, 16 - first));
	return (char *)place_of(a) + first * 4096;
}
static const int accesses[] = {PROT_READ | PROT_WRITE, PROT_READ | PROT_WRITE, PROT_READ, PROT_NONE,
			       PROT_READ | PROT_EXEC, PROT_READ | PROT_WRITE};

static void touch(void *at, size_t length, long n)
{
	char byte = 'm';
	struct iovec from = {&byte, 1};
	for (size_t page = 0; page < length; page += 4096 * (1 + pick(n, 3))) {
		struct iovec to = {(char *)at + page, 1};
		process_vm_writev(getpid(), &from, 1, &to, 1, 0);
	}
}
static void op_map(long a, long b, long c, long d)
{
	static const int flags[] = {MAP_PRIVATE, MAP_PRIVATE | MAP_NORESERVE, MAP_PRIVATE | MAP_POPULATE,
				    MAP_SHARED, MAP_PRIVATE | MAP_LOCKED, MAP_PRIVATE | MAP_STACK,
				    MAP_PRIVATE | MAP_GROWSDOWN, MAP_PRIVATE};
	void *at = place_of(a);
	size_t length = length_of(b);
	if (mmap(at, length, accesses[pick(c, 6)], flags[pick(d, 8)] | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
	    MAP_FAILED)
		return;
	if (c % 5 != 4)
		touch(at, length, b);
}
static void op_mapfile(long a, long b, long c, long d)
{
	int fd = fd_of_type(a, S_IFREG);
	struct stat st;
	void *at = place_of(b);
	if (fstat(fd, &st) == 0 && st.st_size < 4096 && d & 1)
		ftruncate(fd, 20000);
	if (mmap(at, length_of(c), accesses[pick(c, 6)], (d & 2 ? MAP_SHARED : MAP_PRIVATE) | MAP_FIXED, fd,
		 4096 * pick(d, 3)) == MAP_FAILED)
		return;
	if (fstat(fd, &st) == 0 && st.st_size >= 4096 * 8 && d & 4)
		touch(at, 4096, 0);
}
static void op_protect(long a, long b, long c, long d)
{
	size_t length;
	void *at = part_of(a, b, &length);
	mprotect(at, length, accesses[pick(c, 6)]);
}
static void op_unmap(long a, long b, long c, long d)
{
	size_t length;
	void *at = part_of(a, b, &length);
	munmap(at, length);
}
static void op_remap(long a, long b, long c, long d)
{
	mremap(place_of(a), length_of(c), length_of(d), MREMAP_MAYMOVE | MREMAP_FIXED, place_of(b));
}
static void op_advise(long a, long b, long c, long d)
{
	static const int all[] = {MADV_DONTFORK, MADV_WIPEONFORK, MADV_DONTDUMP, MADV_HUGEPAGE,
				  MADV_NOHUGEPAGE, MADV_MERGEABLE, MADV_SEQUENTIAL, MADV_RANDOM,
				  MADV_DONTNEED, MADV_FREE, MADV_NORMAL, MADV_UNMERGEABLE,
				  MADV_COLD, MADV_POPULATE_WRITE};
	size_t length;
	void *at = part_of(a, b, &length);
	madvise(at, length, all[pick(c, 14)]);
}
static void op_guard(long a, long b, long c, long d)
{
	size_t length;
	void *at = part_of(a, b, &length);
	madvise(at, length, c % 4 == 3 ? 103 : 102);
}
static void op_mlock(long a, long b, long c, long d)
{
	size_t length;
	void *at = part_of(a, b, &length);
	if (c % 3 == 0)
		munlock(at, length);
	else
		mlock2(at, length, c % 3 == 1 ? MLOCK_ONFAULT : 0);
	if (d % 16 == 15)
		mlockall(MCL_CURRENT);
}
static void op_seal(long a, long b, long c, long d)
{
	size_t length;
	void *at = part_of(a, b, &length);
	syscall(462, at, length, 0);
}
static void op_areaname(long a, long b, long c, long d)
{
	size_t length;
	void *at = part_of(a, b, &length);
	prctl(0x53564d41, 0, at, length, c & 1 ? "a name" : "another");
}
static void op_touch(long a, long b, long c, long d)
{
	size_t length;
	void *at = part_of(a, b, &length);
	touch(at, length, c);
}
static void op_break(long a, long b, long c, long d)
{
	char *now = (char *)syscall(SYS_brk, 0);
	syscall(SYS_brk, now + 4096 * pick(a, 20) + pick(b, 4096));
}
static void op_key(long a, long b, long c, long d)
{
	int key = syscall(SYS_pkey_alloc, 0, 0);
	size_t length;
	void *at = part_of(a, b, &length);
	if (key > 0)
		syscall(SYS_pkey_mprotect, at, length, PROT_READ | PROT_WRITE, key);
}

/* ---- signals and timers */

static void op_action(long a, long b, long c, long d)
{
	struct sigaction none = {.sa_handler = SIG_DFL, .sa_flags = d & 2 ? SA_NOCLDWAIT : SA_NOCLDSTOP};
	if (signal_of(a) == SIGCHLD && d & 1)
		sigaction(SIGCHLD, &none, NULL);
	else
		set_action(signal_of(a), b, c);
}
static void op_block(long a, long b, long c, long d)
{
	block(b % 4 == 3 ? SIG_UNBLOCK : SIG_BLOCK, signal_of(a));
}
static void op_pend(long a, long b, long c, long d)
{
	int signal = signal_of(a);
	/* Another thread may not block it. */
	survive(signal);
	block(SIG_BLOCK, signal);
	union sigval value = {.sival_ptr = (void *)(0xabc000 + c)};
	switch (pick(b, 4)) {
	case 0:
		sigqueue(getpid(), signal, value);
		break;
	case 1:
		syscall(SYS_tgkill, getpid(), gettid(), signal);
		break;
	case 2:
		kill(getpid(), signal);
		break;
	case 3:
		for (int n = 0; n < 3; n++)
			sigqueue(getpid(), signal, value);
	}
}
static void op_signalparent(long a, long b, long c, long d)
{
	if (getppid() == 1 || getppid() == 0)
		return;
	union sigval value = {.sival_int = b};
	/* A real-time signal that the parent blocks, or one that it ignores. */
	sigqueue(getppid(), a & 1 ? SIGCHLD : SIGURG, value);
}
static void op_altstack(long a, long b, long c, long d)
{
	static const int flags[] = {0, SS_DISABLE, 1u << 31};
	stack_t stack = {place_of(a), flags[pick(b, 3)], 8192 + 4096 * pick(c, 4)};
	mmap(stack.ss_sp, stack.ss_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
	     0);
	sigaltstack(&stack, NULL);
}
static void op_itimer(long a, long b, long c, long d)
{
	static const int signals[] = {SIGALRM, SIGVTALRM, SIGPROF};
	struct timespec value, interval;
	times_of(b, &value, &interval);
	int which = pick(a, 3);
	if (which != ITIMER_REAL)
		times_of_cpu(b, &value, &interval);
	survive(signals[which]);
	if (c & 1)
		block(SIG_BLOCK, signals[which]);
	struct itimerval t = {{interval.tv_sec, 0}, {value.tv_sec, value.tv_nsec / 1000}};
	setitimer(which, &t, NULL);
}
static void op_timer(long a, long b, long c, long d)
{
	static const int clocks[] = {CLOCK_MONOTONIC, CLOCK_REALTIME, CLOCK_BOOTTIME,
				     CLOCK_PROCESS_CPUTIME_ID, CLOCK_THREAD_CPUTIME_ID, CLOCK_TAI};
	static const int how[] = {SIGEV_SIGNAL, SIGEV_NONE, SIGEV_THREAD_ID};
	int signal = signal_of(c);
	struct sigevent e = {.sigev_notify = how[pick(b, 3)], .sigev_signo = signal};
	e.sigev_value.sival_ptr = (void *)(0x777000 + d);
	e._sigev_un._tid = gettid();
	survive(signal);
	if (d & 1)
		block(SIG_BLOCK, signal);
	int id;
	if (syscall(SYS_timer_create, clocks[pick(a, 6)], &e, &id))
		return;
	struct itimerspec t;
	int clock = clocks[pick(a, 6)];
	if (clock == CLOCK_PROCESS_CPUTIME_ID || clock == CLOCK_THREAD_CPUTIME_ID)
		times_of_cpu(d, &t.it_value, &t.it_interval);
	else
		times_of(d, &t.it_value, &t.it_interval);
	if (d % 8 != 7)
		syscall(SYS_timer_settime, id, 0, &t, NULL);
	if (d % 16 == 4)
		syscall(SYS_timer_delete, id);
}

/* ---- ids and other properties of a process */

static void op_ids(long a, long b, long c, long d)
{
	static const int ids[] = {0, 1000, 1001, 65534, 33};
	prctl(PR_SET_KEEPCAPS, a & 1);
	if (a & 2)
		syscall(SYS_setresgid, ids[pick(b, 5)], -1, ids[pick(c, 5)]);
	if (a & 4)
		syscall(SYS_setresuid, -1, ids[pick(c, 5)], -1);
	if (a & 8)
		syscall(SYS_setresuid, ids[pick(b, 5)], -1, ids[pick(d, 5)]);
	if (a & 16)
		syscall(SYS_setfsuid, ids[pick(d, 5)]);
	if (a & 32)
		syscall(SYS_setfsgid, ids[pick(d, 5)]);
}
static void op_groups(long a, long b, long c, long d)
{
	gid_t groups[] = {pick(a, 3000), 5, 7, pick(c, 60000)};
	syscall(SYS_setgroups, pick(b, 5), groups);
}
static void op_caps(long a, long b, long c, long d)
{
	struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
	struct __user_cap_data_struct data[2];
	syscall(SYS_capget, &head, data);
	uint32_t bit = 1u << pick(b, 32);
	switch (pick(a, 5)) {
	case 0:
		data[0].effective &= ~bit;
		break;
	case 1:
		data[0].inheritable |= data[0].permitted & bit;
		break;
	case 2:
		data[0].effective &= ~bit;
		data[0].permitted &= ~bit;
		break;
	case 3:
		prctl(PR_CAPBSET_DROP, pick(b, 38));
		break;
	case 4:
		data[0].inheritable |= data[0].permitted & bit;
		syscall(SYS_capset, &head, data);
		prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, pick(b, 32), 0, 0);
		return;
	}
	syscall(SYS_capset, &head, data);
}
static void op_prctl(long a, long b, long c, long d)
{
	switch (pick(a, 16)) {
	case 0:
		prctl(PR_SET_NAME, b & 1 ? "a name" : "x)y (z");
		break;
	case 1:
		prctl(PR_SET_PDEATHSIG, pick(b, 20));
		break;
	case 2:
		prctl(PR_SET_DUMPABLE, b & 1);
		break;
	case 3:
		prctl(PR_SET_CHILD_SUBREAPER, b & 1);
		break;
	case 4:
		prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
		break;
	case 5:
		prctl(PR_SET_TIMERSLACK, 1000 + pick(b, 1000) * 100);
		break;
	case 6:
		prctl(PR_SET_TSC, b & 1 ? PR_TSC_SIGSEGV : PR_TSC_ENABLE);
		break;
	case 7:
		prctl(PR_MCE_KILL, PR_MCE_KILL_SET, pick(b, 3), 0, 0);
		break;
	case 8:
		prctl(PR_SET_THP_DISABLE, b & 1, 0, 0, 0);
		break;
	case 9:
		prctl(PR_SET_SECUREBITS, pick(b, 64));
		break;
	case 10:
		prctl(PR_SET_KEEPCAPS, 1);
		break;
	case 11:
		prctl(65, 1 | (b & 1 ? 2 : 0), 0, 0, 0); /* PR_SET_MDWE */
		break;
	case 12:
		prctl(67, b & 1, 0, 0, 0); /* PR_SET_MEMORY_MERGE */
		break;
	case 13:
		prctl(PR_SET_SPECULATION_CTRL, pick(b, 3), PR_SPEC_DISABLE, 0, 0);
		break;
	case 14:
		prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0);
		break;
	case 15:
		syscall(SYS_arch_prctl, 0x1001, MEMORY + pick(b, 100) * 8); /* ARCH_SET_GS */
	}
}
static void op_personality(long a, long b, long c, long d)
{
	static const unsigned long all[] = {ADDR_NO_RANDOMIZE, READ_IMPLIES_EXEC, ADDR_COMPAT_LAYOUT,
					    UNAME26, STICKY_TIMEOUTS, WHOLE_SECONDS};
	personality(all[pick(a, 6)]);
}
static void op_place(long a, long b, long c, long d)
{
	char name[] = "d0";
	name[1] += pick(b, 3);
	mkdir(name, 0755);
	if (a % 4 == 0)
		umask(pick(c, 512));
	else if (a % 4 == 1)
		chdir(name);
	else if (a % 4 == 2)
		fchdir(fd_of_type(c, S_IFDIR));
	else if (a % 16 == 3)
		chroot(name);
}
static void op_limit(long a, long b, long c, long d)
{
	int which = pick(a, 16);
	struct rlimit limit;
	getrlimit(which, &limit);
	rlim_t wanted = 1000000 + pick(b, 1000) * 4096;
	if (which == RLIMIT_NICE || which == RLIMIT_RTPRIO)
		wanted = 0;
	if (which == RLIMIT_NOFILE)
		wanted = 200 + pick(b, 100);
	if (which == RLIMIT_AS || which == RLIMIT_DATA || which == RLIMIT_STACK)
		wanted = 1ul << 33;
	if (wanted <= limit.rlim_max) {
		limit.rlim_cur = wanted;
		if (c & 1)
			limit.rlim_max = wanted;
		setrlimit(which, &limit);
	}
}
static void op_schedule(long a, long b, long c, long d)
{
	struct sched_param zero = {0};
	cpu_set_t cpus;
	switch (pick(a, 5)) {
	case 0:
		setpriority(PRIO_PROCESS, 0, pick(b, 20));
		break;
	case 1:
		sched_setscheduler(0, (b & 1 ? SCHED_BATCH : SCHED_IDLE) | (c & 1 ? SCHED_RESET_ON_FORK : 0),
				   &zero);
		break;
	case 2:
		CPU_ZERO(&cpus);
		CPU_SET(pick(b, 2), &cpus);
		sched_setaffinity(0, sizeof cpus, &cpus);
		break;
	case 3:
		syscall(SYS_ioprio_set, 1, 0, (1 + pick(b, 3)) << 13 | (b % 3 == 2 ? 0 : pick(c, 8)));
		break;
	case 4:
		syscall(SYS_ioprio_set, 1, 0, 0);
	}
}
static void op_procwrite(long a, long b, long c, long d)
{
	static const char *all[] = {"/proc/self/oom_score_adj", "/proc/self/coredump_filter",
				    "/proc/self/timerslack_ns", "/proc/self/comm"};
	static const char *values[] = {"200", "0x21", "70000", "renamed"};
	int n = pick(a, 4);
	int fd = open(all[n], O_WRONLY);
	if (fd >= 0) {
		write(fd, values[n], strlen(values[n]));
		close(fd);
	}
}
static void op_filter(long a, long b, long c, long d)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mlockall + pick(a, 2), 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | 5),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = {4, code};
	prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
	syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, b & 1 ? SECCOMP_FILTER_FLAG_LOG : 0, &program);
}
static void op_membarrier(long a, long b, long c, long d)
{
	static const int all[] = {2, 16, 64, 256};
	syscall(SYS_membarrier, all[pick(a, 4)], 0, 0);
}
static void op_addresses(long a, long b, long c, long d)
{
	static struct {
		void *list[3];
	} heads[4];
	static pid_t cleared[4];
	int n = pick(b, 4);
	if (a & 1) {
		heads[n].list[0] = &heads[n];
		syscall(SYS_set_robust_list, &heads[n], 24);
	} else {
		syscall(SYS_set_tid_address, &cleared[n]);
	}
}
static void op_session(long a, long b, long c, long d)
{
	if (a & 1)
		setsid();
	else if (a & 2)
		setpgid(0, 0);
	else
		setpgid(0, getppid());
}
/* Threads that have left the table of descriptors of their process. */
static pid_t with_own_table[SLOTS];
static int own_tables;
static void op_apart(long a, long b, long c, long d)
{
	if (a & 1 || !(a & 2))
		unshare(a & 1 ? CLONE_FS : CLONE_SYSVSEM);
	else if (own_tables < SLOTS && unshare(CLONE_FILES) == 0)
		with_own_table[own_tables++] = gettid();
	if (a & 1 && b & 1)
		umask(pick(c, 512));
}

/* The next child has these together with its parent. */
static int split_with;
static void op_together(long a, long b, long c, long d)
{
	split_with = (a & 1 ? CLONE_FILES : 0) | (a & 2 ? CLONE_FS : 0);
}

/* ---- IPC objects */

static void op_shm(long a, long b, long c, long d)
{
	int id = shmget(a & 1 ? IPC_PRIVATE : 0x1000 + pick(a, 4), 4096 * (1 + pick(b, 4)), IPC_CREAT | 0640);
	void *at = shmat(id, place_of(c), SHM_REMAP | (d & 1 ? SHM_RDONLY : 0));
	if (at != (void *)-1 && !(d & 1))
		touch(at, 4096, 1);
	if (d & 2)
		shmctl(id, IPC_RMID, NULL);
	if (d & 4)
		shmdt(at);
}
static void op_sem(long a, long b, long c, long d)
{
	int id = semget(a & 1 ? IPC_PRIVATE : 0x2000 + pick(a, 4), 1 + pick(b, 3), IPC_CREAT | 0600);
	struct sembuf up = {0, 1 + pick(c, 9), 0};
	semop(id, &up, 1);
	if (d % 16 == 15)
		semctl(id, 0, IPC_RMID);
}
static void op_queue(long a, long b, long c, long d)
{
	int id = msgget(a & 1 ? IPC_PRIVATE : 0x3000 + pick(a, 4), IPC_CREAT | 0600);
	struct {
		long type;
		char text[100];
	} m = {1 + pick(b, 9), "message"};
	for (long n = 0; n < pick(c, 4); n++)
		msgsnd(id, &m, pick(c * 7, 100), IPC_NOWAIT);
}
static void op_mq(long a, long b, long c, long d)
{
	char name[] = "/q0";
	name[2] += pick(a, 4);
	struct mq_attr attributes = {0, 1 + pick(b, 8), 64, 0};
	int q = mq_open(name, O_RDWR | O_CREAT | (c & 1 ? O_NONBLOCK : 0), 0640, &attributes);
	struct timespec past = {0, 0};
	for (long n = 0; n < pick(c, 4); n++)
		mq_timedsend(q, "queued", 6, pick(c + n, 30), &past);
	if (d & 1)
		mq_unlink(name);
}

static void op_wait(long a, long b, long c, long d);
static void op_exit(long a, long b, long c, long d)
{
	/* Not the first task of a program. */
	if (getppid() == 1)
		return;
	/* It ends the other tasks of its process, too, and those report no more. */
	if (is_stopping)
		__sync_fetch_and_sub(&report->stopping, all_here);
	else
		__sync_fetch_and_sub(&report->waiting, here);
	__sync_fetch_and_add(&report->gone, all_here);
	_exit(pick(a, 200));
}
static void op_stop(long a, long b, long c, long d)
{
	/* What has stopped cannot report: its program's first task never does. */
	wait_kind = getppid() != 1 ? 100 : wait_kind;
}

/* Blocks are executed by `run`. */
static void op_fork(long a, long b, long c, long d)
{
}
#define op_thread op_fork
#define op_end op_fork
#define op_program op_fork

#define OP(name, weight) {#name, op_##name, weight}
static const struct {
	const char *name;
	void (*run)(long, long, long, long);
	int weight;
} table[] = {
	OP(program, 0), OP(end, 6), OP(fork, 8), OP(thread, 4),
	OP(open, 8), OP(tmpfile, 2), OP(directory, 3), OP(path, 2), OP(device, 2), OP(procfile, 1),
	OP(pipe, 6), OP(fifo, 3), OP(dup, 5), OP(close, 4), OP(fdflags, 5), OP(notice, 3), OP(write, 4),
	OP(seek, 2), OP(truncate, 2), OP(unlink, 3), OP(rename, 2), OP(link, 1), OP(rmdir, 1),
	OP(lock, 5), OP(lease, 1), OP(memfd, 4), OP(eventfd, 3), OP(timerfd, 6), OP(signalfd, 3),
	OP(epoll, 4), OP(inotify, 3), OP(pidfd, 2), OP(epollmore, 2), OP(pair, 5), OP(passfd, 3),
	OP(unix, 6), OP(udp, 5), OP(tcp, 6), OP(netlink, 1), OP(option, 8), OP(linger, 2),
	OP(shutdown, 2), OP(receive, 2), OP(send, 2), OP(map, 8), OP(mapfile, 5), OP(protect, 4),
	OP(unmap, 3), OP(remap, 3), OP(advise, 6), OP(guard, 2), OP(mlock, 3), OP(seal, 1),
	OP(areaname, 2), OP(touch, 3), OP(break, 1), OP(key, 1), OP(action, 5), OP(block, 4), OP(pend, 5),
	OP(signalparent, 1), OP(altstack, 3), OP(itimer, 5), OP(timer, 6), OP(ids, 3), OP(groups, 2),
	OP(caps, 4), OP(prctl, 10), OP(personality, 2), OP(place, 4), OP(limit, 3), OP(schedule, 5),
	OP(procwrite, 3), OP(filter, 1), OP(membarrier, 1), OP(addresses, 2), OP(session, 3),
	OP(apart, 1), OP(together, 4), OP(shm, 4), OP(sem, 2), OP(queue, 2), OP(mq, 3), OP(wait, 4), OP(exit, 2),
	OP(stop, 1),
};
#define KINDS (int)(sizeof table / sizeof *table)
enum { PROGRAM, END, FORK, THREAD };

#include "state_wait.h"

#include "state_report.h"

/* A task that is complete takes a slot. */
static int settle(void)
{
	int slot = __sync_fetch_and_add(&report->tasks, 1);
	if (slot >= SLOTS)
		_exit(77);
	all_here++;
	if (is_stopping)
		__sync_fetch_and_add(&report->stopping, 1);
	if (wait_kind == 100 && !is_stopping) {
		is_stopping = 1;
		__sync_fetch_and_add(&report->stopping, all_here);
		__sync_fetch_and_sub(&report->waiting, here);
	}
	if (wait_kind == 0 && !is_stopping) {
		here++;
		__sync_fetch_and_add(&report->waiting, 1);
	}
	return slot;
}

/* Both reports, and the waits before them. */
static void rest(int slot, int kind, int fd, long id)
{
	/* Whether the process stops is known when all tasks are complete. */
	wait_for(STOP);
	if (!is_stopping)
		wait_for(REPORT);
	describe(slot, 0);
	__sync_fetch_and_add(&report->first, 1);
	if (kind == 0) {
		wait_for(AGAIN);
		describe(slot, 1);
		__sync_fetch_and_add(&report->second, 1);
	} else
		wait_otherwise(kind, fd, id); /* This may end: there was something to read. */
	for (;;)
		pause();
}

static void run(int from, int to);

/* Executes a block as a task of its own, and stays there. */
static void task(int from, int to, int block)
{
	wait_kind = 0;
	run(from, to);
	int slot = settle(), kind = wait_kind, fd = wait_fd;
	long id = wait_id;
	__atomic_store_n(&report->complete[block], 1, __ATOMIC_SEQ_CST);
	rest(slot, kind, fd, id);
}

struct block {
	int from, to, number;
	char stack[65536] __attribute__((aligned(16)));
};

static int thread_main(void *argument)
{
	struct block *b = argument;
	task(b->from, b->to, b->number);
	return 0;
}

/* LIMIT: seconds for a block. Others give up sooner: where a task is blocked for ever, all wait for it. */
enum { PATIENCE_S = 8, SOONER_S = 3 };

/* Waits until a block's task is complete, or has ended. */
static void await_block(int number, pid_t child, int is_first)
{
	struct timespec moment = {0, 200000};
	time_t until = report->until_s - (is_first ? 0 : SOONER_S);
	while (time(NULL) < until) {
		siginfo_t info = {.si_pid = 0};
		int has_ended = waitid(P_PID, child, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid;
		/* ESRCH: a child that leaves no zombie (SA_NOCLDWAIT). */
		has_ended |= kill(child, 0) != 0 && errno == ESRCH;
		if (__atomic_load_n(&report->complete[number], __ATOMIC_SEQ_CST) || (child > 0 && has_ended))
			return;
		syscall(SYS_nanosleep, &moment, NULL);
	}
}

static void run(int from, int to)
{
	for (int n = from; n < to; n++) {
		const struct op *o = &ops[n];
		if (o->kind != FORK && o->kind != THREAD) {
			table[o->kind].run(o->n[0], o->n[1], o->n[2], o->n[3]);
			continue;
		}
		int depth = 1, end = n + 1;
		for (; end < to && depth > 0; end++)
			depth += ops[end].kind == FORK || ops[end].kind == THREAD ? 1 :
				 ops[end].kind == END ? -1 : 0;
		int number = __sync_fetch_and_add(&report->blocks, 1) % (SLOTS * 4);
		if (o->kind == FORK) {
			static const int flags[] = {0, 0, 0, CLONE_PARENT, CLONE_IO, 0, 0, 0};
			int flag = flags[pick(o->n[0], 8)] | split_with;
			split_with = 0;
			/* A program's first task stays the only child of process 1. */
			if (flag & CLONE_PARENT && getppid() == 1)
				flag &= ~CLONE_PARENT;
			pid_t child = syscall(SYS_clone, flag | SIGCHLD, NULL, NULL, NULL, 0);
			if (child == 0) {
				all_here = here = is_stopping = 0;
				task(n + 1, end, number);
			}
			await_block(number, child, 0);
		} else {
			struct block *b = mmap(NULL, sizeof *b, PROT_READ | PROT_WRITE,
					       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
			*(int *)&b->from = n + 1;
			b->to = end;
			b->number = number;
			int kind = wait_kind, fd = wait_fd;
			long id = wait_id;
			int shared = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_SYSVSEM;
			int got = clone(thread_main, b->stack + sizeof b->stack, shared | CLONE_THREAD, b);
			if (got > 0)
				await_block(number, 0, 0);
			wait_kind = kind, wait_fd = fd, wait_id = id;
		}
		n = end - 1;
	}
}

static void read_programs(void)
{
	static char text[1 << 18];
	int fd = open("/ctl/program", O_RDONLY);
	ssize_t n = read(fd, text, sizeof text - 1);
	close(fd);
	text[n > 0 ? n : 0] = 0;
	char *rest = text;
	for (char *line; (line = strsep(&rest, "\n")) != NULL && op_count < OPS_MAX;) {
		char name[32] = "";
		struct op o = {-1, {0}};
		sscanf(line, "%31s %ld %ld %ld %ld", name, &o.n[0], &o.n[1], &o.n[2], &o.n[3]);
		for (int k = 0; k < KINDS; k++)
			if (strcmp(table[k].name, name) == 0)
				o.kind = k;
		if (o.kind >= 0)
			ops[op_count++] = o;
	}
}

static void map_report(void)
{
	int fd = open("/ctl/report", O_RDWR | O_CREAT, 0666);
	if (ftruncate(fd, sizeof *report) != 0)
		_exit(98);
	mmap(REMAINING, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	report = mmap(NULL, sizeof *report, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (report == MAP_FAILED)
		_exit(97);
}

static void wake(uint32_t phase, uint32_t *count, uint32_t wanted)
{
	/* LIMIT: a process may have ended since it was complete, by a second signal with SA_RESETHAND. */
	struct timespec moment = {0, 1000000};
	time_t end = time(NULL) + 40;
	__atomic_store_n(&report->go, phase, __ATOMIC_SEQ_CST);
	while (__atomic_load_n(count, __ATOMIC_SEQ_CST) < wanted) {
		if (time(NULL) > end)
			break;
		syscall(SYS_futex, &report->go, FUTEX_WAKE, 1 << 20, NULL, NULL, 0);
		syscall(SYS_nanosleep, &moment, NULL);
	}
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	if (strcmp(what, "ops") == 0) {
		for (int n = 0; n < KINDS; n++)
			printf("%s %d\n", table[n].name, table[n].weight);
		return 0;
	}
	map_report();
	if (strcmp(what, "wake") == 0) {
		wake(AGAIN, &report->second, report->waiting);
		printf("%u of %u\n", report->second, report->waiting);
		return 0;
	}
	read_programs();
	/* A task that writes to a stream without a reader goes on: its threads may have been counted already. */
	signal(SIGPIPE, SIG_IGN);
	for (int n = 0, end; n < op_count; n = end) {
		n += ops[n].kind == PROGRAM;
		for (end = n; end < op_count && ops[end].kind != PROGRAM; end++)
			;
		int number = __sync_fetch_and_add(&report->blocks, 1) % (SLOTS * 4);
		report->until_s = time(NULL) + PATIENCE_S;
		pid_t child = fork();
		if (child == 0) {
			char dir[16];
			snprintf(dir, sizeof dir, "/w%d", program_number);
			mkdir(dir, 0777);
			chdir(dir);
			task(n, end, number);
		}
		await_block(number, child, 1);
		program_number++;
	}
	struct timespec moment = {0, 100000000};
	syscall(SYS_nanosleep, &moment, NULL);
	wake(STOP, &report->first, report->stopping);
	if (report->stopping > 0)
		await_sleep();
	wake(REPORT, &report->first, report->tasks - report->gone);
	await_sleep();
	if (write(1, "ready\n", 6) != 6)
		return 1;
	for (;;)
		pause();
}
