/* The records shared by the sysinfo program and its loader (mod.rs). Only add at the end. */
#ifndef DORMOUSE_SYSINFO_RECORD_H
#define DORMOUSE_SYSINFO_RECORD_H

/* LIMIT: containers with a view of sysinfo(2). */
#define DM_SYSINFO_MAX 65536

#define DM_SYSINFO_MEMORY 1 /* memory and swap are the container's */
#define DM_SYSINFO_SWAP_V1 2 /* the kernel counts memory and swap together */

/* Constants of a load. */
struct dm_sysinfo_config {
	__u32 level; /* of a container's cgroup below the root of its hierarchy */
	__u32 page_bytes;
};

/* What the processes below one cgroup see. */
struct dm_sysinfo_view {
	__u64 memory_bytes; /* all of it */
	__u64 swap_bytes;
	__u64 shared_bytes; /* of tmpfs and shared memory, as it was measured last */
	__u64 loads[3]; /* over 1, 5 and 15 minutes, in parts of 1 << 16 */
	__u64 called_ns; /* the boot clock of the last call, written by the program */
	__u32 base; /* the first host id of the container */
	__u32 flags;
};

#endif
