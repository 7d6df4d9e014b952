/* Connections to shared services that go on without waiting for the daemon.
 *
 * The daemon holds the first packets (SYN) of connections to shared services, and admits them in the order of their
 * accounts. While none waits at a listener, it gives that listener an *allowance*: so many connections may go on, and
 * the program notes their clients. The packet that comes after these is held, and the daemon learns of all of them.
 *
 * Hook: the match `bpf` of xtables (xt_bpf), in a rule of nftables behind those that select first packets to shared
 * services (held.rs of the crate stacks). The program runs in softirq for these packets alone, with the packet from
 * its IP header on. It returns 1 if the packet goes on, and 0 if it is held. Several processors run it at once, and
 * the daemon takes allowances back meanwhile: the count is compared and exchanged, so that no more than allowed go on.
 *
 * Trust: the sender controls all bytes of the packet. A packet uses up an allowance at most, and is held then. The
 * address of a client is that of its container (address.bpf.c).
 *
 * LIMIT: the kernel can give the memory of an allowance to another one at once. A program that runs at that moment on
 * another processor counts and notes its packet there: one more goes on, or one has the account of another client
 * in the order. Charges are readings of the gates, and not by these notes.
 *
 * KERNEL(5.12): atomic operations that return a value. KERNEL(4.16): xt_bpf with the descriptor of a program. */
#include <linux/types.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>
#include "record.h"

#define IP_TCP 6
/* Third word of an IPv4 address mapped into IPv6: ::ffff:0:0/96. */
#define MAPPED bpf_htonl(0xffff)
/* Other processors that may count at the same time before a packet is held instead. */
#define TRIES 4

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DM_PASSES_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct dm_pass_key);
	__type(value, struct dm_pass);
} dm_passes SEC(".maps");

/* Headers without options of IPv4, and of IPv6. */
struct header4 {
	__u8 words, service;
	__u16 length, id, fragment;
	__u8 hops, protocol;
	__u16 sum;
	__u32 from, to;
};
struct header6 {
	__u32 flow;
	__u16 length;
	__u8 next, hops;
	__u32 from[4], to[4];
};

/* Uses up one of an allowance, and returns its number; 0 if there is none. */
static __always_inline __u32 count(struct dm_pass *pass)
{
	int i;

	for (i = 0; i < TRIES; i++) {
		const __u64 before = *(volatile __u64 *)&pass->count;

		if (before >= pass->allowed || before >= DM_PASS_MAX)
			return 0;
		if (__sync_val_compare_and_swap(&pass->count, before, before + 1) == before)
			return before + 1;
	}
	return 0;
}

SEC("socket")
int dm_pass_first(struct __sk_buff *skb)
{
	struct dm_pass_key to = {};
	__u32 from[4] = {}, number, at;
	struct dm_pass *pass;
	__u16 ports[2];
	__u8 first;

	if (bpf_skb_load_bytes(skb, 0, &first, sizeof(first)))
		return 0;
	if (first >> 4 == 4) {
		struct header4 ip;

		if (bpf_skb_load_bytes(skb, 0, &ip, sizeof(ip)) || ip.protocol != IP_TCP)
			return 0;
		from[2] = to.address[2] = MAPPED;
		from[3] = ip.from;
		to.address[3] = ip.to;
		at = (first & 15) * 4;
	} else {
		struct header6 ip;

		if (bpf_skb_load_bytes(skb, 0, &ip, sizeof(ip)) || ip.next != IP_TCP)
			return 0;
		__builtin_memcpy(from, ip.from, sizeof(from));
		__builtin_memcpy(to.address, ip.to, sizeof(to.address));
		at = sizeof(ip);
	}
	if (bpf_skb_load_bytes(skb, at, ports, sizeof(ports)))
		return 0;
	to.port = ports[1];
	pass = bpf_map_lookup_elem(&dm_passes, &to);
	if (!pass)
		return 0;
	number = count(pass);
	if (!number)
		return 0;
	at = (number - 1) & (DM_PASS_MAX - 1);
	__builtin_memcpy(pass->addresses[at], from, sizeof(from));
	pass->ports[at] = ports[0];
	/* ORDER: last, with a barrier. */
	__sync_lock_test_and_set(&pass->numbers[at], number);
	return 1;
}

char _license[] SEC("license") = "GPL";
