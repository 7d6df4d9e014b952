/* Processes and threads that watch themselves, for commands that are killed while they stop them: numbers in registers
 * and memory, sleeps, a handler of signals, a token that goes round. */
#include "workload.h"
#include <pthread.h>
#include <sys/time.h>

#define PROCESSES 3
#define THREADS 3

static unsigned long (*beats)[THREADS];
static int own, ring[PROCESSES][2];
static volatile sig_atomic_t handled;

static void handle(int signal) {
	(void)signal;
	handled = 1;
}

static int is_blocked(int signal) {
	sigset_t mask;
	must(pthread_sigmask(SIG_SETMASK, NULL, &mask) == 0);
	return sigismember(&mask, signal);
}

/* Waits for a timer, whose signals only this thread takes. */
static void *waiter(void *arg) {
	sigset_t alarm;
	(void)arg;
	sigemptyset(&alarm);
	sigaddset(&alarm, SIGALRM);
	must(pthread_sigmask(SIG_UNBLOCK, &alarm, NULL) == 0);
	struct itimerval every = {{0, 4000}, {0, 4000}};
	must(setitimer(ITIMER_REAL, &every, NULL) == 0);
	for (;;) {
		must(pause() == -1 && errno == EINTR && handled);
		handled = 0;
		must(!is_blocked(SIGALRM) && is_blocked(SIGUSR1));
		beats[own][0]++;
	}
}

/* Computes the same again and again. */
static void *computer(void *arg) {
	unsigned long was = 0;
	double was_d = 0;
	(void)arg;
	for (;;) {
		unsigned long a = 1, b = 2, c = 3, d = 4;
		double x = 1.5, y = 2.5;
		for (int n = 0; n < 200000; n++) {
			a = a * 6364136223846793005ul + b;
			b = (b ^ a) >> 1;
			c += a & 0xff;
			d = d * 3 + c;
			x = x * 0.999 + y;
			y = y * 0.5 + 1.0 / (n + 1);
		}
		unsigned long is = a ^ b ^ c ^ d;
		must(was == 0 || (was == is && was_d == x + y));
		was = is;
		was_d = x + y;
		beats[own][1]++;
	}
}

/* Passes a token on, and sleeps in between. */
static void *passer(void *arg) {
	int from = ring[own][0], to = ring[(own + 1) % PROCESSES][1];
	(void)arg;
	for (;;) {
		unsigned long token = 0;
		must(read(from, &token, sizeof token) == sizeof token && token % PROCESSES == (unsigned)own);
		struct timespec two = {0, 2000000};
		double began = now();
		must(nanosleep(&two, NULL) == 0 && now() - began >= 0.002);
		must(is_blocked(SIGALRM) && is_blocked(SIGUSR1));
		token++;
		must(write(to, &token, sizeof token) == sizeof token);
		beats[own][2]++;
	}
}

static void live(int number) {
	void *(*works[THREADS])(void *) = {waiter, computer, passer};
	own = number;
	for (int n = 0; n < THREADS; n++) {
		pthread_t thread;
		must(pthread_create(&thread, NULL, works[n], NULL) == 0);
	}
}

/* No process of the workload has ended. */
static void all_live(void) {
	int status, pid = waitpid(-1, &status, WNOHANG);
	if (pid != 0)
		print_line("failed: process %d: status %#x", pid, status);
	must(pid == 0);
}

int main(void) {
	beats = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	must(beats != MAP_FAILED);
	sigset_t blocked;
	sigemptyset(&blocked);
	sigaddset(&blocked, SIGALRM);
	sigaddset(&blocked, SIGUSR1);
	must(sigprocmask(SIG_BLOCK, &blocked, NULL) == 0);
	must(signal(SIGALRM, handle) != SIG_ERR);
	for (int n = 0; n < PROCESSES; n++)
		must(pipe(ring[n]) == 0);
	for (int n = 1; n < PROCESSES; n++) {
		if (fork() == 0) {
			live(n);
			for (;;)
				nap(1000);
		}
	}
	live(0);
	unsigned long token = 0;
	must(write(ring[0][1], &token, sizeof token) == sizeof token);
	for (int round = 0; round < ROUNDS; round++) {
		unsigned long before[PROCESSES][THREADS];
		ready(round);
		memcpy(before, beats, sizeof before);
		/* All go on. */
		for (int n = 0; n < PROCESSES * THREADS; n++)
			for (int naps = 0; beats[n / THREADS][n % THREADS] == before[n / THREADS][n % THREADS]; naps++) {
				must(naps < 20000);
				all_live();
				nap(5);
			}
		all_live();
	}
	ok();
}
