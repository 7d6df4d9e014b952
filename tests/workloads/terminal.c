/* Terminals: pairs made inside, with modes, size and data in flight in both directions; a shell's
 * session with groups in the foreground and the background; the console of the start. */
#include "workload.h"
#include <poll.h>
#include <sys/ioctl.h>
#include <termios.h>

static int pair(int *slave) {
	char name[32];
	int number, zero = 0, master = open("/dev/ptmx", O_RDWR | O_NOCTTY);
	must(master >= 0 && ioctl(master, TIOCSPTLCK, &zero) == 0);
	must(ioctl(master, TIOCGPTN, &number) == 0);
	snprintf(name, sizeof name, "/dev/pts/%d", number);
	must((*slave = open(name, O_RDWR | O_NOCTTY)) >= 0);
	return master;
}

static int reads(int fd, const char *text) {
	char found[128] = "";
	struct pollfd p = {fd, POLLIN, 0};
	size_t length = 0;
	while (length < strlen(text) && poll(&p, 1, 1000) == 1) {
		ssize_t n = read(fd, found + length, sizeof found - 1 - length);
		if (n <= 0)
			break;
		length += n;
	}
	if (strcmp(found, text))
		print_line("read '%s', not '%s'", found, text);
	return strcmp(found, text) == 0;
}

static int is_empty(int fd) {
	struct pollfd p = {fd, POLLIN, 0};
	return poll(&p, 1, 50) == 0;
}

int main(void) {
	int gap_slave, slave, raw_slave, packet_slave, shell_slave;
	int gap = pair(&gap_slave), master = pair(&slave), raw = pair(&raw_slave);
	int packet = pair(&packet_slave), shell = pair(&shell_slave);
	/* Numbers have gaps. */
	must(close(gap) == 0 && close(gap_slave) == 0);
	struct winsize size = {25, 77, 3, 4}, console = {42, 99, 0, 0}, found;
	struct termios modes, now_modes;
	must(ioctl(master, TIOCSWINSZ, &size) == 0 && ioctl(0, TIOCSWINSZ, &console) == 0);
	must(tcgetattr(slave, &modes) == 0);
	modes.c_lflag &= ~ECHOCTL;
	modes.c_cc[VINTR] = 'q';
	must(tcsetattr(slave, TCSANOW, &modes) == 0);
	must(tcgetattr(raw_slave, &now_modes) == 0);
	cfmakeraw(&now_modes);
	must(tcsetattr(raw_slave, TCSANOW, &now_modes) == 0);
	must(fchmod(slave, 0622) == 0 && fchown(slave, 7, 5) == 0);
	int on = 1;
	must(ioctl(packet, TIOCPKT, &on) == 0);
	/* The leader of a session, and a foreground group. */
	int ask[2], leader = fork();
	must(leader >= 0 && (leader == 0 || 1));
	if (leader == 0) {
		must(setsid() == getpid() && ioctl(shell_slave, TIOCSCTTY, 0) == 0);
		must(pipe(ask) == 0);
		int front = fork();
		if (front == 0) {
			char c;
			setpgid(0, 0);
			must(read(ask[0], &c, 1) == 1);
			/* Answers its input until end of file. */
			while (read(shell_slave, &c, 1) == 1)
				must(write(shell_slave, c == '?' ? "!" : ".", 1) == 1);
			_exit(0);
		}
		must(setpgid(front, front) == 0 && tcsetpgrp(shell_slave, front) == 0);
		must(write(ask[1], "x", 1) == 1);
		int status;
		must(waitpid(front, &status, 0) == front);
		_exit(WIFSIGNALED(status) ? WTERMSIG(status) : 99);
	}
	must(tcgetattr(shell_slave, &now_modes) == 0);
	now_modes.c_lflag &= ~(ECHO | ICANON);
	must(tcsetattr(shell_slave, TCSANOW, &now_modes) == 0);
	pid_t group = 0;
	while (ioctl(shell, TIOCGPGRP, &group) != 0 || group == leader || group == 0)
		nap(2);
	for (int round = 0; round < ROUNDS; round++) {
		/* A whole line and a part of one; its echo; output. */
		must(write(master, "line\nhal", 8) == 8);
		must(reads(master, "line\r\nhal"));
		must(write(slave, "out\n", 4) == 4);
		must(write(raw, "a\003b", 3) == 3 && write(raw_slave, "c\nd", 3) == 3);
		nap(20);
		ready(round);
		must(ioctl(slave, TIOCGWINSZ, &found) == 0 && memcmp(&found, &size, sizeof size) == 0);
		must(ioctl(1, TIOCGWINSZ, &found) == 0 && memcmp(&found, &console, sizeof size) == 0);
		must(tcgetattr(master, &now_modes) == 0 && now_modes.c_cc[VINTR] == 'q');
		must(now_modes.c_lflag == modes.c_lflag && now_modes.c_iflag == modes.c_iflag);
		must(reads(slave, "line\n") && is_empty(slave));
		/* Half a line can still be erased. */
		must(write(master, "\177\177i\n", 4) == 4 && reads(slave, "hi\n"));
		must(reads(master, "out\r\n\b \b\b \bi\r\n"));
		must(reads(raw_slave, "a\003b") && reads(raw, "c\nd"));
		int number;
		must(ioctl(master, TIOCGPTN, &number) == 0 && number == 2);
		must(ioctl(raw, TIOCGPTN, &number) == 0 && number == 3);
		struct stat st;
		must(stat("/dev/pts/2", &st) == 0 && (st.st_mode & 07777) == 0622 && st.st_uid == 7);
		must(access("/dev/pts/1", F_OK) == -1);
		must(ioctl(packet, TIOCGPKT, &on) == 0 && on == 1);
		must(write(packet_slave, "p", 1) == 1);
		char two[2];
		must(read(packet, two, 2) == 2 && two[0] == 0 && two[1] == 'p');
		pid_t session, front;
		must(ioctl(shell, TIOCGSID, &session) == 0 && session == leader);
		must(ioctl(shell, TIOCGPGRP, &front) == 0 && front == group);
		must(write(shell, "?", 1) == 1 && reads(shell, "!"));
		/* Ours is the console. */
		must(isatty(0) && isatty(1) && tcgetsid(0) == getsid(0) && tcgetpgrp(0) == getpgrp());
		int tty = open("/dev/tty", O_RDWR);
		must(tty >= 0 && close(tty) == 0);
	}
	/* A typed interrupt reaches the foreground group. */
	int status;
	must(write(shell, "\003", 1) == 1 && waitpid(leader, &status, 0) == leader);
	must(WIFEXITED(status) && WEXITSTATUS(status) == SIGINT);
	ok();
}
