/* Times operations of the kernel and prints one line each: NAME NANOSECONDS, the median of ROUNDS
 * loops. The first seven are those of the Zap paper's table, the others follow lmbench's
 * definitions: fork + exit, fork + execve of a program that exits, /bin/sh -c true, a token passed
 * between two processes of one CPU over pipes (on two CPUs the result would be the time of a
 * wake-up), first touch of a private page.
 *
 *   calls [ROUNDS]            without a filter
 *   calls ROUNDS filter       with a filter of one instruction that allows everything
 *   calls exit                exits at once (the program for the time of execve)
 */
#define _GNU_SOURCE
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}

static const char *self;
static int segment, there[2], back[2];

static void op_getpid(void) { syscall(SYS_getpid); }
static void op_getsid(void) { syscall(SYS_getsid, 0); }
static void op_getpgid(void) { syscall(SYS_getpgid, 0); }

static void op_fork(void)
{
	pid_t pid = fork();
	if (!pid)
		_exit(0);
	waitpid(pid, 0, 0);
}

static void spawn(char *const argv[])
{
	pid_t pid = fork();
	if (!pid) {
		execv(argv[0], argv);
		_exit(127);
	}
	int status;
	waitpid(pid, &status, 0);
	if (status) {
		fprintf(stderr, "calls: %s did not run\n", argv[0]);
		exit(1);
	}
}

static void op_exec(void) { spawn((char *[]){ (char *)self, "exit", 0 }); }
static void op_sh(void) { spawn((char *[]){ "/bin/sh", "-c", "true", 0 }); }

static void op_shmget(void)
{
	int id = shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600);
	shmctl(id, IPC_RMID, 0);
}

static void op_shmat(void)
{
	void *p = shmat(segment, 0, 0);
	shmdt(p);
}

static void op_switch(void)
{
	char byte = 0;
	if (write(there[1], &byte, 1) != 1 || read(back[0], &byte, 1) != 1)
		exit(1);
}

enum { PAGES = 512 };
static void op_fault(void)
{
	char *p = mmap(0, PAGES * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	madvise(p, PAGES * 4096, MADV_NOHUGEPAGE);
	for (int i = 0; i < PAGES; i++)
		p[i * 4096] = 1;
	munmap(p, PAGES * 4096);
}

/* Pins a process to the current CPU. */
static void pin(pid_t pid)
{
	cpu_set_t here;
	CPU_ZERO(&here);
	CPU_SET(sched_getcpu(), &here);
	if (sched_setaffinity(pid, sizeof here, &here)) {
		perror("calls: sched_setaffinity");
		exit(1);
	}
}

/* The cheapest possible seccomp filter. */
static void filter(void)
{
	struct sock_filter all = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	struct sock_fprog program = { 1, &all };
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
	    syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program)) {
		perror("calls: seccomp");
		exit(1);
	}
}

static int ascending(const void *a, const void *b)
{
	double x = *(double *)a, y = *(double *)b;
	return x < y ? -1 : x > y;
}

int main(int argc, char **argv)
{
	if (argc > 1 && !strcmp(argv[1], "exit"))
		_exit(0);
	int rounds = argc > 1 ? atoi(argv[1]) : 11;
	if (rounds < 1 || rounds > 1000)
		return fprintf(stderr, "calls: ROUNDS is 1 to 1000\n"), 2;
	if (argc > 2)
		filter();
	self = argv[0];
	segment = shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600);
	if (segment < 0 || pipe(there) || pipe(back))
		return perror("calls"), 1;
	pid_t echo = fork();
	if (!echo) {
		char byte;
		close(there[1]);
		while (read(there[0], &byte, 1) == 1 && write(back[1], &byte, 1) == 1)
			;
		_exit(0);
	}
	static const struct { const char *name; void (*op)(void); int times, per; } all[] = {
		{ "getpid", op_getpid, 100000, 1 }, { "getsid", op_getsid, 100000, 1 },
		{ "getpgid", op_getpgid, 100000, 1 }, { "fork", op_fork, 100, 1 },
		{ "execve", op_exec, 50, 1 }, { "shmget", op_shmget, 2000, 1 },
		{ "shmat", op_shmat, 5000, 1 }, { "sh", op_sh, 20, 1 },
		{ "switch", op_switch, 2000, 2 }, { "fault", op_fault, 5, PAGES },
	};
	static double times[1000];
	for (unsigned i = 0; i < sizeof all / sizeof *all; i++) {
		if (all[i].op == op_switch) {
			pin(0);
			pin(echo);
		}
		for (int r = -1; r < rounds; r++) {
			double start = now();
			for (int n = 0; n < all[i].times; n++)
				all[i].op();
			if (r >= 0)
				times[r] = (now() - start) / all[i].times / all[i].per;
		}
		qsort(times, rounds, sizeof *times, ascending);
		printf("%s %.1f\n", all[i].name, times[rounds / 2]);
	}
	close(there[1]);
	waitpid(echo, 0, 0);
	shmctl(segment, IPC_RMID, 0);
	return 0;
}
