/* memfds: shared between processes, mapped in either way, sparse, sealed. */
#include "workload.h"

int main(void) {
	int plain = memfd_create("plain", MFD_CLOEXEC), far = memfd_create("a name", MFD_ALLOW_SEALING);
	int sealed = memfd_create("sealed", MFD_ALLOW_SEALING), future = memfd_create("future", 2);
	int gone = memfd_create("mapped only", 0);
	must(plain >= 0 && far >= 0 && sealed >= 0 && future >= 0 && gone >= 0);
	must(ftruncate(plain, 3 << 20) == 0 && pwrite(plain, "plain", 5, 2 << 20) == 5);
	must(pwrite(far, "odd", 3, 7000000) == 3 && lseek(far, 7, SEEK_SET) == 7);
	must(write(sealed, "for ever", 8) == 8 && ftruncate(future, 8192) == 0);
	int *shared = mmap(0, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, future, 0);
	must(shared != MAP_FAILED);
	must(fcntl(sealed, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL) == 0);
	must(fcntl(future, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK) == 0);
	char *fixed = mmap(0, 4096, PROT_READ, MAP_SHARED, sealed, 0);
	char *own = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE, sealed, 0);
	must(ftruncate(gone, 4096) == 0);
	int *only = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, gone, 0);
	must(fixed != MAP_FAILED && own != MAP_FAILED && only != MAP_FAILED && close(gone) == 0);
	own[0] = 'F';
	char name[32];
	snprintf(name, sizeof name, "/proc/self/fd/%d", far);
	int again = open(name, O_RDONLY), ask[2], answer[2];
	must(again >= 0 && pipe(ask) == 0 && pipe(answer) == 0);
	if (fork() == 0) {
		char c;
		while (read(ask[0], &c, 1) == 1) {
			shared[1] = ++shared[0];
			only[0] += 10;
			must(pwrite(plain, &c, 1, 0) == 1 && write(answer[1], &c, 1) == 1);
		}
		_exit(0);
	}
	/* The seals of these are compared by the records. */
	int last = memfd_create("mapped by one", MFD_ALLOW_SEALING), read_only = memfd_create("read", MFD_ALLOW_SEALING);
	must(last >= 0 && read_only >= 0 && ftruncate(last, 4096) == 0 && ftruncate(read_only, 4096) == 0);
	int *late = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, last, 0);
	must(fcntl(last, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_GROW) == 0);
	must(fcntl(read_only, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) == 0);
	must(late != MAP_FAILED && mmap(0, 4096, PROT_READ, MAP_PRIVATE, read_only, 0) != MAP_FAILED);
	must(close(last) == 0 && close(read_only) == 0);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		char c = 'a' + round, got;
		must(write(ask[1], &c, 1) == 1 && read(answer[0], &got, 1) == 1);
		must(++*late == round + 1);
		must(shared[0] == round + 1 && shared[1] == round + 1 && only[0] == 10 * (round + 1));
		must(pread(plain, &got, 1, 0) == 1 && got == c);
		char text[8] = "";
		struct stat st;
		must(pread(plain, text, 5, 2 << 20) == 5 && strcmp(text, "plain") == 0);
		must(fstat(plain, &st) == 0 && st.st_size == 3 << 20 && st.st_blocks <= 2 * 8);
		must(fcntl(plain, F_GETFD) == FD_CLOEXEC && fcntl(plain, F_GET_SEALS) == F_SEAL_SEAL);
		must(fstat(far, &st) == 0 && st.st_size == 7000003 && lseek(far, 0, SEEK_CUR) == 7);
		must(fcntl(far, F_GET_SEALS) == 0 && (fcntl(again, F_GETFL) & O_ACCMODE) == O_RDONLY);
		must(pwrite(far, &c, 1, 1) == 1 && pread(again, &got, 1, 1) == 1 && got == c);
		must(fcntl(sealed, F_GET_SEALS) ==
		     (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL));
		must(pwrite(sealed, "x", 1, 0) == -1 && errno == EPERM);
		must(fixed[0] == 'f' && own[0] == 'F' && own[1] == 'o');
		must(mprotect(fixed, 4096, PROT_READ | PROT_WRITE) == -1 && errno == EACCES);
		must(fcntl(future, F_GET_SEALS) == (F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK));
		must(pwrite(future, "x", 1, 0) == -1 && errno == EPERM);
		char link[64];
		snprintf(name, sizeof name, "/proc/self/fd/%d", far);
		must(readlink(name, link, 64) == 23 && memcmp(link, "/memfd:a name (deleted)", 23) == 0);
	}
	ok();
}
