/* Open files of procfs that are of other processes than the first: of a child, of the process itself, of one that is
 * made later; in two processes. */
#include "workload.h"
#include <dirent.h>

static int pid_in(int status) {
	char text[4096], *at;
	ssize_t n = pread(status, text, sizeof text - 1, 0);
	must(n > 0);
	text[n] = 0;
	must((at = strstr(text, "\nPid:\t")) != 0);
	return atoi(at + 6);
}

static int has_stack(int maps) {
	static char text[65536];
	ssize_t n, all = 0;
	must(lseek(maps, 0, SEEK_SET) == 0);
	while ((n = read(maps, text + all, sizeof text - 1 - all)) > 0)
		all += n;
	text[all] = 0;
	return n == 0 && strstr(text, "[stack]") != 0;
}

int main(void) {
	int ask[2], answer[2];
	must(pipe(ask) == 0 && pipe(answer) == 0);
	int early = fork();
	if (early == 0) {
		/* Of a process with a higher pid: it is made later than this one. */
		char path[64], c;
		int of_later = -1, own = open("/proc/self/maps", O_RDONLY);
		int net = open("/proc/net/dev", O_RDONLY);
		while (read(ask[0], &c, 1) == 1) {
			if (of_later == -1) {
				snprintf(path, sizeof path, "/proc/%d/status", getpid() + 1);
				must((of_later = open(path, O_RDONLY | O_NONBLOCK)) >= 0);
			}
			must(pid_in(of_later) == getpid() + 1 && has_stack(own));
			must(lseek(net, 0, SEEK_SET) == 0 && read(net, path, 8) == 8 && !memcmp(path, "Inter-| ", 8));
			must(fcntl(of_later, F_GETFL) == (O_RDONLY | O_NONBLOCK | 0100000));
			must(write(answer[1], &c, 1) == 1);
		}
		_exit(0);
	}
	int later = fork();
	if (later == 0)
		for (;;)
			pause();
	must(later == early + 1);
	char path[64], line[64], c = 0;
	snprintf(path, sizeof path, "/proc/%d/status", later);
	int status = open(path, O_RDONLY | O_CLOEXEC), twin = dup(status);
	snprintf(path, sizeof path, "/proc/%d", later);
	int directory = open(path, O_RDONLY | O_DIRECTORY);
	snprintf(path, sizeof path, "/proc/%d/oom_score_adj", later);
	int score = open(path, O_RDONLY);
	must(status >= 0 && twin >= 0 && directory >= 0 && score >= 0);
	/* Of the network, which the kernel looks up anew at each open. */
	int net[4];
	snprintf(path, sizeof path, "/proc/%d/net/tcp", later);
	net[0] = open(path, O_RDONLY);
	net[1] = open("/proc/net/dev", O_RDONLY);
	snprintf(path, sizeof path, "/proc/%d/net", later);
	net[2] = open(path, O_RDONLY | O_DIRECTORY);
	net[3] = open("/proc/net", O_RDONLY | O_DIRECTORY);
	/* An offset in the middle. */
	must(read(status, line, 10) == 10);
	for (int round = 0; round < ROUNDS; round++) {
		must(write(ask[1], &c, 1) == 1 && read(answer[0], &c, 1) == 1);
		ready(round);
		must(fcntl(status, F_GETFD) == FD_CLOEXEC && fcntl(twin, F_GETFD) == 0);
		must(lseek(status, 0, SEEK_CUR) == 10 && lseek(twin, 0, SEEK_CUR) == 10);
		must(lseek(twin, 12, SEEK_SET) == 12 && lseek(status, 0, SEEK_CUR) == 12);
		must(lseek(twin, 10, SEEK_SET) == 10);
		must(pid_in(status) == later);
		int below = openat(directory, "comm", O_RDONLY);
		must(below >= 0 && read(below, line, 8) == 8 && memcmp(line, "procfile", 8) == 0);
		must(close(below) == 0);
		for (int n = 0; n < 2; n++)
			must(lseek(net[n], 0, SEEK_SET) == 0 && read(net[n], line, 8) == 8);
		for (int n = 2; n < 4; n++) {
			must((below = openat(net[n], "unix", O_RDONLY)) >= 0 && read(below, line, 8) == 8);
			must(close(below) == 0 && memcmp(line, "Num     ", 8) == 0);
		}
		must(pread(score, line, 4, 0) == 2 && line[0] == '0');
		must(write(ask[1], &c, 1) == 1 && read(answer[0], &c, 1) == 1);
	}
	ok();
}
