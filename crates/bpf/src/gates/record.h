/* The record shared by the gates and their loader (mod.rs). Only add at the end. */
#ifndef DORMOUSE_GATES_RECORD_H
#define DORMOUSE_GATES_RECORD_H

/* Capacities of the maps. When dm_gate_homes or dm_gate_peers is full, an insertion by the loader fails
 * with E2BIG, and the container does not start. When dm_gate_uses is full, or there is no memory for a
 * label, work stays with the account of the container that does it, and the gate counts it as `full`. */
/* LIMIT: containers, as in identity.h. */
#define DM_GATE_HOMES_MAX 262144
/* LIMIT: addresses of containers: the largest pool. */
#define DM_GATE_PEERS_MAX 262144
/* LIMIT: pairs of a container and an account that it has worked for, in dm_gate_uses and dm_gate_clients. */
#define DM_GATE_USES_MAX 262144
/* LIMIT: accounts with a place in the hierarchy, of two tables. */
#define DM_GATE_LINES_MAX 262144
/* LIMIT: rows of a table. */
#define DM_GATE_ROWS_MAX 256
/* LIMIT: tasks that are in the middle of a receive call for a datagram. Of more, some receive for themselves. */
#define DM_GATE_SENDERS_MAX 16384
/* LIMIT: an account and those above it. */
#define DM_GATE_DEPTH 9
/* LIMIT: addresses and networks of agreed hosts. */
#define DM_GATE_HOSTS_MAX 1024
/* LIMIT: accounts of the operator, of which those with a shared number are here. */
#define DM_GATE_KNOWN_MAX 65536
/* LIMIT: connections that agreed hosts are making at one time. Of more, some are from the outside. */
#define DM_GATE_SYNS_MAX 16384
/* LIMIT: TCP connections over which services have asked others for their clients. Of more, some requests are those of
 * the asking container. */
#define DM_GATE_TOLDS_MAX 65536
/* LIMIT: messages of System V in queues, of tasks that work for another account than their home. Further ones are
 * those of the home. */
#define DM_GATE_MESSAGES_MAX 65536
/* LIMIT: pipes and FIFOs that containers have made, and accounts that have written to one before it is read. Further
 * pipes, and earlier bytes, have no other side. */
#define DM_GATE_PIPES_MAX 16384
#define DM_GATE_PARTS 16
/* LIMIT: sets of semaphores of System V with a note, semaphores of a set, and operations of one call of semop(2). Units
 * of further ones have no giver. After a call with more operations, no unit of the set has one. */
#define DM_GATE_SETS_MAX 16384
#define DM_GATE_SEMAPHORES 32
#define DM_GATE_SEMOPS 32
/* LIMIT: segments of shared memory of System V that containers have made. Further ones have no other side. */
#define DM_GATE_SEGMENTS_MAX 65536
/* LIMIT: paths of a table, and bytes of a path with the '/' behind it. */
#define DM_GATE_PATHS_MAX 256
#define DM_GATE_PATH_BYTES 248
/* LIMIT: edges of one trace. Further ones are not seen. */
#define DM_GATE_EDGES_MAX 65536

/* Gates: `gate` of a row, and the index of dm_gate_counts. */
#define DM_GATE_RECEIVE 1
#define DM_GATE_SEND 2
#define DM_GATE_FORK 3
#define DM_GATE_EXEC 4
#define DM_GATE_CREATE 5
#define DM_GATE_OPEN 6
#define DM_GATE_MESSAGE 7
#define DM_GATE_PIPE 8
#define DM_GATE_SEMAPHORE 9
#define DM_GATE_SHM 10
#define DM_GATE_COUNT 16

/* What a label becomes: `becomes` of a row. */
#define DM_BECOMES_KEEP 0
#define DM_BECOMES_HOME 1
#define DM_BECOMES_PEER 2
#define DM_BECOMES_ACCOUNT 3
/* The call fails with the errno in `account` of the row, and the label stays. */
#define DM_BECOMES_REFUSED 4

/* setsockopt(2) by which a task names its client (bind.h): the level, the option, and its values. Programs are written
 * with these numbers (docs/accounts.md). */
#define DM_BIND_LEVEL 0x646d
#define DM_BIND_WORK_FOR 1
#define DM_BIND_SELF 0 /* the account of the container */
#define DM_BIND_CLIENT 1 /* the client of the connection */

/* Matches every account, and the other side that is in no container or not known. */
#define DM_ANY 0xffffffffu
/* The other side is in no container, or not known (gates.bpf.c). No account has this number. */
#define DM_NOBODY 0xfffffffeu

/* In `flags` of a home: the container works for its clients where no row decides (`run --shared`). */
#define DM_HOME_SHARED 1

/* Known before the programs are loaded. */
struct dm_gate_config {
	__u32 level; /* of a container's cgroup below the root of the v2 hierarchy */
	__u32 pool4; /* first IPv4 address of the pool, host byte order */
	__u32 pool_count; /* how many addresses the pool has */
	__u32 public6[3]; /* first 96 bits of the IPv6 addresses, network byte order */
};

/* An account with its owner. The number of a container's own account is given again after the container
 * was removed, and an operator may give that of a removed account to another one. `owner` tells the two
 * apart: the first eight bytes of the container's id, or the time at which an account with a number of the
 * operator's choice was made; 0 for others. */

/* dm_gate_homes, by the cgroup id of a container. */
struct dm_gate_home {
	__u64 owner;
	__u64 netns; /* cookie of its domain's stack; 0 if it has no address */
	__u32 account;
	__u32 flags;
	__u32 uses; /* entries of dm_gate_clients that were begun: counted here, and written by no one else */
	__u32 reserved;
};

/* dm_gate_peers, by the index of an address in the pool. */
struct dm_gate_peer {
	__u64 owner;
	__u32 account;
	__u32 reserved;
};

/* dm_gate_uses: the work of a container for another account. */
struct dm_gate_work {
	__u64 cgroup; /* of the container; 0 in a label: works for its own account */
	__u64 owner;
	__u32 account;
	__u32 reserved;
};
struct dm_gate_use {
	__u64 cpu_ns; /* as the scheduler counts it */
};

/* dm_gate_clients: the accounts that a container has worked for, so that its end reads these alone. An entry
 * can be absent. */
struct dm_gate_nth {
	__u64 cgroup;
	__u32 number; /* below `uses` of the home */
	__u32 reserved;
};
struct dm_gate_client {
	__u64 owner;
	__u32 account;
	__u32 reserved;
};

/* A row of a table: the first that matches decides. */
struct dm_rule {
	__u32 gate;
	__u32 becomes;
	__u32 account; /* of DM_BECOMES_ACCOUNT */
	__u32 home; /* numbers of accounts, or DM_ANY */
	__u32 label;
	__u32 peer;
	__u32 below; /* bit 0 home, 1 label, 2 peer: accounts below it match as well */
	__u32 port; /* local port of the socket; 0 matches all */
	__u64 owner; /* of `account` */
	__u32 path; /* 1 and the number of the path below which the file is; 0 matches all */
	__u32 reserved;
};

/* dm_gate_paths: the first `bits` bits of a table's number and a path, which ends with '/'. */
struct dm_gate_path {
	__u32 bits;
	__u32 table;
	char path[DM_GATE_PATH_BYTES];
};
/* The path, and those of the same table that are above it: bit N is path N. */
struct dm_gate_below {
	__u64 paths[DM_GATE_PATHS_MAX / 64];
};

/* dm_gate_tables: two of them, of which dm_gate_active names one. */
struct dm_gate_table {
	__u32 count; /* of rows */
	__u32 gates; /* bit N: a row is for gate N */
	__u32 below; /* the `below` of all rows */
	__u32 reserved;
	struct dm_rule rows[DM_GATE_ROWS_MAX];
};

/* dm_gate_lines: an account and those above it; root, which is 0, and what follows may be absent. */
struct dm_gate_place {
	__u32 table;
	__u32 account;
};
struct dm_line {
	__u32 accounts[DM_GATE_DEPTH];
};

/* dm_gate_counts, by gate and processor. */
struct dm_gate_count {
	__u64 passages; /* of tasks of containers, where a row may match */
	__u64 changed; /* labels */
	__u64 unknown; /* the other side is in no container, or not known */
	__u64 full; /* labels that could not be kept */
	__u64 refused; /* calls */
};

/* dm_gate_hosts: the first `bits` bits of an address, network byte order; IPv4 is mapped into IPv6. */
struct dm_gate_host {
	__u32 bits;
	__u32 address[4];
};

/* dm_gate_known: an account that several machines share, and that exists here, by its number. */
struct dm_gate_shared {
	__u64 owner;
};

/* dm_gate_edges, while dm_gate_trace is 1: data that a container has received over connections. */
struct dm_gate_edge {
	__u64 home_owner;
	__u64 peer_owner;
	__u32 home;
	__u32 peer;
	__u32 port; /* the local one of a connection that the other side has opened; else 0 */
	__u32 is_opened; /* by this side */
};
struct dm_gate_edge_count {
	__u64 passages;
};

#endif
