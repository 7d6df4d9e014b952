/* Data over the network: stream send|receive|flood ADDRESS PORT NUMBER
 *
 *   send      sends zeros over NUMBER connections
 *   receive   receives over NUMBER connections, and drops what it gets
 *   flood     sends datagrams of 1,400 bytes, NUMBER Mbit in each second
 *
 * Without end. A connection that fails is made again. Statically linked. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static char bytes[1 << 16];

static void flood(const struct sockaddr_in *to, long mbit)
{
	const size_t length = 1400;
	int fd = socket(AF_INET, SOCK_DGRAM, 0);
	struct timespec start, now;
	double sent = 0;

	clock_gettime(CLOCK_MONOTONIC, &start);
	for (;;) {
		clock_gettime(CLOCK_MONOTONIC, &now);
		double due = (double)(now.tv_sec - start.tv_sec) + (double)(now.tv_nsec - start.tv_nsec) / 1e9;
		for (due *= (double)mbit * 1e6 / 8; sent < due; sent += (double)length)
			sendto(fd, bytes, length, 0, (const void *)to, sizeof(*to));
		usleep(1000);
	}
}

int main(int argc, char **argv)
{
	if (argc != 5)
		return 2;
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons((unsigned short)atoi(argv[3])) };
	long number = atol(argv[4]);
	int sends = !strcmp(argv[1], "send");

	if (inet_pton(AF_INET, argv[2], &to.sin_addr) != 1)
		return 2;
	signal(SIGPIPE, SIG_IGN);
	if (!strcmp(argv[1], "flood"))
		flood(&to, number);
	while (--number > 0 && fork() > 0)
		;
	for (;;) {
		int fd = socket(AF_INET, SOCK_STREAM, 0);

		if (!connect(fd, (void *)&to, sizeof(to)))
			while ((sends ? write(fd, bytes, sizeof(bytes)) : read(fd, bytes, sizeof(bytes))) > 0)
				;
		close(fd);
		usleep(10000);
	}
}
