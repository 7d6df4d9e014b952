/* A small server with private memory: serve PORT KB [PERIOD_MS]
 *
 * Each client sends one line, receives one line, and its connection is closed:
 *
 *   S NUMBER   fills the memory with a sequence that begins with this number
 *   Q          the number, and whether every page still has its part of the sequence
 *   T          the same for one MB, in 16 pieces
 *   P          the same for 256 words, each in another part of the memory
 *   F          the same for the first 64 kB
 *   L          expirations of the timer since the last L, and their maximal lateness in us
 *
 * With a period the server has a timer, by the time limit of its poll(2).
 *
 * One process, one thread, statically linked. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static unsigned long *memory, words, number;

static unsigned long at(unsigned long n)
{
	/* No two words are equal, so that page deduplication finds nothing. */
	unsigned long x = (number << 32) + n;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9UL;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebUL;
	return x ^ (x >> 31);
}

static void set(unsigned long to)
{
	number = to;
	for (unsigned long n = 0; n < words; n++)
		memory[n] = at(n);
}

static int is_right(unsigned long from, unsigned long to)
{
	for (unsigned long n = from; n < to; n++)
		if (memory[n] != at(n))
			return 0;
	return 1;
}

static const char *check(char what)
{
	const unsigned long pieces = what == 'P' ? 256 : 16;
	const unsigned long piece = what == 'P' ? 1 : (1 << 20) / pieces / sizeof(*memory);
	int is_whole = 1;
	if (what == 'F' && words >= (64 << 10) / sizeof(*memory))
		is_whole = is_right(0, (64 << 10) / sizeof(*memory));
	else if ((what != 'T' && what != 'P') || words < pieces * piece)
		is_whole = is_right(0, words);
	else
		for (unsigned long n = 0; n < pieces; n++)
			is_whole &= is_right(words / pieces * n, words / pieces * n + piece);
	return is_whole ? "whole" : "damaged";
}

static long long now_us(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

static unsigned long rings, late_us;

/* Waits for a client; the timer expires meanwhile. */
static void wait_for_client(int fd, long long period_us)
{
	static long long due_us;
	struct pollfd one = { .fd = fd, .events = POLLIN };
	if (!due_us)
		due_us = now_us() + period_us;
	for (;;) {
		long long left_us = due_us - now_us();
		if (left_us <= 0) {
			rings++;
			if ((unsigned long)-left_us > late_us)
				late_us = (unsigned long)-left_us;
			due_us += (-left_us / period_us + 1) * period_us;
		} else if (poll(&one, 1, (int)((left_us + 999) / 1000)) > 0) {
			return;
		}
	}
}

int main(int argc, char **argv)
{
	struct sockaddr_in own = { .sin_family = AF_INET };
	int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
	long long period_us = 0;
	if (argc != 3 && argc != 4)
		return 2;
	if (argc == 4)
		period_us = atoll(argv[3]) * 1000;
	words = strtoul(argv[2], NULL, 10) * 1024 / sizeof(*memory);
	memory = malloc(words * sizeof(*memory));
	own.sin_port = htons((unsigned short)atoi(argv[1]));
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (!memory || bind(fd, (void *)&own, sizeof(own)) || listen(fd, 64)) {
		perror("serve");
		return 1;
	}
	set(0);
	for (;;) {
		char line[64] = "";
		size_t length = 0;
		int caller;
		if (period_us > 0)
			wait_for_client(fd, period_us);
		caller = accept(fd, NULL, NULL);
		if (caller < 0)
			continue;
		while (length < sizeof(line) - 1 && !strchr(line, '\n')) {
			ssize_t got = read(caller, line + length, sizeof(line) - 1 - length);
			if (got <= 0)
				break;
			line[length += (size_t)got] = 0;
		}
		if (line[0] == 'S')
			set(strtoul(line + 1, NULL, 10));
		if (line[0] && strchr("SQTPF", line[0]))
			dprintf(caller, "%lu %s\n", number, check(line[0]));
		if (line[0] == 'L') {
			dprintf(caller, "%lu %lu\n", rings, late_us);
			rings = late_us = 0;
		}
		close(caller);
	}
}
