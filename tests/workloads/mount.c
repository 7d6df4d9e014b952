/* Private mount namespaces: of two processes that share one, of a process with a copy of theirs
 * that changes separately, and of a process with another root there. The container's own has none
 * of these mounts. */
#include "workload.h"
#include <sched.h>
#include <sys/mount.h>
#include <sys/statvfs.h>

#define WORKERS 4
static int ask[WORKERS][2], answer[WORKERS][2];

/* The options of the topmost mount at a place, such as "ro,nosuid,relatime". */
static void options(const char *place, char *found) {
	static char all[65536];
	int fd = open("/proc/self/mountinfo", O_RDONLY), length = 0, n;
	must(fd >= 0);
	while ((n = read(fd, all + length, sizeof all - 1 - length)) > 0)
		length += n;
	all[length] = 0;
	close(fd);
	found[0] = 0;
	for (char *line = strtok(all, "\n"); line; line = strtok(0, "\n")) {
		char at[256], what[256];
		must(sscanf(line, "%*d %*d %*s %*s %255s %255[^-]", at, what) == 2);
		if (strcmp(at, place) == 0)
			strcpy(found, what);
	}
}

static int has(const char *place, const char *option) {
	char found[256];
	options(place, found);
	return strstr(found, option) != 0;
}

static void is_as_it_was(void) {
	struct stat open, there;
	struct statvfs s;
	must(has_text("/own/file", "kept") && has_text("/own/deep/other", "kept, too"));
	must(stat("/own/deep", &there) == 0 && (there.st_mode & 07777) == 0710);
	must(statvfs("/own", &s) == 0 && s.f_blocks * s.f_frsize == 1 << 20);
	must(stat("/own", &there) == 0 && (there.st_mode & 07777) == 01750 && there.st_gid == 7);
	must(has("/own", "noexec") && has("/own", "nosuid") && !has("/own", "shared:"));
	must(is_read_only("/data/new") && has_text("/data/old", "old") && has_text("/part/old", "old"));
	must(has("/part", "noatime") && has("/part", "shared:") && !has("/part", "ro,"));
	must(stat("/masked", &there) == 0 && S_ISCHR(there.st_mode));
	must(has_text("/over/inner", "of /data/in"));
	must(lstat("/own/covered/inner", &open) == 0 && has_text("/own/covered/inner", "of /data/in"));
}

static void makes_mounts(void) {
	must(mount(0, "/", 0, MS_REC | MS_PRIVATE, 0) == 0);
	must(mount("own", "/own", "tmpfs", MS_NOEXEC | MS_NOSUID, "size=1m,mode=1750,gid=7") == 0);
	make_file("/own/file", "kept");
	must(mkdir("/own/deep", 0710) == 0 && mkdir("/own/covered", 0755) == 0);
	make_file("/own/deep/other", "kept, too");
	make_file("/own/covered/below", "is covered");
	must(mount("/data/in", "/own/covered", 0, MS_BIND, 0) == 0);
	must(mount("/data", "/part", 0, MS_BIND, 0) == 0);
	must(mount(0, "/part", 0, MS_REMOUNT | MS_BIND | MS_NOATIME, 0) == 0);
	must(mount(0, "/part", 0, MS_SHARED, 0) == 0);
	must(mount("/data", "/data", 0, MS_BIND, 0) == 0);
	must(mount(0, "/data", 0, MS_REMOUNT | MS_BIND | MS_RDONLY, 0) == 0);
	must(mount("/dev/null", "/masked", 0, MS_BIND, 0) == 0);
	must(mount("/data", "/over", 0, MS_BIND, 0) == 0);
	must(mount("/data/in", "/over", 0, MS_BIND, 0) == 0);
}

/* Acts at each request. */
static void serve(int number, void (*act)(int)) {
	int round;
	while (read(ask[number][0], &round, sizeof round) == sizeof round) {
		act(round);
		must(write(answer[number][1], &round, sizeof round) == sizeof round);
	}
	_exit(0);
}

static int held, place;
static const char *mapped;

static void first(int round) {
	char text[8] = "", path[64];
	is_as_it_was();
	/* Open and mapped files, and the working directory, are unchanged. */
	must(getcwd(path, sizeof path) && strcmp(path, "/own/deep") == 0);
	must(has_text("other", "kept, too"));
	must(pread(held, text, 4, 0) == 4 && strcmp(text, "kept") == 0 && mapped[0] == 'k');
	int below = openat(place, "masked", O_PATH);
	struct stat s;
	must(below >= 0 && fstat(below, &s) == 0 && S_ISCHR(s.st_mode) && close(below) == 0);
	/* New mounts are visible to the second process, and to no other. */
	snprintf(path, sizeof path, "/own/deep/%d", round);
	must(mkdir(path, 0755) == 0 && mount("new", path, "tmpfs", 0, 0) == 0);
	strcat(path, "/seen");
	make_file(path, "new");
	must(umount2("/own/covered", 0) == 0 && has_text("/own/covered/below", "is covered"));
	must(mount("/data/in", "/own/covered", 0, MS_BIND, 0) == 0);
}

static void second(int round) {
	char path[64];
	is_as_it_was();
	for (int n = 0; n <= round; n++) {
		snprintf(path, sizeof path, "/own/deep/%d/seen", n);
		must(has_text(path, "new"));
	}
}

static void copy(int round) {
	char path[64];
	must(has_text("/own/file", "kept") && access("/own/deep/other", F_OK) == 0);
	/* The same file system, and other mounts. */
	snprintf(path, sizeof path, "/own/deep/%d", round);
	must(access(path, F_OK) == 0);
	strcat(path, "/seen");
	must(access(path, F_OK) == -1 && errno == ENOENT);
	must(access("/part/old", F_OK) == -1 && has("/proc", "ro,") && is_read_only("/data/new"));
}

static void jailed(int round) {
	(void)round;
	must(has_text("/file", "kept") && access("/data", F_OK) == -1);
	must(has_text("/covered/inner", "of /data/in"));
}

int main(void) {
	const char *places[] = {"/own", "/data", "/data/in", "/part", "/over"};
	for (int n = 0; n < WORKERS; n++)
		must(pipe(ask[n]) == 0 && pipe(answer[n]) == 0);
	for (int n = 0; n < 5; n++)
		must(mkdir(places[n], 0755) == 0);
	make_file("/data/old", "old");
	make_file("/data/in/inner", "of /data/in");
	make_file("/masked", "secret");
	make_file("/over/file", "at the bottom");
	if (fork() == 0) {
		must(unshare(CLONE_NEWNS) == 0);
		makes_mounts();
		if (fork() == 0)
			serve(1, second);
		if (fork() == 0) {
			must(unshare(CLONE_NEWNS) == 0 && umount("/part") == 0);
			must(mount(0, "/proc", 0, MS_REMOUNT | MS_BIND | MS_RDONLY, 0) == 0);
			serve(2, copy);
		}
		if (fork() == 0) {
			must(chroot("/own") == 0 && chdir("/deep") == 0);
			serve(3, jailed);
		}
		must(chdir("/own/deep") == 0);
		must((held = open("/own/file", O_RDWR)) >= 0 && (place = open("/", O_RDONLY)) >= 0);
		mapped = mmap(0, 4096, PROT_READ, MAP_PRIVATE, held, 0);
		must(mapped != MAP_FAILED);
		serve(0, first);
	}
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		must(has_text("/masked", "secret") && has_text("/over/file", "at the bottom"));
		must(access("/own/file", F_OK) == -1 && access("/part/old", F_OK) == -1);
		make_file("/data/new", "by the container");
		must(unlink("/data/new") == 0);
		for (int n = 0; n < WORKERS; n++) {
			int got = -1;
			must(write(ask[n][1], &round, sizeof round) == sizeof round);
			must(read(answer[n][0], &got, sizeof got) == sizeof got && got == round);
		}
	}
	ok();
}
