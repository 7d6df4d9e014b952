/* What the root of a container has changed in the container's own namespaces: the host name and the domain name,
 * limits of System V objects and of POSIX message queues. */
#include "workload.h"
#include <sys/ipc.h>
#include <sys/msg.h>
#include <sys/shm.h>
#include <sys/utsname.h>

static const char *const limits[][2] = {
	{"/proc/sys/kernel/msgmax", "12345\n"},
	{"/proc/sys/kernel/msgmni", "77\n"},
	{"/proc/sys/kernel/shmmax", "1000000\n"},
	{"/proc/sys/kernel/shm_rmid_forced", "1\n"},
	{"/proc/sys/kernel/sem", "100\t3200\t50\t20\n"},
	{"/proc/sys/fs/mqueue/msg_max", "5\n"},
	{"/proc/sys/fs/mqueue/msgsize_max", "20000\n"},
};

int main(void) {
	struct utsname u;
	struct {
		long type;
		char text[10000];
	} message = {.type = 1, .text = "longer than a new namespace permits"};
	must(sethostname("changed", 7) == 0 && setdomainname("its.domain", 10) == 0);
	for (unsigned n = 0; n < sizeof limits / sizeof *limits; n++)
		write_text(limits[n][0], limits[n][1]);
	int queue = msgget(IPC_PRIVATE, 0600);
	must(queue >= 0 && msgsnd(queue, &message, sizeof message.text, 0) == 0);
	/* Attached memory stays, although memory that is not attached would be removed. */
	int segment = shmget(IPC_PRIVATE, 4096, 0600);
	char *memory = shmat(segment, 0, 0);
	must(segment >= 0 && memory != (void *)-1);
	strcpy(memory, "kept");
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		must(uname(&u) == 0 && !strcmp(u.nodename, "changed") && !strcmp(u.domainname, "its.domain"));
		for (unsigned n = 0; n < sizeof limits / sizeof *limits; n++)
			must(has_text(limits[n][0], limits[n][1]));
		struct msqid_ds about;
		struct shmid_ds known;
		must(!strcmp(memory, "kept") && shmctl(segment, IPC_STAT, &known) == 0 && known.shm_nattch == 1);
		must(msgctl(queue, IPC_STAT, &about) == 0 && about.msg_qnum == 1);
	}
	ok();
}
