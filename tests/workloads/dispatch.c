/* Threads that have their system calls reported to themselves (PR_SET_SYSCALL_USER_DISPATCH(2const)): by the address
 * that a call is made from, with and without a selector. */
#include "workload.h"
#include <pthread.h>
#include <sys/prctl.h>

#define SYS_USER_DISPATCH 2
#define FROM_OUTSIDE 1
#define FROM_INSIDE 2 /* Linux 6.16 */
#define ALLOW 0
#define BLOCK 1

extern char __executable_start[], etext[];

static char *page; /* a call outside the program */
static __thread volatile int reported;
static __thread volatile char selector;
static volatile int round_number = -1, done;

static void report(int signal, siginfo_t *info, void *context) {
	(void)context;
	must(signal == SIGSYS && info->si_code == SYS_USER_DISPATCH);
	must(info->si_syscall == SYS_getppid && info->si_call_addr == page + 2);
	reported++;
}

static long call_from_page(void) {
	long result = SYS_getppid;
	__asm__ volatile("call *%1" : "+a"(result) : "r"(page) : "rcx", "r11", "memory");
	return result;
}

static void dispatch(int mode, void *start, unsigned long length, int has_selector) {
	volatile char *byte = has_selector ? &selector : 0;
	must(prctl(PR_SET_SYSCALL_USER_DISPATCH, mode, start, length, byte) == 0);
}

static void from_outside(int has_selector) {
	dispatch(FROM_OUTSIDE, __executable_start, etext - __executable_start, has_selector);
}

/* Exactly one call is reported, and nothing was before. */
static void check(int round) {
	must(reported == round);
	call_from_page();
	must(reported == round + 1);
}

static void *without_selector(void *inside) {
	if (inside)
		dispatch(FROM_INSIDE, page, 4096, 0);
	else
		from_outside(0);
	for (int round = 0; round < ROUNDS; round++) {
		__sync_fetch_and_add(&done, 1);
		while (round_number < round)
			nap(1);
		check(round);
	}
	__sync_fetch_and_add(&done, 1);
	return 0;
}

/* Its selector allows calls whenever it is saved. */
static void *allows(void *arg) {
	from_outside(1);
	for (int round = 0; round < ROUNDS; round++) {
		__sync_fetch_and_add(&done, 1);
		while (round_number < round)
			nap(1);
		must(reported == round && call_from_page() == getppid());
		selector = BLOCK;
		check(round);
		selector = ALLOW;
	}
	__sync_fetch_and_add(&done, 1);
	return arg;
}

static void start(void *(*run)(void *), void *arg, int *threads) {
	pthread_t thread;
	must(pthread_create(&thread, 0, run, arg) == 0);
	*threads += 1;
}

int main(void) {
	struct sigaction action = {.sa_sigaction = report, .sa_flags = SA_SIGINFO};
	int threads = 0, has_inside;
	must(sigaction(SIGSYS, &action, 0) == 0);
	page = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	must(page != MAP_FAILED);
	memcpy(page, "\x0f\x05\xc3", 3);
	must(mprotect(page, 4096, PROT_READ | PROT_EXEC) == 0);
	has_inside = prctl(PR_SET_SYSCALL_USER_DISPATCH, FROM_INSIDE, page, 4096, 0) == 0;
	must(prctl(PR_SET_SYSCALL_USER_DISPATCH, 0, 0, 0, 0) == 0);
	start(without_selector, 0, &threads);
	start(allows, 0, &threads);
	if (has_inside)
		start(without_selector, page, &threads);
	from_outside(1);
	selector = BLOCK;
	for (int round = 0; round < ROUNDS; round++) {
		while (done < threads * (round + 1))
			nap(1);
		ready(round);
		check(round);
		must(selector == BLOCK);
		round_number = round;
	}
	while (done < threads * (ROUNDS + 1))
		nap(1);
	ok();
}
