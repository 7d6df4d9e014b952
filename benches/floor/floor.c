/* The floor of a start: the kernel work of `dormouse run IMAGE true`, in its cheapest order, and
 * nothing else: no store, no state on disk, no locks, no error messages. The further time of a
 * container runtime is its own.
 *
 *   floor LOWER SCRATCH NAME PROGRAM [ARG...]
 *
 * LOWER is a directory with the root filesystem. SCRATCH is a directory with `upper` on the disk of
 * the runtimes' layers, and `shm`, a tmpfs. One user, mount, pid, ipc, uts, time and cgroup
 * namespace; cgroups in every hierarchy of a container; an overlay with an idmapped lower layer;
 * proc, mqueue, /dev with six nodes, /dev/shm, /sys; a filter of 64 instructions; one execve.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/mount.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(call)                                                                    \
	do {                                                                           \
		if ((long)(call) < 0) {                                                \
			fprintf(stderr, "floor: %s: %s\n", #call, strerror(errno));    \
			_exit(125);                                                    \
		}                                                                      \
	} while (0)

enum { BASE = 1900000000 / 32768 * 32768 };

static const char *controllers[] = { "cpu", "cpuacct", "memory", "pids", "freezer", "blkio" };
enum { CONTROLLERS = sizeof controllers / sizeof *controllers };

static int tasks[CONTROLLERS];
static char path[512];

static const char *cgroup(const char *controller, const char *name, const char *file)
{
	snprintf(path, sizeof path, "/sys/fs/cgroup/%s/floor-bench/%s%s", controller, name, file);
	return path;
}

static void put(const char *file, const char *text)
{
	int fd;
	CHECK(fd = open(file, O_WRONLY | O_CLOEXEC));
	CHECK(write(fd, text, strlen(text)));
	close(fd);
}

static int clone_tree(int dir, const char *p, uint64_t attr, int userns)
{
	int fd;
	struct mount_attr a = { .attr_set = attr, .userns_fd = userns < 0 ? 0 : (uint64_t)userns };
	unsigned flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH;
	CHECK(fd = syscall(SYS_open_tree, dir, p, flags));
	if (attr)
		CHECK(syscall(SYS_mount_setattr, fd, "", AT_EMPTY_PATH, &a, sizeof a));
	return fd;
}

static void attach(int fd, const char *target)
{
	CHECK(syscall(SYS_move_mount, fd, "", AT_FDCWD, target, MOVE_MOUNT_F_EMPTY_PATH));
}

static int overlay(int lower, int upper, int work)
{
	int fs, fd;
	CHECK(fs = syscall(SYS_fsopen, "overlay", FSOPEN_CLOEXEC));
	CHECK(syscall(SYS_fsconfig, fs, FSCONFIG_SET_FD, "lowerdir+", 0, lower));
	CHECK(syscall(SYS_fsconfig, fs, FSCONFIG_SET_FD, "upperdir", 0, upper));
	CHECK(syscall(SYS_fsconfig, fs, FSCONFIG_SET_FD, "workdir", 0, work));
	CHECK(syscall(SYS_fsconfig, fs, FSCONFIG_SET_STRING, "metacopy", "on", 0));
	CHECK(syscall(SYS_fsconfig, fs, FSCONFIG_CMD_CREATE, 0, 0, 0));
	CHECK(fd = syscall(SYS_fsmount, fs, FSMOUNT_CLOEXEC, 0));
	close(fs);
	return fd;
}

/* A filter as long as a decision tree over the usual allow-list. */
static void filter(void)
{
	struct sock_filter f[64];
	int n = 0;
	f[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 4);
	f[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 1, 0);
	f[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
	f[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0);
	while (n < 63)
		f[n] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, 9000 + n, 0, 0), n++;
	f[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	struct sock_fprog program = { n, f };
	CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program));
}

struct trees { int root, dev, shm, sys, go[2]; };

static void child(struct trees *t, char **argv)
{
	/* The descriptor table is shared, memory is not: the parent sends the numbers. */
	if (read(t->go[0], t, sizeof *t) != sizeof *t)
		_exit(125);
	for (int i = 0; i < CONTROLLERS; i++)
		CHECK(write(tasks[i], "0", 1));
	CHECK(syscall(SYS_setresgid, 0, 0, 0));
	CHECK(syscall(SYS_setresuid, 0, 0, 0));
	CHECK(unshare(CLONE_NEWCGROUP));
	attach(t->root, "/");
	CHECK(fchdir(t->root));
	CHECK(mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, 0));
	CHECK(chroot("."));
	attach(t->dev, "/dev");
	attach(t->shm, "/dev/shm");
	CHECK(mount("mqueue", "/dev/mqueue", "mqueue", MS_NOSUID | MS_NODEV | MS_NOEXEC, 0));
	attach(t->sys, "/sys");
	CHECK(sethostname("floor", 5));
	CHECK(setsid());
	filter();
	execv(argv[0], argv);
	_exit(127);
}

static int mkpath(const char *a, const char *b, const char *c, uid_t owner)
{
	int fd;
	snprintf(path, sizeof path, "%s/%s%s", a, b, c);
	CHECK(mkdir(path, 0755));
	CHECK(chown(path, owner, owner));
	CHECK(fd = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC));
	return fd;
}

int main(int argc, char **argv)
{
	if (argc < 5)
		return fprintf(stderr, "usage: floor LOWER SCRATCH NAME PROGRAM [ARG...]\n"), 125;
	const char *lower = argv[1], *scratch = argv[2], *name = argv[3];
	static const struct { const char *name; int major, minor; } nodes[] = {
		{ "null", 1, 3 }, { "zero", 1, 5 }, { "full", 1, 7 },
		{ "random", 1, 8 }, { "urandom", 1, 9 }, { "tty", 5, 0 },
	};
	char text[128];
	struct trees t;
	int v2, status;

	snprintf(text, sizeof text, "upper/%s", name);
	close(mkpath(scratch, text, "", 0));
	int upper = mkpath(scratch, text, "/u", BASE), work = mkpath(scratch, text, "/w", BASE);
	snprintf(text, sizeof text, "shm/%s", name);
	close(mkpath(scratch, text, "", 0));
	int dev = mkpath(scratch, text, "/dev", BASE), shm = mkpath(scratch, text, "/shm", BASE);
	for (unsigned i = 0; i < sizeof nodes / sizeof *nodes; i++)
		CHECK(mknodat(dev, nodes[i].name, S_IFCHR | 0666, makedev(nodes[i].major, nodes[i].minor)));
	CHECK(mkdirat(dev, "shm", 0755));
	CHECK(mkdirat(dev, "mqueue", 0755));

	for (int i = 0; i < CONTROLLERS; i++) {
		CHECK(mkdir(cgroup(controllers[i], name, ""), 0755));
		CHECK(tasks[i] = open(cgroup(controllers[i], name, "/tasks"), O_WRONLY | O_CLOEXEC));
	}
	CHECK(mkdir(cgroup("unified", name, ""), 0755));
	CHECK(v2 = open(cgroup("unified", name, ""), O_PATH | O_DIRECTORY | O_CLOEXEC));

	CHECK(pipe2(t.go, O_CLOEXEC));
	int pidfd;
	struct clone_args args = {
		.flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS |
			 CLONE_NEWTIME | CLONE_INTO_CGROUP | CLONE_PIDFD | CLONE_FILES,
		.exit_signal = SIGCHLD,
		.cgroup = v2,
		.pidfd = (uintptr_t)&pidfd,
	};
	pid_t pid = syscall(SYS_clone3, &args, sizeof args);
	CHECK(pid);
	if (!pid)
		child(&t, argv + 4);

	char map[64], file[64];
	snprintf(map, sizeof map, "0 %d 32767\n65534 %d 1\n", BASE, BASE + 32767);
	snprintf(file, sizeof file, "/proc/%d/uid_map", pid);
	put(file, map);
	snprintf(file, sizeof file, "/proc/%d/gid_map", pid);
	put(file, map);
	snprintf(file, sizeof file, "/proc/%d/ns/user", pid);
	int userns, root;
	CHECK(userns = open(file, O_RDONLY | O_CLOEXEC));
	CHECK(root = open(lower, O_PATH | O_DIRECTORY | O_CLOEXEC));
	t.root = overlay(clone_tree(root, "", MOUNT_ATTR_IDMAP, userns), upper, work);
	t.dev = clone_tree(dev, "", MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC, -1);
	t.shm = clone_tree(shm, "", MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC, -1);
	t.sys = clone_tree(AT_FDCWD, "/sys", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, -1);
	CHECK(write(t.go[1], &t, sizeof t));
	CHECK(waitpid(pid, &status, 0));
	close(t.root);

	for (int i = 0; i < CONTROLLERS; i++)
		while (rmdir(cgroup(controllers[i], name, "")) < 0 && errno == EBUSY)
			usleep(50);
	while (rmdir(cgroup("unified", name, "")) < 0 && errno == EBUSY)
		usleep(50);
	for (unsigned i = 0; i < sizeof nodes / sizeof *nodes; i++)
		unlinkat(dev, nodes[i].name, 0);
	unlinkat(dev, "shm", AT_REMOVEDIR);
	unlinkat(dev, "mqueue", AT_REMOVEDIR);
	static const char *left[] = { "shm/%s/dev", "shm/%s/shm", "shm/%s", "upper/%s/w/work",
				      "upper/%s/w", "upper/%s/u/dev", "upper/%s/u/proc",
				      "upper/%s/u", "upper/%s" };
	for (unsigned i = 0; i < sizeof left / sizeof *left; i++) {
		snprintf(text, sizeof text, left[i], name);
		snprintf(path, sizeof path, "%s/%s", scratch, text);
		rmdir(path);
	}
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
