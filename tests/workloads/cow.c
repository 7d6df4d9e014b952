/* Memory that a parent shares with its children since the fork, pages that each has written since,
 * and memory that only the children have: sharing is the same after a restore. Also memory that was
 * touched and is zero. */
#include "workload.h"

#define PAGES 2048

static uint64_t expected(int page, int index, int round) {
	/* Every 64th page has private writes of each process; the rest is the parent's. */
	return page % 64 == 7 ? page * 1000003ull + index * 97 + round : page * 1000003ull;
}

/* The private part of the area at an address, in kB: each process has its part of shared pages. */
static long own_kb(void *area) {
	char line[512];
	unsigned long start, end;
	long kb = -1;
	int is_it = 0;
	FILE *file = fopen("/proc/self/smaps", "r");
	must(file != NULL);
	while (fgets(line, sizeof line, file) != NULL) {
		if (sscanf(line, "%lx-%lx ", &start, &end) == 2)
			is_it = (unsigned long)area >= start && (unsigned long)area < end;
		if (is_it && sscanf(line, "Pss: %ld", &kb) == 1)
			break;
	}
	fclose(file);
	must(kb >= 0);
	return kb;
}

/* A separate area: the kernel merges adjacent ones. */
static uint64_t *area(void) {
	char *memory = mmap(0, (PAGES + 1) * 4096, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	must(memory != MAP_FAILED && mprotect(memory + PAGES * 4096, 4096, PROT_NONE) == 0);
	return (uint64_t *)memory;
}

/* The parent has written all of it since, and unmapped the second half. */
static uint64_t *theirs;

static void check(uint64_t *memory, uint64_t *zeros, int index, int round) {
	for (int n = 0; n < PAGES; n++) {
		must(memory[n * 512] == expected(n, index, round));
		must(memory[n * 512 + 511] == (uint64_t)n);
		must(zeros[n * 512] == 0);
		if (index != 0)
			must(theirs[n * 512] == n * 7ull);
		else if (n < PAGES / 2)
			must(theirs[n * 512] == n * 7ull + 1);
	}
	/* Four share the one, three of them the other. */
	long most = PAGES * 4 / 4 + PAGES / 64 * 4 * 2 + 200;
	long kb = own_kb(memory);
	if (kb > most)
		print_line("%d has %ld private kB, of %ld at most", index, kb, most);
	must(kb <= most);
	kb = index == 0 ? 0 : own_kb(theirs);
	most = PAGES * 4 / 3 + 200;
	if (kb > most)
		print_line("%d has %ld private kB, of %ld at most", index, kb, most);
	must(kb <= most);
}

int main(void) {
	uint64_t *memory = area(), *zeros = area();
	theirs = area();
	for (int n = 0; n < PAGES; n++) {
		theirs[n * 512] = n * 7ull;
		memory[n * 512] = n * 1000003ull, memory[n * 512 + 511] = n;
		zeros[n * 512] = 1;
	}
	memset(zeros, 0, PAGES * 4096);
	int ask[4][2], answer[4][2];
	for (int index = 1; index < 4; index++) {
		must(pipe(ask[index]) == 0 && pipe(answer[index]) == 0);
		if (fork() != 0)
			continue;
		char round;
		for (int n = 7; n < PAGES; n += 64)
			memory[n * 512] = expected(n, index, 0);
		must(write(answer[index][1], "r", 1) == 1);
		while (read(ask[index][0], &round, 1) == 1) {
			check(memory, zeros, index, round);
			for (int n = 7; n < PAGES; n += 64)
				memory[n * 512] = expected(n, index, round + 1);
			must(write(answer[index][1], "r", 1) == 1);
		}
		_exit(0);
	}
	for (int n = 7; n < PAGES; n += 64)
		memory[n * 512] = expected(n, 0, 0);
	must(munmap(theirs + PAGES / 2 * 512, PAGES / 2 * 4096) == 0);
	for (int n = 0; n < PAGES / 2; n++)
		theirs[n * 512] = n * 7ull + 1;
	char c;
	for (int index = 1; index < 4; index++)
		must(read(answer[index][0], &c, 1) == 1);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		check(memory, zeros, 0, round);
		for (int n = 7; n < PAGES; n += 64)
			memory[n * 512] = expected(n, 0, round + 1);
		for (int index = 1; index < 4; index++) {
			c = round;
			must(write(ask[index][1], &c, 1) == 1 && read(answer[index][0], &c, 1) == 1);
		}
	}
	ok();
}
