/* A web site with a database, for a front server: site NAME PORT DATABASE ROUNDS BYTES QUERY
 *
 * DATABASE is the address of a PostgreSQL server that trusts its clients, at port 5432. The connection to it stays
 * open. For each HTTP request the site sends it QUERY, works ROUNDS rounds, and answers with a page of BYTES bytes of
 * words and the header X-Site: NAME. Connections of clients stay open.
 *
 * One process, one thread, statically linked. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

static int database;
static FILE *from_database;

static void fail(const char *step)
{
	perror(step);
	exit(1);
}

static void put(int fd, const void *bytes, size_t length)
{
	for (const char *at = bytes; length;) {
		ssize_t put = write(fd, at, length);
		if (put <= 0)
			return; /* the next read reports it */
		at += put;
		length -= (size_t)put;
	}
}

/* A message of the protocol's version 3: its type, if any, its length with the length itself, its text with a 0. */
static void send_message(char type, const char *text, size_t length)
{
	static char message[4096];
	unsigned size = htonl((unsigned)length + 4);

	if (length + 5 > sizeof(message))
		exit(1);
	message[0] = type;
	memcpy(message + 1, &size, 4);
	memcpy(message + 5, text, length);
	put(database, message + !type, length + 4 + !!type);
}

/* Reads messages until the database is ready for a query, and returns the number of rows. */
static int await_ready(void)
{
	static char text[65536];

	for (int rows = 0;;) {
		unsigned size;
		int type = getc(from_database);

		if (type == EOF || fread(&size, 4, 1, from_database) != 1)
			fail("database");
		size = ntohl(size) - 4;
		if (size >= sizeof(text) || fread(text, 1, size, from_database) != size)
			fail("message of the database");
		if (type == 'E') {
			fprintf(stderr, "error of the database: %s\n", text);
			exit(1);
		}
		rows += type == 'D';
		if (type == 'Z')
			return rows;
	}
}

static void connect_database(const char *address)
{
	static const char startup[] = "\0\3\0\0user\0postgres\0database\0postgres\0";
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(5432) };
	int one = 1;

	database = socket(AF_INET, SOCK_STREAM, 0);
	if (inet_pton(AF_INET, address, &to.sin_addr) != 1 || connect(database, (void *)&to, sizeof(to)))
		fail("database");
	setsockopt(database, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	from_database = fdopen(dup(database), "r");
	send_message(0, startup, sizeof(startup));
	await_ready();
}

/* Words in an order that is random and always the same. */
static char *make_page(size_t bytes)
{
	static const char *words[] = { "the ",	 "a ",	    "house ", "of ",   "winter ", "market ", "old ",   "price ",
				       "paper ", "summer ", "river ", "and ",  "table ",  "yellow ", "under ", "many ",
				       "bread ", "street ", "with ",  "open ", "garden ", "seven ",  "for ",   "light " };
	char *page = malloc(bytes + 16);
	unsigned long random = 88172645463325252UL;

	if (!page)
		fail("memory");
	for (size_t at = 0; at < bytes;) {
		random ^= random << 13;
		random ^= random >> 7;
		random ^= random << 17;
		at += (size_t)sprintf(page + at, "%s", words[random % (sizeof(words) / sizeof(*words))]);
	}
	return page;
}

int main(int argc, char **argv)
{
	struct sockaddr_in own = { .sin_family = AF_INET };
	struct pollfd all[64] = { { .events = POLLIN } };
	nfds_t count = 1;
	unsigned long sum = 0;
	int one = 1;

	if (argc != 7)
		return 2;
	const char *name = argv[1], *query = argv[6];
	unsigned long rounds = strtoul(argv[4], NULL, 10);
	size_t bytes = strtoul(argv[5], NULL, 10);
	char *page = make_page(bytes);

	all[0].fd = socket(AF_INET, SOCK_STREAM, 0);
	own.sin_port = htons((unsigned short)atoi(argv[2]));
	setsockopt(all[0].fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	signal(SIGPIPE, SIG_IGN);
	connect_database(argv[3]);
	if (bind(all[0].fd, (void *)&own, sizeof(own)) || listen(all[0].fd, 64))
		fail("listen");
	for (;;) {
		/* Later clients wait in the backlog while all places are taken. */
		all[0].events = count < 64 ? POLLIN : 0;
		if (poll(all, count, -1) < 0)
			fail("poll");
		for (nfds_t n = count - 1; n > 0; n--) {
			char request[4096], head[256];
			ssize_t got;

			if (!all[n].revents)
				continue;
			/* The front sends a request by one write, shorter than this. */
			got = read(all[n].fd, request, sizeof(request) - 1);
			if (got <= 0) {
				close(all[n].fd);
				all[n] = all[--count];
				continue;
			}
			send_message('Q', query, strlen(query) + 1);
			int rows = await_ready();
			for (unsigned long round = 0; round < rounds; round++)
				sum = (sum ^ (unsigned char)page[round % bytes]) * 0x100000001b3UL;
			int length = snprintf(head, sizeof(head),
					      "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %zu\r\n"
					      "X-Site: %s\r\nX-Work: %d %lx\r\n\r\n",
					      bytes, name, rows, sum);
			put(all[n].fd, head, (size_t)length);
			put(all[n].fd, page, bytes);
		}
		if (all[0].revents) {
			int fd = accept(all[0].fd, NULL, NULL);
			if (fd >= 0) {
				setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
				all[count++] = (struct pollfd){ .fd = fd, .events = POLLIN };
			}
		}
	}
}
