/* The record shared by the program of passes and its loader (mod.rs). Only add at the end. */
#ifndef DORMOUSE_PASS_RECORD_H
#define DORMOUSE_PASS_RECORD_H

/* LIMIT: connections that an allowance is for. */
#define DM_PASS_MAX 16
/* LIMIT: listeners with an allowance, in one stack. When dm_passes is full, an insertion by the loader fails with
 * E2BIG, and the connections of further listeners are held. */
#define DM_PASSES_MAX 1024

/* dm_passes, by the address and port that a connection is for. Network byte order; IPv4 is mapped into IPv6. */
struct dm_pass_key {
	__u32 address[4];
	__u16 port;
	__u16 reserved;
};

/* An allowance, and the connections that have used it: number N of them is at index N - 1. */
struct dm_pass {
	__u64 allowed; /* at most DM_PASS_MAX */
	__u64 count;
	__u32 addresses[DM_PASS_MAX][4];
	__u16 ports[DM_PASS_MAX];
	__u32 numbers[DM_PASS_MAX]; /* written last: an entry without its number is not complete */
};

#endif
