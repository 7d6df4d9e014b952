/* State that is refused: resources that are shared or are not, in an unusual way, Landlock domains, TCP connections.
 * SHARES selects it. */
#include "workload.h"
#include <pthread.h>
#include <sched.h>
#include <linux/filter.h>
#include <netinet/tcp.h>
#include <sys/prctl.h>
#include <sys/socket.h>

static char stack[65536] __attribute__((aligned(16)));
static volatile int is_apart;

static int child(void *arg) {
	for (;;)
		nap(1000);
	return arg != 0;
}

static void *with_descriptors(void *arg) {
	/* A child that shares them with this thread alone. */
	must(unshare(CLONE_FILES) == 0);
	pid_t pid = syscall(SYS_clone, CLONE_FILES | SIGCHLD, 0, 0, 0, 0);
	must(pid >= 0);
	is_apart = pid != 0;
	child(0);
	return arg;
}

/* linux/landlock.h: to make sockets is restricted. */
static void *restricted(void *arg) {
	uint64_t rights = 1 << 9;
	int rules = syscall(444, &rights, sizeof rights, 0);
	must(rules >= 0 && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
	must(syscall(446, rules, 0) == 0 && close(rules) == 0);
	is_apart = 1;
	if (arg)
		child(0);
	return arg;
}

/* A connection with a byte out of band: unread, or read with the mark still ahead of other data. */
static void urgent(int is_read) {
	struct sockaddr_storage a;
	socklen_t size = loopback(&a, AF_INET, 7100);
	int listener = socket(AF_INET, SOCK_STREAM, 0), from = socket(AF_INET, SOCK_STREAM, 0);
	char c;
	must(bind(listener, (void *)&a, size) == 0 && listen(listener, 5) == 0);
	must(connect(from, (void *)&a, size) == 0);
	int to = accept(listener, 0, 0);
	must(to >= 0 && send(from, "abc", 3, 0) == 3 && send(from, "!", 1, MSG_OOB) == 1);
	must(send(from, "def", 3, 0) == 3);
	while (recv(to, &c, 1, MSG_OOB | MSG_PEEK) != 1)
		nap(1);
	must(!is_read || recv(to, &c, 1, MSG_OOB) == 1);
	nap(100);
}

/* Two processes beside this one, which have one root. */
static void share_root(void) {
	int said[2];
	char c = 0;
	must(pipe(said) == 0 && mkdir("/below", 0755) == 0);
	if (fork() == 0) {
		must(clone(child, stack + sizeof stack, CLONE_FS | SIGCHLD, 0) > 0);
		must(chroot("/below") == 0 && chdir("/") == 0 && write(said[1], &c, 1) == 1);
		child(0);
	}
	must(read(said[0], &c, 1) == 1);
}

static pid_t split(int flags) {
	pid_t pid = syscall(SYS_clone, flags | SIGCHLD, 0, 0, 0, 0);
	must(pid >= 0);
	return pid;
}

/* A process between two pairs that share descriptors across it: this one and a grandchild, and two grandchildren, of
 * which one is a child of this process since its parent has ended. */
static void cross(void) {
	int said[2];
	char c = 0;
	must(pipe(said) == 0);
	if (split(CLONE_FILES) == 0) {
		if (split(CLONE_FILES) == 0)
			child(0);
		must(unshare(CLONE_FILES) == 0);
		if (split(0) == 0) {
			pid_t between = split(CLONE_FILES);
			if (between == 0) {
				if (split(CLONE_FILES) == 0)
					child(0);
				_exit(0);
			}
			must(waitpid(between, 0, 0) == between && write(said[1], &c, 1) == 1);
			child(0);
		}
		child(0);
	}
	must(read(said[0], &c, 1) == 1);
}

/* A listener whose connections keep the headers of their first packet, and one of them. */
static void keeps_request(int is_read) {
	struct sockaddr_storage a;
	socklen_t size = loopback(&a, AF_INET, 7101);
	int listener = socket(AF_INET, SOCK_STREAM, 0), from = socket(AF_INET, SOCK_STREAM, 0), on = 1;
	char headers[256];
	must(setsockopt(listener, IPPROTO_TCP, TCP_SAVE_SYN, &on, sizeof on) == 0);
	must(bind(listener, (void *)&a, size) == 0 && listen(listener, 5) == 0);
	must(connect(from, (void *)&a, size) == 0);
	if (is_read < 0)
		return;
	int to = accept(listener, 0, 0);
	socklen_t got = sizeof headers;
	must(to >= 0);
	must(!is_read || (getsockopt(to, IPPROTO_TCP, TCP_SAVED_SYN, headers, &got) == 0 && got > 0));
}

/* A listener with a key for the segments of one peer. */
static void signs(int family) {
	struct sockaddr_storage a;
	socklen_t size = loopback(&a, family, 7102);
	int listener = socket(family, SOCK_STREAM, 0);
	struct tcp_md5sig key = {.tcpm_keylen = 3, .tcpm_key = "key"};
	memcpy(&key.tcpm_addr, &a, size);
	must(setsockopt(listener, IPPROTO_TCP, TCP_MD5SIG, &key, sizeof key) == 0);
	must(bind(listener, (void *)&a, size) == 0 && listen(listener, 5) == 0);
}

/* Two sockets at one port, and a program that selects the first of them for each client. */
static void distributes(int kind) {
	struct sock_filter first = {BPF_RET | BPF_K, 0, 0, 0};
	struct sock_fprog program = {1, &first};
	struct sockaddr_storage a;
	socklen_t size = loopback(&a, AF_INET, 7103);
	for (int n = 0, on = 1; n < 2; n++) {
		int fd = socket(AF_INET, kind, 0);
		must(setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &on, sizeof on) == 0);
		must(bind(fd, (void *)&a, size) == 0 && (kind == SOCK_DGRAM || listen(fd, 5) == 0));
		must(n || !setsockopt(fd, SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, &program, sizeof program));
	}
}

/* A timer expires while a signal of its number is pending. */
static void queues_twice(void) {
	struct sigevent how = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
	struct itimerspec soon = {{0, 0}, {0, 1000}}, left;
	sigset_t set;
	timer_t timer;
	sigemptyset(&set), sigaddset(&set, SIGUSR1);
	must(sigprocmask(SIG_BLOCK, &set, 0) == 0 && kill(getpid(), SIGUSR1) == 0);
	must(timer_create(CLOCK_MONOTONIC, &how, &timer) == 0 && timer_settime(timer, 0, &soon, 0) == 0);
	do
		must(timer_gettime(timer, &left) == 0);
	while (left.it_value.tv_sec || left.it_value.tv_nsec);
}

int main(void) {
	const char *what = getenv("SHARES");
	int flags = 0;
	pthread_t thread;
	must(what != 0);
	if (!strcmp(what, "memory"))
		flags = CLONE_VM;
	if (!strcmp(what, "root"))
		share_root(), is_apart = 1;
	if (!strcmp(what, "crossed"))
		cross(), is_apart = 1;
	if (flags)
		must(clone(child, stack + sizeof stack, flags | SIGCHLD, 0) > 0);
	if (!strcmp(what, "thread"))
		must(pthread_create(&thread, 0, with_descriptors, 0) == 0);
	if (!strcmp(what, "landlock"))
		restricted(0);
	if (!strcmp(what, "landlock of a thread"))
		must(pthread_create(&thread, 0, restricted, stack) == 0);
	if (!strncmp(what, "urgent", 6))
		urgent(!strcmp(what, "urgent, read")), is_apart = 1;
	if (!strncmp(what, "request", 7))
		keeps_request(strstr(what, "queued") ? -1 : strstr(what, "read") != 0), is_apart = 1;
	if (!strncmp(what, "signed", 6))
		signs(strstr(what, "six") ? AF_INET6 : AF_INET), is_apart = 1;
	if (!strncmp(what, "distributed", 11))
		distributes(strstr(what, "datagrams") ? SOCK_DGRAM : SOCK_STREAM), is_apart = 1;
	if (!strcmp(what, "queued twice"))
		queues_twice(), is_apart = 1;
	while (!flags && !is_apart)
		nap(1);
	ready(0);
	ok();
}
