/* Named pipes: with data, with both ends, in two processes, and with a blocked open; with data and
 * without a reader; with a removed name. */
#include "workload.h"

int main(void) {
	must(mkfifo("/a", 0640) == 0 && mkfifo("/both", 0600) == 0 && mkfifo("/waits", 0600) == 0);
	int both = open("/both", O_RDWR), reader = open("/a", O_RDONLY | O_NONBLOCK);
	int writer = open("/a", O_WRONLY), ask[2];
	must(both >= 0 && reader >= 0 && writer >= 0 && pipe(ask) == 0);
	must(fcntl(reader, F_SETPIPE_SZ, 1 << 18) == 1 << 18);
	must(write(writer, "kept", 4) == 4 && write(both, "own", 3) == 3);
	if (fork() == 0) {
		char c;
		close(reader);
		while (read(ask[0], &c, 1) == 1)
			must(write(writer, "child", 5) == 5);
		_exit(0);
	}
	int opens = fork();
	if (opens == 0) {
		/* Blocks until there is a writer. */
		char c;
		int fd = open("/waits", O_RDONLY);
		must(fd >= 0 && read(fd, &c, 1) == 1 && c == 'w');
		_exit(7);
	}
	must(mkfifo("/unread", 0600) == 0 && mkfifo("/gone", 0604) == 0);
	int unread = open("/unread", O_RDONLY | O_NONBLOCK), gone = open("/gone", O_RDWR);
	int unread_writer = open("/unread", O_WRONLY), gone_reader = open("/gone", O_RDONLY);
	must(unread_writer >= 0 && gone >= 0 && gone_reader >= 0);
	must(write(unread_writer, "unread", 6) == 6 && close(unread) == 0);
	must(chown("/gone", 5, 6) == 0 && unlink("/gone") == 0);
	for (int round = 0; round < ROUNDS; round++) {
		must(write(gone, "of no name", 10) == 10);
		ready(round);
		unread = open("/unread", O_RDONLY | O_NONBLOCK);
		char found[16];
		must(unread >= 0 && read(unread, found, 16) == 6 && memcmp(found, "unread", 6) == 0);
		must(write(unread_writer, "unread", 6) == 6 && close(unread) == 0);
		must(read(gone_reader, found, 16) == 10 && memcmp(found, "of no name", 10) == 0);
		struct stat s;
		must(access("/gone", F_OK) == -1 && fstat(gone, &s) == 0 && s.st_nlink == 0);
		must(s.st_uid == 5 && s.st_gid == 6 && (s.st_mode & 07777) == 0604);
		char text[16] = "", c;
		must(read(reader, text, 16) == 4 && memcmp(text, "kept", 4) == 0);
		must(read(reader, text, 16) == -1 && errno == EAGAIN);
		must(fcntl(writer, F_GETPIPE_SZ) == 1 << 18);
		must((fcntl(writer, F_GETFL) & (O_ACCMODE | O_NONBLOCK)) == O_WRONLY);
		must((fcntl(both, F_GETFL) & O_ACCMODE) == O_RDWR);
		must(write(ask[1], "x", 1) == 1);
		for (int n = 0; n < 200 && read(reader, &c, 1) != 1; n++)
			nap(5);
		must(c == 'c' && read(reader, text, 16) == 4);
		must(read(both, text, 16) == 3 && write(both, "own", 3) == 3);
		must(write(writer, "kept", 4) == 4);
		/* The name leads to the same pipe. */
		int again = open("/a", O_WRONLY | O_NONBLOCK);
		must(again >= 0 && close(again) == 0 && waitpid(opens, 0, WNOHANG) == 0);
	}
	int status, let = open("/waits", O_WRONLY);
	must(write(let, "w", 1) == 1 && waitpid(opens, &status, 0) == opens);
	must(WEXITSTATUS(status) == 7);
	ok();
}
