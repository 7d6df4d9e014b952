/* Memory of huge pages: private, shared with a child, and of a memfd. */
#include "workload.h"

#define PAGE (2 << 20)

static char *map(int pages, int how, int fd) {
	char *memory = mmap(0, pages * PAGE, PROT_READ | PROT_WRITE, how, fd, 0);
	must(memory != MAP_FAILED);
	return memory;
}

/* The page size at an address, in kB. */
static long page_kb(void *area) {
	char line[512];
	unsigned long start;
	long kb = -1;
	int is_it = 0;
	FILE *file = fopen("/proc/self/smaps", "r");
	must(file != NULL);
	while (fgets(line, sizeof line, file) != NULL) {
		if (sscanf(line, "%lx-", &start) == 1 && strchr(line, '-') != NULL)
			is_it = (unsigned long)area == start;
		if (is_it && sscanf(line, "KernelPageSize: %ld", &kb) == 1)
			break;
	}
	fclose(file);
	return kb;
}

int main(void) {
	char *own = map(2, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1);
	char *shared = map(1, MAP_SHARED | MAP_ANONYMOUS | MAP_HUGETLB, -1);
	int fd = memfd_create("huge", MFD_HUGETLB | MFD_ALLOW_SEALING | MFD_CLOEXEC);
	must(fd >= 0 && ftruncate(fd, 2 * PAGE) == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
	char *file = map(2, MAP_SHARED, fd), *copy = map(1, MAP_PRIVATE, fd);
	int ask[2], answer[2];
	must(pipe(ask) == 0 && pipe(answer) == 0);
	own[7] = 'o', own[PAGE - 1] = 'e', file[PAGE + 9] = 'f', copy[3] = 'c';
	if (fork() == 0) {
		char c;
		must(close(ask[1]) == 0);
		while (read(ask[0], &c, 1) == 1) {
			shared[0]++;
			file[1] += 2;
			must(own[7] == 'o' && own[PAGE] == 0 && write(answer[1], &c, 1) == 1);
		}
		_exit(0);
	}
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		char c = 0, text[2];
		struct stat st;
		must(write(ask[1], &c, 1) == 1 && read(answer[0], &c, 1) == 1);
		must(shared[0] == round + 1 && file[1] == 2 * (round + 1));
		must(own[7] == 'o' && own[8] == 0 && own[PAGE - 1] == 'e' && own[PAGE] == 0);
		must(file[PAGE + 9] == 'f' && file[3] == 0 && copy[3] == 'c');
		must(pread(fd, text, 2, PAGE + 8) == 2 && text[0] == 0 && text[1] == 'f');
		must(fstat(fd, &st) == 0 && st.st_size == 2 * PAGE && st.st_blksize == PAGE);
		must(fcntl(fd, F_GET_SEALS) == F_SEAL_SHRINK);
		must(page_kb(own) == 2048 && page_kb(shared) == 2048 && page_kb(file) == 2048);
		must(page_kb(copy) == 2048);
	}
	must(close(ask[1]) == 0 && wait(0) > 0);
	ok();
}
