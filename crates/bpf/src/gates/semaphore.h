/* The gate of semaphores of System V (semop(2)): a task that has taken from a semaphore works for the account for which
 * the task that gave worked.
 *
 * - dm_gate_semop (return of perform_atomic_semop) runs when the operations of a call were done: in the call itself,
 *   or, if the task had to wait, in the call of the task that let it continue. The lock of the semaphore is held.
 * - dm_gate_semfree (sem_free_security) ends the note of a set with the set.
 *
 * A semaphore is a number, and its units have no names. It has one giver as long as all units are of one account. If
 * another one gives while units are left, they have none, until all were taken. The note has the value of the
 * semaphore as well: where it differs from that of the kernel, units were given or taken otherwise (semctl(2), undo at
 * an exit, before the load of the gate), and have no giver either. A task that takes them works for its home.
 *
 * A task that waits is seen like one that waits for a message (security.h): it keeps its label if it has not left its
 * processor yet.
 *
 * Trust: only containers that share an IPC namespace have a set in common. What one of them does to its value makes the
 * account of units unknown, and gives them no other one. */

/* Units of a semaphore. */
struct units {
	__u64 owner; /* of the account that gave all of them */
	__u32 account;
	__u16 value; /* how many there are */
	__u16 is_known;
};
struct units_of_set {
	struct units of[DM_GATE_SEMAPHORES];
	__u32 is_lost; /* there was a call with too many operations: no unit has a giver any more */
	__u32 reserved;
};
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DM_GATE_SETS_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, struct units_of_set);
} dm_gate_sets SEC(".maps");

/* The note of a new set, which is not written. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct units_of_set);
} dm_gate_set0 SEC(".maps");

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct sembuf {
	unsigned short sem_num;
	short sem_op;
	short sem_flg;
};
struct sem {
	int semval;
};
struct sem_array {
	int sem_nsems;
	struct sem sems[];
};
struct sem_queue {
	struct task_struct *sleeper;
	struct sembuf *sops;
	int nsops;
	_Bool dupsop;
};
#pragma clang attribute pop

/* A call of which the operations were done, on its way through them. */
struct semop {
	__u64 set; /* address of the set */
	__u64 ops; /* and of the operations */
	struct party by; /* the account of the task, or DM_NOBODY */
	struct party giver; /* of the units that it has taken, or DM_NOBODY */
	__u32 has_taken;
	__u32 is_exact; /* each operation is for another semaphore */
};

/* The note of the set of a call; that of a container that gives is made. */
static __always_inline struct units_of_set *set_of(struct semop *call, int gives)
{
	struct units_of_set *set = bpf_map_lookup_elem(&dm_gate_sets, &call->set), *fresh;
	struct dm_gate_count *count;
	__u32 zero = 0;

	if (set || !gives || call->by.account == DM_NOBODY)
		return set;
	fresh = bpf_map_lookup_elem(&dm_gate_set0, &zero);
	if (fresh && !bpf_map_update_elem(&dm_gate_sets, &call->set, fresh, BPF_NOEXIST))
		return bpf_map_lookup_elem(&dm_gate_sets, &call->set);
	count = counts(DM_GATE_SEMAPHORE);
	if (count)
		count->full++;
	return bpf_map_lookup_elem(&dm_gate_sets, &call->set);
}

/* Called by bpf_loop() for each operation. */
static long follow(__u64 index, void *context)
{
	struct semop *call = context;
	struct party giver = { .account = DM_NOBODY };
	struct units_of_set *set;
	struct units *units;
	struct sembuf op;
	struct sem *sem;
	__u32 number;
	int value, before;

	if (bpf_probe_read_kernel(&op, sizeof(op), (void *)(call->ops + index * sizeof(op))))
		return 1;
	if (!op.sem_op)
		return 0;
	number = op.sem_num;
	sem = (void *)(call->set + bpf_core_field_offset(struct sem_array, sems) +
		       (__u64)number * bpf_core_type_size(struct sem));
	value = BPF_CORE_READ(sem, semval);
	before = value - op.sem_op;
	set = set_of(call, op.sem_op > 0);
	if (set && number < DM_GATE_SEMAPHORES) {
		units = &set->of[number];
		if (!call->is_exact || set->is_lost || units->value != before)
			units->is_known = 0;
		if (op.sem_op < 0) {
			if (units->is_known) {
				giver.owner = units->owner;
				giver.account = units->account;
			}
		} else if (call->is_exact && !set->is_lost && !before) {
			units->owner = call->by.owner;
			units->account = call->by.account;
			units->is_known = call->by.account != DM_NOBODY;
		} else if (units->account != call->by.account || units->owner != call->by.owner) {
			units->is_known = 0;
		}
		units->value = value;
	}
	if (op.sem_op > 0)
		return 0;
	if (!call->has_taken)
		call->giver = giver;
	else if (!is_same(&call->giver, &giver))
		call->giver.account = DM_NOBODY;
	call->has_taken = 1;
	return 0;
}

/* Whether the queue entry of a call is on the stack of this task. That of another task is in the queue, and its
 * `sleeper` is set; that of the calling task is not yet. */
static __always_inline int is_of_call(struct task_struct *task, __u64 entry)
{
	void *registers = (void *)bpf_task_pt_regs(task);
	__u64 top = 0;

	/* A number, which can be compared: the registers are at the top of the stack. */
	if (bpf_probe_read_kernel(&top, sizeof(top), &registers))
		return 1;
	return entry >= (__u64)task->stack && entry < top;
}

SEC("fexit/perform_atomic_semop")
int dm_gate_semop(__u64 *ctx)
{
	struct passage at = { .gate = DM_GATE_SEMAPHORE, .peer.account = DM_NOBODY };
	struct dm_gate_table *table = table_for(DM_GATE_SEMAPHORE, &at.table);
	struct sem_queue *queue = (void *)ctx[1];
	struct semop call = { .by.account = DM_NOBODY, .giver.account = DM_NOBODY };
	struct task_struct *task = bpf_get_current_task_btf();
	struct units_of_set *set;
	struct dm_gate_home *home;
	struct label *label;
	struct party to;
	__u64 cgroup, entry = 0;
	int is_other;
	__u32 count;

	if (!table || (int)ctx[2])
		return 0;
	bpf_get_func_arg(ctx, 0, &call.set);
	bpf_get_func_arg(ctx, 1, &entry);
	is_other = !is_of_call(task, entry);
	if (is_other)
		task = queue->sleeper;
	cgroup = dm_container_of(BPF_CORE_READ(task, cgroups, dfl_cgrp), config.level);
	home = bpf_map_lookup_elem(&dm_gate_homes, &cgroup);
	/* Most sets of a host are of no container. */
	if (!home && !bpf_map_lookup_elem(&dm_gate_sets, &call.set))
		return 0;
	bpf_preempt_disable();
	label = bpf_task_storage_get(&dm_gate_labels, task, 0, 0);
	if (home) {
		at.home.owner = home->owner;
		at.home.account = home->account;
		at.label = party_of(label, cgroup, &at.home);
		call.by = at.label;
	}
	count = queue->nsops;
	if (count > DM_GATE_SEMOPS) {
		set = bpf_map_lookup_elem(&dm_gate_sets, &call.set);
		if (set)
			set->is_lost = 1;
	}
	call.is_exact = !queue->dupsop && count <= DM_GATE_SEMOPS;
	call.ops = (__u64)BPF_CORE_READ(queue, sops);
	bpf_loop(count < DM_GATE_SEMOPS ? count : DM_GATE_SEMOPS, follow, &call, 0);
	if (home && call.has_taken && !(is_other && task->on_cpu)) {
		at.peer = call.giver;
		to = decide(&at, table, home->flags);
		give(task, label, is_other, cgroup, home, &at, &to);
	}
	bpf_preempt_enable();
	return 0;
}

SEC("lsm/sem_free_security")
int dm_gate_semfree(__u64 *ctx)
{
	__u64 set = ctx[0];

	bpf_map_delete_elem(&dm_gate_sets, &set);
	return 0;
}
