/* Threads that wait until a socket has room: in epoll_wait(2) for an item that reports once, in poll(2), and in
 * write(2). After a restore there may be some: the same bytes in other packets take another part of the buffer. */
#include "workload.h"
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/socket.h>

static int waited[2], polled[2], written[2];

/* Fills a socket; returns the number of bytes. */
static long fill(int fd) {
	static char block[4096];
	long all = 0;
	for (ssize_t n; (n = send(fd, block, sizeof block, MSG_DONTWAIT)) > 0;)
		all += n;
	must(errno == EAGAIN);
	return all;
}

static void drain(int fd, long all) {
	static char block[4096];
	while (all > 0) {
		ssize_t n = read(fd, block, sizeof block);
		must(n > 0);
		all -= n;
	}
}

static void *wait_once(void *unused) {
	struct epoll_event e = {.events = EPOLLOUT | EPOLLONESHOT, .data.u32 = 7}, got;
	int ep = epoll_create1(0);
	must(epoll_ctl(ep, EPOLL_CTL_ADD, waited[0], &e) == 0);
	must(epoll_wait(ep, &got, 1, -1) == 1 && got.data.u32 == 7 && got.events == EPOLLOUT);
	must(epoll_wait(ep, &got, 1, 0) == 0);
	close(ep);
	return unused;
}

static void *wait_in_poll(void *unused) {
	struct pollfd one = {.fd = polled[0], .events = POLLOUT};
	must(poll(&one, 1, -1) == 1 && one.revents == POLLOUT);
	return unused;
}

static void *wait_in_write(void *unused) {
	static char text[100];
	must(write(written[0], text, sizeof text) == sizeof text);
	return unused;
}

int main(void) {
	void *(*waits[])(void *) = {wait_once, wait_in_poll, wait_in_write};
	int *pairs[] = {waited, polled, written};
	for (int n = 0; n < 3; n++)
		must(socketpair(AF_UNIX, SOCK_STREAM, 0, pairs[n]) == 0);
	for (int round = 0; round < ROUNDS; round++) {
		pthread_t threads[3];
		long all[3];
		for (int n = 0; n < 3; n++) {
			all[n] = fill(pairs[n][0]);
			must(pthread_create(&threads[n], 0, waits[n], 0) == 0);
		}
		nap(100);
		ready(round);
		for (int n = 0; n < 3; n++) {
			drain(pairs[n][1], all[n] + (n == 2 ? 100 : 0));
			must(pthread_join(threads[n], 0) == 0);
		}
	}
	ok();
}
