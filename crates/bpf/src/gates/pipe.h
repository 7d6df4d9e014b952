/* The gate of pipes: a task that has read from a pipe or FIFO works for the account for which the writer of these bytes
 * worked.
 *
 * - dm_gate_write (entry of pipe_write) and dm_gate_wrote (its return) note which account has written which part.
 * - dm_gate_read (return of pipe_read) finds the part that was read, and decides.
 * - dm_gate_plock and dm_gate_plocks (pipe_lock, pipe_double_lock) see that a pipe is used by splice(2), tee(2) or
 *   vmsplice(2). No program notes these bytes, so the pipe has no other side from then on.
 * - dm_gate_pmake (return of alloc_pipe_info) makes the note of a pipe, and dm_gate_pfree (free_pipe_info) ends it. A
 *   pipe that was made earlier, or by a task of no container, has no note and no other side.
 *
 * Positions. A pipe is a ring of buffers, which the kernel counts (`head`, `tail`), and each buffer has an offset and
 * a length. A place in the bytes of a pipe is the number of the buffer and the offset in it. The kernel moves it under
 * the lock of the pipe, and never back, unless the ring gets another size. So a note that is lost, a write that fails,
 * and a packet of which a part is dropped move no later part: positions are not added up here.
 *
 * Writers. The order in which tasks that write at the same time get the lock is not seen. As long as all of them work
 * for one account, that is known; as soon as one more account writes, the bytes have no other side until no task writes
 * any more. Readers can be faster than the return of a write. So the account of those that write counts for bytes
 * behind the last part.
 *
 * Trust: a container controls its own calls, and to which processes it passes descriptors. A pipe is shared with other
 * containers by a volume (FIFO) or a passed descriptor. Whatever it does with the pipe, bytes can lose their account,
 * and do not get that of another container: where the part that was read is not within one note, the other side is not
 * known, and the reader works for its home. The exception are tasks that read from one pipe at the same moment: they
 * can have each other's accounts (LIMIT).
 *
 * KERNEL(6.15): anon_pipe_read() and anon_pipe_write(), which FIFOs use too; pipe_read() and pipe_write() before. */

#define PLACE_BITS 20 /* of an offset: buffers have at most a page */
#define PLACE_LOST (~0ull)

/* Bytes that tasks with one account have written. */
struct part {
	__u64 from; /* place */
	__u64 to;
	struct party by;
};

struct pipe_note {
	struct bpf_spin_lock lock;
	__u32 writers; /* tasks that write now */
	struct party writer; /* the account of all of them, or DM_NOBODY */
	__u64 from; /* where the first of them began */
	__u64 read; /* up to here */
	__u64 parts_made;
	__u32 is_lost; /* the pipe has no other side any more */
	__u32 reserved;
	struct part parts[DM_GATE_PARTS]; /* the last ones */
};
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DM_GATE_PIPES_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, struct pipe_note);
} dm_gate_pipes SEC(".maps");

/* The note of a new pipe, which is not written. Programs may copy no lock, so it has another type. */
struct pipe_start {
	__u64 words[sizeof(struct pipe_note) / 8];
};
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct pipe_start);
} dm_gate_pipe0 SEC(".maps");

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct pipe_buffer {
	unsigned int offset;
	unsigned int len;
};
struct pipe_inode_info {
	unsigned int head;
	unsigned int tail;
	unsigned int ring_size;
	unsigned int files;
	struct pipe_buffer *bufs;
};
struct kiocb {
	struct file *ki_filp;
};
#pragma clang attribute pop

/* The place behind `count` buffers, of which the last one may be filled further. Without the lock of the pipe, so it is
 * lost where the buffer changes meanwhile. */
static __always_inline __u64 place_behind(struct pipe_inode_info *pipe, __u32 count)
{
	__u32 mask = BPF_CORE_READ(pipe, ring_size) - 1, length, offset;
	struct pipe_buffer *buffer = BPF_CORE_READ(pipe, bufs);

	if (!count)
		return 0;
	buffer = (void *)buffer +
		 (__u64)((count - 1) & mask) * bpf_core_type_size(struct pipe_buffer);
	length = BPF_CORE_READ(buffer, len);
	offset = BPF_CORE_READ(buffer, offset);
	if (offset != BPF_CORE_READ(buffer, offset) || length != BPF_CORE_READ(buffer, len) ||
	    length >> (PLACE_BITS - 2) || offset >> (PLACE_BITS - 2))
		return PLACE_LOST;
	return ((__u64)count << PLACE_BITS) + offset + length;
}

/* The place up to which tasks have written. */
static __always_inline __u64 place_written(struct pipe_inode_info *pipe)
{
	return place_behind(pipe, BPF_CORE_READ(pipe, head));
}

/* The place up to which tasks have read. */
static __always_inline __u64 place_read(struct pipe_inode_info *pipe)
{
	__u32 tail = BPF_CORE_READ(pipe, tail), mask = BPF_CORE_READ(pipe, ring_size) - 1, offset;
	struct pipe_buffer *buffer = BPF_CORE_READ(pipe, bufs);

	if (tail != BPF_CORE_READ(pipe, head)) {
		buffer = (void *)buffer +
			 (__u64)(tail & mask) * bpf_core_type_size(struct pipe_buffer);
		offset = BPF_CORE_READ(buffer, offset);
		if (offset >> (PLACE_BITS - 2))
			return PLACE_LOST;
		if (offset)
			return ((__u64)(tail + 1) << PLACE_BITS) + offset;
	}
	return place_behind(pipe, tail);
}

static __always_inline struct pipe_inode_info *pipe_of(struct kiocb *call)
{
	return BPF_CORE_READ(call, ki_filp, private_data);
}

static __always_inline struct pipe_note *note_of(struct pipe_inode_info *pipe)
{
	__u64 key = (__u64)pipe;

	return bpf_map_lookup_elem(&dm_gate_pipes, &key);
}

/* A part that tasks of one account have written. With the lock of the note. */
static __always_inline void add_part(struct pipe_note *note, __u64 from, __u64 to, const struct party *by)
{
	struct part *last = &note->parts[(note->parts_made - 1) & (DM_GATE_PARTS - 1)];

	if (note->parts_made && last->to == from && last->by.account == by->account &&
	    last->by.owner == by->owner) {
		last->to = to;
		return;
	}
	last = &note->parts[note->parts_made & (DM_GATE_PARTS - 1)];
	last->from = from;
	last->to = to;
	last->by.owner = by->owner;
	last->by.account = by->account;
	note->parts_made++;
}

/* Tasks write at this place. One that moves back is in a ring of another size, or in a buffer that is changed. Then
 * nothing is known of the bytes in the pipe, and of those that are written now. With the lock of the note. */
static __always_inline void move_writer(struct pipe_note *note, __u64 place)
{
	if (place >= note->from && place != PLACE_LOST)
		return;
	note->writer.account = DM_NOBODY;
	if (place == PLACE_LOST)
		return;
	note->parts_made = 0;
	note->from = place;
}

/* A task with this account begins to write at this place. With the lock of the note. */
static __always_inline void begin_write(struct pipe_note *note, const struct party *by, __u64 place)
{
	if (!note->writers) {
		note->writer.owner = by->owner;
		note->writer.account = by->account;
		/* Bytes between two parts have no account. */
		if (place != PLACE_LOST && place > note->from)
			note->from = place;
	} else if (note->writer.account != by->account || note->writer.owner != by->owner) {
		note->writer.account = DM_NOBODY;
	}
	move_writer(note, place);
	note->writers++;
}

/* It has written up to this place. With the lock of the note. */
static __always_inline void end_write(struct pipe_note *note, const struct party *by, __u64 place)
{
	/* The entry of a write of another account was not seen. */
	if (!note->writers || (note->writer.account != DM_NOBODY &&
			       (note->writer.account != by->account || note->writer.owner != by->owner)))
		note->is_lost = 1;
	if (note->writers)
		note->writers--;
	move_writer(note, place);
	if (place != PLACE_LOST && place > note->from) {
		add_part(note, note->from, place, &note->writer);
		note->from = place;
	}
}

/* The entry to a write, or its return. */
static __always_inline void note_write(struct kiocb *call, int begins)
{
	struct pipe_inode_info *pipe;
	struct pipe_note *note;
	struct party by;
	__u64 place;

	bpf_preempt_disable();
	pipe = pipe_of(call);
	note = note_of(pipe);
	if (note && !note->is_lost) {
		by = party_of_current();
		place = place_written(pipe);
		bpf_spin_lock(&note->lock);
		if (begins)
			begin_write(note, &by, place);
		else
			end_write(note, &by, place);
		bpf_spin_unlock(&note->lock);
	}
	bpf_preempt_enable();
}

SEC("fentry/pipe_write")
int dm_gate_write(__u64 *ctx)
{
	note_write((void *)ctx[0], 1);
	return 0;
}

SEC("fexit/pipe_write")
int dm_gate_wrote(__u64 *ctx)
{
	note_write((void *)ctx[0], 0);
	return 0;
}

/* Finds the account of the bytes up to `place`, from where the last read ended. With the lock of the note. */
static __always_inline void find_writer(struct pipe_note *note, __u64 place, struct party *found)
{
	__u64 from = note->read, begins = note->from;
	struct part *part;
	int i;

	for (i = 0; i < DM_GATE_PARTS; i++) {
		if (i >= note->parts_made)
			break;
		part = &note->parts[(note->parts_made - 1 - i) & (DM_GATE_PARTS - 1)];
		if (part->to == begins && part->by.account == note->writer.account &&
		    part->by.owner == note->writer.owner)
			begins = part->from;
		if (part->from <= from && place <= part->to) {
			found->owner = part->by.owner;
			found->account = part->by.account;
			return;
		}
		if (part->to <= from)
			break;
	}
	/* The writer has not returned yet. */
	if (note->writers && begins <= from) {
		found->owner = note->writer.owner;
		found->account = note->writer.account;
	}
}

/* A read of the calling task from this pipe has ended. */
static __always_inline void note_read(struct pipe_note *note, __u64 place, struct party *found)
{
	bpf_spin_lock(&note->lock);
	/* Where it is lost, the next read seems to begin earlier. It moves back where a faster reader was here, and in a
	 * ring of another size: then nothing is known of these bytes. */
	if (place != PLACE_LOST) {
		if (place > note->read && !note->is_lost)
			find_writer(note, place, found);
		note->read = place;
	}
	bpf_spin_unlock(&note->lock);
}

SEC("fexit/pipe_read")
int dm_gate_read(__u64 *ctx)
{
	struct passage at = { .gate = DM_GATE_PIPE, .peer.account = DM_NOBODY };
	struct pipe_inode_info *pipe;
	struct dm_gate_table *table;
	struct dm_gate_home *home;
	struct pipe_note *note;
	__u64 cgroup;

	if ((__s64)ctx[2] <= 0)
		return 0;
	bpf_preempt_disable();
	pipe = pipe_of((void *)ctx[0]);
	note = note_of(pipe);
	if (note)
		note_read(note, place_read(pipe), &at.peer);
	table = table_for(DM_GATE_PIPE, &at.table);
	cgroup = table ? dm_current_container(config.level) : 0;
	home = table ? bpf_map_lookup_elem(&dm_gate_homes, &cgroup) : 0;
	if (home)
		decide_call(&at, table, cgroup, home, 0);
	bpf_preempt_enable();
	return 0;
}

/* For good: a task can wait with the lock, and give bytes later. */
static __always_inline void lose(__u64 pipe)
{
	struct pipe_note *note = bpf_map_lookup_elem(&dm_gate_pipes, &pipe);

	if (note && !note->is_lost) {
		bpf_spin_lock(&note->lock);
		note->is_lost = 1;
		bpf_spin_unlock(&note->lock);
	}
}

SEC("fentry/pipe_lock")
int dm_gate_plock(__u64 *ctx)
{
	lose(ctx[0]);
	return 0;
}

SEC("fentry/pipe_double_lock")
int dm_gate_plocks(__u64 *ctx)
{
	lose(ctx[0]);
	lose(ctx[1]);
	return 0;
}

SEC("fexit/alloc_pipe_info")
int dm_gate_pmake(__u64 *ctx)
{
	__u64 pipe = ctx[0], cgroup;
	__u32 index, zero = 0;
	struct pipe_start *fresh;
	struct dm_gate_count *count;

	if (!pipe || !table_for(DM_GATE_PIPE, &index))
		return 0;
	cgroup = dm_current_container(config.level);
	fresh = bpf_map_lookup_elem(&dm_gate_pipe0, &zero);
	if (!fresh || !bpf_map_lookup_elem(&dm_gate_homes, &cgroup))
		return 0;
	if (!bpf_map_update_elem(&dm_gate_pipes, &pipe, fresh, BPF_ANY))
		return 0;
	count = counts(DM_GATE_PIPE);
	if (count)
		count->full++;
	return 0;
}

SEC("fentry/free_pipe_info")
int dm_gate_pfree(__u64 *ctx)
{
	__u64 pipe = ctx[0];

	bpf_map_delete_elem(&dm_gate_pipes, &pipe);
	return 0;
}
