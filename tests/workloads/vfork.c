/* A parent that waits for a child made by vfork to execute or to end. */
#include "workload.h"

int main(void) {
	int pid = vfork();
	if (pid == 0) {
		ready(0);
		_exit(0);
	}
	int status;
	must(waitpid(pid, &status, 0) == pid);
	ok();
}
