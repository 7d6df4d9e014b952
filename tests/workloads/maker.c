/* Owner and permissions of sockets and pipes: of the user that has made them, or as they were changed since. */
#include "workload.h"
#include <sys/fsuid.h>
#include <sys/socket.h>

#define FILES_MAX 32
static int files[FILES_MAX], count;
static struct stat first[FILES_MAX];

static void keep(int fd) {
	must(fd >= 0 && count < FILES_MAX && fstat(fd, &first[count]) == 0);
	files[count++] = fd;
}

static void make(void) {
	static const int kinds[][3] = {
		{AF_INET, SOCK_STREAM, 0},
		{AF_INET, SOCK_DGRAM, 0},
		{AF_INET6, SOCK_STREAM, 0},
		{AF_INET6, SOCK_DGRAM, 0},
		{AF_UNIX, SOCK_DGRAM, 0},
		{AF_NETLINK, SOCK_RAW, 0},
	};
	for (unsigned n = 0; n < sizeof kinds / sizeof *kinds; n++)
		keep(socket(kinds[n][0], kinds[n][1], kinds[n][2]));
	int ends[2];
	must(pipe(ends) == 0);
	keep(ends[0]), keep(ends[1]);
	must(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
	keep(ends[0]), keep(ends[1]);
}

int main(void) {
	struct sockaddr_storage a;
	make();
	setfsgid(34), setfsuid(12);
	make();
	int listener = socket(AF_INET, SOCK_STREAM, 0);
	socklen_t size = loopback(&a, AF_INET, 8123);
	must(bind(listener, (void *)&a, size) == 0 && listen(listener, 5) == 0);
	keep(listener);
	setfsuid(0), setfsgid(0);
	int ends[2], changed = socket(AF_INET, SOCK_DGRAM, 0);
	must(pipe(ends) == 0 && fchown(ends[0], 56, 78) == 0 && fchmod(ends[1], 0622) == 0);
	must(fchown(changed, 90, 12) == 0);
	keep(ends[0]), keep(ends[1]), keep(changed);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		for (int n = 0; n < count; n++) {
			struct stat s;
			must(fstat(files[n], &s) == 0);
			must(s.st_uid == first[n].st_uid && s.st_gid == first[n].st_gid);
			must(s.st_mode == first[n].st_mode);
		}
	}
	ok();
}
