// Uses CPU time: hog THREADS [WORK_MS REST_MS]. With the two numbers each thread works WORK_MS of CPU time, and then
// sleeps REST_MS; a work of 0 sleeps all the time.
#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static long work_us = -1, rest_us;

static long used_us(void)
{
	struct timespec now;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
	return now.tv_sec * 1000000L + now.tv_nsec / 1000;
}

static void *run(void *unused)
{
	for (;;) {
		long end = used_us() + work_us;

		while (work_us < 0 || used_us() < end)
			for (volatile int i = 0; i < 500; i++)
				;
		usleep(rest_us);
	}
	return unused;
}

int main(int count, char **words)
{
	int threads = count > 1 ? atoi(words[1]) : 1;

	if (count > 3) {
		work_us = atol(words[2]) * 1000;
		rest_us = atol(words[3]) * 1000;
	}
	for (int i = 1; i < threads; i++) {
		pthread_t thread;

		if (pthread_create(&thread, NULL, run, NULL))
			return 1;
	}
	run(NULL);
}
