/* Objects of the IPC namespace that belong to no process. */
#include "workload.h"
#include <mqueue.h>
#include <sys/ipc.h>
#include <sys/sem.h>
#include <sys/shm.h>

int main(void) {
	must(shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600) >= 0);
	must(semget(IPC_PRIVATE, 1, IPC_CREAT | 0600) >= 0);
	struct sigevent notify = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
	mqd_t queue = mq_open("/queue", O_CREAT | O_RDWR, 0600, 0);
	must(queue >= 0 && mq_notify(queue, &notify) == 0);
	ready(0);
	ok();
}
