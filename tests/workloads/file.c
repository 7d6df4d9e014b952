/* Regular files: offsets, flags, sharing by dup and by open, close-on-exec; directories;
 * devices. */
#include "workload.h"

int main(void) {
	int a = open("/file", O_RDWR | O_CREAT, 0644);
	must(a >= 0 && write(a, "0123456789", 10) == 10 && lseek(a, 4, SEEK_SET) == 4);
	int shared = dup(a);
	int own = open("/file", O_RDONLY | O_CLOEXEC);
	int log = open("/log", O_WRONLY | O_APPEND | O_CREAT | O_NONBLOCK, 0600);
	int far = dup2(log, 700);
	must(shared >= 0 && own >= 0 && log >= 0 && far == 700 && lseek(own, 7, SEEK_SET) == 7);
	int null = open("/dev/null", O_WRONLY), zero = open("/dev/zero", O_RDONLY);
	int dir = open("/etc", O_RDONLY | O_DIRECTORY), place = open("/etc/passwd", O_PATH);
	must(null >= 0 && zero >= 0 && dir >= 0 && place >= 0);
	must(mkdir("/sub", 0755) == 0 && chdir("/sub") == 0);
	umask(027);
	off_t size = 0;
	/* Made under one name and linked to another, as sem_open(3) does. */
	int made = open("/dev/shm/made", O_RDWR | O_CREAT | O_EXCL, 0600), linked = dup2(made, 702);
	must(linked == 702 && write(made, "sem", 3) == 3 && close(made) == 0);
	char *shared_memory = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, linked, 0);
	must(link("/dev/shm/made", "/dev/shm/linked") == 0 && unlink("/dev/shm/made") == 0);
	/* The kernel looks names below it up anew: the link of an open file reads as deleted then. */
	int first = open("/proc/self/net/dev", O_RDONLY), net = dup2(first, 701);
	must(net == 701 && close(first) == 0 && access("/proc/self/net/dev", F_OK) == 0);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		char c, head[6];
		shared_memory[2] = 'a' + round;
		int again = open("/dev/shm/linked", O_RDONLY);
		must(pread(again, head, 3, 0) == 3 && head[2] == 'a' + round && close(again) == 0);
		must(pread(net, head, 6, 0) == 6 && memcmp(head, "Inter-", 6) == 0);
		/* dup shares the offset, open does not. */
		must(lseek(a, 0, SEEK_CUR) == 4 && lseek(shared, 0, SEEK_CUR) == 4);
		must(lseek(own, 0, SEEK_CUR) == 7);
		must(read(a, &c, 1) == 1 && c == '4' && lseek(shared, 0, SEEK_CUR) == 5);
		must(lseek(shared, 4, SEEK_SET) == 4 && lseek(a, 0, SEEK_CUR) == 4);
		must(fcntl(own, F_GETFD) == FD_CLOEXEC && fcntl(a, F_GETFD) == 0);
		must((fcntl(log, F_GETFL) & (O_ACCMODE | O_APPEND | O_NONBLOCK)) ==
		     (O_WRONLY | O_APPEND | O_NONBLOCK));
		must((fcntl(own, F_GETFL) & O_ACCMODE) == O_RDONLY && write(own, "x", 1) == -1);
		must(write(log, "line\n", 5) == 5 && write(far, "line\n", 5) == 5);
		size += 10;
		struct stat st;
		must(fstat(far, &st) == 0 && st.st_size == size);
		must(write(null, "x", 1) == 1 && read(zero, &c, 1) == 1 && c == 0);
		must(faccessat(dir, "passwd", R_OK, 0) == 0 && fstat(place, &st) == 0);
		must(read(place, &c, 1) == -1 && errno == EBADF);
		char cwd[64];
		must(getcwd(cwd, sizeof cwd) && strcmp(cwd, "/sub") == 0);
		must(umask(027) == 027);
		/* The lowest free number is unchanged: nothing else is open. */
		int next = dup(null);
		must(next == place + 1 && close(next) == 0);
	}
	ok();
}
