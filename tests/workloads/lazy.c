/* Much memory, with every possible operation before all of it is loaded: the filling process must
 * follow. MB is the amount; HUGE requests huge pages. */
#include "workload.h"
#include <pthread.h>

#define PAGE 4096ul
#define WORDS (PAGE / 8)
/* Pages in each part with an operation. */
#define PART 640ul

static uint64_t *memory, *heap, *moved;
static size_t pages, heap_pages;

static uint64_t expected(size_t page, int end) {
	return (page + 1) * 0x9e3779b97f4a7c15ull + end;
}

static void fill(uint64_t *at, size_t first, size_t count) {
	for (size_t n = 0; n < count; n++)
		at[n * WORDS] = expected(first + n, 0), at[n * WORDS + WORDS - 1] = expected(first + n, 1);
}

static int is_right(const uint64_t *at, size_t page) {
	return at[0] == expected(page, 0) && at[WORDS - 1] == expected(page, 1);
}

static int are_right(const uint64_t *at, size_t first, size_t count) {
	for (size_t n = 0; n < count; n++)
		if (!is_right(at + n * WORDS, first + n))
			return 0;
	return 1;
}

static int are_zeros(const uint64_t *at, size_t count) {
	for (size_t n = 0; n < count * WORDS; n++)
		if (at[n] != 0)
			return 0;
	return 1;
}

static uint64_t *page(size_t n) { return memory + n * WORDS; }

/* Reads pages from everywhere, in random order. */
static void *wander(void *seed) {
	uint64_t state = (uintptr_t)seed;
	for (int n = 0; n < 3000; n++) {
		state = state * 6364136223846793005ull + 1442695040888963407ull;
		size_t one = (state >> 33) % (pages - 8 * PART);
		if (!is_right(page(one), one))
			return "wrong";
	}
	return NULL;
}

static void threads(void) {
	pthread_t all[4];
	for (uintptr_t n = 0; n < 4; n++)
		must(pthread_create(&all[n], NULL, wander, (void *)(n + 1)) == 0);
	for (int n = 0; n < 4; n++) {
		void *wrong;
		must(pthread_join(all[n], &wrong) == 0 && wrong == NULL);
	}
}

/* A child has its parent's memory, whatever either does, and so have its own children. */
static pid_t child(size_t from, int depth) {
	pid_t pid = fork();
	must(pid >= 0);
	if (pid != 0)
		return pid;
	if (depth > 0) {
		int status;
		pid_t its = child(from + 100, depth - 1);
		fill(page(from), 7, 50);
		must(madvise(page(from + 50), 10 * PAGE, MADV_DONTNEED) == 0);
		must(waitpid(its, &status, 0) == its && status == 0);
		must(are_right(page(from), 7, 50));
		must(are_zeros(page(from + 50), 10));
		from += 60;
	}
	for (size_t n = from; n < pages - 8 * PART; n += 97)
		must(is_right(page(n), n));
	_exit(0);
}

/* All operations on parts of the memory. */
static void operate(size_t at) {
	size_t part = at;
	/* Given up: zeros, and the neighbours stay. */
	must(madvise(page(part + 100), 70 * PAGE, MADV_DONTNEED) == 0);
	must(are_zeros(page(part + 100), 70));
	must(are_right(page(part), part, 100));
	must(are_right(page(part + 170), part + 170, PART - 170));
	fill(page(part + 100), part + 100, 70);
	/* Moved away and back. */
	part += PART;
	must(mremap(page(part + 33), 300 * PAGE, 300 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, moved) ==
	     moved);
	must(are_right(moved, part + 33, 300));
	must(mremap(moved, 300 * PAGE, 300 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, page(part + 33)) ==
	     page(part + 33));
	must(are_right(page(part), part, PART));
	/* Moved away before its first access, and replaced by other memory. */
	part += PART;
	must(mremap(page(part + 5), 64 * PAGE, 64 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, moved) == moved);
	must(mmap(page(part + 5), 64 * PAGE, PROT_READ | PROT_WRITE,
		  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == page(part + 5));
	must(are_zeros(page(part + 5), 64));
	must(are_right(moved, part + 5, 64));
	fill(page(part + 5), part + 5, 64);
	must(munmap(moved, 64 * PAGE) == 0);
	/* Unmapped, and replaced by other memory. */
	part += PART;
	must(munmap(page(part + 200), 100 * PAGE) == 0);
	must(mmap(page(part + 200), 100 * PAGE, PROT_READ | PROT_WRITE,
		  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == page(part + 200));
	must(are_zeros(page(part + 200), 100));
	fill(page(part + 200), part + 200, 100);
	must(are_right(page(part), part, PART));
	/* Written and read by the kernel. */
	part += PART;
	int ends[2];
	char text[64];
	must(pipe(ends) == 0);
	for (size_t n = part; n < part + PART; n += 40) {
		must(write(ends[1], page(n), 8) == 8 && read(ends[0], text, 8) == 8);
		must(memcmp(text, page(n), 8) == 0);
		must(write(ends[1], "from outside", 12) == 12);
		must(read(ends[0], (char *)page(n + 20) + 100, 12) == 12);
		must(memcmp((char *)page(n + 20) + 100, "from outside", 12) == 0);
	}
	must(are_right(page(part), part, PART));
	close(ends[0]), close(ends[1]);
	/* Its access changes in the middle, and so does the mapping. */
	part += PART;
	must(mprotect(page(part + 10), 3 * PAGE, PROT_READ) == 0);
	must(are_right(page(part), part, 200));
	must(mprotect(page(part + 10), 3 * PAGE, PROT_READ | PROT_WRITE) == 0);
	fill(page(part), part, PART);
	/* Grown at another place. */
	part += PART;
	must(mremap(page(part), 64 * PAGE, 64 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, moved) == moved);
	must(mremap(moved, 64 * PAGE, 128 * PAGE, 0) == moved);
	must(are_right(moved, part, 64));
	must(are_zeros(moved + 64 * WORDS, 64));
	must(mremap(moved, 64 * PAGE, 64 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, page(part)) == page(part));
	must(munmap(moved + 64 * WORDS, 64 * PAGE) == 0);
}

int main(void) {
	const char *text = getenv("MB");
	size_t bytes = (text == NULL ? 64 : strtoul(text, NULL, 10)) << 20;
	pages = bytes / PAGE;
	heap_pages = pages / 8;
	memory = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	must(memory != MAP_FAILED);
	/* With huge pages, a page that is not loaded yet must not be taken for present. */
	if (getenv("HUGE") != NULL)
		must(madvise(memory, bytes, MADV_HUGEPAGE) == 0 || errno == EINVAL);
	moved = mmap(0, 1024 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	must(moved != MAP_FAILED && munmap(moved, 1024 * PAGE) == 0);
	fill(memory, 0, pages);
	/* Memory of brk(2). */
	heap = sbrk(heap_pages * PAGE + PAGE);
	must(heap != (void *)-1);
	heap = (uint64_t *)(((uintptr_t)heap + PAGE - 1) & -PAGE);
	fill(heap, 5, heap_pages);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		/* From the end, which is loaded last. */
		pid_t first = child(500, 0);
		operate(pages - 8 * PART);
		pid_t second = child(900, 2);
		fill(heap + (heap_pages - 9) * WORDS, 5 + heap_pages - 9, 9);
		threads();
		int status;
		must(waitpid(first, &status, 0) == first && status == 0);
		must(waitpid(second, &status, 0) == second && status == 0);
		must(are_right(memory, 0, pages));
		must(are_right(heap, 5, heap_pages));
		must(is_right(page(0), 0) && moved != NULL);
	}
	ok();
}
