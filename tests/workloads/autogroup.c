/* The nice value of a session as a whole (/proc/PID/autogroup), where the kernel has autogroups. */
#include "workload.h"

static int nice_of(int pid) {
	char path[64], text[64] = "", *at;
	snprintf(path, sizeof path, "/proc/%d/autogroup", pid);
	int fd = open(path, O_RDONLY);
	must(fd >= 0 && read(fd, text, sizeof text - 1) > 0 && close(fd) == 0);
	must((at = strstr(text, " nice ")) != 0);
	return atoi(at + 6);
}

int main(void) {
	int has = access("/proc/self/autogroup", F_OK) == 0, fd;
	int pid = fork();
	must(pid >= 0);
	if (pid == 0) {
		setsid();
		for (;;)
			pause();
	}
	while (getsid(pid) != pid)
		nap(1);
	/* The kernel takes one change in a while. */
	while (has && nice_of(getpid()) != 5) {
		must((fd = open("/proc/self/autogroup", O_WRONLY)) >= 0);
		must(write(fd, "5", 1) == 1 || errno == EAGAIN);
		close(fd), nap(20);
	}
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		must(!has || (nice_of(getpid()) == 5 && nice_of(pid) == 0));
	}
	ok();
}
