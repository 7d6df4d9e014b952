/* The record shared by the programs that count sockets and their loader (mod.rs). Only add at the end. */
#ifndef DORMOUSE_SOCKET_COUNT_RECORD_H
#define DORMOUSE_SOCKET_COUNT_RECORD_H

/* LIMIT: containers with a limit of sockets: one per slot of host ids. When a map is full, an insertion by the loader
 * fails with E2BIG, and the container does not start. The marks have no capacity of their own: each is part of the
 * memory of its socket, and without memory for it the socket is refused with ENOBUFS. */
#define DM_SOCKET_OWNERS_MAX 131072
/* LIMIT: accounts that have or had a limit of sockets since the programs were attached. When the map is full, an
 * insertion by the loader fails with E2BIG, and so does the command that sets the limit. */
#define DM_SOCKET_ACCOUNTS_MAX 65536
/* LIMIT: accounts that count one socket: made ones nest eight deep. */
#define DM_SOCKET_DEPTH 8

/* Known before the programs are loaded. */
struct dm_socket_config {
	__u32 level; /* of a container's cgroup below the root of the v2 hierarchy */
};

/* The container that a cgroup belongs to. */
struct dm_socket_owner {
	__u32 slot; /* of its host ids: it has the same one after a sleep, in another cgroup */
};

/* What a container may have. Written by the loader alone. */
struct dm_socket_limit {
	__u64 serial; /* of this life of the container: sockets of an earlier life with this slot are not counted */
	__u32 most; /* ~0 for no limit */
	__u32 is_exempt; /* limits of accounts do not hold: the container is restored, or asleep */
};

/* The accounts that count the sockets of a container: its own and those above it, as far as they have a limit. 0 ends
 * the list: root has no limit. Kept for each slot, and with each socket as it was when the socket was counted. */
struct dm_socket_payers {
	__u32 accounts[DM_SOCKET_DEPTH];
};

/* What an account may have, with those below it. Written by the loader alone. */
struct dm_socket_bound {
	__u32 most; /* ~0 for no limit */
	__u32 reserved;
};

/* What a container or account has, or has had at most. Written by the programs, but for the first and the last time. */
struct dm_socket_use {
	__u64 sockets;
};

/* Kept with each counted socket, and copied to the connections that it accepts. */
struct dm_socket_mark {
	__u64 serial;
	__u64 cookie; /* of the socket that is counted: in the copy of a connection it is that of the listener */
	__u32 slot;
	__u32 is_counted;
	__u64 flags; /* DM_SOCKET_* */
};

#define DM_SOCKET_CONNECTS 1 /* its state is reported: it is counted until it is closed and has left its last state */
#define DM_SOCKET_RELEASED 2 /* no process has it any more */
#define DM_SOCKET_CLOSED 4 /* it has no connection any more */

/* The version of the attached programs, so that a newer build replaces them. */
struct dm_socket_about {
	__u64 version;
};

#endif
