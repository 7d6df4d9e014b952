/* Programs that name their clients by setsockopt(2): bound NAME ARGUMENT...
 *
 * threads ADDRESS PORT HOW  TCP or unix server with user-level threads, one for each connection. Each reads requests
 *                           ("N\n"), works for N microseconds of CPU time, in turns of one millisecond beside the
 *                           others, and answers "done\n". HOW is `call`, by which the server says before each turn for
 *                           which connection it works, `self`, by which it says each time that it works for itself, or
 *                           `silent`. An ADDRESS with a slash is a unix socket
 * call KIND VALUE US        calls once for a socket of this KIND, prints the number of the error, or 0, and burns so
 *                           much CPU time. KIND is listener, pair (of unix sockets, with data that was read), udp,
 *                           pipe, option, length or level (each wrong, at a listener)
 * hand ADDRESS PORT PATH    TCP server: passes each connection to the unix socket PATH (SCM_RIGHTS), and keeps it
 * take PATH VALUE US        listens at PATH. For each socket that arrives: calls, prints the error, burns the time
 *
 * Every wait ends with the container. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

/* As in docs/accounts.md. */
#define SOL_DORMOUSE 0x646d
#define WORK_FOR 1
#define MOST 256

static long cpu_us(void)
{
	struct timespec now;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
	return now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

static void burn(long us)
{
	long end = cpu_us() + us;

	while (cpu_us() < end)
		;
}

static int call(int fd, int value)
{
	return setsockopt(fd, SOL_DORMOUSE, WORK_FOR, &value, sizeof(value)) ? errno : 0;
}

/* Prints the error, and works. */
static void report(int error, long us)
{
	printf("%d\n", error);
	fflush(stdout);
	burn(us);
}

static int listen_at(const char *address, const char *port)
{
	struct sockaddr_un path = { .sun_family = AF_UNIX };
	struct sockaddr_in own = { .sin_family = AF_INET };
	int fd, one = 1, failed;

	if (address[0] == '/') {
		fd = socket(AF_UNIX, SOCK_STREAM, 0);
		strncpy(path.sun_path, address, sizeof(path.sun_path) - 1);
		unlink(address);
		failed = bind(fd, (void *)&path, sizeof(path));
		chmod(address, 0777);
	} else {
		fd = socket(AF_INET, SOCK_STREAM, 0);
		own.sin_port = htons(atoi(port));
		inet_pton(AF_INET, address, &own.sin_addr);
		setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
		failed = bind(fd, (void *)&own, sizeof(own));
	}
	if (failed || listen(fd, 64)) {
		perror("bound: listen");
		exit(1);
	}
	return fd;
}

/* Reads the next request of a connection; -1 if there is none yet, and -2 at the end. */
static long request(int fd)
{
	char text[64];
	ssize_t got = recv(fd, text, sizeof(text) - 1, MSG_DONTWAIT);

	if (got < 0 && errno == EAGAIN)
		return -1;
	if (got <= 0)
		return -2;
	text[got] = 0;
	return atol(text);
}

static int threads(char **args)
{
	struct pollfd of[MOST] = { { .fd = listen_at(args[0], args[1]), .events = POLLIN } };
	int is_calling = strcmp(args[2], "silent"), value = !strcmp(args[2], "call"), count = 1, is_busy = 0, i;
	long left[MOST];

	while (poll(of, count, is_busy ? 0 : -1) >= 0) {
		if (of[0].revents && count < MOST) {
			left[count] = -1;
			of[count++] = (struct pollfd){ .fd = accept(of[0].fd, 0, 0), .events = POLLIN };
		}
		for (i = 1; i < count; i++) {
			if (left[i] < 0)
				left[i] = request(of[i].fd);
			if (left[i] != -2)
				continue;
			close(of[i].fd);
			left[i] = left[--count];
			of[i--] = of[count];
		}
		is_busy = 0;
		for (i = 1; i < count; i++) {
			if (left[i] < 0)
				continue;
			if (is_calling)
				call(of[i].fd, value);
			burn(left[i] < 1000 ? left[i] : 1000);
			left[i] -= left[i] < 1000 ? left[i] : 1000;
			if (left[i]) {
				is_busy = 1;
				continue;
			}
			left[i] = -1;
			send(of[i].fd, "done\n", 5, MSG_NOSIGNAL);
		}
		/* The server itself reads and waits. */
		if (is_calling)
			call(of[0].fd, 0);
	}
	return 1;
}

static int call_once(char **args)
{
	int fd = listen_at("0.0.0.0", "81"), value = atoi(args[1]), pair[2], level = SOL_DORMOUSE, option = WORK_FOR;
	socklen_t length = sizeof(value);
	char byte;

	if (!strcmp(args[0], "pair")) {
		if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) || write(pair[0], "x", 1) != 1 ||
		    read(pair[1], &byte, 1) != 1)
			return 1;
		fd = pair[1];
	} else if (!strcmp(args[0], "udp")) {
		fd = socket(AF_INET, SOCK_DGRAM, 0);
	} else if (!strcmp(args[0], "pipe")) {
		if (pipe(pair))
			return 1;
		fd = pair[0];
	} else if (!strcmp(args[0], "option")) {
		option = 2;
	} else if (!strcmp(args[0], "length")) {
		length = 2;
	} else if (!strcmp(args[0], "level")) {
		level++;
	}
	report(setsockopt(fd, level, option, &value, length) ? errno : 0, atol(args[2]));
	return 0;
}

static int unix_to(const char *name)
{
	struct sockaddr_un path = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_STREAM, 0);

	strncpy(path.sun_path, name, sizeof(path.sun_path) - 1);
	if (connect(fd, (void *)&path, sizeof(path))) {
		perror("bound: unix");
		exit(1);
	}
	return fd;
}

/* One socket in a message. */
static void pass_on(int at, int *fd, int is_sent)
{
	char control[CMSG_SPACE(sizeof(int))] = {}, byte = 'x';
	struct iovec part = { &byte, 1 };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = control,
				  .msg_controllen = sizeof(control) };
	struct cmsghdr *rights = CMSG_FIRSTHDR(&message);

	rights->cmsg_level = SOL_SOCKET;
	rights->cmsg_type = SCM_RIGHTS;
	rights->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(rights), fd, sizeof(int));
	if ((is_sent ? sendmsg(at, &message, 0) : recvmsg(at, &message, 0)) != 1) {
		perror("bound: message");
		exit(1);
	}
	memcpy(fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(int));
}

static int hand(char **args)
{
	int listener = listen_at(args[0], args[1]), fd;

	while ((fd = accept(listener, 0, 0)) >= 0)
		pass_on(unix_to(args[2]), &fd, 1);
	return 1;
}

static int take(char **args)
{
	int listener = listen_at(args[0], 0), from, fd;

	while ((from = accept(listener, 0, 0)) >= 0) {
		pass_on(from, &fd, 0);
		report(call(fd, atoi(args[1])), atol(args[2]));
		send(fd, "done\n", 5, MSG_NOSIGNAL);
	}
	return 1;
}

int main(int argc, char **argv)
{
	if (argc == 5 && !strcmp(argv[1], "threads"))
		return threads(argv + 2);
	if (argc == 5 && !strcmp(argv[1], "call"))
		return call_once(argv + 2);
	if (argc == 5 && !strcmp(argv[1], "hand"))
		return hand(argv + 2);
	if (argc == 5 && !strcmp(argv[1], "take"))
		return take(argv + 2);
	fprintf(stderr, "bound: unknown, or arguments are missing\n");
	return 2;
}
