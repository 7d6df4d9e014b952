/* Which memory a core dump contains (/proc/PID/coredump_filter): each process has a choice of its own. */
#include "workload.h"

static const char *const filter = "/proc/self/coredump_filter";

int main(void) {
	int up[2];
	char byte;
	write_text(filter, "0x7f");
	must(pipe(up) == 0);
	if (fork() == 0) {
		write_text(filter, "0");
		must(write(up[1], "x", 1) == 1);
		for (int round = 0; round < ROUNDS; round++) {
			ready(round);
			must(has_text(filter, "00000000\n"));
		}
		_exit(0);
	}
	must(read(up[0], &byte, 1) == 1);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		must(has_text(filter, "0000007f\n"));
	}
	int status;
	must(wait(&status) > 0 && status == 0);
	ok();
}
