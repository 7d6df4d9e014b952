/* A small server with memory of its own: serve PORT KB
 *
 * Each caller sends one line, is answered by one, and is hung up on:
 *
 *   S NUMBER   its memory is filled with a sequence that begins with this number
 *   Q          the number, and whether every page still holds its part of the sequence
 *   T          the same of one MB, in 16 pieces
 *
 * One process, one thread, statically linked. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static unsigned long *memory, words, number;

static unsigned long at(unsigned long n)
{
	/* No two are alike, so that nothing that looks for equal pages finds any. */
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

static const char *check(int of_all)
{
	const unsigned long pieces = 16, piece = (1 << 20) / pieces / sizeof(*memory);
	int is_whole = 1;
	if (of_all || words < pieces * piece)
		is_whole = is_right(0, words);
	else
		for (unsigned long n = 0; n < pieces; n++)
			is_whole &= is_right(words / pieces * n, words / pieces * n + piece);
	return is_whole ? "whole" : "damaged";
}

int main(int argc, char **argv)
{
	struct sockaddr_in own = { .sin_family = AF_INET };
	int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
	if (argc != 3)
		return 2;
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
		int caller = accept(fd, NULL, NULL);
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
		if (line[0] == 'S' || line[0] == 'Q' || line[0] == 'T')
			dprintf(caller, "%lu %s\n", number, check(line[0] != 'T'));
		close(caller);
	}
}
