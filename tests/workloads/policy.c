/* Memory policies (set_mempolicy(2), mbind(2)): of each thread, of a child, and of parts of memory of several kinds. */
#include "workload.h"
#include <pthread.h>

enum { PREFERRED = 1, BIND = 2, INTERLEAVE = 3, LOCAL = 4, STATIC = 1 << 15, RELATIVE = 1 << 14, OF_ADDRESS = 2 };
#define PAGE 4096

static const unsigned long first = 1;
static char *own, *shared, *mapped, *memory;
static volatile int asked, answered;

static void set(int mode, const unsigned long *nodes) {
	must(syscall(SYS_set_mempolicy, mode, nodes, nodes ? 64 : 0) == 0);
}

static void place(char *at, long bytes, int mode, const unsigned long *nodes) {
	must(syscall(SYS_mbind, at, bytes, mode, nodes, nodes ? 64 : 0, 0) == 0);
}

static void has(char *at, int mode, unsigned long nodes) {
	int found = -1;
	unsigned long all[16] = {0};
	must(syscall(SYS_get_mempolicy, &found, all, 1024, at, at ? OF_ADDRESS : 0) == 0);
	if (found != mode || all[0] != nodes)
		print_line("policy %x of nodes %lx in place of %x of %lx", found, all[0], mode, nodes);
	must(found == mode && all[0] == nodes);
}

static void check_memory(void) {
	has(own, 0, 0), has(own + PAGE, INTERLEAVE, 1), has(own + 2 * PAGE, INTERLEAVE, 1);
	has(own + 3 * PAGE, LOCAL, 0), has(own + 4 * PAGE, 0, 0);
	has(shared, 0, 0), has(shared + PAGE, BIND | STATIC, 1);
	has(mapped, PREFERRED | RELATIVE, 1), has(memory, PREFERRED, 1);
}

static void *other(void *arg) {
	set(PREFERRED | STATIC, &first);
	for (;; nap(1))
		if (answered != asked) {
			has(0, PREFERRED | STATIC, 1);
			answered = asked;
		}
	return arg;
}

int main(void) {
	int ask[2], answer[2], round;
	pthread_t thread;
	char c = 0;
	mkdir("/tmp", 0777);
	make_file("/tmp/file", "text");
	int kind = PROT_READ | PROT_WRITE, file = open("/tmp/file", O_RDONLY), memfd = memfd_create("memory", 0);
	must(ftruncate(memfd, PAGE) == 0 && pipe(ask) == 0 && pipe(answer) == 0);
	own = mmap(0, 8 * PAGE, kind, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	shared = mmap(0, 4 * PAGE, kind, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	mapped = mmap(0, PAGE, kind, MAP_PRIVATE, file, 0);
	memory = mmap(0, PAGE, kind, MAP_SHARED, memfd, 0);
	memset(own, 7, 8 * PAGE);
	set(BIND | STATIC, &first);
	place(own + PAGE, 2 * PAGE, INTERLEAVE, &first), place(own + 3 * PAGE, PAGE, LOCAL, 0);
	place(shared + PAGE, PAGE, BIND | STATIC, &first);
	place(mapped, PAGE, PREFERRED | RELATIVE, &first), place(memory, PAGE, PREFERRED, &first);
	/* It inherits the policies, and has another one of its own. */
	int child = fork();
	must(child >= 0);
	if (child == 0) {
		set(0, 0);
		place(own + PAGE, PAGE, 0, 0);
		while (read(ask[0], &c, 1) == 1) {
			has(0, 0, 0), has(own + PAGE, 0, 0), has(own + 2 * PAGE, INTERLEAVE, 1);
			must(own[PAGE] == 7 && write(answer[1], &c, 1) == 1);
		}
		_exit(0);
	}
	must(pthread_create(&thread, 0, other, 0) == 0);
	for (round = 0; round < ROUNDS; round++) {
		ready(round);
		has(0, BIND | STATIC, 1);
		check_memory();
		must(own[PAGE] == 7 && own[7 * PAGE] == 7 && memcmp(mapped, "text", 4) == 0);
		must(write(ask[1], &c, 1) == 1 && read(answer[0], &c, 1) == 1);
		for (asked++; answered != asked;)
			nap(1);
	}
	ok();
}
