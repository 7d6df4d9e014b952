/* What a parent and its children share since they were made, and what each has written since; and
 * memory that was touched and is zero. */
#include "workload.h"

#define PAGES 2048

static uint64_t expected(int page, int who, int round) {
	/* Every 64th page is its own, with what each has written; the rest is the parent's. */
	return page % 64 == 7 ? page * 1000003ull + who * 97 + round : page * 1000003ull;
}

static void check(uint64_t *memory, uint64_t *zeros, int who, int round) {
	for (int n = 0; n < PAGES; n++) {
		must(memory[n * 512] == expected(n, who, round));
		must(memory[n * 512 + 511] == (uint64_t)n);
		must(zeros[n * 512] == 0);
	}
}

int main(void) {
	uint64_t *memory = mmap(0, PAGES * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint64_t *zeros = mmap(0, PAGES * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	for (int n = 0; n < PAGES; n++) {
		memory[n * 512] = n * 1000003ull, memory[n * 512 + 511] = n;
		zeros[n * 512] = 1;
	}
	memset(zeros, 0, PAGES * 4096);
	int ask[4][2], answer[4][2];
	for (int who = 1; who < 4; who++) {
		must(pipe(ask[who]) == 0 && pipe(answer[who]) == 0);
		if (fork() != 0)
			continue;
		char round;
		for (int n = 7; n < PAGES; n += 64)
			memory[n * 512] = expected(n, who, 0);
		must(write(answer[who][1], "r", 1) == 1);
		while (read(ask[who][0], &round, 1) == 1) {
			check(memory, zeros, who, round);
			for (int n = 7; n < PAGES; n += 64)
				memory[n * 512] = expected(n, who, round + 1);
			must(write(answer[who][1], "r", 1) == 1);
		}
		_exit(0);
	}
	for (int n = 7; n < PAGES; n += 64)
		memory[n * 512] = expected(n, 0, 0);
	char c;
	for (int who = 1; who < 4; who++)
		must(read(answer[who][0], &c, 1) == 1);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		check(memory, zeros, 0, round);
		for (int n = 7; n < PAGES; n += 64)
			memory[n * 512] = expected(n, 0, round + 1);
		for (int who = 1; who < 4; who++) {
			c = round;
			must(write(ask[who][1], &c, 1) == 1 && read(answer[who][0], &c, 1) == 1);
		}
	}
	ok();
}
