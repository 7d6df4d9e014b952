/* Requests of a process about its memory: advice, locks, stacks that grow. */
#include "workload.h"
#include <sys/prctl.h>

#define AREAS 10
#define SIZE 16384
static char *areas[AREAS];

/* The flags of an area in smaps, limited to those under test. */
static void flags_of(void *area, char *out, size_t size) {
	FILE *f = fopen("/proc/self/smaps", "r");
	char line[512];
	int is = 0;
	out[0] = 0;
	while (f && fgets(line, sizeof line, f)) {
		unsigned long start, end;
		if (sscanf(line, "%lx-%lx ", &start, &end) == 2)
			is = start <= (unsigned long)area && (unsigned long)area < end;
		if (!is || strncmp(line, "VmFlags:", 8))
			continue;
		for (char *word = strtok(line + 8, " \n"); word; word = strtok(0, " \n"))
			if (strstr("gd dc dd wf hg nh mg lo nr rd wr ex rr sr", word))
				snprintf(out + strlen(out), size - strlen(out), "%s ", word);
	}
	fclose(f);
}

static char *map(int more) {
	char *area = mmap(0, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | more, -1, 0);
	must(area != MAP_FAILED);
	/* A page without access separates the areas. */
	must(mmap(0, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED);
	area[SIZE - 1] = 's';
	return area;
}

int main(void) {
	static const int advice[] = {MADV_DONTFORK, MADV_DONTDUMP, MADV_WIPEONFORK, MADV_HUGEPAGE,
				     MADV_NOHUGEPAGE, MADV_MERGEABLE};
	char before[AREAS][128], after[128];
	for (int n = 0; n < 6; n++) {
		areas[n] = map(0);
		/* Kernels without one of them return EINVAL. */
		must(madvise(areas[n], SIZE, advice[n]) == 0 || errno == EINVAL);
	}
	areas[6] = map(MAP_NORESERVE);
	must(mlock(areas[6], SIZE) == 0);
	/* A stack with free space below it. The lower half keeps the next areas away: a stack does not grow to within
	 * 1 MB of memory that is accessible (stack_guard_gap). */
	char *room = mmap(0, 1 << 21, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	must(room != MAP_FAILED && munmap(room + (1 << 20), 1 << 20) == 0);
	areas[7] = mmap(room + (1 << 21) - SIZE, SIZE, PROT_READ | PROT_WRITE,
			MAP_PRIVATE | MAP_ANONYMOUS | MAP_GROWSDOWN | MAP_FIXED, -1, 0);
	must(areas[7] != MAP_FAILED);
	areas[8] = map(0);
	areas[9] = map(0);
	must(madvise(areas[8], SIZE, MADV_RANDOM) == 0 && madvise(areas[9], SIZE, MADV_SEQUENTIAL) == 0);
	areas[7][SIZE - 1] = 's';
	for (int n = 0; n < AREAS; n++)
		flags_of(areas[n], before[n], sizeof before[n]);
	must(strstr(before[0], "dc") && strstr(before[1], "dd") && strstr(before[2], "wf"));
	must(strstr(before[6], "lo") && strstr(before[7], "gd"));
	/* THP is disabled for this process, but not for its child. */
	must(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
	int ends[2];
	must(pipe(ends) == 0);
	pid_t other = fork();
	must(other >= 0);
	if (other == 0) {
		char word;
		must(prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0) == 0 && close(ends[1]) == 0);
		must(read(ends[0], &word, 1) == 0);
		_exit(prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0) == 0 ? 7 : 8);
	}
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		must(prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0) == 1);
		for (int n = 0; n < AREAS; n++) {
			flags_of(areas[n], after, sizeof after);
			if (strcmp(after, before[n]))
				print_line("area %d was '%s' and is '%s'", n, before[n], after);
			must(strcmp(after, before[n]) == 0 && areas[n][SIZE - 1] == 's');
		}
		/* The stack grows on a write below it. */
		areas[7][-4096 * (round + 1) + 100] = 'g';
		/* A child has no copy of the first area, and zeros in the third. */
		int child = fork(), status;
		if (child == 0) {
			unsigned char found;
			must(mincore(areas[0], 4096, &found) == -1 && errno == ENOMEM);
			_exit(areas[2][SIZE - 1] == 0 ? 5 : 6);
		}
		must(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 5);
	}
	int status;
	must(close(ends[1]) == 0 && waitpid(other, &status, 0) == other && WEXITSTATUS(status) == 7);
	ok();
}
