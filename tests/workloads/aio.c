/* Contexts of asynchronous I/O (io_setup(2)): their ids, rings, events and places in the kernel's table; threads
 * that wait for events; with BUSY, direct I/O that goes on all the time. LOST selects a context that no restore
 * could make again, TAKES the size of a large one. */
#include "workload.h"
#include <linux/aio_abi.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>

enum { RINGS = 5, PAGE = 4096, PIECES = 16 };

struct ring {
	unsigned slot, events, head, tail, magic, feature, lacking, bytes;
};

static aio_context_t rings[RINGS];
static const int wanted[RINGS] = {8, 64, 1, 2048, 300};
static int nothing; /* An empty file. */

static int set_up(int requests, aio_context_t *id) {
	return syscall(SYS_io_setup, requests, id);
}

static int collect(aio_context_t id, int least, int most, struct io_event *to, struct timespec *within) {
	return syscall(SYS_io_getevents, id, (long)least, (long)most, to, within);
}

static int submit(aio_context_t id, struct iocb *one) {
	return syscall(SYS_io_submit, id, 1L, &one);
}

static struct iocb request(int operation, int file, uint64_t data) {
	struct iocb one = {.aio_lio_opcode = operation, .aio_fildes = file, .aio_data = data};
	return one;
}

/* Requests that are finished at once. */
static void finish(aio_context_t id, int count, uint64_t first) {
	for (int n = 0; n < count; n++) {
		struct iocb one = request(IOCB_CMD_PREAD, nothing, first + n);
		must(submit(id, &one) == 1);
	}
}

/* The events of these requests, in their order, and no more. */
static void has_events(aio_context_t id, int count, uint64_t first) {
	static struct io_event all[5000];
	struct timespec none = {0, 0};
	must(collect(id, 0, 5000, all, &none) == count);
	for (int n = 0; n < count; n++)
		must(all[n].data == first + n && all[n].res == 0 && all[n].res2 == 0);
}

/* Waits for one event after the other, without an end and with a long one. */
static volatile uint64_t seen[2];
static void *waits(void *which) {
	int n = which != 0;
	struct timespec long_time = {1000, 0};
	for (;;) {
		struct io_event one;
		must(collect(rings[n], 1, 1, &one, n ? &long_time : 0) == 1);
		seen[n] = one.data;
	}
	return 0;
}

/* Writes and reads a file past the page cache, several pieces at a time. */
static volatile int stops, passes;
static void *works(void *unused) {
	aio_context_t id = 0;
	char *to[PIECES], *from[PIECES];
	struct io_event all[PIECES];
	int file = open("/direct", O_CREAT | O_RDWR | O_DIRECT, 0600), notice = eventfd(0, 0);
	if (file < 0) /* The file system has none. */
		file = open("/direct", O_CREAT | O_RDWR, 0600);
	must(file >= 0 && notice >= 0 && set_up(PIECES, &id) == 0);
	for (int n = 0; n < PIECES; n++)
		must(posix_memalign((void **)&to[n], PAGE, 16 * PAGE) == 0 &&
		     posix_memalign((void **)&from[n], PAGE, 16 * PAGE) == 0);
	for (int pass = 1; !stops; pass++) {
		for (int operation = IOCB_CMD_PWRITE;; operation = IOCB_CMD_PREAD) {
			struct iocb requests[PIECES];
			uint64_t noticed = 0, count;
			for (int n = 0; n < PIECES; n++) {
				int writes = operation == IOCB_CMD_PWRITE;
				memset(writes ? from[n] : to[n], writes ? pass + n : 0, 16 * PAGE);
				requests[n] = request(operation, file, n);
				requests[n].aio_buf = (uint64_t)(writes ? from[n] : to[n]);
				requests[n].aio_nbytes = 16 * PAGE;
				requests[n].aio_offset = (uint64_t)n * 16 * PAGE;
				requests[n].aio_flags = IOCB_FLAG_RESFD;
				requests[n].aio_resfd = notice;
				must(submit(id, &requests[n]) == 1);
			}
			for (int got = 0, more; got < PIECES; got += more) {
				/* A wait for several that is interrupted returns fewer. */
				must((more = collect(id, PIECES - got, PIECES - got, all, 0)) > 0);
				for (int n = 0; n < more; n++)
					must(all[n].res == 16 * PAGE);
			}
			while (noticed < PIECES && read(notice, &count, sizeof count) == sizeof count)
				noticed += count;
			must(noticed == PIECES);
			if (operation == IOCB_CMD_PREAD)
				break;
		}
		for (int n = 0; n < PIECES; n++)
			must(memcmp(to[n], from[n], 16 * PAGE) == 0);
		passes++;
	}
	must(syscall(SYS_io_destroy, id) == 0);
	return 0;
}

static void lose(const char *what) {
	int event = eventfd(0, 0), ends[2], pid;
	struct iocb one = request(IOCB_CMD_POLL, event, 1);
	struct ring *ring;
	one.aio_buf = POLLIN;
	must(set_up(8, &rings[0]) == 0 && set_up(8, &rings[1]) == 0);
	ring = (void *)rings[0];
	if (!strcmp(what, "poll"))
		must(submit(rings[0], &one) == 1);
	if (!strcmp(what, "child")) {
		must(pipe(ends) == 0 && (pid = fork()) >= 0);
		if (pid == 0) {
			/* It has the ring, and no context. */
			must(collect(rings[0], 0, 0, 0, 0) == -1 && errno == EINVAL);
			must(write(ends[1], "", 1) == 1);
			for (;;)
				pause();
		}
		must(read(ends[0], ends, 1) == 1);
	}
	if (!strcmp(what, "unmapped"))
		must(munmap(ring, PAGE) == 0);
	if (!strcmp(what, "changed"))
		ring->slot = 7;
	if (!strcmp(what, "full"))
		finish(rings[0], ring->events / 2 + 8, 0);
	ready(0);
	ok();
}

int main(void) {
	static char before[RINGS][64 * PAGE];
	struct ring *all[RINGS];
	pthread_t worker, waiter;
	aio_context_t other = 0;
	int notice = eventfd(0, EFD_NONBLOCK);
	nothing = memfd_create("nothing", 0);
	must(nothing >= 0 && notice >= 0);
	if (getenv("LOST"))
		lose(getenv("LOST"));
	if (getenv("TAKES")) {
		must(set_up(atoi(getenv("TAKES")), &other) == 0);
		finish(other, 7, 70);
		ready(0);
		has_events(other, 7, 70);
		ok();
	}
	for (int n = 0; n < RINGS; n++)
		must(set_up(wanted[n], &rings[n]) == 0);
	/* A free place before another, and rings whose events have gone round. */
	must(syscall(SYS_io_destroy, rings[2]) == 0);
	for (int n = 0; n < RINGS; n++)
		all[n] = (void *)rings[n];
	for (int n = 0; n < 6; n++) {
		finish(rings[3], 1000, n);
		has_events(rings[3], 1000, n);
	}
	finish(rings[4], 50, 7);
	has_events(rings[4], 50, 7);
	must(pthread_create(&waiter, 0, waits, 0) == 0);
	must(pthread_create(&waiter, 0, waits, &nothing) == 0);
	if (getenv("BUSY"))
		must(pthread_create(&worker, 0, works, 0) == 0);
	while (getenv("BUSY") && passes == 0)
		nap(1);
	for (int round = 0; round < ROUNDS; round++) {
		uint64_t noticed = 0;
		struct iocb one = request(IOCB_CMD_PREAD, nothing, 603);
		int passed = passes;
		/* Events that nothing collects yet, also across the end of a ring. */
		for (int n = 3; n < RINGS; n++)
			while (all[n]->events - all[n]->tail > 10) {
				finish(rings[n], 1, 1);
				has_events(rings[n], 1, 1);
			}
		finish(rings[3], wanted[3], 5000);
		finish(rings[4], 3, 600);
		one.aio_flags = IOCB_FLAG_RESFD;
		one.aio_resfd = notice;
		must(submit(rings[4], &one) == 1);
		for (int n = 0; n < RINGS; n++)
			if (n != 2)
				memcpy(before[n], all[n], sizeof(struct ring) + 32ul * all[n]->events);
		ready(round);
		for (int n = 0; n < RINGS; n++)
			must(n == 2 || memcmp(before[n], all[n], sizeof(struct ring) + 32ul * all[n]->events) == 0);
		must(all[0]->slot == 0 && all[1]->slot == 1 && all[3]->slot == 3 && all[4]->slot == 4);
		must(read(notice, &noticed, sizeof noticed) == sizeof noticed && noticed == 1);
		has_events(rings[3], wanted[3], 5000);
		has_events(rings[4], 4, 600);
		/* As many requests as before. */
		for (int n = 3; n < RINGS; n++) {
			finish(rings[n], wanted[n], round);
			has_events(rings[n], wanted[n], round);
		}
		/* The threads wait on. */
		for (int n = 0; n < 2; n++) {
			uint64_t data = 100 * round + n + 1;
			finish(rings[n], 1, data);
			while (seen[n] != data)
				nap(1);
		}
		/* The free place is the next that is used. The worker has it, if there is one. */
		must(set_up(1, &other) == 0 && ((struct ring *)other)->slot == (getenv("BUSY") ? 5 : 2));
		must(syscall(SYS_io_destroy, other) == 0 && (other = 0) == 0);
		while (getenv("BUSY") && passes == passed)
			nap(1);
	}
	stops = 1;
	if (getenv("BUSY"))
		must(pthread_join(worker, 0) == 0);
	ok();
}
