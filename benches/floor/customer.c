/* The workers of a customer of a shared server. Each does one operation after the other.
 *
 * customer PROTOCOL ADDRESS PORT WORKERS SECONDS THINK_MS REQUEST
 *
 * An operation is a new connection, one request, and the whole answer. With dns it is a datagram and its answer. A
 * worker thinks for THINK_MS in the mean before each. REQUEST is a path (http), a command (redis), a statement
 * (postgresql, mysql), or a name (dns). Prints the number of operations, how many had no answer in time, and of the
 * others the median, the mean and the 99th percentile of their durations in microseconds. Operations of the first half
 * second do not count. The last number is that of all operations, with those and with the unanswered ones. */
#include <arpa/inet.h>
#include <math.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define MOST 400000
#define WARM_US 500000

static struct sockaddr_in server;
static const char *request;
static long think_us, begin_us, end_us;
static long durations[MOST];
static int done, lost, all;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static long now_us(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000L + now.tv_nsec / 1000;
}

static int put(int fd, const void *data, size_t length)
{
	return send(fd, data, length, MSG_NOSIGNAL) == (ssize_t)length;
}

/* Reads so many bytes, into the buffer if there is one. */
static int take(int fd, unsigned char *to, size_t length)
{
	unsigned char text[4096];

	while (length) {
		size_t most = length < sizeof(text) ? length : sizeof(text);
		ssize_t got = recv(fd, to ? to : text, to ? length : most, 0);

		if (got <= 0)
			return 0;
		to = to ? to + got : 0;
		length -= got;
	}
	return 1;
}

static int http(int fd)
{
	char text[4096];
	int length = snprintf(text, sizeof(text),
			      "GET %s HTTP/1.0\r\nHost: svc\r\nAccept-Encoding: gzip\r\n\r\n", request);
	ssize_t got, all = 0;

	if (!put(fd, text, length))
		return 0;
	while ((got = recv(fd, text, sizeof(text), 0)) > 0) {
		if (!all && (got < 12 || memcmp(text + 9, "200", 3)))
			return 0;
		all += got;
	}
	return got == 0 && all > 0;
}

/* An answer of one line. */
static int redis(int fd)
{
	char text[512];
	int length = snprintf(text, sizeof(text), "%s\r\n", request);
	ssize_t got = put(fd, text, length) ? recv(fd, text, sizeof(text), 0) : 0;

	return got > 0 && text[0] != '-' && text[got - 1] == '\n';
}

/* Reads messages up to ReadyForQuery. */
static int postgresql_ready(int fd)
{
	unsigned char head[5];

	do {
		if (!take(fd, head, 5))
			return 0;
		if (head[0] == 'E' || !take(fd, 0, (head[1] << 24 | head[2] << 16 | head[3] << 8 | head[4]) - 4))
			return 0;
	} while (head[0] != 'Z');
	return 1;
}

static int postgresql(int fd)
{
	static const char begin[] = "\0\0\0\0\0\3\0\0user\0postgres\0database\0postgres\0";
	char text[1024];
	uint32_t length = htonl(sizeof(begin));

	memcpy(text, begin, sizeof(begin));
	memcpy(text, &length, 4);
	if (!put(fd, text, sizeof(begin)) || !postgresql_ready(fd))
		return 0;
	length = snprintf(text + 5, sizeof(text) - 5, "%s", request) + 5;
	text[0] = 'Q';
	*(uint32_t *)(text + 1) = htonl(length);
	return put(fd, text, length + 1) && postgresql_ready(fd);
}

/* A packet of MySQL; returns its first byte, or -1. */
static int mysql_packet(int fd)
{
	unsigned char head[4], text[1024];
	size_t length;

	if (!take(fd, head, 4))
		return -1;
	length = head[0] | head[1] << 8 | head[2] << 16;
	return length && length <= sizeof(text) && take(fd, text, length) ? text[0] : -1;
}

/* The request is a statement without rows, such as DO. */
static int mysql(int fd)
{
	/* Flags: long password, protocol 4.1, secure connection. The user is root without a password. */
	static const char login[] = "\46\0\0\1\1\202\0\0\0\0\0\1\41\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
				    "root\0";
	char text[1024] = { 0 };
	int length;

	if (mysql_packet(fd) < 0 || !put(fd, login, sizeof(login)) || mysql_packet(fd) != 0)
		return 0;
	length = snprintf(text + 5, sizeof(text) - 5, "%s", request) + 1;
	text[0] = length;
	text[1] = length >> 8;
	text[4] = 3;
	return put(fd, text, length + 4) && mysql_packet(fd) == 0;
}

static int dns(int fd)
{
	unsigned char text[512] = { 1, 2, 1, 0, 0, 1 }, *at = text + 12;
	const char *part = request;

	while (*part) {
		size_t length = strcspn(part, ".");

		*at++ = length;
		memcpy(at, part, length);
		at += length;
		part += length + (part[length] == '.');
	}
	memcpy(at, "\0\0\1\0\1", 5);
	return put(fd, text, at + 5 - text) && recv(fd, text, sizeof(text), 0) > 12 && text[7];
}

static const struct protocol {
	const char *name;
	int type;
	int (*ask)(int);
} protocols[] = { { "http", SOCK_STREAM, http },
		  { "redis", SOCK_STREAM, redis },
		  { "postgresql", SOCK_STREAM, postgresql },
		  { "mysql", SOCK_STREAM, mysql },
		  { "dns", SOCK_DGRAM, dns } };

static int operate(const struct protocol *how)
{
	struct linger none = { .l_onoff = 1 };
	struct timeval limit = { .tv_sec = how->type == SOCK_DGRAM ? 1 : 10 };
	int fd = socket(AF_INET, how->type, 0), one = 1, is_right;

	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
	if (how->type == SOCK_STREAM) {
		setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
		/* No port is to stay in TIME_WAIT. */
		setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof(none));
	}
	is_right = fd >= 0 && !connect(fd, (void *)&server, sizeof(server)) && how->ask(fd);
	close(fd);
	return is_right;
}

static void *work(void *how)
{
	unsigned short seed[3] = { (unsigned long)&seed >> 12, 1, 2 };

	for (;;) {
		long begun, took;
		int is_right;

		if (think_us)
			usleep(-log(1 - erand48(seed)) * think_us);
		begun = now_us();
		if (begun >= end_us)
			return 0;
		is_right = operate(how);
		took = now_us() - begun;
		pthread_mutex_lock(&lock);
		all++;
		if (begun >= begin_us && !is_right)
			lost++;
		else if (begun >= begin_us && done < MOST)
			durations[done++] = took;
		pthread_mutex_unlock(&lock);
	}
}

static int by_size(const void *a, const void *b)
{
	long x = *(const long *)a, y = *(const long *)b;

	return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
	const struct protocol *how = 0;
	pthread_t threads[256];
	pthread_attr_t small;
	int workers;
	double sum = 0;

	for (size_t i = 0; argc == 8 && i < sizeof(protocols) / sizeof(*protocols); i++)
		if (!strcmp(argv[1], protocols[i].name))
			how = &protocols[i];
	server.sin_family = AF_INET;
	if (!how || inet_pton(AF_INET, argv[2], &server.sin_addr) != 1)
		return 2;
	server.sin_port = htons(atoi(argv[3]));
	workers = atoi(argv[4]);
	think_us = atof(argv[6]) * 1000;
	request = argv[7];
	begin_us = now_us() + WARM_US;
	end_us = begin_us + atof(argv[5]) * 1e6;
	pthread_attr_init(&small);
	pthread_attr_setstacksize(&small, 64 << 10);
	for (int i = 0; i < workers && i < 256; i++)
		if (pthread_create(&threads[i], &small, work, (void *)how))
			return 1;
	for (int i = 0; i < workers && i < 256; i++)
		pthread_join(threads[i], 0);
	qsort(durations, done, sizeof(*durations), by_size);
	for (int i = 0; i < done; i++)
		sum += durations[i];
	printf("%d %d %ld %ld %ld %d\n", done, lost, done ? durations[done / 2] : 0, done ? (long)(sum / done) : 0,
	       done ? durations[done * 99 / 100] : 0, all);
	return 0;
}
