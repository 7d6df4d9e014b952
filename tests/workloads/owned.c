/* Namespaces that belong to a private user namespace: names, a network, IPC objects and mounts of a
 * process that is root inside and unprivileged outside, and that may continue to change them. */
#include "workload.h"
#include <arpa/inet.h>
#include <linux/nsfs.h>
#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>

static ino_t inode(int fd) {
	struct stat s;
	must(fd >= 0 && fstat(fd, &s) == 0);
	close(fd);
	return s.st_ino;
}

static void belongs(const char *name, ino_t user) {
	char path[64];
	snprintf(path, sizeof path, "/proc/self/ns/%s", name);
	int fd = open(path, O_RDONLY);
	must(fd >= 0 && inode(ioctl(fd, NS_GET_USERNS)) == user);
	close(fd);
}

static int up(int change) {
	struct ifreq lo = {.ifr_name = "lo"};
	int s = socket(AF_INET, SOCK_DGRAM, 0);
	must(s >= 0 && ioctl(s, SIOCGIFFLAGS, &lo) == 0);
	int was = lo.ifr_flags & IFF_UP;
	lo.ifr_flags |= IFF_UP;
	must(!change || ioctl(s, SIOCSIFFLAGS, &lo) == 0);
	close(s);
	return was;
}

static void connects(int port, int listener) {
	struct sockaddr_in at = {AF_INET, htons(port), {htonl(INADDR_LOOPBACK)}, {0}};
	int s = socket(AF_INET, SOCK_STREAM, 0);
	must(s >= 0 && connect(s, (void *)&at, sizeof at) == 0);
	int other = accept(listener, 0, 0);
	must(other >= 0 && write(s, "x", 1) == 1 && close(s) == 0 && close(other) == 0);
}

static void inner(int ask, int answer) {
	char c, name[32];
	struct utsname u;
	struct sockaddr_in at = {AF_INET, htons(80), {htonl(INADDR_LOOPBACK)}, {0}};
	must(setresgid(1000, 1000, 1000) == 0 && setresuid(1000, 1000, 1000) == 0);
	must(prctl(PR_SET_DUMPABLE, 1) == 0);
	must(unshare(CLONE_NEWUSER) == 0 && prctl(PR_SET_DUMPABLE, 1) == 0);
	write_text("/proc/self/setgroups", "deny");
	write_text("/proc/self/uid_map", "0 1000 1");
	write_text("/proc/self/gid_map", "0 1000 1");
	must(unshare(CLONE_NEWUTS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWNS) == 0);
	must(mount("none", "/", 0, MS_REC | MS_PRIVATE, 0) == 0);
	must(mount("none", "/scratch", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m") == 0);
	must(mount("/bin", "/bound", 0, MS_BIND, 0) == 0);
	must(mount("none", "/bound", 0, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV, 0) == 0);
	int file = open("/scratch/file", O_RDWR | O_CREAT, 0600);
	must(file >= 0 && pwrite(file, "inner-0", 8, 0) == 8 && chdir("/scratch") == 0);
	must(sethostname("inner-0", 7) == 0 && !up(1));
	int memory = shmget(IPC_PRIVATE, 4096, 0600), listener = socket(AF_INET, SOCK_STREAM, 0);
	char *shared = shmat(memory, 0, 0);
	must(memory >= 0 && shared != (void *)-1);
	strcpy(shared, "inner-0");
	must(bind(listener, (void *)&at, sizeof at) == 0 && listen(listener, 4) == 0);
	for (int round = 0; read(ask, &c, 1) == 1; round++) {
		snprintf(name, sizeof name, "inner-%d", round);
		must(uname(&u) == 0 && strcmp(u.nodename, name) == 0 && strcmp(shared, name) == 0);
		ino_t user = inode(open("/proc/self/ns/user", O_RDONLY));
		belongs("uts", user), belongs("net", user), belongs("ipc", user), belongs("mnt", user);
		char text[16];
		struct statvfs bound;
		struct stat one, other;
		must(pread(file, text, 8, 0) == 8 && strcmp(text, name) == 0);
		must(stat("file", &one) == 0 && fstat(file, &other) == 0 && one.st_ino == other.st_ino);
		must(one.st_uid == 0 && statvfs("/bound", &bound) == 0 && bound.f_flag & ST_RDONLY);
		must(access("/bound/owned", R_OK) == 0);
		must(geteuid() == 0 && up(1));
		connects(80, listener);
		struct shmid_ds about;
		must(shmctl(memory, IPC_STAT, &about) == 0 && about.shm_perm.uid == 0);
		snprintf(name, sizeof name, "inner-%d", round + 1);
		must(sethostname(name, 7) == 0);
		strcpy(shared, name);
		must(pwrite(file, name, 8, 0) == 8);
		must(mkdir("/scratch/dir", 0700) == 0 && mount("none", "dir", "tmpfs", 0, 0) == 0);
		must(umount("dir") == 0 && rmdir("dir") == 0);
		must(write(answer, &c, 1) == 1);
	}
	_exit(0);
}

int main(void) {
	int ask[2], answer[2];
	char c = 'x';
	struct utsname outer, u;
	must(uname(&outer) == 0 && pipe(ask) == 0 && pipe(answer) == 0);
	must(mkdir("/scratch", 0777) == 0 && mkdir("/bound", 0777) == 0);
	if (fork() == 0)
		inner(ask[0], answer[1]);
	close(answer[1]);
	must(write(ask[1], &c, 1) == 1 && read(answer[0], &c, 1) == 1);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		must(uname(&u) == 0 && strcmp(u.nodename, outer.nodename) == 0);
		must(access("/scratch/file", F_OK) != 0 && access("/bound/owned", F_OK) != 0);
		must(write(ask[1], &c, 1) == 1 && read(answer[0], &c, 1) == 1);
	}
	ok();
}
