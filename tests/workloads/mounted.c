/* Mounts by processes in the container's own mount namespace: over existing files, over each other,
 * and visible in another namespace, too. */
#include "workload.h"
#include <sched.h>
#include <sys/mount.h>
#include <sys/statvfs.h>

static int ask[2], answer[2];

/* The number of mounts, the same in every round. */
static int mounts(void) {
	static char all[65536];
	int fd = open("/proc/self/mountinfo", O_RDONLY), length = 0, n, count = 0;
	must(fd >= 0);
	while ((n = read(fd, all + length, sizeof all - length)) > 0)
		length += n;
	close(fd);
	for (n = 0; n < length; n++)
		count += all[n] == '\n';
	return count;
}

static void is_as_it_was(void) {
	struct statvfs s;
	struct stat there;
	must(has_text("/memory/file", "kept") && has_text("/memory/deep/other", "kept, too"));
	must(statvfs("/memory", &s) == 0 && s.f_blocks * s.f_frsize == 1 << 20 && s.f_flag & ST_NOEXEC);
	must(stat("/memory", &there) == 0 && (there.st_mode & 07777) == 01750);
	must(has_text("/part/old", "old") && is_read_only("/part/new") && has_text("/part/in/inner", "on top"));
	must(has_text("/deep/other", "kept, too") && has_text("/proc/self/comm", "mounted\n"));
	must(access("/other-proc/self", F_OK) == 0 && stat("/masked", &there) == 0);
	must(S_ISCHR(there.st_mode));
}

static void serve(void) {
	char c;
	must(unshare(CLONE_NEWNS) == 0 && mount(0, "/", 0, MS_REC | MS_PRIVATE, 0) == 0);
	must(mount("/memory/deep", "/only", 0, MS_BIND, 0) == 0);
	/* Covered mounts are not needed in the other namespace. */
	must(umount("/dev/shm") == 0 && umount("/dev/shm") == 0);
	while (read(ask[0], &c, 1) == 1) {
		is_as_it_was();
		must(has_text("/only/other", "kept, too"));
		char path[] = "/only/0";
		path[6] = c;
		make_file(path, "by the other");
		must(write(answer[1], &c, 1) == 1);
	}
	_exit(0);
}

int main(void) {
	const char *places[] = {"/memory", "/data", "/data/in", "/part", "/deep", "/other-proc", "/only"};
	for (int n = 0; n < 7; n++)
		must(mkdir(places[n], 0755) == 0);
	must(pipe(ask) == 0 && pipe(answer) == 0);
	make_file("/data/old", "old");
	make_file("/data/in/inner", "below");
	make_file("/masked", "secret");
	must(mount("memory", "/memory", "tmpfs", MS_NOEXEC | MS_NOSUID, "size=1m,mode=1750") == 0);
	make_file("/memory/file", "kept");
	must(mkdir("/memory/deep", 0700) == 0);
	make_file("/memory/deep/other", "kept, too");
	must(mount("/data", "/part", 0, MS_BIND, 0) == 0);
	must(mount(0, "/part", 0, MS_REMOUNT | MS_BIND | MS_RDONLY, 0) == 0);
	must(mount("top", "/part/in", "tmpfs", 0, 0) == 0);
	make_file("/part/in/inner", "on top");
	must(mount("/memory/deep", "/deep", 0, MS_BIND, 0) == 0);
	must(mount("proc", "/other-proc", "proc", 0, 0) == 0);
	must(mount("/dev/null", "/masked", 0, MS_BIND, 0) == 0);
	must(mount("shm", "/dev/shm", "tmpfs", 0, 0) == 0);
	make_file("/dev/shm/top", "of memory");
	if (fork() == 0)
		serve();
	int held = open("/memory/file", O_RDWR), count = mounts();
	must(held >= 0 && chdir("/memory/deep") == 0);
	const char *mapped = mmap(0, 4096, PROT_READ, MAP_PRIVATE, held, 0);
	must(mapped != MAP_FAILED);
	for (int round = 0; round < ROUNDS; round++) {
		char c = '0' + round, path[] = "/memory/deep/0", text[8] = "";
		ready(round);
		is_as_it_was();
		must(mounts() == count && has_text("other", "kept, too"));
		must(has_text("/dev/shm/top", "of memory"));
		must(pread(held, text, 4, 0) == 4 && strcmp(text, "kept") == 0 && mapped[0] == 'k');
		must(write(ask[1], &c, 1) == 1 && read(answer[0], &c, 1) == 1);
		path[13] = c;
		must(has_text(path, "by the other"));
	}
	/* The covered files are unchanged. */
	must(umount("/part/in") == 0 && umount("/part") == 0 && has_text("/data/in/inner", "below"));
	must(umount("/masked") == 0 && has_text("/masked", "secret"));
	ok();
}
