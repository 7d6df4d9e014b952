/* Abstract unix sockets (unix(7)) belong to a network stack, not to a file system: containers of
 * one domain share the names. These two programs make a connect() or sendto() to an abstract name
 * fail with ECONNREFUSED, as for an unbound name, unless the socket was bound by the caller's own
 * container.
 *
 * No hook reports the owner of a bound name, so the kernel's own table is read: every abstract
 * socket of a stack is in `net->unx.table.buckets[256 + hash]`, with the hash of the name and the
 * type (net/unix/af_unix.c: unix_abstract_hash). A socket keeps a reference to the cgroup it was
 * created in; the ancestor of that at the containers' level identifies the container.
 *
 * The chain is read without its lock. A socket that moves meanwhile may make the walk miss its end:
 * the walk is bounded and an unclear answer is a refusal. Between this look and the kernel's own, a
 * name can only pass to another container if its owner closes it in those microseconds.
 *
 * LIMIT: names stay common: a name bound by one container cannot be bound by another of its domain
 * (EADDRINUSE), and /proc/net/unix shows it.
 *
 * KERNEL(6.7): cgroup/connect_unix, cgroup/sendmsg_unix. The layout of the table is as since 5.20;
 * with another layout the programs do not load, and the caller reports the missing feature. */
#include <linux/types.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "record.h"

#define E_CONNREFUSED 111
#define NAME_MAX 108
#define BUCKET_MASK 255
#define CHAIN_MAX 4096

const volatile struct dm_unix_config config SEC(".rodata.config") = {};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct dm_unix_about);
} dm_unix_about SEC(".maps");

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct hlist_node {
	struct hlist_node *next;
};
struct hlist_head {
	struct hlist_node *first;
};
struct unix_table {
	struct hlist_head *buckets;
};
struct netns_unix {
	struct unix_table table;
};
struct net {
	struct netns_unix unx;
};
typedef struct {
	struct net *net;
} possible_net_t;
struct sock_common {
	possible_net_t skc_net;
	struct hlist_node skc_node;
};
struct kernfs_node {
	__u64 id;
};
struct cgroup {
	int level;
	struct kernfs_node *kn;
	struct cgroup *ancestors[];
};
struct sock_cgroup_data {
	struct cgroup *cgroup;
};
struct sock {
	struct sock_common __sk_common;
	__u16 sk_type;
	struct sock_cgroup_data sk_cgrp_data;
};
struct sockaddr_un {
	__u16 sun_family;
};
struct unix_address {
	int len;
	struct sockaddr_un name[];
};
struct unix_sock {
	struct unix_address *addr;
};
struct sockaddr {
	__u16 sa_family;
};
struct bpf_sock_addr_kern {
	struct sock *sk;
	struct sockaddr *uaddr;
	int uaddrlen;
};
#pragma clang attribute pop

extern void *bpf_cast_to_kern_ctx(void *ctx) __ksym;

/* A name with its family word in front, as the kernel compares it. The bytes behind it are zero, so
 * names of one length are compared by words: the verifier follows each byte separately, which took
 * 20 ms. */
union name {
	__u8 bytes[112];
	__u64 words[14];
};

struct walk {
	struct hlist_node *node;
	union name mine;
	/* Only ever filled with names as long as mine. */
	union name theirs;
	__u32 length;
	__u64 container;
	__u32 owned;
	__u32 foreign;
	__u32 ended;
};

static long visit(__u64 i, struct walk *walk)
{
	struct hlist_node *node = walk->node;
	struct sock *sk;
	struct unix_address *address;
	struct cgroup *cgroup;
	__u64 container;
	int length;

	if (!node) {
		walk->ended = 1;
		return 1;
	}
	sk = (void *)node - bpf_core_field_offset(struct sock, __sk_common.skc_node);
	walk->node = BPF_CORE_READ(node, next);
	address = BPF_CORE_READ((struct unix_sock *)sk, addr);
	if (!address)
		return 0;
	length = BPF_CORE_READ(address, len);
	if (length != walk->length)
		return 0;
	length &= 127;
	if (length > sizeof(walk->theirs.bytes))
		return 0;
	if (bpf_probe_read_kernel(walk->theirs.bytes, length, &address->name))
		return 0;
	for (int j = 0; j < sizeof(walk->mine.words) / sizeof(walk->mine.words[0]); j++) {
		if (walk->theirs.words[j] != walk->mine.words[j])
			return 0;
	}
	cgroup = BPF_CORE_READ(sk, sk_cgrp_data.cgroup);
	container = 0;
	if (cgroup && BPF_CORE_READ(cgroup, level) >= (int)config.level) {
		struct cgroup **slot = cgroup->ancestors + config.level;
		struct cgroup *ancestor = 0;

		bpf_probe_read_kernel(&ancestor, sizeof(ancestor), slot);
		if (ancestor)
			container = BPF_CORE_READ(ancestor, kn, id);
	}
	if (container == walk->container)
		walk->owned = 1;
	else
		walk->foreign = 1;
	return 0;
}

static __always_inline int judge(void *ctx)
{
	struct bpf_sock_addr_kern *kern = bpf_cast_to_kern_ctx(ctx);
	__u64 container = bpf_get_current_ancestor_cgroup_id(config.level);
	struct hlist_head *buckets;
	struct sockaddr *uaddr;
	/* On the stack: a task that preempts us must not see or change it. */
	struct walk state = {}, *walk = &state;
	struct net *net;
	struct sock *sk;
	__u32 length, sum = 0, hash;

	if (!container)
		return 1;
	/* Not by direct access: for each access the verifier searches all of the kernel's types. */
	sk = BPF_CORE_READ(kern, sk);
	uaddr = BPF_CORE_READ(kern, uaddr);
	length = BPF_CORE_READ(kern, uaddrlen);
	/* A shorter name is unnamed: the kernel refuses it. The first byte marks an abstract name. */
	if (length < 3 || length > 2 + NAME_MAX)
		return 1;
	length &= 127;
	if (length > sizeof(walk->mine.bytes) || bpf_probe_read_kernel(walk->mine.bytes, length, uaddr))
		return 0;
	if (walk->mine.bytes[2] != 0)
		return 1;
	/* csum_fold(csum_partial(name)): the 16-bit words in ones' complement. The bytes behind the
	 * name are zero and add nothing. */
	for (int i = 0; i < sizeof(walk->mine.bytes) / 2; i++)
		sum += *(__u16 *)&walk->mine.bytes[2 * i];
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	hash = ~sum & 0xffff;
	hash ^= hash >> 8;
	hash ^= BPF_CORE_READ(sk, sk_type);
	hash &= BUCKET_MASK;

	net = BPF_CORE_READ(sk, __sk_common.skc_net.net);
	buckets = BPF_CORE_READ(net, unx.table.buckets);
	bpf_probe_read_kernel(&walk->node, sizeof(walk->node), &buckets[BUCKET_MASK + 1 + hash].first);
	walk->length = length;
	walk->container = container;
	bpf_loop(CHAIN_MAX, visit, walk, 0);
	if (walk->ended && walk->owned && !walk->foreign)
		return 1;
	bpf_set_retval(-E_CONNREFUSED);
	return 0;
}

SEC("cgroup/connect_unix")
int dm_unix_connect(struct bpf_sock_addr *ctx)
{
	return judge(ctx);
}

SEC("cgroup/sendmsg_unix")
int dm_unix_sendmsg(struct bpf_sock_addr *ctx)
{
	return judge(ctx);
}

char _license[] SEC("license") = "GPL";
