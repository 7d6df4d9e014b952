/* Private user namespaces, like those of systemd services and of sandboxes: made by root with
 * several ids from its parent, by a user with its own id alone, nested without a process in the
 * outer, without ids; with threads, several processes, groups, capabilities and securebits; with a
 * private root, which needs no further rights; and MANY further ones, each with a process. */
#include "workload.h"
#include <grp.h>
#include <linux/nsfs.h>
#include <linux/securebits.h>
#include <pthread.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>

#define TEXT 4096

/* The lines of a file that must stay the same. */
static int add(char *text, int at, const char *path, const char *const *wanted) {
	char line[512];
	FILE *f = fopen(path, "r");
	must(f);
	while (fgets(line, sizeof line, f)) {
		int is_wanted = !wanted;
		for (int n = 0; wanted && wanted[n]; n++)
			is_wanted |= !strncmp(line, wanted[n], strlen(wanted[n]));
		if (is_wanted)
			at += snprintf(text + at, TEXT - at, "%s", line);
	}
	fclose(f);
	return at;
}

static void read_state(char *text) {
	static const char *const kept[] = {"Name:",   "Pid:", "Uid:",	   "Gid:",
					   "Groups:", "Cap",  "NoNewPrivs:", 0};
	memset(text, 0, TEXT);
	int at = add(text, 0, "/proc/thread-self/status", kept);
	at = add(text, at, "/proc/thread-self/uid_map", 0);
	at = add(text, at, "/proc/thread-self/gid_map", 0);
	at = add(text, at, "/proc/thread-self/setgroups", 0);
	snprintf(text + at, TEXT - at, "securebits %d dumpable %d", prctl(PR_GET_SECUREBITS),
		 prctl(PR_GET_DUMPABLE));
}

enum { PLACES = 12 };
static int ask[PLACES][2], answer[PLACES][2];
static char before[PLACES][TEXT], after[TEXT];
static int used;

static void serve(int place) {
	char c, text[TEXT];
	while (read(ask[place][0], &c, 1) == 1) {
		read_state(text);
		must(write(answer[place][1], text, TEXT) == TEXT);
	}
}

static void *serve_as_thread(void *place) {
	char name[16];
	snprintf(name, sizeof name, "thread %d", (int)(intptr_t)place);
	prctl(PR_SET_NAME, name);
	serve((intptr_t)place);
	return 0;
}

static void receive(int place, char *text) {
	for (int got = 0, n; got < TEXT; got += n)
		must((n = read(answer[place][0], text + got, TEXT - got)) > 0);
}

static void put(const char *format, const char *content, ...) {
	char path[64];
	va_list args;
	va_start(args, content);
	vsnprintf(path, sizeof path, format, args);
	va_end(args);
	int fd = open(path, O_WRONLY);
	must(fd >= 0 && write(fd, content, strlen(content)) == (ssize_t)strlen(content));
	close(fd);
}

static void become(uid_t id) {
	must(setgroups(2, (gid_t[]){7, id + 1}) == 0);
	must(setresgid(id, id, id) == 0 && setresuid(id, id, id) == 0);
	must(prctl(PR_SET_DUMPABLE, 1) == 0);
}

static void leave(void) {
	must(unshare(CLONE_NEWUSER) == 0 && prctl(PR_SET_DUMPABLE, 1) == 0);
}

/* Like a service of systemd (PrivateUsers=yes): root and the service's user, mapped by the
 * parent. */
static pid_t service(int place, int denied) {
	int made[2], mapped[2];
	char c;
	must(pipe(made) == 0 && pipe(mapped) == 0);
	pid_t pid = fork();
	if (pid == 0) {
		leave();
		must(write(made[1], "", 1) == 1 && read(mapped[0], &c, 1) == 1);
		if (!denied)
			must(setgroups(1, (gid_t[]){33}) == 0);
		must(prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP | SECBIT_KEEP_CAPS_LOCKED) == 0);
		must(setresgid(33, 33, 33) == 0 && setresuid(33, 33, denied ? 0 : 33) == 0);
		must(prctl(PR_CAPBSET_DROP, 21) == 0);
		must(!denied || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
		/* The other process is not dumpable, so it cannot be inspected. */
		must(denied || prctl(PR_SET_DUMPABLE, 1) == 0);
		serve(place);
		_exit(0);
	}
	must(read(made[0], &c, 1) == 1);
	if (denied)
		put("/proc/%d/setgroups", "deny", pid);
	put("/proc/%d/uid_map", "0 0 1\n33 33 1\n", pid);
	put("/proc/%d/gid_map", "0 0 1\n33 33 1\n", pid);
	must(write(mapped[1], "", 1) == 1);
	close(made[0]), close(made[1]), close(mapped[0]), close(mapped[1]);
	return pid;
}

/* The mappings that a user may set itself. */
static void map(const char *users, const char *groups) {
	put("/proc/self/setgroups", "deny");
	put("/proc/self/uid_map", users);
	put("/proc/self/gid_map", groups);
}

/* Like `unshare -Ur` of a user, with threads and a child. */
static pid_t sandbox(int place) {
	pid_t pid = fork();
	if (pid)
		return pid;
	become(1000);
	leave();
	map("0 1000 1", "0 1000 1");
	if (fork() == 0) {
		serve(place);
		_exit(0);
	}
	pthread_t threads[2];
	for (int n = 0; n < 2; n++)
		must(pthread_create(&threads[n], 0, serve_as_thread, (void *)(intptr_t)(place + 1 + n)) == 0);
	serve(place + 3);
	_exit(0);
}

/* Nested in a namespace without processes, with an id that is not mapped in the inner. */
static pid_t nested(int place) {
	pid_t pid = fork();
	if (pid)
		return pid;
	become(1001);
	leave();
	map("3 1001 1", "4 1001 1");
	leave();
	put("/proc/self/uid_map", "5 3 1");
	pthread_t thread;
	must(pthread_create(&thread, 0, serve_as_thread, (void *)(intptr_t)(place + 1)) == 0);
	serve(place);
	_exit(0);
}

/* Without any ids. */
static pid_t unmapped(int place) {
	pid_t pid = fork();
	if (pid)
		return pid;
	become(1002);
	leave();
	serve(place);
	_exit(0);
}

/* With a private root. */
static pid_t jailed(int place) {
	must(mkdir("/jail", 0755) == 0);
	int mark = open("/jail/mark", O_CREAT | O_WRONLY, 0644);
	must(mark >= 0 && close(mark) == 0);
	pid_t pid = fork();
	if (pid)
		return pid;
	become(1004);
	leave();
	must(chroot("/jail") == 0 && chdir("/") == 0);
	char c, text[TEXT];
	while (read(ask[place][0], &c, 1) == 1) {
		memset(text, 0, TEXT);
		snprintf(text, TEXT, "mark %d bin %d", access("/../mark", F_OK), access("/bin", F_OK));
		must(write(answer[place][1], text, TEXT) == TEXT);
	}
	_exit(0);
}

/* Like `unshare -Ur` of root, once more. */
static pid_t one_more(int n) {
	int made[2];
	char c;
	must(pipe(made) == 0);
	pid_t pid = fork();
	if (pid == 0) {
		if (n % 2)
			become(1005);
		char own[32];
		snprintf(own, sizeof own, "0 %d 1", getuid());
		leave();
		map(own, own);
		must(write(made[1], "", 1) == 1);
		close(made[0]), close(made[1]);
		for (;;)
			pause();
	}
	must(pid > 0 && read(made[0], &c, 1) == 1);
	close(made[0]), close(made[1]);
	return pid;
}

static ino_t inode(int fd) {
	struct stat s;
	must(fd >= 0 && fstat(fd, &s) == 0);
	return s.st_ino;
}

/* Whether the own user namespace is `depth` levels above that of a process, all made by one user;
 * if permitted. */
static int is_below(int depth, pid_t pid, uid_t owner) {
	char path[64];
	snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
	int at = open(path, O_RDONLY), count = 0;
	if (at < 0 && errno == EACCES && !getenv("LOOKS"))
		return 1;
	int own = open("/proc/self/ns/user", O_RDONLY);
	while (inode(at) != inode(own)) {
		uid_t by;
		must(ioctl(at, NS_GET_OWNER_UID, &by) == 0 && by == owner);
		int up = ioctl(at, NS_GET_PARENT);
		must(up >= 0);
		close(at);
		at = up;
		must(++count < 8);
	}
	close(own), close(at);
	return count == depth;
}

int main(void) {
	for (int n = 0; n < PLACES; n++)
		must(pipe(ask[n]) == 0 && pipe(answer[n]) == 0);
	pid_t yes = service(used, 0), denied = service(used + 1, 1), user = sandbox(used + 2);
	pid_t inner = nested(used + 6), none = unmapped(used + 8);
	used = 9;
	if (getenv("ROOT"))
		jailed(used++);
	const char *many = getenv("MANY");
	for (int n = 0; n < (many ? atoi(many) : 0); n++)
		one_more(n);
	for (int n = 0; n < used; n++) {
		must(write(ask[n][1], "", 1) == 1);
		receive(n, before[n]);
	}
	for (int round = 0; round < ROUNDS; round++) {
		/* The restore waits for a helper of its own after this is set. */
		struct sigaction alone = {.sa_handler = SIG_DFL, .sa_flags = SA_NOCLDWAIT}, now;
		must(sigaction(SIGCHLD, &alone, NULL) == 0);
		ready(round);
		must(sigaction(SIGCHLD, NULL, &now) == 0 && now.sa_flags & SA_NOCLDWAIT);
		must(signal(SIGCHLD, SIG_DFL) != SIG_ERR);
		for (int n = 0; n < used; n++) {
			must(write(ask[n][1], "", 1) == 1);
			receive(n, after);
			if (strcmp(before[n], after))
				print_line("place %d before:\n%.220s\nafter:\n%.220s", n, before[n], after);
			must(strcmp(before[n], after) == 0);
		}
		must(is_below(1, yes, 0) && is_below(1, user, 1000) && is_below(2, inner, 1001));
		must(is_below(1, none, 1002) && kill(denied, 0) == 0);
		/* Namespaces can still be made there. */
		pid_t another = fork();
		if (another == 0) {
			become(1003);
			leave();
			put("/proc/self/uid_map", "0 1003 1");
			_exit(0);
		}
		int status;
		must(waitpid(another, &status, 0) == another && status == 0);
	}
	ok();
}
