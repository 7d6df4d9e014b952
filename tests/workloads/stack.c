/* A private network with a set-up: two bridged devices with addresses, routes, rules, settings, and
 * a connection between those addresses. With APART the program has made the network for itself. */
#include "workload.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>

static const char *setup =
    "set -e\n"
    "ip addr add 10.9.9.9/24 dev lo\n"
    "ip link add name br0 type bridge\n"
    "ip link add name v0 type veth\n"
    "ip link set veth0 name v1\n"
    "ip link set v0 master br0\n"
    "ip link set v1 mtu 1400\n"
    "ip addr add 10.7.0.1/24 dev br0\n"
    "ip addr add 10.7.1.2/24 dev v1\n"
    "ip addr add fd07::1/64 dev br0\n"
    "for one in v0 v1 br0; do ip link set $one up; done\n"
    "ip route add 10.55.0.0/16 via 10.7.0.77 dev br0\n"
    "ip route add default via 10.7.1.254 dev v1 metric 77\n"
    "ip route add 10.0.0.0/8 dev v1 table 123\n"
    "ip -6 route add fd99::/64 via fd07::9\n"
    "ip rule add from 10.7.1.2 lookup 123\n"
    "echo 1 > /proc/sys/net/ipv4/ip_forward\n"
    "echo 0 > /proc/sys/net/ipv4/conf/v1/rp_filter\n"
    "echo 1 > /proc/sys/net/ipv4/conf/v1/proxy_arp\n"
    "echo 7654 > /proc/sys/net/ipv6/neigh/br0/gc_stale_time\n";

/* The constant part of the set-up; the state of an address changes by itself. */
static const char *show =
    "ip link | sed 's/state [A-Z]*//; s/,M-DOWN//; s/NO-CARRIER,//; s/,LOWER_UP//; s/,RUNNING//'\n"
    "ip addr | grep -o 'inet.*/[0-9]* '\n"
    "ip route; ip route show table 123; ip rule\n"
    "ip -6 route show | grep fd99\n"
    "cat /proc/sys/net/ipv4/ip_forward /proc/sys/net/ipv4/conf/v1/proxy_arp\n"
    "cat /proc/sys/net/ipv6/neigh/br0/gc_stale_time\n";

static struct sockaddr_in at(const char *ip) {
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(80)};
	must(inet_pton(AF_INET, ip, &a.sin_addr) == 1);
	return a;
}

int main(void) {
	static char before[16384], after[16384];
	int apart = getenv("APART") != 0;
	if (apart) {
		must(unshare(CLONE_NEWNET) == 0);
		must(system("ip link set lo up") == 0);
	}
	must(system(setup) == 0);
	/* Wait for the automatic IPv6 addresses of the kernel. */
	nap(2500);
	do {
		output_of(show, after, sizeof after);
		nap(500);
		output_of(show, before, sizeof before);
	} while (strcmp(before, after) != 0);
	must(strstr(before, "10.55.0.0/16 via 10.7.0.77") && strstr(before, "lookup 123"));
	must(strstr(before, "10.0.0.0/8 dev v1") && strstr(before, "fd99::/64 via fd07::9"));
	must(strstr(before, "mtu 1400") && strstr(before, "master br0") && strstr(before, "7654"));
	int listener = socket(AF_INET, SOCK_STREAM, 0), caller = socket(AF_INET, SOCK_STREAM, 0);
	struct sockaddr_in here = at("10.7.0.1"), there = at("10.7.1.2");
	there.sin_port = 0;
	must(bind(listener, (void *)&here, sizeof here) == 0 && listen(listener, 4) == 0);
	must(bind(caller, (void *)&there, sizeof there) == 0);
	must(connect(caller, (void *)&here, sizeof here) == 0);
	int server = accept(listener, 0, 0);
	must(server >= 0 && write(caller, "one", 3) == 3);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		nap(300);
		output_of(show, after, sizeof after);
		if (strcmp(before, after) != 0) {
			int n = 0;
			while (before[n] == after[n])
				n++;
			n = n > 40 ? n - 40 : 0;
			print_line("failed: before\n%.200s", before + n);
			print_line("and is\n%.200s", after + n);
			_exit(1);
		}
		char got[8] = "";
		must(read(server, got, sizeof got) == 3 && memcmp(got, "one", 3) == 0);
		must(write(caller, "one", 3) == 3);
		int other = socket(AF_INET, SOCK_STREAM, 0);
		must(connect(other, (void *)&here, sizeof here) == 0);
		int its = accept(listener, 0, 0);
		must(its >= 0);
		close(other), close(its);
	}
	ok();
}
