/* Private IPC namespaces: of two processes that share one and attach the same memory, with the ids
 * and keys of the container's own; and of one with a mount of its queues. */
#include "workload.h"
#include <mqueue.h>
#include <sched.h>
#include <sys/ipc.h>
#include <sys/mount.h>
#include <sys/msg.h>
#include <sys/sem.h>
#include <sys/shm.h>

#define WORKERS 3
static int ask[WORKERS][2], answer[WORKERS][2];

/* Contents of a namespace: the same names, keys and ids in each, with different data. */
struct world {
	int memory, gone, set, queue;
	char *at, *ghost;
	mqd_t open, lost;
};

struct message {
	long kind;
	char text[16];
};

static mqd_t made(const char *name, const char *text) {
	struct mq_attr a = {.mq_maxmsg = 3, .mq_msgsize = 16};
	mqd_t q = mq_open(name, O_CREAT | O_EXCL | O_RDWR | O_NONBLOCK, 0640, &a);
	must(q >= 0 && mq_send(q, text, strlen(text), 4) == 0);
	return q;
}

static struct world make(const char *text) {
	struct world w;
	w.memory = shmget(0x1234, 8192, IPC_CREAT | IPC_EXCL | 0640);
	w.gone = shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600);
	w.set = semget(0x77, 2, IPC_CREAT | IPC_EXCL | 0600);
	w.queue = msgget(0x99, IPC_CREAT | IPC_EXCL | 0600);
	w.at = shmat(w.memory, 0, 0), w.ghost = shmat(w.gone, 0, 0);
	must(w.at != (void *)-1 && w.ghost != (void *)-1 && shmctl(w.gone, IPC_RMID, 0) == 0);
	strcpy(w.at, text), strcpy(w.at + 4096, text), strcpy(w.ghost, text);
	unsigned short values[2] = {1, strlen(text)};
	struct message m = {.kind = 5};
	strcpy(m.text, text);
	must(semctl(w.set, 0, SETALL, values) == 0 && msgsnd(w.queue, &m, strlen(text), 0) == 0);
	mq_close(made("/alone", text));
	w.open = made("/open", text), w.lost = made("/lost", text);
	must(mq_unlink("/lost") == 0);
	return w;
}

static void holds(mqd_t q, const char *text) {
	char found[16];
	unsigned priority;
	must(mq_receive(q, found, sizeof found, &priority) == (ssize_t)strlen(text) && priority == 4);
	must(memcmp(found, text, strlen(text)) == 0 && mq_send(q, text, strlen(text), 4) == 0);
}

static void is(struct world *w, const char *text, int attached) {
	struct shmid_ds ds;
	struct message m;
	must(shmget(0x1234, 0, 0) == w->memory && semget(0x77, 0, 0) == w->set);
	must(msgget(0x99, 0) == w->queue);
	must(strcmp(w->at, text) == 0 && strcmp(w->at + 4096, text) == 0);
	must(strcmp(w->ghost, text) == 0);
	must(shmctl(w->memory, IPC_STAT, &ds) == 0 && (int)ds.shm_nattch == attached);
	must(shmctl(w->gone, IPC_STAT, &ds) == 0 && ds.shm_perm.mode & SHM_DEST);
	must(semctl(w->set, 1, GETVAL) == (int)strlen(text));
	must(msgrcv(w->queue, &m, sizeof m.text, 0, IPC_NOWAIT) == (ssize_t)strlen(text));
	must(memcmp(m.text, text, strlen(text)) == 0);
	must(msgsnd(w->queue, &m, strlen(text), 0) == 0);
	mqd_t alone = mq_open("/alone", O_RDWR | O_NONBLOCK);
	must(alone >= 0);
	holds(alone, text), holds(w->open, text), holds(w->lost, text);
	must(mq_close(alone) == 0 && mq_open("/lost", O_RDONLY) == -1 && errno == ENOENT);
}

static void serve(int number, struct world *w, const char *text, int attached, const char *queues) {
	char c;
	while (read(ask[number][0], &c, 1) == 1) {
		is(w, text, attached);
		/* The other process sees the write. */
		w->at[100]++;
		if (queues) {
			char path[64];
			snprintf(path, sizeof path, "%s/open", queues);
			must(access(path, F_OK) == 0);
			snprintf(path, sizeof path, "%s/only", queues);
			must(access(path, F_OK) == 0);
		}
		must(write(answer[number][1], &w->at[100], 1) == 1);
	}
	_exit(0);
}

static char request(int number) {
	char c = 'a';
	must(write(ask[number][1], &c, 1) == 1 && read(answer[number][0], &c, 1) == 1);
	return c;
}

int main(void) {
	for (int n = 0; n < WORKERS; n++)
		must(pipe(ask[n]) == 0 && pipe(answer[n]) == 0);
	must(mkdir("/queues", 0755) == 0);
	if (fork() == 0) {
		must(unshare(CLONE_NEWIPC) == 0);
		struct world w = make("inner");
		if (fork() == 0)
			serve(0, &w, "inner", 2, 0);
		serve(1, &w, "inner", 2, 0);
	}
	must(request(0) >= 1 && request(1) == 2);
	if (fork() == 0) {
		must(unshare(CLONE_NEWIPC | CLONE_NEWNS) == 0);
		must(mount(0, "/", 0, MS_REC | MS_PRIVATE, 0) == 0);
		must(mount("queues", "/queues", "mqueue", MS_NOSUID | MS_NOEXEC, 0) == 0);
		struct world w = make("third");
		mq_close(made("/only", "third"));
		serve(2, &w, "third", 1, "/queues");
	}
	must(request(2) == 1);
	struct world w = make("outer");
	char counted = 2;
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		is(&w, "outer", 1);
		must(w.at[100] == 0 && access("/queues/open", F_OK) == -1);
		for (int n = 0; n < 2; n++)
			must(request(n) == ++counted);
		must(request(2) == round + 2);
	}
	ok();
}
