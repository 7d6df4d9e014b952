/* A scheduler of containers (sched_ext): reservations in CPUs, shares of the rest, and hard limits.
 *
 * Reservations. Each has a bucket of CPU time, as in Linux-VServer (Soltesz et al., EuroSys 2007, section 3.2): it is
 * filled at the rate of the reservation up to DEPTH, and time on a CPU empties it. A container with tokens runs before
 * all others, preempts one without as it wakes up, and pays with tokens. So it gets what is reserved, also of time that
 * it slept, up to DEPTH. Without tokens it competes by its share, and pays with that.
 *
 * Shares. All other time is divided by start-time fair queueing (Goyal, Guo and Vin, OSDI 1996): a container is a flow,
 * and a slice of CPU time is its packet. A slice has a start tag, S = max(V - LAG, F), and moves the finish tag F of
 * its container by slice / weight. The slice with the least S runs next, and V is the tag of the last one that began. A
 * container that slept begins at V - LAG: it preempts others as it wakes up, and the rest of its unused share went to
 * them. Without LAG, a thread that is due a whole CPU would wait after each slice. The tags order one queue of the
 * kernel, a tree, so the number of containers costs little. Time beyond the slice, or short of it, is made up when the
 * task stops.
 *
 * Limits. A second bucket, filled at quota / period up to quota + burst. The tasks of a container without tokens there
 * wait in a queue that is ordered by the time of their release, which a timer looks at while tasks wait.
 *
 * The host. Its processes together are one more container, with the reservation of the host's part. Threads of the
 * kernel that are bound to one CPU preempt all others there, and are not charged.
 *
 * Containers are the cgroups of one level whose parent has the name of the instance. The kernel announces each with its
 * contract before a task can be in it; every other cgroup is the host.
 *
 * Contracts. The kernel calls the scheduler with the weight, quota and idleness of a cgroup when it is made and when
 * they change, so they hold for every container from its first instruction on. The loader writes reservations.
 *
 * Containers with a reservation, and the host, have a queue each (a slot), which the dispatcher compares with the
 * common one. Their tasks run in the order of their arrival.
 *
 * Rescue. The kernel ends a scheduler that lets a task wait for 30 seconds, and a container with many busy threads and
 * little share would have that effect. So a task that waited for PATIENCE runs once, for a tick at most, at the expense
 * of its container, behind tasks with tokens and before all others. LIMIT: RESCUES for each look and CPU.
 *
 * An error, or the end of the loader, makes the kernel return to its own scheduler, where weights and quotas of cgroups
 * hold.
 *
 * LIMIT: nice values, and weights of cgroups inside of a container, have no effect.
 * LIMIT: quotas are counted over time, not by periods, and with the resolution of the kernel's tick. Those of cgroups
 * that are no container have no effect.
 * LIMIT: the kernel walks over tasks of a queue that are bound to other CPUs. Thousands of them cost every decision.
 *
 * KERNEL(6.19): scx_bpf_dsq_peek, cgroup_set_idle. KERNEL(7.3): scx_bpf_dsq_insert_vtime may be removed later. */
#include <linux/types.h>
/* Headers before Linux 6.4 do not have this type. */
#define bpf_iter_num bpf_iter_num_of_header
#include <linux/bpf.h>
#undef bpf_iter_num
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>
#define DM_IDENTITY_OF_CGROUPS
#include "../identity/identity.h"
#include "record.h"

typedef _Bool bool;
#define MS 1000000ULL
/* The most that a task runs before others are looked at. */
#define SLICE_NS (4 * MS)
/* The same for a container without a share, and for a rescue. */
#define IDLE_SLICE_NS (1 * MS)
/* The most tokens of a reservation: CPU time that is repaid. */
#define DEPTH_NS (100 * MS)
/* Time between looks at tasks that have reached a limit. */
#define LOOK_NS (2 * MS)
/* Time between looks at tasks that wait for long. */
#define WATCH_NS (125 * MS)
#define PATIENCE_S 20
#define RESCUES 8
/* How far a container stays behind the others at most, in virtual time, while it does not use its share. */
#define LAG_NS (2 * SLICE_NS)
/* A task that wakes up preempts one that is so much ahead of it, in virtual time. */
#define AHEAD_NS (1 * MS)
#define DEFAULT_WEIGHT 100
#define NO_QUOTA (~0ULL)
#define NO_LIMIT (1LL << 62)

/* Queues. Those of slots begin at SLOTS. */
#define SHARED 1
#define IDLE 2
#define LIMITED 3
#define RESCUE 4
#define SLOTS 1024

/* Constants of kernel/sched/ext.c. */
#define SCX_DSQ_LOCAL 0x8000000000000002ULL
#define SCX_ENQ_PREEMPT (1ULL << 32)
#define SCX_ENQ_LAST (1ULL << 41)
#define SCX_KICK_IDLE 1ULL
#define SCX_KICK_PREEMPT 2ULL
#define SCX_OPS_ENQ_LAST 2ULL
#define SCX_TASK_QUEUED 1
#define PF_KTHREAD 0x00200000
#define CLOCK_MONOTONIC 1
#define ENOENT 2

const volatile struct dm_scheduler_config config SEC(".rodata.config") = {};

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct kernfs_node___name {
	const char *name;
};
struct cpumask {
	unsigned long bits[1];
};
struct css_set {
	struct cgroup *dfl_cgrp;
};
struct sched_entity {
	__u64 sum_exec_runtime;
};
struct sched_ext_entity {
	__u32 flags;
	unsigned long runnable_at; /* in jiffies: since when it waits */
	__u64 slice;
	__u64 dsq_vtime;
};
struct task_struct {
	unsigned int flags;
	int nr_cpus_allowed;
	const struct cpumask *cpus_ptr;
	struct cpumask cpus_mask; /* has clang record the type, and not its name alone */
	struct sched_entity se;
	struct sched_ext_entity scx;
	struct css_set *cgroups;
};
struct scx_cgroup_init_args {
	__u32 weight;
	__u64 bw_period_us;
	__u64 bw_quota_us;
	__u64 bw_burst_us;
	bool sched_idle;
};
enum scx_exit_kind { SCX_EXIT_NONE };
struct scx_exit_info {
	enum scx_exit_kind kind;
	const char *reason;
};
#pragma clang attribute pop

/* libbpf finds the members by their names in the kernel's struct. */
struct sched_ext_ops {
	__s32 (*select_cpu)(struct task_struct *, __s32, __u64);
	void (*enqueue)(struct task_struct *, __u64);
	void (*dispatch)(__s32, struct task_struct *);
	void (*tick)(struct task_struct *);
	void (*running)(struct task_struct *);
	void (*stopping)(struct task_struct *, bool);
	__s32 (*cgroup_init)(struct cgroup *, struct scx_cgroup_init_args *);
	void (*cgroup_exit)(struct cgroup *);
	void (*cgroup_set_weight)(struct cgroup *, __u32);
	void (*cgroup_set_bandwidth)(struct cgroup *, __u64, __u64, __u64);
	void (*cgroup_set_idle)(struct cgroup *, bool);
	__s32 (*init)(void);
	void (*exit)(struct scx_exit_info *);
	__u64 flags;
	char name[128];
};

struct bpf_iter_scx_dsq {
	__u64 opaque[6];
} __attribute__((aligned(8)));
struct bpf_iter_num {
	__u64 opaque[1];
} __attribute__((aligned(8)));

/* Functions of the kernel that return a bool leave the other bits of the register as they are, and clang takes them for
 * zero. So they are declared with a number, of which `is` looks at one byte. */
#define is(number) (((number) & 0xff) != 0)
extern void scx_bpf_dsq_insert(struct task_struct *, __u64, __u64, __u64) __ksym;
/* The successor since Linux 6.19, __scx_bpf_dsq_insert_vtime, has a name for which clang records no type. */
extern void scx_bpf_dsq_insert_vtime(struct task_struct *, __u64, __u64, __u64, __u64) __ksym;
extern __u32 scx_bpf_dsq_move_to_local(__u64) __ksym;
extern void scx_bpf_dsq_move_set_vtime(struct bpf_iter_scx_dsq *, __u64) __ksym;
extern void scx_bpf_dsq_move_set_slice(struct bpf_iter_scx_dsq *, __u64) __ksym;
extern __u32 scx_bpf_dsq_move(struct bpf_iter_scx_dsq *, struct task_struct *, __u64, __u64) __ksym;
extern __u32 scx_bpf_dsq_move_vtime(struct bpf_iter_scx_dsq *, struct task_struct *, __u64,
				   __u64) __ksym;
extern struct task_struct *scx_bpf_dsq_peek(__u64) __ksym;
extern __s32 scx_bpf_dsq_nr_queued(__u64) __ksym;
extern void scx_bpf_kick_cpu(__s32, __u64) __ksym;
extern __u32 scx_bpf_task_running(const struct task_struct *) __ksym;
extern __s32 scx_bpf_task_cpu(const struct task_struct *) __ksym;
extern __u32 scx_bpf_task_set_slice(struct task_struct *, __u64) __ksym;
extern __u32 scx_bpf_task_set_dsq_vtime(struct task_struct *, __u64) __ksym;
extern __s32 scx_bpf_select_cpu_dfl(struct task_struct *, __s32, __u64, bool *) __ksym;
extern __s32 scx_bpf_pick_idle_cpu(const struct cpumask *, __u64) __ksym;
extern __s32 scx_bpf_create_dsq(__u64, __s32) __ksym;
extern __u32 bpf_cpumask_test_cpu(__u32, const struct cpumask *) __ksym;
extern int bpf_iter_scx_dsq_new(struct bpf_iter_scx_dsq *, __u64, __u64) __ksym;
extern struct task_struct *bpf_iter_scx_dsq_next(struct bpf_iter_scx_dsq *) __ksym;
extern void bpf_iter_scx_dsq_destroy(struct bpf_iter_scx_dsq *) __ksym;
extern int bpf_iter_num_new(struct bpf_iter_num *, int, int) __ksym;
extern int *bpf_iter_num_next(struct bpf_iter_num *) __ksym;
extern void bpf_iter_num_destroy(struct bpf_iter_num *) __ksym;

/* A container. The lock guards the tokens of the limit and the finish tag. */
struct flow {
	struct bpf_spin_lock lock;
	__u32 weight;
	__u32 is_idle;
	__u32 pad;
	__u64 finish;
	__u64 quota_us; /* NO_QUOTA: no limit */
	__u64 period_us;
	__u64 burst_us;
	__s64 tokens;
	__u64 filled_ns;
};

/* What a reservation has, by slot. */
struct bucket {
	struct bpf_spin_lock lock;
	__u32 pad;
	__s64 tokens;
	__u64 filled_ns;
	__u64 finish;
};

/* The task that runs on a CPU. */
struct on_cpu {
	__u64 charged_ns; /* its CPU time that was charged */
	__u64 since_ns; /* when its slice began; 0: no task has run there */
	__u64 tag; /* the start tag of that */
	__u64 weight; /* 0: it has no share, and gives way to all others */
	__u64 granted; /* its slice is in the finish tag of its container already */
	__u64 has_tokens; /* it runs by its reservation, and is not to be preempted */
};

struct timer {
	struct bpf_timer timer;
};
/* Keys of timers. */
#define LOOK 0
#define WATCH 1

/* Cgroup id -> container. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DM_SCHEDULER_CONTAINERS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, struct flow);
} dm_flows SEC(".maps");

/* Slot -> reservation. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, DM_SCHEDULER_RESERVED);
	__type(key, __u32);
	__type(value, struct dm_scheduler_reserved);
} dm_reserved SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, DM_SCHEDULER_RESERVED);
	__type(key, __u32);
	__type(value, struct bucket);
} dm_buckets SEC(".maps");

/* Cgroup id -> slot, of containers with a reservation. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DM_SCHEDULER_RESERVED);
	__type(key, __u64);
	__type(value, __u32);
} dm_slots SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct dm_scheduler_head);
} dm_head SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct dm_scheduler_end);
} dm_end SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, DM_SCHEDULER_CPUS);
	__type(key, __u32);
	__type(value, struct on_cpu);
} dm_cpus SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, struct timer);
} dm_timers SEC(".maps");

/* V. Of two CPUs that write it at once, one may set it back to its own tag, until the next slice begins. A tag of 0 is
 * none. */
static __u64 virtual_ns = 1000 * LAG_NS;
static __u32 is_looking;
static __u32 is_watching;
/* The last look at tasks that wait for long: time, and jiffies. */
static __u64 watched_ns;
static __u64 watched_jiffies;
/* In memory, because the verifier would follow each number of a local variable. */
static __s32 rescues_left;

/* Where a task belongs. */
struct place {
	struct flow *flow; /* none: the host */
	struct dm_scheduler_reserved *reserved; /* none: it has no slot */
	struct bucket *bucket;
	__u32 slot;
};

static __always_inline bool is_before(__u64 a, __u64 b)
{
	return (__s64)(a - b) < 0;
}

/* ---- containers ---- */

static __always_inline void find(struct task_struct *p, struct place *place)
{
	__u64 cgroup = dm_container_of(BPF_CORE_READ(p, cgroups, dfl_cgrp), config.level);
	__u32 *slot, host = 0;

	place->flow = cgroup ? bpf_map_lookup_elem(&dm_flows, &cgroup) : 0;
	slot = place->flow ? bpf_map_lookup_elem(&dm_slots, &cgroup) : &host;
	place->slot = slot ? *slot : 0;
	place->reserved = slot ? bpf_map_lookup_elem(&dm_reserved, &place->slot) : 0;
	place->bucket = slot ? bpf_map_lookup_elem(&dm_buckets, &place->slot) : 0;
	if (!place->bucket)
		place->reserved = 0;
}

/* The tasks of such a container are in the common queue, by their tags. */
static __always_inline bool is_by_tags(struct place *place)
{
	return place->flow && !place->reserved && !place->flow->is_idle;
}

/* A thread of the kernel that can run on one CPU alone, and works for all tasks there. */
static __always_inline bool is_bound(struct task_struct *p)
{
	return p->nr_cpus_allowed == 1 && (p->flags & PF_KTHREAD);
}

/* CPU time of a rate, `part` of `whole`, for at most a minute. */
static __always_inline __u64 earned(__u64 passed_ns, __u64 part, __u64 whole)
{
	if (passed_ns <= 1000 * MS)
		return passed_ns * part / whole;
	if (passed_ns > 60000 * MS)
		passed_ns = 60000 * MS;
	return passed_ns / 1000 * part / whole * 1000;
}

/* Fills the bucket of a reservation, and returns its tokens. */
static __always_inline __s64 tokens_of(struct bucket *bucket, __u32 milli, __u64 now)
{
	__s64 tokens;

	bpf_spin_lock(&bucket->lock);
	if (is_before(bucket->filled_ns, now)) {
		tokens = bucket->tokens + earned(now - bucket->filled_ns, milli, 1000);
		/* A new reservation has a full bucket. */
		if (!bucket->filled_ns || tokens > (__s64)DEPTH_NS)
			tokens = DEPTH_NS;
		bucket->tokens = tokens;
		bucket->filled_ns = now;
	}
	tokens = milli ? bucket->tokens : 0;
	bpf_spin_unlock(&bucket->lock);
	return tokens;
}

/* Fills the bucket of a limit, and returns its tokens. */
static __always_inline __s64 limit_tokens_of(struct flow *flow, __u64 now)
{
	__s64 most, tokens;

	if (!flow || flow->quota_us == NO_QUOTA)
		return NO_LIMIT;
	bpf_spin_lock(&flow->lock);
	most = (flow->quota_us + flow->burst_us) * 1000;
	if (is_before(flow->filled_ns, now)) {
		tokens = flow->tokens;
		tokens += earned(now - flow->filled_ns, flow->quota_us, flow->period_us ?: 1);
		flow->tokens = flow->filled_ns && tokens < most ? tokens : most;
		flow->filled_ns = now;
	}
	tokens = flow->tokens;
	bpf_spin_unlock(&flow->lock);
	return tokens;
}

static __always_inline bool is_at_limit(struct flow *flow, __u64 now)
{
	return limit_tokens_of(flow, now) <= 0;
}

/* When a container at its limit, with `tokens` of at most 0, has tokens for some time again. */
static __always_inline __u64 release_ns(struct flow *flow, __s64 tokens, __u64 now)
{
	__u64 wanted = flow->quota_us * 1000, quota_us = flow->quota_us ?: 1;

	if (wanted > SLICE_NS)
		wanted = SLICE_NS;
	return now + (wanted - tokens) / 1000 * flow->period_us / quota_us * 1000;
}

/* ---- time ---- */

static __always_inline __u64 weighted(__u64 ns, __u32 weight)
{
	return ns * DEFAULT_WEIGHT / (weight ?: 1);
}

/* The start tag of the next slice after one that ended at `finish`. */
static __always_inline __u64 start_of(__u64 finish)
{
	__u64 least = virtual_ns - LAG_NS;

	return is_before(finish, least) ? least : finish;
}

static __always_inline void have_begun(__u64 start)
{
	if (is_before(virtual_ns, start))
		virtual_ns = start;
}

/* The start tag of the next slice of a container, which it is granted. */
static __always_inline __u64 grant(struct flow *flow)
{
	__u64 start;

	bpf_spin_lock(&flow->lock);
	start = start_of(flow->finish);
	flow->finish = start + weighted(SLICE_NS, flow->weight);
	bpf_spin_unlock(&flow->lock);
	return start;
}

static __always_inline struct on_cpu *cpu_of(struct task_struct *p)
{
	__u32 cpu = scx_bpf_task_cpu(p);

	return bpf_map_lookup_elem(&dm_cpus, &cpu);
}

/* Charges the task's CPU time since the last charge. */
static __always_inline void charge(struct task_struct *p, struct place *place)
{
	struct on_cpu *on_cpu = cpu_of(p);
	struct flow *flow = place->flow;
	__u64 used, granted;

	if (!on_cpu || is_bound(p))
		return;
	used = p->se.sum_exec_runtime - on_cpu->charged_ns;
	on_cpu->charged_ns += used;
	granted = on_cpu->granted ? SLICE_NS : 0;
	on_cpu->granted = 0;
	if (flow && flow->quota_us != NO_QUOTA) {
		bpf_spin_lock(&flow->lock);
		flow->tokens -= used;
		bpf_spin_unlock(&flow->lock);
	}
	if (place->reserved) {
		struct bucket *bucket = place->bucket;
		__u64 share = weighted(used, place->reserved->weight);

		bpf_spin_lock(&bucket->lock);
		if (!on_cpu->has_tokens)
			bucket->finish = start_of(bucket->finish) + share;
		else if (bucket->tokens > -(__s64)DEPTH_NS)
			bucket->tokens -= used;
		bpf_spin_unlock(&bucket->lock);
	} else if (flow) {
		bpf_spin_lock(&flow->lock);
		if (!granted)
			flow->finish = start_of(flow->finish);
		flow->finish += weighted(used, flow->weight) - weighted(granted, flow->weight);
		bpf_spin_unlock(&flow->lock);
	}
}

/* ---- tasks that wait ---- */

/* Has a timer look at tasks, unless it does. */
static __always_inline void begin(__u32 which, __u32 *has_begun, __u64 after_ns)
{
	struct timer *timer;

	if (*has_begun || __sync_lock_test_and_set(has_begun, 1))
		return;
	timer = bpf_map_lookup_elem(&dm_timers, &which);
	if (!timer || bpf_timer_start(&timer->timer, after_ns, 0))
		*has_begun = 0;
}

static __always_inline void look_soon(void)
{
	begin(LOOK, &is_looking, LOOK_NS);
}

static __always_inline void watch(void)
{
	begin(WATCH, &is_watching, WATCH_NS);
}

/* Moves the tasks whose time has come to the common queue. */
static int look(void *map, __u32 *key, struct timer *timer)
{
	__u64 now = bpf_ktime_get_ns();
	struct bpf_iter_scx_dsq it;
	struct task_struct *p;
	__s32 cpu;

	is_looking = 0;
	bpf_iter_scx_dsq_new(&it, LIMITED, 0);
	while ((p = bpf_iter_scx_dsq_next(&it))) {
		struct place place;

		if (is_before(now, p->scx.dsq_vtime))
			break;
		find(p, &place);
		if (place.reserved) {
			scx_bpf_dsq_move(&it, p, SLOTS + place.slot, 0);
		} else if (place.flow) {
			scx_bpf_dsq_move_set_vtime(&it, grant(place.flow));
			scx_bpf_dsq_move_vtime(&it, p, SHARED, 0);
		}
	}
	bpf_iter_scx_dsq_destroy(&it);
	bpf_for(cpu, 0, config.cpus)
		scx_bpf_kick_cpu(cpu, SCX_KICK_IDLE);
	if (scx_bpf_dsq_nr_queued(LIMITED) > 0)
		look_soon();
	return 0;
}

/* Moves tasks of a queue that wait since before `since`, in jiffies. */
static __always_inline void rescue(__u64 queue, __u64 since)
{
	struct bpf_iter_scx_dsq it;
	struct task_struct *p;

	bpf_iter_scx_dsq_new(&it, queue, 0);
	while ((p = bpf_iter_scx_dsq_next(&it)) && rescues_left > 0) {
		struct place place;
		__u64 tag = p->scx.dsq_vtime;

		if (!is_before(p->scx.runnable_at, since))
			continue;
		if (queue != SHARED) {
			find(p, &place);
			tag = is_by_tags(&place) ? grant(place.flow) : 0;
		}
		scx_bpf_dsq_move_set_slice(&it, IDLE_SLICE_NS);
		scx_bpf_dsq_move_set_vtime(&it, tag);
		if (is(scx_bpf_dsq_move_vtime(&it, p, RESCUE, 0)))
			rescues_left--;
	}
	bpf_iter_scx_dsq_destroy(&it);
}

/* Looks for tasks that wait for long. */
static int look_at_all(void *map, __u32 *key, struct timer *timer)
{
	__u64 now = bpf_ktime_get_ns(), jiffies = bpf_jiffies64();
	__u64 passed_ns = now - watched_ns, passed = jiffies - watched_jiffies;
	__u32 zero = 0, slots;
	struct dm_scheduler_head *head = bpf_map_lookup_elem(&dm_head, &zero);
	__s32 slot, waiting;

	slots = head ? head->slots : 0;
	waiting = scx_bpf_dsq_nr_queued(SHARED) + scx_bpf_dsq_nr_queued(IDLE);
	waiting += scx_bpf_dsq_nr_queued(LIMITED);
	/* The length of a jiffy is that of the time between two looks. */
	if (watched_ns && passed_ns < 10 * WATCH_NS && scx_bpf_dsq_nr_queued(RESCUE) <= 0) {
		__u64 since = jiffies - passed * 1000 * MS / (passed_ns ?: 1) * PATIENCE_S;

		rescues_left = RESCUES * config.cpus;
		rescue(SHARED, since);
		rescue(IDLE, since);
		rescue(LIMITED, since);
		bpf_for(slot, 0, slots)
			rescue(SLOTS + slot, since);
	}
	bpf_for(slot, 0, slots)
		waiting += scx_bpf_dsq_nr_queued(SLOTS + slot);
	watched_ns = now;
	watched_jiffies = jiffies;
	is_watching = 0;
	if (waiting > 0)
		watch();
	return 0;
}

/* ---- operations ---- */

/* Inserts a task into the queue of this CPU, with its tag. */
static __always_inline void insert_here(struct task_struct *p, struct place *place, __u64 flags)
{
	if (is_by_tags(place))
		scx_bpf_task_set_dsq_vtime(p, grant(place->flow));
	scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, SLICE_NS, flags);
}

SEC("struct_ops/dm_select_cpu")
__s32 BPF_PROG(dm_select_cpu, struct task_struct *p, __s32 prev_cpu, __u64 flags)
{
	struct place place;
	bool is_idle = 0;
	__s32 cpu = scx_bpf_select_cpu_dfl(p, prev_cpu, flags, &is_idle);

	if (!is_idle)
		return cpu;
	find(p, &place);
	if (!is_at_limit(place.flow, bpf_ktime_get_ns()))
		insert_here(p, &place, 0);
	return cpu;
}

/* Has a CPU choose again for a task that woke up or is new: one that runs no task with tokens, and whose task has the
 * largest tag by now. A task without tokens needs a smaller one. */
static __always_inline void preempt_for(struct task_struct *p, __u64 tag, bool has_tokens,
					__u64 now)
{
	__u64 ahead_ns = has_tokens ? 0 : AHEAD_NS;
	__s32 cpu, chosen = -1;

	bpf_for(cpu, 0, config.cpus) {
		__u32 key = cpu;
		struct on_cpu *on_cpu = bpf_map_lookup_elem(&dm_cpus, &key);
		__u64 by_now;

		if (!on_cpu || !on_cpu->since_ns || on_cpu->has_tokens || !is(bpf_cpumask_test_cpu(cpu, p->cpus_ptr)))
			continue;
		if (!on_cpu->weight) {
			chosen = cpu;
			break;
		}
		by_now = on_cpu->tag + weighted(now - on_cpu->since_ns, on_cpu->weight);
		if (has_tokens && chosen < 0)
			tag = by_now;
		if (!is_before(by_now, tag + ahead_ns)) {
			tag = by_now;
			ahead_ns = 0;
			chosen = cpu;
		}
	}
	if (chosen >= 0)
		scx_bpf_kick_cpu(chosen, SCX_KICK_PREEMPT);
}

/* A task that was put back, while a CPU that it may use is idle, runs there. */
static __always_inline void wake_idle_for(struct task_struct *p)
{
	__s32 cpu = scx_bpf_pick_idle_cpu(p->cpus_ptr, 0);

	if (cpu >= 0)
		scx_bpf_kick_cpu(cpu, SCX_KICK_IDLE);
}

SEC("struct_ops/dm_enqueue")
void BPF_PROG(dm_enqueue, struct task_struct *p, __u64 flags)
{
	bool is_back = is(scx_bpf_task_running(p));
	__u64 now = bpf_ktime_get_ns();
	struct place place;
	__s64 limit_tokens;

	if (is_bound(p)) {
		flags |= is_back ? 0 : SCX_ENQ_PREEMPT;
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, SLICE_NS, flags);
		return;
	}
	find(p, &place);
	watch();
	limit_tokens = limit_tokens_of(place.flow, now);
	if (place.reserved) {
		__u32 milli = place.reserved->reserve_milli;
		__u64 tag = start_of(place.bucket->finish);

		/* The dispatcher looks at the limit. */
		scx_bpf_dsq_insert(p, SLOTS + place.slot, SLICE_NS, flags);
		if (flags & SCX_ENQ_LAST)
			scx_bpf_kick_cpu(scx_bpf_task_cpu(p), 0);
		else if (limit_tokens <= 0)
			look_soon();
		else if (is_back)
			wake_idle_for(p);
		else
			preempt_for(p, tag, tokens_of(place.bucket, milli, now) > 0, now);
	} else if (!place.flow) {
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, SLICE_NS, flags);
	} else if (limit_tokens <= 0) {
		__u64 release = release_ns(place.flow, limit_tokens, now);

		scx_bpf_dsq_insert_vtime(p, LIMITED, SLICE_NS, release, flags);
		look_soon();
	} else if (flags & SCX_ENQ_LAST) {
		insert_here(p, &place, flags);
	} else if (place.flow->is_idle) {
		scx_bpf_dsq_insert(p, IDLE, IDLE_SLICE_NS, flags);
	} else {
		__u64 tag = grant(place.flow);

		scx_bpf_dsq_insert_vtime(p, SHARED, SLICE_NS, tag, flags);
		if (is_back)
			wake_idle_for(p);
		else
			preempt_for(p, tag, 0, now);
	}
}

/* What competes for a CPU. */
struct candidates {
	__s32 by_tokens; /* a slot; -1 is none */
	__s32 by_share; /* a slot; -1 is none */
	__s64 tokens;
	__u64 tag;
};

/* Whether the tasks of a slot have to wait; the timer looks at it again. */
static __always_inline bool slot_is_at_limit(struct dm_scheduler_reserved *reserved, __u64 now)
{
	if (!reserved->cgroup ||
	    !is_at_limit(bpf_map_lookup_elem(&dm_flows, &reserved->cgroup), now))
		return 0;
	look_soon();
	return 1;
}

/* Compares the containers with a slot that have waiting tasks. */
static __always_inline void look_at_slots(struct candidates *best, __u32 slots, __u64 now)
{
	__s32 slot;

	bpf_for(slot, 0, slots) {
		__u32 key = slot;
		struct dm_scheduler_reserved *reserved;
		struct bucket *bucket;
		__s64 tokens;
		__u64 tag;

		if (scx_bpf_dsq_nr_queued(SLOTS + key) <= 0)
			continue;
		reserved = bpf_map_lookup_elem(&dm_reserved, &key);
		bucket = bpf_map_lookup_elem(&dm_buckets, &key);
		if (!reserved || !bucket || slot_is_at_limit(reserved, now))
			continue;
		tokens = tokens_of(bucket, reserved->reserve_milli, now);
		tag = start_of(bucket->finish);
		if (tokens > best->tokens) {
			best->by_tokens = slot;
			best->tokens = tokens;
		} else if (best->by_share < 0 || is_before(tag, best->tag)) {
			best->by_share = slot;
			best->tag = tag;
		}
	}
}

/* Runs a task of any slot, with tokens or without: those of the chosen ones may be bound to other CPUs. */
static __always_inline bool move_from_slots(__u32 slots, bool needs_tokens, __u64 now)
{
	__s32 slot;

	bpf_for(slot, 0, slots) {
		__u32 key = slot;
		struct dm_scheduler_reserved *reserved;
		struct bucket *bucket;

		if (scx_bpf_dsq_nr_queued(SLOTS + key) <= 0)
			continue;
		reserved = bpf_map_lookup_elem(&dm_reserved, &key);
		bucket = bpf_map_lookup_elem(&dm_buckets, &key);
		if (!reserved || !bucket || slot_is_at_limit(reserved, now))
			continue;
		if (needs_tokens && tokens_of(bucket, reserved->reserve_milli, now) <= 0)
			continue;
		if (is(scx_bpf_dsq_move_to_local(SLOTS + key)))
			return 1;
	}
	return 0;
}

/* Has the task on this CPU run on. */
static __always_inline void keep(struct task_struct *p, __u64 tag, bool has_tokens, __u64 now)
{
	struct on_cpu *on_cpu = cpu_of(p);

	scx_bpf_task_set_slice(p, SLICE_NS);
	if (!on_cpu)
		return;
	on_cpu->since_ns = now;
	on_cpu->tag = tag;
	on_cpu->has_tokens = has_tokens;
}

SEC("struct_ops/dm_dispatch")
void BPF_PROG(dm_dispatch, __s32 cpu, struct task_struct *prev)
{
	struct candidates best = { .by_tokens = -1, .by_share = -1 };
	__u64 now = bpf_ktime_get_ns(), prev_tag = 0;
	bool prev_competes = 0;
	__s64 prev_tokens = 0;
	struct dm_scheduler_head *head;
	struct task_struct *first;
	struct place place;
	__u32 zero = 0, slots;

	head = bpf_map_lookup_elem(&dm_head, &zero);
	slots = head ? head->slots : 0;
	if (slots > DM_SCHEDULER_RESERVED)
		slots = DM_SCHEDULER_RESERVED;
	look_at_slots(&best, slots, now);
	if (prev && prev->scx.flags & SCX_TASK_QUEUED && !is_bound(prev)) {
		find(prev, &place);
		charge(prev, &place);
		if (is_at_limit(place.flow, now)) {
			/* This task waits. */
		} else if (place.reserved) {
			prev_tokens = tokens_of(place.bucket, place.reserved->reserve_milli, now);
			prev_competes = 1;
			prev_tag = start_of(place.bucket->finish);
		} else if (is_by_tags(&place)) {
			prev_competes = 1;
			prev_tag = start_of(place.flow->finish);
		}
	}
	/* By tokens. */
	if (best.by_tokens >= 0 && best.tokens > prev_tokens) {
		if (is(scx_bpf_dsq_move_to_local(SLOTS + best.by_tokens)))
			return;
		if (prev_tokens <= 0 && move_from_slots(slots, 1, now))
			return;
	}
	if (prev_tokens > 0) {
		keep(prev, 0, 1, now);
		return;
	}
	if (is(scx_bpf_dsq_move_to_local(RESCUE)))
		return;
	/* By share. */
	first = scx_bpf_dsq_peek(SHARED);
	if (prev_competes && (!first || !is_before(first->scx.dsq_vtime, prev_tag)) &&
	    (best.by_share < 0 || !is_before(best.tag, prev_tag))) {
		have_begun(prev_tag);
		keep(prev, prev_tag, 0, now);
		return;
	}
	if (best.by_share >= 0 && (!first || !is_before(first->scx.dsq_vtime, best.tag)) &&
	    is(scx_bpf_dsq_move_to_local(SLOTS + best.by_share)))
		return;
	if (is(scx_bpf_dsq_move_to_local(SHARED)) || move_from_slots(slots, 0, now))
		return;
	if (prev_competes)
		keep(prev, prev_tag, 0, now);
	else
		scx_bpf_dsq_move_to_local(IDLE);
}

SEC("struct_ops/dm_tick")
void BPF_PROG(dm_tick, struct task_struct *p)
{
	__u64 now = bpf_ktime_get_ns();
	struct on_cpu *on_cpu = cpu_of(p);
	struct place place;
	bool is_over;

	find(p, &place);
	charge(p, &place);
	is_over = is_at_limit(place.flow, now);
	if (place.reserved && on_cpu && on_cpu->has_tokens)
		is_over |= tokens_of(place.bucket, place.reserved->reserve_milli, now) <= 0;
	if (is_over && !is_bound(p))
		scx_bpf_task_set_slice(p, 0);
}

SEC("struct_ops/dm_running")
void BPF_PROG(dm_running, struct task_struct *p)
{
	struct on_cpu *on_cpu = cpu_of(p);
	__u64 now = bpf_ktime_get_ns();
	struct place place;

	if (!on_cpu)
		return;
	find(p, &place);
	on_cpu->charged_ns = p->se.sum_exec_runtime;
	on_cpu->since_ns = now;
	/* A task that was put back on this CPU without dm_enqueue has no tag. */
	on_cpu->granted = is_by_tags(&place) && p->scx.dsq_vtime;
	on_cpu->has_tokens = is_bound(p);
	on_cpu->weight = 0;
	if (is_by_tags(&place)) {
		on_cpu->weight = place.flow->weight;
		on_cpu->tag = on_cpu->granted ? p->scx.dsq_vtime : start_of(place.flow->finish);
		have_begun(on_cpu->tag);
	} else if (place.reserved && !is_bound(p)) {
		on_cpu->weight = place.reserved->weight;
		on_cpu->tag = start_of(place.bucket->finish);
		on_cpu->has_tokens = tokens_of(place.bucket, place.reserved->reserve_milli, now) > 0;
		if (!on_cpu->has_tokens)
			have_begun(on_cpu->tag);
	}
	scx_bpf_task_set_dsq_vtime(p, 0);
}

SEC("struct_ops/dm_stopping")
void BPF_PROG(dm_stopping, struct task_struct *p, bool is_runnable)
{
	struct place place;

	find(p, &place);
	charge(p, &place);
}

/* Whether a cgroup is that of a container of this instance, by its level and the name of its parent. */
static __always_inline bool is_container(struct cgroup *cgroup)
{
	char name[DM_SCHEDULER_NAME] = {};
	struct kernfs_node___name *node;
	struct cgroup *parent = 0;
	__u32 level = config.level;
	__s32 n;

	if (!level || cgroup->level != (int)level)
		return 0;
	if (bpf_probe_read_kernel(&parent, sizeof(parent), cgroup->ancestors + level - 1) || !parent)
		return 0;
	node = (struct kernfs_node___name *)BPF_CORE_READ(parent, kn);
	bpf_probe_read_kernel_str(name, sizeof(name), BPF_CORE_READ(node, name));
	for (n = 0; n < DM_SCHEDULER_NAME; n++)
		if (name[n] != config.parent[n])
			return 0;
	return 1;
}

static __always_inline struct flow *flow_at(struct cgroup *cgroup)
{
	__u64 id = cgroup->kn->id;

	return bpf_map_lookup_elem(&dm_flows, &id);
}

static __always_inline void limit(struct flow *flow, __u64 period_us, __u64 quota_us, __u64 burst_us)
{
	bpf_spin_lock(&flow->lock);
	flow->quota_us = quota_us;
	flow->period_us = period_us;
	flow->burst_us = burst_us;
	bpf_spin_unlock(&flow->lock);
}

SEC("struct_ops.s/dm_cgroup_init")
__s32 BPF_PROG(dm_cgroup_init, struct cgroup *cgroup, struct scx_cgroup_init_args *args)
{
	struct flow flow = {
		.weight = args->weight,
		.is_idle = args->sched_idle,
		.quota_us = args->bw_quota_us,
		.period_us = args->bw_period_us,
		.burst_us = args->bw_burst_us,
	};
	__u64 id = cgroup->kn->id;

	/* With an error the cgroup could not be made. LIMIT: a container that finds no room is a part of the host. */
	if (is_container(cgroup))
		bpf_map_update_elem(&dm_flows, &id, &flow, BPF_ANY);
	return 0;
}

SEC("struct_ops.s/dm_cgroup_exit")
void BPF_PROG(dm_cgroup_exit, struct cgroup *cgroup)
{
	__u64 id = cgroup->kn->id;

	bpf_map_delete_elem(&dm_flows, &id);
}

SEC("struct_ops/dm_cgroup_set_weight")
void BPF_PROG(dm_cgroup_set_weight, struct cgroup *cgroup, __u32 weight)
{
	struct flow *flow = flow_at(cgroup);

	if (flow)
		flow->weight = weight;
}

SEC("struct_ops/dm_cgroup_set_bandwidth")
void BPF_PROG(dm_cgroup_set_bandwidth, struct cgroup *cgroup, __u64 period_us, __u64 quota_us,
	      __u64 burst_us)
{
	struct flow *flow = flow_at(cgroup);

	if (flow)
		limit(flow, period_us, quota_us, burst_us);
}

SEC("struct_ops/dm_cgroup_set_idle")
void BPF_PROG(dm_cgroup_set_idle, struct cgroup *cgroup, bool is_idle)
{
	struct flow *flow = flow_at(cgroup);

	if (flow)
		flow->is_idle = is_idle;
}

SEC("struct_ops.s/dm_init")
__s32 BPF_PROG(dm_init)
{
	__u32 look_key = LOOK, watch_key = WATCH;
	struct timer *looks, *watches;
	__s32 slot, failed;

	looks = bpf_map_lookup_elem(&dm_timers, &look_key);
	watches = bpf_map_lookup_elem(&dm_timers, &watch_key);
	if (!looks || !watches)
		return -ENOENT;
	failed = bpf_timer_init(&looks->timer, &dm_timers, CLOCK_MONOTONIC);
	failed = failed ?: bpf_timer_set_callback(&looks->timer, look);
	failed = failed ?: bpf_timer_init(&watches->timer, &dm_timers, CLOCK_MONOTONIC);
	failed = failed ?: bpf_timer_set_callback(&watches->timer, look_at_all);
	failed = failed ?: scx_bpf_create_dsq(SHARED, -1);
	failed = failed ?: scx_bpf_create_dsq(IDLE, -1);
	failed = failed ?: scx_bpf_create_dsq(LIMITED, -1);
	failed = failed ?: scx_bpf_create_dsq(RESCUE, -1);
	if (failed)
		return failed;
	bpf_for(slot, 0, DM_SCHEDULER_RESERVED) {
		failed = scx_bpf_create_dsq(SLOTS + slot, -1);
		if (failed)
			return failed;
	}
	return 0;
}

SEC("struct_ops/dm_exit")
void BPF_PROG(dm_exit, struct scx_exit_info *info)
{
	struct dm_scheduler_end *end;
	__u32 zero = 0;

	end = bpf_map_lookup_elem(&dm_end, &zero);
	if (!end)
		return;
	bpf_probe_read_kernel_str(end->reason, sizeof(end->reason), info->reason);
	end->kind = info->kind;
}

SEC(".struct_ops.link")
struct sched_ext_ops dormouse = {
	.select_cpu = (void *)dm_select_cpu,
	.enqueue = (void *)dm_enqueue,
	.dispatch = (void *)dm_dispatch,
	.tick = (void *)dm_tick,
	.running = (void *)dm_running,
	.stopping = (void *)dm_stopping,
	.cgroup_init = (void *)dm_cgroup_init,
	.cgroup_exit = (void *)dm_cgroup_exit,
	.cgroup_set_weight = (void *)dm_cgroup_set_weight,
	.cgroup_set_bandwidth = (void *)dm_cgroup_set_bandwidth,
	.cgroup_set_idle = (void *)dm_cgroup_set_idle,
	.init = (void *)dm_init,
	.exit = (void *)dm_exit,
	.flags = SCX_OPS_ENQ_LAST,
	.name = "dormouse",
};

char LICENSE[] SEC("license") = "GPL";
