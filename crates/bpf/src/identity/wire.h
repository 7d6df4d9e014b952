/* The account of a connection on its way to another host: an option of TCP, in the first packet (SYN) alone.
 *
 * The number is that of an account that several machines share (1,073,741,824 to 2,147,483,647). dm_gate_wire writes
 * the option for hosts that the operator has named, and dm_gate_syn reads it in packets from those (gates.bpf.c).
 * dm_arrive drops packets of containers that have it (address.bpf.c): a container with CAP_NET_RAW in a stack of its
 * own writes any option, and the host that takes it from this one would take it for the host's word.
 *
 * Kind 254 is for experiments (RFC 4727), and has a number of the experiment behind the length (RFC 6994). Ours has 32
 * bits, and is not registered. Other stacks ignore the option (RFC 9293, 3.1). */
#ifndef DORMOUSE_WIRE_H
#define DORMOUSE_WIRE_H

#define DM_WIRE_KIND 254
#define DM_WIRE_BYTES 10
#define DM_WIRE_EXPERIMENT 0x646d6163 /* "dmac" */
/* Accounts that several machines share. */
#define DM_WIRE_FIRST 0x40000000u
#define DM_WIRE_LAST 0x7fffffffu
/* Bytes of all options of a TCP header, at most. */
#define DM_TCP_OPTIONS_MAX 40
#define DM_TCP_HEADER 20
#define DM_TCP_FLAGS 13 /* offset of the flags */
#define DM_TCP_SYN 0x02
#define DM_TCP_RST 0x04
#define DM_TCP_ACK 0x10

struct dm_wire {
	__u8 kind;
	__u8 bytes;
	__be32 experiment;
	__be32 account;
} __attribute__((packed));

/* Looks for the option in the packet that begins a connection, whose TCP header is at `at`. Returns 1 and the account
 * if the option is there, 0 if it is not, or the packet begins no connection, and -1 if the header cannot be read. The
 * sender controls all bytes. */
static __always_inline int dm_wire_find(struct __sk_buff *skb, __u32 at, __u32 *account)
{
	__u8 header[DM_TCP_HEADER], part[2];
	struct dm_wire option;
	__u32 end;
	int i;

	if (bpf_skb_load_bytes(skb, at, header, sizeof(header)))
		return -1;
	if ((header[DM_TCP_FLAGS] & (DM_TCP_SYN | DM_TCP_ACK)) != DM_TCP_SYN)
		return 0;
	end = at + (header[12] >> 4) * 4;
	at += DM_TCP_HEADER;
	for (i = 0; i < DM_TCP_OPTIONS_MAX; i++) {
		if (at >= end)
			return 0;
		if (bpf_skb_load_bytes(skb, at, part, 1))
			return -1;
		if (part[0] == 0) /* the end of all */
			return 0;
		if (part[0] == 1) { /* a pad */
			at++;
			continue;
		}
		if (at + 2 > end || bpf_skb_load_bytes(skb, at, part, 2) || part[1] < 2)
			return -1;
		if (part[0] == DM_WIRE_KIND && part[1] == DM_WIRE_BYTES && at + DM_WIRE_BYTES <= end) {
			if (bpf_skb_load_bytes(skb, at, &option, sizeof(option)))
				return -1;
			if (option.experiment == bpf_htonl(DM_WIRE_EXPERIMENT)) {
				*account = bpf_ntohl(option.account);
				return 1;
			}
		}
		at += part[1];
	}
	return 0;
}

#endif
