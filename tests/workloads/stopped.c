/* Processes stopped by job control stay stopped, and their parent is notified once. */
#include "workload.h"
#include <pthread.h>

static volatile int notified;

static void on_child(int n) {
	notified += n == SIGCHLD;
}

static char state_of(int pid) {
	char path[64], text[256] = "";
	snprintf(path, sizeof path, "/proc/%d/stat", pid);
	int fd = open(path, O_RDONLY);
	must(fd >= 0 && read(fd, text, sizeof text - 1) > 0 && close(fd) == 0);
	return strrchr(text, ')')[2];
}

static volatile int counts[2];

static void *count(void *arg) {
	for (;;) {
		counts[(long)arg]++;
		nap(1);
	}
	return 0;
}

static int child(int by, int *counter) {
	int pid = fork();
	if (pid == 0) {
		pthread_t other;
		setpgid(0, 0);
		must(pthread_create(&other, 0, count, (void *)1) == 0);
		for (;;) {
			++*counter;
			nap(1);
		}
	}
	must(setpgid(pid, pid) == 0);
	nap(20);
	must(kill(pid, by) == 0);
	int status;
	must(waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status) && WSTOPSIG(status) == by);
	return pid;
}

int main(void) {
	int *shared = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	struct sigaction action = {.sa_handler = on_child};
	must(sigaction(SIGCHLD, &action, 0) == 0);
	int stop = child(SIGSTOP, shared), typed = child(SIGTSTP, shared + 1);
	must(notified == 2);
	for (int round = 0; round < ROUNDS; round++) {
		int before[2] = {shared[0], shared[1]}, status;
		ready(round);
		must(state_of(stop) == 'T' && state_of(typed) == 'T');
		must(shared[0] == before[0] && shared[1] == before[1]);
		must(notified == 2 + round * 2 && waitpid(-1, &status, WUNTRACED | WNOHANG) == 0);
		/* The process continues, and can be stopped again. */
		must(kill(stop, SIGCONT) == 0);
		for (int n = 0; n < 1000 && shared[0] == before[0]; n++)
			nap(2);
		must(shared[0] > before[0] && kill(stop, SIGSTOP) == 0);
		must(waitpid(stop, &status, WUNTRACED) == stop && WSTOPSIG(status) == SIGSTOP);
		nap(5);
		must(notified == 4 + round * 2);
	}
	int status;
	must(kill(stop, SIGKILL) == 0 && waitpid(stop, &status, 0) == stop);
	must(kill(typed, SIGKILL) == 0 && waitpid(typed, &status, 0) == typed);
	ok();
}
