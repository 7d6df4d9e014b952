/* The names under which file systems are mounted, as mountinfo shows them: in the container's own mount namespace, and
 * in a private one. */
#include "workload.h"
#include <sched.h>
#include <sys/mount.h>

/* The source of the mount at a place, with its escapes. */
static void is(const char *place, const char *wanted) {
	static char text[65536];
	char at[64], *line = 0, *end;
	int fd = open("/proc/self/mountinfo", O_RDONLY), n, all = 0;
	while ((n = read(fd, text + all, sizeof text - 1 - all)) > 0)
		all += n;
	must(n == 0 && close(fd) == 0);
	text[all] = 0;
	snprintf(at, sizeof at, " %s ", place);
	must((line = strstr(text, at)) != 0 && (line = strstr(line, " - ")) != 0);
	must((line = strchr(line + 3, ' ')) != 0 && (end = strchr(++line, ' ')) != 0);
	*end = 0;
	if (strcmp(line, wanted) != 0)
		print_line("'%s' at %s in place of '%s'", line, place, wanted);
	must(strcmp(line, wanted) == 0);
}

int main(void) {
	int ask[2], answer[2];
	char c = 0;
	static const char *places[] = {"/a", "/b", "/c", "/e", "/f"};
	for (int n = 0; n < 5; n++)
		must(mkdir(places[n], 0755) == 0);
	must(pipe(ask) == 0 && pipe(answer) == 0);
	must(mount("none", "/a", "tmpfs", 0, 0) == 0 && mount("of mine", "/b", "tmpfs", 0, "size=1m") == 0);
	must(mount("processes", "/c", "proc", 0, 0) == 0);
	must(mount("/b", "/e", 0, MS_BIND, 0) == 0);
	make_file("/b/file", "text");
	int pid = fork();
	must(pid >= 0);
	if (pid == 0) {
		must(unshare(CLONE_NEWNS) == 0 && mount(0, "/", 0, MS_REC | MS_PRIVATE, 0) == 0);
		must(mount("private", "/f", "tmpfs", 0, 0) == 0);
		while (write(answer[1], &c, 1) == 1 && read(ask[0], &c, 1) == 1) {
			is("/f", "private");
			is("/b", "of\\040mine");
		}
		_exit(0);
	}
	must(read(answer[0], &c, 1) == 1);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		is("/a", "none");
		is("/b", "of\\040mine");
		is("/c", "processes");
		is("/e", "of\\040mine");
		must(has_text("/b/file", "text") && has_text("/e/file", "text"));
		must(write(ask[1], &c, 1) == 1 && read(answer[0], &c, 1) == 1);
	}
	ok();
}
