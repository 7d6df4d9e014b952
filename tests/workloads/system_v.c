/* Objects of System V: shared memory attached by two processes and by none, with a key and without,
 * removed but attached, read only; semaphores; queues with messages. */
#include "workload.h"
#include <sys/ipc.h>
#include <sys/msg.h>
#include <sys/sem.h>
#include <sys/shm.h>

struct message {
	long kind;
	char text[64];
};

static void puts_in(int queue, long kind, const char *text) {
	struct message m = {.kind = kind};
	strcpy(m.text, text);
	must(msgsnd(queue, &m, strlen(text), IPC_NOWAIT) == 0);
}

static void takes(int queue, long kind, const char *text) {
	struct message m;
	must(msgrcv(queue, &m, sizeof m.text, kind, IPC_NOWAIT) == (ssize_t)strlen(text));
	must(memcmp(m.text, text, strlen(text)) == 0);
}

int main(void) {
	const size_t size = 5 * 4096 + 100;
	int shared = shmget(0x1234, size, IPC_CREAT | 0640);
	int alone = shmget(IPC_PRIVATE, 8192, 0600 | IPC_CREAT);
	int gone = shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600);
	char *memory = shmat(shared, 0, 0), *ghost = shmat(gone, 0, 0), *once = shmat(alone, 0, 0);
	const char *read_only = shmat(shared, 0, SHM_RDONLY);
	must(memory != (void *)-1 && ghost != (void *)-1 && once != (void *)-1 && read_only != (void *)-1);
	must(shmctl(gone, IPC_RMID, 0) == 0);
	strcpy(once, "detached");
	must(shmdt(once) == 0);
	memory[3 * 4096] = 'x';
	memory[size - 1] = 'z';
	strcpy(ghost, "ghost");
	struct shmid_ds ds;
	must(shmctl(shared, IPC_STAT, &ds) == 0);
	ds.shm_perm.uid = 33, ds.shm_perm.gid = 34;
	must(shmctl(shared, IPC_SET, &ds) == 0);
	int set = semget(0x77, 3, IPC_CREAT | 0600);
	unsigned short values[3] = {1, 0, 30000};
	must(semctl(set, 0, SETALL, values) == 0);
	int queue = msgget(0x99, IPC_CREAT | 0660), empty = msgget(IPC_PRIVATE, IPC_CREAT | 0600);
	if (fork() == 0) {
		/* Answers in memory to a request by a semaphore. */
		for (;;) {
			struct sembuf wait = {.sem_num = 1, .sem_op = -1};
			while (semop(set, &wait, 1) != 0)
				must(errno == EINTR);
			memory[1]++;
		}
	}
	for (int round = 0; round < ROUNDS; round++) {
		puts_in(queue, 5, "five"), puts_in(queue, 3, "three"), puts_in(queue, 5, "again");
		ready(round);
		must(shmget(0x1234, 0, 0) == shared && semget(0x77, 0, 0) == set);
		must(msgget(0x99, 0) == queue);
		must(memory[3 * 4096] == 'x' && memory[size - 1] == 'z' && memory[4096] == 0);
		must(read_only[3 * 4096] == 'x' && strcmp(ghost, "ghost") == 0);
		must(shmctl(shared, IPC_STAT, &ds) == 0 && ds.shm_segsz == size);
		must(ds.shm_perm.uid == 33 && ds.shm_perm.gid == 34 && ds.shm_perm.cuid == 0);
		must((ds.shm_perm.mode & 0777) == 0640 && ds.shm_nattch == 4);
		must(shmctl(gone, IPC_STAT, &ds) == 0 && ds.shm_perm.mode & SHM_DEST);
		once = shmat(alone, 0, 0);
		must(once != (void *)-1 && strcmp(once, "detached") == 0 && shmdt(once) == 0);
		must(semctl(set, 0, GETVAL) == 1 && semctl(set, 2, GETVAL) == 30000);
		char before = memory[1];
		struct sembuf ask = {.sem_num = 1, .sem_op = 1};
		must(semop(set, &ask, 1) == 0);
		for (int n = 0; read_only[1] == before; n++) {
			must(n < 5000);
			nap(1);
		}
		takes(queue, 3, "three"), takes(queue, 0, "five"), takes(queue, 5, "again");
		struct message m;
		must(msgrcv(queue, &m, 64, 0, IPC_NOWAIT) == -1 && errno == ENOMSG);
		puts_in(empty, 1, "one"), takes(empty, 1, "one");
	}
	must(shmdt(ghost) == 0 && shmctl(gone, IPC_STAT, &ds) == 0);
	ok();
}
