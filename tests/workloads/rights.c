/* Open files in flight through unix sockets (SCM_RIGHTS): a file, both ends of a pipe without other
 * owners, a socket with a file in its own queue, files sent by a closed peer, and many at once;
 * with data written before and after. */
#include "workload.h"
#include <sys/eventfd.h>
#include <sys/socket.h>

static void give(int to, const char *data, int length, const int *fds, int count) {
	char control[CMSG_SPACE(sizeof(int) * 253)] = {0};
	struct iovec iov = {(void *)data, length};
	struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control,
			   .msg_controllen = CMSG_SPACE(sizeof(int) * count)};
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(sizeof(int) * count);
	memcpy(CMSG_DATA(c), fds, sizeof(int) * count);
	must(sendmsg(to, &m, 0) == length);
}

/* Reads so many bytes at most; returns the number of descriptors. */
static int take(int from, char *data, int length, int *got, int *fds) {
	char control[CMSG_SPACE(sizeof(int) * 253)];
	struct iovec iov = {data, length};
	struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control,
			   .msg_controllen = sizeof control};
	*got = recvmsg(from, &m, MSG_DONTWAIT);
	must(*got >= 0 && !(m.msg_flags & MSG_CTRUNC));
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	if (c == NULL)
		return 0;
	must(c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS);
	int count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
	memcpy(fds, CMSG_DATA(c), sizeof(int) * count);
	return count;
}

int main(void) {
	int types[] = {SOCK_STREAM, SOCK_SEQPACKET, SOCK_DGRAM};
	for (int round = 0; round < ROUNDS; round++) {
		int pairs[3][2], own[3], fds[253], got;
		char text[64];
		int file = open("/file", O_RDWR | O_CREAT | O_TRUNC, 0600);
		must(file >= 0 && write(file, "0123456789", 10) == 10 && lseek(file, 3, SEEK_SET) == 3);
		for (int n = 0; n < 3; n++) {
			int pipe_[2], inner[2], event = eventfd(7 + n, 0);
			must(socketpair(AF_UNIX, types[n], 0, pairs[n]) == 0);
			must(pipe(pipe_) == 0 && write(pipe_[1], "piped", 5) == 5);
			must(socketpair(AF_UNIX, SOCK_STREAM, 0, inner) == 0);
			give(inner[0], "i", 1, &event, 1);
			must(write(pairs[n][0], "before", 6) == 6);
			give(pairs[n][0], "with", 4, (int[]){file, pipe_[0], pipe_[1]}, 3);
			must(write(pairs[n][0], "after", 5) == 5);
			give(pairs[n][0], "x", 1, inner, 2);
			close(pipe_[0]), close(pipe_[1]), close(inner[0]), close(inner[1]), close(event);
			own[n] = pairs[n][1];
			/* The sender of one pair is closed. */
			if (n == round % 3)
				close(pairs[n][0]), pairs[n][0] = -1;
		}
		int many[2], all[253];
		must(socketpair(AF_UNIX, SOCK_DGRAM, 0, many) == 0);
		for (int n = 0; n < 253; n++)
			all[n] = file;
		give(many[0], "m", 1, all, 253);
		ready(round);
		for (int n = 0; n < 3; n++) {
			must(take(own[n], text, 6, &got, fds) == 0 && got == 6 && !memcmp(text, "before", 6));
			must(take(own[n], text, 4, &got, fds) == 3 && got == 4 && !memcmp(text, "with", 4));
			/* The very same open file, with a shared offset. */
			must(lseek(fds[0], 0, SEEK_CUR) == lseek(file, 0, SEEK_CUR));
			must(read(fds[0], text, 1) == 1 && text[0] == '3' + n);
			must(read(fds[1], text, 64) == 5 && memcmp(text, "piped", 5) == 0);
			must(write(fds[2], "more", 4) == 4 && read(fds[1], text, 64) == 4);
			for (int i = 0; i < 3; i++)
				close(fds[i]);
			must(take(own[n], text, 5, &got, fds) == 0 && got == 5 && !memcmp(text, "after", 5));
			must(take(own[n], text, 64, &got, fds) == 2 && got == 1 && text[0] == 'x');
			int inner[2] = {fds[0], fds[1]};
			must(take(inner[1], text, 64, &got, fds) == 1 && text[0] == 'i');
			uint64_t value;
			must(read(fds[0], &value, 8) == 8 && value == 7 + (uint64_t)n);
			must(write(inner[1], "y", 1) == 1 && read(inner[0], text, 1) == 1);
			close(fds[0]), close(inner[0]), close(inner[1]), close(own[n]);
			if (pairs[n][0] >= 0)
				close(pairs[n][0]);
		}
		must(take(many[1], text, 64, &got, fds) == 253);
		for (int n = 0; n < 253; n++)
			must(lseek(fds[n], 0, SEEK_CUR) == 6 && close(fds[n]) == 0);
		close(many[0]), close(many[1]), close(file);
	}
	ok();
}
