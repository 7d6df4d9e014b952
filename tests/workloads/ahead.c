/* Much memory that is written all the time, by the program and by the kernel, given up, moved,
 * created anew and copied by fork, while it is checkpointed: pages copied ahead must have their
 * final contents. Each thread checks its memory before it writes anew. */
#include "workload.h"
#include <pthread.h>
#include <stdatomic.h>

#define PAGE 4096ul
#define WORDS (PAGE / 8)
#define PIECE (2ul << 20)

/* The number of completed turns of each thread. */
static atomic_ulong turns[5];

static uint64_t value(uint64_t turn, uint64_t page, uint64_t word) {
	return (turn * 1000003 + page) * 0x9e3779b97f4a7c15ull + word;
}

static void *new_memory(size_t bytes) {
	void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	must(at != MAP_FAILED);
	return at;
}

static void fill(uint64_t *at, uint64_t turn, size_t pages) {
	for (size_t page = 0; page < pages; page++)
		for (size_t word = 0; word < WORDS; word++)
			at[page * WORDS + word] = value(turn, page, word);
}

static int is_right(const uint64_t *at, uint64_t turn, size_t pages) {
	for (size_t page = 0; page < pages; page++)
		for (size_t word = 0; word < WORDS; word++)
			if (at[page * WORDS + word] != value(turn, page, word))
				return 0;
	return 1;
}

static int are_zeros(const uint64_t *at, size_t pages) {
	for (size_t word = 0; word < pages * WORDS; word++)
		if (at[word] != 0)
			return 0;
	return 1;
}

/* Writes page by page, with a later turn over the same place. */
static void *writes(void *none) {
	size_t pages = (24ul << 20) / PAGE;
	uint64_t *at = new_memory(pages * PAGE);
	fill(at, 0, pages);
	for (uint64_t turn = 1;; turn++, turns[0]++)
		for (size_t page = 0; page < pages; page++) {
			uint64_t *here = at + page * WORDS;
			for (size_t word = 0; word < WORDS; word++)
				must(here[word] == value(turn - 1, page, word));
			for (size_t word = 0; word < WORDS; word++)
				here[word] = value(turn, page, word);
		}
	return none;
}

/* Data becomes zeros, and zeros become data. */
static void *empties(void *none) {
	size_t pages = PIECE / PAGE;
	uint64_t *at = new_memory(4 * PIECE);
	for (uint64_t turn = 1;; turn++, turns[1]++) {
		uint64_t *here = at + turn % 4 * (PIECE / 8);
		fill(here, turn, pages);
		must(is_right(here, turn, pages));
		if (turn % 2)
			must(madvise(here, PIECE, MADV_DONTNEED) == 0);
		else
			memset(here, 0, PIECE);
		must(are_zeros(here, pages));
		nap(1);
		must(are_zeros(here, pages));
	}
	return none;
}

/* Moved, unmapped, and replaced by other memory. */
static void *moves(void *none) {
	size_t pages = PIECE / PAGE;
	char *places = new_memory(3 * PIECE);
	uint64_t *at = (uint64_t *)places;
	fill(at, 0, pages);
	for (uint64_t turn = 1;; turn++, turns[2]++) {
		char *to = places + turn % 3 * PIECE;
		/* No hole is left, which the kernel would give to another thread. */
		int how = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
		must(mremap(at, PIECE, PIECE, how, to) == to);
		if (turn % 2) {
			int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
			must(mmap(at, PIECE, PROT_READ | PROT_WRITE, flags, -1, 0) == at);
		}
		fill(at, turn + 1000, pages);
		uint64_t *left = at;
		at = (uint64_t *)to;
		must(is_right(at, turn - 1, pages));
		fill(at, turn, pages);
		must(is_right(left, turn + 1000, pages));
	}
	return none;
}

/* Written by the kernel: from the page cache and, where the file system can, by direct I/O. */
static void *reads(void *none) {
	size_t pages = PIECE / PAGE;
	uint64_t *at = new_memory(PIECE);
	int files[2];
	for (int n = 0; n < 2; n++) {
		char path[] = "/tmp/ahead-0";
		path[sizeof path - 2] += n;
		files[n] = open(path, O_RDWR | O_CREAT | O_TRUNC | O_DIRECT, 0600);
		if (files[n] < 0)
			files[n] = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
		must(files[n] >= 0);
		fill(at, n, pages);
		must(write(files[n], at, PIECE) == (ssize_t)PIECE);
	}
	for (uint64_t turn = 0;; turn++, turns[3]++) {
		must(pread(files[turn % 2], at, PIECE, 0) == (ssize_t)PIECE);
		must(is_right(at, turn % 2, pages));
	}
	return none;
}

/* A child inherits its parent's memory, and the child's writes are private. */
static void *forks(void *none) {
	size_t pages = PIECE / PAGE;
	uint64_t *at = new_memory(PIECE);
	for (uint64_t turn = 0;; turn++, turns[4]++) {
		fill(at, turn, pages);
		pid_t child = fork();
		must(child >= 0);
		if (child == 0) {
			must(is_right(at, turn, pages));
			fill(at, turn + 1, pages);
			nap(5);
			_exit(is_right(at, turn + 1, pages) ? 0 : 1);
		}
		int status;
		while (waitpid(child, &status, 0) != child)
			must(errno == EINTR);
		must(status == 0);
		must(is_right(at, turn, pages));
		nap(1);
	}
	return none;
}

/* Returns after two turns of each: the first may have begun before. */
static void all_go_round(void) {
	for (int n = 0; n < 5; n++)
		for (unsigned long before = turns[n]; turns[n] < before + 2;)
			nap(1);
}

int main(void) {
	void *(*all[])(void *) = {writes, empties, moves, reads, forks};
	size_t quiet_pages = (32ul << 20) / PAGE;
	uint64_t *quiet = new_memory(quiet_pages * PAGE);
	fill(quiet, 7, quiet_pages);
	for (int n = 0; n < 5; n++) {
		pthread_t thread;
		must(pthread_create(&thread, NULL, all[n], NULL) == 0);
	}
	for (int round = 0; round < ROUNDS; round++) {
		all_go_round();
		ready(round);
		must(is_right(quiet, 7, quiet_pages));
	}
	all_go_round();
	ok();
}
