/* POSIX message queues: with a name and not open, open twice with different flags, removed but
 * open, full, with a blocked receiver; priorities, owners, limits. */
#include "workload.h"
#include <mqueue.h>
#include <poll.h>

static mqd_t made(const char *name, long messages, long bytes) {
	struct mq_attr a = {.mq_maxmsg = messages, .mq_msgsize = bytes};
	mqd_t q = mq_open(name, O_CREAT | O_EXCL | O_RDWR, 0640, &a);
	must(q >= 0);
	return q;
}

static void sends(mqd_t q, const char *text, unsigned priority) {
	must(mq_send(q, text, strlen(text), priority) == 0);
}

static void receives(mqd_t q, const char *text, unsigned priority) {
	char found[8192];
	unsigned p;
	ssize_t n = mq_receive(q, found, sizeof found, &p);
	must(n == (ssize_t)strlen(text) && memcmp(found, text, n) == 0 && p == priority);
}

static void has(mqd_t q, long messages, long bytes, long now, long flags) {
	struct mq_attr a;
	must(mq_getattr(q, &a) == 0);
	must(a.mq_maxmsg == messages && a.mq_msgsize == bytes && a.mq_curmsgs == now);
	must(a.mq_flags == flags);
}

int main(void) {
	mqd_t alone = made("/alone", 5, 100);
	sends(alone, "kept", 1);
	must(fchown(alone, 12, 34) == 0 && fchmod(alone, 0606) == 0 && mq_close(alone) == 0);
	mqd_t one = made("/open", 10, 64), reader = mq_open("/open", O_RDONLY | O_NONBLOCK);
	mqd_t gone = made("/gone", 3, 8192), full = made("/full", 2, 9), wait = made("/wait", 1, 8192);
	must(reader >= 0 && mq_unlink("/gone") == 0);
	/* Its file: a size that a process has set, and an offset behind what was read of its state. */
	char state[10];
	must(ftruncate(gone, 4097) == 0 && read(full, state, sizeof state) == sizeof state);
	if (fork() == 0) {
		for (int round = 0; round < ROUNDS; round++) {
			char text[32];
			snprintf(text, sizeof text, "round %d", round);
			receives(wait, text, round);
			sends(gone, "heard", 9);
		}
		_exit(0);
	}
	for (int round = 0; round < ROUNDS; round++) {
		sends(one, "low", 0), sends(one, "high", 9), sends(one, "low too", 0), sends(one, "high too", 9);
		sends(one, "", 3), sends(gone, "of no name", 7);
		sends(full, "first", 1), sends(full, "123456789", 1);

		ready(round);

		alone = mq_open("/alone", O_RDONLY);
		struct stat s;
		must(alone >= 0 && fstat(alone, &s) == 0);
		must(s.st_uid == 12 && s.st_gid == 34 && (s.st_mode & 07777) == 0606);
		has(alone, 5, 100, 1, 0);
		must(mq_close(alone) == 0);
		must(fstat(gone, &s) == 0 && s.st_size == 4097 && fstat(one, &s) == 0 && s.st_size == 80);
		must(lseek(full, 0, SEEK_CUR) == sizeof state && lseek(gone, 0, SEEK_CUR) == 0);
		has(one, 10, 64, 5, 0), has(reader, 10, 64, 5, O_NONBLOCK);
		struct pollfd p = {.fd = reader, .events = POLLIN};
		must(poll(&p, 1, 0) == 1);
		must(mq_send(reader, "", 0, 0) == -1 && errno == EBADF);
		receives(reader, "high", 9), receives(reader, "high too", 9), receives(reader, "", 3);
		receives(one, "low", 0), receives(one, "low too", 0);
		char c[64];
		must(mq_receive(reader, c, sizeof c, 0) == -1 && errno == EAGAIN);
		must(mq_open("/gone", O_RDONLY) == -1 && errno == ENOENT);
		receives(gone, "of no name", 7);
		has(full, 2, 9, 2, 0);
		struct timespec past = {0, 0};
		must(mq_timedsend(full, "x", 1, 1, &past) == -1 && errno == ETIMEDOUT);
		receives(full, "first", 1), receives(full, "123456789", 1);
		char text[32];
		snprintf(text, sizeof text, "round %d", round);
		sends(wait, text, round), receives(gone, "heard", 9);
	}
	ok();
}
