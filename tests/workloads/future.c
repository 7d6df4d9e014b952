/* Settings of a process for memory that it maps later: mlockall(MCL_FUTURE), also MCL_ONFAULT, and huge pages of
 * advised areas only. Areas locked by mlock2(MLOCK_ONFAULT), without access, and beyond the end of their file. */
#include "workload.h"
#include <sys/prctl.h>

#define AREA 65536

/* Whether an area is locked, and whether that is on a fault only. */
static void flags_of(void *area, int *locked, int *on_fault) {
	FILE *f = fopen("/proc/self/smaps", "r");
	char line[512];
	int is = 0;
	*locked = *on_fault = 0;
	must(f != 0);
	while (fgets(line, sizeof line, f)) {
		unsigned long start, end;
		if (sscanf(line, "%lx-%lx ", &start, &end) == 2)
			is = start <= (unsigned long)area && (unsigned long)area < end;
		if (!is || strncmp(line, "VmFlags:", 8))
			continue;
		*locked = strstr(line, " lo") != 0, *on_fault = strstr(line, " lf") != 0;
	}
	fclose(f);
}

static char *map(int access) {
	char *area = mmap(0, AREA, access, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	must(area != MAP_FAILED);
	return area;
}

/* How memory that is mapped now is locked: not, whole, or on a fault. */
static int new_memory_is(void) {
	int locked, on_fault;
	unsigned char there[AREA / 4096];
	char *area = map(PROT_READ | PROT_WRITE);
	flags_of(area, &locked, &on_fault);
	must(mincore(area, AREA, there) == 0);
	must((there[3] & 1) == (locked && !on_fault) && munmap(area, AREA) == 0);
	return locked + on_fault;
}

int main(void) {
	static const int settings[3] = {0, MCL_FUTURE, MCL_FUTURE | MCL_ONFAULT};
	/* KERNEL(6.18): PR_THP_DISABLE_EXCEPT_ADVISED. */
	int is_advised = prctl(PR_SET_THP_DISABLE, 1, 2, 0, 0) == 0;
	must(!is_advised || prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0) == 3);
	char *lazy = map(PROT_READ | PROT_WRITE);
	must(mlock2(lazy, AREA, MLOCK_ONFAULT) == 0);
	lazy[0] = 'l';
	/* ENOMEM: locked, and not present. */
	char *closed = map(PROT_NONE);
	must(mlock(closed, AREA) == -1 && errno == ENOMEM);
	FILE *file = tmpfile();
	must(file != 0 && fputc('f', file) == 'f' && fflush(file) == 0);
	char *longer = mmap(0, AREA, PROT_READ, MAP_PRIVATE, fileno(file), 0);
	must(longer != MAP_FAILED && mlock(longer, AREA) == -1);
	int ends[2];
	must(pipe(ends) == 0);
	pid_t children[3];
	for (int n = 0; n < 3; n++) {
		children[n] = fork();
		must(children[n] >= 0);
		if (children[n] == 0) {
			char c;
			must(settings[n] == 0 || mlockall(settings[n]) == 0);
			must(new_memory_is() == n && close(ends[1]) == 0);
			must(read(ends[0], &c, 1) == 0);
			must(new_memory_is() == n);
			must(munlockall() == 0 && new_memory_is() == 0);
			_exit(7);
		}
	}
	for (int round = 0; round < ROUNDS; round++) {
		int locked, on_fault;
		unsigned char there[AREA / 4096];
		ready(round);
		must(!is_advised || prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0) == 3);
		flags_of(lazy, &locked, &on_fault);
		must(locked && on_fault && lazy[0] == 'l');
		flags_of(closed, &locked, &on_fault);
		must(locked && !on_fault);
		flags_of(longer, &locked, &on_fault);
		must(locked && !on_fault && longer[0] == 'f');
		must(mincore(lazy, AREA, there) == 0 && (there[0] & 1) && !(there[2] & 1));
	}
	int status;
	must(close(ends[1]) == 0);
	for (int n = 0; n < 3; n++)
		must(waitpid(children[n], &status, 0) == children[n] && WEXITSTATUS(status) == 7);
	ok();
}
