/* Files without a name in the directory that a private mount namespace has as its /tmp, as a service of systemd
 * (PrivateTmp=). */
#include "workload.h"
#include <sched.h>
#include <sys/mount.h>

static int is(int fd, const char *text) {
	char got[64] = "";
	struct stat s;
	return fstat(fd, &s) == 0 && s.st_nlink == 0 && pread(fd, got, sizeof got - 1, 0) > 0 &&
	       strcmp(got, text) == 0;
}

int main(void) {
	int ask[2], answer[2];
	must(mkdir("/hidden", 0700) == 0 && mkdir("/hidden/tmp", 01777) == 0 && mkdir("/place", 0755) == 0);
	must(pipe(ask) == 0 && pipe(answer) == 0);
	if (fork() == 0) {
		must(unshare(CLONE_NEWNS) == 0 && mount(0, "/", 0, MS_REC | MS_PRIVATE, 0) == 0);
		must(mount("/hidden/tmp", "/place", 0, MS_BIND, 0) == 0);
		must(mkdir("/place/deep", 0700) == 0);
		int unnamed = open("/place", O_TMPFILE | O_RDWR, 0600);
		int deleted = open("/place/deep/file", O_CREAT | O_RDWR, 0600);
		must(unnamed >= 0 && deleted >= 0 && unlink("/place/deep/file") == 0);
		must(write(unnamed, "unnamed", 7) == 7 && write(deleted, "deleted", 7) == 7);
		char *map = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, deleted, 0);
		must(map != MAP_FAILED);
		for (char c; read(ask[0], &c, 1) == 1;) {
			must(is(unnamed, "unnamed") && is(deleted, "deleted") && !strcmp(map, "deleted"));
			must(linkat(AT_FDCWD, "/place/named", AT_FDCWD, "/place/other", 0) == -1);
			must(write(answer[1], &c, 1) == 1);
		}
		_exit(0);
	}
	close(answer[1]);
	for (int round = 0; round < ROUNDS; round++) {
		char c = 'a';
		must(write(ask[1], &c, 1) == 1 && read(answer[0], &c, 1) == 1);
		ready(round);
		must(write(ask[1], &c, 1) == 1 && read(answer[0], &c, 1) == 1);
	}
	ok();
}
