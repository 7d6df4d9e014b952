/* Private host names: of two processes that share them, with threads, and of a process that has set
 * none. */
#include "workload.h"
#include <pthread.h>
#include <sched.h>
#include <sys/utsname.h>

static void is_called(const char *host, const char *domain) {
	struct utsname u;
	must(uname(&u) == 0 && strcmp(u.nodename, host) == 0 && strcmp(u.domainname, domain) == 0);
}

static void *check_names(void *arg) {
	char c;
	int *ends = arg;
	while (read(ends[0], &c, 1) == 1) {
		is_called("inner", "its.domain");
		must(write(ends[1], &c, 1) == 1);
	}
	return arg;
}

/* Checks the names at each request, and answers. */
static void serve(int ask, int answer, const char *host, const char *domain) {
	char c;
	while (read(ask, &c, 1) == 1) {
		is_called(host, domain);
		must(write(answer, &c, 1) == 1);
	}
	_exit(0);
}

static int ask[4][2], answer[4][2];

static void ask_all(char c) {
	for (int n = 0; n < 4; n++) {
		char got = 0;
		must(write(ask[n][1], &c, 1) == 1 && read(answer[n][0], &got, 1) == 1 && got == c);
	}
}

int main(void) {
	struct utsname outer;
	must(uname(&outer) == 0);
	for (int n = 0; n < 4; n++)
		must(pipe(ask[n]) == 0 && pipe(answer[n]) == 0);
	if (fork() == 0) {
		must(unshare(CLONE_NEWUTS) == 0);
		must(sethostname("inner", 5) == 0 && setdomainname("its.domain", 10) == 0);
		if (fork() == 0)
			serve(ask[0][0], answer[0][1], "inner", "its.domain");
		pthread_t thread;
		int ends[2] = {ask[1][0], answer[1][1]};
		must(pthread_create(&thread, 0, check_names, ends) == 0);
		serve(ask[2][0], answer[2][1], "inner", "its.domain");
	}
	if (fork() == 0) {
		must(unshare(CLONE_NEWUTS) == 0);
		serve(ask[3][0], answer[3][1], outer.nodename, outer.domainname);
	}
	ask_all('a');
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		is_called(outer.nodename, outer.domainname);
		ask_all('0' + round);
	}
	ok();
}
