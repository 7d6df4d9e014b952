/* Sockets below the transport protocols: raw sockets of both families, ping sockets, and packet
 * sockets at one device and at all, in a fanout group, with device memberships; and filters. */
#include "workload.h"
#include <arpa/inet.h>
#include <linux/filter.h>
#include <linux/if_packet.h>
#include <linux/icmp.h>
#include <linux/icmpv6.h>
#include <net/ethernet.h>
#include <netinet/in.h>
#include <netinet/ip.h>
#include <poll.h>
#include <sys/socket.h>

static struct sockaddr_in four(int port) {
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};
	a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	return a;
}

static int udp(int port) {
	struct sockaddr_in a = four(port);
	int fd = socket(AF_INET, SOCK_DGRAM, 0);
	must(fd >= 0 && bind(fd, (void *)&a, sizeof a) == 0);
	return fd;
}

static void send_to(int fd, int port, const char *text) {
	struct sockaddr_in a = four(port);
	must(sendto(fd, text, strlen(text), 0, (void *)&a, sizeof a) == (ssize_t)strlen(text));
}

static void receives(int fd, const char *text) {
	char found[64];
	struct pollfd p = {.fd = fd, .events = POLLIN};
	must(poll(&p, 1, 5000) == 1);
	ssize_t n = recv(fd, found, sizeof found, MSG_DONTWAIT);
	must(n == (ssize_t)strlen(text) && memcmp(found, text, n) == 0);
}

static void receives_nothing(int fd) {
	char c;
	must(recv(fd, &c, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
}

static int value(int fd, int level, int name) {
	int n = -1;
	must(getsockopt(fd, level, name, &n, &(socklen_t){sizeof n}) == 0);
	return n;
}

static uint16_t sum(const void *at, int bytes) {
	const uint16_t *words = at;
	uint32_t all = 0;
	for (; bytes > 0; bytes -= 2)
		all += *words++;
	all = (all & 0xffff) + (all >> 16);
	return ~(all + (all >> 16));
}

/* A packet socket for IPv4 at one device, or at all. */
static int packets(int type, int device) {
	struct sockaddr_ll a = {.sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_IP)};
	a.sll_ifindex = device;
	int fd = socket(AF_PACKET, type, 0);
	must(fd >= 0 && bind(fd, (void *)&a, sizeof a) == 0);
	return fd;
}

/* Receives all packets of a packet socket, which must be datagrams to the port; returns their
 * number. */
static int datagrams(int fd, int port, int head) {
	unsigned char found[256];
	int count = 0;
	for (ssize_t n; (n = recv(fd, found, sizeof found, MSG_DONTWAIT)) > 0; count++) {
		must(n > head + 28 && found[head] >> 4 == 4 && found[head + 9] == IPPROTO_UDP);
		must(found[head + 22] << 8 == (port & 0xff00) && found[head + 23] == (port & 0xff));
	}
	must(errno == EAGAIN);
	return count;
}

int main(void) {
	int on = 1, lo = 1;
	/* Datagrams that begin with an 'a', and nothing else. */
	struct sock_filter begins[] = {
		BPF_STMT(BPF_LD | BPF_B | BPF_ABS, 8),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 'a', 0, 1),
		BPF_STMT(BPF_RET | BPF_K, 65535),
		BPF_STMT(BPF_RET | BPF_K, 0),
	};
	struct sock_fprog only_a = {4, begins};
	int filtered = udp(5100), speaker = udp(5101);
	send_to(speaker, 5100, "before");
	must(setsockopt(filtered, SOL_SOCKET, SO_ATTACH_FILTER, &only_a, sizeof only_a) == 0);
	must(setsockopt(filtered, SOL_SOCKET, SO_LOCK_FILTER, &on, sizeof on) == 0);

	/* Raw: nothing but echo replies, from one address. */
	struct icmp_filter but_replies = {~(1u << ICMP_ECHOREPLY)};
	struct sockaddr_in here = four(0);
	int raw = socket(AF_INET, SOCK_RAW, IPPROTO_ICMP);
	must(raw >= 0 && setsockopt(raw, SOL_RAW, ICMP_FILTER, &but_replies, sizeof but_replies) == 0);
	must(bind(raw, (void *)&here, sizeof here) == 0);
	must(connect(raw, (void *)&here, sizeof here) == 0);
	int whole = socket(AF_INET, SOCK_RAW | SOCK_NONBLOCK, IPPROTO_RAW);
	uint32_t bits[8], none[8];
	memset(none, 0xff, sizeof none);
	int six = socket(AF_INET6, SOCK_RAW, IPPROTO_ICMPV6);
	must(whole >= 0 && six >= 0);
	must(setsockopt(six, SOL_ICMPV6, ICMPV6_FILTER, none, sizeof none) == 0);

	/* Ping socket with an identifier. */
	struct sockaddr_in identified = four(4660);
	int echo = socket(AF_INET, SOCK_DGRAM, IPPROTO_ICMP);
	must(echo >= 0 && bind(echo, (void *)&identified, sizeof identified) == 0);

	/* Datagrams to a port, at the loopback device and at all devices; two that share them. */
	struct sock_filter to_port[] = {
		BPF_STMT(BPF_LD | BPF_B | BPF_ABS, 9),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, IPPROTO_UDP, 0, 3),
		BPF_STMT(BPF_LD | BPF_H | BPF_ABS, 22),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 5100, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, 65535),
		BPF_STMT(BPF_RET | BPF_K, 0),
	};
	struct sock_fprog program = {6, to_port};
	int device = packets(SOCK_DGRAM, lo), every = packets(SOCK_DGRAM, 0);
	int shares = packets(SOCK_DGRAM, lo), shares_too = packets(SOCK_DGRAM, lo);
	int all[] = {device, every, shares, shares_too}, fanout = 77 | PACKET_FANOUT_LB << 16;
	for (int n = 0; n < 4; n++)
		must(setsockopt(all[n], SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program) == 0);
	for (int n = 2; n < 4; n++)
		must(setsockopt(all[n], SOL_PACKET, PACKET_FANOUT, &fanout, sizeof fanout) == 0);
	struct packet_mreq look = {.mr_ifindex = lo, .mr_type = PACKET_MR_PROMISC};
	must(setsockopt(device, SOL_PACKET, PACKET_ADD_MEMBERSHIP, &look, sizeof look) == 0);
	must(setsockopt(device, SOL_PACKET, PACKET_AUXDATA, &on, sizeof on) == 0);
	must(setsockopt(every, SOL_PACKET, PACKET_IGNORE_OUTGOING, &on, sizeof on) == 0);
	int idle = socket(AF_PACKET, SOCK_RAW, 0);
	must(idle >= 0);

	for (int round = 0; round < ROUNDS; round++) {
		ready(round);

		if (round == 0)
			receives(filtered, "before");
		must(setsockopt(filtered, SOL_SOCKET, SO_DETACH_FILTER, &on, sizeof on) == -1);
		must(errno == EPERM);
		for (int n = 0; n < 4; n++)
			datagrams(all[n], 5100, 0);
		send_to(speaker, 5100, "b, not heard"), send_to(speaker, 5100, "a, heard");
		receives(filtered, "a, heard"), receives_nothing(filtered);
		send_to(speaker, 5101, "to itself"), receives(speaker, "to itself");
		must(datagrams(device, 5100, 0) == 2 && datagrams(every, 5100, 0) == 2);
		must(datagrams(shares, 5100, 0) + datagrams(shares_too, 5100, 0) == 2);
		must(value(device, SOL_PACKET, PACKET_AUXDATA) == 1);
		must(value(every, SOL_PACKET, PACKET_IGNORE_OUTGOING) == 1);
		must(value(shares, SOL_PACKET, PACKET_FANOUT) == fanout);
		must(setsockopt(device, SOL_PACKET, PACKET_DROP_MEMBERSHIP, &look, sizeof look) == 0);
		must(setsockopt(device, SOL_PACKET, PACKET_ADD_MEMBERSHIP, &look, sizeof look) == 0);
		struct sockaddr_ll name;
		must(getsockname(idle, (void *)&name, &(socklen_t){sizeof name}) == 0);
		must(name.sll_protocol == 0 && name.sll_ifindex == 0);

		struct icmphdr request = {.type = ICMP_ECHO, .un.echo = {htons(9), htons(round)}};
		request.checksum = sum(&request, sizeof request);
		must(send(raw, &request, sizeof request, 0) == sizeof request);
		struct {
			struct iphdr ip;
			struct icmphdr icmp;
		} got;
		must(recv(raw, &got, sizeof got, 0) == sizeof got && got.ip.protocol == IPPROTO_ICMP);
		must(got.icmp.type == ICMP_ECHOREPLY && got.icmp.un.echo.sequence == htons(round));
		receives_nothing(raw);
		must(value(whole, IPPROTO_IP, IP_HDRINCL) == 1 && fcntl(whole, F_GETFL) & O_NONBLOCK);
		must(getsockopt(six, SOL_ICMPV6, ICMPV6_FILTER, bits, &(socklen_t){sizeof bits}) == 0);
		must(memcmp(bits, none, sizeof bits) == 0);

		struct icmphdr ping = {.type = ICMP_ECHO, .un.echo.sequence = htons(round + 5)};
		must(sendto(echo, &ping, sizeof ping, 0, (void *)&here, sizeof here) == sizeof ping);
		struct icmphdr reply;
		must(recv(echo, &reply, sizeof reply, 0) == sizeof reply && reply.type == ICMP_ECHOREPLY);
		must(reply.un.echo.id == htons(4660) && reply.un.echo.sequence == htons(round + 5));
		receives_nothing(echo);
		/* The raw socket has received that reply, too. */
		must(recv(raw, &got, sizeof got, 0) == sizeof got && got.icmp.un.echo.id == htons(4660));
	}
	ok();
}
