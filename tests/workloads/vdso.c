/* The vdso: its functions agree with the system calls, with addresses looked up long ago by libc or
 * just now. One thread is nearly always inside them. And getrandom's state in memory never returns
 * the same numbers twice. */
#include "workload.h"
#include <elf.h>
#include <link.h>
#include <pthread.h>
#include <sched.h>
#include <sys/auxv.h>
#include <sys/random.h>
#include <sys/time.h>

/* The address of a function, from the object in the auxiliary vector. */
static void *look_up(const char *name) {
	const char *base = (const char *)getauxval(AT_SYSINFO_EHDR);
	must(base != NULL && memcmp(base, ELFMAG, SELFMAG) == 0);
	const Elf64_Ehdr *head = (const void *)base;
	const Elf64_Shdr *sections = (const void *)(base + head->e_shoff);
	for (int n = 0; n < head->e_shnum; n++) {
		if (sections[n].sh_type != SHT_DYNSYM)
			continue;
		const Elf64_Sym *symbols = (const void *)(base + sections[n].sh_offset);
		const char *names = base + sections[sections[n].sh_link].sh_offset;
		for (size_t s = 0; s < sections[n].sh_size / sizeof *symbols; s++)
			if (strcmp(names + symbols[s].st_name, name) == 0)
				return (void *)(base + symbols[s].st_value);
	}
	return NULL;
}

static int64_t us(int64_t seconds, int64_t rest) {
	return seconds * 1000000 + rest;
}

/* A value of the vdso lies between the system call's values before and after. */
static void check_clocks(int (*gettime)(clockid_t, struct timespec *),
			 time_t (*seconds)(time_t *)) {
	static const clockid_t clocks[] = {CLOCK_REALTIME, CLOCK_MONOTONIC, CLOCK_BOOTTIME,
					   CLOCK_REALTIME_COARSE, CLOCK_MONOTONIC_COARSE};
	for (size_t n = 0; n < sizeof clocks / sizeof *clocks; n++) {
		struct timespec a, b, c;
		must(syscall(SYS_clock_gettime, clocks[n], &a) == 0);
		must(gettime(clocks[n], &b) == 0);
		must(syscall(SYS_clock_gettime, clocks[n], &c) == 0);
		must(us(a.tv_sec, a.tv_nsec / 1000) <= us(b.tv_sec, b.tv_nsec / 1000));
		must(us(b.tv_sec, b.tv_nsec / 1000) <= us(c.tv_sec, c.tv_nsec / 1000));
	}
	time_t before = syscall(SYS_time, NULL), now = seconds(NULL);
	must(before <= now && now <= syscall(SYS_time, NULL));
}

static void check_others(void) {
	struct timeval a, b, c;
	must(syscall(SYS_gettimeofday, &a, NULL) == 0 && gettimeofday(&b, NULL) == 0);
	must(syscall(SYS_gettimeofday, &c, NULL) == 0);
	must(us(a.tv_sec, a.tv_usec) <= us(b.tv_sec, b.tv_usec));
	must(us(b.tv_sec, b.tv_usec) <= us(c.tv_sec, c.tv_usec));
	cpu_set_t one, all;
	must(sched_getaffinity(0, sizeof all, &all) == 0);
	for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
		CPU_ZERO(&one);
		CPU_SET(cpu, &one);
		if (CPU_ISSET(cpu, &all) && sched_setaffinity(0, sizeof one, &one) == 0)
			must(sched_getcpu() == cpu);
	}
	must(sched_setaffinity(0, sizeof all, &all) == 0);
	struct timespec tick;
	must(clock_getres(CLOCK_MONOTONIC, &tick) == 0 && tick.tv_sec == 0 && tick.tv_nsec > 0);
}

/* Memory for getrandom's state, as the kernel requests it. */
typedef ssize_t quick_random(void *, size_t, unsigned, void *, size_t);
struct wanted {
	uint32_t bytes, access, flags, reserved[13];
};

static ssize_t numbers(quick_random *random, void *state, size_t bytes, uint64_t *out) {
	if (random != NULL && state != NULL)
		return random(out, sizeof *out, 0, state, bytes);
	return getrandom(out, sizeof *out, 0);
}

static volatile int done;

static void *read_clock(void *unused) {
	double last = 0;
	while (!done) {
		double at = now();
		must(at >= last);
		last = at;
	}
	return unused;
}

int main(void) {
	int (*gettime)(clockid_t, struct timespec *) = look_up("__vdso_clock_gettime");
	quick_random *random = look_up("__vdso_getrandom");
	must(gettime != NULL);
	struct wanted wanted = {0};
	void *state = NULL;
	if (random != NULL && random(NULL, 0, 0, &wanted, ~0ul) == 0) {
		state = mmap(NULL, 4096, wanted.access, wanted.flags, -1, 0);
		must(state != MAP_FAILED);
	}
	pthread_t busy;
	must(pthread_create(&busy, NULL, read_clock, NULL) == 0);
	for (int round = 0; round < ROUNDS; round++) {
		uint64_t last, next;
		must(numbers(random, state, wanted.bytes, &last) == sizeof last);
		check_clocks(gettime, time);
		check_others();
		ready(round);
		check_clocks(gettime, time);
		/* Looked up now, in the present object. */
		check_clocks(look_up("__vdso_clock_gettime"), look_up("__vdso_time"));
		check_others();
		must(numbers(random, state, wanted.bytes, &next) == sizeof next && next != last);
		/* Each of several restores of one checkpoint prints its own. */
		print_line("random %d %016llx", round, (unsigned long long)next);
	}
	done = 1;
	must(pthread_join(busy, NULL) == 0);
	ok();
}
