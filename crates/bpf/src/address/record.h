/* The record shared by the address programs and their loader (mod.rs). Only add at the end.
 *
 * An *index* names an address of the pool. From it everything else is arithmetic, so that the
 * packet path needs no table: pool + index is the IPv4 address, PREFIX::index the IPv6 one,
 * 127.0.0.0 | index << 6 .. + 63 its 64 private loopback addresses, PREFIX:ffff::index its ::1. */
#ifndef DORMOUSE_ADDRESS_RECORD_H
#define DORMOUSE_ADDRESS_RECORD_H

/* Capacities of the maps. When a map is full, an insertion by the loader fails with E2BIG: then
 * dm_members (identity.h) refuses the start of a container, dm_extra a further address, and
 * dm_domains a domain. dm_sockets has no capacity of its own: it is part of the sockets' memory, and
 * when that cannot be had the socket is refused with EPERM. */
/* LIMIT: added addresses: the rest of the largest pool. */
#define DM_EXTRA_MAX 262144
/* LIMIT: domains. */
#define DM_DOMAINS_MAX 4096

/* Ports from which connections get one when the others are bound. The kernel gives a socket a port of
 * ip_local_port_range, and skips ports that any socket of the stack has bound, whatever the address
 * of that socket. A container that binds them all would therefore stop the connections of the others.
 * The reserve lies outside of that range, so listen(2) without bind(2) takes none of it, and a socket
 * bound to an address of another container does not block it. */
#define DM_PORT_MIN 32768
#define DM_PORT_MAX 60999
#define DM_RESERVE_MIN 61000
#define DM_RESERVE_MAX 65535
/* Ports of the range that are tried, at random: if all are bound, the range counts as full. */
#define DM_PORT_SAMPLES 8
/* Ports of the reserve that are tried for one connection: a port that another connection of the same
 * container has, or had within the last minute (TIME_WAIT), is refused by bpf_bind(). */
#define DM_RESERVE_TRIES 16

/* Known before the programs are loaded: the verifier folds it into the code. */
struct dm_config {
	__u32 level; /* of a container's cgroup below the root of the v2 hierarchy */
	__u32 pool4; /* first IPv4 address of the pool, host byte order */
	__u32 pool_count; /* how many addresses the pool has */
	__u32 chunk; /* addresses per chunk, a power of two; number 2 of a chunk is a domain's own */
	__u32 public6[3]; /* first 96 bits of the IPv6 addresses, network byte order */
	__u32 loop6[3]; /* the same of the private loopback addresses */
	__u32 has_cookies; /* the kernel was built with SYN cookies, so it has the helpers that check them */
};

/* dm_sockets: kept with a socket, and inherited by the connections it accepts. */
struct dm_socket {
	__u32 index; /* address of the container that created it */
	__u32 any; /* it was bound to any address: DM_ANY_* */
	__u32 named4; /* the loopback address it was bound to, network byte order; 0 is none */
};

#define DM_ANY_4 1 /* 0.0.0.0 */
#define DM_ANY_6 2 /* ::, IPv6 only */
#define DM_ANY_BOTH 3 /* ::, both */

/* The priority of pings with the domain's own address as their source: this, with the index of the container. The
 * programs of the uplink find its class by that (rate.bpf.c). A pool has at most 2^18 addresses. */
#define DM_PRIORITY_PING 0x44000000
#define DM_PRIORITY_INDEX 0xffffff

/* The number of the domain's end of the pair of a container with a stack of its own: this, and the index. The kernel
 * gives devices without a requested number smaller ones. */
#define DM_PAIR 0x1000000

/* dm_about: the version of the attached programs, so that a newer build replaces them. */
struct dm_about {
	__u64 version;
};

#endif
