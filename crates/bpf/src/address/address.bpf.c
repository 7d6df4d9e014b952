/* Address networking: many containers in one network stack, each with addresses of its own.
 *
 * The stack of a trust domain has the whole pool as local addresses (AnyIP) and no interface per
 * container. These programs are attached to the parent cgroup of all containers and make each see
 * only its own addresses:
 *
 * - identity: dm_sock_create finds the container by the cgroup of the creating task and stores it
 *   with the socket. All other programs use the identity of the socket, never of the task: a
 *   descriptor that is passed on keeps its identity, and a socket of a nested network namespace has
 *   none.
 * - bind: "any" becomes the container's own address, loopback its private loopback, its own
 *   addresses pass, all others do not exist (EADDRNOTAVAIL). `::` without IPV6_V6ONLY becomes the
 *   mapped IPv4 address, because most connections use IPv4.
 * - connect and sendto: loopback leads to the private loopback, and the source becomes its own. If
 *   other containers have bound the ports that the kernel chooses from, a connection has one of a
 *   reserve (record.h).
 * - getsockname, getpeername, recvfrom: the private loopback reads as 127.0.0.0/26 or ::1 again,
 *   and "any" as any.
 * - ingress and egress: a packet reaches a socket only if it is addressed to that container, and
 *   leaves only from one of its addresses. Cases without a hook are covered by this: listen()
 *   without bind(), UDP sockets that were never bound, IP_PKTINFO. The private loopback takes
 *   packets from the loopback device only.
 * - steer, on the domain's devices: a socket bound to "any" has one address; a connection to
 *   another of the container's addresses (::1, 127.0.0.1, IPv6, an added one) is assigned to it,
 *   unless a socket is bound to exactly that address. Packets keep their addresses, nothing is
 *   translated. Two packets of a connection need this: the first one (SYN), and that which ends a
 *   handshake by a SYN cookie, for which the kernel has kept nothing.
 * - on the pair of a container with a stack of its own (--net private): a packet enters the domain's
 *   stack only from the addresses of that container, network and hardware. The number of the device
 *   says which container it is (record.h).
 *
 * Hooks: all programs but the last are attached to the parent cgroup (BPF_PROG_ATTACH, several per
 * hook). Those of system calls run in the context of the calling task and before the kernel acts;
 * those of packets run in softirq, for the cgroup that the socket was created in. A program of a
 * cgroup returns 1 to let the kernel go on and 0 to refuse. The kernel runs them for every task and
 * socket below the parent cgroup: each program therefore first looks for the identity and does
 * nothing without one. No program may sleep.
 *
 * Trust: a container controls all arguments of its calls and all bytes of its packets. It controls
 * neither its cgroup nor the storage of a socket. Every value from a call or packet is compared with
 * the identity before it is used.
 *
 * LIMIT: a UDP or TCP socket that is bound to `::` for both families cannot be *connected* to an
 * IPv6 address afterwards. 127.0.0.0/26 keeps its 64 addresses apart, the rest of 127/8 is one
 * more. Multicast and broadcast do not reach containers.
 *
 * KERNEL(6.12): written for; needs netns cookies (5.7), bpf_set_retval (5.18), sk storage in all of
 * these hooks, getsockname hooks (5.8), bpf_tcp_raw_check_syncookie_ipv4 (6.0), TCX (6.6). */
#include <linux/types.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_core_read.h>
#include "../identity/identity.h"
#include "../identity/wire.h"
#include "record.h"

#define AF_INET 2
#define AF_INET6 10
#define SOCK_STREAM 1
#define SOCK_DGRAM 2
#define SOCK_RAW 3
#define IP_TCP 6
#define IP_UDP 17
#define IP_ICMP 1
#define IP_ICMP6 58
#define ETH_IP 0x0800
#define ETH_IP6 0x86DD
#define ETH_ARP 0x0806
#define ETH_HEADER 14
#define IP6_HOPS 0 /* headers between that of IPv6 and the transport's: hop-by-hop options, */
#define IP6_ROUTING 43
#define IP6_FRAGMENT 44
#define IP6_OPTIONS 60 /* options of the destination */
#define IP6_HEADERS_MAX 8
#define ICMP_UNREACHABLE 3
#define ICMP_FRAGMENTATION_NEEDED 4 /* a code of ICMP_UNREACHABLE */
#define ICMP_REDIRECT 5
#define ICMP6_TOO_BIG 2
#define ND_SOLICITATION 135
#define ND_ADVERTISEMENT 136
#define ND_REDIRECT 137
#define LOOPBACK_DEVICE 1 /* of every network namespace */
#define STATE_ESTABLISHED 1
#define STATE_CLOSE 7
#define STATE_LISTEN 10
#define E_PERM 1
#define E_PROTONOSUPPORT 93
#define E_ADDRNOTAVAIL 99

const volatile struct dm_config config SEC(".rodata.config") = {};

/* Cgroup id -> identity. Earlier versions attached programs with the same map; a newer build takes it
 * over, so its sizes are fixed. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DM_CONTAINERS_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, struct dm_identity);
} dm_members SEC(".maps");

/* Index of an added address -> index of the container's first one. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DM_EXTRA_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, __u32);
} dm_extra SEC(".maps");

/* Cookies of the domains' stacks: below our cgroup only members create sockets there. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DM_DOMAINS_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, __u32);
} dm_domains SEC(".maps");

/* The identity of a socket. BPF_F_CLONE: an accepted connection inherits it from its listener. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_CLONE);
	__type(key, int);
	__type(value, struct dm_socket);
} dm_sockets SEC(".maps");

/* The version of the group, written last (group.rs). */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct dm_about);
} dm_about SEC(".maps");

/* struct sockaddr_in and sockaddr_in6, for bpf_bind(). */
struct sockaddr;
struct address4 {
	__u16 family;
	__be16 port;
	__be32 address;
	__u8 zero[8];
};
struct address6 {
	__u16 family;
	__be16 port;
	__be32 flow;
	__be32 address[4];
	__u32 scope;
};

/* Parts of the kernel's own structs that no helper returns: one bit of a socket, and the table of
 * bound TCP ports of its stack. */
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct hlist_node {
	struct hlist_node *next;
};
struct hlist_head {
	struct hlist_node *first;
};
struct net;
typedef struct {
	struct net *net;
} possible_net_t;
struct inet_bind_bucket {
	possible_net_t ib_net;
	unsigned short port;
	signed char fastreuse;
	signed char fastreuseport;
	struct hlist_node node;
};
struct inet_bind_hashbucket {
	struct hlist_head chain;
};
struct inet_hashinfo {
	struct inet_bind_hashbucket *bhash;
	unsigned int bhash_size;
};
struct inet_timewait_death_row {
	struct inet_hashinfo *hashinfo;
};
struct netns_ipv4 {
	struct inet_timewait_death_row tcp_death_row;
};
struct net {
	__u32 hash_mix;
	struct netns_ipv4 ipv4;
};
struct sock_common {
	possible_net_t skc_net;
	unsigned char skc_ipv6only : 1;
};
struct sock {
	struct sock_common __sk_common;
};
struct bpf_sock_addr_kern {
	struct sock *sk;
};
#pragma clang attribute pop
extern void *bpf_cast_to_kern_ctx(void *ctx) __ksym;

/* Third word of an IPv4 address mapped into IPv6: ::ffff:0:0/96. */
#define MAPPED bpf_htonl(0xffff)

/* 127.0.0.0/8 */
static __always_inline int is_loop4(__be32 a)
{
	return (a & bpf_htonl(0xff000000)) == bpf_htonl(0x7f000000);
}

/* The IPv4 address with this index. */
static __always_inline __be32 own4(__u32 index)
{
	return bpf_htonl(config.pool4 + index);
}

/* The container's loopback address for 127.0.0.N, one of 64; the last one for all N beyond. */
static __always_inline __be32 own_loop4(__u32 index, __be32 asked)
{
	__u32 a = bpf_ntohl(asked) & 0xffffff;

	if ((a >> 6) == index) /* read from /proc/net or a packet: it is in our form already */
		return asked;
	return bpf_htonl(0x7f000000 | index << 6 | (a < 63 ? a : 63));
}

/* The reverse: the loopback address that a program of the container sees. */
static __always_inline __be32 plain_loop4(__be32 a)
{
	return bpf_htonl(0x7f000000 | (bpf_ntohl(a) & 63));
}

/* Whether a loopback address is one of the container's 64. Index 0 is no container's: 127.0.0.0/26 is
 * the range that programs use. */
static __always_inline int owns_loop4(__u32 index, __be32 a)
{
	return is_loop4(a) && (bpf_ntohl(a) & 0xffffff) >> 6 == index;
}

/* Whether `number` of the pool belongs to the container. */
static __always_inline int owns_number(__u32 index, __u32 number)
{
	__u32 *owner;

	if (number == index)
		return 1;
	if (number >= config.pool_count) /* spares the lookup for foreign addresses */
		return 0;
	owner = bpf_map_lookup_elem(&dm_extra, &number);
	return owner && *owner == index;
}

static __always_inline int owns4(__u32 index, __be32 a)
{
	return owns_number(index, bpf_ntohl(a) - config.pool4);
}

/* The domain's own address, the source of its pings: no container has it, and it receives only echo
 * replies. */
static __always_inline int is_domain_number(__u32 number)
{
	return number < config.pool_count && (number & (config.chunk - 1)) == 2;
}

/* PREFIX::/96: the IPv6 address of any container. */
static __always_inline int is_public6(const __u32 *a)
{
	return a[0] == config.public6[0] && a[1] == config.public6[1] && a[2] == config.public6[2];
}

/* The private ::1 of any container. */
static __always_inline int is_loop6(const __u32 *a)
{
	return a[0] == config.loop6[0] && a[1] == config.loop6[1] && a[2] == config.loop6[2];
}

static __always_inline int is_own_loop6(__u32 index, const __u32 *a)
{
	return is_loop6(a) && a[3] == bpf_htonl(index);
}

static __always_inline int is_one6(const __u32 *a) /* ::1 */
{
	return a[0] == 0 && a[1] == 0 && a[2] == 0 && a[3] == bpf_htonl(1);
}

static __always_inline int is_zero6(const __u32 *a)
{
	return a[0] == 0 && a[1] == 0 && a[2] == 0 && a[3] == 0;
}

static __always_inline int is_mapped6(const __u32 *a)
{
	return a[0] == 0 && a[1] == 0 && a[2] == MAPPED;
}

static __always_inline int owns6(__u32 index, const __u32 *a)
{
	return is_public6(a) && owns_number(index, bpf_ntohl(a[3]));
}

/* The identity of a socket; 0 for a socket of no container, which the programs leave alone. */
static __always_inline struct dm_socket *self(struct bpf_sock *sk)
{
	return sk ? bpf_sk_storage_get(&dm_sockets, sk, 0, 0) : 0;
}

static __always_inline int is_ping(struct bpf_sock *sk)
{
	return sk->protocol == IP_ICMP || sk->protocol == IP_ICMP6;
}

#define READ6(a, field) __u32 a[4] = { (field)[0], (field)[1], (field)[2], (field)[3] }
#define WRITE6(field, w0, w1, w2, w3)                                                              \
	do {                                                                                       \
		(field)[0] = (w0);                                                                 \
		(field)[1] = (w1);                                                                 \
		(field)[2] = (w2);                                                                 \
		(field)[3] = (w3);                                                                 \
	} while (0)

/* ---- birth ---- */

/* socket(2) with AF_INET or AF_INET6, before the socket is used; not for accepted connections. Here
 * alone the identity comes from the task. */
SEC("cgroup/sock_create")
int dm_sock_create(struct bpf_sock *ctx)
{
	__u64 cgroup = dm_current_container(config.level);
	__u64 netns = bpf_get_netns_cookie(ctx);
	struct dm_identity *identity = bpf_map_lookup_elem(&dm_members, &cgroup);
	struct dm_socket *socket;

	if (!identity || identity->netns != netns) {
		/* Another stack: the host's (--net host) or a nested one. In a domain's stack it is a process
		 * whose container has left: no network for it. */
		if (!bpf_map_lookup_elem(&dm_domains, &netns))
			return 1;
		bpf_set_retval(-E_PERM);
		return 0;
	}
	/* A raw socket reads and writes the addresses of other containers. */
	if (ctx->type == SOCK_RAW) {
		bpf_set_retval(-E_PERM);
		return 0;
	}
	/* MPTCP, SCTP and UDP-Lite bind on paths without these hooks; programs fall back to TCP and UDP. */
	if (!(ctx->type == SOCK_STREAM && ctx->protocol == IP_TCP) &&
	    !(ctx->type == SOCK_DGRAM &&
	      (ctx->protocol == IP_UDP || ctx->protocol == IP_ICMP || ctx->protocol == IP_ICMP6))) {
		bpf_set_retval(-E_PROTONOSUPPORT);
		return 0;
	}
	socket = bpf_sk_storage_get(&dm_sockets, ctx, 0, BPF_SK_STORAGE_GET_F_CREATE);
	/* No memory: a socket without an identity would not be confined. */
	if (!socket) {
		bpf_set_retval(-E_PERM);
		return 0;
	}
	socket->index = identity->address;
	return 1;
}

/* ---- addresses that a socket takes ---- */

static __always_inline int refuse_bind(void)
{
	bpf_set_retval(-E_ADDRNOTAVAIL);
	return 0;
}

/* bind(2) of an AF_INET socket. The kernel binds the address that is left in ctx. It has not compared it
 * with the stack's own addresses yet, and the whole pool is among those: here alone is decided whose
 * an address is. */
SEC("cgroup/bind4")
int dm_bind4(struct bpf_sock_addr *ctx)
{
	struct dm_socket *socket = self(ctx->sk);
	__be32 asked = ctx->user_ip4;

	if (!socket)
		return 1;
	socket->any = 0;
	socket->named4 = 0;
	if (asked == 0) {
		socket->any = DM_ANY_4;
		ctx->user_ip4 = own4(socket->index);
		return 1;
	}
	if (is_loop4(asked)) {
		socket->named4 = asked;
		ctx->user_ip4 = own_loop4(socket->index, asked);
		return 1;
	}
	return owns4(socket->index, asked) ? 1 : refuse_bind();
}

/* bind(2) of an AF_INET6 socket, mapped IPv4 addresses included. */
SEC("cgroup/bind6")
int dm_bind6(struct bpf_sock_addr *ctx)
{
	struct dm_socket *socket = self(ctx->sk);
	READ6(asked, ctx->user_ip6);

	if (!socket)
		return 1;
	socket->any = 0;
	socket->named4 = 0;
	if (is_zero6(asked)) {
		struct bpf_sock_addr_kern *kern = bpf_cast_to_kern_ctx(ctx);
		/* Not by direct access: for each access the verifier searches all of the kernel's types. */
		struct sock *sk = BPF_CORE_READ(kern, sk);

		if (BPF_CORE_READ_BITFIELD_PROBED(sk, __sk_common.skc_ipv6only)) {
			socket->any = DM_ANY_6;
			WRITE6(ctx->user_ip6, config.public6[0], config.public6[1],
			       config.public6[2], bpf_htonl(socket->index));
		} else {
			socket->any = DM_ANY_BOTH;
			WRITE6(ctx->user_ip6, 0, 0, MAPPED, own4(socket->index));
		}
		return 1;
	}
	if (is_one6(asked)) {
		WRITE6(ctx->user_ip6, config.loop6[0], config.loop6[1], config.loop6[2],
		       bpf_htonl(socket->index));
		return 1;
	}
	if (is_mapped6(asked)) {
		if (asked[3] == 0) {
			socket->any = DM_ANY_4;
			ctx->user_ip6[3] = own4(socket->index);
			return 1;
		}
		if (is_loop4(asked[3])) {
			socket->named4 = asked[3];
			ctx->user_ip6[3] = own_loop4(socket->index, asked[3]);
			return 1;
		}
		return owns4(socket->index, asked[3]) ? 1 : refuse_bind();
	}
	return owns6(socket->index, asked) ? 1 : refuse_bind();
}

/* ---- destination and source addresses ---- */

/* Whether this kernel's table has the expected form; otherwise connections have no reserve. The
 * verifier removes the code behind a 0, which could not be loaded on that kernel. */
static __always_inline int has_table(void)
{
	return bpf_core_field_exists(struct net, hash_mix) &&
	       bpf_core_field_exists(struct netns_ipv4, tcp_death_row) &&
	       bpf_core_field_exists(struct inet_timewait_death_row, hashinfo) &&
	       bpf_core_field_exists(struct inet_hashinfo, bhash) &&
	       bpf_core_field_exists(struct inet_hashinfo, bhash_size) &&
	       bpf_core_field_exists(struct inet_bind_hashbucket, chain) &&
	       bpf_core_field_exists(struct inet_bind_bucket, node) &&
	       bpf_core_field_exists(struct inet_bind_bucket, ib_net) &&
	       bpf_core_field_exists(struct inet_bind_bucket, port) &&
	       bpf_core_field_exists(struct inet_bind_bucket, fastreuse) &&
	       bpf_core_field_exists(struct inet_bind_bucket, fastreuseport);
}

/* Whether any socket of the stack has bound a TCP port, in which case the kernel gives it to no
 * connection. The table is read without its lock: the answer is a hint, and a wrong one costs a port
 * of the reserve or a refusal that the kernel would give anyway. */
static __always_inline int is_bound(struct net *net, __u32 port)
{
	struct inet_hashinfo *table = BPF_CORE_READ(net, ipv4.tcp_death_row.hashinfo);
	struct inet_bind_hashbucket *buckets = BPF_CORE_READ(table, bhash);
	/* inet_bhashfn(), net_hash_mix() */
	__u32 hash = (port + BPF_CORE_READ(net, hash_mix)) & (BPF_CORE_READ(table, bhash_size) - 1);
	/* A bucket is larger than the part that is declared here. */
	__u64 bucket = (__u64)buckets + hash * bpf_core_type_size(struct inet_bind_hashbucket);
	struct hlist_node *node = BPF_CORE_READ((struct inet_bind_hashbucket *)bucket, chain.first);

	/* Ports of all stacks share the table, one entry per stack and port. A longer chain counts as
	 * not bound. */
	for (int i = 0; i < 8 && node; i++) {
		struct inet_bind_bucket *entry =
			(void *)node - bpf_core_field_offset(struct inet_bind_bucket, node);

		if (BPF_CORE_READ(entry, port) == port && BPF_CORE_READ(entry, ib_net.net) == net)
			return BPF_CORE_READ(entry, fastreuse) >= 0 ||
			       BPF_CORE_READ(entry, fastreuseport) >= 0;
		node = BPF_CORE_READ(node, next);
	}
	return 0;
}

/* Whether nearly all ports that the kernel would choose from are bound. */
static __noinline int is_full(struct bpf_sock_addr *ctx)
{
	struct bpf_sock_addr_kern *kern = bpf_cast_to_kern_ctx(ctx);
	struct sock *sk = BPF_CORE_READ(kern, sk);
	struct net *net = BPF_CORE_READ(sk, __sk_common.skc_net.net);

	if (!has_table())
		return 0;
	for (int i = 0; i < DM_PORT_SAMPLES; i++) {
		__u32 random = bpf_get_prandom_u32() % (DM_PORT_MAX - DM_PORT_MIN + 1);

		if (!is_bound(net, DM_PORT_MIN + random))
			return 0;
	}
	return 1;
}

/* Whether a socket has no port yet and gets one in connect(2) from a range that is full. */
static __always_inline int needs_reserve(struct bpf_sock_addr *ctx)
{
	return ctx->type == SOCK_STREAM && ctx->sk->src_port == 0 && is_full(ctx);
}

static __always_inline __be16 reserve_port(void)
{
	__u32 random = bpf_get_prandom_u32() % (DM_RESERVE_MAX - DM_RESERVE_MIN + 1);

	return bpf_htons(DM_RESERVE_MIN + random);
}

/* Binds a socket to `from`, with a port of the reserve if it needs one. bpf_bind() fails if a socket of
 * the same container has the port, and for a UDP socket that was disconnected and has kept its port;
 * the kernel, and for packets the egress program, then decides. */
#define BIND_SOURCE(ctx, from, is_unbound)                                                         \
	do {                                                                                       \
		int _done = 0;                                                                     \
		if (needs_reserve(ctx)) {                                                          \
			for (int _i = 0; _i < DM_RESERVE_TRIES && !_done; _i++) {                  \
				(from).port = reserve_port();                                      \
				_done = !bpf_bind(ctx, (struct sockaddr *)&(from), sizeof(from));  \
			}                                                                          \
			(from).port = 0;                                                           \
		}                                                                                  \
		if (!_done && (is_unbound))                                                        \
			bpf_bind(ctx, (struct sockaddr *)&(from), sizeof(from));                   \
	} while (0)

/* Whether a socket has no address yet. */
static __always_inline int is_unbound(struct bpf_sock *sk)
{
	return sk->src_ip4 == 0 && sk->src_ip6[0] == 0 && sk->src_ip6[1] == 0 &&
	       sk->src_ip6[2] == 0 && sk->src_ip6[3] == 0;
}

/* connect(2) of an AF_INET socket, before the kernel chooses route, source and port. */
SEC("cgroup/connect4")
int dm_connect4(struct bpf_sock_addr *ctx)
{
	struct dm_socket *socket = self(ctx->sk);
	struct address4 from = { .family = AF_INET };
	__be32 to = ctx->user_ip4;

	if (!socket)
		return 1;
	if (to == 0) /* the kernel takes "any" for the loopback address */
		to = bpf_htonl(0x7f000001);
	if (is_loop4(to)) {
		if (is_ping(ctx->sk)) /* the domain's own loopback answers pings */
			return 1;
		to = own_loop4(socket->index, to);
		from.address = own_loop4(socket->index, bpf_htonl(0x7f000001));
		ctx->user_ip4 = to;
	} else {
		from.address = own4(socket->index);
	}
	/* An address without a port (IP_BIND_ADDRESS_NO_PORT) stays. */
	if (ctx->sk->src_ip4)
		from.address = ctx->sk->src_ip4;
	BIND_SOURCE(ctx, from, ctx->sk->src_ip4 == 0);
	return 1;
}

/* connect(2) of an AF_INET6 socket, to mapped IPv4 addresses as well. */
SEC("cgroup/connect6")
int dm_connect6(struct bpf_sock_addr *ctx)
{
	struct dm_socket *socket = self(ctx->sk);
	struct address6 from = { .family = AF_INET6 };
	READ6(to, ctx->user_ip6);

	if (!socket)
		return 1;
	if (is_mapped6(to)) {
		from.address[2] = MAPPED;
		if (to[3] == 0)
			to[3] = bpf_htonl(0x7f000001);
		if (is_loop4(to[3])) {
			ctx->user_ip6[3] = own_loop4(socket->index, to[3]);
			from.address[3] = own_loop4(socket->index, bpf_htonl(0x7f000001));
		} else {
			from.address[3] = own4(socket->index);
		}
	} else if (is_zero6(to) || is_one6(to) || is_loop6(to)) {
		if (is_ping(ctx->sk))
			return 1;
		WRITE6(ctx->user_ip6, config.loop6[0], config.loop6[1], config.loop6[2],
		       bpf_htonl(socket->index));
		WRITE6(from.address, config.loop6[0], config.loop6[1], config.loop6[2],
		       bpf_htonl(socket->index));
	} else {
		WRITE6(from.address, config.public6[0], config.public6[1], config.public6[2],
		       bpf_htonl(socket->index));
	}
	if (!is_unbound(ctx->sk))
		WRITE6(from.address, ctx->sk->src_ip6[0], ctx->sk->src_ip6[1], ctx->sk->src_ip6[2],
		       ctx->sk->src_ip6[3]);
	BIND_SOURCE(ctx, from, is_unbound(ctx->sk));
	return 1;
}

/* A connected socket that sends with control data: there is no address in the call, only a source. */
static __always_inline int is_to_peer(struct bpf_sock_addr *ctx)
{
	return ctx->user_family == 0;
}

/* sendto(2) and sendmsg(2) of a UDP socket with an address or control data. */
SEC("cgroup/sendmsg4")
int dm_sendmsg4(struct bpf_sock_addr *ctx)
{
	struct dm_socket *socket = self(ctx->sk);
	__be32 to = ctx->user_ip4, from = ctx->msg_src_ip4;
	__be32 loop;

	if (!socket)
		return 1;
	if (to == 0 && !is_to_peer(ctx))
		to = bpf_htonl(0x7f000001);
	if (is_loop4(to)) {
		ctx->user_ip4 = own_loop4(socket->index, to);
		/* A reply of a socket bound to "any" has the loopback address of the request as its source. */
		loop = own_loop4(socket->index, bpf_htonl(0x7f000001));
		if (!owns_loop4(socket->index, from) && (from == 0 || socket->any))
			ctx->msg_src_ip4 = loop;
		return 1;
	}
	/* An added address selected by IP_PKTINFO stays; another container's does not. */
	if (!owns_loop4(socket->index, from) && !owns4(socket->index, from))
		ctx->msg_src_ip4 = own4(socket->index);
	return 1;
}

/* The same of an AF_INET6 socket. */
SEC("cgroup/sendmsg6")
int dm_sendmsg6(struct bpf_sock_addr *ctx)
{
	struct dm_socket *socket = self(ctx->sk);
	READ6(to, ctx->user_ip6);
	READ6(from, ctx->msg_src_ip6);

	if (!socket)
		return 1;
	if (is_mapped6(to)) /* the IPv4 hook sees it next */
		return 1;
	if (!is_to_peer(ctx) && (is_zero6(to) || is_one6(to) || is_loop6(to))) {
		WRITE6(ctx->user_ip6, config.loop6[0], config.loop6[1], config.loop6[2],
		       bpf_htonl(socket->index));
		WRITE6(ctx->msg_src_ip6, config.loop6[0], config.loop6[1], config.loop6[2],
		       bpf_htonl(socket->index));
		return 1;
	}
	if (!is_own_loop6(socket->index, from) && !owns6(socket->index, from))
		WRITE6(ctx->msg_src_ip6, config.public6[0], config.public6[1], config.public6[2],
		       bpf_htonl(socket->index));
	return 1;
}

/* ---- names reported to programs ---- */

/* Replaces a private loopback address in the result of a call by the usual one. No decision depends on
 * these programs: they only hide where a container's loopback is. */
static __always_inline void report4(struct bpf_sock_addr *ctx)
{
	struct dm_socket *socket = self(ctx->sk);

	if (socket && owns_loop4(socket->index, ctx->user_ip4))
		ctx->user_ip4 = plain_loop4(ctx->user_ip4);
}

static __always_inline void report6(struct bpf_sock_addr *ctx)
{
	struct dm_socket *socket = self(ctx->sk);
	READ6(a, ctx->user_ip6);

	if (!socket)
		return;
	if (is_own_loop6(socket->index, a))
		WRITE6(ctx->user_ip6, 0, 0, 0, bpf_htonl(1));
	else if (is_mapped6(a) && owns_loop4(socket->index, a[3]))
		ctx->user_ip6[3] = plain_loop4(a[3]);
}

SEC("cgroup/recvmsg4")
int dm_recvmsg4(struct bpf_sock_addr *ctx)
{
	report4(ctx);
	return 1;
}

SEC("cgroup/recvmsg6")
int dm_recvmsg6(struct bpf_sock_addr *ctx)
{
	report6(ctx);
	return 1;
}

SEC("cgroup/getpeername4")
int dm_peername4(struct bpf_sock_addr *ctx)
{
	report4(ctx);
	return 1;
}

SEC("cgroup/getpeername6")
int dm_peername6(struct bpf_sock_addr *ctx)
{
	report6(ctx);
	return 1;
}

/* A socket bound to "any" without a peer: the kernel would report "any". */
static __always_inline int is_any(struct dm_socket *socket, struct bpf_sock *sk)
{
	return socket->any && (sk->state == STATE_LISTEN || sk->state == STATE_CLOSE);
}

SEC("cgroup/getsockname4")
int dm_sockname4(struct bpf_sock_addr *ctx)
{
	struct dm_socket *socket = self(ctx->sk);

	if (!socket)
		return 1;
	if (is_any(socket, ctx->sk))
		ctx->user_ip4 = 0;
	else if (socket->named4 && owns_loop4(socket->index, ctx->user_ip4))
		ctx->user_ip4 = socket->named4;
	else
		report4(ctx);
	return 1;
}

SEC("cgroup/getsockname6")
int dm_sockname6(struct bpf_sock_addr *ctx)
{
	struct dm_socket *socket = self(ctx->sk);

	if (!socket)
		return 1;
	if (is_any(socket, ctx->sk)) {
		if (socket->any == DM_ANY_4)
			ctx->user_ip6[3] = 0;
		else
			WRITE6(ctx->user_ip6, 0, 0, 0, 0);
	} else {
		report6(ctx);
	}
	return 1;
}

/* ---- packets ---- */

static __always_inline int load4(struct __sk_buff *skb, __u32 offset, __be32 *a)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;

	if (data + 20 > end)
		return 0;
	*a = *(__be32 *)(data + offset);
	return 1;
}

static __always_inline int load6(struct __sk_buff *skb, __u32 offset, __u32 *a)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;

	if (data + 40 > end)
		return 0;
	WRITE6(a, ((__u32 *)(data + offset))[0], ((__u32 *)(data + offset))[1],
	       ((__u32 *)(data + offset))[2], ((__u32 *)(data + offset))[3]);
	return 1;
}

/* Whether a packet may pass a container's socket: the address on our side must be the container's,
 * and a private loopback address only exchanges packets with its own container, over the loopback
 * device. */
static __always_inline int passes(struct __sk_buff *skb, const int incoming)
{
	struct bpf_sock *sk = skb->sk;
	int local = skb->ifindex == LOOPBACK_DEVICE;
	struct dm_socket *socket;
	__u32 ours[4], theirs[4];

	if (!sk)
		return 1;
	/* 0 for a connection that is not complete, or waits in TIME_WAIT: no data of its packets reaches a
	 * program. */
	sk = bpf_sk_fullsock(sk);
	socket = self(sk);
	if (!socket)
		return 1;
	if (skb->protocol == bpf_htons(ETH_IP)) {
		if (!load4(skb, incoming ? 16 : 12, &ours[0]))
			return 0;
		if (owns4(socket->index, ours[0]))
			return 1;
		if (owns_loop4(socket->index, ours[0]))
			return local && load4(skb, incoming ? 12 : 16, &theirs[0]) &&
			       (owns_loop4(socket->index, theirs[0]) ||
				owns4(socket->index, theirs[0]));
		if (!is_ping(sk))
			return 0;
		if (!incoming) /* its source does not say which container sends */
			skb->priority = DM_PRIORITY_PING | socket->index;
		return (ours[0] == bpf_htonl(0x7f000001) && local) ||
		       is_domain_number(bpf_ntohl(ours[0]) - config.pool4);
	}
	if (skb->protocol != bpf_htons(ETH_IP6) || !load6(skb, incoming ? 24 : 8, ours))
		return 0;
	if (owns6(socket->index, ours))
		return 1;
	if (is_own_loop6(socket->index, ours))
		return local && load6(skb, incoming ? 8 : 24, theirs) &&
		       (is_own_loop6(socket->index, theirs) || owns6(socket->index, theirs));
	if (!is_ping(sk))
		return 0;
	if (!incoming)
		skb->priority = DM_PRIORITY_PING | socket->index;
	return (is_one6(ours) && local) ||
	       (is_public6(ours) && is_domain_number(bpf_ntohl(ours[3])));
}

/* A packet that was delivered to a socket, before it is queued. */
SEC("cgroup_skb/ingress")
int dm_ingress(struct __sk_buff *skb)
{
	return passes(skb, 1);
}

/* A packet of a socket, behind the routing decision. */
SEC("cgroup_skb/egress")
int dm_egress(struct __sk_buff *skb)
{
	return passes(skb, 0);
}

/* ---- a packet for another address of a socket bound to "any" ---- */

/* The socket that a normal lookup finds for a packet sent to `to`. The caller releases it. */
static __always_inline struct bpf_sock *find(struct __sk_buff *skb, struct bpf_sock_tuple *to,
					     int is6, int udp)
{
	__u32 size = is6 ? sizeof(to->ipv6) : sizeof(to->ipv4);

	if (udp)
		return bpf_sk_lookup_udp(skb, to, size, BPF_F_CURRENT_NETNS, 0);
	return bpf_sk_lookup_tcp(skb, to, size, BPF_F_CURRENT_NETNS, 0);
}

/* Assigns the packet to the socket found at `to`, if that one is bound to any of `wanted`. Returns 1
 * if done. */
static __always_inline int lead(struct __sk_buff *skb, struct bpf_sock_tuple *to, int is6, int udp,
				__u32 index, __u32 wanted)
{
	struct bpf_sock *sk = find(skb, to, is6, udp);
	struct dm_socket *socket;
	int done = 0;

	if (!sk)
		return 0;
	socket = bpf_sk_storage_get(&dm_sockets, sk, 0, 0);
	if (socket && socket->index == index && (socket->any & wanted) == wanted)
		done = bpf_sk_assign(skb, sk, 0) == 0;
	bpf_sk_release(sk);
	return done;
}

/* Whether a TCP segment ends a handshake by a SYN cookie: the kernel has answered the SYN and kept nothing of it, so a
 * normal lookup finds a listener or nothing, and the listener makes the connection from the numbers of this segment.
 * `ip` and `tcp` are headers in the linear data. The number is a keyed hash of the addresses, the ports, the minute and
 * the client's first number, so no other segment pays for a lookup. A segment that comes twice finds its connection.
 *
 * KERNEL(5.11): later, the listener refuses it while the end of that connection waits for late segments. */
static __always_inline int ends_by_cookie(void *ip, void *tcp, int is6)
{
	if (!config.has_cookies)
		return 0;
	if (is6)
		return bpf_tcp_raw_check_syncookie_ipv6(ip, tcp) == 0;
	return bpf_tcp_raw_check_syncookie_ipv4(ip, tcp) == 0;
}

/* Whether a normal lookup finds a socket of the container. */
static __always_inline int is_served(struct __sk_buff *skb, struct bpf_sock_tuple *to, int is6,
				     int udp, __u32 index)
{
	struct bpf_sock *sk = find(skb, to, is6, udp);
	struct dm_socket *socket;
	int served = 0;

	if (!sk)
		return 0;
	socket = bpf_sk_storage_get(&dm_sockets, sk, 0, 0);
	served = socket && socket->index == index;
	bpf_sk_release(sk);
	return served;
}

#define PASS -1 /* TCX_NEXT */
#define DROP 2 /* TCX_DROP */

/* Steers a packet before the lookup of its socket. Drops no packets of containers: dm_ingress decides
 * about the socket that the packet is assigned to. All offsets are compared with the end of the linear
 * data. */
static __always_inline int steer(struct __sk_buff *skb)
{
	/* The loopback device's packets have an Ethernet header, too. */
	void *data = (void *)(long)skb->data + 14, *end = (void *)(long)skb->data_end;
	struct bpf_sock_tuple to = {}, at = {};
	__u32 index, number, *owner;
	__u8 protocol, flags = DM_TCP_SYN;
	void *transport;
	int is6, udp;

	if (skb->protocol == bpf_htons(ETH_IP)) {
		__be32 daddr;

		if (data + 20 > end)
			return PASS;
		daddr = *(__be32 *)(data + 16);
		if (is_loop4(daddr)) {
			index = (bpf_ntohl(daddr) & 0xffffff) >> 6;
			if (index == 0 || skb->ifindex != LOOPBACK_DEVICE)
				return PASS;
		} else {
			number = bpf_ntohl(daddr) - config.pool4;
			if (number >= config.pool_count)
				return PASS;
			owner = bpf_map_lookup_elem(&dm_extra, &number);
			if (!owner) /* a first address: where "any" lives already */
				return PASS;
			index = *owner;
		}
		/* LIMIT: no options, no fragments: such packets only find sockets bound precisely. */
		if (*(__u8 *)data != 0x45 || (*(__be16 *)(data + 6) & bpf_htons(0x3fff)))
			return PASS;
		protocol = *(__u8 *)(data + 9);
		to.ipv4.saddr = *(__be32 *)(data + 12);
		to.ipv4.daddr = daddr;
		transport = data + 20;
		is6 = 0;
	} else if (skb->protocol == bpf_htons(ETH_IP6)) {
		__u32 *d = data + 24, *s = data + 8;

		if (data + 40 > end)
			return PASS;
		if (d[0] != config.public6[0])
			return PASS;
		if (is_public6(d)) {
			index = bpf_ntohl(d[3]);
			owner = bpf_map_lookup_elem(&dm_extra, &index);
			if (owner)
				index = *owner;
		} else if (d[1] == config.loop6[1] && d[2] == config.loop6[2]) {
			/* The private loopback never comes from outside. */
			if (skb->ifindex != LOOPBACK_DEVICE)
				return DROP;
			index = bpf_ntohl(d[3]);
		} else {
			return PASS;
		}
		protocol = *(__u8 *)(data + 6);
		WRITE6(to.ipv6.saddr, s[0], s[1], s[2], s[3]);
		WRITE6(to.ipv6.daddr, d[0], d[1], d[2], d[3]);
		transport = data + 40;
		is6 = 1;
	} else {
		return PASS;
	}

	if (protocol == IP_UDP) {
		udp = 1;
	} else if (protocol == IP_TCP) {
		if (transport + DM_TCP_HEADER > end)
			return PASS;
		flags = *(__u8 *)(transport + DM_TCP_FLAGS) & (DM_TCP_SYN | DM_TCP_RST | DM_TCP_ACK);
		/* Other segments find their connection by a normal lookup. */
		if ((flags & (DM_TCP_SYN | DM_TCP_ACK)) != DM_TCP_SYN && flags != DM_TCP_ACK)
			return PASS;
		udp = 0;
	} else {
		return PASS;
	}
	if (transport + 4 > end)
		return PASS;
	if (is6) {
		to.ipv6.sport = *(__be16 *)transport;
		to.ipv6.dport = *(__be16 *)(transport + 2);
		if (flags == DM_TCP_ACK && !ends_by_cookie(data, transport, 1))
			return PASS;
		if (is_served(skb, &to, 1, udp, index))
			return PASS;
		at = to;
		WRITE6(at.ipv6.daddr, config.public6[0], config.public6[1], config.public6[2],
		       bpf_htonl(index));
		if (lead(skb, &at, 1, udp, index, DM_ANY_6))
			return PASS;
		__builtin_memset(&at, 0, sizeof(at));
		at.ipv4.daddr = own4(index);
		at.ipv4.sport = to.ipv6.sport;
		at.ipv4.dport = to.ipv6.dport;
		lead(skb, &at, 0, udp, index, DM_ANY_BOTH);
	} else {
		to.ipv4.sport = *(__be16 *)transport;
		to.ipv4.dport = *(__be16 *)(transport + 2);
		if (flags == DM_TCP_ACK && !ends_by_cookie(data, transport, 0))
			return PASS;
		if (is_served(skb, &to, 0, udp, index))
			return PASS;
		at = to;
		at.ipv4.daddr = own4(index);
		lead(skb, &at, 0, udp, index, DM_ANY_4);
	}
	return PASS;
}

/* ---- a container with a stack of its own ---- */

/* The hardware address of the container's end of its pair: 02:64:6d, and the index. */
static __always_inline int is_own_hardware(const __u8 *a, __u32 index)
{
	return a[0] == 0x02 && a[1] == 0x64 && a[2] == 0x6d && a[3] == (index >> 16 & 0xff) &&
	       a[4] == (index >> 8 & 0xff) && a[5] == (index & 0xff);
}

/* The link-local address that the kernel makes from that hardware address: fe80::64:6dff:feXX:XXXX. */
static __always_inline int is_own_link_local(const __u32 *a, __u32 index)
{
	return a[0] == bpf_htonl(0xfe800000) && a[1] == 0 && a[2] == bpf_htonl(0x00646dff) &&
	       a[3] == bpf_htonl(0xfe000000 | index);
}

/* The link-local address of the domain's end of every pair (pair.rs). */
static __always_inline int is_gateway_link_local(const __u32 *a)
{
	return a[0] == bpf_htonl(0xfe800000) && a[1] == 0 && a[2] == bpf_htonl(0x00646dff) &&
	       a[3] == bpf_htonl(0xfe000001);
}

static __always_inline int is_link_local(const __u32 *a)
{
	return (a[0] & bpf_htonl(0xffc00000)) == bpf_htonl(0xfe800000);
}

/* Whether a TCP packet has an account that only the host may give (wire.h), or could have one behind what can be read.
 * `unit` is the place of its bytes in all, in units of eight: fragments are put together on the way, and a later one is
 * not to complete or replace a header. */
static __always_inline int names_account(struct __sk_buff *skb, __u32 at, __u32 unit)
{
	__u32 account;

	if (unit)
		return unit * 8 < DM_TCP_HEADER + DM_TCP_OPTIONS_MAX;
	return dm_wire_find(skb, at, &account) != 0;
}

/* Whether an IPv4 packet is an ICMP message that would change the domain's routes: a redirect, or a smaller MTU. The
 * kernel takes those about pings without asking whether there was one. Only the first fragment has the header. Or a TCP
 * packet with an account. */
static __always_inline int is_refused4(struct __sk_buff *skb)
{
	__u8 ip[10], icmp[2];
	__u32 at, unit;

	if (bpf_skb_load_bytes(skb, ETH_HEADER, ip, sizeof ip))
		return 1;
	at = ETH_HEADER + (ip[0] & 0x0f) * 4;
	unit = (ip[6] & 0x1f) << 8 | ip[7];
	if (ip[9] == IP_TCP)
		return names_account(skb, at, unit);
	if (ip[9] != IP_ICMP || unit)
		return 0;
	if (bpf_skb_load_bytes(skb, at, icmp, sizeof icmp))
		return 1;
	return icmp[0] == ICMP_REDIRECT ||
	       (icmp[0] == ICMP_UNREACHABLE && icmp[1] == ICMP_FRAGMENTATION_NEEDED);
}

/* The same for IPv6. `next` is the kind of the header behind that of IPv6. */
static __always_inline int is_refused6(struct __sk_buff *skb, __u8 next)
{
	__u32 at = ETH_HEADER + 40;
	int i;

	for (i = 0; i < IP6_HEADERS_MAX; i++) {
		__u8 head[4];
		__u32 unit;

		if (next == IP_TCP)
			return names_account(skb, at, 0);
		if (next != IP_ICMP6 && next != IP6_HOPS && next != IP6_ROUTING && next != IP6_FRAGMENT &&
		    next != IP6_OPTIONS)
			return 0;
		if (bpf_skb_load_bytes(skb, at, head, sizeof head))
			return 1;
		if (next == IP_ICMP6)
			return head[0] == ICMP6_TOO_BIG || head[0] == ND_REDIRECT;
		if (next == IP6_FRAGMENT) {
			unit = head[2] << 5 | head[3] >> 3;
			/* The kind is that of the first header in the part that was divided. */
			if (unit)
				return names_account(skb, at, unit);
			at += 8;
		} else {
			at += (head[1] + 1) * 8;
		}
		next = head[0];
	}
	return 1;
}

/* struct arphdr and what follows it for Ethernet and IPv4. */
struct arp4 {
	__be16 hardware, protocol;
	__u8 hardware_bytes, protocol_bytes;
	__be16 operation;
	__u8 sender_hardware[6];
	__be32 sender __attribute__((packed));
};

/* Whether a packet of a container with a stack of its own may enter the domain, at the domain's end of
 * its pair and before any other use of it. Runs in softirq or in the context of the sending task. The
 * container controls all bytes, and with CAP_NET_ADMIN its devices and addresses. A packet passes if its
 * source is the container's:
 *
 * - IPv4 and IPv6 from its addresses. Of those to link-local addresses only neighbour discovery with the domain's
 *   end: the domain would send others back, and learn a neighbour for each. No ICMP message that changes routes, and no
 *   TCP packet with an account;
 * - ARP with its own addresses as the sender's, so that the kernel learns no other neighbour. The
 *   machine has one table of neighbours for all stacks;
 * - from its link-local address only neighbour solicitations and advertisements, which lead to its
 *   gateway. Router advertisements, redirects and reports of groups do not pass.
 *
 * Everything else is dropped: other protocols, VLANs, packets without a source. */
static __always_inline int may_enter(struct __sk_buff *skb, const __u32 index)
{
	__u8 ethernet[ETH_HEADER];

	if (index >= config.pool_count || skb->vlan_present ||
	    bpf_skb_load_bytes(skb, 0, ethernet, sizeof ethernet) ||
	    !is_own_hardware(ethernet + 6, index))
		return 0;
	if (skb->protocol == bpf_htons(ETH_IP)) {
		__be32 from;

		if (bpf_skb_load_bytes(skb, ETH_HEADER + 12, &from, sizeof from))
			return 0;
		return owns4(index, from) && !is_refused4(skb);
	}
	if (skb->protocol == bpf_htons(ETH_IP6)) {
		__u8 next, type;
		__u32 from[4], to[4];

		if (bpf_skb_load_bytes(skb, ETH_HEADER + 6, &next, sizeof next) ||
		    bpf_skb_load_bytes(skb, ETH_HEADER + 8, from, sizeof from) ||
		    bpf_skb_load_bytes(skb, ETH_HEADER + 24, to, sizeof to))
			return 0;
		if (is_link_local(to) && !is_gateway_link_local(to))
			return 0;
		if (owns6(index, from) && !is_link_local(to))
			return !is_refused6(skb, next);
		if ((!owns6(index, from) && !is_own_link_local(from, index)) ||
		    bpf_skb_load_bytes(skb, ETH_HEADER + 40, &type, sizeof type))
			return 0;
		return next == IP_ICMP6 && (type == ND_SOLICITATION || type == ND_ADVERTISEMENT);
	}
	if (skb->protocol == bpf_htons(ETH_ARP)) {
		struct arp4 arp;

		if (bpf_skb_load_bytes(skb, ETH_HEADER, &arp, sizeof arp))
			return 0;
		return arp.hardware == bpf_htons(1) && arp.protocol == bpf_htons(ETH_IP) &&
		       arp.hardware_bytes == 6 && arp.protocol_bytes == 4 &&
		       is_own_hardware(arp.sender_hardware, index) && owns4(index, arp.sender);
	}
	return 0;
}

/* Every packet that comes in on a device of a domain: loopback, uplink, and pairs. */
SEC("tcx/ingress")
int dm_arrive(struct __sk_buff *skb)
{
	if (skb->ifindex >= DM_PAIR && !may_enter(skb, skb->ifindex - DM_PAIR))
		return DROP;
	return steer(skb);
}

char _license[] SEC("license") = "GPL";
