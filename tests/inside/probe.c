/* Small servers and clients for tests of networks: probe NAME ARGUMENT...
 *
 * who ADDRESS PORT          TCP server: sends each client the client's address
 * count ADDRESS PORT [KIB]  TCP server: numbers its connections; with so much private memory
 * stream ADDRESS PORT       TCP server: a process for each client, which requests the next N bytes
 *                           of an endless sequence ("<N\n") any number of times, or sends them
 *                           (">N\n") and receives "good" if they are correct
 * send FILE ADDRESS PORT    TCP server: sends its client the first bytes of a file, again and
 *                           again, by sendfile(2), which fails with ERESTARTSYS although there is
 *                           space
 * ask NAME PORT             connects and prints the received data
 * udp-echo ADDRESS PORT     sends every datagram back
 * udp-log ADDRESS PORT      prints the data of every datagram as a line
 * udp-ask NAME PORT WORD    sends a datagram and prints the answer
 * frames DEVICE TIMES       sends each frame of standard input so often, a line of hexadecimal digits each
 * udp-ports NAME COUNT      sends a datagram to each of so many ports, from 1024 on
 * hold-ports FROM TO        binds a TCP socket to each of these ports, in as many processes as the limit
 *                           of open files requires, prints the number, and keeps them
 * crowd NAME COUNT          binds so many abstract unix names that have the hash of another one, prints
 *                           the number, and keeps them
 * bind ADDRESS PORT         binds a TCP socket there and reports it
 * ping NAME [TIMES BYTES]   an echo request and its answer, by the unprivileged socket; or so many of so many
 *                           bytes, one after the other
 * waits MS CALL...          waits so long by each of these calls at once, and prints the durations
 * local DIR                 unix sockets DIR/stream and DIR/datagram, and a connection to
 *                           DIR/outside: each line is returned with a number before it, each
 *                           datagram is printed so, and so is the name of each new file in
 *                           DIR/watched
 * inotify COUNT             opens so many inotify instances, prints the number opened, and keeps
 *                           them
 * sockets COUNT SECONDS     opens so many UDP sockets, prints the number opened and the error of the next one, and
 *                           keeps them for so long
 * refused COUNT             opens so many sockets of MPTCP and UDP-Lite, prints the number opened, and closes none
 * hold ADDRESS PORT         accepts all connections, and keeps each until its client closes it
 * aio REQUESTS              makes a context of asynchronous I/O for so many requests, and prints the error
 * ipc-fill KIND BYTES       makes objects of System V (shm, sem, msg) until they are so large, and prints how many
 * lines COUNT STREAMS       prints the numbers from 1 on, each by one write to the stream of the next
 *                           letter of STREAMS: o is standard output, e is standard error
 * ring COUNT                so many processes pass a byte round through pipes, without end
 * burn ADDRESS PORT         one thread serves all connections: it burns "N\n" microseconds of its CPU time and
 *                           answers "done\n". An ADDRESS with a slash is a unix socket
 * burn-each ADDRESS PORT    the same by a process for each connection
 * burn-one ADDRESS PORT     the same, one connection after the other
 * burn-forks ADDRESS PORT   the same, each request by as many processes as it has microseconds, which are
 *                           made one by the other
 * burn-behind ADDRESS PORT NAME PORT
 *                           the same as burn, after an answer of the server NAME to each request
 * work NAME PORT TIMES US   has so many requests of so many microseconds served on one connection
 * work-lines NAME PORT      the same, a request for each line of standard input, which has its microseconds. A line
 *                           of output follows each
 * burn-udp ADDRESS PORT     the same as burn, for datagrams
 * queue STYLE ADDRESS PORT US
 *                           accepts no connection before the file /go is there. Then it burns US microseconds of its
 *                           CPU time for one request of each connection, prints the address of the client, answers
 *                           "done\n" and closes. STYLE is block, poll, select, level or edge (epoll), prefork (four
 *                           processes), threads (four) or group (two sockets with SO_REUSEPORT)
 * visit NAME PORT TIMES     has so many empty requests served by a server of burn-one, each over a new connection,
 *                           and prints the median of their durations in nanoseconds
 * site NAME PORT WORKERS SECONDS
 *                           so many workers, each of which thinks for 170 ms in the mean (exponentially), works for
 *                           1 ms, and in 30 % of all cases has a request of up to 10 ms served by a server of burn-one
 *                           over a new connection. Prints how many such operations ended in the last SECONDS, and the
 *                           mean of their durations without the thinking, in microseconds
 * burst NAME PORT COUNT     has a request served over each of so many connections at once. Prints "asked" when all
 *                           are on their way, and then how many were answered
 * hold NAME PORT COUNT      opens so many connections at once, prints "asked" when all are on their way, and keeps them
 * burn-file PATH US         opens the file, and burns US microseconds of its CPU time. Prints "done", or the number of
 *                           the error of open(2)
 * fork-file PATH            opens the file, unless PATH is -, and makes a process. Prints "forked", or the number of
 *                           the error of fork(2)
 * burn-message PATH US HOW  makes a process that burns US microseconds of its CPU time for each message of a queue of
 *                           System V. It opens the file, and sends a message: when the process waits for one (HOW is
 *                           waiting), or before it looks (queued). Prints "done" after the work
 * hand KIND STEP...         hands work on by a pipe, a semaphore or a segment (probe_hand.h)
 * work-udp NAME PORT TIMES US SOURCE
 *                           the same as work. The datagrams are to have this IPv4 address as their source, or - for
 *                           the usual one
 *
 * Names are resolved by getaddrinfo(3), so `/etc/hosts` counts. Every wait ends after five seconds,
 * except those of the servers and of waits. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <math.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/ip_icmp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/inotify.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/sem.h>
#include <sys/sendfile.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int fail(const char *what)
{
	fprintf(stderr, "probe: %s: %s\n", what, strerror(errno));
	return 1;
}

static int open_socket(const char *name, const char *port, int type, struct addrinfo **found)
{
	struct addrinfo hints = { .ai_socktype = type };
	int one = 1, fd, error = getaddrinfo(name, port, &hints, found);
	if (error) {
		fprintf(stderr, "probe: %s: %s\n", name, gai_strerror(error));
		exit(3);
	}
	fd = socket((*found)->ai_family, type, 0);
	if (fd < 0)
		exit(fail("socket"));
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	return fd;
}

static void limit(int fd)
{
	struct timeval limit = { .tv_sec = 5 };
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
}

static int serve(char **args, void (*answer)(int caller, const char *peer))
{
	struct addrinfo *own;
	int fd = open_socket(args[0], args[1], SOCK_STREAM, &own);
	if (bind(fd, own->ai_addr, own->ai_addrlen) || listen(fd, 64))
		return fail("bind");
	for (;;) {
		struct sockaddr_storage peer;
		socklen_t length = sizeof(peer);
		char text[128];
		int caller = accept(fd, (void *)&peer, &length);
		if (caller < 0)
			return fail("accept");
		if (!getnameinfo((void *)&peer, length, text, sizeof(text), NULL, 0, NI_NUMERICHOST))
			answer(caller, text);
		close(caller);
	}
}

static void send_peer(int caller, const char *peer)
{
	dprintf(caller, "%s\n", peer);
}

static int who(char **args)
{
	return serve(args, send_peer);
}

static uint64_t *memory;
static size_t words;

/* No two words are equal, so that page deduplication finds nothing. */
static uint64_t word(size_t n)
{
	return (n + 1) * 0x9e3779b97f4a7c15u;
}

/* Each request reads some of the memory, different parts each time. */
static void send_number(int caller, const char *peer)
{
	static int calls;
	static uint64_t seed;
	(void)peer;
	for (int n = 0; words > 0 && n < 8; n++) {
		size_t place = (seed = word(seed + n)) % words;
		if (memory[place] != word(place)) {
			dprintf(caller, "word %zu is %#lx\n", place, (unsigned long)memory[place]);
			return;
		}
	}
	dprintf(caller, "call %d\n", ++calls);
}

static int count(char **args)
{
	if (args[2]) {
		words = strtoul(args[2], NULL, 10) * 1024 / sizeof(*memory);
		memory = malloc(words * sizeof(*memory));
		if (!memory)
			return fail("malloc");
		for (size_t n = 0; n < words; n++)
			memory[n] = word(n);
	}
	return serve(args, send_number);
}

/* Byte number n of the sequence. */
static char at(size_t n)
{
	return (char)(n * 7 + n / 251);
}

static void serve_stream(int caller)
{
	char line[32], block[8192];
	size_t sent_bytes = 0, received_bytes = 0;
	for (;;) {
		size_t length = 0, left;
		do {
			if (length == sizeof(line) - 1 || read(caller, line + length, 1) != 1)
				return;
		} while (line[length++] != '\n');
		line[length] = 0;
		left = strtoul(line + 1, NULL, 10);
		while (left > 0) {
			size_t n = left < sizeof(block) ? left : sizeof(block);
			ssize_t done;
			if (line[0] == '<') {
				for (size_t i = 0; i < n; i++)
					block[i] = at(sent_bytes + i);
				done = write(caller, block, n);
				sent_bytes += done > 0 ? (size_t)done : 0;
			} else {
				done = read(caller, block, n);
				for (ssize_t i = 0; i < done; i++)
					if (block[i] != at(received_bytes++))
						return;
			}
			if (done <= 0)
				return;
			left -= (size_t)done;
		}
		if (line[0] == '>' && write(caller, "good\n", 5) != 5)
			return;
	}
}

static void stream_to(int caller, const char *peer)
{
	(void)peer;
	if (fork() == 0) {
		serve_stream(caller);
		_exit(0);
	}
}

static int stream(char **args)
{
	signal(SIGCHLD, SIG_IGN);
	return serve(args, stream_to);
}

static int request(char **args)
{
	struct addrinfo *other;
	char text[512];
	ssize_t got;
	int fd = open_socket(args[0], args[1], SOCK_STREAM, &other);
	limit(fd);
	if (connect(fd, other->ai_addr, other->ai_addrlen))
		return fail("connect");
	while ((got = read(fd, text, sizeof(text))) > 0)
		fwrite(text, 1, (size_t)got, stdout);
	return got < 0 ? fail("read") : 0;
}

static int udp_echo(char **args)
{
	struct addrinfo *own;
	int fd = open_socket(args[0], args[1], SOCK_DGRAM, &own);
	if (bind(fd, own->ai_addr, own->ai_addrlen))
		return fail("bind");
	for (;;) {
		struct sockaddr_storage peer;
		socklen_t length = sizeof(peer);
		char text[2048];
		ssize_t got = recvfrom(fd, text, sizeof(text), 0, (void *)&peer, &length);
		if (got < 0)
			return fail("recvfrom");
		sendto(fd, text, (size_t)got, 0, (void *)&peer, length);
	}
}

/* Prints the data of each datagram as a line. */
static int udp_log(char **args)
{
	struct addrinfo *own;
	int fd = open_socket(args[0], args[1], SOCK_DGRAM, &own);
	if (bind(fd, own->ai_addr, own->ai_addrlen))
		return fail("bind");
	for (;;) {
		char text[2048];
		ssize_t got = recv(fd, text, sizeof(text), 0);
		if (got < 0)
			return fail("recv");
		printf("%.*s\n", (int)got, text);
		fflush(stdout);
	}
}

/* Sends frames, given as lines of hexadecimal digits on standard input, through a device: each so often. */
static int frames(char **args)
{
	struct sockaddr_ll to = { .sll_family = AF_PACKET, .sll_ifindex = (int)if_nametoindex(args[0]) };
	int fd = socket(AF_PACKET, SOCK_RAW, 0), times = atoi(args[1]);
	char line[4096];

	if (fd < 0)
		return fail("socket");
	while (fgets(line, sizeof(line), stdin)) {
		unsigned char frame[sizeof(line) / 2];
		size_t length = 0;
		unsigned value;
		while (sscanf(line + 2 * length, "%2x", &value) == 1)
			frame[length++] = (unsigned char)value;
		for (int n = 0; length && n < times; n++)
			if (sendto(fd, frame, length, 0, (void *)&to, sizeof(to)) < 0 && errno != ENOBUFS)
				return fail("sendto");
	}
	puts("sent");
	return 0;
}

static int udp_request(char **args)
{
	struct addrinfo *other;
	char text[2048];
	int fd = open_socket(args[0], args[1], SOCK_DGRAM, &other);
	limit(fd);
	if (sendto(fd, args[2], strlen(args[2]), 0, other->ai_addr, other->ai_addrlen) < 0)
		return fail("sendto");
	ssize_t got = recv(fd, text, sizeof(text), 0);
	if (got < 0)
		return fail("recv");
	printf("%.*s\n", (int)got, text);
	return 0;
}

static int bind_only(char **args)
{
	struct addrinfo *own;
	int fd = open_socket(args[0], args[1], SOCK_STREAM, &own);
	if (bind(fd, own->ai_addr, own->ai_addrlen))
		return fail("bind");
	puts("bound");
	return 0;
}

static int ping(char **args)
{
	struct addrinfo hints = { .ai_family = AF_INET }, *other;
	static union {
		struct icmphdr head;
		char bytes[1400];
	} echo = { .head = { .type = ICMP_ECHO } }, answer;
	long times = args[1] && args[2] ? strtol(args[1], NULL, 10) : 1;
	size_t size = args[1] && args[2] ? strtoul(args[2], NULL, 10) : sizeof(echo.head);
	if (size < sizeof(echo.head) || size > sizeof(echo)) {
		errno = EMSGSIZE;
		return fail("ping");
	}
	if (getaddrinfo(args[0], NULL, &hints, &other))
		return fail("getaddrinfo");
	int fd = socket(AF_INET, SOCK_DGRAM, IPPROTO_ICMP);
	if (fd < 0)
		return fail("socket");
	limit(fd);
	for (long i = 0; i < times; i++) {
		if (sendto(fd, &echo, size, 0, other->ai_addr, other->ai_addrlen) < 0)
			return fail("sendto");
		if (recv(fd, &answer, sizeof(answer), 0) < 0)
			return fail("recv");
	}
	puts(answer.head.type == ICMP_ECHOREPLY ? "answered" : "refused");
	return 0;
}

static long now_ms(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Waits by one call; returns whether it ended as on a timeout. */
static int wait_by(const char *call, long ms)
{
	struct timespec time = { ms / 1000, ms % 1000 * 1000000 }, moment;
	struct timeval short_time = { ms / 1000, ms % 1000 * 1000 };
	struct itimerspec once = { .it_value = time };
	struct epoll_event event;
	sigset_t signals;
	uint64_t rings = 0;
	int word = 0, pipes[2];
	fd_set set;
	if (pipe(pipes))
		return 0;
	FD_ZERO(&set);
	FD_SET(pipes[0], &set);
	struct pollfd polled = { .fd = pipes[0], .events = POLLIN };
	sigemptyset(&signals);
	sigaddset(&signals, SIGALRM);
	sigprocmask(SIG_BLOCK, &signals, NULL);
	if (!strcmp(call, "nanosleep"))
		return !nanosleep(&time, NULL);
	if (!strcmp(call, "moment")) {
		long end = now_ms() + ms;
		moment = (struct timespec){ end / 1000, end % 1000 * 1000000 };
		return !clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &moment, NULL);
	}
	if (!strcmp(call, "futex"))
		return syscall(SYS_futex, &word, FUTEX_WAIT, 0, &time, NULL, 0) < 0 && errno == ETIMEDOUT;
	if (!strcmp(call, "poll"))
		return !poll(&polled, 1, (int)ms);
	if (!strcmp(call, "ppoll"))
		return !syscall(SYS_ppoll, &polled, 1, &time, NULL, 8);
	if (!strcmp(call, "select"))
		return !syscall(SYS_select, pipes[0] + 1, &set, NULL, NULL, &short_time) &&
		       !FD_ISSET(pipes[0], &set);
	if (!strcmp(call, "epoll_wait")) {
		int fd = epoll_create1(0);
		return !epoll_ctl(fd, EPOLL_CTL_ADD, pipes[0], &(struct epoll_event){ .events = EPOLLIN }) &&
		       !epoll_wait(fd, &event, 1, (int)ms);
	}
	if (!strcmp(call, "sigtimedwait"))
		return sigtimedwait(&signals, NULL, &time) < 0 && errno == EAGAIN;
	if (!strcmp(call, "semtimedop")) {
		struct sembuf take = { 0, -1, 0 };
		int set_of_one = semget(IPC_PRIVATE, 1, 0600);
		return semtimedop(set_of_one, &take, 1, &time) < 0 && errno == EAGAIN;
	}
	if (!strcmp(call, "timerfd")) {
		int fd = timerfd_create(CLOCK_MONOTONIC, 0);
		return !timerfd_settime(fd, 0, &once, NULL) && read(fd, &rings, 8) == 8 && rings == 1;
	}
	if (!strcmp(call, "setitimer")) {
		int signal;
		struct itimerval alarm = { .it_value = short_time };
		return !setitimer(ITIMER_REAL, &alarm, NULL) && !sigwait(&signals, &signal);
	}
	if (!strcmp(call, "timer_create")) {
		int signal;
		timer_t timer;
		return !timer_create(CLOCK_MONOTONIC, NULL, &timer) &&
		       !timer_settime(timer, 0, &once, NULL) && !sigwait(&signals, &signal);
	}
	return 0;
}

static int waits(char **args)
{
	long ms = atol(args[0]);
	setvbuf(stdout, NULL, _IOLBF, 0);
	for (char **call = args + 1; *call; call++) {
		if (fork())
			continue;
		printf("begin %s\n", *call);
		long begin = now_ms();
		int is_over = wait_by(*call, ms);
		printf("%s %s %ld\n", *call, is_over ? "over" : "wrong", now_ms() - begin);
		exit(0);
	}
	while (wait(NULL) > 0)
		;
	puts("all");
	pause();
	return 0;
}

static int local_socket(int type, struct sockaddr_un *own, const char *dir, const char *name)
{
	*own = (struct sockaddr_un){ .sun_family = AF_UNIX };
	snprintf(own->sun_path, sizeof(own->sun_path), "%s/%s", dir, name);
	return socket(AF_UNIX, type, 0);
}

/* Answers a message; returns 0 at the end of the connection. */
static int answer_number(int fd, int is_connected)
{
	static int number;
	char message[64], line[96];
	ssize_t n = recv(fd, message, sizeof(message), 0);
	if (n <= 0)
		return 0;
	n = snprintf(line, sizeof(line), "%d %.*s", ++number, (int)n, message);
	if (!is_connected)
		return puts(line) >= 0;
	return send(fd, line, (size_t)n, MSG_NOSIGNAL) == n;
}

static int local(char **args)
{
	enum { LISTENER, DATAGRAM, WATCH, CONNECTIONS, MAX = 16 };
	struct pollfd all[MAX];
	struct sockaddr_un stream, datagram, outside;
	int count = CONNECTIONS, listener = local_socket(SOCK_STREAM, &stream, args[0], "stream");
	int receiver = local_socket(SOCK_DGRAM, &datagram, args[0], "datagram");
	int caller = local_socket(SOCK_STREAM, &outside, args[0], "outside");
	int watch = inotify_init();
	char watched[128];
	snprintf(watched, sizeof(watched), "%s/watched", args[0]);
	if (connect(caller, (void *)&outside, sizeof(outside)) ||
	    inotify_add_watch(watch, watched, IN_CREATE) < 0)
		return fail("outside");
	if (bind(receiver, (void *)&datagram, sizeof(datagram)) ||
	    bind(listener, (void *)&stream, sizeof(stream)) || listen(listener, MAX))
		return fail("bind");
	setvbuf(stdout, NULL, _IOLBF, 0);
	all[LISTENER] = (struct pollfd){ .fd = listener, .events = POLLIN };
	all[DATAGRAM] = (struct pollfd){ .fd = receiver, .events = POLLIN };
	all[WATCH] = (struct pollfd){ .fd = watch, .events = POLLIN };
	all[count++] = (struct pollfd){ .fd = caller, .events = POLLIN };
	for (;;) {
		if (poll(all, (nfds_t)count, -1) < 0)
			return fail("poll");
		for (int n = count - 1; n >= CONNECTIONS; n--)
			if (all[n].revents && !answer_number(all[n].fd, 1)) {
				close(all[n].fd);
				all[n] = all[--count];
			}
		if (all[DATAGRAM].revents)
			answer_number(receiver, 0);
		if (all[WATCH].revents) {
			_Alignas(struct inotify_event) char events[4096];
			ssize_t length = read(watch, events, sizeof(events));
			for (char *at = events; at < events + length;) {
				struct inotify_event *event = (void *)at;
				printf("saw %s by watch %d\n", event->len ? event->name : "nothing", event->wd);
				at += sizeof(*event) + event->len;
			}
		}
		if (all[LISTENER].revents && count < MAX)
			all[count++] = (struct pollfd){ .fd = accept(listener, NULL, NULL), .events = POLLIN };
	}
}

static const char *sent;

static void send_file(int caller, const char *peer)
{
	(void)peer;
	for (;;) {
		off_t from = 0;
		int file = open(sent, O_RDONLY);
		ssize_t length = file < 0 ? -1 : sendfile(caller, file, &from, 3);
		if (length < 0)
			return;
		close(file);
	}
}

static int send_again(char **args)
{
	signal(SIGPIPE, SIG_IGN);
	sent = args[0];
	return serve(args + 1, send_file);
}

/* One process has work at any time, and all others wait. */
static int ring(char **args)
{
	int count = atoi(args[0]), first[2], left, right[2];
	char byte = 0;
	if (count < 2 || pipe(first))
		return fail("pipe");
	for (left = first[0]; --count; left = right[0]) {
		pid_t child;
		if (pipe(right) || (child = fork()) < 0)
			return fail("fork");
		if (!child) {
			while (read(left, &byte, 1) == 1 && write(right[1], &byte, 1) == 1)
				;
			return fail("pass on");
		}
	}
	do {
		if (write(first[1], &byte, 1) != 1)
			return fail("pass on");
	} while (read(left, &byte, 1) == 1);
	return fail("read");
}

/* Has a timer that expires every so many milliseconds, and does nothing else. */
static int tick(char **args)
{
	long ms = atol(args[0]);
	struct timespec each = { ms / 1000, ms % 1000 * 1000000 };
	while (!nanosleep(&each, NULL))
		;
	return fail("nanosleep");
}

/* Sends one datagram to each port. A closed port is no error. */
static int udp_ports(char **args)
{
	struct addrinfo *found;
	int count = atoi(args[1]), sent = 0;
	int fd = open_socket(args[0], "1", SOCK_DGRAM, &found);
	struct sockaddr_in to;
	if (fd < 0 || found->ai_family != AF_INET)
		return fail("open a socket");
	memcpy(&to, found->ai_addr, sizeof(to));
	for (int i = 0; i < count; i++) {
		to.sin_port = htons(1024 + i);
		sent += sendto(fd, "x", 1, 0, (void *)&to, sizeof(to)) == 1;
	}
	printf("%d\n", sent);
	return 0;
}

/* Allows as many open files as the hard limit does. Returns their number. */
static int allow_files(void)
{
	struct rlimit files;

	if (getrlimit(RLIMIT_NOFILE, &files))
		return 0;
	files.rlim_cur = files.rlim_max;
	setrlimit(RLIMIT_NOFILE, &files);
	return files.rlim_max > 65536 ? 65536 : (int)files.rlim_max;
}

/* Prints the number of objects that are held and keeps them. */
static int keep(int held)
{
	printf("%d\n", held);
	fflush(stdout);
	while (pause())
		;
	return 1;
}

/* Binds a TCP socket to each port from `from` to `to`. Returns their number. */
static int bind_range(int from, int to)
{
	struct sockaddr_in at = { .sin_family = AF_INET };
	int held = 0;

	for (int port = from; port <= to; port++) {
		at.sin_port = htons(port);
		held += !bind(socket(AF_INET, SOCK_STREAM, 0), (void *)&at, sizeof(at));
	}
	return held;
}

static int hold_ports(char **args)
{
	int to = atoi(args[1]), each = allow_files() - 16, held = 0, ready[2];

	if (each <= 0 || pipe(ready))
		return fail("prepare");
	for (int from = atoi(args[0]); from <= to; from += each) {
		int last = from + each - 1 < to ? from + each - 1 : to, part;

		if (fork() == 0) {
			part = bind_range(from, last);
			(void)!write(ready[1], &part, sizeof(part));
			for (;;)
				pause();
		}
		if (read(ready[0], &part, sizeof(part)) != sizeof(part))
			return fail("read");
		held += part;
	}
	return keep(held);
}

/* The place of an abstract name in the kernel's table: unix_abstract_hash(). */
static unsigned name_place(const struct sockaddr_un *name, socklen_t length)
{
	unsigned sum = 0, hash;
	uint16_t word;

	/* The bytes behind the name are zero. */
	for (socklen_t i = 0; i < length; i += 2) {
		memcpy(&word, (const char *)name + i, sizeof(word));
		sum += word;
	}
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	hash = ~sum & 0xffff;
	return (hash ^ hash >> 8) & 255;
}

static socklen_t abstract_name(struct sockaddr_un *name, const char *text)
{
	memset(name, 0, sizeof(*name));
	name->sun_family = AF_UNIX;
	strncpy(name->sun_path + 1, text, sizeof(name->sun_path) - 2);
	return sizeof(sa_family_t) + 1 + strlen(text);
}

static int crowd(char **args)
{
	struct sockaddr_un name;
	unsigned place = name_place(&name, abstract_name(&name, args[0]));
	int wanted = atoi(args[1]), held = 0;
	char text[32];

	allow_files();
	for (unsigned i = 0; held < wanted; i++) {
		socklen_t length;

		snprintf(text, sizeof(text), "crowd%u", i);
		length = abstract_name(&name, text);
		if (name_place(&name, length) != place)
			continue;
		if (bind(socket(AF_UNIX, SOCK_STREAM, 0), (void *)&name, length))
			return fail("bind");
		held++;
	}
	return keep(held);
}

/* Opens inotify instances up to the limit and keeps them. */
static int take_inotify(char **args)
{
	int wanted = atoi(args[0]), taken = 0;
	while (taken < wanted && inotify_init() >= 0)
		taken++;
	return keep(taken);
}

/* Opens UDP sockets up to the limit and keeps them for a while. */
static int take_sockets(char **args)
{
	int wanted = atoi(args[0]), taken = 0;

	allow_files();
	errno = 0;
	while (taken < wanted && socket(AF_INET, SOCK_DGRAM, 0) >= 0)
		taken++;
	printf("%d %s\n", taken, strerror(taken < wanted ? errno : 0));
	fflush(stdout);
	sleep(atoi(args[1]));
	return 0;
}

static int refused(char **args)
{
	int opened = 0;

	for (int i = 0; i < atoi(args[0]); i++)
		opened += (socket(AF_INET, SOCK_STREAM, 262 /* IPPROTO_MPTCP */) >= 0) +
			  (socket(AF_INET, SOCK_DGRAM, IPPROTO_UDPLITE) >= 0);
	printf("%d\n", opened);
	return 0;
}

static int hold(char **args)
{
	struct addrinfo *at;
	int listener = open_socket(args[0], args[1], SOCK_STREAM, &at), epoll = epoll_create1(0);
	struct epoll_event event = { .events = EPOLLIN, .data.fd = listener };

	allow_files();
	if (bind(listener, at->ai_addr, at->ai_addrlen) || listen(listener, 128) ||
	    epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &event))
		return fail("listen");
	for (;;) {
		if (epoll_wait(epoll, &event, 1, -1) != 1)
			continue;
		if (event.data.fd != listener) {
			close(event.data.fd);
			continue;
		}
		event.events = EPOLLRDHUP | EPOLLHUP;
		event.data.fd = accept(listener, 0, 0);
		if (event.data.fd >= 0)
			epoll_ctl(epoll, EPOLL_CTL_ADD, event.data.fd, &event);
	}
}

static int aio(char **args)
{
	unsigned long context = 0;
	long made = syscall(SYS_io_setup, atoi(args[0]), &context);

	printf("%s\n", strerror(made ? errno : 0));
	return 0;
}

/* Fills queues of one kind of System V. Returns after the last object, or when one is refused. */
static int fill_ipc(char **args)
{
	static struct {
		long type;
		char data[8192];
	} message = { .type = 1 };
	long wanted = atol(args[1]), bytes = 0;

	while (bytes < wanted) {
		int id;

		if (!strcmp(args[0], "shm")) {
			char *at;

			id = shmget(IPC_PRIVATE, 1 << 20, 0600);
			at = id < 0 ? (void *)-1 : shmat(id, 0, 0);
			if (at == (void *)-1)
				return fail("shm");
			memset(at, 1, 1 << 20);
			shmdt(at);
			bytes += 1 << 20;
		} else if (!strcmp(args[0], "sem")) {
			if (semget(IPC_PRIVATE, 32000, 0600) < 0)
				return fail("semget");
			bytes += 32000 * 64; /* sizeof(struct sem) is a cache line */
		} else {
			id = msgget(IPC_PRIVATE, 0600);
			if (id < 0)
				return fail("msgget");
			while (!msgsnd(id, &message, sizeof(message.data), IPC_NOWAIT))
				bytes += sizeof(message.data);
		}
	}
	printf("%ld\n", bytes);
	return 0;
}

static int lines(char **args)
{
	int count = atoi(args[0]);
	size_t length = strlen(args[1]);
	char text[32];

	for (int i = 0; i < count; i++) {
		int fd = args[1][i % length] == 'o' ? 1 : 2;
		int bytes = snprintf(text, sizeof(text), "%d\n", i + 1);

		if (write(fd, text, bytes) != bytes)
			return fail("write");
	}
	return 0;
}

static long cpu_us(void)
{
	struct timespec now;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
	return now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

static void burn_for(long us)
{
	long end = cpu_us() + us;

	while (cpu_us() < end)
		;
}

/* Processes of which each makes the next; the last ones go on when the first has answered. */
static void fork_for(long depth)
{
	if (depth > 0 && !fork()) {
		burn_for(1000);
		fork_for(depth - 1);
		_exit(0);
	}
}

static void (*served)(long) = burn_for;

/* Serves one request; 0 at the end of the connection. */
static int serve_burn(int fd)
{
	char text[64];
	ssize_t got = read(fd, text, sizeof(text) - 1);

	if (got <= 0)
		return 0;
	text[got] = 0;
	served(atol(text));
	return write(fd, "done\n", 5) == 5;
}

/* A socket at an address, which it is bound to or connected with. */
static int burn_socket(const char *name, const char *port, int (*use)(int, const struct sockaddr *, socklen_t))
{
	struct sockaddr_un path = { .sun_family = AF_UNIX };
	struct addrinfo *found;
	int fd, one = 1;

	if (name[0] == '/') {
		fd = socket(AF_UNIX, SOCK_STREAM, 0);
		strncpy(path.sun_path, name, sizeof(path.sun_path) - 1);
		if (use == bind)
			unlink(name);
		if (use(fd, (void *)&path, sizeof(path)))
			exit(fail(name));
		chmod(name, 0777);
		return fd;
	}
	fd = open_socket(name, port, SOCK_STREAM, &found);
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (use == connect && getenv("FROM_PORT")) {
		/* The port of one connection after the other. */
		struct sockaddr_in own = { .sin_family = AF_INET, .sin_port = htons(atoi(getenv("FROM_PORT"))) };
		struct linger none = { .l_onoff = 1 };

		setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof(none));
		if (bind(fd, (void *)&own, sizeof(own)))
			exit(fail("bind"));
	}
	if (use(fd, found->ai_addr, found->ai_addrlen))
		exit(fail(name));
	return fd;
}

static int burn(char **args)
{
	int listener = burn_socket(args[0], args[1], bind), all = epoll_create1(0);
	struct epoll_event event = { .events = EPOLLIN, .data.fd = listener };

	if (listen(listener, 64) || epoll_ctl(all, EPOLL_CTL_ADD, listener, &event))
		return fail("listen");
	for (;;) {
		if (epoll_wait(all, &event, 1, -1) != 1)
			continue;
		if (event.data.fd != listener) {
			if (!serve_burn(event.data.fd))
				close(event.data.fd);
			continue;
		}
		event.events = EPOLLIN;
		event.data.fd = accept(listener, 0, 0);
		epoll_ctl(all, EPOLL_CTL_ADD, event.data.fd, &event);
	}
}

static int burn_each(char **args)
{
	int listener = burn_socket(args[0], args[1], bind);

	signal(SIGCHLD, SIG_IGN);
	if (listen(listener, 64))
		return fail("listen");
	for (;;) {
		int fd = accept(listener, 0, 0);

		if (fork()) {
			close(fd);
			continue;
		}
		while (serve_burn(fd))
			;
		_exit(0);
	}
}

static int burn_one(char **args)
{
	int listener = burn_socket(args[0], args[1], bind);

	if (listen(listener, 1024))
		return fail("listen");
	for (;;) {
		int fd = accept(listener, 0, 0);

		while (serve_burn(fd))
			;
		close(fd);
	}
}

static int burn_forks(char **args)
{
	served = fork_for;
	signal(SIGCHLD, SIG_IGN);
	return burn(args);
}

static char **behind;

static void burn_after_answer(long us)
{
	int fd = burn_socket(behind[0], behind[1], connect);
	char text[64];

	limit(fd);
	if (read(fd, text, sizeof(text)) <= 0)
		exit(fail("read"));
	close(fd);
	burn_for(us);
}

static int burn_behind(char **args)
{
	behind = args + 2;
	served = burn_after_answer;
	return burn(args);
}

/* One thread, which passes requests on over a connection for each client, and works as long for each answer. */
static int front(char **args)
{
	int listener = burn_socket(args[0], args[1], bind), all = epoll_create1(0), other[1024];
	struct epoll_event event = { .events = EPOLLIN, .data.fd = listener };
	long us[1024] = { 0 }; /* of the request, at the end of the client */

	if (listen(listener, 64) || epoll_ctl(all, EPOLL_CTL_ADD, listener, &event))
		return fail("listen");
	for (;;) {
		char text[64];
		ssize_t got;
		int fd;

		if (epoll_wait(all, &event, 1, -1) != 1)
			continue;
		fd = event.data.fd;
		if (fd == listener) {
			int ends[] = { accept(listener, 0, 0), burn_socket(args[2], args[3], connect) };

			for (int i = 0; i < 2; i++) {
				other[ends[i]] = ends[!i];
				us[ends[i]] = i ? -1 : 0;
				event.events = EPOLLIN;
				event.data.fd = ends[i];
				epoll_ctl(all, EPOLL_CTL_ADD, ends[i], &event);
			}
			continue;
		}
		got = read(fd, text, sizeof(text) - 1);
		if (got <= 0) {
			close(other[fd]);
			close(fd);
			continue;
		}
		text[got] = 0;
		if (us[fd] < 0)
			burn_for(us[other[fd]]);
		else
			us[fd] = atol(text);
		if (write(other[fd], text, got) != got)
			return fail("write");
	}
}

static int burn_file(char **args)
{
	if (open(args[0], O_RDONLY) < 0)
		return printf("%d\n", errno) < 0;
	burn_for(atol(args[1]));
	return puts("done") < 0;
}

static int fork_file(char **args)
{
	int child;

	if (strcmp(args[0], "-") && open(args[0], O_RDONLY) < 0)
		return fail(args[0]);
	child = fork();
	if (!child)
		_exit(0);
	if (child < 0)
		return printf("%d\n", errno) < 0;
	waitpid(child, 0, 0);
	return puts("forked") < 0;
}

#include "probe_hand.h"

static int ask_for(int fd, long us)
{
	char text[64];
	int length = snprintf(text, sizeof(text), "%ld\n", us), got = 0;

	if (write(fd, text, length) != length)
		return fail("write");
	while (got < 5) {
		ssize_t more = read(fd, text + got, sizeof(text) - got);

		if (more <= 0)
			return fail("read");
		got += more;
	}
	return 0;
}

static int work(char **args)
{
	int fd = burn_socket(args[0], args[1], connect);

	for (int i = 0; i < atoi(args[2]); i++)
		if (ask_for(fd, atol(args[3])))
			return 1;
	return 0;
}

static int work_lines(char **args)
{
	int fd = burn_socket(args[0], args[1], connect);
	char text[32];

	while (fgets(text, sizeof(text), stdin)) {
		if (ask_for(fd, atol(text)))
			return 1;
		puts("done");
		fflush(stdout);
	}
	return 0;
}

static int burn_udp(char **args)
{
	struct addrinfo *own;
	int fd = open_socket(args[0], args[1], SOCK_DGRAM, &own);

	if (bind(fd, own->ai_addr, own->ai_addrlen))
		return fail("bind");
	for (;;) {
		struct sockaddr_storage peer;
		socklen_t length = sizeof(peer);
		char text[64];
		ssize_t got = recvfrom(fd, text, sizeof(text) - 1, 0, (void *)&peer, &length);

		if (got < 0)
			return fail("recvfrom");
		text[got] = 0;
		burn_for(atol(text));
		sendto(fd, "done\n", 5, 0, (void *)&peer, length);
	}
}

/* ---- many connections at once ---- */

static long queue_us;

static void wait_for_go(void)
{
	while (access("/go", F_OK))
		usleep(1000);
}

/* Serves the one request of a connection. */
static void queue_serve(int fd)
{
	struct sockaddr_storage peer;
	socklen_t length = sizeof(peer);
	char name[64], text[128], sign;

	if (read(fd, text, 1) == 1 && !getpeername(fd, (void *)&peer, &length)) {
		burn_for(queue_us);
		getnameinfo((void *)&peer, length, name, sizeof(name), 0, 0, NI_NUMERICHOST);
		sign = text[0];
		length = snprintf(text, sizeof(text), sign == 'x' ? "%s\n" : "%s %c\n", name, sign);
		if (write(1, text, length) != (ssize_t)length || write(fd, "done\n", 5) != 5)
			fail("answer");
	}
	close(fd);
}

static int queue_socket(char **args, int is_group)
{
	struct addrinfo *own;
	int fd = open_socket(args[0], args[1], SOCK_STREAM, &own), one = 1;

	if (is_group && setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &one, sizeof(one)))
		exit(fail("SO_REUSEPORT"));
	if (bind(fd, own->ai_addr, own->ai_addrlen) || listen(fd, 128))
		exit(fail("listen"));
	return fd;
}

static void *queue_block(void *listener)
{
	for (;;) {
		int fd = accept(*(int *)listener, 0, 0);

		if (fd >= 0)
			queue_serve(fd);
	}
	return 0;
}

/* One connection after the other, when the listener is ready. Not one that is ready has none. */
static void queue_ready(int listener, int is_poll)
{
	fcntl(listener, F_SETFL, O_NONBLOCK);
	for (;;) {
		struct pollfd one = { .fd = listener, .events = POLLIN };
		fd_set set;
		int fd;

		FD_ZERO(&set);
		FD_SET(listener, &set);
		if (is_poll ? poll(&one, 1, -1) != 1 : select(listener + 1, &set, 0, 0, 0) != 1)
			exit(fail("wait"));
		fd = accept(listener, 0, 0);
		if (fd < 0)
			exit(fail("accept"));
		fcntl(fd, F_SETFL, 0);
		queue_serve(fd);
	}
}

/* An event loop, which accepts all that are there before it serves. */
static void queue_events(int listener, uint32_t edge)
{
	int all = epoll_create1(0);
	struct epoll_event event = { .events = EPOLLIN | edge, .data.fd = listener }, ready[64];

	fcntl(listener, F_SETFL, O_NONBLOCK);
	epoll_ctl(all, EPOLL_CTL_ADD, listener, &event);
	for (;;) {
		int count = epoll_wait(all, ready, 64, -1), fd;

		for (int i = 0; i < count; i++) {
			if (ready[i].data.fd != listener) {
				queue_serve(ready[i].data.fd);
				continue;
			}
			while ((fd = accept4(listener, 0, 0, SOCK_CLOEXEC)) >= 0) {
				event.events = EPOLLIN | edge;
				event.data.fd = fd;
				epoll_ctl(all, EPOLL_CTL_ADD, fd, &event);
			}
			if (errno != EAGAIN)
				exit(fail("accept"));
		}
	}
}

static int queue(char **args)
{
	const char *style = args[0];
	int is_group = !strcmp(style, "group"), listener = queue_socket(args + 1, is_group);
	pthread_t thread;

	queue_us = atol(args[3]);
	if (is_group || !strcmp(style, "prefork")) {
		for (int i = 0; i < (is_group ? 1 : 3); i++) {
			if (fork())
				continue;
			if (is_group)
				listener = queue_socket(args + 1, 1);
			break;
		}
	}
	wait_for_go();
	if (!strcmp(style, "threads"))
		for (int i = 0; i < 3; i++)
			pthread_create(&thread, 0, queue_block, &listener);
	if (!strcmp(style, "level") || !strcmp(style, "edge"))
		queue_events(listener, style[0] == 'e' ? EPOLLET : 0);
	if (!strcmp(style, "poll") || !strcmp(style, "select"))
		queue_ready(listener, style[0] == 'p');
	queue_block(&listener);
	return 1;
}

static int linger(char **args)
{
	struct addrinfo hints = { .ai_socktype = SOCK_STREAM }, *other;

	if (getaddrinfo(args[0], args[1], &hints, &other))
		return fail(args[0]);
	for (int i = 0; i < atoi(args[2]); i++) {
		int fd = socket(other->ai_family, SOCK_STREAM | SOCK_NONBLOCK, 0);

		if (connect(fd, other->ai_addr, other->ai_addrlen) && errno != EINPROGRESS)
			return fail("connect");
	}
	puts("asked");
	fflush(stdout);
	for (;;)
		pause();
}

/* A fourth argument is the sign by which the service tells these connections apart. */
static int burst(char **args)
{
	const char *sign = args[3] ? args[3] : "x";
	struct addrinfo hints = { .ai_socktype = SOCK_STREAM }, *other;
	int count = atoi(args[2]), all = epoll_create1(0), left = count, answered = 0;

	if (getaddrinfo(args[0], args[1], &hints, &other))
		return fail(args[0]);
	for (int i = 0; i < count; i++) {
		int fd = socket(other->ai_family, SOCK_STREAM | SOCK_NONBLOCK, 0);
		struct epoll_event event = { .events = EPOLLOUT, .data.fd = fd };

		if (connect(fd, other->ai_addr, other->ai_addrlen) && errno != EINPROGRESS)
			return fail("connect");
		epoll_ctl(all, EPOLL_CTL_ADD, fd, &event);
	}
	puts("asked");
	fflush(stdout);
	while (left) {
		struct epoll_event event;
		char text[8];
		int fd;

		if (epoll_wait(all, &event, 1, 60000) != 1)
			break;
		fd = event.data.fd;
		if (event.events & EPOLLOUT && write(fd, sign, 1) == 1) {
			event.events = EPOLLIN;
			epoll_ctl(all, EPOLL_CTL_MOD, fd, &event);
			continue;
		}
		answered += read(fd, text, sizeof(text)) == 5;
		close(fd);
		left--;
	}
	printf("%d\n", answered);
	return 0;
}

/* ---- the workers of a site ---- */

static struct addrinfo *site_backend;
static volatile int site_counts;
static long site_operations, site_us;

static double site_now(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1e6 + now.tv_nsec / 1e3;
}

static void *site_worker(void *number)
{
	unsigned short seed[3] = { (long)number, (long)number >> 8, getpid() };

	for (;;) {
		double begun;

		usleep(-170000 * log(1 - erand48(seed)));
		begun = site_now();
		burn_for(1000);
		if (erand48(seed) < 0.3) {
			int fd = socket(site_backend->ai_family, SOCK_STREAM, 0);

			if (connect(fd, site_backend->ai_addr, site_backend->ai_addrlen) ||
			    ask_for(fd, erand48(seed) * 10000))
				exit(fail("request"));
			close(fd);
		}
		if (site_counts) {
			__atomic_add_fetch(&site_operations, 1, __ATOMIC_RELAXED);
			__atomic_add_fetch(&site_us, (long)(site_now() - begun), __ATOMIC_RELAXED);
		}
	}
	return 0;
}

static int site(char **args)
{
	struct addrinfo hints = { .ai_socktype = SOCK_STREAM };
	pthread_attr_t small;
	pthread_t thread;

	if (getaddrinfo(args[0], args[1], &hints, &site_backend))
		return fail(args[0]);
	pthread_attr_init(&small);
	pthread_attr_setstacksize(&small, 64 << 10);
	for (long i = 0; i < atol(args[2]); i++)
		if (pthread_create(&thread, &small, site_worker, (void *)(i + 1)))
			return fail("pthread_create");
	sleep(2);
	site_counts = 1;
	sleep(atoi(args[3]));
	site_counts = 0;
	printf("%ld %ld\n", site_operations, site_operations ? site_us / site_operations : 0);
	fflush(stdout);
	_exit(0);
}

static int by_size(const void *a, const void *b)
{
	long x = *(const long *)a, y = *(const long *)b;

	return (x > y) - (x < y);
}

static int visit(char **args)
{
	struct addrinfo hints = { .ai_socktype = SOCK_STREAM }, *other;
	int times = atoi(args[2]);
	long *all = calloc(times, sizeof(*all));
	/* Ended by RST: connect(2) takes 1.5 ms to find a port beside 20,000 connections in TIME_WAIT. */
	struct linger reset = { .l_onoff = 1 };

	if (getaddrinfo(args[0], args[1], &hints, &other))
		return fail(args[0]);
	for (int i = 0; i < times; i++) {
		double begun = site_now();
		int fd = socket(other->ai_family, SOCK_STREAM, 0);

		if (connect(fd, other->ai_addr, other->ai_addrlen) || ask_for(fd, 0))
			return fail("request");
		setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
		close(fd);
		all[i] = (site_now() - begun) * 1e3;
	}
	qsort(all, times, sizeof(*all), by_size);
	printf("%ld\n", all[times / 2]);
	return 0;
}

static int work_udp(char **args)
{
	struct addrinfo *other;
	int fd = open_socket(args[0], args[1], SOCK_DGRAM, &other);
	char control[CMSG_SPACE(sizeof(struct in_pktinfo))] = { 0 }, text[64];
	struct iovec data = { .iov_base = args[3], .iov_len = strlen(args[3]) };
	struct msghdr message = { .msg_name = other->ai_addr, .msg_namelen = other->ai_addrlen,
				  .msg_iov = &data, .msg_iovlen = 1 };
	struct in_pktinfo *info = (void *)CMSG_DATA((struct cmsghdr *)control);

	limit(fd);
	if (strcmp(args[4], "-")) {
		message.msg_control = control;
		message.msg_controllen = sizeof(control);
		CMSG_FIRSTHDR(&message)->cmsg_level = IPPROTO_IP;
		CMSG_FIRSTHDR(&message)->cmsg_type = IP_PKTINFO;
		CMSG_FIRSTHDR(&message)->cmsg_len = CMSG_LEN(sizeof(*info));
		inet_pton(AF_INET, args[4], &info->ipi_spec_dst);
	}
	for (int i = 0; i < atoi(args[2]); i++) {
		if (sendmsg(fd, &message, 0) < 0)
			return fail("sendmsg");
		if (recv(fd, text, sizeof(text), 0) != 5)
			return fail("recv");
	}
	return 0;
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		int count;
		int (*run)(char **args);
	} verbs[] = { { "who", 2, who }, { "count", 2, count }, { "stream", 2, stream },
		      { "ask", 2, request }, { "udp-echo", 2, udp_echo }, { "udp-log", 2, udp_log },
		      { "frames", 2, frames }, { "udp-ask", 3, udp_request },
		      { "bind", 2, bind_only }, { "ping", 1, ping }, { "waits", 2, waits },
		      { "local", 1, local }, { "ring", 1, ring }, { "send", 3, send_again },
		      { "tick", 1, tick }, { "inotify", 1, take_inotify },
		      { "udp-ports", 2, udp_ports }, { "hold-ports", 2, hold_ports },
		      { "crowd", 2, crowd }, { "lines", 2, lines }, { "sockets", 2, take_sockets },
		      { "refused", 1, refused }, { "hold", 2, hold }, { "aio", 1, aio },
		      { "ipc-fill", 2, fill_ipc }, { "burn", 2, burn },
		      { "burn-each", 2, burn_each }, { "burn-one", 2, burn_one },
		      { "burn-forks", 2, burn_forks }, { "burn-behind", 4, burn_behind },
		      { "front", 4, front }, { "work", 4, work }, { "work-lines", 2, work_lines },
		      { "burn-file", 2, burn_file }, { "fork-file", 1, fork_file },
		      { "burn-message", 3, burn_message }, { "burn-udp", 2, burn_udp },
		      { "hand", 2, hand }, { "work-udp", 5, work_udp }, { "queue", 4, queue }, { "burst", 3, burst },
		      { "linger", 3, linger }, { "site", 4, site }, { "visit", 3, visit } };
	for (size_t i = 0; argc > 1 && i < sizeof(verbs) / sizeof(*verbs); i++)
		if (!strcmp(argv[1], verbs[i].name) && argc - 2 >= verbs[i].count)
			return verbs[i].run(argv + 2);
	fprintf(stderr, "probe: unknown, or arguments are missing\n");
	return 2;
}
