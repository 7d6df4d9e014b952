/* Abstract unix sockets (unix(7)) belong to a network stack, not to a file system: containers of
 * one domain share the names. These two programs make a connect() or sendto() to an abstract name
 * fail with ECONNREFUSED, as for an unbound name, unless the socket was bound by the caller's own
 * container.
 *
 * Both are attached to the parent cgroup of all containers (BPF_PROG_ATTACH, several per hook), so
 * they run for every task below it and for no other task of the host. They run in the context of the
 * calling task, before the kernel looks the name up, with the socket locked or not, depending on its
 * type. They may not sleep.
 *
 * No hook reports the owner of a bound name, so the kernel's own table is read: every abstract
 * socket of a stack is in `net->unx.table.buckets[256 + hash]`, with the hash of the name and the
 * type (net/unix/af_unix.c: unix_abstract_hash). A socket keeps a reference to the cgroup it was
 * created in, which identifies the container (identity.h).
 *
 * The chain is read without its lock. A socket that moves meanwhile may make the walk miss its end:
 * the walk is bounded, and an unclear answer is a refusal. The kernel keeps names unique, so the walk
 * ends at the first socket with the name. Between this walk and the kernel's own, a name can only
 * pass to another container if its owner closes it in those microseconds.
 *
 * Full chain: new sockets are put in front of older ones, so a container that binds more than
 * DM_CHAIN_MAX names of one hash hides the older names of all containers of its domain. Each name
 * costs a socket, a file and a descriptor, some 3 kB of kernel memory charged to its container.
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
#define DM_IDENTITY_OF_CGROUPS
#include "../identity/identity.h"
#include "record.h"

#define E_CONNREFUSED 111
#define NAME_MAX 108 /* bytes of sun_path */
/* UNIX_HASH_SIZE / 2 - 1: the second half of the table is for abstract names. */
#define BUCKET_MASK 255

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

/* A search for the socket with a name. */
struct walk {
	struct hlist_node *node; /* the next of the chain */
	union name mine; /* the name that is looked for */
	union name theirs; /* only ever filled with names as long as mine */
	__u32 length; /* of both, in bytes */
	__u64 container; /* of the calling task */
	__u32 owned; /* the name was found, and its socket belongs to this container */
};

/* Compares the name of one socket of the chain. Returns 1 to end the walk. Nothing here is pinned: a
 * socket that is freed meanwhile is read as garbage or fails to be read, and its name then differs. */
static long visit(__u64 i, struct walk *walk)
{
	struct hlist_node *node = walk->node;
	struct sock *sk;
	struct unix_address *address;
	int length;

	if (!node)
		return 1;
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
	walk->owned = dm_container_of(BPF_CORE_READ(sk, sk_cgrp_data.cgroup), config.level) ==
		      walk->container;
	return 1;
}

/* Decides about one connect() or sendto(). Returns 1 to let the kernel go on, 0 to refuse. */
static __always_inline int judge(void *ctx)
{
	struct bpf_sock_addr_kern *kern = bpf_cast_to_kern_ctx(ctx);
	__u64 container = dm_current_container(config.level);
	struct hlist_head *buckets;
	struct sockaddr *uaddr;
	/* On the stack: a task that preempts us must not see or change it. */
	struct walk state = {}, *walk = &state;
	struct net *net;
	struct sock *sk;
	__u32 length, sum = 0, hash;

	/* A task in the parent cgroup itself, such as the keeper: it is none of the containers. */
	if (!container)
		return 1;
	/* Not by direct access: for each access the verifier searches all of the kernel's types. */
	sk = BPF_CORE_READ(kern, sk);
	uaddr = BPF_CORE_READ(kern, uaddr);
	length = BPF_CORE_READ(kern, uaddrlen);
	/* A shorter name is unnamed: the kernel refuses it. The first byte marks an abstract name. */
	if (length < 3 || length > 2 + NAME_MAX)
		return 1;
	/* For the verifier, which does not follow the comparison above through a load. */
	length &= 127;
	if (length > sizeof(walk->mine.bytes) ||
	    bpf_probe_read_kernel(walk->mine.bytes, length, uaddr))
		return 0;
	/* A path: the file system decides. */
	if (walk->mine.bytes[2] != 0)
		return 1;
	/* csum_fold(csum_partial(name)): the 16-bit words in ones' complement. The bytes behind the
	 * name are zero and add nothing. */
	for (int i = 0; i < sizeof(walk->mine.bytes) / 2; i++)
		sum += *(__u16 *)&walk->mine.bytes[2 * i];
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	hash = ~sum & 0xffff;
	/* unix_abstract_hash() */
	hash ^= hash >> 8;
	hash ^= BPF_CORE_READ(sk, sk_type);
	hash &= BUCKET_MASK;

	net = BPF_CORE_READ(sk, __sk_common.skc_net.net);
	buckets = BPF_CORE_READ(net, unx.table.buckets);
	bpf_probe_read_kernel(&walk->node, sizeof(walk->node),
			      &buckets[BUCKET_MASK + 1 + hash].first);
	walk->length = length;
	walk->container = container;
	bpf_loop(DM_CHAIN_MAX, visit, walk, 0);
	/* Otherwise the name is another container's, is not bound, or was not reached. */
	if (walk->owned)
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
