/* Unix sockets whose directory is gone: a listener with connections, a datagram socket with messages from others. */
#include "workload.h"
#include <dirent.h>
#include <sys/socket.h>
#include <sys/un.h>

static struct sockaddr_un name_of(const char *path) {
	struct sockaddr_un name = {.sun_family = AF_UNIX};
	strcpy(name.sun_path, path);
	return name;
}

static int bound(int type, const char *path) {
	struct sockaddr_un name = name_of(path);
	int made = socket(AF_UNIX, type, 0);
	must(made >= 0 && bind(made, (void *)&name, sizeof name) == 0);
	return made;
}

static int connected(int type, const char *path) {
	struct sockaddr_un name = name_of(path);
	int made = socket(AF_UNIX, type, 0);
	must(made >= 0 && connect(made, (void *)&name, sizeof name) == 0);
	return made;
}

static int is_called(int fd, int (*ask)(int, struct sockaddr *, socklen_t *), const char *path) {
	struct sockaddr_un name = {0};
	socklen_t length = sizeof name;
	must(ask(fd, (void *)&name, &length) == 0);
	return strcmp(name.sun_path, path) == 0;
}

/* Names in a directory. */
static int entries(const char *path) {
	DIR *all = opendir(path);
	int n = 0;
	must(all != 0);
	while (readdir(all))
		n++;
	must(closedir(all) == 0);
	return n;
}

int main(void) {
	static const char AT[] = "/tmp/gone/deep/socket", TO[] = "/tmp/gone/to", FROM[] = "/tmp/gone/from";
	mkdir("/tmp", 0777);
	must(mkdir("/tmp/gone", 0700) == 0 && mkdir("/tmp/gone/deep", 0700) == 0);
	int listener = bound(SOCK_STREAM, AT);
	must(listen(listener, 7) == 0);
	int client = connected(SOCK_STREAM, AT), served = accept(listener, 0, 0);
	int waiting = connected(SOCK_STREAM, AT);
	must(served >= 0 && write(client, "to served", 9) == 9 && write(waiting, "early", 5) == 5);
	int to = bound(SOCK_DGRAM, TO), from = bound(SOCK_DGRAM, FROM), ended = bound(SOCK_DGRAM, "/tmp/gone/ended");
	struct sockaddr_un name = name_of(TO);
	must(sendto(from, "one", 3, 0, (void *)&name, sizeof name) == 3);
	must(sendto(ended, "two", 3, 0, (void *)&name, sizeof name) == 3);
	must(connect(from, (void *)&name, sizeof name) == 0 && close(ended) == 0);
	/* By a relative name that leads to it: a message of a sender without a name any more. */
	must(mkdir("/tmp/stays", 0700) == 0 && chdir("/tmp/stays") == 0);
	int relative = bound(SOCK_DGRAM, "here"), brief = bound(SOCK_DGRAM, "/tmp/gone/brief");
	struct sockaddr_un there = name_of("/tmp/stays/here");
	must(sendto(brief, "four", 4, 0, (void *)&there, sizeof there) == 4);
	must(sendto(brief, "five", 4, 0, (void *)&there, sizeof there) == 4);
	must(close(brief) == 0 && unlink("/tmp/gone/brief") == 0);
	/* And one whose relative name is gone. */
	must(mkdir("/tmp/gone/here", 0700) == 0 && chdir("/tmp/gone") == 0);
	int lost = bound(SOCK_STREAM, "here/socket");
	must(listen(lost, 1) == 0 && chdir("/tmp/stays") == 0);
	must(unlink("/tmp/gone/here/socket") == 0 && rmdir("/tmp/gone/here") == 0);
	must(unlink(AT) == 0 && unlink(TO) == 0 && unlink(FROM) == 0 && unlink("/tmp/gone/ended") == 0);
	must(rmdir("/tmp/gone/deep") == 0 && rmdir("/tmp/gone") == 0);
	/* One whose directory is another one now, and one in a place of the same name. */
	int in_root = bound(SOCK_DGRAM, "/socket");
	must(unlink("/socket") == 0 && close(open("/socket", O_CREAT | O_WRONLY, 0600)) == 0);
	int before[2] = {entries("/"), entries("/tmp")};
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		must(access("/tmp/gone", F_OK) == -1 && errno == ENOENT);
		must(entries("/tmp") == before[1] && entries("/") - before[0] <= 3 * (round + 1));
		struct stat st;
		must(stat("/socket", &st) == 0 && S_ISREG(st.st_mode) && is_called(in_root, getsockname, "/socket"));
		must(is_called(listener, getsockname, AT) && is_called(served, getsockname, AT));
		must(is_called(client, getpeername, AT) && is_called(from, getpeername, TO));
		char text[16];
		int listens = 0;
		socklen_t length = sizeof listens;
		must(getsockopt(listener, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) == 0 && listens == 1);
		must(write(served, "x", 1) == 1 && read(client, text, 16) == 1);
	}
	char text[16];
	must(read(served, text, 16) == 9 && memcmp(text, "to served", 9) == 0);
	int late = accept(listener, 0, 0);
	must(late >= 0 && read(late, text, 16) == 5 && memcmp(text, "early", 5) == 0);
	must(is_called(late, getsockname, AT) && write(late, "back", 4) == 4 && read(waiting, text, 16) == 4);
	struct sockaddr_un sender = {0};
	socklen_t length = sizeof sender;
	must(recvfrom(to, text, 16, 0, (void *)&sender, &length) == 3 && strcmp(sender.sun_path, FROM) == 0);
	length = sizeof sender;
	must(recvfrom(to, text, 16, 0, (void *)&sender, &length) == 3);
	must(strcmp(sender.sun_path, "/tmp/gone/ended") == 0 && memcmp(text, "two", 3) == 0);
	must(write(from, "three", 5) == 5 && recv(to, text, 16, 0) == 5);
	length = sizeof sender;
	must(recvfrom(relative, text, 16, 0, (void *)&sender, &length) == 4 && memcmp(text, "four", 4) == 0);
	must(strcmp(sender.sun_path, "/tmp/gone/brief") == 0 && recv(relative, text, 16, 0) == 4);
	must(sendto(from, "six", 3, 0, (void *)&there, sizeof there) == 3 && recv(relative, text, 16, 0) == 3);
	must(is_called(lost, getsockname, "here/socket"));
	ok();
}
