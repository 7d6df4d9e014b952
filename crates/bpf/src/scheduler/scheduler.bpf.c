/* The scheduler of containers (sched_ext): contracts of CPU time, kept at each wakeup.
 *
 * A *flow* is a container: all tasks below its cgroup, however deep. All tasks beside containers are one flow more,
 * the host. Flows are flat. Within a flow, tasks take turns.
 *
 * **Weight.** An active flow, one with a runnable task, is due r + (C - R) x s / S: its reservation, and its share
 * of the CPUs that no active flow has reserved. So its weight is w = s + r x S / (C - R), where S and R are sums
 * over active flows. The host has its part as a reservation, and the least share.
 *
 * **Virtual time** (start-time fair queueing: Goyal, Vin and Cheng, SIGCOMM 1996). A flow has a tag. A task that is
 * enqueued starts at S = max(tag, V - credit), and the tag becomes S + slice / w; the real time of the slice
 * corrects it when the task stops. The task with the least S runs next, and V is the S of the task that began last.
 *
 * **Bucket.** A reservation has a bucket of 100 ms of CPU time: filled by r x time, charged with all time that the
 * flow runs, between -100 and 100 ms. A task of a flow with tokens runs before all others, and takes the CPU of a
 * task that does not have any. That repays a flow that slept, so it does not count as virtual time.
 *
 * **Limit.** The kernel's quota (cpu.max) is one of its fair class, and is not enforced below sched_ext: the kernel
 * gives it to cgroup_set_bandwidth. A flow without quota waits in the queue of throttled tasks, by the time at which
 * it has some again. What a flow uses beyond its quota, up to a tick for each CPU, is taken from the next period.
 *
 * **Idle.** Tasks of a flow with cpu.idle run when no others do.
 *
 * Invariants:
 *
 * 1. A task is in one of four queues, in the queue of a CPU, or runs. `dm_task.tag` and `.quota_ns` are what its
 *    flow was charged in advance, and are zero while it is in no queue and does not run.
 * 2. `flow.runnable` counts tasks between runnable() and quiescent(). The sums S and R contain `flow.in_shares` and
 *    `flow.in_reserve`, which are zero when it is 0.
 * 3. A throttled task is looked at within 4 ms of its time, on an idle host as well: by the timer. The first one
 *    after a second without any may wait 250 ms more there.
 * 4. No task waits for 10 s: the timer moves those at the end of the queues to the front. The kernel unloads a
 *    scheduler after 30 s.
 * 5. A flow that is not known is scheduled as the host.
 *
 * LIMIT: nice values and weights of cgroups inside a container have no effect.
 *
 * LIMIT: slices end at ticks of the kernel (4 ms with HZ=250).
 *
 * LIMIT: a container with more runnable tasks than its CPU time has slices in 30 s has the kernel unload the
 * scheduler.
 *
 * KERNEL(6.17): cgroup_set_bandwidth. KERNEL(6.12): sched_ext. */
#include <linux/types.h>
#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/version.h>
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 4, 0) /* of the headers */
struct bpf_iter_num {
	__u64 opaque[1];
} __attribute__((aligned(8)));
#endif
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>
#include "record.h"

typedef __s32 s32;
typedef __u32 u32;
typedef __s64 s64;
typedef __u64 u64;

/* The parts of the kernel's types that are used here. */
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct kernfs_node {
	const char *name;
	u64 id;
};
struct cgroup {
	int level;
	struct kernfs_node *kn;
};
struct sched_entity {
	u64 sum_exec_runtime;
};
struct sched_ext_entity {
	u32 flags;
	u64 dsq_vtime;
};
struct cpumask {
	unsigned long bits[1];
};
struct task_struct {
	unsigned int flags;
	int nr_cpus_allowed;
	const void *cpus_ptr; /* a struct cpumask: clang 14 declares the pointee of a field only */
	struct sched_entity se;
	struct sched_ext_entity scx;
};
struct scx_init_task_args {
	bool fork;
};
struct scx_cgroup_init_args {
	u32 weight;
	u64 bw_period_us;
	u64 bw_quota_us;
	u64 bw_burst_us;
};
enum scx_exit_kind { SCX_EXIT_NONE };
struct scx_exit_info {
	enum scx_exit_kind kind;
	const char *reason;
};
#pragma clang attribute pop

struct sched_ext_ops {
	s32 (*select_cpu)(struct task_struct *task, s32 cpu, u64 flags);
	void (*enqueue)(struct task_struct *task, u64 flags);
	void (*dispatch)(s32 cpu, struct task_struct *before);
	void (*runnable)(struct task_struct *task, u64 flags);
	void (*running)(struct task_struct *task);
	void (*stopping)(struct task_struct *task, bool runnable);
	void (*quiescent)(struct task_struct *task, u64 flags);
	s32 (*init_task)(struct task_struct *task, struct scx_init_task_args *args);
	s32 (*cgroup_init)(struct cgroup *cgroup, struct scx_cgroup_init_args *args);
	void (*cgroup_exit)(struct cgroup *cgroup);
	void (*cgroup_set_weight)(struct cgroup *cgroup, u32 weight);
	void (*cgroup_set_bandwidth)(struct cgroup *cgroup, u64 period_us, u64 quota_us, u64 burst_us);
	void (*cgroup_set_idle)(struct cgroup *cgroup, bool idle);
	s32 (*init)(void);
	void (*exit)(struct scx_exit_info *info);
	u64 flags;
	u32 timeout_ms;
	char name[128];
};

struct bpf_iter_scx_dsq {
	u64 opaque[6];
} __attribute__((aligned(8)));

extern s32 scx_bpf_create_dsq(u64 queue, s32 node) __ksym;
extern s32 scx_bpf_select_cpu_dfl(struct task_struct *task, s32 cpu, u64 flags, bool *is_idle) __ksym;
extern s32 scx_bpf_pick_idle_cpu(const struct cpumask *allowed, u64 flags) __ksym;
extern s32 scx_bpf_task_cpu(const struct task_struct *task) __ksym;
extern void scx_bpf_dsq_insert(struct task_struct *task, u64 queue, u64 slice, u64 flags) __ksym;
extern void scx_bpf_dsq_insert_vtime(struct task_struct *task, u64 queue, u64 slice, u64 time,
				     u64 flags) __ksym;
extern bool scx_bpf_dsq_move_to_local(u64 queue) __ksym;
extern s32 scx_bpf_dsq_nr_queued(u64 queue) __ksym;
extern void scx_bpf_kick_cpu(s32 cpu, u64 flags) __ksym;
extern u64 scx_bpf_now(void) __ksym;
extern struct cgroup *scx_bpf_task_cgroup(struct task_struct *task) __ksym;
extern struct cgroup *bpf_cgroup_ancestor(struct cgroup *cgroup, int level) __ksym;
extern void bpf_cgroup_release(struct cgroup *cgroup) __ksym;
extern int bpf_iter_scx_dsq_new(struct bpf_iter_scx_dsq *it, u64 queue, u64 flags) __ksym;
extern struct task_struct *bpf_iter_scx_dsq_next(struct bpf_iter_scx_dsq *it) __ksym;
extern void bpf_iter_scx_dsq_destroy(struct bpf_iter_scx_dsq *it) __ksym;
extern void scx_bpf_dsq_move_set_slice(struct bpf_iter_scx_dsq *it, u64 slice) __ksym;
extern void scx_bpf_dsq_move_set_vtime(struct bpf_iter_scx_dsq *it, u64 time) __ksym;
extern bool scx_bpf_dsq_move_vtime(struct bpf_iter_scx_dsq *it, struct task_struct *task, u64 queue,
				   u64 flags) __ksym;

#define QUEUE_LOCAL 0x8000000000000002ULL /* SCX_DSQ_LOCAL: of this CPU */
#define QUEUE_REPAID 1 /* by time of arrival */
#define QUEUE_SHARED 2 /* by virtual time */
#define QUEUE_IDLE 3 /* by time of arrival */
#define QUEUE_THROTTLED 4 /* by the time at which there is a quota again */
#define KICK_IDLE 1
#define KICK_PREEMPT 2
#define ENQUEUE_LAST 0x20000000000ULL /* no other task wants this CPU */
#define IS_QUEUED 1
#define FROM_THE_END (1 << 16)
#define OPS_ENQUEUE_LAST (1 << 1)
#define KTHREAD 0x00200000
#define NO_QUOTA_US (1ULL << 40)

#define MS 1000000ULL
#define SLICE_NS (15 * MS / 2) /* the second tick with HZ=250 */
#define BUCKET_NS ((s64)(100 * MS))
#define CREDIT_NS (20 * MS)
#define LEAD_NS (100 * MS) /* beyond a slice for each task */
#define LATE_NS (10000 * MS)
#define FAST_NS (4 * MS)
#define SLOW_NS (250 * MS)
/* Virtual time of a weight of 100 is real time. */
#define UNIT 10000
/* A share in hundredths of cpu.weight. The least one is the host's. */
#define SHARE_LEAST 100
#define SHARE_DEFAULT 10000
#define LOOKS_MAX 32

/* The urgency of a running task. */
enum urgency { NOTHING, IDLE, SHARED, REPAID };

struct flow {
	struct bpf_spin_lock lock;
	u32 runnable;
	u64 tag;
	s64 tokens_ns;
	u64 filled_at;
	/* What the sums contain of it. */
	u64 in_shares;
	u64 in_reserve;
	/* cpu.weight in hundredths, and cpu.idle. */
	u64 share;
	u32 is_idle;
	/* A quota of 0 is none. */
	u64 quota_ns;
	u64 period_ns;
	u64 burst_ns;
	s64 left_ns;
	u64 period_ends_at;
};

struct dm_task {
	u64 flow;
	/* The cgroup by which the flow was found. */
	u64 cgroup;
	u64 tag;
	u64 quota_ns;
	u64 start; /* S, in the queue by virtual time; 0 elsewhere */
	u64 ran_ns;
	u64 queued_at;
	u32 urgency;
	u32 is_counted;
	u32 is_running;
};

const volatile struct dm_scheduler_config config SEC(".rodata.config") = {};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DM_FLOWS_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, u64);
	__type(value, struct flow);
} dm_flows SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DM_SHARES_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, u64);
	__type(value, struct dm_share);
} dm_shares SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct dm_task);
} dm_tasks SEC(".maps");

/* The urgency of what runs on each CPU. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, DM_CPUS_MAX);
	__type(key, u32);
	__type(value, u32);
} dm_cpus SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct dm_state);
} dm_state SEC(".maps");

struct clock {
	struct bpf_timer timer;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct clock);
} dm_clock SEC(".maps");

static u64 now_v; /* V */
static u64 sum_shares;
static u64 sum_reserve;
static u64 throttled_until; /* the timer is fast until then */

static __always_inline struct dm_state *state(void)
{
	u32 zero = 0;

	return bpf_map_lookup_elem(&dm_state, &zero);
}

static __always_inline struct flow *flow_of(u64 id)
{
	u64 host = 0;
	struct flow *flow = bpf_map_lookup_elem(&dm_flows, &id);

	return flow ? flow : bpf_map_lookup_elem(&dm_flows, &host);
}

static __always_inline bool is_before(u64 a, u64 b)
{
	return (s64)(a - b) < 0;
}

/* The id of the container that `cgroup` belongs to; 0 beside all containers. */
static u64 container_of_cgroup(struct cgroup *cgroup)
{
	char name[DM_NAME_MAX] = {};
	struct cgroup *above, *container;
	bool is_ours = true;
	u64 id = 0;
	int i;

	if (cgroup->level < (int)config.level)
		return 0;
	above = bpf_cgroup_ancestor(cgroup, config.level - 1);
	if (!above)
		return 0;
	bpf_probe_read_kernel_str(name, sizeof(name), above->kn->name);
	bpf_cgroup_release(above);
	for (i = 0; i < DM_NAME_MAX; i++) {
		if (name[i] != (char)config.parent[i])
			is_ours = false;
		if (!name[i])
			break;
	}
	if (!is_ours)
		return 0;
	container = bpf_cgroup_ancestor(cgroup, config.level);
	if (!container)
		return 0;
	id = container->kn->id;
	bpf_cgroup_release(container);
	return id;
}

/* What a flow is due, apart from its limit. */
struct due {
	u64 share;
	u64 reserve;
};

static __always_inline struct due due_of(u64 id, const struct flow *flow)
{
	struct dm_share *contract = id ? bpf_map_lookup_elem(&dm_shares, &id) : 0;
	struct due due = {};

	if (!id) {
		due.share = SHARE_LEAST;
		due.reserve = config.host_milli;
	} else if (contract) {
		due.share = (u64)contract->weight * 100;
		due.reserve = contract->reserve_milli;
	} else {
		due.share = flow->share;
	}
	if (due.share < SHARE_LEAST)
		due.share = SHARE_LEAST;
	return due;
}

/* Has the sums contain an active flow as it is due now. The caller holds its lock. */
static __always_inline void count(struct flow *flow, const struct due *due)
{
	u64 shares = flow->runnable ? due->share : 0, reserve = flow->runnable ? due->reserve : 0;

	if (shares != flow->in_shares) {
		__sync_fetch_and_add(&sum_shares, shares - flow->in_shares);
		flow->in_shares = shares;
	}
	if (reserve != flow->in_reserve) {
		__sync_fetch_and_add(&sum_reserve, reserve - flow->in_reserve);
		flow->in_reserve = reserve;
	}
}

/* w = s + r x S / (C - R) */
static __always_inline u64 weight_of(const struct due *due)
{
	u64 all = config.cpus_milli, taken = sum_reserve, least = all / 100 + 1, weight;
	u64 left = all > taken + least ? all - taken : least;

	weight = due->share + due->reserve * sum_shares / left;
	return weight ? weight : 1;
}

/* Fills the bucket and the quota. The caller holds the lock. */
static __always_inline void fill(struct flow *flow, const struct due *due, u64 now)
{
	u64 passed = now - flow->filled_at, periods;

	if ((s64)passed > 0) {
		if (passed > 1000 * MS * 100)
			passed = 1000 * MS * 100;
		flow->tokens_ns += (s64)(passed * due->reserve / 1000);
		if (flow->tokens_ns > BUCKET_NS)
			flow->tokens_ns = BUCKET_NS;
		flow->filled_at = now;
	}
	if (!flow->quota_ns || is_before(now, flow->period_ends_at))
		return;
	periods = (now - flow->period_ends_at) / flow->period_ns + 1;
	flow->period_ends_at += periods * flow->period_ns;
	if (periods > 1000)
		periods = 1000;
	flow->left_ns += (s64)(periods * flow->quota_ns);
	if (flow->left_ns > (s64)(flow->quota_ns + flow->burst_ns))
		flow->left_ns = (s64)(flow->quota_ns + flow->burst_ns);
}

/* The time at which a flow has a quota again; 0 if it has one now. The caller holds the lock, and has filled. */
static __always_inline u64 waits_until(const struct flow *flow)
{
	u64 periods;

	if (!flow->quota_ns || flow->left_ns > 0)
		return 0;
	periods = (u64)-flow->left_ns / flow->quota_ns;
	return flow->period_ends_at + periods * flow->period_ns;
}

/* What was decided for a task. */
struct place {
	u64 queue;
	u64 time;
	u64 slice_ns;
	u32 urgency;
};

/* Takes back what the flow of a task was charged in advance. The caller holds the lock. */
static __always_inline void refund(struct flow *flow, struct dm_task *task)
{
	flow->tag -= task->tag;
	flow->left_ns += (s64)task->quota_ns;
	task->tag = 0;
	task->quota_ns = 0;
}

/* Decides where a task waits, and charges its flow for a slice. With `is_direct` it runs at once if it may. */
static __noinline int decide(struct dm_task *task, bool is_direct, u64 now, struct place *to)
{
	struct place place = { .queue = QUEUE_SHARED, .slice_ns = SLICE_NS, .urgency = SHARED };
	u64 weight, start, credit, until, charge, lead, shared = 0;
	struct flow *flow = flow_of(task->flow);
	struct due due;

	if (!flow)
		goto out;
	due = due_of(task->flow, flow);
	bpf_spin_lock(&flow->lock);
	fill(flow, &due, now);
	count(flow, &due);
	refund(flow, task); /* it left a queue without running */
	until = waits_until(flow);
	if (flow->quota_ns && flow->left_ns > 0 && flow->left_ns < (s64)SLICE_NS)
		place.slice_ns = flow->left_ns > (s64)MS ? (u64)flow->left_ns : MS;
	weight = weight_of(&due);
	credit = CREDIT_NS * UNIT / weight;
	start = flow->tag;
	if (is_before(start, now_v - credit))
		start = now_v - credit;
	/* A charge of when it had less weight keeps no flow behind. */
	charge = place.slice_ns * UNIT / weight;
	lead = (LEAD_NS + SLICE_NS * (flow->runnable + 1)) * UNIT / weight;
	if (is_before(now_v + lead, start))
		start = now_v + lead;
	if (until) {
		place.queue = QUEUE_THROTTLED;
		place.time = until;
		place.urgency = NOTHING;
	} else if (flow->is_idle && task->flow) {
		place.queue = QUEUE_IDLE;
		place.time = now;
		place.urgency = IDLE;
	} else if (due.reserve && flow->tokens_ns > 0) {
		place.queue = QUEUE_REPAID;
		place.time = now;
		place.urgency = REPAID;
	} else {
		place.time = start;
		shared = start;
		flow->tag = start + charge;
		task->tag = charge;
	}
	if (!until && flow->quota_ns) {
		flow->left_ns -= (s64)place.slice_ns;
		task->quota_ns = place.slice_ns;
	}
	bpf_spin_unlock(&flow->lock);
	if (is_direct && !until)
		place.queue = QUEUE_LOCAL;
	task->start = shared;
	task->urgency = place.urgency;
	task->queued_at = now;
	if (until) {
		struct dm_state *seen = state();

		throttled_until = now + 1000 * MS;
		if (seen)
			__sync_fetch_and_add(&seen->throttled, 1);
	}
out:
	*to = place;
	return 0;
}

/* Has a CPU run a task that waits: an idle one, or one whose task is less urgent. */
static __always_inline void kick(struct task_struct *p, u32 urgency)
{
	s32 cpu = scx_bpf_pick_idle_cpu(p->cpus_ptr, 0);
	u32 key, *running;
	int other;

	if (cpu >= 0) {
		scx_bpf_kick_cpu(cpu, KICK_IDLE);
		return;
	}
	if (urgency == NOTHING || urgency == IDLE)
		return;
	key = scx_bpf_task_cpu(p);
	running = bpf_map_lookup_elem(&dm_cpus, &key);
	if (running && *running != NOTHING && *running < urgency) {
		scx_bpf_kick_cpu(key, KICK_PREEMPT);
		return;
	}
	if (p->nr_cpus_allowed == 1)
		return;
	bpf_for(other, 0, config.cpus_milli / 1000) {
		key = other;
		running = bpf_map_lookup_elem(&dm_cpus, &key);
		if (running && *running != NOTHING && *running < urgency) {
			scx_bpf_kick_cpu(key, KICK_PREEMPT);
			return;
		}
	}
}

static __always_inline void kick_idle(void)
{
	int cpu;

	bpf_for(cpu, 0, config.cpus_milli / 1000)
		scx_bpf_kick_cpu(cpu, KICK_IDLE);
}

SEC("struct_ops/dm_select_cpu")
s32 BPF_PROG(dm_select_cpu, struct task_struct *p, s32 before, u64 flags)
{
	struct dm_task *task = bpf_task_storage_get(&dm_tasks, p, 0, 0);
	bool is_idle = false;
	s32 cpu = scx_bpf_select_cpu_dfl(p, before, flags, &is_idle);
	struct place found = {};

	if (!is_idle || !task)
		return cpu;
	decide(task, true, scx_bpf_now(), &found);
	if (found.queue == QUEUE_LOCAL)
		scx_bpf_dsq_insert(p, QUEUE_LOCAL, found.slice_ns, 0);
	return cpu;
}

SEC("struct_ops/dm_enqueue")
void BPF_PROG(dm_enqueue, struct task_struct *p, u64 flags)
{
	struct dm_task *task = bpf_task_storage_get(&dm_tasks, p, 0, 0);
	struct place found = {};

	/* Threads of the kernel for one CPU are a part of the CPU. */
	if (!task || ((p->flags & KTHREAD) && p->nr_cpus_allowed == 1)) {
		if (task)
			task->urgency = REPAID;
		scx_bpf_dsq_insert(p, QUEUE_LOCAL, SLICE_NS, flags);
		return;
	}
	decide(task, flags & ENQUEUE_LAST, scx_bpf_now(), &found);
	if (found.queue == QUEUE_LOCAL) {
		scx_bpf_dsq_insert(p, QUEUE_LOCAL, found.slice_ns, flags);
		return;
	}
	scx_bpf_dsq_insert_vtime(p, found.queue, found.slice_ns, found.time, flags);
	kick(p, found.urgency);
}

/* Decides again for throttled tasks whose time has come. Returns how many have a quota now. */
static __noinline int release(u64 now)
{
	struct bpf_iter_scx_dsq it;
	struct task_struct *p;
	int moved = 0;

	if (!bpf_iter_scx_dsq_new(&it, QUEUE_THROTTLED, 0)) {
		bpf_repeat(LOOKS_MAX) {
			struct place found = {};
			struct dm_task *task;

			p = bpf_iter_scx_dsq_next(&it);
			if (!p || is_before(now, p->scx.dsq_vtime))
				break;
			task = bpf_task_storage_get(&dm_tasks, p, 0, 0);
			if (!task)
				continue;
			decide(task, false, now, &found);
			scx_bpf_dsq_move_set_slice(&it, found.slice_ns);
			scx_bpf_dsq_move_set_vtime(&it, found.time);
			if (scx_bpf_dsq_move_vtime(&it, p, found.queue, 0) && found.queue != QUEUE_THROTTLED)
				moved++;
		}
	}
	bpf_iter_scx_dsq_destroy(&it);
	return moved;
}

/* S of the first task in the queue by virtual time; the present one without any. */
static __always_inline u64 first_start(void)
{
	struct bpf_iter_scx_dsq it;
	struct task_struct *p;
	u64 start = now_v;

	if (!bpf_iter_scx_dsq_new(&it, QUEUE_SHARED, 0)) {
		p = bpf_iter_scx_dsq_next(&it);
		if (p)
			start = p->scx.dsq_vtime;
	}
	bpf_iter_scx_dsq_destroy(&it);
	return start;
}

/* Whether a task whose slice has ended goes on, before those in the queue by virtual time: its flow has tokens, or
 * it is the first itself. */
static __always_inline bool goes_first(struct task_struct *p, struct dm_task *task)
{
	struct flow *flow = flow_of(task->flow);
	u64 now = scx_bpf_now(), first = first_start(), ran;
	bool is_first;
	struct due due;

	if (!flow || task->urgency == IDLE)
		return false;
	ran = p->se.sum_exec_runtime - task->ran_ns;
	due = due_of(task->flow, flow);
	bpf_spin_lock(&flow->lock);
	fill(flow, &due, now);
	is_first = is_before(flow->tag, first) || (due.reserve && flow->tokens_ns > (s64)ran);
	if (flow->quota_ns && flow->left_ns + (s64)task->quota_ns <= (s64)ran)
		is_first = false;
	bpf_spin_unlock(&flow->lock);
	return is_first;
}

SEC("struct_ops/dm_dispatch")
void BPF_PROG(dm_dispatch, s32 cpu, struct task_struct *before)
{
	struct dm_task *task = before ? bpf_task_storage_get(&dm_tasks, before, 0, 0) : 0;

	bool goes_on = task && (before->scx.flags & IS_QUEUED);

	/* This CPU takes one of them. */
	if (release(scx_bpf_now()) > 1)
		kick_idle();
	if (scx_bpf_dsq_move_to_local(QUEUE_REPAID))
		return;
	/* ORDER: a task that goes on is enqueued after this. */
	if (goes_on && goes_first(before, task))
		return;
	if (scx_bpf_dsq_move_to_local(QUEUE_SHARED) || (goes_on && task->urgency != IDLE))
		return;
	scx_bpf_dsq_move_to_local(QUEUE_IDLE);
}

SEC("struct_ops/dm_runnable")
void BPF_PROG(dm_runnable, struct task_struct *p, u64 flags)
{
	struct dm_task *task = bpf_task_storage_get(&dm_tasks, p, 0, 0);
	struct cgroup *cgroup;
	struct flow *flow;
	struct due due;

	if (!task)
		return;
	cgroup = scx_bpf_task_cgroup(p);
	if (cgroup) {
		if (task->cgroup != cgroup->kn->id) {
			task->cgroup = cgroup->kn->id;
			task->flow = container_of_cgroup(cgroup);
		}
		bpf_cgroup_release(cgroup);
	}
	flow = flow_of(task->flow);
	if (!flow || task->is_counted)
		return;
	due = due_of(task->flow, flow);
	bpf_spin_lock(&flow->lock);
	flow->runnable++;
	count(flow, &due);
	bpf_spin_unlock(&flow->lock);
	task->is_counted = 1;
}

SEC("struct_ops/dm_running")
void BPF_PROG(dm_running, struct task_struct *p)
{
	struct dm_task *task = bpf_task_storage_get(&dm_tasks, p, 0, 0);
	u32 key = scx_bpf_task_cpu(p), *running = bpf_map_lookup_elem(&dm_cpus, &key);

	if (!task)
		return;
	if (running)
		*running = task->urgency == NOTHING ? SHARED : task->urgency;
	if (task->start && is_before(now_v, task->start))
		now_v = task->start;
	task->ran_ns = p->se.sum_exec_runtime;
	task->is_running = 1;
}

/* Charges a flow with the time that a task ran, in place of what it was charged in advance. */
SEC("struct_ops/dm_stopping")
void BPF_PROG(dm_stopping, struct task_struct *p, bool runnable)
{
	struct dm_task *task = bpf_task_storage_get(&dm_tasks, p, 0, 0);
	u32 key = scx_bpf_task_cpu(p), *running = bpf_map_lookup_elem(&dm_cpus, &key);
	struct dm_state *seen = state();
	struct flow *flow;
	struct due due;
	u64 used, now;

	if (running)
		*running = NOTHING;
	if (!task || !task->is_running)
		return;
	task->is_running = 0;
	flow = flow_of(task->flow);
	if (!flow)
		return;
	used = p->se.sum_exec_runtime - task->ran_ns;
	now = scx_bpf_now();
	due = due_of(task->flow, flow);
	bpf_spin_lock(&flow->lock);
	fill(flow, &due, now);
	if (task->urgency != REPAID)
		flow->tag += used * UNIT / weight_of(&due) - task->tag;
	flow->tokens_ns -= (s64)used;
	if (flow->tokens_ns < -BUCKET_NS)
		flow->tokens_ns = -BUCKET_NS;
	if (flow->quota_ns)
		flow->left_ns += (s64)(task->quota_ns - used);
	task->quota_ns = 0;
	bpf_spin_unlock(&flow->lock);
	task->tag = 0;
	if (seen && task->urgency == REPAID && task->flow)
		__sync_fetch_and_add(&seen->repaid_ns, used);
}

SEC("struct_ops/dm_quiescent")
void BPF_PROG(dm_quiescent, struct task_struct *p, u64 flags)
{
	struct dm_task *task = bpf_task_storage_get(&dm_tasks, p, 0, 0);
	struct flow *flow;
	struct due due;

	if (!task || !task->is_counted)
		return;
	task->is_counted = 0;
	flow = flow_of(task->flow);
	if (!flow)
		return;
	due = due_of(task->flow, flow);
	bpf_spin_lock(&flow->lock);
	refund(flow, task);
	if (flow->runnable)
		flow->runnable--;
	count(flow, &due);
	bpf_spin_unlock(&flow->lock);
}

SEC("struct_ops.s/dm_init_task")
s32 BPF_PROG(dm_init_task, struct task_struct *p, struct scx_init_task_args *args)
{
	return bpf_task_storage_get(&dm_tasks, p, 0, BPF_LOCAL_STORAGE_GET_F_CREATE) ? 0 : -12;
}

static __always_inline void set_quota(struct flow *flow, u64 period_us, u64 quota_us, u64 burst_us)
{
	bool is_none = quota_us >= NO_QUOTA_US || !period_us || !quota_us;

	bpf_spin_lock(&flow->lock);
	flow->quota_ns = is_none ? 0 : quota_us * 1000;
	flow->period_ns = is_none ? 0 : period_us * 1000;
	flow->burst_ns = is_none ? 0 : burst_us * 1000;
	flow->left_ns = flow->quota_ns;
	flow->period_ends_at = flow->filled_at + flow->period_ns;
	bpf_spin_unlock(&flow->lock);
}

/* Cgroups at the level of containers have a flow, whichever cgroup is above them. */
SEC("struct_ops.s/dm_cgroup_init")
s32 BPF_PROG(dm_cgroup_init, struct cgroup *cgroup, struct scx_cgroup_init_args *args)
{
	struct flow new = { .share = (u64)args->weight * 100, .tokens_ns = BUCKET_NS };
	struct flow *flow;
	u64 id = cgroup->kn->id;

	if (cgroup->level != (int)config.level)
		return 0;
	new.filled_at = scx_bpf_now();
	if (bpf_map_update_elem(&dm_flows, &id, &new, BPF_ANY))
		return 0; /* LIMIT: it is scheduled with the host */
	flow = bpf_map_lookup_elem(&dm_flows, &id);
	if (flow)
		set_quota(flow, args->bw_period_us, args->bw_quota_us, args->bw_burst_us);
	return 0;
}

SEC("struct_ops.s/dm_cgroup_exit")
void BPF_PROG(dm_cgroup_exit, struct cgroup *cgroup)
{
	u64 id = cgroup->kn->id;
	struct flow *flow = bpf_map_lookup_elem(&dm_flows, &id);
	struct due none = {};

	if (!flow)
		return;
	bpf_spin_lock(&flow->lock);
	flow->runnable = 0;
	count(flow, &none);
	bpf_spin_unlock(&flow->lock);
	bpf_map_delete_elem(&dm_flows, &id);
	bpf_map_delete_elem(&dm_shares, &id);
}

SEC("struct_ops/dm_cgroup_set_weight")
void BPF_PROG(dm_cgroup_set_weight, struct cgroup *cgroup, u32 weight)
{
	u64 id = cgroup->kn->id;
	struct flow *flow = bpf_map_lookup_elem(&dm_flows, &id);

	if (flow)
		flow->share = (u64)weight * 100;
}

SEC("struct_ops/dm_cgroup_set_bandwidth")
void BPF_PROG(dm_cgroup_set_bandwidth, struct cgroup *cgroup, u64 period_us, u64 quota_us,
	      u64 burst_us)
{
	u64 id = cgroup->kn->id;
	struct flow *flow = bpf_map_lookup_elem(&dm_flows, &id);

	if (flow)
		set_quota(flow, period_us, quota_us, burst_us);
}

SEC("struct_ops/dm_cgroup_set_idle")
void BPF_PROG(dm_cgroup_set_idle, struct cgroup *cgroup, bool idle)
{
	u64 id = cgroup->kn->id;
	struct flow *flow = bpf_map_lookup_elem(&dm_flows, &id);

	if (flow)
		flow->is_idle = idle;
}

/* Moves tasks that have waited too long, at the end of a queue, to the front of all. */
static __always_inline void rescue(u64 queue, u64 flags, u64 now)
{
	struct dm_state *seen = state();
	struct bpf_iter_scx_dsq it;
	struct task_struct *p;
	struct dm_task *task;

	if (!bpf_iter_scx_dsq_new(&it, queue, flags)) {
		bpf_repeat(LOOKS_MAX) {
			p = bpf_iter_scx_dsq_next(&it);
			if (!p)
				break;
			task = bpf_task_storage_get(&dm_tasks, p, 0, 0);
			if (!task || is_before(now, task->queued_at + LATE_NS))
				continue;
			scx_bpf_dsq_move_set_vtime(&it, 0);
			if (scx_bpf_dsq_move_vtime(&it, p, QUEUE_REPAID, 0) && seen)
				__sync_fetch_and_add(&seen->rescued, 1);
		}
	}
	bpf_iter_scx_dsq_destroy(&it);
}

static int on_time(void *map, u32 *key, struct clock *clock)
{
	u64 now = scx_bpf_now();

	/* A task may have arrived while a CPU went idle. */
	if (release(now) || scx_bpf_dsq_nr_queued(QUEUE_SHARED) > 0)
		kick_idle();
	rescue(QUEUE_SHARED, FROM_THE_END, now);
	rescue(QUEUE_IDLE, 0, now);
	bpf_timer_start(&clock->timer, is_before(now, throttled_until) ? FAST_NS : SLOW_NS, 0);
	return 0;
}

SEC("struct_ops.s/dm_init")
s32 BPF_PROG(dm_init)
{
	struct flow host = { .share = SHARE_LEAST, .tokens_ns = BUCKET_NS };
	struct clock *clock;
	u64 queue, id = 0;
	u32 zero = 0;
	s32 error;

	for (queue = QUEUE_REPAID; queue <= QUEUE_THROTTLED; queue++) {
		error = scx_bpf_create_dsq(queue, -1);
		if (error)
			return error;
	}
	host.filled_at = scx_bpf_now();
	error = bpf_map_update_elem(&dm_flows, &id, &host, BPF_ANY);
	if (error)
		return error;
	clock = bpf_map_lookup_elem(&dm_clock, &zero);
	if (!clock)
		return -2;
	error = bpf_timer_init(&clock->timer, &dm_clock, 1 /* CLOCK_MONOTONIC */);
	if (error)
		return error;
	bpf_timer_set_callback(&clock->timer, on_time);
	return bpf_timer_start(&clock->timer, FAST_NS, 0);
}

SEC("struct_ops/dm_exit")
void BPF_PROG(dm_exit, struct scx_exit_info *info)
{
	struct dm_state *seen = state();

	if (!seen)
		return;
	bpf_probe_read_kernel_str(seen->reason, sizeof(seen->reason), info->reason);
	seen->exit_kind = info->kind;
}

SEC(".struct_ops.link")
struct sched_ext_ops dm_scheduler = {
	.select_cpu = (void *)dm_select_cpu,
	.enqueue = (void *)dm_enqueue,
	.dispatch = (void *)dm_dispatch,
	.runnable = (void *)dm_runnable,
	.running = (void *)dm_running,
	.stopping = (void *)dm_stopping,
	.quiescent = (void *)dm_quiescent,
	.init_task = (void *)dm_init_task,
	.cgroup_init = (void *)dm_cgroup_init,
	.cgroup_exit = (void *)dm_cgroup_exit,
	.cgroup_set_weight = (void *)dm_cgroup_set_weight,
	.cgroup_set_bandwidth = (void *)dm_cgroup_set_bandwidth,
	.cgroup_set_idle = (void *)dm_cgroup_set_idle,
	.init = (void *)dm_init,
	.exit = (void *)dm_exit,
	.flags = OPS_ENQUEUE_LAST,
	.timeout_ms = 30000,
	.name = "dormouse",
};

char _license[] SEC("license") = "GPL";
