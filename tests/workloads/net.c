/* Private network namespaces: of two processes that share one, with the loopback device up, an
 * address and a setting, and sockets of all kinds under the addresses and names of the container's
 * own; and of a process in one without any set-up. */
#include "workload.h"
#include <arpa/inet.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stddef.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/un.h>

#define WORKERS 3
static int ask[WORKERS][2], answer[WORKERS][2];

static struct sockaddr_in at(const char *ip, int port) {
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};
	must(inet_pton(AF_INET, ip, &a.sin_addr) == 1);
	return a;
}

static int flags(int set) {
	struct ifreq r = {.ifr_name = "lo"};
	int s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	must(s >= 0 && ioctl(s, SIOCGIFFLAGS, &r) == 0);
	r.ifr_flags |= set;
	must(!set || ioctl(s, SIOCSIFFLAGS, &r) == 0);
	close(s);
	return r.ifr_flags;
}

/* ip addr add IP/24 dev lo */
static void add_address(const char *ip) {
	struct {
		struct nlmsghdr head;
		struct ifaddrmsg body;
		char attributes[64];
	} m = {.head = {.nlmsg_type = RTM_NEWADDR,
			.nlmsg_flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE},
	       .body = {.ifa_family = AF_INET, .ifa_prefixlen = 24, .ifa_index = 1}};
	struct sockaddr_in a = at(ip, 0);
	char *to = m.attributes;
	for (int kind = IFA_ADDRESS; kind <= IFA_LABEL; kind++) {
		struct rtattr *one = (void *)to;
		int length = kind == IFA_LABEL ? 3 : 4;
		one->rta_type = kind, one->rta_len = RTA_LENGTH(length);
		memcpy(RTA_DATA(one), kind == IFA_LABEL ? "lo" : (void *)&a.sin_addr, length);
		to += RTA_ALIGN(one->rta_len);
	}
	m.head.nlmsg_len = to - (char *)&m;
	int s = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
	char got[256];
	must(s >= 0 && send(s, &m, m.head.nlmsg_len, 0) == (ssize_t)m.head.nlmsg_len);
	must(recv(s, got, sizeof got, 0) > 0 && ((struct nlmsgerr *)NLMSG_DATA(got))->error == 0);
	close(s);
}

static struct sockaddr_un name(const char *text, socklen_t *length) {
	struct sockaddr_un a = {.sun_family = AF_UNIX};
	strcpy(a.sun_path + (text[0] == '@'), text + (text[0] == '@'));
	*length = offsetof(struct sockaddr_un, sun_path) + strlen(text);
	return a;
}

static int unix_at(const char *text, int connects) {
	socklen_t length;
	struct sockaddr_un a = name(text, &length);
	int s = socket(AF_UNIX, SOCK_STREAM, 0);
	must(s >= 0);
	if (connects)
		must(connect(s, (void *)&a, length) == 0);
	else
		must(bind(s, (void *)&a, length) == 0 && listen(s, 4) == 0);
	return s;
}

/* The same in the container's own namespace and in one of these. */
struct world {
	int listener, client, server, udp, other_udp, named, caller, accepted, pair[2], route;
};

static int listens(const char *ip, int port) {
	struct sockaddr_in a = at(ip, port);
	int s = socket(AF_INET, SOCK_STREAM, 0);
	must(s >= 0 && bind(s, (void *)&a, sizeof a) == 0 && listen(s, 4) == 0);
	return s;
}

static int calls(const char *ip, int port) {
	struct sockaddr_in a = at(ip, port);
	int s = socket(AF_INET, SOCK_STREAM, 0);
	must(s >= 0 && connect(s, (void *)&a, sizeof a) == 0);
	return s;
}

static struct world make(const char *ip, const char *text) {
	struct world w;
	w.listener = listens(ip, 80);
	w.client = calls(ip, 80);
	must((w.server = accept(w.listener, 0, 0)) >= 0);
	must(write(w.client, text, strlen(text)) == (ssize_t)strlen(text));
	struct sockaddr_in a = at(ip, 53);
	w.udp = socket(AF_INET, SOCK_DGRAM, 0), w.other_udp = socket(AF_INET, SOCK_DGRAM, 0);
	must(bind(w.udp, (void *)&a, sizeof a) == 0 && connect(w.other_udp, (void *)&a, sizeof a) == 0);
	must(send(w.other_udp, text, strlen(text), 0) == (ssize_t)strlen(text));
	w.named = unix_at("@same", 0);
	w.caller = unix_at("@same", 1);
	must((w.accepted = accept(w.named, 0, 0)) >= 0);
	must(write(w.caller, text, strlen(text)) == (ssize_t)strlen(text));
	must(socketpair(AF_UNIX, SOCK_STREAM, 0, w.pair) == 0);
	must(write(w.pair[0], text, strlen(text)) == (ssize_t)strlen(text));
	w.route = socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE);
	struct sockaddr_nl n = {.nl_family = AF_NETLINK, .nl_groups = RTMGRP_LINK};
	must(w.route >= 0 && bind(w.route, (void *)&n, sizeof n) == 0);
	return w;
}

/* Waiting data is received, and sent again. */
static void holds(int reader, int writer, const char *text) {
	char got[64];
	must(recv(reader, got, sizeof got, 0) == (ssize_t)strlen(text));
	must(memcmp(got, text, strlen(text)) == 0);
	must(write(writer, text, strlen(text)) == (ssize_t)strlen(text));
}

static void is(struct world *w, const char *ip, const char *text) {
	holds(w->server, w->client, text), holds(w->udp, w->other_udp, text);
	holds(w->accepted, w->caller, text), holds(w->pair[1], w->pair[0], text);
	int caller = calls(ip, 80), server = accept(w->listener, 0, 0);
	must(server >= 0 && write(caller, "x", 1) == 1);
	char c;
	must(read(server, &c, 1) == 1 && c == 'x');
	close(caller), close(server);
	caller = unix_at("@same", 1), server = accept(w->named, 0, 0);
	must(server >= 0 && write(caller, "y", 1) == 1 && read(server, &c, 1) == 1 && c == 'y');
	close(caller), close(server);
	/* A dump of links returns one, the loopback device. */
	struct {
		struct nlmsghdr head;
		struct rtgenmsg body;
	} m = {.head = {.nlmsg_len = NLMSG_LENGTH(sizeof m.body), .nlmsg_type = RTM_GETLINK,
			.nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP}};
	must(send(w->route, &m, m.head.nlmsg_len, 0) == (ssize_t)m.head.nlmsg_len);
	char got[16384];
	for (int done = 0; !done;) {
		ssize_t n = recv(w->route, got, sizeof got, 0);
		must(n > 0);
		for (struct nlmsghdr *h = (void *)got; NLMSG_OK(h, n); h = NLMSG_NEXT(h, n))
			done |= h->nlmsg_type == NLMSG_DONE;
	}
}

static int forwards(void) {
	char c = 0;
	int fd = open("/proc/sys/net/ipv4/ip_forward", O_RDONLY);
	must(fd >= 0 && read(fd, &c, 1) == 1);
	close(fd);
	return c == '1';
}

/* Whether a new namespace forwards, as the host does. */
static int host_forwards;

static void serve(int number, struct world *w, int journal) {
	char c;
	while (read(ask[number][0], &c, 1) == 1) {
		if (w) {
			must(forwards() != host_forwards && flags(0) & IFF_UP);
			is(w, "127.0.0.1", "inner");
			int s = listens("10.9.8.7", 1234);
			close(s);
		} else {
			must(forwards() == host_forwards && !(flags(0) & IFF_UP));
			struct sockaddr_in a = at("127.0.0.1", 80);
			int s = socket(AF_INET, SOCK_STREAM, 0);
			must(connect(s, (void *)&a, sizeof a) == -1 && errno == ENETUNREACH);
			close(s);
		}
		/* A listener at a path is reachable from every namespace. */
		must(write(journal, &c, 1) == 1 && read(journal, &c, 1) == 1);
		must(write(answer[number][1], &c, 1) == 1);
	}
	_exit(0);
}

int main(void) {
	int journal = unix_at("/journal", 0), line[WORKERS];
	for (int n = 0; n < WORKERS; n++)
		must(pipe(ask[n]) == 0 && pipe(answer[n]) == 0);
	must(flags(0) & IFF_UP);
	host_forwards = forwards();
	if (fork() == 0) {
		must(unshare(CLONE_NEWNET) == 0);
		flags(IFF_UP);
		add_address("10.9.8.7");
		int fd = open("/proc/sys/net/ipv4/ip_forward", O_WRONLY);
		must(fd >= 0 && write(fd, host_forwards ? "0" : "1", 1) == 1 && close(fd) == 0);
		struct world w = make("127.0.0.1", "inner");
		if (fork() == 0)
			serve(0, &w, unix_at("/journal", 1));
		serve(1, &w, unix_at("/journal", 1));
	}
	must((line[0] = accept(journal, 0, 0)) >= 0 && (line[1] = accept(journal, 0, 0)) >= 0);
	if (fork() == 0) {
		must(unshare(CLONE_NEWNET) == 0);
		serve(2, 0, unix_at("/journal", 1));
	}
	must((line[2] = accept(journal, 0, 0)) >= 0);
	struct world w = make("127.0.0.1", "outer");
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		must(forwards() == host_forwards);
		is(&w, "127.0.0.1", "outer");
		for (int n = 0; n < WORKERS; n++) {
			char c = 'a' + n;
			must(write(ask[n][1], &c, 1) == 1);
			/* Each of the first two has one of these connections. */
			int from = -1;
			while (from < 0)
				for (int k = 0; k < WORKERS; k++)
					if (recv(line[k], &c, 1, MSG_DONTWAIT) == 1)
						from = k;
			must(c == 'a' + n && write(line[from], &c, 1) == 1);
			must(read(answer[n][0], &c, 1) == 1 && c == 'a' + n);
		}
	}
	ok();
}
