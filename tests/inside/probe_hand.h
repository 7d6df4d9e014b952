/* probe hand KIND STEP...
 *
 * Hands work from process to process by a pipe (KIND is pipe, or the path of a FIFO, which is made), a semaphore of
 * System V, or a segment of its shared memory (semaphore, segment). Each STEP is one of a process of its own:
 *
 * give:PATH:N    opens the file, unless PATH is -, and writes N bytes, gives N units, or makes a segment of N bytes
 * take:US:N      reads N bytes (by several calls if need be), takes N units or attaches the segment, and burns US
 *                microseconds of its CPU time
 * later:US:N     the same, in a process that waits during the next steps
 * blocked:PATH:N gives, in a process that waits during the next steps
 * splice:PATH:N  gives by splice(2), from a file in memory
 * packet:PATH:N  gives a packet (O_DIRECT)
 * many:PATH:N    gives N units by as many operations of one call
 * size:-:N       gives the pipe a ring of so many bytes
 * value:-:N      sets the semaphore to N units
 *
 * Prints "done" when all processes have ended. */

static int burn_message(char **args)
{
	struct {
		long type;
		char text[1];
	} message = { 1, "" };
	int queue = msgget(IPC_PRIVATE, 0600), is_queued = !strcmp(args[2], "queued"), status = 1;
	int child = fork();

	if (queue < 0 || child < 0)
		return fail("msgget");
	if (!child) {
		if (is_queued)
			sleep(1);
		if (msgrcv(queue, &message, 1, 0, 0) != 1)
			_exit(1);
		burn_for(atol(args[1]));
		_exit(0);
	}
	if (!is_queued)
		sleep(1);
	if (open(args[0], O_RDONLY) < 0 || msgsnd(queue, &message, 1, 0))
		return fail("msgsnd");
	waitpid(child, &status, 0);
	msgctl(queue, IPC_RMID, 0);
	return status || puts("done") < 0;
}

static const char *hand_kind;
static int hand_ends[2], hand_set;
#define HAND_KEY 0x646d

static int hand_units(int units, int count)
{
	struct sembuf all[256] = { 0 };

	for (int i = 0; i < count; i++)
		all[i].sem_op = units;
	return semop(hand_set, all, count);
}

/* The filter of a container refuses vmsplice(2). */
static ssize_t hand_splice(const char *bytes, long count)
{
	int file = memfd_create("bytes", 0);
	loff_t from = 0;
	ssize_t got = -1;

	if (file >= 0 && write(file, bytes, count) == count)
		got = splice(file, &from, hand_ends[1], 0, count, 0);
	close(file);
	return got;
}

static int hand_give(const char *how, long count)
{
	static char bytes[1 << 20];
	int is_packet = !strcmp(how, "packet");

	if (!strcmp(hand_kind, "semaphore"))
		return strcmp(how, "many") ? hand_units(count, 1) : hand_units(1, count);
	if (!strcmp(hand_kind, "segment"))
		return shmget(HAND_KEY, count, IPC_CREAT | 0600) < 0;
	if (!strcmp(how, "splice"))
		return hand_splice(bytes, count) != count;
	if (is_packet && fcntl(hand_ends[1], F_SETFL, O_WRONLY | O_DIRECT))
		return 1;
	if (write(hand_ends[1], bytes, count) != count)
		return 1;
	return is_packet && fcntl(hand_ends[1], F_SETFL, O_WRONLY);
}

static int hand_take(long count)
{
	static char bytes[1 << 20];

	if (!strcmp(hand_kind, "semaphore"))
		return hand_units(-count, 1);
	if (!strcmp(hand_kind, "segment"))
		return shmat(shmget(HAND_KEY, 0, 0), 0, 0) == (void *)-1;
	for (ssize_t got; count > 0; count -= got) {
		got = read(hand_ends[0], bytes, count);
		if (got <= 0)
			return 1;
	}
	return 0;
}

/* One step, in the process that does it. */
static int hand_step(const char *how, const char *path, long count)
{
	union {
		int value;
	} value = { .value = count };

	if (!strcmp(how, "size"))
		return fcntl(hand_ends[1], F_SETPIPE_SZ, (int)count) < 0;
	if (!strcmp(how, "value"))
		return semctl(hand_set, 0, SETVAL, value) < 0;
	if (!strcmp(how, "take") || !strcmp(how, "later")) {
		if (hand_take(count))
			return fail(how);
		burn_for(atol(path));
		return 0;
	}
	if (strcmp(path, "-") && open(path, O_RDONLY) < 0)
		return fail(path);
	return hand_give(how, count) ? fail(how) : 0;
}

static int hand(char **args)
{
	int status, child, waiting = 0;

	hand_kind = args[0];
	if (!strcmp(hand_kind, "semaphore")) {
		hand_set = semget(IPC_PRIVATE, 1, 0600);
	} else if (*hand_kind == '/') {
		mkfifo(hand_kind, 0622);
		/* Neither open waits for the other side. */
		status = open(hand_kind, O_RDWR);
		hand_ends[0] = open(hand_kind, O_RDONLY);
		hand_ends[1] = open(hand_kind, O_WRONLY);
	} else if (!strcmp(hand_kind, "pipe") && pipe(hand_ends)) {
		return fail("pipe");
	}
	if (hand_set < 0 || hand_ends[0] < 0 || hand_ends[1] < 0)
		return fail(hand_kind);
	for (args++; *args; args++) {
		char *how = strtok(*args, ":"), *path = strtok(0, ":"), *count = strtok(0, ":");
		int waits = !strcmp(how, "later") || !strcmp(how, "blocked");

		child = fork();
		if (child < 0 || !count)
			return fail("fork");
		if (!child)
			_exit(hand_step(how, path, atol(count)));
		waiting += waits;
		if (waits)
			sleep(1);
		else if (waitpid(child, &status, 0) != child || status)
			return fail(how);
	}
	for (; waiting; waiting--)
		if (wait(&status) < 0 || status)
			return fail("wait");
	if (!strcmp(hand_kind, "semaphore"))
		semctl(hand_set, 0, IPC_RMID);
	if (!strcmp(hand_kind, "segment"))
		shmctl(shmget(HAND_KEY, 0, 0), IPC_RMID, 0);
	return puts("done") < 0;
}
