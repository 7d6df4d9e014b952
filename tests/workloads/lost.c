/* What a restore could not make again: HAS says which. */
#include "workload.h"
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/un.h>

static int child(void) {
	int pid = fork();
	must(pid >= 0);
	if (pid == 0)
		for (;;)
			nap(1000);
	return pid;
}

int main(void) {
	const char *what = getenv("HAS");
	char path[64];
	must(what != 0);
	mkdir("/tmp", 0777);
	if (!strcmp(what, "ended")) {
		int pid = child();
		snprintf(path, sizeof path, "/proc/%d/status", pid);
		must(open(path, O_RDONLY) >= 0);
		must(kill(pid, SIGKILL) == 0 && waitpid(pid, 0, 0) == pid);
	}
	/* A restore cannot open these: the tasks that it makes may not look at each other. */
	if (!strcmp(what, "maps") || !strcmp(what, "fdinfo") || !strcmp(what, "oom_score_adj")) {
		snprintf(path, sizeof path, "/proc/%d/%s", child(), what);
		must(open(path, *what == 'o' ? O_RDWR : O_RDONLY) >= 0);
	}
	/* Clients find it by the new name of its directory. */
	if (!strcmp(what, "renamed")) {
		struct sockaddr_un name = {.sun_family = AF_UNIX, .sun_path = "/tmp/old/socket"};
		int listener = socket(AF_UNIX, SOCK_STREAM, 0);
		must(mkdir("/tmp/old", 0700) == 0 && bind(listener, (void *)&name, sizeof name) == 0);
		must(listen(listener, 1) == 0 && rename("/tmp/old", "/tmp/new") == 0);
	}
	/* A later mount covers the place. */
	if (!strncmp(what, "covered", 7)) {
		struct sockaddr_un name = {.sun_family = AF_UNIX, .sun_path = "/tmp/place/socket"};
		must(mkdir("/tmp/place", 0700) == 0);
		if (!strcmp(what, "covered socket")) {
			int listener = socket(AF_UNIX, SOCK_STREAM, 0);
			must(bind(listener, (void *)&name, sizeof name) == 0 && listen(listener, 1) == 0);
		} else {
			make_file("/tmp/place/file", "text");
			must(open(!strcmp(what, "covered file") ? "/tmp/place/file" : "/tmp/place", O_RDONLY) >= 0);
		}
		must(mount("cover", "/tmp/place", "tmpfs", 0, 0) == 0);
	}
	if (!strcmp(what, "read-only"))
		must(mkdir("/tmp/place", 0700) == 0 && mount("none", "/tmp/place", "tmpfs", MS_RDONLY, 0) == 0);
	if (!strcmp(what, "foreign"))
		must(mkdir("/tmp/place", 0700) == 0 && mount("none", "/tmp/place", "sysfs", 0, 0) == 0);
	if (!strcmp(what, "part")) {
		/* Of its tmpfs nothing else is mounted. */
		must(mkdir("/tmp/place", 0700) == 0 && mount("none", "/tmp/place", "tmpfs", 0, 0) == 0);
		must(mkdir("/tmp/place/part", 0700) == 0 && mkdir("/tmp/other", 0700) == 0);
		must(mount("/tmp/place/part", "/tmp/other", 0, MS_BIND, 0) == 0 && umount("/tmp/place") == 0);
	}
	if (!strcmp(what, "changes")) {
		must(mkdir("/tmp/place", 0700) == 0);
		must(fcntl(open("/tmp/place", O_RDONLY), F_NOTIFY, DN_CREATE | DN_MULTISHOT) == 0);
	}
	if (!strcmp(what, "secret"))
		must(syscall(SYS_memfd_secret, 0) >= 0);
	/* Its own procfs is not below its root. */
	if (!strcmp(what, "login")) {
		write_text("/proc/self/loginuid", "7");
		must(chroot("/tmp") == 0);
		print_line("ready 0");
		for (;;)
			pause();
	}
	if (!strcmp(what, "thread")) {
		int pid = child();
		snprintf(path, sizeof path, "/proc/%d/task/%d/status", pid, pid);
		must(open(path, O_RDONLY) >= 0);
	}
	if (!strcmp(what, "numbers")) {
		struct rlimit limit = {600, 600};
		must(setrlimit(RLIMIT_NOFILE, &limit) == 0);
		for (int n = 0; n < 200; n++) {
			int ends[2];
			must(pipe(ends) == 0);
		}
		/* Each of them is open twice. */
		child();
	}
	/* A mount at a place that is not there when the container starts. */
	if (!strcmp(what, "place")) {
		must(close(open("/dev/own", O_CREAT | O_WRONLY, 0600)) == 0);
		must(mount("/dev/null", "/dev/own", 0, MS_BIND, 0) == 0);
	}
	/* Memory that is removed with the end of its maker. */
	if (!strcmp(what, "loose")) {
		must(shmget(IPC_PRIVATE, 4096, 0600) >= 0);
		write_text("/proc/sys/kernel/shm_rmid_forced", "1\n");
	}
	if (!strcmp(what, "keyring"))
		must(syscall(SYS_keyctl, 1 /* KEYCTL_JOIN_SESSION_KEYRING */, "ring of mine") > 0);
	if (!strcmp(what, "key")) {
		must(syscall(SYS_keyctl, 1 /* KEYCTL_JOIN_SESSION_KEYRING */, 0) > 0);
		must(syscall(SYS_add_key, "user", "secret of mine", "x", 1, -3 /* the session's */) > 0);
	}
	/* Of the first process itself it is there again, with its owner. */
	int own = -1;
	if (!strcmp(what, "own"))
		must((own = open("/proc/self/status", O_RDONLY)) >= 0);
	ready(0);
	struct stat st;
	must(own < 0 || (fstat(own, &st) == 0 && st.st_uid == 0 && st.st_gid == 0));
	ok();
}
