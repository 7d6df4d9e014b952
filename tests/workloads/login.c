/* The login user (/proc/PID/loginuid): set once by a login program, and inherited. */
#include "workload.h"
#include <pthread.h>
#include <sys/prctl.h>

static void has(const char *wanted) {
	char text[32] = "";
	int fd = open("/proc/thread-self/loginuid", O_RDONLY);
	must(fd >= 0 && read(fd, text, sizeof text - 1) > 0 && close(fd) == 0);
	if (strcmp(text, wanted) != 0)
		print_line("login %s in place of %s", text, wanted);
	must(strcmp(text, wanted) == 0);
}

static volatile int asked, answered;

static void *other(void *arg) {
	for (;; nap(1))
		if (answered != asked) {
			has("7");
			answered = asked;
		}
	return arg;
}

/* A process with a login, which may be of a user and not be inspected, as that of a login program. */
static void session(const char *uid, int user, int ask, int answer) {
	char c;
	write_text("/proc/self/loginuid", uid);
	must(setresuid(user, user, user) == 0);
	while (read(ask, &c, 1) == 1) {
		if (user == 0)
			has(uid);
		must((prctl(PR_GET_DUMPABLE) == 1) == (user == 0));
		must(write(answer, &c, 1) == 1);
	}
	_exit(0);
}

int main(void) {
	int ask[2][2], answer[2][2];
	char c = 0;
	has("4294967295");
	for (int n = 0; n < 2; n++) {
		must(pipe(ask[n]) == 0 && pipe(answer[n]) == 0);
		int pid = fork();
		must(pid >= 0);
		if (pid == 0)
			session(n == 0 ? "1000" : "1001", n == 0 ? 0 : 1001, ask[n][0], answer[n][1]);
	}
	int pid = fork();
	if (pid == 0)
		for (;;)
			pause();
	write_text("/proc/self/loginuid", "7");
	pthread_t thread;
	must(pthread_create(&thread, 0, other, 0) == 0);
	for (int round = 0; round < ROUNDS; round++) {
		for (int n = 0; n < 2; n++)
			must(write(ask[n][1], &c, 1) == 1 && read(answer[n][0], &c, 1) == 1);
		ready(round);
		has("7");
		for (asked++; answered != asked;)
			nap(1);
		for (int n = 0; n < 2; n++)
			must(write(ask[n][1], &c, 1) == 1 && read(answer[n][0], &c, 1) == 1);
		char path[64];
		snprintf(path, sizeof path, "/proc/%d/loginuid", pid);
		must(has_text(path, "4294967295"));
		/* The second session: its own file is not its own, as it may not be inspected. */
		snprintf(path, sizeof path, "/proc/%d/loginuid", pid - 1);
		must(has_text(path, "1001"));
	}
	ok();
}
