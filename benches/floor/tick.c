/* A server with work at regular times: tick PORT PERIOD_MS WORK_US
 *
 * Every period needs WORK_US of processor time, like the next frame of a game. A tick is late by
 * the time from its due moment to the end of its work, less that work. A client sends one line,
 * receives an answer, and its connection is closed:
 *
 *   R5  the measurements are reset, and the next tick is due in 5 microseconds
 *   L   the lateness of each tick since then, in microseconds, as numbers on one line
 *
 * One process, one thread, statically linked. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* LIMIT: the number of recorded ticks. */
#define LATE_MAX 4096

static unsigned late_us[LATE_MAX];
static size_t count;

static long long now_ns(clockid_t clock)
{
	struct timespec t;
	clock_gettime(clock, &t);
	return t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* Busy for `ns` of processor time: time taken by others makes the tick late. */
static void work(long long ns)
{
	long long end = now_ns(CLOCK_THREAD_CPUTIME_ID) + ns;
	while (now_ns(CLOCK_THREAD_CPUTIME_ID) < end)
		;
}

/* Answers a client, and returns the due moment of the next tick. */
static long long answer(int caller, long long due)
{
	char line[32] = "";
	FILE *out;
	if (read(caller, line, sizeof(line) - 1) <= 0 || !(out = fdopen(caller, "w"))) {
		close(caller);
		return due;
	}
	if (line[0] == 'R') {
		count = 0;
		due = now_ns(CLOCK_MONOTONIC) + atoll(line + 1) * 1000;
	}
	for (size_t n = 0; line[0] == 'L' && n < count; n++)
		fprintf(out, "%u ", late_us[n]);
	fputc('\n', out);
	fclose(out);
	return due;
}

int main(int argc, char **argv)
{
	struct sockaddr_in own = { .sin_family = AF_INET };
	int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
	if (argc != 4)
		return 2;
	long long period = atoll(argv[2]) * 1000000, busy = atoll(argv[3]) * 1000, due;
	own.sin_port = htons((unsigned short)atoi(argv[1]));
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(fd, (void *)&own, sizeof(own)) || listen(fd, 64)) {
		perror("tick");
		return 1;
	}
	for (due = now_ns(CLOCK_MONOTONIC) + period;;) {
		struct pollfd callers = { .fd = fd, .events = POLLIN };
		long long left = due - now_ns(CLOCK_MONOTONIC);
		if (left > 0) {
			struct timespec limit = { left / 1000000000, left % 1000000000 };
			if (ppoll(&callers, 1, &limit, NULL) > 0)
				due = answer(accept(fd, NULL, NULL), due);
			continue;
		}
		work(busy);
		left = now_ns(CLOCK_MONOTONIC) - due - busy;
		if (count < LATE_MAX)
			late_us[count++] = left > 0 ? (unsigned)(left / 1000) : 0;
		/* Missed ticks are skipped. */
		for (due += period; due < now_ns(CLOCK_MONOTONIC);)
			due += period;
	}
}
