/* The contexts of asynchronous I/O of one process (io_setup(2)), with their unfinished requests.
 *
 * No interface reports either. The ring of a context, in the memory of the process, has only the requests
 * that are complete. The kernel counts the others twice, with a part of each count on every CPU:
 *
 *   references (kioctx.reqs)     1 for the context's life, 1 for its users, and 1 for each request until
 *                                the request is freed: after its event, and after its eventfd was signalled;
 *   free places (reqs_available) places of the ring that are neither reserved for a request nor taken by an
 *                                event. Places of collected events are returned later, and counted until
 *                                then as completed.
 *
 * The reader receives the greater of the two, so a kernel that counts otherwise shows requests that are not
 * there, and never hides one.
 *
 * Hook: an iterator over one task (iter/task, bounded to it by the link). It runs when the loader reads the
 * iterator, in its context, with a reference to the task and to nothing else. It is attached to nothing,
 * runs for no other task, and ends with the loader's descriptors. It changes nothing.
 *
 * Assumptions: the loader has CAP_BPF and CAP_PERFMON. The examined process may run: contexts may be freed
 * while they are read. Each address is read with a helper that fails on an unmapped one, and each loop has
 * a bound. The result is exact if all tasks of the process are stopped: then no request begins, and the sum
 * over all CPUs is at least the number of unfinished requests at the end of the reading.
 *
 * KERNEL(6.1): iterators over one task. */
#include <linux/types.h>
#include <stddef.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "record.h"

#define CPUS_MAX 8192 /* LIMIT: CPUs of any kernel (CONFIG_NR_CPUS) */
#define SLOTS_MAX 65536 /* LIMIT: places of the table, of which each context has one */
#define PERCPU_COUNT_BIAS (1UL << 63)
#define PERCPU_ATOMIC_DEAD 3UL /* __PERCPU_REF_ATOMIC_DEAD: the flags in the pointer */
#define REFERENCES_OF_A_CONTEXT 2

/* Only for the object's BTF, with which a test compares the loader's records. */
struct dm_aio_context *dm_aio_context_type __attribute__((unused));

/* A variable with a copy on each CPU. All such variables are as far from their copies. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} dm_aio_cpu SEC(".maps");

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct seq_file;
struct bpf_iter_meta {
	struct seq_file *seq;
};
typedef struct {
	int counter;
} atomic_t;
typedef struct {
	__s64 counter;
} atomic64_t;
typedef atomic64_t atomic_long_t;
struct list_head {
	struct list_head *next;
};
struct percpu_ref_data {
	atomic_long_t count;
};
struct percpu_ref {
	unsigned long percpu_count_ptr;
	struct percpu_ref_data *data;
};
struct kioctx_cpu {
	unsigned int reqs_available;
};
struct kioctx {
	struct percpu_ref reqs;
	unsigned long user_id;
	struct kioctx_cpu *cpu;
	unsigned int max_reqs;
	unsigned int nr_events;
	atomic_t reqs_available;
	struct list_head active_reqs;
	unsigned int tail;
	unsigned int completed_events;
	unsigned int id;
};
struct kioctx_table {
	unsigned int nr;
	struct kioctx *table[1];
};
struct bpf_array {
	void *pptrs[1];
};
struct mm_struct {
	struct kioctx_table *ioctx_table;
};
struct task_struct {
	struct mm_struct *mm;
};
struct bpf_iter__task {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
};
#pragma clang attribute pop

/* The parts of both counts on the CPUs. */
struct sums {
	__u64 variable; /* dm_aio_cpu, without a distance to any CPU */
	__u64 references_at, places_at;
	__u64 references, places;
	__u64 is_known; /* no part was unreadable */
};

/* A pointer as a number, with which the verifier lets a program calculate. */
static __u64 number(const void *pointer)
{
	__u64 address = 0;

	bpf_probe_read_kernel(&address, sizeof address, &pointer);
	return address;
}

static long add_cpu(__u64 cpu, struct sums *sums)
{
	__u32 zero = 0, places = 0;
	const void *copy = bpf_map_lookup_percpu_elem(&dm_aio_cpu, &zero, cpu);
	__u64 references = 0, distance;

	if (!copy)
		return 1;
	distance = number(copy) - sums->variable;
	if (sums->references_at &&
	    bpf_probe_read_kernel(&references, sizeof references,
				  (void *)(sums->references_at + distance)))
		sums->is_known = 0;
	if (bpf_probe_read_kernel(&places, sizeof places, (void *)(sums->places_at + distance)))
		sums->is_known = 0;
	sums->references += references;
	sums->places += places;
	return 0;
}

/* The requests that are not finished. More than any ring has places for if their number is unknown. */
static __u64 unfinished_of(struct kioctx *context)
{
	unsigned long pointer = BPF_CORE_READ(context, reqs.percpu_count_ptr);
	__s64 count = BPF_CORE_READ(context, reqs.data, count.counter);
	__u32 places = BPF_CORE_READ(context, nr_events) - 1;
	struct bpf_array *own = (void *)number(&dm_aio_cpu);
	struct sums sums = { .is_known = 1, .variable = (__u64)BPF_CORE_READ(own, pptrs[0]) };
	__s64 by_references, by_places;

	if (!(pointer & PERCPU_ATOMIC_DEAD)) {
		sums.references_at = pointer;
		count -= PERCPU_COUNT_BIAS;
	}
	sums.places_at = (__u64)BPF_CORE_READ(context, cpu);
	bpf_loop(CPUS_MAX, add_cpu, &sums, 0);
	by_references = count + sums.references - REFERENCES_OF_A_CONTEXT;
	places -= (__u32)BPF_CORE_READ(context, reqs_available.counter) + (__u32)sums.places;
	by_places = (__s32)(places - BPF_CORE_READ(context, completed_events));
	if (!sums.is_known || by_references < 0 || by_places < 0)
		return ~0UL;
	return by_references > by_places ? by_references : by_places;
}

/* A walk over the table of an address space. */
struct walk {
	struct seq_file *to;
	__u64 table;
};

/* Writes an entry for the context in one place of the table. */
static long write_context(__u64 slot, struct walk *walk)
{
	__u64 at = walk->table + bpf_core_field_offset(struct kioctx_table, table);
	struct dm_aio_context found = {};
	struct kioctx *context = NULL;
	__u64 active;

	bpf_probe_read_kernel(&context, sizeof context, (void *)(at + slot * sizeof context));
	if (!context)
		return 0;
	found.id = BPF_CORE_READ(context, user_id);
	found.slot = slot;
	found.requests = BPF_CORE_READ(context, max_reqs);
	found.events = BPF_CORE_READ(context, nr_events);
	found.tail = BPF_CORE_READ(context, tail);
	active = (__u64)context + bpf_core_field_offset(struct kioctx, active_reqs);
	found.polls = (__u64)BPF_CORE_READ(context, active_reqs.next) != active;
	found.unfinished = unfinished_of(context);
	bpf_seq_write(walk->to, &found, sizeof found);
	return 0;
}

/* Writes an entry for each context of the task's address space. */
SEC("iter/task")
int dm_aio_contexts(struct bpf_iter__task *iteration)
{
	struct task_struct *task = iteration->task;
	struct kioctx_table *table;
	struct walk walk = {};
	__u32 slots;

	if (!task)
		return 0;
	table = BPF_CORE_READ(task, mm, ioctx_table);
	if (!table)
		return 0;
	slots = BPF_CORE_READ(table, nr);
	walk.to = iteration->meta->seq;
	walk.table = (__u64)table;
	bpf_loop(slots < SLOTS_MAX ? slots : SLOTS_MAX, write_context, &walk, 0);
	return 0;
}

char _license[] SEC("license") = "GPL";
