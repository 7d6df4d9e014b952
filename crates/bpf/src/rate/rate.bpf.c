/* Which container a packet at the uplink of a trust domain belongs to, for the tree of classes at the device.
 *
 * Both ends of the uplink queue what they send: the end in the domain what containers send (dm_rate_out, by the source
 * address), the end at the host what they receive (dm_rate_in, by the destination address). An address is the key,
 * because packets without a full socket (SYN-ACK, RST, TIME_WAIT) and forwarded ones have one, too.
 *
 * Hook: TCX egress of the two devices, in the context that sends the packet, before the packet is queued. The programs
 * drop nothing and change nothing but the priority.
 *
 * Trust: a container controls all bytes of its packets. dm_egress (address.bpf.c) lets only its own addresses out, so
 * no container can send in the class of another. Pings also have the address of the domain as their source: dm_egress
 * then writes the index of the container into the priority, whatever the container has set. A container cannot name a
 * class by SO_PRIORITY: these programs set the priority of every packet. Answers to pings have no class.
 *
 * KERNEL(6.6): TCX. */
#include <linux/types.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>
#include "../address/record.h"
#include "record.h"

#define ETH_IP 0x0800
#define ETH_IP6 0x86DD
#define ETH_HEADER 14
#define NEXT (-1) /* TCX_NEXT */

const volatile struct dm_config config SEC(".rodata.config") = {};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DM_CLASSES_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct dm_class);
} dm_classes SEC(".maps");

/* The version of the programs: no program reads it (mod.rs). */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct dm_about);
} dm_about SEC(".maps");

/* The index of the address with a number in the pool, or, for the domain's own address, that which the priority has. */
static __always_inline __u32 index_of(__u32 number, __u32 priority)
{
	const int is_of_domain = (number & (config.chunk - 1)) == 2;

	if (is_of_domain && (priority & ~DM_PRIORITY_INDEX) == DM_PRIORITY_PING)
		return priority & DM_PRIORITY_INDEX;
	return number;
}

static __always_inline int classify(struct __sk_buff *skb, int at4, int at6)
{
	const __u32 priority = skb->priority;
	struct dm_class *class = 0;
	__u32 index;

	/* First, for packets that are too short to have an address. */
	skb->priority = 0;
	if (skb->protocol == bpf_htons(ETH_IP)) {
		__be32 address;

		if (bpf_skb_load_bytes(skb, ETH_HEADER + at4, &address, sizeof address))
			return NEXT;
		index = index_of(bpf_ntohl(address) - config.pool4, priority);
		if (index < config.pool_count)
			class = bpf_map_lookup_elem(&dm_classes, &index);
	} else if (skb->protocol == bpf_htons(ETH_IP6)) {
		__u32 address[4];

		if (bpf_skb_load_bytes(skb, ETH_HEADER + at6, address, sizeof address))
			return NEXT;
		index = index_of(bpf_ntohl(address[3]), priority);
		if (address[0] == config.public6[0] && address[1] == config.public6[1] &&
		    address[2] == config.public6[2])
			class = bpf_map_lookup_elem(&dm_classes, &index);
	}
	if (class)
		skb->priority = class->priority;
	return NEXT;
}

SEC("tcx/egress")
int dm_rate_out(struct __sk_buff *skb)
{
	return classify(skb, 12, 8);
}

SEC("tcx/egress")
int dm_rate_in(struct __sk_buff *skb)
{
	return classify(skb, 16, 24);
}

char _license[] SEC("license") = "GPL";
