/* The record shared by the rate programs and their loader (mod.rs). Only add at the end. */
#ifndef DORMOUSE_RATE_RECORD_H
#define DORMOUSE_RATE_RECORD_H

/* LIMIT: addresses of one domain whose container has a contract for its network. When the map is full, an insertion
 * by the loader fails with E2BIG: the start of the container is refused. */
#define DM_CLASSES_MAX 65536

/* dm_classes: the class of a container, by the index of each of its addresses. */
struct dm_class {
	__u32 priority; /* the number of the class, as the kernel's tree of classes takes it from skb->priority */
};

#endif
