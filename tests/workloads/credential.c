/* Credentials of a process: ids, groups, capabilities, limits, no_new_privs, names; and of a child
 * that has become another user. */
#include "workload.h"
#include <grp.h>
#include <sys/prctl.h>
#include <sys/resource.h>

static void check(char *text, size_t size) {
	uid_t r, e, s;
	gid_t g[3], groups[16];
	struct rlimit files, core;
	must(getresuid(&r, &e, &s) == 0 && getresgid(&g[0], &g[1], &g[2]) == 0);
	int n = getgroups(16, groups);
	must(getrlimit(RLIMIT_NOFILE, &files) == 0 && getrlimit(RLIMIT_CORE, &core) == 0);
	int at = snprintf(text, size, "%d %d %d %d %d %d n%d nnp%d d%d f%ld c%ld ", r, e, s, g[0], g[1],
			  g[2], n, prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), prctl(PR_GET_DUMPABLE),
			  (long)files.rlim_cur, (long)core.rlim_cur);
	FILE *f = fopen("/proc/thread-self/status", "r");
	char line[256];
	while (f && fgets(line, sizeof line, f))
		if (!strncmp(line, "Cap", 3) || !strncmp(line, "Seccomp", 7) || !strncmp(line, "Name", 4))
			at += snprintf(text + at, size - at, "%s", line);
	fclose(f);
}

int main(void) {
	int ask[2], answer[2];
	char before[2048], after[2048], of_child[2048] = "", now[2048] = "";
	must(pipe(ask) == 0 && pipe(answer) == 0);
	struct rlimit few = {100, 200};
	must(setrlimit(RLIMIT_NOFILE, &few) == 0);
	prctl(PR_SET_NAME, "a name");
	if (fork() == 0) {
		gid_t groups[] = {7, 8, 9};
		char c;
		must(setgroups(3, groups) == 0 && setresgid(5, 5, 5) == 0 && setresuid(33, 33, 33) == 0);
		prctl(PR_SET_NAME, "user");
		while (read(ask[0], &c, 1) == 1) {
			check(before, sizeof before);
			must(write(answer[1], before, sizeof before) == sizeof before);
		}
		_exit(0);
	}
	must(write(ask[1], "x", 1) == 1 && read(answer[0], of_child, sizeof of_child) > 0);
	check(before, sizeof before);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		check(after, sizeof after);
		if (strcmp(before, after))
			print_line("before:\n%s\nafter:\n%s", before, after);
		must(strcmp(before, after) == 0);
		must(write(ask[1], "x", 1) == 1 && read(answer[0], now, sizeof now) > 0);
		if (strcmp(of_child, now))
			print_line("before:\n%s\nafter:\n%s", of_child, now);
		must(strcmp(of_child, now) == 0);
	}
	ok();
}
