/* More pipes of two users than the kernel gives one user in full size; some have data, and packets. */
#include "workload.h"
#include <sys/ioctl.h>
#include <sys/resource.h>

enum { PIPES = 900, FULL = 3, LONG = 60000, PACKETS = 12 };

static int ends[PIPES][2], sizes[PIPES];
static char text[LONG];

static void make(int user) {
	for (int n = 0; n < LONG; n++)
		text[n] = n * 7 + user;
	for (int n = 0; n < PIPES; n++) {
		must(pipe2(ends[n], n % 90 == 1 ? O_DIRECT : 0) == 0);
		must((sizes[n] = fcntl(ends[n][1], F_GETPIPE_SZ)) > 0);
		if (n % 90 == FULL && sizes[n] > LONG)
			must(write(ends[n][1], text, LONG) == LONG);
		if (n % 90 == 1 && sizes[n] >= PACKETS * 4096)
			for (int packet = 1; packet <= PACKETS; packet++)
				must(write(ends[n][1], text, packet) == packet);
	}
}

static void check(void) {
	static char got[LONG];
	for (int n = 0; n < PIPES; n++) {
		int now = fcntl(ends[n][1], F_GETPIPE_SZ), waiting = -1;
		if (now != sizes[n])
			print_line("pipe %d of %d bytes in place of %d", n, now, sizes[n]);
		must(now == sizes[n] && ioctl(ends[n][0], FIONREAD, &waiting) == 0);
		if (n % 90 == FULL && sizes[n] > LONG) {
			must(waiting == LONG && read(ends[n][0], got, LONG) == LONG);
			must(memcmp(got, text, LONG) == 0 && write(ends[n][1], text, LONG) == LONG);
		} else if (n % 90 == 1 && sizes[n] >= PACKETS * 4096) {
			for (int packet = 1; packet <= PACKETS; packet++)
				must(read(ends[n][0], got, LONG) == packet && memcmp(got, text, packet) == 0);
			for (int packet = 1; packet <= PACKETS; packet++)
				must(write(ends[n][1], text, packet) == packet);
		} else
			must(waiting == 0);
	}
}

int main(void) {
	struct rlimit limit;
	int ask[2], answer[2];
	char c = 0;
	must(getrlimit(RLIMIT_NOFILE, &limit) == 0);
	limit.rlim_cur = limit.rlim_max;
	must(setrlimit(RLIMIT_NOFILE, &limit) == 0 && pipe(ask) == 0 && pipe(answer) == 0);
	int pid = fork();
	must(pid >= 0);
	if (pid == 0) {
		must(setresuid(1000, 1000, 1000) == 0);
		make(1);
		while (write(answer[1], &c, 1) == 1 && read(ask[0], &c, 1) == 1)
			check();
		_exit(0);
	}
	make(0);
	must(read(answer[0], &c, 1) == 1);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		check();
		must(write(ask[1], &c, 1) == 1 && read(answer[0], &c, 1) == 1);
	}
	ok();
}
