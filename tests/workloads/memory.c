/* Anonymous memory, heap, stack, private and shared files, protection, layout. */
#include "workload.h"

static int data = 41;
static int bss[100000];

static unsigned sum(const unsigned char *p, size_t n) {
	unsigned s = 1;
	for (size_t i = 0; i < n; i++)
		s = s * 31 + p[i];
	return s;
}

int main(void) {
	size_t size = 3 << 20;
	unsigned char *anon = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	must(anon != MAP_FAILED);
	for (size_t i = 0; i < size; i += 7)
		anon[i] = i * 13;
	/* A hole of untouched pages, and pages without access. */
	unsigned char *hole = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	hole[size - 1] = 7;
	unsigned char *shut = mmap(0, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	shut[5000] = 9;
	must(mprotect(shut, 8192, PROT_NONE) == 0);
	unsigned char *fixed = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	fixed[1] = 3;
	must(mprotect(fixed, 4096, PROT_READ) == 0);
	char *heap = malloc(100000);
	memset(heap, 'h', 100000);
	/* A file, mapped privately with one page changed, and shared. */
	int fd = open("/mapped", O_RDWR | O_CREAT, 0600);
	must(fd >= 0 && ftruncate(fd, 16384) == 0 && pwrite(fd, "file", 4, 8192) == 4);
	char *private = mmap(0, 16384, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
	char *shared = mmap(0, 16384, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	private[0] = 'p';
	shared[4096] = 's';
	must(close(fd) == 0);
	char *locked = mmap(0, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	must(locked != MAP_FAILED && madvise(locked, 8192, MADV_DONTFORK) == 0);
	data = 42;
	for (int i = 0; i < 100000; i++)
		bss[i] = i;
	char stack[50000];
	memset(stack, 's', sizeof stack);
	unsigned expected = sum(anon, size);
	void *brk = sbrk(0);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		must(sum(anon, size) == expected);
		must(hole[0] == 0 && hole[size - 1] == 7);
		must(mprotect(shut, 8192, PROT_READ) == 0 && shut[5000] == 9);
		must(mprotect(shut, 8192, PROT_NONE) == 0);
		must(fixed[1] == 3);
		/* Written by the kernel or not at all. */
		fd = open("/dev/zero", O_RDONLY);
		must(read(fd, fixed, 1) == -1 && errno == EFAULT && close(fd) == 0);
		must(heap[99999] == 'h' && data == 42 && bss[99999] == 99999 && stack[49999] == 's');
		must(private[0] == 'p' && private[8192] == 'f' && shared[0] == 0 && shared[4096] == 's');
		shared[12288 + round] = 'F' + round;
		fd = open("/mapped", O_RDONLY);
		char c;
		must(pread(fd, &c, 1, 12288 + round) == 1 && c == 'F' + round && close(fd) == 0);
		must(sbrk(0) == brk && sbrk(4096) == brk && (brk = sbrk(0)) != (void *)-1);
		/* Anonymous memory stays anonymous: dropped pages are zeros again. */
		must(madvise(anon + size - 8192, 4096, MADV_DONTNEED) == 0 && anon[size - 8192] == 0);
		expected = sum(anon, size);
		/* The mapping can still grow. */
		char *more = mremap(locked, 8192, 65536, MREMAP_MAYMOVE);
		must(more != MAP_FAILED && more[60000] == 0);
		locked = mremap(more, 65536, 8192, 0);
		FILE *line = fopen("/proc/self/cmdline", "r");
		char name[64] = "";
		must(line && fgets(name, sizeof name, line) && strstr(name, "memory"));
		fclose(line);
	}
	ok();
}
