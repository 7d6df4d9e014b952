/* Programs that their maker has executed from memory (memfd_create(2), fexecve(3)): sealed or not, by itself and in a
 * child, with a descriptor of the memory left open or without one. */
#include "workload.h"

extern char **environ;

/* The program in memory, open for reading alone: what is open for writing cannot be executed (ETXTBSY). */
static int copied(int seals, int how) {
	char part[65536], path[64];
	int memory = memfd_create("program", MFD_ALLOW_SEALING), own = open("/proc/self/exe", O_RDONLY);
	ssize_t n;
	while ((n = read(own, part, sizeof part)) > 0)
		must(write(memory, part, n) == n);
	must(n == 0 && fcntl(memory, F_ADD_SEALS, seals) == 0);
	snprintf(path, sizeof path, "/proc/self/fd/%d", memory);
	int reader = open(path, O_RDONLY | how);
	must(reader >= 0 && close(memory) == 0 && close(own) == 0);
	return reader;
}

static void is_in_memory(void) {
	char name[64] = "";
	must(readlink("/proc/self/exe", name, sizeof name - 1) > 0);
	if (strcmp(name, "/memfd:program (deleted)") != 0)
		print_line("the program is '%s'", name);
	must(strcmp(name, "/memfd:program (deleted)") == 0);
	must(open("/proc/self/exe", O_RDWR) == -1 && (errno == ETXTBSY || errno == EPERM));
}

/* Executes the program from memory, which goes on at a step. */
static void go_on_in_memory(const char *step, int seals, int how) {
	char *words[] = {"/bin/memexe", 0};
	must(setenv("STEP", step, 1) == 0);
	fexecve(copied(seals, how), words, environ);
	must(0);
}

int main(void) {
	const char *step = getenv("STEP");
	char c = 0;
	if (step == 0)
		go_on_in_memory("again", F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL, 0);
	is_in_memory();
	if (strcmp(step, "child") == 0) {
		while (read(0, &c, 1) == 1) {
			is_in_memory();
			must(write(1, &c, 1) == 1);
		}
		_exit(0);
	}
	int ask[2], answer[2];
	must(pipe2(ask, O_CLOEXEC) == 0 && pipe2(answer, O_CLOEXEC) == 0);
	int pid = fork();
	must(pid >= 0);
	if (pid == 0) {
		must(dup2(ask[0], 0) == 0 && dup2(answer[1], 1) == 1);
		go_on_in_memory("child", 0, O_CLOEXEC);
	}
	for (int round = 0; round < ROUNDS; round++) {
		must(write(ask[1], &c, 1) == 1 && read(answer[0], &c, 1) == 1);
		ready(round);
		is_in_memory();
		must(write(ask[1], &c, 1) == 1 && read(answer[0], &c, 1) == 1);
	}
	ok();
}
