/* The record shared by the abstract socket programs and their loader (mod.rs). Only add at the
 * end. */
#ifndef DORMOUSE_ABSTRACT_UNIX_RECORD_H
#define DORMOUSE_ABSTRACT_UNIX_RECORD_H

/* LIMIT: sockets of one chain that are compared; names behind them are refused. */
#define DM_CHAIN_MAX 65536

/* Known before the programs are loaded: the verifier folds it into the code. */
struct dm_unix_config {
	__u32 level; /* of a container's cgroup below the root of the v2 hierarchy */
};

/* dm_unix_about: which build is attached, so that a newer one replaces it. */
struct dm_unix_about {
	__u64 version;
};

#endif
