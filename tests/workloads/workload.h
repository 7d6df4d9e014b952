/* Common code of all workloads: a workload sets something up, is checkpointed in the middle, and
 * checks.
 *
 * A workload calls ready() when everything is set up. ready() returns when the container has been
 * checkpointed and restored. Then the workload checks with must(), and ends with ok(). There may be
 * any number of rounds. Programs are static, so that they run in any image.
 *
 * The driver (tests/checkpoint.rs) reads "ready N" and "ok" from the container's log, and ends a
 * round by creating the file /go-N. With the variable STILL set, the first round has no end and
 * its process executes nothing: two checkpoints of it must be the same (tests/fixpoint.rs).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Rounds of checkpoint and restore, as the driver sets them. */
static inline int rounds(void) {
	const char *text = getenv("ROUNDS");
	return text == NULL ? 3 : atoi(text);
}
#define ROUNDS rounds()

static inline void print_line(const char *format, ...) {
	char text[512];
	va_list args;
	va_start(args, format);
	int n = vsnprintf(text, sizeof text - 1, format, args);
	va_end(args);
	text[n++] = '\n';
	if (write(1, text, n) != n)
		_exit(99);
}

#define must(condition)                                                                       \
	do {                                                                                  \
		if (!(condition)) {                                                           \
			print_line("failed: line %d: %s (errno %d)", __LINE__, #condition, errno);   \
			_exit(1);                                                             \
		}                                                                             \
	} while (0)

static inline void nap(long ms) {
	struct timespec t = {ms / 1000, ms % 1000 * 1000000};
	while (nanosleep(&t, &t) != 0)
		if (errno != EINTR)
			_exit(98);
}

/* Returns when this round's checkpoint and restore are complete. */
static inline void ready(int round) {
	char path[32];
	snprintf(path, sizeof path, "/go-%d", round);
	print_line("ready %d", round);
	while (getenv("STILL") != NULL)
		pause();
	while (access(path, F_OK) != 0)
		nap(5);
}

static inline void ok(void) {
	print_line("ok");
	exit(0);
}

/* Runs a shell command, and stores its output. */
static inline void output_of(const char *command, char *text, int size) {
	FILE *f = popen(command, "r");
	must(f != 0);
	int n = fread(text, 1, size - 1, f);
	must(n > 0 && pclose(f) == 0);
	text[n] = 0;
}

static inline double now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static inline int64_t ns(struct timespec t) {
	return t.tv_sec * 1000000000ll + t.tv_nsec;
}

/* A clock as read through the vdso. */
static inline int64_t quick(clockid_t clock) {
	struct timespec t;
	must(clock_gettime(clock, &t) == 0);
	return ns(t);
}

/* A clock as read by the system call. */
static inline int64_t slow(clockid_t clock) {
	struct timespec t;
	must(syscall(SYS_clock_gettime, clock, &t) == 0);
	return ns(t);
}

/* Overwrites an existing file. */
static inline void write_text(const char *path, const char *text) {
	int fd = open(path, O_WRONLY);
	must(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text) && close(fd) == 0);
}

/* Makes a file, or replaces its content. */
static inline void make_file(const char *path, const char *text) {
	int fd = open(path, O_CREAT | O_TRUNC | O_WRONLY, 0640);
	must(fd >= 0 && close(fd) == 0);
	write_text(path, text);
}

/* A file contains this text, of at most 63 bytes, and nothing else. */
static inline int has_text(const char *path, const char *text) {
	char got[64] = "";
	int fd = open(path, O_RDONLY);
	if (fd < 0 || read(fd, got, sizeof got - 1) < 0)
		return 0;
	close(fd);
	return strcmp(got, text) == 0;
}

/* A file cannot be made, as its file system is read-only. */
static inline int is_read_only(const char *path) {
	return open(path, O_CREAT | O_WRONLY, 0600) == -1 && errno == EROFS;
}

/* Stores the loopback address of a family; returns its size. */
static inline socklen_t loopback(struct sockaddr_storage *a, int family, int port) {
	memset(a, 0, sizeof *a);
	if (family == AF_INET) {
		struct sockaddr_in *four = (void *)a;
		four->sin_family = AF_INET;
		four->sin_port = htons(port);
		four->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
		return sizeof *four;
	}
	struct sockaddr_in6 *six = (void *)a;
	six->sin6_family = AF_INET6;
	six->sin6_port = htons(port);
	six->sin6_addr = in6addr_loopback;
	return sizeof *six;
}
