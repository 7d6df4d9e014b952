/* Pairs of devices with one end in another network: two inner networks like those of inner
 * containers, each with one end of a pair, with the other ends in a bridge of the outer network;
 * and connections between them. With APART the outer network is also one that the program has made
 * for itself. */
#include "workload.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>

enum { OURS, FIRST, SECOND, NETWORKS };
/* A process in each network. */
static pid_t in[NETWORKS];

static const char *show =
    "ip link | sed 's/state [A-Z]*//; s/,M-DOWN//; s/NO-CARRIER,//; s/,LOWER_UP//; s/,RUNNING//'\n"
    "ip addr | grep -o 'inet .*/[0-9]* '\n"
    "ip route; cat /proc/sys/net/ipv4/conf/*/proxy_arp\n";

static void run(const char *format, ...) {
	char text[1024];
	va_list args;
	va_start(args, format);
	vsnprintf(text, sizeof text, format, args);
	va_end(args);
	if (system(text) != 0) {
		print_line("failed: %s", text);
		_exit(1);
	}
}

/* Enters a network. */
static void enter(int network) {
	char path[64];
	snprintf(path, sizeof path, "/proc/%d/ns/net", in[network]);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	must(fd >= 0 && setns(fd, CLONE_NEWNET) == 0 && close(fd) == 0);
}

/* An idle process in a network, new or the own one. */
static pid_t stay(int is_new) {
	int made[2];
	char byte = 0;
	must(pipe(made) == 0);
	pid_t pid = fork();
	if (pid == 0) {
		if (is_new)
			must(unshare(CLONE_NEWNET) == 0);
		must(write(made[1], &byte, 1) == 1 && close(made[0]) == 0 && close(made[1]) == 0);
		for (;;)
			pause();
	}
	must(pid > 0 && read(made[0], &byte, 1) == 1 && close(made[0]) == 0 && close(made[1]) == 0);
	return pid;
}

static struct sockaddr_in at(const char *ip) {
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(80)};
	must(inet_pton(AF_INET, ip, &a.sin_addr) == 1);
	return a;
}

static int listen_in(int network, const char *ip) {
	enter(network);
	int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	struct sockaddr_in here = at(ip);
	must(s >= 0 && bind(s, (void *)&here, sizeof here) == 0 && listen(s, 8) == 0);
	return s;
}

/* Makes a connection from a network to a listener in another, and returns both ends. */
static void connect_from(int network, int listener, const char *ip, int ends[2]) {
	enter(network);
	ends[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	struct sockaddr_in there = at(ip);
	must(ends[0] >= 0 && connect(ends[0], (void *)&there, sizeof there) == 0);
	ends[1] = accept4(listener, 0, 0, SOCK_CLOEXEC);
	must(ends[1] >= 0);
}

/* Each end receives the other end's byte. */
static void exchange(int ends[2], char byte) {
	for (int i = 0; i < 2; i++) {
		char got = 0;
		must(write(ends[i], &byte, 1) == 1 && read(ends[!i], &got, 1) == 1 && got == byte);
	}
}

int main(void) {
	static char before[NETWORKS][16384], after[16384];
	if (getenv("APART") != 0)
		must(unshare(CLONE_NEWNET) == 0);
	for (int i = 0; i < NETWORKS; i++)
		in[i] = stay(i != OURS);
	/* Defaults for later devices. */
	for (int i = 0; i < NETWORKS; i++) {
		enter(i);
		run("echo 1 >/proc/sys/net/ipv4/conf/default/proxy_arp");
	}
	enter(OURS);
	run("ip link set lo up; ip link add name br0 type bridge && ip addr add 10.6.0.1/24 dev br0 &&"
	    "ip link set br0 up");
	for (int i = FIRST; i <= SECOND; i++) {
		enter(OURS);
		/* Its other end has the same name and number as the other pair's. */
		run("ip link add name p%d type veth && ip link set veth0 netns %d &&"
		    "ip link set p%d master br0 && ip link set p%d up", i, in[i], i, i);
		enter(i);
		run("ip link set lo up && ip link set veth0 name eth0 && ip link set eth0 mtu 1400 &&"
		    "ip addr add 10.6.0.%d/24 dev eth0 && ip link set eth0 up &&"
		    "ip route add default via 10.6.0.1", i + 1);
	}
	/* A pair without an end in the outer network. */
	enter(FIRST);
	run("ip link add name side type veth && ip link set veth0 netns %d &&"
	    "ip addr add 10.8.0.1/24 dev side && ip link set side up", in[SECOND]);
	enter(SECOND);
	run("ip addr add 10.8.0.2/24 dev veth0 && ip link set veth0 up");
	int listener = listen_in(FIRST, "10.6.0.2"), aside = listen_in(SECOND, "10.8.0.2");
	int across[2], below[2], beside[2];
	connect_from(SECOND, listener, "10.6.0.2", across);
	connect_from(OURS, listener, "10.6.0.2", below);
	connect_from(FIRST, aside, "10.8.0.2", beside);
	/* Until the kernel has assigned all its automatic addresses. */
	nap(2500);
	for (int i = 0; i < NETWORKS; i++) {
		enter(i);
		output_of(show, before[i], sizeof before[i]);
	}
	must(strstr(before[OURS], "master br0") && strstr(before[SECOND], "default via 10.6.0.1"));
	for (int round = 0; round < ROUNDS; round++) {
		enter(OURS);
		ready(round);
		for (int i = 0; i < NETWORKS; i++) {
			enter(i);
			output_of(show, after, sizeof after);
			if (strcmp(before[i], after) != 0) {
				print_line("failed: network %d was\n%.400s", i, before[i]);
				print_line("and is\n%.400s", after);
				_exit(1);
			}
		}
		exchange(across, round), exchange(below, round), exchange(beside, round);
		int again[2];
		connect_from(SECOND, listener, "10.6.0.2", again);
		exchange(again, round);
		must(close(again[0]) == 0 && close(again[1]) == 0);
	}
	ok();
}
