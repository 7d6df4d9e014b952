/* Pipes: with data, full, with an end closed, shared between processes, non-blocking. */
#include "workload.h"

int main(void) {
	int p[2], big[2], eof[2], gone[2];
	must(pipe(p) == 0 && pipe2(big, O_NONBLOCK) == 0 && pipe(eof) == 0 && pipe(gone) == 0);
	signal(SIGPIPE, SIG_IGN);
	must(write(p[1], "hello", 5) == 5);
	must(fcntl(big[1], F_SETPIPE_SZ, 1 << 17) == 1 << 17);
	char chunk[4096];
	memset(chunk, 'b', sizeof chunk);
	long filled = 0, n;
	while ((n = write(big[1], chunk, sizeof chunk)) > 0)
		filled += n;
	must(filled == 1 << 17);
	must(write(eof[1], "end", 3) == 3 && close(eof[1]) == 0);
	must(close(gone[0]) == 0);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		char text[16] = "";
		must(read(p[0], text, sizeof text) == 5 && strcmp(text, "hello") == 0);
		must(write(p[1], "hello", 5) == 5);
		must(fcntl(big[1], F_GETPIPE_SZ) == 1 << 17);
		must(write(big[1], chunk, 1) == -1 && errno == EAGAIN);
		must(write(gone[1], "x", 1) == -1 && errno == EPIPE);
		must(!(fcntl(p[0], F_GETFL) & O_NONBLOCK) && fcntl(big[0], F_GETFL) & O_NONBLOCK);
	}
	char text[16];
	must(read(eof[0], text, sizeof text) == 3 && read(eof[0], text, sizeof text) == 0);
	long left = 0;
	while ((n = read(big[0], chunk, sizeof chunk)) > 0)
		left += n;
	must(left == filled);
	ok();
}
