/* Scheduling of threads: policy, nice, CPUs, I/O priority, timer slack; the OOM score; and a
 * personality. A thread and a child differ from the first. */
#include "workload.h"
#include <pthread.h>
#include <sched.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/resource.h>

static int others_are(int policy, int nice, int cpus, int io, int slack) {
	cpu_set_t set;
	must(sched_getaffinity(0, sizeof set, &set) == 0);
	return sched_getscheduler(0) == policy && getpriority(PRIO_PROCESS, 0) == nice &&
	       CPU_COUNT(&set) == cpus && syscall(SYS_ioprio_get, 1, 0) == io &&
	       prctl(PR_GET_TIMERSLACK) == slack;
}

static void bind_to(int cpu) {
	cpu_set_t set;
	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	must(sched_setaffinity(0, sizeof set, &set) == 0);
}

static volatile int requested, answered, quit;
static int nice_before;

static void *idle(void *arg) {
	struct sched_param none = {0};
	must(sched_setscheduler(0, SCHED_IDLE, &none) == 0);
	bind_to(0);
	must(syscall(SYS_ioprio_set, 1, 0, 3 << 13) == 0 && prctl(PR_SET_TIMERSLACK, 777777) == 0);
	while (!quit) {
		if (requested > answered) {
			must(others_are(SCHED_IDLE, nice_before, 1, 3 << 13, 777777));
			answered++;
		}
		nap(2);
	}
	return arg;
}

static int score(void) {
	char text[16] = "";
	int fd = open("/proc/self/oom_score_adj", O_RDONLY);
	must(fd >= 0 && read(fd, text, 15) > 0 && close(fd) == 0);
	return atoi(text);
}

int main(void) {
	pthread_t thread;
	struct sched_param none = {0};
	int ask[2], answer[2], fd;
	char c;
	cpu_set_t all;
	must(sched_getaffinity(0, sizeof all, &all) == 0);
	nice_before = getpriority(PRIO_PROCESS, 0);
	int nice_then = nice_before + 3 > 19 ? 19 : nice_before + 3;
	must(pthread_create(&thread, 0, idle, 0) == 0);
	must(pipe(ask) == 0 && pipe(answer) == 0);
	if (fork() == 0) {
		must(sched_setscheduler(0, SCHED_BATCH | SCHED_RESET_ON_FORK, &none) == 0);
		must(setpriority(PRIO_PROCESS, 0, nice_then) == 0);
		bind_to(0);
		must(syscall(SYS_ioprio_set, 1, 0, 2 << 13 | 6) == 0);
		must(personality(UNAME26) >= 0);
		fd = open("/proc/self/oom_score_adj", O_WRONLY);
		must(fd >= 0 && write(fd, "555", 3) == 3 && close(fd) == 0);
		while (read(ask[0], &c, 1) == 1) {
			must(others_are(SCHED_BATCH | SCHED_RESET_ON_FORK, nice_then, 1, 2 << 13 | 6, 50000));
			must(score() == 555 && personality(0xffffffff) == UNAME26);
			must(write(answer[1], &c, 1) == 1);
		}
		_exit(0);
	}
	int score_before = score();
	for (int round = 0; round < ROUNDS; round++) {
		must(write(ask[1], "x", 1) == 1 && read(answer[0], &c, 1) == 1);
		ready(round);
		must(others_are(SCHED_OTHER, nice_before, CPU_COUNT(&all), 0, 50000));
		must(score() == score_before && personality(0xffffffff) == 0);
		must(write(ask[1], "x", 1) == 1 && read(answer[0], &c, 1) == 1);
		requested++;
		while (answered < requested)
			nap(2);
	}
	quit = 1;
	must(pthread_join(thread, 0) == 0);
	ok();
}
