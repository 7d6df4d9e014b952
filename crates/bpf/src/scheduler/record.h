/* The records shared by the scheduler and its loader (mod.rs). Only add at the end. */
#ifndef DORMOUSE_SCHEDULER_RECORD_H
#define DORMOUSE_SCHEDULER_RECORD_H

/* LIMIT: cgroups beside and of containers, at their level. When the map is full, a further container is scheduled
 * with the host. */
#define DM_FLOWS_MAX 65536
/* LIMIT: containers with a contract of their own. When the map is full, an insertion by the loader fails with E2BIG. */
#define DM_SHARES_MAX 16384
/* LIMIT: CPUs. */
#define DM_CPUS_MAX 1024
/* LIMIT: bytes of a name of a cgroup, with the zero at its end. */
#define DM_NAME_MAX 64
/* Bytes of the kernel's reason for an unload, with the zero at its end. */
#define DM_REASON_MAX 128

struct dm_scheduler_config {
	__u32 level; /* the depth of a container's cgroup */
	__u32 cpus_milli; /* CPUs that are online, in thousandths */
	__u32 host_milli; /* CPUs that are kept for the host */
	__u32 reserved;
	__u8 parent[DM_NAME_MAX]; /* the name of the cgroup above all containers */
};

/* dm_shares: the contract of a container with a reservation, by the id of its cgroup. The kernel's weight of such a
 * container has the reservation in it. */
struct dm_share {
	__u32 reserve_milli; /* CPU time that is guaranteed, in thousandths of a CPU */
	__u32 weight; /* 1 to 10,000 */
};

/* dm_state: what became of the scheduler. */
struct dm_state {
	__u64 repaid_ns; /* CPU time given for tokens of reservations */
	__u64 throttled; /* times that a task waited for its quota */
	__u64 rescued; /* tasks that had waited too long */
	__u32 exit_kind; /* enum scx_exit_kind; 0 while it is loaded */
	__u32 reserved;
	__u8 reason[DM_REASON_MAX];
};

#endif
