/* Gates at the hooks of security modules (LSM), which run before the kernel does what a task has asked for, and can
 * have the call fail:
 *
 * - dm_gate_create (task_alloc): a task makes another one.
 * - dm_gate_open (file_open): a task opens a file, whose path is that from its own root directory.
 * - dm_gate_msgrcv (msg_queue_msgrcv): a task receives a message of System V. The other side is the account for which
 *   the sender worked: dm_gate_msgsnd (msg_queue_msgsnd) notes it, and dm_gate_msgfree (msg_msg_free_security) forgets
 *   it with the message.
 * - dm_gate_shmat (shm_shmat): a task attaches a segment of shared memory of System V. The other side is the account
 *   for which the task worked that made it: dm_gate_shmget (shm_alloc_security) notes it, and dm_gate_shmfree
 *   (shm_free_security) forgets it with the segment.
 *
 * They run for every task of the host, in the calling task, which can be preempted meanwhile, and end at once where no
 * row of the table is for their gate. Labels are changed with preemption off, as in the other programs.
 *
 * Trust: a container controls the names of its files. A path says what the processes of a container do, as far as the
 * operator trusts these; so a row with an account names a home (checked where rules are read). Messages stay in the
 * namespace of their container. A note is made by the kernel alone, of a label that a row has given.
 *
 * A task that waits for a message gets it in the call of the sender. It has left its processor by then, or it is just
 * leaving; in the second case its label stays, because the processor charges the old one at that moment.
 *
 * KERNEL(6.10): bpf_preempt_disable(). Weak: without it these programs alone are refused. */

extern void bpf_preempt_disable(void) __weak __ksym;
extern void bpf_preempt_enable(void) __weak __ksym;

#define PATH_BYTES 4096 /* LIMIT: a longer path matches none */
#define SEARCH_NUMBER 4 /* mode of msgrcv(2) with MSG_COPY, which leaves the message where it is */

/* For one passage, with preemption off. */
struct opened {
	struct dm_gate_path key;
	char path[PATH_BYTES];
};
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct opened);
} dm_gate_opened SEC(".maps");

/* The account for which the sender of a message worked, by the address of the message. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DM_GATE_MESSAGES_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, struct party);
} dm_gate_messages SEC(".maps");

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct path {
	void *dentry;
};
struct file {
	struct path f_path;
	void *private_data;
};
#pragma clang attribute pop

/* Returns -errno, which the verifier sees to be one. */
static __always_inline __s64 failure(__u64 errno)
{
	__s64 result = 0;

	asm volatile("%[errno] &= 0xfff; %[result] -= %[errno]"
		     : [result] "+r"(result), [errno] "+r"(errno));
	return result;
}

/* The account that the calling task works for; DM_NOBODY outside of all containers. */
static __always_inline struct party party_of_current(void)
{
	__u64 cgroup = dm_current_container(config.level);
	struct dm_gate_home *home = bpf_map_lookup_elem(&dm_gate_homes, &cgroup);
	struct party party = { .account = DM_NOBODY };

	if (!home)
		return party;
	party.owner = home->owner;
	party.account = home->account;
	return party_of(bpf_task_storage_get(&dm_gate_labels, bpf_get_current_task_btf(), 0, 0),
			cgroup, &party);
}

/* Finds the paths of the table above a file. */
static __always_inline void find_paths(struct file *file, struct passage *at)
{
	__u32 zero = 0;
	struct opened *opened = bpf_map_lookup_elem(&dm_gate_opened, &zero);
	struct dm_gate_below *below;
	long bytes;

	if (!opened)
		return;
	bytes = bpf_d_path(&file->f_path, opened->path, sizeof(opened->path));
	if (bytes <= 0)
		return;
	/* The zero at its end becomes the '/' behind a directory. */
	bytes--;
	if (bytes < PATH_BYTES)
		opened->path[bytes] = '/';
	bytes++;
	if (bytes > DM_GATE_PATH_BYTES)
		bytes = DM_GATE_PATH_BYTES;
	opened->key.bits = 8 * (sizeof(opened->key.table) + bytes);
	opened->key.table = at->table;
	__builtin_memcpy(opened->key.path, opened->path, DM_GATE_PATH_BYTES);
	below = bpf_map_lookup_elem(&dm_gate_paths, &opened->key);
	if (below)
		at->below = *below;
}

/* Decides a passage of the calling task, which opens `file` if that is given. Returns the errno with which its call
 * fails, or 0. With preemption off. */
static __always_inline __u32 decide_call(struct passage *at, struct dm_gate_table *table, __u64 cgroup,
					 struct dm_gate_home *home, struct file *file)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct label *label = bpf_task_storage_get(&dm_gate_labels, task, 0, 0);
	struct dm_gate_count *count;
	struct party to;

	if (file)
		find_paths(file, at);
	at->home.owner = home->owner;
	at->home.account = home->account;
	at->label = party_of(label, cgroup, &at->home);
	to = decide(at, table, home->flags);
	if (at->becomes == DM_BECOMES_REFUSED) {
		count = counts(at->gate);
		if (count)
			count->refused++;
		return at->account.account;
	}
	give(task, label, 0, cgroup, home, at, &to);
	return 0;
}

/* A call of the calling task, before the kernel does it. Returns 0 or -errno. */
static __always_inline __s64 pass_call(__u32 gate, struct file *file)
{
	struct passage at = { .gate = gate, .peer.account = DM_NOBODY };
	struct dm_gate_table *table = table_for(gate, &at.table);
	__u64 cgroup = table ? dm_current_container(config.level) : 0;
	struct dm_gate_home *home;
	__u64 errno;

	if (!table)
		return 0;
	home = bpf_map_lookup_elem(&dm_gate_homes, &cgroup);
	if (!home)
		return 0;
	bpf_preempt_disable();
	errno = decide_call(&at, table, cgroup, home, file);
	bpf_preempt_enable();
	return failure(errno);
}

SEC("lsm/task_alloc")
__s64 dm_gate_create(__u64 *ctx)
{
	return pass_call(DM_GATE_CREATE, 0);
}

SEC("lsm/file_open")
__s64 dm_gate_open(__u64 *ctx)
{
	return pass_call(DM_GATE_OPEN, (void *)ctx[0]);
}

/* ---- messages of System V ---- */

SEC("lsm/msg_queue_msgsnd")
int dm_gate_msgsnd(__u64 *ctx)
{
	__u64 message = ctx[1];
	struct task_struct *task = bpf_get_current_task_btf();
	__u32 index;
	__u64 cgroup = table_for(DM_GATE_MESSAGE, &index) ? dm_current_container(config.level) : 0;
	struct dm_gate_count *count;
	struct label *label;
	struct party party;

	if (!cgroup || !bpf_map_lookup_elem(&dm_gate_homes, &cgroup))
		return 0;
	label = bpf_task_storage_get(&dm_gate_labels, task, 0, 0);
	if (!label || label->work.cgroup != cgroup)
		return 0;
	party.owner = label->work.owner;
	party.account = label->work.account;
	if (!bpf_map_update_elem(&dm_gate_messages, &message, &party, BPF_ANY))
		return 0;
	count = counts(DM_GATE_MESSAGE);
	if (count)
		count->full++;
	return 0;
}

SEC("lsm/msg_msg_free_security")
int dm_gate_msgfree(__u64 *ctx)
{
	__u64 message = ctx[0];

	bpf_map_delete_elem(&dm_gate_messages, &message);
	return 0;
}

/* The target is the calling task, or one that waits for a message, which the calling task sends to it. */
SEC("lsm/msg_queue_msgrcv")
int dm_gate_msgrcv(__u64 *ctx)
{
	__u64 message = ctx[1];
	struct task_struct *target = (void *)ctx[2];
	struct passage at = { .gate = DM_GATE_MESSAGE, .peer.account = DM_NOBODY };
	struct dm_gate_table *table = table_for(DM_GATE_MESSAGE, &at.table);
	int is_other = target != bpf_get_current_task_btf();
	struct dm_gate_home *home;
	struct party *sender, to;
	struct label *label;
	__u64 cgroup;

	if (!table || (int)ctx[4] == SEARCH_NUMBER)
		return 0;
	cgroup = dm_container_of(BPF_CORE_READ(target, cgroups, dfl_cgrp), config.level);
	home = bpf_map_lookup_elem(&dm_gate_homes, &cgroup);
	if (!home || (is_other && target->on_cpu))
		return 0;
	at.home.owner = home->owner;
	at.home.account = home->account;
	/* A sender without a note worked for its home, which is that of the receiver. */
	sender = bpf_map_lookup_elem(&dm_gate_messages, &message);
	at.peer = sender ? *sender : at.home;
	bpf_preempt_disable();
	label = bpf_task_storage_get(&dm_gate_labels, target, 0, 0);
	at.label = party_of(label, cgroup, &at.home);
	to = decide(&at, table, home->flags);
	give(target, label, is_other, cgroup, home, &at, &to);
	bpf_preempt_enable();
	return 0;
}

/* ---- shared memory of System V ---- */

/* The account for which the maker of a segment worked, by the address of the segment. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DM_GATE_SEGMENTS_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, struct party);
} dm_gate_shms SEC(".maps");

SEC("lsm/shm_alloc_security")
int dm_gate_shmget(__u64 *ctx)
{
	__u64 segment = ctx[0];
	__u32 index;
	struct party party = { .account = DM_NOBODY };
	struct dm_gate_count *count;

	if (table_for(DM_GATE_SHM, &index))
		party = party_of_current();
	if (party.account == DM_NOBODY)
		return 0;
	if (!bpf_map_update_elem(&dm_gate_shms, &segment, &party, BPF_ANY))
		return 0;
	count = counts(DM_GATE_SHM);
	if (count)
		count->full++;
	return 0;
}

SEC("lsm/shm_free_security")
int dm_gate_shmfree(__u64 *ctx)
{
	__u64 segment = ctx[0];

	bpf_map_delete_elem(&dm_gate_shms, &segment);
	return 0;
}

SEC("lsm/shm_shmat")
int dm_gate_shmat(__u64 *ctx)
{
	__u64 segment = ctx[0];
	struct passage at = { .gate = DM_GATE_SHM, .peer.account = DM_NOBODY };
	struct dm_gate_table *table = table_for(DM_GATE_SHM, &at.table);
	__u64 cgroup = table ? dm_current_container(config.level) : 0;
	struct party *maker;
	struct dm_gate_home *home;

	if (!table)
		return 0;
	home = bpf_map_lookup_elem(&dm_gate_homes, &cgroup);
	if (!home)
		return 0;
	maker = bpf_map_lookup_elem(&dm_gate_shms, &segment);
	if (maker)
		at.peer = *maker;
	bpf_preempt_disable();
	decide_call(&at, table, cgroup, home, 0);
	bpf_preempt_enable();
	return 0;
}
