/* The record shared by the address programs and their loader (mod.rs). Only add at the end.
 *
 * An *index* names an address of the pool. From it everything else is arithmetic, so that the
 * packet path needs no table: pool + index is the IPv4 address, PREFIX::index the IPv6 one,
 * 127.0.0.0 | index << 6 .. + 63 its 64 private loopback addresses, PREFIX:ffff::index its ::1. */
#ifndef DORMOUSE_ADDRESS_RECORD_H
#define DORMOUSE_ADDRESS_RECORD_H

/* Known before the programs are loaded: the verifier folds it into the code. */
struct dm_config {
	__u32 level;       /* of a container's cgroup below the root of the v2 hierarchy */
	__u32 pool4;       /* first IPv4 address of the pool, host byte order */
	__u32 pool_count;  /* how many addresses the pool has */
	__u32 chunk;       /* addresses per chunk, a power of two; number 2 of a chunk is a domain's own */
	__u32 public6[3];  /* first 96 bits of the IPv6 addresses, network byte order */
	__u32 loop6[3];    /* the same of the private loopback addresses */
};

/* dm_members: cgroup id -> the container */
struct dm_member {
	__u32 index;       /* of its first address: what it is called on the packet path */
	__u32 reserved;
	__u64 netns;       /* cookie of the domain's stack: elsewhere its processes are strangers */
};

/* dm_sockets: what is kept with a socket, and inherited by the connections it accepts. */
struct dm_socket {
	__u32 index;       /* the container that made it */
	__u32 any;         /* it asked for any address: DM_ANY_* */
	__u32 named4;      /* the loopback address it asked for, network byte order; 0 is none */
};

#define DM_ANY_4 1         /* 0.0.0.0 */
#define DM_ANY_6 2         /* ::, IPv6 only */
#define DM_ANY_BOTH 3      /* ::, both */

/* dm_about: which build is attached, so that a newer one replaces it. */
struct dm_about {
	__u64 version;
};

#endif
