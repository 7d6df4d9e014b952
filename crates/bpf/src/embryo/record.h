/* The record shared by the embryo programs and their loader (mod.rs). Only add at the end. */
#ifndef DORMOUSE_EMBRYO_RECORD_H
#define DORMOUSE_EMBRYO_RECORD_H

/* Capacities of the maps, and what happens when more is needed. */
/* Bytes of one piece, the unit of copying: a message has at least one. */
#define DM_PIECE_BYTES 4096
/* LIMIT: pieces of one connection. A connection with more is not `whole`, and its container cannot be
 * saved now. */
#define DM_PIECES_MAX 1024
/* LIMIT: supplementary groups of a client. `groups` is the true number; none are copied if it is
 * larger. */
#define DM_GROUPS_MAX 256
/* LIMIT: open files in one search for holders. A further insertion fails with E2BIG. */
#define DM_FILES_MAX 4096

/* The request, and the result. */
struct dm_embryo {
	__u32 fd; /* request: the listening socket, a descriptor of the examined process */
	__u32 place; /* request: position in its queue, from 0 */
	__u32 found; /* 0 or 1, as all flags that follow; 0: the queue is shorter */
	__u32 whole; /* all of its messages are in the pieces */
	__u32 urgent; /* one byte is out of band */
	__u32 pieces; /* their number */
	__u64 client; /* inode of the client's socket; 0 if that was closed */
	__u32 named; /* that socket has a name */
	__u32 pid; /* the client, in the reader's pid namespace; 0 outside of it */
	__u32 uid;
	__u32 gid;
	__u32 groups; /* number of supplementary groups */
	__u32 reserved;
	__u32 group[DM_GROUPS_MAX];
};

/* A part of a message. */
struct dm_embryo_piece {
	__u32 message; /* its number, from 0 */
	__u32 bytes; /* of data */
	__u32 files; /* flag: `data` is addresses of open files sent along, of 8 bytes each */
	__u32 pid; /* the sender, in the reader's pid namespace; 0 outside of it */
	__u32 uid;
	__u32 gid;
	__u32 known; /* flag: the sender was sent along */
	__u32 reserved;
	__u8 data[DM_PIECE_BYTES];
};

/* A page with known description and address. */
struct dm_embryo_page {
	__u64 page; /* struct page; with the address 0 until both are found */
	__u64 address; /* in the direct mapping */
	__u64 frame; /* physical address, in pages */
	__u64 content[4]; /* its first bytes, random */
	__u32 fd; /* a descriptor of its file */
	__u32 reserved;
};

/* A holder of an open file: an entry of the output of dm_embryo_holders. */
struct dm_embryo_holder {
	__u64 file; /* address of the open file */
	__u32 fd; /* descriptor of the examined process */
	__u32 reserved;
};

#endif
