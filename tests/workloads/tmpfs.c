/* Files in memory: POSIX shared memory mapped by two processes, files with holes, links, a named
 * pipe, directories with modes and owners, in /dev/shm and in a tmpfs of the configuration. */
#include "workload.h"

static void put(const char *path, const char *text, mode_t mode) {
	int fd = open(path, O_CREAT | O_WRONLY | O_TRUNC, 0600);
	must(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
	must(fchmod(fd, mode) == 0 && close(fd) == 0);
}

static void holds(const char *path, const char *text) {
	char found[256] = "";
	int fd = open(path, O_RDONLY);
	must(fd >= 0 && read(fd, found, 255) == (ssize_t)strlen(text) && strcmp(found, text) == 0);
	must(close(fd) == 0);
}

int main(void) {
	int shared = shm_open("/shared", O_CREAT | O_RDWR, 0640);
	must(shared >= 0 && ftruncate(shared, 3 * 4096 + 5) == 0);
	char *memory = mmap(0, 4 * 4096, PROT_READ | PROT_WRITE, MAP_SHARED, shared, 0);
	must(memory != MAP_FAILED);
	memory[2 * 4096] = 'm';
	put("/dev/shm/plain", "plain text", 0604);
	must(chown("/dev/shm/plain", 12, 34) == 0);
	must(mkdir("/dev/shm/dir", 0700) == 0 && mkdir("/dev/shm/dir/inner", 01777) == 0);
	must(chmod("/dev/shm/dir/inner", 01777) == 0);
	put("/dev/shm/dir/inner/deep", "deep", 0400);
	must(symlink("../plain", "/dev/shm/dir/link") == 0 && mkfifo("/dev/shm/fifo", 0622) == 0);
	must(chmod("/dev/shm/fifo", 0622) == 0);
	put("/scratch/file", "of the configuration", 0644);
	must(link("/dev/shm/plain", "/dev/shm/dir/inner/same") == 0);
	/* An open pipe, a socket without an owner, and a whiteout. */
	int pipe = open("/dev/shm/fifo", O_RDWR | O_NONBLOCK);
	must(pipe >= 0 && write(pipe, "waits", 5) == 5);
	must(mknod("/dev/shm/socket", S_IFSOCK | 0600, 0) == 0);
	must(mknod("/dev/shm/nothing", S_IFCHR | 0600, 0) == 0);
	struct stat before, other, s;
	must(stat("/dev/shm/plain", &before) == 0);
	if (fork() == 0) {
		for (;; nap(1))
			memory[1] = memory[0] + 1;
	}
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		must(fstat(shared, &s) == 0 && s.st_size == 3 * 4096 + 5 && (s.st_mode & 07777) == 0640);
		must(memory[2 * 4096] == 'm' && memory[4096] == 0);
		memory[0] = 40 + round;
		for (int n = 0; *(volatile char *)&memory[1] != 41 + round; n++) {
			must(n < 5000);
			nap(1);
		}
		char c = 0;
		must(pread(shared, &c, 1, 1) == 1 && c == 41 + round);
		holds("/dev/shm/plain", "plain text"), holds("/dev/shm/dir/link", "plain text");
		holds("/dev/shm/dir/inner/deep", "deep"), holds("/scratch/file", "of the configuration");
		must(stat("/dev/shm/plain", &s) == 0 && s.st_uid == 12 && s.st_gid == 34);
		must((s.st_mode & 07777) == 0604 && s.st_mtime == before.st_mtime);
		must(s.st_mtim.tv_nsec == before.st_mtim.tv_nsec);
		must(s.st_nlink == 2 && lstat("/dev/shm/dir/inner/same", &other) == 0);
		must(s.st_ino == other.st_ino);
		must(stat("/dev/shm/dir", &s) == 0 && (s.st_mode & 07777) == 0700);
		must(stat("/dev/shm/dir/inner", &s) == 0 && (s.st_mode & 07777) == 01777);
		must(stat("/dev/shm/fifo", &s) == 0 && s.st_mode == (S_IFIFO | 0622));
		must(stat("/dev/shm/socket", &s) == 0 && s.st_mode == (S_IFSOCK | 0600));
		must(stat("/dev/shm/nothing", &s) == 0 && S_ISCHR(s.st_mode) && s.st_rdev == 0);
		char found[8];
		must(read(pipe, found, 8) == 5 && memcmp(found, "waits", 5) == 0);
		must(write(pipe, "waits", 5) == 5);
	}
	ok();
}
