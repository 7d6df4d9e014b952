/* The records shared by the programs of the barrier and their loader (mod.rs). Only add at the end. */
#ifndef DORMOUSE_BARRIER_RECORD_H
#define DORMOUSE_BARRIER_RECORD_H

/* LIMIT: containers behind the barrier. */
#define DM_BARRIER_MAX 262144

/* Known before the programs are loaded: the verifier folds it into the code. */
struct dm_barrier_config {
	__u32 level; /* of a container's cgroup below the root of the v2 hierarchy */
};

/* A container. */
struct dm_barrier_ids {
	__u32 base; /* its host ids: the first one */
	__u32 count; /* and how many */
	__u64 refused; /* calls, since its cgroup was made */
};

#endif
