/* sysinfo(2) of processes in containers: memory, swap, tasks and load are those of the container.
 *
 * Hook: the return of the system call's function (fexit). The kernel has written the host's numbers into the
 * buffer of the caller by then, and this program writes some of them again. It runs in the calling task, with
 * its memory, and only for this call: no other call costs more. It waits for no process, so a call cannot hang,
 * and it is kept by a link with a name in a bpffs: the numbers stay true without a process of ours.
 *
 * Memory in use, swap and tasks are read from the counters of the container's cgroups at each call. Memory in
 * shared memory and the load averages are those that a daemon has measured last.
 *
 * Trust: a container chooses the address. The helper writes only to memory that the caller itself may write
 * (bpf_probe_write_user), where the kernel has written before. If another thread has unmapped it meanwhile,
 * nothing is written.
 *
 * LIMIT: a buffer that is not in memory at that moment (swapped out since the kernel wrote it) keeps the host's
 * numbers. Calls of 32-bit programs have another function, and are not changed.
 *
 * KERNEL(5.5): fexit; CONFIG_DYNAMIC_FTRACE_WITH_DIRECT_CALLS, and no lockdown. */
#include <linux/types.h>
#include <stddef.h>
#include <linux/bpf.h>
#include <linux/sysinfo.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#define DM_IDENTITY_OF_CGROUPS
#include "../identity/identity.h"
#include "record.h"

#define DEPTH_MAX 32 /* LIMIT: cgroups of a container below its own */

const volatile struct dm_sysinfo_config config SEC(".rodata.config") = {};

/* Cgroup id -> what is seen there. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DM_SYSINFO_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, struct dm_sysinfo_view);
} dm_sysinfo SEC(".maps");

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
typedef struct {
	__s64 counter;
} atomic64_t;
typedef atomic64_t atomic_long_t;
struct page_counter {
	atomic_long_t usage;
};
struct cgroup_subsys_state {
	struct cgroup *cgroup;
	struct cgroup_subsys_state *parent;
};
struct mem_cgroup {
	struct cgroup_subsys_state css;
	struct page_counter memory;
	union {
		struct page_counter swap;
		struct page_counter memsw;
	};
};
struct pids_cgroup {
	struct cgroup_subsys_state css;
	atomic64_t counter;
};
struct css_set {
	struct cgroup_subsys_state *subsys[1];
};
struct task_struct {
	struct css_set *cgroups;
};
#if defined(__TARGET_ARCH_arm64)
#define FUNCTION "fexit/__arm64_sys_sysinfo"
struct pt_regs {
	__u64 orig_x0;
};
#define ARGUMENT(regs) BPF_CORE_READ(regs, orig_x0)
#else
#define FUNCTION "fexit/__x64_sys_sysinfo"
struct pt_regs {
	unsigned long di;
};
#define ARGUMENT(regs) BPF_CORE_READ(regs, di)
#endif
#pragma clang attribute pop

enum cgroup_subsys_id {
	memory_cgrp_id = 1,
	pids_cgrp_id = 2,
};

/* The part of struct sysinfo from totalram to freeswap. */
struct memory {
	__u64 total, free, shared, buffers, swap_total, swap_free;
};
_Static_assert(__builtin_offsetof(struct sysinfo, procs) - __builtin_offsetof(struct sysinfo, totalram) ==
		       sizeof(struct memory),
	       "struct sysinfo of 64 bits");

/* The state of a controller for the container of the calling task; 0 if it has none. With cgroup v1 each
 * controller has another hierarchy, and all have the container at the same level. */
static __always_inline struct cgroup_subsys_state *state_of(__u64 controller)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct css_set *set = BPF_CORE_READ(task, cgroups);
	struct cgroup_subsys_state *state = 0;
	__u64 at = (__u64)set + bpf_core_field_offset(struct css_set, subsys);

	bpf_probe_read_kernel(&state, sizeof state, (void *)(at + controller * sizeof state));
	for (int depth = 0; depth < DEPTH_MAX && state; depth++) {
		struct cgroup *cgroup = BPF_CORE_READ(state, cgroup);
		int level = BPF_CORE_READ(cgroup, level);

		if (level == (int)config.level)
			return state;
		if (level < (int)config.level)
			return 0;
		state = BPF_CORE_READ(state, parent);
	}
	return 0;
}

static __always_inline __u64 bytes_of(__s64 pages)
{
	return pages > 0 ? (__u64)pages * config.page_bytes : 0;
}

static __always_inline __u64 rest(__u64 all, __u64 used)
{
	return all > used ? all - used : 0;
}

/* Writes memory and swap. */
static __always_inline void write_memory(__u64 to, struct dm_sysinfo_view *view)
{
	struct cgroup_subsys_state *state =
		state_of(bpf_core_enum_value(enum cgroup_subsys_id, memory_cgrp_id));
	struct memory memory = { .total = view->memory_bytes, .swap_total = view->swap_bytes };
	struct mem_cgroup *group;
	__u64 used, swap;

	if (!state)
		return;
	group = (void *)state - bpf_core_field_offset(struct mem_cgroup, css);
	used = bytes_of(BPF_CORE_READ(group, memory.usage.counter));
	swap = bytes_of(BPF_CORE_READ(group, swap.usage.counter));
	if (view->flags & DM_SYSINFO_SWAP_V1)
		swap = rest(swap, used);
	memory.free = rest(memory.total, used);
	memory.shared = view->shared_bytes;
	memory.swap_free = rest(memory.swap_total, swap);
	bpf_probe_write_user((void *)(to + offsetof(struct sysinfo, totalram)), &memory, sizeof memory);
}

/* Writes the number of tasks. */
static __always_inline void write_tasks(__u64 to)
{
	struct cgroup_subsys_state *state =
		state_of(bpf_core_enum_value(enum cgroup_subsys_id, pids_cgrp_id));
	struct pids_cgroup *group;
	__s64 count;
	__u16 tasks;

	if (!state)
		return;
	group = (void *)state - bpf_core_field_offset(struct pids_cgroup, css);
	count = BPF_CORE_READ(group, counter.counter);
	tasks = count > 65535 ? 65535 : (__u16)count;
	bpf_probe_write_user((void *)(to + offsetof(struct sysinfo, procs)), &tasks, sizeof tasks);
}

/* The return of sysinfo(2): registers at the call, and the result. */
SEC(FUNCTION)
int dm_sysinfo_exit(__u64 *arguments)
{
	struct pt_regs *registers = (void *)arguments[0];
	__u64 cgroup = dm_current_container(config.level);
	struct dm_sysinfo_view *view = bpf_map_lookup_elem(&dm_sysinfo, &cgroup);
	__u64 to, loads[3];

	if (!view || arguments[1])
		return 0;
	to = ARGUMENT(registers);
	view->called_ns = bpf_ktime_get_boot_ns();
	for (int i = 0; i < 3; i++)
		loads[i] = view->loads[i];
	bpf_probe_write_user((void *)(to + offsetof(struct sysinfo, loads)), loads, sizeof loads);
	write_tasks(to);
	if (view->flags & DM_SYSINFO_MEMORY)
		write_memory(to, view);
	return 0;
}

char _license[] SEC("license") = "GPL";
