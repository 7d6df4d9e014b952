/* The record shared by the reuseport program and its loader (mod.rs). Only add at the end. */
#ifndef DORMOUSE_REUSEPORT_RECORD_H
#define DORMOUSE_REUSEPORT_RECORD_H

/* A socket with a program: an entry of the output of dm_reuseport_read. There is no map, so nothing can be
 * full. */
struct dm_reuseport {
	__u32 fd; /* descriptor of the examined process */
	__u32 reserved;
};

#endif
