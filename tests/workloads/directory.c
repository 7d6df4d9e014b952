/* Directories in the middle of a read, O_PATH descriptors of everything, and append. */
#include "workload.h"
#include <dirent.h>

#define FILES 400

int main(void) {
	char path[64], seen[FILES] = {0};
	must(mkdir("/many", 0755) == 0);
	for (int n = 0; n < FILES; n++) {
		snprintf(path, sizeof path, "/many/%d", n);
		must(close(open(path, O_CREAT | O_WRONLY, 0600)) == 0);
	}
	must(symlink("/many", "/link") == 0 && mkfifo("/fifo", 0600) == 0);
	int link = open("/link", O_PATH | O_NOFOLLOW), fifo = open("/fifo", O_PATH);
	int file = open("/many/7", O_PATH), null = open("/dev/null", O_PATH);
	int log = open("/many/8", O_RDWR | O_APPEND);
	int dir = open("/many", O_RDONLY | O_DIRECTORY);
	must(link >= 0 && fifo >= 0 && file >= 0 && null >= 0 && log >= 0 && dir >= 0);
	int count = 0;
	for (int round = 0; round <= ROUNDS; round++) {
		/* A part of it in each round. The C library would read ahead. */
		char buffer[1024];
		long length = 1;
		while (length > 0 && (round == ROUNDS || count < (round + 1) * FILES / (ROUNDS + 2))) {
			length = syscall(SYS_getdents64, dir, buffer, sizeof buffer);
			must(length >= 0);
			for (long at = 0; at < length;) {
				struct dirent *entry = (void *)(buffer + at);
				at += entry->d_reclen;
				if (entry->d_name[0] == '.')
					continue;
				int n = atoi(entry->d_name);
				must(n < FILES && !seen[n]);
				seen[n] = 1;
				count++;
			}
		}
		if (round == ROUNDS)
			break;
		ready(round);
		struct stat st;
		must(fstat(link, &st) == 0 && S_ISLNK(st.st_mode));
		must(readlinkat(link, "", path, sizeof path) == 5 && memcmp(path, "/many", 5) == 0);
		must(fstat(fifo, &st) == 0 && S_ISFIFO(st.st_mode));
		must(fstat(null, &st) == 0 && S_ISCHR(st.st_mode));
		must(fstat(file, &st) == 0 && S_ISREG(st.st_mode) && read(file, path, 1) == -1);
		must(pwrite(log, "a", 1, 0) == 1 && fstat(log, &st) == 0 && st.st_size == round + 1);
	}
	must(count == FILES);
	ok();
}
