/* What a task of state.c reports of itself. Part of that file, which includes it. */

struct out {
	char *at;
	char *end;
};

static void put(struct out *o, const char *format, ...)
{
	va_list args;
	va_start(args, format);
	int n = vsnprintf(o->at, o->end - o->at, format, args);
	va_end(args);
	if (n > 0 && n < o->end - o->at)
		o->at += n;
}

static uint64_t hash(uint64_t h, const void *bytes, size_t count)
{
	for (const unsigned char *b = bytes; count > 0; count--)
		h = (h ^ *b++) * 0x100000001b3;
	return h;
}

static void report_prctl(struct out *o)
{
	/* Those that return a value, then those that store one. */
	static const int values[] = {PR_GET_DUMPABLE, PR_GET_KEEPCAPS, PR_GET_SECUREBITS, PR_GET_TIMERSLACK,
				     PR_MCE_KILL_GET, PR_GET_NO_NEW_PRIVS, PR_GET_THP_DISABLE,
				     PR_GET_IO_FLUSHER, 66, 68, PR_GET_SECCOMP};
	static const int stored[] = {PR_GET_PDEATHSIG, PR_GET_TSC, PR_GET_CHILD_SUBREAPER,
				     PR_GET_TID_ADDRESS};
	for (unsigned n = 0; n < sizeof values / sizeof *values; n++)
		put(o, "prctl/%d %d\n", values[n], prctl(values[n], 0, 0, 0, 0));
	for (unsigned n = 0; n < sizeof stored / sizeof *stored; n++) {
		long value = 0;
		int got = prctl(stored[n], &value, 0, 0, 0);
		put(o, "prctl/%d %d %lx\n", stored[n], got, value);
	}
	for (int n = 0; n < 3; n++)
		put(o, "speculation/%d %d\n", n, prctl(PR_GET_SPECULATION_CTRL, n, 0, 0, 0));
	for (int code = 0x1003; code <= 0x1004; code++) {
		unsigned long base = 0;
		syscall(SYS_arch_prctl, code, &base);
		put(o, "arch_prctl/%x %lx\n", code, base);
	}
	put(o, "cpuid %ld\n", syscall(SYS_arch_prctl, 0x1011, 0));
	char name[17] = "";
	prctl(PR_GET_NAME, name);
	put(o, "name %s\n", name);
}

static void report_ids(struct out *o)
{
	unsigned ids[6];
	getresuid(&ids[0], &ids[1], &ids[2]);
	getresgid(&ids[3], &ids[4], &ids[5]);
	put(o, "ids %u %u %u %u %u %u\n", ids[0], ids[1], ids[2], ids[3], ids[4], ids[5]);
	put(o, "fsids %ld %ld\n", syscall(SYS_setfsuid, -1), syscall(SYS_setfsgid, -1));
	gid_t groups[32];
	int count = getgroups(32, groups);
	put(o, "groups %d", count);
	for (int n = 0; n < count; n++)
		put(o, " %u", groups[n]);
	struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
	struct __user_cap_data_struct data[2] = {{0}};
	syscall(SYS_capget, &head, data);
	put(o, "\ncapabilities %x %x %x %x %x %x\n", data[0].effective, data[1].effective, data[0].permitted,
	    data[1].permitted, data[0].inheritable, data[1].inheritable);
	put(o, "process %d %d %d %d %d\n", getpid(), getppid(), getpgrp(), getsid(0), gettid());
	put(o, "personality %x\n", personality(0xffffffff));
	struct {
		uint32_t size, policy;
		uint64_t flags;
		int32_t nice;
		uint32_t priority;
		uint64_t runtime, deadline, period;
		uint32_t low, high;
	} s = {0};
	syscall(SYS_sched_getattr, 0, &s, sizeof s, 0);
	put(o, "schedule %u %lx %d %u %lu %lu %lu\n", s.policy, s.flags, s.nice, s.priority, s.runtime,
	    s.deadline, s.period);
	put(o, "io_priority %lx\n", syscall(SYS_ioprio_get, 1, 0));
	cpu_set_t cpus;
	CPU_ZERO(&cpus);
	sched_getaffinity(0, sizeof cpus, &cpus);
	put(o, "cpus %lx\n", *(unsigned long *)&cpus);
	void *list = NULL;
	size_t size = 0;
	syscall(SYS_get_robust_list, 0, &list, &size);
	put(o, "robust_list %p %zu\n", list, size);
}

static void report_signals(struct out *o)
{
	uint64_t set = 0;
	syscall(SYS_rt_sigprocmask, SIG_BLOCK, NULL, &set, 8);
	put(o, "blocked %lx\n", set);
	syscall(SYS_rt_sigpending, &set, 8);
	put(o, "pending %lx\n", set);
	stack_t stack = {0};
	sigaltstack(NULL, &stack);
	put(o, "altstack %p %x %zu\n", stack.ss_sp, stack.ss_flags, stack.ss_size);
	for (int n = 1; n <= 64; n++) {
		uint64_t action[4] = {0};
		syscall(SYS_rt_sigaction, n, NULL, action, 8);
		if (action[0] != 0 || action[1] != 0)
			put(o, "action/%d %lx %lx %lx\n", n, action[0], action[1], action[3]);
	}
	for (int n = 0; n < 3; n++) {
		struct itimerval t;
		getitimer(n, &t);
		put(o, "itimer/%d %d every %ld\n", n, t.it_value.tv_sec || t.it_value.tv_usec,
		    t.it_interval.tv_sec);
	}
	for (int n = 0; n < 24; n++) {
		struct itimerspec t;
		if (syscall(SYS_timer_gettime, n, &t) == 0)
			put(o, "timer/%d %d every %ld overrun %ld\n", n,
			    t.it_value.tv_sec || t.it_value.tv_nsec, t.it_interval.tv_sec,
			    syscall(SYS_timer_getoverrun, n));
	}
}

static void report_socket(struct out *o, int fd)
{
	/* Options that change by themselves, or by being read. TCP_QUICKACK (12) is the mode of the moment (tcp(7)). */
	static const int without[][2] = {
		{SOL_SOCKET, SO_ERROR}, {SOL_SOCKET, 49}, {SOL_SOCKET, 55}, {SOL_SOCKET, 56},
		{SOL_SOCKET, 57}, {SOL_SOCKET, 71}, {SOL_SOCKET, 77}, {SOL_SOCKET, 79}, {SOL_SOCKET, 17},
		{IPPROTO_TCP, TCP_INFO}, {IPPROTO_TCP, 12}, {IPPROTO_TCP, 24}, {IPPROTO_TCP, 26}, {IPPROTO_TCP, 28},
		{IPPROTO_TCP, 35}, {IPPROTO_TCP, 19}, {IPPROTO_TCP, 20}, {IPPROTO_TCP, 21},
		{IPPROTO_TCP, 22}, {IPPROTO_TCP, 29}, {IPPROTO_TCP, 39}};
	/* The kernel fills these of an accepted connection from its first packet, and never uses them. */
	static const int multicast[][2] = {{IPPROTO_IP, IP_MULTICAST_IF}, {IPPROTO_IP, IP_MULTICAST_TTL},
					   {IPPROTO_IP, IP_PKTOPTIONS}, {IPPROTO_IPV6, IPV6_MULTICAST_IF},
					   {IPPROTO_IPV6, IPV6_MULTICAST_HOPS},
					   {IPPROTO_IPV6, IPV6_2292PKTOPTIONS}};
	static const int levels[][2] = {{SOL_SOCKET, 90}, {IPPROTO_IP, 52}, {IPPROTO_TCP, 50},
					{IPPROTO_UDP, 110}, {IPPROTO_IPV6, 80}};
	struct sockaddr_storage s;
	socklen_t size = sizeof s;
	/* A TCP connection that has ended keeps its address and what it measured, which no call sets (docs/state.md). */
	struct tcp_info info = {.tcpi_state = 0};
	socklen_t length = sizeof info;
	struct pollfd end = {fd, POLLRDHUP, 0};
	if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) == 0 && info.tcpi_state == TCP_CLOSE &&
	    poll(&end, 1, 0) == 1 && end.revents & POLLRDHUP) {
		put(o, "fd/%d/over %x\n", fd, end.revents);
		return;
	}
	memset(&s, 0, sizeof s);
	if (getsockname(fd, (void *)&s, &size) == 0)
		put(o, "fd/%d/name %u %lx\n", fd, size, hash(7, &s, size < sizeof s ? size : sizeof s));
	size = sizeof s;
	memset(&s, 0, sizeof s);
	int got = getpeername(fd, (void *)&s, &size);
	int type = 0, family = 0;
	socklen_t word = sizeof type;
	getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &word);
	word = sizeof family;
	getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &family, &word);
	put(o, "fd/%d/peer/%d %d %lx\n", fd, family, got, got ? 0ul : hash(7, &s, size < sizeof s ? size : sizeof s));
	/* The bind of a restore sets IPV6_V6ONLY of a connection, on which it has no effect (docs/state.md). */
	int state = info.tcpi_state, is_connection = state != 0 && state != TCP_CLOSE && state != TCP_LISTEN;
	for (unsigned l = 0; l < 5; l++)
		for (int name = 1; name < levels[l][1]; name++) {
			unsigned char value[64] = {0};
			socklen_t length = sizeof value;
			int is_out = 0;
			for (unsigned w = 0; w < sizeof without / sizeof *without; w++)
				is_out |= without[w][0] == levels[l][0] && without[w][1] == name;
			for (unsigned m = 0; type == SOCK_STREAM && m < sizeof multicast / sizeof *multicast; m++)
				is_out |= multicast[m][0] == levels[l][0] && multicast[m][1] == name;
			is_out |= is_connection && levels[l][0] == IPPROTO_IPV6 && name == IPV6_V6ONLY;
			if (is_out || getsockopt(fd, levels[l][0], name, value, &length) != 0)
				continue;
			uint64_t number = length <= 8 ? 0 : hash(7, value, length);
			if (length <= 8)
				memcpy(&number, value, length);
			if (number != 0)
				put(o, "fd/%d/option/%d-%d %lu\n", fd, levels[l][0], name, number);
		}
	int queued = 0, unsent = 0, peek = -1;
	ioctl(fd, FIONREAD, &queued);
	ioctl(fd, TIOCOUTQ, &unsent);
	put(o, "fd/%d/queued %d\n", fd, queued);
	size = sizeof peek;
	struct pollfd ask = {fd, POLLIN | POLLOUT | POLLPRI | POLLRDHUP, 0};
	poll(&ask, 1, 0);
	put(o, "fd/%d/poll %x\n", fd, ask.revents);
	/* The call would take a pending error. */
	int is_known = getsockopt(fd, SOL_SOCKET, SO_PEEK_OFF, &peek, &size) == 0 && peek < 0;
	if (is_known && !(ask.revents & POLLERR)) {
		char text[512];
		long length = call(SYS_recvfrom, fd, (long)text, sizeof text, MSG_PEEK | MSG_DONTWAIT, 0);
		put(o, "fd/%d/received %ld %ld %lx\n", fd, length < 0 ? -1 : length, length < 0 ? -length : 0,
		    length > 0 ? hash(7, text, length) : 0ul);
	}
}

static void report_descriptors(struct out *o)
{
	for (int fd = 3; fd < FDS; fd++) {
		int flags = fcntl(fd, F_GETFD);
		if (flags < 0)
			continue;
		struct f_owner_ex owner = {0, 0};
		fcntl(fd, F_GETOWN_EX, &owner);
		put(o, "fd/%d/flags %d %x\n", fd, flags, fcntl(fd, F_GETFL));
		put(o, "fd/%d/notice %d %d %d\n", fd, owner.type, owner.pid, fcntl(fd, F_GETSIG));
		put(o, "fd/%d/more %d %d %d %ld\n", fd, fcntl(fd, F_GETLEASE), fcntl(fd, F_GET_SEALS),
		    fcntl(fd, F_GETPIPE_SZ), (long)lseek(fd, 0, SEEK_CUR));
		struct stat st;
		if (fstat(fd, &st) != 0)
			continue;
		put(o, "fd/%d/file %o %lu %u %u %ld\n", fd, st.st_mode, (unsigned long)st.st_nlink, st.st_uid,
		    st.st_gid, S_ISREG(st.st_mode) ? (long)st.st_size : 0);
		if (S_ISREG(st.st_mode)) {
			char text[4096];
			uint64_t sum = 7;
			ssize_t n;
			for (off_t at = 0; (n = pread(fd, text, sizeof text, at)) > 0; at += n)
				sum = hash(sum, text, n);
			/* The contents of procfs have times and counters. */
			struct statfs fs = {0};
			fstatfs(fd, &fs);
			put(o, "fd/%d/contents %lx\n", fd, fs.f_type == PROC_SUPER_MAGIC ? 0 : sum);
		}
		if (S_ISFIFO(st.st_mode)) {
			int queued = 0;
			ioctl(fd, FIONREAD, &queued);
			put(o, "fd/%d/queued %d\n", fd, queued);
		}
		if (S_ISSOCK(st.st_mode))
			report_socket(o, fd);
	}
}

static void report_memory(struct out *o)
{
	for (long n = 0; n < PLACES; n++) {
		uint64_t sum = 7;
		int mapped = 0;
		for (unsigned long at = 0; at < PLACE_BYTES; at += 4096) {
			char page[4096];
			struct iovec to = {page, 4096}, from = {(char *)place_of(n) + at, 4096};
			ssize_t got = process_vm_readv(getpid(), &to, 1, &from, 1, 0);
			mapped = mapped * 2 + (got == 4096);
			sum = got == 4096 ? hash(sum, page, 4096) : sum * 31;
		}
		put(o, "memory/%ld %x %lx\n", n, mapped, sum);
	}
	put(o, "brk %lx\n", syscall(SYS_brk, 0));
}

static void report_ipc(struct out *o)
{
	struct shm_info info;
	int last = shmctl(0, SHM_INFO, (void *)&info);
	for (int n = 0; n <= last; n++) {
		struct shmid_ds shm;
		int id = shmctl(n, SHM_STAT, &shm);
		if (id >= 0)
			put(o, "shm/%d %x %o %u %zu %lu\n", id, shm.shm_perm.__key, shm.shm_perm.mode,
			    shm.shm_perm.uid, shm.shm_segsz, shm.shm_nattch);
	}
	struct seminfo sems;
	last = semctl(0, 0, SEM_INFO, &sems);
	for (int n = 0; n <= last; n++) {
		struct semid_ds sem;
		int id = semctl(n, 0, SEM_STAT, &sem);
		if (id >= 0)
			put(o, "sem/%d %x %o %lu %d\n", id, sem.sem_perm.__key, sem.sem_perm.mode,
			    sem.sem_nsems, semctl(id, 0, GETVAL));
	}
	struct msginfo msgs;
	last = msgctl(0, MSG_INFO, (void *)&msgs);
	for (int n = 0; n <= last; n++) {
		struct msqid_ds msq;
		int id = msgctl(n, MSG_STAT, &msq);
		if (id >= 0)
			put(o, "msg/%d %x %o %lu %lu %lu\n", id, msq.msg_perm.__key, msq.msg_perm.mode,
			    msq.msg_qnum, msq.__msg_cbytes, msq.msg_qbytes);
	}
}

static void report_rest(struct out *o)
{
	for (int n = 0; n < 16; n++) {
		struct rlimit limit;
		getrlimit(n, &limit);
		put(o, "limit/%d %lx %lx\n", n, limit.rlim_cur, limit.rlim_max);
	}
	/* umask(2) cannot only read, and tasks that share a umask report at the same time. */
	while (__atomic_exchange_n(&report->umask_lock, 1, __ATOMIC_ACQUIRE))
		sched_yield();
	mode_t mask = umask(0);
	umask(mask);
	__atomic_store_n(&report->umask_lock, 0, __ATOMIC_RELEASE);
	char path[256] = "";
	syscall(SYS_getcwd, path, sizeof path);
	put(o, "umask %o\ndirectory %s\n", mask, path);
	put(o, "priority %d\n", getpriority(PRIO_PROCESS, 0));
}

static void describe(int slot, int phase)
{
	char *text = report->slots[slot].text[phase];
	struct out o = {text, text + SLOT_BYTES};
	report_ids(&o);
	report_signals(&o);
	report_prctl(&o);
	report_rest(&o);
	int has_table = 0;
	for (int n = 0; n < own_tables; n++)
		has_table |= with_own_table[n] == gettid();
	if (has_table && getpid() != gettid())
		report_descriptors(&o);
	if (getpid() == gettid()) {
		report_memory(&o);
		report_descriptors(&o);
		report_ipc(&o);
	}
}
