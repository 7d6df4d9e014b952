/* Pipes: with data, full, with an end closed, shared between processes, non-blocking. */
#include "workload.h"

int main(void) {
	int packets[2];
	must(pipe2(packets, O_DIRECT) == 0 && write(packets[1], "one", 3) == 3);
	must(write(packets[1], "second", 6) == 6);
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
	/* Data without a reader, which is read through the write end. */
	char left_at[32];
	snprintf(left_at, sizeof left_at, "/proc/self/fd/%d", gone[1]);
	must(write(gone[1], "left", 4) == 4 && close(gone[0]) == 0);
	/* The same end once more, as a separate open file. */
	char name[32];
	snprintf(name, sizeof name, "/proc/self/fd/%d", p[1]);
	int again = open(name, O_WRONLY | O_NONBLOCK);
	must(again >= 0);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		char text[16] = "";
		must(read(p[0], text, sizeof text) == 5 && strcmp(text, "hello") == 0);
		must(write(p[1], "hello", 5) == 5);
		must(fcntl(big[1], F_GETPIPE_SZ) == 1 << 17);
		must(write(big[1], chunk, 1) == -1 && errno == EAGAIN);
		must(write(gone[1], "x", 1) == -1 && errno == EPIPE);
		int late = open(left_at, O_RDONLY | O_NONBLOCK);
		must(late >= 0 && read(late, text, sizeof text) == 4 && memcmp(text, "left", 4) == 0);
		must(write(gone[1], "left", 4) == 4 && close(late) == 0);
		memset(text, 0, sizeof text);
		must(fcntl(again, F_GETFL) & O_NONBLOCK && !(fcntl(p[1], F_GETFL) & O_NONBLOCK));
		must(write(again, "a", 1) == 1 && read(p[0], text, 5) == 5 && read(p[0], text, 1) == 1);
		must(write(p[1], "hello", 5) == 5);
		/* A packet is read at once, and the rest beyond the buffer is lost. */
		must(fcntl(packets[1], F_GETFL) & O_DIRECT);
		must(read(packets[0], text, 2) == 2 && text[0] == 'o');
		must(read(packets[0], text, 16) == 6 && memcmp(text, "second", 6) == 0);
		must(write(packets[1], "one", 3) == 3 && write(packets[1], "second", 6) == 6);
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
