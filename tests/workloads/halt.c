/* Signals pending for processes that have stopped: handled ones, one that ends the process, and SIGSTOP; also sent to
 * one thread. None is taken before the process goes on. */
#include "workload.h"
#include <pthread.h>

static volatile int *taken;

static void take(int n) {
	taken[n]++;
}

static void *wait_for_ever(void *arg) {
	for (;;)
		pause();
	return arg;
}

static int child(int threads) {
	int pid = fork();
	must(pid >= 0);
	if (pid == 0) {
		pthread_t thread;
		signal(SIGUSR1, take);
		signal(SIGUSR2, take);
		while (threads-- > 0)
			must(pthread_create(&thread, 0, wait_for_ever, 0) == 0);
		taken[0]++;
		wait_for_ever(0);
	}
	return pid;
}

static unsigned long pending(int pid) {
	char path[64], text[4096];
	snprintf(path, sizeof path, "/proc/%d/status", pid);
	int fd = open(path, O_RDONLY);
	int n = read(fd, text, sizeof text - 1);
	must(n > 0 && close(fd) == 0);
	text[n] = 0;
	return strtoul(strstr(text, "ShdPnd:") + 7, 0, 16) | strtoul(strstr(text, "SigPnd:") + 7, 0, 16);
}

#define BIT(n) (1ul << ((n) - 1))

int main(void) {
	taken = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	int all[] = {child(0), child(2), child(1)}, status;
	while (taken[0] != 3)
		nap(1);
	int doomed = child(0);
	while (taken[0] != 4)
		nap(1);
	must(kill(doomed, SIGSTOP) == 0);
	must(waitpid(doomed, &status, WUNTRACED) == doomed && WIFSTOPPED(status));
	must(kill(doomed, SIGTERM) == 0 && kill(doomed, SIGHUP) == 0);
	for (int round = 0; round < ROUNDS; round++) {
		for (int n = 0; n < 3; n++) {
			must(kill(all[n], SIGSTOP) == 0);
			must(waitpid(all[n], &status, WUNTRACED) == all[n] && WIFSTOPPED(status));
			must(kill(all[n], SIGUSR1) == 0);
		}
		must(kill(all[0], SIGSTOP) == 0 && kill(all[1], SIGSTOP) == 0);
		/* A checkpoint sends that of a thread again to its process. */
		if (getenv("STILL") != 0)
			must(kill(all[2], SIGSTOP) == 0);
		else
			must(syscall(SYS_tgkill, all[2], all[2], SIGSTOP) == 0);
		must(kill(all[0], SIGUSR2) == 0);
		int before[] = {taken[SIGUSR1], taken[SIGUSR2]};
		ready(round);
		for (int n = 0; n < 3; n++) {
			must(pending(all[n]) == (BIT(SIGSTOP) | BIT(SIGUSR1) | (n == 0 ? BIT(SIGUSR2) : 0)));
			must(waitpid(all[n], &status, WUNTRACED | WCONTINUED | WNOHANG) == 0);
		}
		must(pending(doomed) == (BIT(SIGTERM) | BIT(SIGHUP)));
		must(waitpid(doomed, &status, WUNTRACED | WNOHANG) == 0);
		must(taken[SIGUSR1] == before[0] && taken[SIGUSR2] == before[1]);
		/* SIGCONT discards them. */
		for (int n = 0; n < 3; n++) {
			must(kill(all[n], SIGCONT) == 0);
			must(waitpid(all[n], &status, WCONTINUED) == all[n] && WIFCONTINUED(status));
		}
		while (taken[SIGUSR1] != before[0] + 3 || taken[SIGUSR2] != before[1] + 1)
			nap(1);
		for (int n = 0; n < 3; n++)
			must(pending(all[n]) == 0 && waitpid(all[n], &status, WUNTRACED | WNOHANG) == 0);
	}
	must(kill(doomed, SIGCONT) == 0 && waitpid(doomed, &status, 0) == doomed);
	must(WIFSIGNALED(status) && WTERMSIG(status) == SIGHUP);
	ok();
}
