/* Private cgroup namespaces: of a process at the root of one, below it, and moved out of it; with a
 * mount that shows the groups below the root. Where no groups can be made, there is one at the
 * container's own root. */
#include "workload.h"
#include <sched.h>
#include <sys/mount.h>

#define TOP "/sys/fs/cgroup/"
#define WORKERS 4
static int ask[WORKERS][2], answer[WORKERS][2];

static int contains(const char *path, const char *text) {
	char found[4096] = "";
	int fd = open(path, O_RDONLY);
	must(fd >= 0 && read(fd, found, sizeof found - 1) >= 0 && close(fd) == 0);
	return strstr(found, text) != NULL;
}

/* Checks the group of the calling process as it sees it. All other hierarchies must show its first
 * group. */
static void is_in(const char *path) {
	char text[4096] = "", own[256] = "/";
	int fd = open("/proc/self/cgroup", O_RDONLY);
	must(fd >= 0 && read(fd, text, sizeof text - 1) > 0 && close(fd) == 0);
	for (char *line = strtok(text, "\n"); line; line = strtok(0, "\n")) {
		char *at = strchr(strchr(line, ':') + 1, ':') + 1;
		if (strncmp(line, "0::", 3) == 0)
			strcpy(own, at);
		else
			must(strcmp(at, "/") == 0);
	}
	must(strcmp(own, path) == 0);
}

static void serve(int number, const char *path, const char *mounted) {
	char c;
	while (read(ask[number][0], &c, 1) == 1) {
		is_in(path);
		must(mounted == NULL || access(mounted, F_OK) == 0);
		must(write(answer[number][1], &c, 1) == 1);
	}
	_exit(0);
}

static void ask_one(int number, char c) {
	char got = 0;
	must(write(ask[number][1], &c, 1) == 1 && read(answer[number][0], &got, 1) == 1 && got == c);
}

/* Processes in groups that the first process has made. */
static int begin_below(void) {
	char pid[16];
	must(mkdir(TOP "a.slice/b.service", 0755) == 0 && mkdir(TOP "first.scope", 0755) == 0);
	must(mkdir(TOP "a.slice/b.service/inner", 0755) == 0 && mkdir("/groups", 0755) == 0);
	write_text(TOP "first.scope/cgroup.procs", "0");
	if (fork() == 0) {
		write_text(TOP "a.slice/b.service/cgroup.procs", "0");
		must(unshare(CLONE_NEWCGROUP) == 0);
		is_in("/");
		write_text(TOP "a.slice/b.service/inner/cgroup.procs", "0");
		if (fork() == 0)
			serve(1, "/inner", NULL);
		serve(0, "/inner", NULL);
	}
	ask_one(0, 'a'), ask_one(1, 'a');
	/* A process that the first process moves out of its root. */
	pid_t left = fork();
	if (left == 0) {
		write_text(TOP "a.slice/b.service/inner/cgroup.procs", "0");
		must(unshare(CLONE_NEWCGROUP) == 0);
		if (fork() == 0)
			serve(3, "/", NULL);
		serve(2, "/../../../first.scope", NULL);
	}
	ask_one(3, 'a');
	snprintf(pid, sizeof pid, "%d", left);
	write_text(TOP "first.scope/cgroup.procs", pid);
	ask_one(2, 'a');
	/* No process can be put into a group that delegates a controller. */
	if (contains(TOP "cgroup.controllers", "pids")) {
		write_text(TOP "cgroup.subtree_control", "+pids");
		write_text(TOP "a.slice/cgroup.subtree_control", "+pids");
		write_text(TOP "a.slice/b.service/cgroup.subtree_control", "+pids");
	}
	return 4;
}

/* A process at the root of a slice, which sees the slice in a mount of its own. */
static void mount_below(void) {
	int done[2];
	char c;
	must(pipe(done) == 0);
	pid_t pid = fork();
	if (pid == 0) {
		must(mkdir(TOP "c.slice", 0755) == 0 && mkdir(TOP "c.slice/d.service", 0755) == 0);
		write_text(TOP "c.slice/cgroup.procs", "0");
		must(unshare(CLONE_NEWCGROUP | CLONE_NEWNS) == 0);
		must(mount(0, "/", 0, MS_REC | MS_PRIVATE, 0) == 0);
		must(mount("groups", "/groups", "cgroup2", MS_NOSUID | MS_NOEXEC, 0) == 0);
		must(write(done[1], "", 1) == 1);
		for (;;) {
			is_in("/");
			must(access("/groups/d.service/cgroup.procs", F_OK) == 0);
			nap(10);
		}
	}
	must(read(done[0], &c, 1) == 1 && close(done[0]) == 0 && close(done[1]) == 0);
}

/* A process that leaves its root, which the first process then removes. */
static void lose_root(void) {
	char pid[16], c;
	must(mkdir(TOP "a.slice", 0755) == 0 && mkdir(TOP "b.slice", 0755) == 0);
	pid_t left = fork();
	if (left == 0) {
		write_text(TOP "a.slice/cgroup.procs", "0");
		must(unshare(CLONE_NEWCGROUP) == 0 && write(answer[0][1], "", 1) == 1);
		serve(0, "/../b.slice", NULL);
	}
	must(read(answer[0][0], &c, 1) == 1);
	snprintf(pid, sizeof pid, "%d", left);
	write_text(TOP "b.slice/cgroup.procs", pid);
	must(rmdir(TOP "a.slice") == 0);
	ask_one(0, 'a');
}

int main(void) {
	int workers = 1;
	for (int n = 0; n < WORKERS; n++)
		must(pipe(ask[n]) == 0 && pipe(answer[n]) == 0);
	if (getenv("GONE")) {
		lose_root();
		ready(0);
		ok();
	}
	int may_make = mkdir(TOP "a.slice", 0755) == 0;
	if (may_make) {
		workers = begin_below();
		mount_below();
	} else if (fork() == 0) {
		must(unshare(CLONE_NEWCGROUP) == 0);
		serve(0, "/", NULL);
	}
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		for (int n = 0; n < workers; n++)
			ask_one(n, '0' + round);
		is_in(may_make ? "/first.scope" : "/");
		must(waitpid(-1, 0, WNOHANG) == 0);
	}
	ok();
}
