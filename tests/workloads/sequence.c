/* A thread that is inside a restartable sequence (rseq(2)) never goes on in it without its protection. */
#include "workload.h"
#include <pthread.h>
#include <sys/rseq.h>

enum { LEFT, ABORTED, UNPROTECTED };

static volatile int leave;
static volatile long counts[3];

/* Stays inside a sequence until it is aborted, or is to leave. */
static int inside(struct rseq *area) {
	int how;
	__asm__ volatile(
		".pushsection .data, \"aw\"\n\t"
		".balign 32\n"
		"70:\t.long 0, 0\n\t"
		".quad 71f, 72f - 71f, 73f\n\t"
		".popsection\n\t"
		"leaq 70b(%%rip), %%rax\n\t"
		"movq %%rax, %[protection]\n"
		"71:\n"
		"74:\tmovl %[unprotected], %[how]\n\t"
		"cmpq $0, %[protection]\n\t"
		"je 72f\n\t"
		"movl %[left], %[how]\n\t"
		"cmpl $0, %[leave]\n\t"
		"je 74b\n"
		"72:\n\t"
		"jmp 75f\n\t"
		".long %c[signature]\n"
		"73:\tmovl %[aborted], %[how]\n"
		"75:\tmovq $0, %[protection]\n"
		: [how] "=&r"(how), [protection] "+m"(area->rseq_cs)
		: [leave] "m"(leave), [signature] "i"(RSEQ_SIG), [left] "i"(LEFT),
		  [aborted] "i"(ABORTED), [unprotected] "i"(UNPROTECTED)
		: "rax", "memory", "cc");
	return how;
}

static void *work(void *arg) {
	struct rseq *area = (void *)((char *)__builtin_thread_pointer() + __rseq_offset);
	for (;;)
		counts[inside(area)]++;
	return arg;
}

int main(void) {
	must(__rseq_size != 0);
	pthread_t thread;
	must(pthread_create(&thread, 0, work, 0) == 0);
	for (int round = 0; round < ROUNDS; round++) {
		nap(20);
		ready(round);
		must(counts[UNPROTECTED] == 0);
		long before = counts[LEFT];
		for (leave = 1; counts[LEFT] == before;)
			nap(1);
		leave = 0;
	}
	ok();
}
