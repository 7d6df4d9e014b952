/* Datagrams that the kernel has received as one (UDP_SEGMENT, UDP_GRO) are received with their lengths. */
#include "workload.h"
#include <netinet/udp.h>
#include <sys/socket.h>

#ifndef UDP_GRO
#define UDP_SEGMENT 103
#define UDP_GRO 104
#endif

#define LENGTH 500
#define COUNT 5

/* Receives what recvmsg(2) returns as one; returns its length, and the length of each datagram in it. */
static int receive(int fd, char *data, int size, int *each) {
	char control[256];
	struct iovec piece = {data, size};
	struct msghdr head = {.msg_iov = &piece, .msg_iovlen = 1};
	head.msg_control = control, head.msg_controllen = sizeof control;
	int n = recvmsg(fd, &head, MSG_DONTWAIT);
	*each = n;
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&head); n > 0 && c; c = CMSG_NXTHDR(&head, c))
		if (c->cmsg_level == IPPROTO_UDP && c->cmsg_type == UDP_GRO)
			memcpy(each, CMSG_DATA(c), sizeof *each);
	return n;
}

int main(void) {
	struct sockaddr_storage a;
	int to = socket(AF_INET, SOCK_DGRAM, 0), from = socket(AF_INET, SOCK_DGRAM, 0);
	int on = 1, length = LENGTH;
	socklen_t size = loopback(&a, AF_INET, 5400);
	must(setsockopt(to, IPPROTO_UDP, UDP_GRO, &on, sizeof on) == 0);
	must(bind(to, (void *)&a, size) == 0 && connect(from, (void *)&a, size) == 0);
	must(setsockopt(from, IPPROTO_UDP, UDP_SEGMENT, &length, sizeof length) == 0);
	char data[LENGTH * COUNT], got[1 << 16];
	for (int n = 0; n < COUNT; n++)
		memset(data + n * LENGTH, 'a' + n, LENGTH);
	for (int round = 0; round < ROUNDS; round++) {
		/* The last datagram is a shorter one. */
		must(send(from, data, sizeof data - 9, 0) == (int)sizeof data - 9);
		ready(round);
		int all = 0, datagrams = 0, each;
		for (int n; (n = receive(to, got, sizeof got, &each)) > 0; all += n) {
			must(all + n <= (int)sizeof data && memcmp(got, data + all, n) == 0);
			must(each == LENGTH || (each == LENGTH - 9 && n == each));
			datagrams += (n + each - 1) / each;
		}
		must(all == (int)sizeof data - 9 && datagrams == COUNT);
	}
	ok();
}
