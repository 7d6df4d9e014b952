/* Requests of TCP connections: those of the clients of a listener that have no socket of their own yet.
 *
 * A client of a listener with TCP_DEFER_ACCEPT has completed its handshake. The kernel has noted the
 * last segment of the handshake (the flag `acked`), and makes the socket when the first data arrives.
 * Until then the connection is in no queue, no call returns it, and sock_diag(7) has its addresses
 * alone. So its sequence numbers and negotiated options are read in place.
 *
 * Hook: an iterator over the TCP sockets of one network namespace (iter/tcp), that of the thread which
 * reads the iterator. The program runs in the context of the reader, once per socket, with a reference
 * to it. It is attached to nothing, changes nothing, and ends with the descriptors of the loader.
 *
 * Assumptions: the loader has CAP_BPF and CAP_PERFMON. A request refers to its listener for as long as
 * it exists. Memory is read with helpers that fail on an unmapped address.
 *
 * KERNEL(5.9): iterators over TCP sockets. */
#include <linux/types.h>
#include <stdbool.h>
#include <stddef.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "record.h"

#define STATE_REQUEST 12 /* TCP_NEW_SYN_RECV */
#define FAMILY_IPV6 10

/* Only for the object's BTF, with which a test compares the loader's record. */
struct dm_request *dm_request_type __attribute__((unused));

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct seq_file;
struct bpf_iter_meta {
	struct seq_file *seq;
};
struct in6_addr {
	__u32 word[4];
};
typedef struct {
	__s64 counter;
} atomic64_t;
struct sock;
struct sock_common {
	__be32 skc_daddr;
	__be32 skc_rcv_saddr;
	__be16 skc_dport;
	__u16 skc_num;
	unsigned short skc_family;
	unsigned char skc_state;
	struct in6_addr skc_v6_daddr;
	struct in6_addr skc_v6_rcv_saddr;
	atomic64_t skc_cookie;
	struct sock *skc_listener;
};
struct sock {
	struct sock_common __sk_common;
};
struct bpf_iter__tcp {
	struct bpf_iter_meta *meta;
	struct sock_common *sk_common;
};
struct request_sock {
	struct sock_common __req_common;
	__u16 mss;
};
struct inet_request_sock {
	struct request_sock req;
	__u16 snd_wscale : 4;
	__u16 rcv_wscale : 4;
	__u16 tstamp_ok : 1;
	__u16 sack_ok : 1;
	__u16 wscale_ok : 1;
	__u16 ecn_ok : 1;
	__u16 acked : 1;
};
struct tcp_request_sock {
	struct inet_request_sock req;
	bool req_usec_ts;
	__u32 rcv_isn;
	__u32 snt_isn;
	__u32 ts_off;
};
#pragma clang attribute pop

SEC("iter/tcp")
int dm_request_read(struct bpf_iter__tcp *context)
{
	struct sock_common *common = context->sk_common;
	struct tcp_request_sock *request;
	struct inet_request_sock *agreed;
	struct dm_request found = {};

	if (!common || BPF_CORE_READ(common, skc_state) != STATE_REQUEST)
		return 0;
	request = (struct tcp_request_sock *)common;
	agreed = (struct inet_request_sock *)common;
	found.listener = BPF_CORE_READ(common, skc_listener, __sk_common.skc_cookie.counter);
	found.family = BPF_CORE_READ(common, skc_family);
	if (found.family == FAMILY_IPV6) {
		bpf_core_read(found.address, sizeof found.address, &common->skc_v6_rcv_saddr);
		bpf_core_read(found.peer, sizeof found.peer, &common->skc_v6_daddr);
	} else {
		found.address[0] = BPF_CORE_READ(common, skc_rcv_saddr);
		found.peer[0] = BPF_CORE_READ(common, skc_daddr);
	}
	found.port = BPF_CORE_READ(common, skc_num);
	found.peer_port = BPF_CORE_READ(common, skc_dport);
	found.segment_bytes = BPF_CORE_READ(request, req.req.mss);
	found.sent = BPF_CORE_READ(request, snt_isn);
	found.received = BPF_CORE_READ(request, rcv_isn);
	found.stamp_offset = BPF_CORE_READ(request, ts_off);
	found.scale_sent = BPF_CORE_READ_BITFIELD_PROBED(agreed, snd_wscale);
	found.scale_received = BPF_CORE_READ_BITFIELD_PROBED(agreed, rcv_wscale);
	found.scales = BPF_CORE_READ_BITFIELD_PROBED(agreed, wscale_ok);
	found.selective = BPF_CORE_READ_BITFIELD_PROBED(agreed, sack_ok);
	found.timestamps = BPF_CORE_READ_BITFIELD_PROBED(agreed, tstamp_ok);
	found.acknowledged = BPF_CORE_READ_BITFIELD_PROBED(agreed, acked);
	/* KERNEL(6.7): the unit. */
	if (bpf_core_field_exists(request->req_usec_ts))
		found.microseconds = BPF_CORE_READ(request, req_usec_ts);
	bpf_seq_write(context->meta->seq, &found, sizeof found);
	return 0;
}

char _license[] SEC("license") = "GPL";
