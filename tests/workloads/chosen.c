/* An IPv6 socket whose own address is the kernel's choice for its peer: it can be connected to another, and to one
 * of IPv4. */
#include "workload.h"
#include <sys/socket.h>

static int only_v6(int fd) {
	int value = -1;
	socklen_t size = sizeof value;
	must(getsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &value, &size) == 0);
	return value;
}

static struct in6_addr own(int fd) {
	struct sockaddr_in6 a;
	socklen_t size = sizeof a;
	must(getsockname(fd, (void *)&a, &size) == 0);
	return a.sin6_addr;
}

int main(void) {
	struct sockaddr_storage a;
	struct sockaddr none = {.sa_family = AF_UNSPEC};
	struct sockaddr_in6 mapped = {.sin6_family = AF_INET6, .sin6_port = htons(9)};
	mapped.sin6_addr = (struct in6_addr){.s6_addr = {[10] = 0xff, [11] = 0xff, [12] = 127, [15] = 1}};
	socklen_t size = loopback(&a, AF_INET6, 7);
	int chosen = socket(AF_INET6, SOCK_DGRAM, 0), bound = socket(AF_INET6, SOCK_DGRAM, 0);
	must(connect(chosen, (void *)&a, size) == 0 && only_v6(chosen) == 0);
	size = loopback(&a, AF_INET6, 4001);
	must(bind(bound, (void *)&a, size) == 0 && connect(bound, (void *)&a, size) == 0);
	must(only_v6(bound) == 1);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		must(only_v6(chosen) == 0 && only_v6(bound) == 1);
		must(IN6_IS_ADDR_LOOPBACK(&(struct in6_addr[]){own(chosen)}[0]));
	}
	must(connect(chosen, &none, sizeof none) == 0);
	must(connect(chosen, (void *)&mapped, sizeof mapped) == 0);
	must(IN6_IS_ADDR_V4MAPPED(&(struct in6_addr[]){own(chosen)}[0]));
	ok();
}
