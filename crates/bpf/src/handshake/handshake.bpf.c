/* A pending connection made without its peer: the last segment of a handshake is sent once more,
 * and the kernel receives the options that were negotiated before it.
 *
 * This is the mechanism of a proxy for SYN cookies (bpf_sk_assign_tcp_reqsk): the kernel accepts
 * the program's word for a handshake that it has not seen, and takes the sequence numbers of both
 * sides from the segment. The program is attached to the loopback device, where only the engine
 * sends packets with its mark, for as long as that takes.
 *
 * Hook: ingress of the loopback device of one network namespace (TCX), by a link that the engine
 * holds. The program runs in softirq for every packet of that device, also for those of containers,
 * and lets every packet without the mark pass untouched. A mark needs CAP_NET_ADMIN over the
 * namespace, so no container sends one. It may not sleep, and reads the packet between `data` and
 * `data_end` alone.
 *
 * KERNEL(6.9): bpf_sk_assign_tcp_reqsk. */
#include <linux/types.h>
#include <stddef.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include "record.h"

/* The options for the next packet. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct dm_handshake);
} dm_handshake SEC(".maps");

/* As in include/net/tcp.h; the size is passed along, and the kernel refuses another one. */
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct bpf_tcp_req_attrs {
	__u32 rcv_tsval;
	__u32 rcv_tsecr;
	__u16 mss;
	__u8 rcv_wscale;
	__u8 snd_wscale;
	__u8 ecn_ok;
	__u8 wscale_ok;
	__u8 sack_ok;
	__u8 tstamp_ok;
	__u8 usec_ts_ok;
	__u8 reserved[3];
};
struct sock {
	__u16 sk_type;
};
#pragma clang attribute pop

extern int bpf_sk_assign_tcp_reqsk(struct __sk_buff *skb, struct sock *sk,
				   struct bpf_tcp_req_attrs *attrs, int attrs__sz) __ksym;

/* Whether a segment acknowledges and does nothing else. */
static int only_acknowledges(const struct tcphdr *tcp)
{
	return tcp->ack && !tcp->syn && !tcp->fin && !tcp->rst && !tcp->psh;
}

/* The TCP header behind an IP header without options; the engine writes none. NULL if the packet is
 * anything else, or its headers are not in the linear data. */
static struct tcphdr *tcp_of(struct __sk_buff *skb)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct tcphdr *tcp;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr *ip = data + ETH_HLEN;

		tcp = (void *)(ip + 1);
		if ((void *)(tcp + 1) <= end && ip->ihl == 5 && ip->protocol == IPPROTO_TCP)
			return tcp;
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip = data + ETH_HLEN;

		tcp = (void *)(ip + 1);
		if ((void *)(tcp + 1) <= end && ip->nexthdr == IPPROTO_TCP)
			return tcp;
	}
	return NULL;
}

/* Returns TC_ACT_UNSPEC to let the packet pass on, TC_ACT_SHOT to drop it. */
SEC("tcx/ingress")
int dm_handshake_in(struct __sk_buff *skb)
{
	__u32 zero = 0;
	const struct dm_handshake *agreed = bpf_map_lookup_elem(&dm_handshake, &zero);
	struct bpf_sock_tuple at = {};
	struct bpf_sock *found;
	struct tcphdr *tcp;
	__u32 size;

	if (!agreed || skb->mark != agreed->mark)
		return TC_ACT_UNSPEC;
	tcp = tcp_of(skb);
	if (!tcp || !only_acknowledges(tcp))
		return TC_ACT_UNSPEC;
	/* The destination that the connection was steered to, possibly another one than the
	 * client's. */
	if (agreed->v6) {
		__builtin_memcpy(at.ipv6.daddr, agreed->address, sizeof at.ipv6.daddr);
		at.ipv6.dport = agreed->port;
		size = sizeof at.ipv6;
	} else {
		at.ipv4.daddr = agreed->address[0];
		at.ipv4.dport = agreed->port;
		size = sizeof at.ipv4;
	}
	/* A reference that every path below releases. */
	found = bpf_skc_lookup_tcp(skb, &at, size, BPF_F_CURRENT_NETNS, 0);
	if (!found)
		return TC_ACT_SHOT; /* or it would be answered with a reset */
	/* Another state: the connection exists already, and the segment is a repetition for it. */
	if (found->state == BPF_TCP_LISTEN) {
		struct sock *listener = (struct sock *)bpf_skc_to_tcp_sock(found);
		struct bpf_tcp_req_attrs attrs = {
			.rcv_tsecr = agreed->timestamp,
			.mss = agreed->segment_bytes,
			.rcv_wscale = agreed->scale_received,
			.snd_wscale = agreed->scale_sent,
			.wscale_ok = agreed->scales,
			.sack_ok = agreed->selective,
			.tstamp_ok = agreed->timestamps,
		};

		if (!listener || bpf_sk_assign_tcp_reqsk(skb, listener, &attrs, sizeof attrs)) {
			bpf_sk_release(found);
			return TC_ACT_SHOT;
		}
	}
	bpf_sk_release(found);
	return TC_ACT_UNSPEC;
}

char _license[] SEC("license") = "GPL";
