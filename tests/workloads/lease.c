/* Leases: one for reading, with a custom signal that goes to a child; one for writing; and
 * processes that open the leased files. */
#include "workload.h"

static volatile sig_atomic_t broken;
static int writing;

/* The kernel reports the file only in a custom signal. */
static void on_break(int signal, siginfo_t *info, void *context) {
	(void)context;
	broken = signal == SIGIO ? writing : info->si_fd;
}

int main(void) {
	struct sigaction act = {.sa_sigaction = on_break, .sa_flags = SA_SIGINFO | SA_RESTART};
	int ask[2], answer[2];
	char c;
	must(pipe(ask) == 0 && pipe(answer) == 0);
	must(close(open("/read", O_CREAT | O_WRONLY, 0600)) == 0);
	int reading = open("/read", O_RDONLY);
	writing = open("/write", O_CREAT | O_RDWR, 0600);
	must(reading >= 0 && writing >= 0);
	must(sigaction(SIGRTMIN + 3, &act, 0) == 0 && sigaction(SIGIO, &act, 0) == 0);
	int child = fork();
	if (child == 0) {
		/* The child inherits the open files, but must close this one: a lease for writing
		 * needs it. */
		close(writing);
		while (read(ask[0], &c, 1) == 1) {
			for (int n = 0; broken == 0; n++) {
				must(n < 5000);
				nap(1);
			}
			must(broken == reading && fcntl(reading, F_SETLEASE, F_UNLCK) == 0);
			broken = 0;
			must(write(answer[1], &c, 1) == 1);
		}
		_exit(0);
	}
	for (int round = 0; round < ROUNDS; round++) {
		must(fcntl(reading, F_SETSIG, SIGRTMIN + 3) == 0 && fcntl(reading, F_SETLEASE, F_RDLCK) == 0);
		must(fcntl(reading, F_SETOWN, child) == 0 && fcntl(writing, F_SETLEASE, F_WRLCK) == 0);
		ready(round);
		must(fcntl(reading, F_GETLEASE) == F_RDLCK && fcntl(writing, F_GETLEASE) == F_WRLCK);
		must(fcntl(reading, F_GETSIG) == SIGRTMIN + 3 && fcntl(reading, F_GETOWN) == child);
		must(fcntl(writing, F_GETSIG) == 0 && fcntl(writing, F_GETOWN) == getpid());
		must(open("/read", O_WRONLY | O_NONBLOCK) == -1 && errno == EWOULDBLOCK);
		must(broken == 0 && write(ask[1], "x", 1) == 1 && read(answer[0], &c, 1) == 1 && c == 'x');
		must(close(open("/read", O_WRONLY)) == 0);
		must(open("/write", O_RDONLY | O_NONBLOCK) == -1 && errno == EWOULDBLOCK);
		for (int n = 0; broken == 0; n++) {
			must(n < 5000);
			nap(1);
		}
		must(broken == writing && fcntl(writing, F_SETLEASE, F_UNLCK) == 0);
		broken = 0;
	}
	ok();
}
