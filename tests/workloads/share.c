/* Memory of each kind that clones may share. Each clone has a number, writes to some memory, and
 * finds its own writes and the common contents, whatever the others do. MB is the amount. */
#include "workload.h"
#include <pthread.h>
#include <sys/prctl.h>

#define PAGE 4096ul
#define WORDS (PAGE / 8)
#define PARTS 8

/* One in so many pages is written in a round. */
#define APART 4

static struct part {
	uint64_t *at;
	size_t pages;
} parts[PARTS];

/* Of the program's own file, and private since the first write. */
static uint64_t of_the_program[PAGE] = {1};

static uint64_t number;

static uint64_t value(size_t part, size_t page, uint64_t salt) {
	return (part * 1000003 + page + 1) * 0x9e3779b97f4a7c15ull + salt * 0xd1342543de82ef95ull;
}

static void write_page(size_t part, size_t page, uint64_t salt) {
	for (size_t word = 0; word < WORDS; word++)
		parts[part].at[page * WORDS + word] = value(part, page, salt) + word;
}

static int is_right(size_t part, size_t page, uint64_t salt) {
	for (size_t word = 0; word < WORDS; word++)
		if (parts[part].at[page * WORDS + word] != value(part, page, salt) + word)
			return 0;
	return 1;
}

/* Checks all memory, with the own writes. */
static int are_right(uint64_t salt) {
	for (size_t part = 0; part < PARTS; part++)
		for (size_t page = 0; page < parts[part].pages; page++)
			if (!is_right(part, page, page % APART == 0 && part != 3 ? salt : 0))
				return 0;
	return of_the_program[0] == 77;
}

static void write_some(uint64_t salt) {
	for (size_t part = 0; part < PARTS; part++)
		for (size_t page = 0; page < parts[part].pages; page += APART)
			if (part != 3) /* only read */
				write_page(part, page, salt);
}

static void *mapped(size_t pages, int flags) {
	void *at = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE,
			MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
	must(at != MAP_FAILED);
	return at;
}

static uint64_t read_number(void) {
	char text[32] = "";
	int fd = open("/number", O_RDONLY);
	must(fd >= 0 && read(fd, text, sizeof text - 1) > 0 && close(fd) == 0);
	return strtoull(text, NULL, 10);
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int is_over;

/* Another stack, with data on it. */
static void *other(void *unused) {
	(void)unused;
	uint64_t own[512];
	for (size_t n = 0; n < 512; n++)
		((volatile uint64_t *)own)[n] = n * 3;
	pthread_mutex_lock(&lock);
	while (!is_over)
		pthread_cond_wait(&changed, &lock);
	pthread_mutex_unlock(&lock);
	uint64_t sum = 0;
	for (size_t n = 0; n < 512; n++)
		sum += ((volatile uint64_t *)own)[n];
	return (void *)sum;
}

int main(void) {
	const char *text = getenv("MB");
	size_t pages = (text == NULL ? 8ul : strtoul(text, NULL, 10)) * 256;
	if (getenv("SMALL") != NULL)
		must(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
	/* The heap may overlap the template's own program, and is private to each clone then: so
	 * small that this makes no difference. The rest is of many kinds. */
	size_t some = pages / 16, heap_pages = 64;
	uint64_t *heap = sbrk(0);
	heap = sbrk((intptr_t)(PAGE - (uintptr_t)heap % PAGE) % (intptr_t)PAGE);
	heap = sbrk((intptr_t)(heap_pages * PAGE));
	heap = (uint64_t *)(((uintptr_t)heap + PAGE - 1) / PAGE * PAGE);
	parts[0] = (struct part){heap, heap_pages - 1};
	parts[1] = (struct part){mapped(some * 3, 0), some * 3};
	size_t most = pages / 2 - heap_pages + some;
	parts[2] = (struct part){mapped(most, MAP_NORESERVE), most};
	parts[3] = (struct part){mapped(some, 0), some};
	parts[4] = (struct part){mapped(some, 0), some};
	parts[5] = (struct part){mapped(some, 0), some};
	parts[6] = (struct part){mapped(16, 0), 16};
	/* The second half is not present. */
	parts[7] = (struct part){mapped(some * 2, 0), some};
	must(madvise(parts[1].at, some * 3 * PAGE, MADV_HUGEPAGE) == 0 || errno == EINVAL);
	must(madvise(parts[4].at, some * PAGE, MADV_NOHUGEPAGE) == 0 || errno == EINVAL);
	must(madvise(parts[5].at, some * PAGE, MADV_DONTFORK) == 0);
	for (size_t part = 0; part < PARTS; part++)
		for (size_t page = 0; page < parts[part].pages; page++)
			write_page(part, page, 0);
	must(mprotect(parts[3].at, some * PAGE, PROT_READ) == 0);
	must(mlock(parts[6].at, 16 * PAGE) == 0);
	of_the_program[0] = 77;
	pthread_t thread;
	must(pthread_create(&thread, NULL, other, NULL) == 0);
	ready(0);
	must(are_right(0));
	number = read_number();
	print_line("read");
	ready(1);
	write_some(number);
	must(are_right(number));
	print_line("written");
	ready(2);
	must(are_right(number));
	/* Memory grows, moves, is given back and is inherited as usual. */
	uint64_t *more = sbrk(64 * PAGE);
	must(more != (void *)-1);
	memset(more, 1, 64 * PAGE);
	uint64_t *longer = mremap(parts[1].at, some * 3 * PAGE, some * 4 * PAGE, MREMAP_MAYMOVE);
	must(longer != MAP_FAILED);
	parts[1].at = longer;
	must(longer[some * 3 * WORDS] == 0);
	must(madvise(parts[4].at, PAGE, MADV_DONTNEED) == 0 && parts[4].at[0] == 0);
	write_page(4, 0, number);
	must(mprotect(parts[3].at, some * PAGE, PROT_READ | PROT_WRITE) == 0);
	pid_t child = fork();
	must(child >= 0);
	if (child == 0) {
		parts[5].pages = 0;
		_exit(are_right(number) ? 0 : 1);
	}
	int status;
	must(waitpid(child, &status, 0) == child && status == 0);
	must(are_right(number));
	pthread_mutex_lock(&lock);
	is_over = 1;
	pthread_cond_signal(&changed);
	pthread_mutex_unlock(&lock);
	void *sum;
	must(pthread_join(thread, &sum) == 0 && (uintptr_t)sum == 3 * 511 * 256);
	ok();
}
