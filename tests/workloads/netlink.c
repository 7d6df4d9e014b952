/* Netlink sockets: with a port and groups, with options, not bound at all. Each still receives its
 * groups' messages, and answers to its requests. */
#include "workload.h"
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

static uint32_t port_of(int fd) {
	struct sockaddr_nl name;
	socklen_t length = sizeof name;
	must(getsockname(fd, (struct sockaddr *)&name, &length) == 0);
	return name.nl_pid;
}

/* Requests a dump of links, and returns the number of messages. */
static int links(int fd) {
	struct {
		struct nlmsghdr head;
		struct ifinfomsg body;
	} request = {.head = {.nlmsg_len = sizeof request, .nlmsg_type = RTM_GETLINK,
			  .nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP}};
	char text[65536];
	int count = 0;
	must(send(fd, &request, sizeof request, 0) == sizeof request);
	for (;;) {
		int n = recv(fd, text, sizeof text, 0);
		must(n > 0);
		for (struct nlmsghdr *m = (void *)text; NLMSG_OK(m, n); m = NLMSG_NEXT(m, n)) {
			if (m->nlmsg_type == NLMSG_DONE)
				return count;
			must(m->nlmsg_type == RTM_NEWLINK);
			count++;
		}
	}
}

int main(void) {
	struct sockaddr_nl name = {.nl_family = AF_NETLINK, .nl_pid = 4711, .nl_groups = RTMGRP_LINK};
	int on = 1, group = RTNLGRP_BRVLAN, groups = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, 0);
	must(groups >= 0 && bind(groups, (struct sockaddr *)&name, sizeof name) == 0);
	must(setsockopt(groups, SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, &group, sizeof group) == 0);
	must(setsockopt(groups, SOL_NETLINK, NETLINK_EXT_ACK, &on, sizeof on) == 0);
	int requests = socket(AF_NETLINK, SOCK_DGRAM | SOCK_NONBLOCK, NETLINK_ROUTE);
	int later = socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE);
	must(fcntl(requests, F_SETFL, 0) == 0 && links(requests) > 0);
	uint32_t port = port_of(requests);
	must(port != 0 && port_of(later) == 0);
	struct ifreq up = {.ifr_name = "lo"};
	int any = socket(AF_INET, SOCK_DGRAM, 0);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		must(port_of(groups) == 4711 && port_of(requests) == port && port_of(later) == 0);
		uint32_t bits[8] = {0};
		socklen_t length = sizeof bits;
		must(getsockopt(groups, SOL_NETLINK, NETLINK_LIST_MEMBERSHIPS, bits, &length) == 0);
		must(bits[0] == RTMGRP_LINK);
		must(bits[(group - 1) / 32] & 1u << (group - 1) % 32);
		length = sizeof on, on = 0;
		must(getsockopt(groups, SOL_NETLINK, NETLINK_EXT_ACK, &on, &length) == 0 && on == 1);
		must(links(requests) > 0);
		/* A change of a link is reported. */
		must(ioctl(any, SIOCGIFFLAGS, &up) == 0);
		up.ifr_flags ^= IFF_PROMISC;
		if (ioctl(any, SIOCSIFFLAGS, &up) == 0) {
			char text[8192];
			must(recv(groups, text, sizeof text, 0) > 0);
			must(((struct nlmsghdr *)text)->nlmsg_type == RTM_NEWLINK);
			while (recv(groups, text, sizeof text, MSG_DONTWAIT) > 0)
				;
		}
	}
	ok();
}
