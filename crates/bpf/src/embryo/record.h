/* The record shared by the embryo programs and their loader (mod.rs). Only add at the end. */
#ifndef DORMOUSE_EMBRYO_RECORD_H
#define DORMOUSE_EMBRYO_RECORD_H

/* Bytes of one piece: what is copied at once. */
#define DM_PIECE_BYTES 4096
/* Pieces of one connection. */
#define DM_PIECES_MAX 1024
/* Supplementary groups of the client. */
#define DM_GROUPS_MAX 256

/* The request, and the result. */
struct dm_embryo {
	__u32 fd; /* the socket that listens, of the process that is looked at */
	__u32 place; /* in its queue, from 0 */
	__u32 found; /* 0 or 1, as all that follow */
	__u32 whole; /* all of its messages are in the pieces */
	__u32 urgent; /* one of them is out of band */
	__u32 pieces;
	__u64 client; /* the inode of the socket at the other side; 0 is one that was closed */
	__u32 named; /* that one has a name */
	__u32 pid; /* who has connected; of another pid namespace 0 */
	__u32 uid;
	__u32 gid;
	__u32 groups; /* how many there are */
	__u32 reserved;
	__u32 group[DM_GROUPS_MAX];
};

/* A part of a message. */
struct dm_embryo_piece {
	__u32 message; /* which, from 0 */
	__u32 bytes;
	__u32 files; /* addresses of open files that come along, of 8 bytes each, are in `data` */
	__u32 pid; /* who has sent it; of another pid namespace 0 */
	__u32 uid;
	__u32 gid;
	__u32 known; /* that comes along */
	__u32 reserved;
	__u8 data[DM_PIECE_BYTES];
};

/* A page that is known by its description and by its address. */
struct dm_embryo_page {
	__u64 page; /* both 0 until they are found */
	__u64 address;
	__u64 frame; /* its physical address, in pages */
	__u64 content[4]; /* what it begins with */
	__u32 fd; /* the file that has it */
	__u32 reserved;
};

/* A holder of an open file. */
struct dm_embryo_holder {
	__u64 file; /* its address */
	__u32 fd;
	__u32 reserved;
};

#endif
