/* Records of the scheduler that its loader writes and reads. */
#ifndef DORMOUSE_SCHEDULER_H
#define DORMOUSE_SCHEDULER_H

/* LIMIT: containers with a contract of their own: as many as there are containers with an address. */
#define DM_SCHEDULER_CONTAINERS 262144
/* LIMIT: containers with a reservation at a time, and the host. The dispatcher looks at each of them. */
#define DM_SCHEDULER_RESERVED 256
/* LIMIT: CPUs, the most that a kernel is built for. */
#define DM_SCHEDULER_CPUS 8192
/* Bytes of the name of a cgroup, with its zero. */
#define DM_SCHEDULER_NAME 64
/* Bytes of the kernel's reason for an end, with its zero. */
#define DM_SCHEDULER_REASON 128

struct dm_scheduler_config {
	__u32 level; /* depth of a container's cgroup below the root of the v2 hierarchy */
	__u32 cpus; /* CPUs that can be there */
	__u8 parent[DM_SCHEDULER_NAME]; /* name of the cgroup above all containers of the instance */
};

/* A reservation. Slot 0 is that of the host; slots beyond the last used one have a rate of 0. */
struct dm_scheduler_reserved {
	__u64 cgroup; /* the id of the container's cgroup; 0 in slot 0, and in a free slot */
	__u32 reserve_milli; /* thousandths of a CPU */
	__u32 weight; /* its share of the rest, as cpu.weight: 1 to 10000 */
};

/* Written by the loader after the slots. */
struct dm_scheduler_head {
	__u32 slots; /* slots in use are below this */
	__u32 pad;
};

/* Written once, when the kernel has ended the scheduler. */
struct dm_scheduler_end {
	__u32 kind; /* enum scx_exit_kind of the kernel; 0 while it runs */
	__u8 reason[DM_SCHEDULER_REASON];
};

#endif
