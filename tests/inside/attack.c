/* Attacks from inside a container: attack NAME [ARGUMENT...]
 *
 * Exit status 0: the attack succeeded, and the container is broken. 1: the attack was stopped; the
 * printed line contains the error. 2: wrong arguments, or the preparations failed, which proves
 * nothing. Each attack is one function of the table at the end. Statically linked, so that it runs
 * in any image and on the host, where it proves that the attack succeeds if nothing stops it. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/keyctl.h>
#include <linux/netlink.h>
#include <mqueue.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/ipc.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define BROKEN 0
#define STOPPED 1
#define UNUSABLE 2

static int stopped(const char *what)
{
	printf("stopped: %s: %s\n", what, strerror(errno));
	return STOPPED;
}

static int unusable(const char *what)
{
	printf("unusable: %s: %s\n", what, strerror(errno));
	return UNUSABLE;
}

static int broken(const char *what)
{
	printf("broken: %s\n", what);
	return BROKEN;
}

/* Tries to open each file of this list for writing; all of them are the host's. */
static int host_files(char **args)
{
	static const char *files[] = {
		"/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sysrq-trigger",
		"/proc/sys/kernel/panic", "/proc/sys/vm/drop_caches", "/proc/sys/fs/file-max",
		"/proc/sys/kernel/threads-max", "/proc/sys/net/core/somaxconn",
		"/proc/sys/fs/binfmt_misc/register", "/proc/sys/kernel/random/boot_id", "/dev/kmsg",
		"/proc/kcore", "/proc/kmsg", "/dev/mem", "/dev/port", "/sys/kernel/uevent_helper",
		"/sys/power/state", "/sys/kernel/mm/ksm/run", "/sys/module/kernel/parameters/panic",
		"/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/memory/release_agent",
	};
	(void)args;
	for (size_t i = 0; i < sizeof(files) / sizeof(*files); i++) {
		int fd = open(files[i], O_WRONLY | O_CLOEXEC);
		/* A device node that is the container's own null is not a file of the host. */
		struct stat st;
		if (fd >= 0 && !(fstat(fd, &st) == 0 && st.st_rdev == 0x103))
			return broken(files[i]);
		if (fd >= 0)
			close(fd);
	}
	return stopped("open for writing");
}

/* Reads a file with information about the host; an empty one is harmless. */
static int read_file(char **args)
{
	char byte;
	int fd = open(args[0], O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return stopped("open");
	ssize_t got = read(fd, &byte, 1);
	errno = got < 0 ? errno : ENODATA;
	return got == 1 ? broken(args[0]) : stopped("read");
}

/* File permissions are checked before mount attributes, so the mount itself is queried. */
static int read_only(char **args)
{
	struct statvfs fs;
	if (statvfs(args[0], &fs))
		return unusable("statvfs");
	errno = EROFS;
	return fs.f_flag & ST_RDONLY ? stopped(args[0]) : broken("mounted for writing");
}

/* The cgroup namespace: the host's path of the own cgroup. */
static int cgroup_path(char **args)
{
	char line[512];
	FILE *file = fopen("/proc/self/cgroup", "re");
	(void)args;
	if (!file)
		return unusable("/proc/self/cgroup");
	while (fgets(line, sizeof(line), file))
		if (strstr(line, "dormouse"))
			return broken(line);
	errno = ENOENT;
	return stopped("no path of the host");
}

/* Compares a namespace with the given inode number. */
static int same_namespace(char **args)
{
	char path[64];
	struct stat st;
	snprintf(path, sizeof(path), "/proc/self/ns/%s", args[0]);
	if (stat(path, &st))
		return unusable(path);
	errno = EXDEV;
	return st.st_ino == strtoul(args[1], NULL, 10) ? broken(path) : stopped(path);
}

static int set_hostname(char **args)
{
	(void)args;
	return sethostname("broken", 6) ? stopped("sethostname") : broken("sethostname");
}

static int io_uring(char **args)
{
	char params[120] = { 0 };
	(void)args;
	long fd = syscall(SYS_io_uring_setup, 4, params);
	return fd < 0 ? stopped("io_uring_setup") : broken("io_uring_setup");
}

/* Turns of 100 ms, the longest that the kernel has: struct sched_attr of sched_setattr(2). */
static int long_turns(char **args)
{
	struct {
		uint32_t size, policy;
		uint64_t flags;
		int32_t nice;
		uint32_t priority;
		uint64_t runtime_ns, deadline_ns, period_ns;
	} attr = { .size = sizeof(attr), .runtime_ns = 100 * 1000 * 1000 };
	(void)args;
	return syscall(SYS_sched_setattr, 0, &attr, 0) ? stopped("sched_setattr") : broken("sched_setattr");
}

static volatile sig_atomic_t is_over;

static void end(int signal)
{
	(void)signal;
	is_over = 1;
}

/* A call that the filter refuses, again and again until SIGTERM, and much time in the vDSO. */
static int filter_gap(char **args)
{
	char params[120] = { 0 };
	struct timespec now;
	(void)args;
	signal(SIGTERM, end);
	puts("ready");
	fflush(stdout);
	while (!is_over) {
		for (int i = 0; i < 200; i++)
			clock_gettime(CLOCK_MONOTONIC, &now);
		if (syscall(SYS_io_uring_setup, 4, params) >= 0)
			return broken("io_uring_setup");
	}
	errno = EPERM;
	return stopped("io_uring_setup");
}

/* A set-user-id program of the image: this one, under its other name. */
static int gain_root(char **args)
{
	(void)args;
	if (getuid() == 0)
		return unusable("must not be run by root");
	errno = EPERM;
	return geteuid() == 0 ? broken("effective user 0") : stopped("still without privileges");
}

static int shm_make(char **args)
{
	int id = shmget((key_t)atoi(args[0]), 4096, IPC_CREAT | 0666);
	if (id < 0)
		return unusable("shmget");
	pause();
	return BROKEN;
}

static int shm_find(char **args)
{
	/* Attaching needs no permission beyond "0666". */
	int id = shmget((key_t)atoi(args[0]), 0, 0);
	return id < 0 ? stopped("shmget") : broken("the segment of another");
}

static int mq_make(char **args)
{
	umask(0);
	if (mq_open(args[0], O_CREAT | O_RDWR, 0666, NULL) == (mqd_t)-1)
		return unusable("mq_open");
	pause();
	return BROKEN;
}

static int mq_find(char **args)
{
	mqd_t queue = mq_open(args[0], O_RDONLY);
	return queue == (mqd_t)-1 ? stopped("mq_open") : broken("the queue of another");
}

/* Not an attack: removes leftovers of the two above where nothing protects. */
static int ipc_remove(char **args)
{
	int id = shmget((key_t)atoi(args[0]), 0, 0);
	if (atoi(args[0]) && id >= 0)
		shmctl(id, IPC_RMID, NULL);
	mq_unlink(args[1]);
	return STOPPED;
}

/* Runs a command with a key of this name in its session keyring. */
static int with_key(char **args)
{
	if (syscall(SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, NULL) < 0)
		return unusable("join session keyring");
	long key = syscall(SYS_add_key, "user", args[0], "secret", 6, KEY_SPEC_SESSION_KEYRING);
	if (key < 0)
		return unusable("add_key");
	/* Every possessor of the keyring may use the key. */
	syscall(SYS_keyctl, KEYCTL_SETPERM, key, 0x3f3f3f3fL);
	syscall(SYS_keyctl, KEYCTL_SETPERM, KEY_SPEC_SESSION_KEYRING, 0x3f3f3f3fL);
	execvp(args[1], args + 1);
	return unusable(args[1]);
}

static int find_key(char **args)
{
	char secret[16];
	long key = syscall(SYS_keyctl, KEYCTL_SEARCH, KEY_SPEC_SESSION_KEYRING, "user", args[0], 0);
	if (key < 0)
		return stopped("keyctl search");
	long got = syscall(SYS_keyctl, KEYCTL_READ, key, secret, sizeof(secret));
	return got < 0 ? stopped("keyctl read") : broken("the key of the host");
}

/* Looks for a process that is neither this one nor an ancestor nor a child. */
static int find_process(char **args)
{
	char path[300], line[300] = { 0 };
	DIR *dir = opendir("/proc");
	struct dirent *entry;
	if (!dir)
		return unusable("/proc");
	while ((entry = readdir(dir))) {
		snprintf(path, sizeof(path), "/proc/%s/cmdline", entry->d_name);
		int fd = atoi(entry->d_name) > 0 ? open(path, O_RDONLY | O_CLOEXEC) : -1;
		ssize_t got = fd < 0 ? 0 : read(fd, line, sizeof(line) - 1);
		if (fd >= 0)
			close(fd);
		for (ssize_t i = 0; i < got; i++)
			if (!line[i])
				line[i] = ' ';
		if (got > 0 && atoi(entry->d_name) != getpid() && strstr(line, args[0]))
			return broken(path);
	}
	errno = ESRCH;
	return stopped("no such process");
}

/* Every possible pid from the first up to the limit, tested by signal 0. */
static int signal_any(char **args)
{
	for (int pid = atoi(args[0]); pid < atoi(args[1]); pid++)
		if (pid != getpid() && pid != getppid() && !kill(pid, 0))
			return broken("a process of another can be signalled");
	errno = ESRCH;
	return stopped("kill");
}

static int trace(char **args)
{
	int pid = atoi(args[0]);
	return ptrace(PTRACE_SEIZE, pid, 0, 0) ? stopped("ptrace") : broken("traced");
}

/* The classic escape from a root: chroot below the working directory, then up. */
static int leave_root(char **args)
{
	struct stat st;
	mkdir("/tmp/jail", 0755);
	int up = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (up < 0 || chroot("/tmp/jail"))
		return stopped("chroot");
	fchdir(up);
	for (int i = 0; i < 64; i++)
		if (chdir(".."))
			return stopped("chdir");
	if (chroot("."))
		return stopped("chroot back");
	return stat(args[0], &st) ? stopped(args[0]) : broken(args[0]);
}

/* Root of a new user namespace may mount hierarchies of cgroup v1, completely where the container
 * is in their first cgroup, and the host's root runs the program named there (CVE-2022-0492). The
 * present contents are written back, so that a success changes nothing. */
static int release_agent(char **args)
{
	static const char *const kinds[] = { "memory", "pids", "cpu,cpuacct", "cpuacct", "cpu", "cpuset",
		"devices", "freezer", "blkio", "net_cls,net_prio", "net_cls", "net_prio", "perf_event",
		"rdma", "misc", "hugetlb", "none,name=systemd", "none,name=attack" };
	char map[64], text[4096] = "\n";
	unsigned int uid = getuid(), gid = getgid();
	int fd;
	(void)args;
	if (unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWCGROUP) < 0)
		return stopped("unshare");
	snprintf(map, sizeof map, "0 %u 1", uid);
	if ((fd = open("/proc/self/uid_map", O_WRONLY)) < 0 || write(fd, map, strlen(map)) < 0)
		return unusable("uid_map");
	snprintf(map, sizeof map, "0 %u 1", gid);
	if ((fd = open("/proc/self/setgroups", O_WRONLY)) < 0 || write(fd, "deny", 4) < 0
	    || (fd = open("/proc/self/gid_map", O_WRONLY)) < 0 || write(fd, map, strlen(map)) < 0)
		return unusable("gid_map");
	mkdir("/tmp/mnt", 0700);
	for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
		if (mount("cgroup", "/tmp/mnt", "cgroup", 0, kinds[i]) < 0)
			continue;
		if ((fd = open("/tmp/mnt/release_agent", O_RDWR)) >= 0) {
			ssize_t length = read(fd, text, sizeof text);
			if (length < 1)
				length = 1;
			if (write(fd, text, length) == length)
				return broken(kinds[i]);
			close(fd);
		}
		umount2("/tmp/mnt", MNT_DETACH);
	}
	return stopped("write to a release_agent");
}

static int mount_host(char **args)
{
	/* A process that may mount may mount procfs and cgroup2, which show only its own. These do
	 * not. */
	static const char *types[] = { "devtmpfs", "debugfs", "tracefs", "securityfs", "sysfs" };
	(void)args;
	mkdir("/tmp/mnt", 0755);
	for (size_t i = 0; i < sizeof(types) / sizeof(*types); i++)
		if (mount(types[i], "/tmp/mnt", types[i], 0, NULL) == 0)
			return broken(types[i]);
	return stopped("mount");
}

static int set_clock(char **args)
{
	struct timespec now;
	(void)args;
	clock_gettime(CLOCK_REALTIME, &now);
	return clock_settime(CLOCK_REALTIME, &now) ? stopped("clock_settime") : broken("clock_settime");
}

/* A node for the first possible disk. */
static int make_device(char **args)
{
	(void)args;
	unlink("/tmp/device");
	if (mknod("/tmp/device", S_IFBLK | 0600, makedev(8, 0)))
		return stopped("mknod");
	unlink("/tmp/device");
	return broken("a block device was made");
}

/* Prints that it listens, then waits some seconds for a kernel event of a device. */
static int device_events(char **args)
{
	struct sockaddr_nl group = { .nl_family = AF_NETLINK, .nl_groups = 1 };
	struct timeval limit = { .tv_sec = 2 };
	char event[4096];
	int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_KOBJECT_UEVENT);
	if (fd < 0)
		return stopped("socket");
	if (bind(fd, (void *)&group, sizeof(group)))
		return stopped("bind");
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
	printf("listening\n");
	fflush(stdout);
	for (;;) {
		ssize_t got = recv(fd, event, sizeof(event) - 1, 0);
		if (got < 0)
			return stopped("recv");
		event[got] = 0;
		/* ACTION@DEVPATH, then the variables. */
		if (strstr(event, args[0]))
			return broken(event);
	}
}

static int open_node(char **args)
{
	int fd = open(args[0], O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	return fd < 0 ? stopped("open") : broken("a device of the host");
}

/* Writes to a terminal of another owner: TIOCSTI injects input. */
static int type_for_another(char **args)
{
	int fd = open(args[0], O_RDWR | O_NOCTTY | O_CLOEXEC);
	if (fd < 0)
		return stopped("open");
	return ioctl(fd, TIOCSTI, "x") ? stopped("TIOCSTI") : broken("typed");
}

static socklen_t abstract(struct sockaddr_un *address, const char *name)
{
	memset(address, 0, sizeof(*address));
	address->sun_family = AF_UNIX;
	strncpy(address->sun_path + 1, name, sizeof(address->sun_path) - 2);
	return (socklen_t)(sizeof(sa_family_t) + 1 + strlen(name));
}

static int abstract_listen(char **args)
{
	struct sockaddr_un address;
	socklen_t length = abstract(&address, args[0]);
	int fd = socket(AF_UNIX, SOCK_STREAM, 0);
	if (fd < 0 || bind(fd, (void *)&address, length) || listen(fd, 5))
		return unusable("bind");
	pause();
	return BROKEN;
}

/* The kernel chooses the name: five digits. */
static int abstract_autobind(char **args)
{
	sa_family_t family = AF_UNIX;
	int fd = socket(AF_UNIX, SOCK_STREAM, 0);
	(void)args;
	if (fd < 0 || bind(fd, (void *)&family, sizeof(family)) || listen(fd, 5))
		return unusable("bind");
	pause();
	return BROKEN;
}

/* Tries every abstract name in the list of a shared stack. */
static int abstract_connect_any(char **args)
{
	char line[300];
	FILE *list = fopen("/proc/net/unix", "re");
	int seen = 0;
	(void)args;
	if (!list)
		return unusable("/proc/net/unix");
	errno = ENOENT;
	while (fgets(line, sizeof(line), list)) {
		struct sockaddr_un address;
		char *name = strchr(line, '@');
		int fd = name ? socket(AF_UNIX, SOCK_STREAM, 0) : -1;
		if (fd < 0)
			continue;
		name[strcspn(name, "\n")] = 0;
		seen++;
		if (connect(fd, (void *)&address, abstract(&address, name + 1)) == 0)
			return broken(name);
		close(fd);
	}
	return seen ? stopped("connect") : unusable("no name is listed");
}

static int abstract_receive(char **args)
{
	struct sockaddr_un address;
	socklen_t length = abstract(&address, args[0]);
	int fd = socket(AF_UNIX, SOCK_DGRAM, 0);
	if (fd < 0 || bind(fd, (void *)&address, length))
		return unusable("bind");
	pause();
	return BROKEN;
}

static int abstract_send(char **args)
{
	struct sockaddr_un address;
	socklen_t length = abstract(&address, args[0]);
	int fd = socket(AF_UNIX, SOCK_DGRAM, 0);
	if (fd < 0)
		return unusable("socket");
	ssize_t sent = sendto(fd, "x", 1, 0, (void *)&address, length);
	return sent < 0 ? stopped("sendto") : broken("a message to another");
}

static int abstract_connect(char **args)
{
	struct sockaddr_un address;
	socklen_t length = abstract(&address, args[0]);
	int fd = socket(AF_UNIX, SOCK_STREAM, 0);
	if (fd < 0)
		return unusable("socket");
	return connect(fd, (void *)&address, length) ? stopped("connect") : broken("connected");
}

static int any_socket(char **args)
{
	int protocol = atoi(args[0]) == AF_PACKET ? htons((uint16_t)atoi(args[2])) : atoi(args[2]);
	int fd = socket(atoi(args[0]), atoi(args[1]), protocol);
	return fd < 0 ? stopped("socket") : broken("a socket of this kind");
}

static int ip(const char *text, const char *port, struct sockaddr_in *address)
{
	memset(address, 0, sizeof(*address));
	address->sin_family = AF_INET;
	address->sin_port = htons((uint16_t)atoi(port));
	return inet_pton(AF_INET, text, &address->sin_addr) == 1 ? 0 : -1;
}

static int tcp_bind(char **args)
{
	struct sockaddr_in address;
	int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
	if (fd < 0 || ip(args[0], args[1], &address))
		return unusable("socket");
	setsockopt(fd, SOL_IP, IP_FREEBIND, &one, sizeof(one));
	return bind(fd, (void *)&address, sizeof(address)) ? stopped("bind") : broken("bound");
}

static int tcp_connect(char **args)
{
	struct sockaddr_in address;
	struct timeval limit = { .tv_sec = 2 };
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	if (fd < 0 || ip(args[0], args[1], &address))
		return unusable("socket");
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
	return connect(fd, (void *)&address, sizeof(address)) ? stopped("connect") : broken("connected");
}

/* Looks for a listener of this port in the socket lists of every process in /proc. */
static int find_listener(char **args)
{
	char path[300], line[300], wanted[16];
	DIR *dir = opendir("/proc");
	struct dirent *entry;
	snprintf(wanted, sizeof(wanted), ":%04X ", atoi(args[0]));
	while (dir && (entry = readdir(dir))) {
		if (atoi(entry->d_name) <= 0)
			continue;
		snprintf(path, sizeof(path), "/proc/%s/net/tcp", entry->d_name);
		FILE *list = fopen(path, "re");
		while (list && fgets(line, sizeof(line), list))
			if (strstr(line, wanted))
				return broken(line);
		if (list)
			fclose(list);
	}
	errno = ENOENT;
	return dir ? stopped("no such listener") : unusable("/proc");
}

/* listen() without bind(): the kernel takes a port at all addresses. Prints it and accepts for two
 * seconds. */
static int listen_unbound(char **args)
{
	struct sockaddr_in address;
	socklen_t length = sizeof(address);
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	struct timeval limit = { .tv_sec = 3 };
	(void)args;
	if (fd < 0 || listen(fd, 5) || getsockname(fd, (void *)&address, &length))
		return stopped("listen");
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
	printf("%d\n", ntohs(address.sin_port));
	fflush(stdout);
	return accept(fd, NULL, NULL) < 0 ? stopped("accept") : broken("a client of another");
}

/* Opens the program of every new process for writing, for so many seconds. */
static int overwrite_exe(char **args)
{
	time_t end = time(NULL) + atoi(args[0]);
	struct stat own, st;
	char path[300];
	if (stat("/proc/self/exe", &own))
		return unusable("/proc/self/exe");
	while (time(NULL) < end) {
		DIR *dir = opendir("/proc");
		struct dirent *entry;
		while (dir && (entry = readdir(dir))) {
			if (atoi(entry->d_name) <= 0)
				continue;
			snprintf(path, sizeof(path), "/proc/%s/exe", entry->d_name);
			int fd = open(path, O_PATH | O_CLOEXEC);
			if (fd < 0)
				continue;
			/* Files on the container's own filesystem are the container's. */
			if (fstat(fd, &st) == 0 && st.st_dev != own.st_dev) {
				char again[64];
				snprintf(again, sizeof(again), "/proc/self/fd/%d", fd);
				int write = open(again, O_WRONLY | O_CLOEXEC);
				if (write >= 0)
					return broken(path);
			}
			close(fd);
		}
		if (dir)
			closedir(dir);
	}
	errno = ETXTBSY;
	return stopped("no program of the host could be written");
}

/* Writes to standard output that fail. Before Linux 6.15 each leaves an empty packet in a pipe. */
static int failed_writes(char **args)
{
	(void)args;
	for (int n = 0; n < 16; n++)
		if (write(1, (void *)1, 10) >= 0)
			return unusable("a write from address 1");
	return stopped("write");
}

/* Any descriptor beyond the first three, and any directory among these. */
static int leaked_fd(char **args)
{
	(void)args;
	for (int fd = 0; fd < 1024; fd++) {
		struct stat st;
		if (fstat(fd, &st))
			continue;
		if (fd > 2 || S_ISDIR(st.st_mode))
			return broken("a descriptor of the host");
	}
	errno = EBADF;
	return stopped("three descriptors, none a directory");
}

/* Gives a descriptor of a directory to each process that connects to a unix socket, for ten minutes at most. */
static int give_directory(char **args)
{
	struct sockaddr_un at = { .sun_family = AF_UNIX };
	int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	int dir = open(args[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	strncpy(at.sun_path, args[0], sizeof(at.sun_path) - 1);
	if (dir < 0 || bind(listener, (void *)&at, sizeof(at)) || chmod(args[0], 0777) || listen(listener, 16))
		return unusable(args[0]);
	alarm(600);
	for (;;) {
		union {
			struct cmsghdr head;
			char space[CMSG_SPACE(sizeof(int))];
		} control = { .head = { CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS } };
		struct iovec data = { "d", 1 };
		struct msghdr message = { .msg_iov = &data, .msg_iovlen = 1, .msg_control = &control,
					  .msg_controllen = sizeof(control) };
		int client = accept(listener, NULL, NULL);

		memcpy(CMSG_DATA(&control.head), &dir, sizeof(dir));
		if (client < 0 || sendmsg(client, &message, 0) != 1)
			return unusable("sendmsg");
		close(client);
	}
}

/* A directory of the host has come into the container as a descriptor. It has the files `mark`, which all users may
 * read and write, and `program`, this one. */
static int through_directory(char **args)
{
	struct sockaddr_un at = { .sun_family = AF_UNIX };
	int giver = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), dir, result = -1;
	char space[CMSG_SPACE(sizeof(int))], path[64];
	struct iovec data = { path, 1 };
	struct msghdr message = { .msg_iov = &data, .msg_iovlen = 1, .msg_control = space,
				  .msg_controllen = sizeof(space) };
	const char *way = args[1];

	strncpy(at.sun_path, args[0], sizeof(at.sun_path) - 1);
	if (connect(giver, (void *)&at, sizeof(at)) || recvmsg(giver, &message, 0) != 1 || !CMSG_FIRSTHDR(&message))
		return unusable(args[0]);
	memcpy(&dir, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(dir));
	snprintf(path, sizeof(path), "/proc/self/fd/%d/mark", dir);
	if (!strcmp(way, "read"))
		result = openat(dir, "mark", O_RDONLY);
	else if (!strcmp(way, "write"))
		result = openat(dir, "mark", O_WRONLY);
	else if (!strcmp(way, "link"))
		result = open(path, O_RDONLY);
	else if (!strcmp(way, "up"))
		result = openat(dir, "..", O_RDONLY | O_DIRECTORY);
	else if (!strcmp(way, "root"))
		result = fchdir(dir) || chroot(".") ? -1 : open("/mark", O_RDONLY);
	else if (!strcmp(way, "create"))
		result = openat(dir, "created", O_WRONLY | O_CREAT | O_EXCL, 0600);
	else if (!strcmp(way, "mkdir"))
		result = mkdirat(dir, "made", 0755);
	else if (!strcmp(way, "rmdir"))
		result = unlinkat(dir, "empty", AT_REMOVEDIR);
	else if (!strcmp(way, "mkfifo"))
		result = mkfifoat(dir, "fifo", 0600);
	else if (!strcmp(way, "symlink"))
		result = symlinkat("mark", dir, "pointer");
	else if (!strcmp(way, "hard-link"))
		result = linkat(dir, "mark", dir, "second", 0);
	else if (!strcmp(way, "rename"))
		result = renameat(dir, "other", dir, "renamed");
	else if (!strcmp(way, "unlink"))
		result = unlinkat(dir, "spare", 0);
	else if (!strcmp(way, "truncate"))
		result = truncate(path, 1);
	else if (!strcmp(way, "run"))
		/* The descriptor of the directory is still there, so the program calls itself broken. */
		result = syscall(SYS_execveat, dir, "program", (char *[]){ "attack", "leaked-fd", NULL }, environ, 0);
	else
		return unusable(way);
	return result < 0 ? stopped(way) : broken(way);
}

/* A process with all permissions and namespaces of the host, and the cgroup of a container. */
static int from_cgroup(char **args)
{
	int procs = open(args[0], O_WRONLY | O_CLOEXEC), pid = atoi(args[2]);
	char path[64];

	if (procs < 0 || write(procs, "0", 1) != 1)
		return unusable(args[0]);
	if (!strcmp(args[1], "signal"))
		return kill(pid, 0) ? stopped("kill") : broken("signalled");
	if (strcmp(args[1], "read"))
		return trace(args + 2);
	snprintf(path, sizeof(path), "/proc/%d/environ", pid);
	return read_file((char *[]){ path });
}

/* One line of /proc/self/status as a mask that must be zero. */
static int status_mask(char **args)
{
	char line[300];
	FILE *file = fopen("/proc/self/status", "re");
	size_t length = strlen(args[0]);
	while (file && fgets(line, sizeof(line), file))
		if (!strncmp(line, args[0], length) && line[length] == ':') {
			errno = EPERM;
			return strtoull(line + length + 1, NULL, 16) ? broken(line) : stopped(args[0]);
		}
	return unusable(args[0]);
}

static const struct {
	const char *name;
	int count;
	int (*run)(char **args);
} attacks[] = {
	{ "abstract-autobind", 0, abstract_autobind },
	{ "abstract-connect", 1, abstract_connect },
	{ "abstract-connect-any", 0, abstract_connect_any },
	{ "abstract-listen", 1, abstract_listen },
	{ "abstract-receive", 1, abstract_receive },
	{ "abstract-send", 1, abstract_send },
	{ "cgroup-path", 0, cgroup_path },
	{ "device-events", 1, device_events },
	{ "failed-writes", 0, failed_writes },
	{ "filter-gap", 0, filter_gap },
	{ "find-key", 1, find_key },
	{ "find-listener", 1, find_listener },
	{ "find-process", 1, find_process },
	{ "from-cgroup", 3, from_cgroup },
	{ "gain-root", 0, gain_root },
	{ "give-directory", 2, give_directory },
	{ "host-files", 0, host_files },
	{ "io-uring", 0, io_uring },
	{ "ipc-remove", 2, ipc_remove },
	{ "leaked-fd", 0, leaked_fd },
	{ "leave-root", 1, leave_root },
	{ "listen-unbound", 0, listen_unbound },
	{ "long-turns", 0, long_turns },
	{ "make-device", 0, make_device },
	{ "mount-host", 0, mount_host },
	{ "release-agent", 0, release_agent },
	{ "mq-find", 1, mq_find },
	{ "mq-make", 1, mq_make },
	{ "open-node", 1, open_node },
	{ "overwrite-exe", 1, overwrite_exe },
	{ "read-file", 1, read_file },
	{ "read-only", 1, read_only },
	{ "same-namespace", 2, same_namespace },
	{ "set-clock", 0, set_clock },
	{ "set-hostname", 0, set_hostname },
	{ "shm-find", 1, shm_find },
	{ "shm-make", 1, shm_make },
	{ "signal-any", 2, signal_any },
	{ "socket", 3, any_socket },
	{ "status-mask", 1, status_mask },
	{ "tcp-bind", 2, tcp_bind },
	{ "tcp-connect", 2, tcp_connect },
	{ "through-directory", 2, through_directory },
	{ "trace", 1, trace },
	{ "type", 1, type_for_another },
	{ "with-key", 2, with_key },
};

int main(int argc, char **argv)
{
	for (size_t i = 0; argc > 1 && i < sizeof(attacks) / sizeof(*attacks); i++)
		if (!strcmp(argv[1], attacks[i].name) && argc - 2 >= attacks[i].count)
			return attacks[i].run(argv + 2);
	fprintf(stderr, "attack: unknown, or arguments are missing\n");
	return UNUSABLE;
}
