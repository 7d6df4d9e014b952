/* Control groups inside: a tree with settings, attributes, owners, processes and watched events,
 * into which other processes can be moved afterwards; and a frozen group with its processes. */
#include "workload.h"
#include <sys/inotify.h>
#include <sys/xattr.h>

#define TOP "/sys/fs/cgroup/"

static int contains(const char *path, const char *text) {
	char found[4096];
	int fd = open(path, O_RDONLY);
	must(fd >= 0);
	ssize_t n = read(fd, found, sizeof found - 1);
	must(n >= 0 && close(fd) == 0);
	found[n] = 0;
	return strstr(found, text) != NULL;
}

static int is_in(pid_t pid, const char *group) {
	char path[64], line[128];
	snprintf(path, sizeof path, "/proc/%d/cgroup", pid);
	snprintf(line, sizeof line, "0::/%s\n", group);
	return contains(path, line);
}

/* Events arrive a moment later. */
static void drain_events(int watches) {
	char events[4096];
	while (nap(50), read(watches, events, sizeof events) > 0)
		;
	must(errno == EAGAIN);
}

static pid_t child_in(const char *procs) {
	int done[2];
	char c;
	must(pipe(done) == 0);
	pid_t pid = fork();
	if (pid == 0) {
		write_text(procs, "0");
		must(write(done[1], "", 1) == 1);
		for (;;)
			pause();
	}
	must(read(done[0], &c, 1) == 1 && close(done[0]) == 0 && close(done[1]) == 0);
	return pid;
}

/* Counts of the frozen processes: one runs, one waits. */
static volatile struct {
	long works, waits;
} *counts;

static pid_t counting_in(const char *procs, int waits) {
	pid_t pid = fork();
	if (pid == 0) {
		write_text(procs, "0");
		for (;;) {
			if (waits)
				nap(20), counts->waits++;
			else
				counts->works++;
		}
	}
	return pid;
}

static void check_progress(int goes) {
	long works = counts->works, waits = counts->waits;
	for (int n = 0; goes && (counts->works == works || counts->waits == waits); n++) {
		must(n < 60000);
		nap(1);
	}
	nap(goes ? 0 : 100);
	must(goes || (counts->works == works && counts->waits == waits));
}

/* Freezes or thaws, and waits for the state. */
static void freeze(const char *text) {
	char state[16];
	snprintf(state, sizeof state, "frozen %s\n", text);
	write_text(TOP "ice.slice/cgroup.freeze", text);
	for (int n = 0; !contains(TOP "ice.slice/cgroup.events", state); n++) {
		must(n < 60000);
		nap(1);
	}
}

int main(void) {
	char value[16];
	struct stat s;
	must(mkdir(TOP "first.scope", 0755) == 0 && mkdir(TOP "some.slice", 0755) == 0);
	must(mkdir(TOP "some.slice/one.service", 0750) == 0);
	must(mkdir(TOP "some.slice/two.service", 0755) == 0);
	must(mkdir(TOP "some.slice/two.service/empty", 0755) == 0);
	write_text(TOP "first.scope/cgroup.procs", "0");
	write_text(TOP "some.slice/cgroup.max.depth", "5");
	must(setxattr(TOP "some.slice/one.service", "user.id", "abc", 3, 0) == 0);
	must(chown(TOP "some.slice/one.service", 1000, 1001) == 0);
	must(chown(TOP "some.slice/one.service/cgroup.procs", 1000, 0) == 0);
	/* Available controllers are delegated, and limit something. */
	int has_pids = contains(TOP "cgroup.controllers", "pids");
	if (has_pids) {
		write_text(TOP "cgroup.subtree_control", "+pids");
		write_text(TOP "some.slice/cgroup.subtree_control", "+pids");
		write_text(TOP "some.slice/one.service/pids.max", "17");
	}
	pid_t one = child_in(TOP "some.slice/one.service/cgroup.procs");
	pid_t two = child_in(TOP "some.slice/two.service/cgroup.procs");
	int watches = inotify_init1(IN_NONBLOCK);
	/* More than ten watches: their numbers are hexadecimal in procfs. */
	for (int n = 0; n < 12; n++) {
		int wd = inotify_add_watch(watches, TOP "some.slice/two.service/cgroup.events", IN_MODIFY);
		must(wd == n + 1 && inotify_rm_watch(watches, wd) == 0);
	}
	int wd = inotify_add_watch(watches, TOP "some.slice/two.service/cgroup.events", IN_MODIFY);
	must(wd == 13);
	drain_events(watches);
	int dir = open(TOP "some.slice", O_RDONLY | O_DIRECTORY);
	must(dir >= 0);

	counts = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	must(counts != MAP_FAILED);
	must(mkdir(TOP "ice.slice", 0755) == 0 && mkdir(TOP "ice.slice/deep.service", 0755) == 0);
	pid_t works = counting_in(TOP "ice.slice/deep.service/cgroup.procs", 0);
	pid_t waits = counting_in(TOP "ice.slice/cgroup.procs", 1);

	for (int round = 0; round < ROUNDS; round++) {
		check_progress(1);
		freeze("1");
		check_progress(0);

		ready(round);

		must(is_in(works, "ice.slice/deep.service") && is_in(waits, "ice.slice"));
		must(contains(TOP "ice.slice/cgroup.freeze", "1\n"));
		must(contains(TOP "ice.slice/deep.service/cgroup.freeze", "0\n"));
		check_progress(0);
		freeze("1");
		freeze("0");
		check_progress(1);
		must(is_in(getpid(), "first.scope") && is_in(one, "some.slice/one.service"));
		must(is_in(two, "some.slice/two.service"));
		must(contains(TOP "some.slice/cgroup.max.depth", "5\n"));
		must(contains(TOP "some.slice/cgroup.max.descendants", "max"));
		must(stat(TOP "some.slice/one.service", &s) == 0 && (s.st_mode & 0777) == 0750);
		must(s.st_uid == 1000 && s.st_gid == 1001);
		must(stat(TOP "some.slice/one.service/cgroup.procs", &s) == 0 && s.st_uid == 1000);
		must(stat(TOP "some.slice/two.service/empty/cgroup.procs", &s) == 0 && s.st_uid == 0);
		must(getxattr(TOP "some.slice/one.service", "user.id", value, sizeof value) == 3);
		must(memcmp(value, "abc", 3) == 0);
		must(faccessat(dir, "two.service/cgroup.events", R_OK, 0) == 0);
		if (has_pids) {
			must(contains(TOP "some.slice/one.service/pids.max", "17\n"));
			must(contains(TOP "some.slice/two.service/pids.max", "max\n"));
		}
		/* The last process of a group exits, which is an event, and another takes its
		 * place. */
		struct inotify_event event;
		drain_events(watches);
		must(kill(two, SIGKILL) == 0 && waitpid(two, 0, 0) == two);
		for (int n = 0; read(watches, &event, sizeof event) < 0; n++) {
			must(errno == EAGAIN && n < 5000);
			nap(1);
		}
		must(event.wd == wd && event.mask == IN_MODIFY);
		must(contains(TOP "some.slice/two.service/cgroup.events", "populated 0"));
		two = child_in(TOP "some.slice/two.service/cgroup.procs");
		drain_events(watches);
	}
	ok();
}
