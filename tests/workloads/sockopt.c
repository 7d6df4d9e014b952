/* Options of sockets: each option of each kind of socket that can have a value of its own is given one, and
 * has it afterwards. PRIVILEGED sets those besides that need CAP_NET_ADMIN. */
#include "workload.h"
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <netinet/udp.h>
#include <sys/socket.h>

#define SIZE 16

struct option {
	int level, name;
	const char *what;
	int length;
	int value[SIZE / 4];
	int needs_rights;
};

#define INT(level, name, value) {level, name, #name, 4, {value}, 0}
#define PRIVILEGED(level, name, value) {level, name, #name, 4, {value}, 1}
#define NUMBERED(level, name, number, value) {level, number, name, 4, {value}, 0}

static const struct option general[] = {
	INT(SOL_SOCKET, SO_DONTROUTE, 1),
	INT(SOL_SOCKET, SO_BROADCAST, 1),
	INT(SOL_SOCKET, SO_SNDBUF, 20000),
	INT(SOL_SOCKET, SO_RCVBUF, 30000),
	INT(SOL_SOCKET, SO_KEEPALIVE, 1),
	INT(SOL_SOCKET, SO_OOBINLINE, 1),
	INT(SOL_SOCKET, SO_NO_CHECK, 1),
	INT(SOL_SOCKET, SO_PRIORITY, 3),
	{SOL_SOCKET, SO_LINGER, "SO_LINGER", 8, {1, 3}, 0},
	INT(SOL_SOCKET, SO_RCVLOWAT, 7),
	{SOL_SOCKET, SO_RCVTIMEO, "SO_RCVTIMEO", 16, {9}, 0},
	{SOL_SOCKET, SO_SNDTIMEO, "SO_SNDTIMEO", 16, {8}, 0},
	NUMBERED(SOL_SOCKET, "SO_TIMESTAMPNS_NEW", 64, 1),
	INT(SOL_SOCKET, SO_RXQ_OVFL, 1),
	INT(SOL_SOCKET, SO_PEEK_OFF, 2),
	INT(SOL_SOCKET, SO_SELECT_ERR_QUEUE, 1),
	INT(SOL_SOCKET, SO_WIFI_STATUS, 1),
	{SOL_SOCKET, SO_MAX_PACING_RATE, "SO_MAX_PACING_RATE", 8, {5000000}, 0},
	INT(SOL_SOCKET, SO_INCOMING_CPU, 0),
	INT(SOL_SOCKET, SO_ZEROCOPY, 1),
	{SOL_SOCKET, SO_TXTIME, "SO_TXTIME", 8, {CLOCK_MONOTONIC, 2}, 0},
	/* Software time stamps of sent and received packets, as SO_TIMESTAMPING_NEW. */
	{SOL_SOCKET, 65, "SO_TIMESTAMPING_NEW", 8, {1 << 1 | 1 << 3 | 1 << 4}, 0},
	NUMBERED(SOL_SOCKET, "SO_TXREHASH", 74, 0),
	NUMBERED(SOL_SOCKET, "SO_RCVPRIORITY", 82, 1),
	NUMBERED(SOL_SOCKET, "SO_PASSPIDFD", 76, 1),
	NUMBERED(SOL_SOCKET, "SO_PASSRIGHTS", 83, 0),
	INT(SOL_SOCKET, SO_PASSCRED, 1),
	PRIVILEGED(SOL_SOCKET, SO_MARK, 77),
	{SOL_SOCKET, 75, "SO_RCVMARK", 4, {1}, 1},
};

static const struct option lingers[] = {
	{SOL_SOCKET, SO_LINGER, "SO_LINGER", 8, {1, 23}, 0},
};

static const struct option lingers_no_more[] = {
	{SOL_SOCKET, SO_LINGER, "SO_LINGER that is off again", 8, {0, 0}, 0},
};

static const struct option stamped[] = {
	/* By the process's own numbers, which a connection has alone. */
	{SOL_SOCKET, 37, "SO_TIMESTAMPING with OPT_ID", 8, {1 << 1 | 1 << 4 | 1 << 7}, 0},
};

static const struct option four[] = {
	INT(IPPROTO_IP, IP_TOS, 8),
	INT(IPPROTO_IP, IP_TTL, 255),
	INT(IPPROTO_IP, IP_PKTINFO, 1),
	INT(IPPROTO_IP, IP_RECVERR, 1),
	INT(IPPROTO_IP, IP_RECVTTL, 1),
	INT(IPPROTO_IP, IP_RECVTOS, 1),
	INT(IPPROTO_IP, IP_RECVOPTS, 1),
	INT(IPPROTO_IP, IP_RETOPTS, 1),
	INT(IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE),
	INT(IPPROTO_IP, IP_FREEBIND, 1),
	INT(IPPROTO_IP, IP_MULTICAST_TTL, 9),
	INT(IPPROTO_IP, IP_MULTICAST_LOOP, 0),
	INT(IPPROTO_IP, IP_MULTICAST_ALL, 0),
	{IPPROTO_IP, IP_MULTICAST_IF, "IP_MULTICAST_IF", 4, {0x0100007f}, 0},
	NUMBERED(IPPROTO_IP, "IP_RECVORIGDSTADDR", 20, 1),
	NUMBERED(IPPROTO_IP, "IP_CHECKSUM", 23, 1),
	NUMBERED(IPPROTO_IP, "IP_BIND_ADDRESS_NO_PORT", 24, 1),
	NUMBERED(IPPROTO_IP, "IP_RECVFRAGSIZE", 25, 1),
	NUMBERED(IPPROTO_IP, "IP_RECVERR_RFC4884", 26, 1),
	NUMBERED(IPPROTO_IP, "IP_LOCAL_PORT_RANGE", 51, 40000 | 41000 << 16),
	INT(IPPROTO_IP, IP_PASSSEC, 1),
	/* Its peers send with 255, too. */
	INT(IPPROTO_IP, IP_MINTTL, 255),
	PRIVILEGED(IPPROTO_IP, IP_TRANSPARENT, 1),
};

static const struct option six[] = {
	INT(IPPROTO_IPV6, IPV6_UNICAST_HOPS, 255),
	INT(IPPROTO_IPV6, IPV6_MULTICAST_HOPS, 9),
	INT(IPPROTO_IPV6, IPV6_MULTICAST_LOOP, 0),
	NUMBERED(IPPROTO_IPV6, "IPV6_MULTICAST_ALL", 29, 0),
	INT(IPPROTO_IPV6, IPV6_MTU_DISCOVER, IP_PMTUDISC_PROBE),
	INT(IPPROTO_IPV6, IPV6_RECVERR, 1),
	INT(IPPROTO_IPV6, IPV6_RECVPKTINFO, 1),
	INT(IPPROTO_IPV6, IPV6_TCLASS, 8),
	INT(IPPROTO_IPV6, IPV6_RECVTCLASS, 1),
	INT(IPPROTO_IPV6, IPV6_RECVHOPLIMIT, 1),
	INT(IPPROTO_IPV6, IPV6_RECVHOPOPTS, 1),
	INT(IPPROTO_IPV6, IPV6_RECVRTHDR, 1),
	INT(IPPROTO_IPV6, IPV6_RECVDSTOPTS, 1),
	INT(IPPROTO_IPV6, IPV6_RECVPATHMTU, 1),
	NUMBERED(IPPROTO_IPV6, "IPV6_2292PKTINFO", 2, 1),
	NUMBERED(IPPROTO_IPV6, "IPV6_2292HOPLIMIT", 8, 1),
	NUMBERED(IPPROTO_IPV6, "IPV6_FLOWINFO", 11, 1),
	NUMBERED(IPPROTO_IPV6, "IPV6_FLOWINFO_SEND", 33, 1),
	NUMBERED(IPPROTO_IPV6, "IPV6_RECVERR_RFC4884", 31, 1),
	INT(IPPROTO_IPV6, IPV6_DONTFRAG, 1),
	NUMBERED(IPPROTO_IPV6, "IPV6_AUTOFLOWLABEL", 70, 0),
	NUMBERED(IPPROTO_IPV6, "IPV6_ADDR_PREFERENCES", 72, 1),
	NUMBERED(IPPROTO_IPV6, "IPV6_MINHOPCOUNT", 73, 255),
	NUMBERED(IPPROTO_IPV6, "IPV6_RECVORIGDSTADDR", 74, 1),
	NUMBERED(IPPROTO_IPV6, "IPV6_RECVFRAGSIZE", 77, 1),
	NUMBERED(IPPROTO_IPV6, "IPV6_FREEBIND", 78, 1),
	{IPPROTO_IPV6, 75, "IPV6_TRANSPARENT", 4, {1}, 1},
};

static const struct option stream[] = {
	INT(IPPROTO_TCP, TCP_NODELAY, 1),
	INT(IPPROTO_TCP, TCP_KEEPIDLE, 100),
	INT(IPPROTO_TCP, TCP_KEEPINTVL, 11),
	INT(IPPROTO_TCP, TCP_KEEPCNT, 5),
	INT(IPPROTO_TCP, TCP_SYNCNT, 4),
	INT(IPPROTO_TCP, TCP_LINGER2, 20),
	INT(IPPROTO_TCP, TCP_USER_TIMEOUT, 30000),
	INT(IPPROTO_TCP, TCP_NOTSENT_LOWAT, 16384),
	{IPPROTO_TCP, TCP_CONGESTION, "TCP_CONGESTION", 16, {0x6f6e6572}, 0},
	NUMBERED(IPPROTO_TCP, "TCP_THIN_LINEAR_TIMEOUTS", 16, 1),
	NUMBERED(IPPROTO_TCP, "TCP_SAVE_SYN", 27, 1),
	NUMBERED(IPPROTO_TCP, "TCP_FASTOPEN_NO_COOKIE", 34, 1),
	NUMBERED(IPPROTO_TCP, "TCP_INQ", 36, 1),
	NUMBERED(IPPROTO_TCP, "TCP_TX_DELAY", 37, 300),
	NUMBERED(IPPROTO_TCP, "TCP_RTO_MAX_MS", 44, 30000),
	NUMBERED(IPPROTO_TCP, "TCP_RTO_MIN_US", 45, 100000),
	NUMBERED(IPPROTO_TCP, "TCP_DELACK_MAX_US", 46, 100000),
};

static const struct option unconnected[] = {
	INT(IPPROTO_TCP, TCP_MAXSEG, 1000),
	INT(IPPROTO_TCP, TCP_WINDOW_CLAMP, 20000),
};

static const struct option listening[] = {
	INT(IPPROTO_TCP, TCP_DEFER_ACCEPT, 3),
};

static const struct option datagram[] = {
	NUMBERED(IPPROTO_UDP, "UDP_CORK", 1, 1),
	NUMBERED(IPPROTO_UDP, "UDP_ENCAP", 100, 2),
	NUMBERED(IPPROTO_UDP, "UDP_NO_CHECK6_TX", 101, 1),
	NUMBERED(IPPROTO_UDP, "UDP_NO_CHECK6_RX", 102, 1),
	NUMBERED(IPPROTO_UDP, "UDP_SEGMENT", 103, 700),
	NUMBERED(IPPROTO_UDP, "UDP_GRO", 104, 1),
};

/* An option of a socket, and its value once it was set. */
struct set {
	int socket;
	const char *of;
	const struct option *option;
	char value[SIZE];
	socklen_t length;
};

static struct set all[1024];
static int count;

static void read_one(const struct set *set, char *value, socklen_t *length) {
	*length = set->option->length;
	memset(value, 0, SIZE);
	must(getsockopt(set->socket, set->option->level, set->option->name, value, length) == 0);
}

static void give(int socket, const char *of, const struct option *options, int n) {
	int rights = getenv("PRIVILEGED") != 0;
	for (int k = 0; k < n; k++) {
		const struct option *it = &options[k];
		char before[SIZE] = "";
		socklen_t length = it->length;
		if (it->needs_rights && !rights)
			continue;
		/* What this kernel or this kind of socket does not have. */
		if (getsockopt(socket, it->level, it->name, before, &length) != 0)
			continue;
		if (setsockopt(socket, it->level, it->name, it->value, it->length) != 0) {
			must(errno == ENOPROTOOPT || errno == EOPNOTSUPP || errno == EINVAL);
			continue;
		}
		struct set *set = &all[count++];
		must(count < (int)(sizeof all / sizeof *all));
		*set = (struct set){.socket = socket, .of = of, .option = it};
		read_one(set, set->value, &set->length);
		/* An option that reads back as before shows nothing. */
		if (memcmp(before, set->value, SIZE) == 0)
			count--;
	}
}
#define GIVE(socket, of, options) give(socket, of, options, sizeof options / sizeof *options)

static void check(int round) {
	int wrong = 0;
	for (int n = 0; n < count; n++) {
		char value[SIZE];
		socklen_t length;
		read_one(&all[n], value, &length);
		if (length == all[n].length && memcmp(value, all[n].value, SIZE) == 0)
			continue;
		print_line("round %d: %s of %s was %d and is %d", round, all[n].option->what, all[n].of,
			   *(int *)all[n].value, *(int *)value);
		wrong++;
	}
	must(wrong == 0);
}

static struct sockaddr_storage at;

static int made(int family, int type, int protocol, int port) {
	int fd = socket(family, type, protocol);
	must(fd >= 0);
	if (port)
		must(bind(fd, (void *)&at, loopback(&at, family, port)) == 0);
	return fd;
}

/* Both ends of a connection. */
static void pair(int family, int port, int ends[2]) {
	int listener = made(family, SOCK_STREAM, 0, port);
	must(listen(listener, 5) == 0);
	ends[0] = made(family, SOCK_STREAM, 0, 0);
	must(connect(ends[0], (void *)&at, loopback(&at, family, port)) == 0);
	ends[1] = accept(listener, 0, 0);
	must(ends[1] >= 0 && close(listener) == 0);
}

int main(void) {
	int families[2] = {AF_INET, AF_INET6}, ends[2][2];
	const char *names[2][4] = {{"UDP", "TCP", "a TCP listener", "a TCP connection"},
				   {"UDP/6", "TCP/6", "a TCP/6 listener", "a TCP/6 connection"}};
	for (int n = 0; n < 2; n++) {
		int family = families[n], udp = made(family, SOCK_DGRAM, 0, 6000 + n);
		int fresh = made(family, SOCK_STREAM, 0, 0);
		int listener = made(family, SOCK_STREAM, 0, 6010 + n);
		must(listen(listener, 5) == 0);
		pair(family, 6020 + n, ends[n]);
		GIVE(udp, names[n][0], datagram);
		GIVE(fresh, names[n][1], unconnected);
		GIVE(listener, names[n][2], unconnected);
		GIVE(listener, names[n][2], listening);
		int sockets[5] = {udp, fresh, listener, ends[n][0], ends[n][1]};
		for (int k = 0; k < 5; k++) {
			const char *name = names[n][k < 3 ? k : 3];
			/* The kernel notes the processor of a connection itself. */
			int left_out = k < 3 ? 0 : SO_INCOMING_CPU;
			for (unsigned o = 0; o < sizeof general / sizeof *general; o++)
				if (!left_out || general[o].name != left_out)
					give(sockets[k], name, &general[o], 1);
			GIVE(sockets[k], name, four);
			if (n)
				GIVE(sockets[k], name, six);
			if (k)
				GIVE(sockets[k], name, stream);
		}
		int other[2];
		pair(family, 6030 + n, other);
		GIVE(other[0], "a TCP connection with time stamps", stamped);
	}
	int unix_pair[2];
	must(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, unix_pair) == 0);
	GIVE(unix_pair[0], "a unix socket", general);
	/* The time stays while the option is off. */
	GIVE(unix_pair[1], "a unix socket", lingers);
	count--;
	GIVE(unix_pair[1], "a unix socket", lingers_no_more);
	print_line("%d options", count);
	must(count > 150);
	for (int round = 0; round < ROUNDS; round++) {
		/* IP_TOS sets SO_PRIORITY, and a read moves SO_PEEK_OFF. */
		for (int n = 0; n < count; n++)
			read_one(&all[n], all[n].value, &all[n].length);
		ready(round);
		check(round);
		/* Connections work, by their limits of hops, too. */
		for (int n = 0; n < 2; n++) {
			char text[8] = "";
			must(send(ends[n][0], "1234567", 7, MSG_NOSIGNAL) == 7);
			must(recv(ends[n][1], text, 7, MSG_WAITALL) == 7 && !strcmp(text, "1234567"));
		}
	}
	ok();
}
