/* A server whose threads count per CPU in restartable sequences (rseq(2)), as the allocators of some databases do.
 *
 * Four threads count and allocate for half a second after each request, in which a sleep ends at once. Each count is
 * a load, a wait and a store, without a lock: the kernel must abort the sequence of a thread that was preempted in
 * it. A client that sends a line gets the number of counts lost, which is 0, and the sum. */
#include <arpa/inet.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/rseq.h>
#include <time.h>
#include <unistd.h>

enum { THREADS = 4, CPUS_MAX = 1024 };

static struct {
	long count __attribute__((aligned(64)));
} per_cpu[CPUS_MAX];
static long counted[THREADS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t requested = PTHREAD_COND_INITIALIZER;
/* Seconds of CLOCK_MONOTONIC until which threads count. */
static double busy_until;
static pthread_rwlock_t pause_lock = PTHREAD_RWLOCK_INITIALIZER;

/* Adds one to the count of the current CPU. Returns 0 if the sequence was aborted. */
static int add_one(struct rseq *area)
{
	int is_done;
	unsigned cpu = *(volatile unsigned *)&area->cpu_id_start;
	long *count = &per_cpu[cpu].count;
	__asm__ volatile(".pushsection .data, \"aw\"\n\t"
			 ".balign 32\n"
			 "70:\t.long 0, 0\n\t"
			 ".quad 71f, 72f - 71f, 73f\n\t"
			 ".popsection\n\t"
			 "leaq 70b(%%rip), %%rax\n\t"
			 "movq %%rax, %[sequence]\n"
			 "71:\n\t"
			 "movl $0, %[is_done]\n\t"
			 "cmpl %[cpu], %[now]\n\t"
			 "jne 72f\n\t"
			 "movq (%[count]), %%rax\n\t"
			 "pause\n\t"
			 "pause\n\t"
			 "pause\n\t"
			 "movl $1, %[is_done]\n\t"
			 "addq $1, %%rax\n\t"
			 "movq %%rax, (%[count])\n"
			 "72:\n\t"
			 "jmp 75f\n\t"
			 ".long %c[signature]\n"
			 "73:\tmovl $0, %[is_done]\n"
			 "75:\tmovq $0, %[sequence]\n"
			 : [is_done] "=&r"(is_done), [sequence] "+m"(area->rseq_cs)
			 : [cpu] "r"(cpu), [now] "m"(area->cpu_id), [count] "r"(count), [signature] "i"(RSEQ_SIG)
			 : "rax", "memory", "cc");
	return is_done;
}

static double now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

static void await_request(void)
{
	pthread_mutex_lock(&lock);
	while (now() > busy_until)
		pthread_cond_wait(&requested, &lock);
	pthread_mutex_unlock(&lock);
}

static void *work(void *mine)
{
	struct rseq *area = (void *)((char *)__builtin_thread_pointer() + __rseq_offset);
	void *kept[64] = { 0 };
	for (unsigned n = 0;; n++) {
		await_request();
		pthread_rwlock_rdlock(&pause_lock);
		for (int i = 0; i < 2000; i++) {
			*(long *)mine += add_one(area);
			void **place = &kept[(n + i) % 64];
			free(*place);
			*place = memset(malloc(16 + i), i, 16 + i);
		}
		pthread_rwlock_unlock(&pause_lock);
		usleep(1000);
	}
	return NULL;
}

static void *serve(void *arg)
{
	FILE *stream = fdopen((int)(long)arg, "r+");
	char line[100];
	while (fgets(line, sizeof line, stream)) {
		long sum = 0, wanted = 0;
		pthread_rwlock_wrlock(&pause_lock);
		for (int i = 0; i < CPUS_MAX; i++)
			sum += per_cpu[i].count;
		for (int i = 0; i < THREADS; i++)
			wanted += counted[i];
		pthread_rwlock_unlock(&pause_lock);
		pthread_mutex_lock(&lock);
		busy_until = now() + 0.5;
		pthread_cond_broadcast(&requested);
		pthread_mutex_unlock(&lock);
		fprintf(stream, "%ld lost of %ld\n", wanted - sum, wanted);
		fflush(stream);
	}
	fclose(stream);
	return NULL;
}

int main(void)
{
	if (!__rseq_size)
		return fputs("the C library has not registered rseq\n", stderr), 1;
	pthread_rwlockattr_t attributes;
	pthread_rwlockattr_init(&attributes);
	pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
	pthread_rwlock_init(&pause_lock, &attributes);
	pthread_t thread;
	for (int i = 0; i < THREADS; i++)
		pthread_create(&thread, NULL, work, &counted[i]);
	int listener = socket(AF_INET, SOCK_STREAM, 0);
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(7000) };
	if (bind(listener, (void *)&address, sizeof address) || listen(listener, 16))
		return perror("listen"), 1;
	for (;;) {
		long client = accept(listener, NULL, NULL);
		if (client >= 0)
			pthread_create(&thread, NULL, serve, (void *)client);
	}
}
