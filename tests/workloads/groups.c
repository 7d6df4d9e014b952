/* Multicast groups that UDP sockets have joined. */
#include "workload.h"
#include <net/if.h>
#include <sys/socket.h>

static struct group_req at(int family, int last) {
	struct group_req request = {.gr_interface = if_nametoindex("lo")};
	must(request.gr_interface != 0);
	if (family == AF_INET) {
		struct sockaddr_in *four = (void *)&request.gr_group;
		four->sin_family = AF_INET, four->sin_addr.s_addr = htonl(0xe0000900 + last);
	} else {
		struct sockaddr_in6 *six = (void *)&request.gr_group;
		six->sin6_family = AF_INET6;
		six->sin6_addr.s6_addr[0] = 0xff, six->sin6_addr.s6_addr[1] = 0x05;
		six->sin6_addr.s6_addr[15] = last;
	}
	return request;
}

static int act(int fd, int family, int last, int what) {
	struct group_req request = at(family, last);
	return setsockopt(fd, family == AF_INET ? IPPROTO_IP : IPPROTO_IPV6, what, &request, sizeof request);
}

int main(void) {
	int families[3] = {AF_INET, AF_INET6, AF_INET}, sockets[3];
	for (int n = 0; n < 3; n++) {
		sockets[n] = socket(families[n], SOCK_DGRAM, 0);
		must(sockets[n] >= 0);
		must(n == 2 || act(sockets[n], families[n], 1, MCAST_JOIN_GROUP) == 0);
		must(n == 2 || act(sockets[n], families[n], 2, MCAST_JOIN_GROUP) == 0);
	}
	/* A socket of version 6 has groups of version 4, too. */
	must(act(sockets[1], AF_INET, 3, MCAST_JOIN_GROUP) == 0);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		for (int n = 0; n < 2; n++)
			for (int last = 1; last < 3; last++) {
				must(act(sockets[n], families[n], last, MCAST_LEAVE_GROUP) == 0);
				must(act(sockets[n], families[n], last, MCAST_LEAVE_GROUP) == -1);
				must(act(sockets[n], families[n], last, MCAST_JOIN_GROUP) == 0);
			}
		must(act(sockets[1], AF_INET, 3, MCAST_LEAVE_GROUP) == 0);
		must(act(sockets[1], AF_INET, 3, MCAST_JOIN_GROUP) == 0);
		must(act(sockets[2], AF_INET, 1, MCAST_LEAVE_GROUP) == -1);
	}
	ok();
}
