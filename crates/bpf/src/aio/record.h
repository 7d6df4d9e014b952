/* The record shared by the aio program and its loader (mod.rs). Only add at the end. */
#ifndef DORMOUSE_AIO_RECORD_H
#define DORMOUSE_AIO_RECORD_H

/* LIMIT: contexts of one process: as many as a page of records of an iterator holds (PAGE_SIZE << 3 bytes).
 * The read of a process with more fails. */
#define DM_AIO_CONTEXTS_MAX 512

/* A context: an entry of the output of dm_aio_contexts. */
struct dm_aio_context {
	__u64 id; /* aio_context_t: the address of its ring */
	__u64 unfinished; /* requests without an event in the ring; references to them, if these are more */
	__u32 slot; /* its place in the table of the address space */
	__u32 requests; /* as io_setup(2) was called */
	__u32 events; /* places of the ring */
	__u32 tail; /* the place of the next event */
	__u32 polls; /* flag: a request waits for an event of a file (IOCB_CMD_POLL) */
	__u32 reserved;
};

#endif
