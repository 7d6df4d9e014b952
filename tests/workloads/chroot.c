/* A private root (chroot): with a working directory in it and outside of it, with threads and
 * children, and with a socket that was bound before. */
#include "workload.h"
#include <pthread.h>
#include <sys/socket.h>
#include <sys/un.h>

#define WORKERS 3
static int ask[WORKERS][2], answer[WORKERS][2];

static void put(const char *path) {
	int fd = open(path, O_CREAT | O_WRONLY, 0644);
	must(fd >= 0 && close(fd) == 0);
}

static void is_jailed(void) {
	must(access("/inside", F_OK) == 0 && access("/bin", F_OK) == -1 && errno == ENOENT);
	must(access("/../../inside", F_OK) == 0 && access("/proc", F_OK) == -1);
}

static void *check_root(void *arg) {
	is_jailed();
	return arg;
}

/* Checks at each request. */
static void serve(int number, void (*check)(void)) {
	char c;
	while (read(ask[number][0], &c, 1) == 1) {
		is_jailed();
		check();
		must(write(answer[number][1], &c, 1) == 1);
	}
	_exit(0);
}

static int held, bound;

static void in_a_directory(void) {
	char path[64];
	struct stat there, open;
	must(getcwd(path, sizeof path) && strcmp(path, "/in") == 0 && access("deep", F_OK) == 0);
	must(fstat(held, &open) == 0 && stat("/inside", &there) == 0 && open.st_ino == there.st_ino);
}

static void with_threads(void) {
	pthread_t thread;
	must(pthread_create(&thread, 0, check_root, 0) == 0 && pthread_join(thread, 0) == 0);
}

static void outside(void) {
	must(access("jail/inside", F_OK) == 0 && access("bin", F_OK) == 0);
	int caller = accept(bound, 0, 0);
	must(caller >= 0 && write(caller, "h", 1) == 1 && close(caller) == 0);
}

int main(void) {
	for (int n = 0; n < WORKERS; n++)
		must(pipe(ask[n]) == 0 && pipe(answer[n]) == 0);
	must(mkdir("/jail", 0755) == 0 && mkdir("/jail/in", 0755) == 0);
	put("/jail/inside");
	put("/jail/in/deep");
	struct sockaddr_un a = {.sun_family = AF_UNIX, .sun_path = "/socket"};
	if (fork() == 0) {
		must(chroot("/jail") == 0 && chdir("/in") == 0);
		must((held = open("/inside", O_RDONLY)) >= 0);
		if (fork() == 0)
			serve(1, with_threads);
		serve(0, in_a_directory);
	}
	bound = socket(AF_UNIX, SOCK_STREAM, 0);
	must(bind(bound, (void *)&a, sizeof a) == 0 && listen(bound, 3) == 0);
	if (fork() == 0) {
		must(chroot("/jail") == 0);
		serve(2, outside);
	}
	close(bound);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		must(access("/bin", F_OK) == 0 && access("/inside", F_OK) == -1);
		for (int n = 0; n < WORKERS; n++) {
			char c;
			must(write(ask[n][1], "x", 1) == 1);
			if (n == 2) {
				int s = socket(AF_UNIX, SOCK_STREAM, 0);
				must(connect(s, (void *)&a, sizeof a) == 0 && read(s, &c, 1) == 1 && c == 'h');
				close(s);
			}
			must(read(answer[n][0], &c, 1) == 1 && c == 'x');
		}
	}
	ok();
}
