/* Much memory, of which little is written from one round to the next: a later checkpoint need not
 * store the rest again. MB is the amount. With CHILD a child shares the memory, and writes to some
 * of its own. */
#include "workload.h"

#define PAGE 4096ul
#define WORDS (PAGE / 8)
/* Written in a round: pieces of 64 kB, a megabyte in all. */
#define PIECES 16ul
#define PIECE_PAGES 16ul

static uint64_t *memory, *shared;
static size_t pages, shared_pages = (8ul << 20) / PAGE;

static uint64_t value(uint64_t page, uint64_t turn) {
	return (page + 1) * 0x9e3779b97f4a7c15ull + turn * 1000003;
}

/* The last completed round that wrote a page. */
static uint64_t turn_of(size_t page, size_t all, uint64_t rounds) {
	size_t apart = all / PIECES;
	for (uint64_t turn = rounds; turn > 0; turn--) {
		size_t begin = turn % 7 * PIECE_PAGES;
		if (page / apart < PIECES && page % apart >= begin && page % apart < begin + PIECE_PAGES)
			return turn;
	}
	return 0;
}

static void write_page(uint64_t *at, size_t page, uint64_t turn) {
	for (size_t word = 0; word < WORDS; word++)
		at[page * WORDS + word] = value(page, turn) + word;
}

static void touch(uint64_t *at, size_t all, uint64_t turn) {
	size_t apart = all / PIECES;
	for (size_t piece = 0; piece < PIECES; piece++)
		for (size_t n = 0; n < PIECE_PAGES; n++)
			write_page(at, piece * apart + turn % 7 * PIECE_PAGES + n, turn);
}

static int is_right(const uint64_t *at, size_t all, uint64_t rounds) {
	for (size_t page = 0; page < all; page++) {
		uint64_t expected = value(page, turn_of(page, all, rounds));
		for (size_t word = 0; word < WORDS; word++)
			if (at[page * WORDS + word] != expected + word)
				return 0;
	}
	return 1;
}

static uint64_t *filled(size_t all, int flags) {
	void *at = mmap(NULL, all * PAGE, PROT_READ | PROT_WRITE, flags | MAP_ANONYMOUS, -1, 0);
	must(at != MAP_FAILED);
	for (size_t page = 0; page < all; page++)
		write_page(at, page, 0);
	return at;
}

int main(void) {
	const char *text = getenv("MB");
	pages = (text == NULL ? 48ul : strtoul(text, NULL, 10)) * 256;
	memory = filled(pages, MAP_PRIVATE);
	shared = filled(shared_pages, MAP_SHARED);
	/* Only the driver writes to this pipe: waiting for it needs no timer. */
	must(mkfifo("/go", 0600) == 0);
	int go = open("/go", O_RDWR);
	must(go >= 0);
	int to_child[2], to_parent[2];
	must(pipe(to_child) == 0 && pipe(to_parent) == 0);
	int has_child = getenv("CHILD") != NULL;
	pid_t child = has_child ? fork() : 1;
	must(child >= 0);
	for (uint64_t turn = 0; turn < (uint64_t)ROUNDS; turn++) {
		char byte = 0;
		if (child == 0) {
			must(read(to_child[0], &byte, 1) == 1);
			/* Pages that the child has not written have the parent's contents at the
			 * fork. */
			must(is_right(memory, pages / 2, 0) && is_right(shared, shared_pages, turn));
			memory[(pages - 1) * WORDS] = turn;
			must(write(to_parent[1], &byte, 1) == 1);
			continue;
		}
		print_line("ready %d", (int)turn);
		must(read(go, &byte, 1) == 1);
		must(is_right(memory, pages, turn));
		must(is_right(shared, shared_pages, turn));
		if (has_child) {
			must(write(to_child[1], &byte, 1) == 1);
			must(read(to_parent[0], &byte, 1) == 1);
		}
		touch(memory, pages, turn + 1);
		touch(shared, shared_pages, turn + 1);
	}
	if (child == 0)
		return 0;
	if (has_child) {
		int status;
		must(wait(&status) == child && status == 0);
	}
	ok();
}
