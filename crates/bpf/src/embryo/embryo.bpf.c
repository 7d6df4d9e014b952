/* The queue of a listening unix socket: pending (un-accepted) connections, and the data written
 * into them.
 *
 * Such a connection (the kernel calls it an embryo) is a socket that belongs to no process. Only
 * accept(2) returns it, and removes it from the queue. So it is read in place. The listening socket
 * is an open file of the examined process (an iterator over its files). Its queue has one packet
 * for each connection, which points to the connection's socket, and that socket's queue has the
 * data. Memory is read by address; a failed read makes the result incomplete, nothing else. No
 * reference is held. Therefore the last step verifies that the connection is still in the queue:
 * until then no data is taken out of it, and it cannot be queued a second time.
 *
 * A write of more than a page is in separate pages, which the packet refers to by their
 * descriptions (struct page). The start of the direct mapping, and that of the array of
 * descriptions, are in variables without a symbol on some kernels. But both are in the same order,
 * so one page with known address and description determines all others: a page of a file in memory,
 * which the loader has filled with unique numbers. Its description is found through the file. Its
 * contents are searched for (dm_embryo_find), below the addresses of other kernel objects, at the
 * offset of its physical address from each possible start of the mapping.
 *
 * Hooks: the three programs are iterators over the open files of one process (iter/task_file, bounded
 * to it by the link). They run when the loader reads the iterator, in its context, once per open file,
 * with a reference to that file and to nothing else. They are attached to nothing, run for no other
 * process, and end with the loader's descriptors. They change no memory but the maps.
 *
 * Assumptions: the loader has CAP_BPF and CAP_PERFMON; the examined processes are stopped, but their
 * peers are not, so a queue may change at any moment. All addresses come from the kernel's memory and
 * may be outdated: each is read with a helper that fails on an unmapped address, each length is
 * compared with the buffer, and each loop has a bound.
 *
 * KERNEL(6.9): the pages of a packet (netmem); iterators over the files of one task are of 6.1. */
#include <linux/types.h>
#include <stdbool.h>
#include <stddef.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "record.h"

#define FAMILY_UNIX 1
#define STATE_LISTEN 10
#define PAGE_SHIFT 12
#define MESSAGE_FILES_MAX 253 /* SCM_MAX_FD of the kernel */
#define WAITING_MAX 65536 /* LIMIT: connections of one queue: as many as somaxconn allows */
#define BEGINS_AT 30 /* the direct mapping begins at a multiple of this power of two */
#define BEGINNINGS_MAX 65536 /* LIMIT: tries: 64 TB below the address of a kernel object */

/* The request and the result. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct dm_embryo);
} dm_embryo SEC(".maps");

/* The data of the connection. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, DM_PIECES_MAX);
	__type(key, __u32);
	__type(value, struct dm_embryo_piece);
} dm_embryo_piece SEC(".maps");

/* The page by which others are found. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct dm_embryo_page);
} dm_embryo_page SEC(".maps");

/* Addresses of open files to find the holders of. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DM_FILES_MAX);
	__type(key, __u64);
	__type(value, __u32);
} dm_embryo_file SEC(".maps");

/* Only for the object's BTF, with which a test compares the loader's records. */
struct dm_embryo_holder *dm_embryo_holder_type __attribute__((unused));

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct seq_file;
struct bpf_iter_meta {
	struct seq_file *seq;
};
struct pid_namespace;
struct upid {
	int nr;
	struct pid_namespace *ns;
};
struct pid {
	unsigned int level;
	struct upid numbers[1];
};
struct task_struct {
	struct pid *thread_pid;
};
struct inode {
	unsigned long i_ino;
};
struct xarray {
	void *xa_head;
};
struct address_space {
	struct xarray i_pages;
};
struct file {
	struct inode *f_inode;
	struct address_space *f_mapping;
};
struct bpf_iter__task_file {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
	__u32 fd;
	struct file *file;
};
struct sk_buff;
struct sk_buff_head {
	struct sk_buff *next;
};
struct sock_common {
	unsigned short skc_family;
	unsigned char skc_state;
};
struct socket;
typedef struct {
	unsigned int val;
} kuid_t;
typedef struct {
	unsigned int val;
} kgid_t;
struct group_info {
	int ngroups;
	kgid_t gid[1];
};
struct cred {
	kuid_t euid;
	kgid_t egid;
	struct group_info *group_info;
};
struct sock {
	struct sock_common __sk_common;
	struct sk_buff_head sk_receive_queue;
	struct socket *sk_socket;
	struct pid *sk_peer_pid;
	const struct cred *sk_peer_cred;
};
struct socket {
	struct file *file;
	struct sock *sk;
};
struct unix_address;
struct unix_sock {
	struct sock sk;
	struct unix_address *addr;
	struct sock *peer;
	struct sk_buff *oob_skb;
};
struct sk_buff {
	struct sk_buff *next;
	struct sock *sk;
	unsigned int len;
	unsigned int data_len;
	unsigned int end;
	unsigned char *head;
	unsigned char *data;
	char cb[48];
};
struct skb_frag {
	unsigned long netmem;
	unsigned int len;
	unsigned int offset;
};
struct skb_shared_info {
	__u8 nr_frags;
	struct sk_buff *frag_list;
	struct skb_frag frags[1];
};
struct page {
	unsigned long flags;
};
struct scm_fp_list {
	short count;
	struct file *fp[MESSAGE_FILES_MAX];
};
struct unix_skb_parms {
	struct pid *pid;
	kuid_t uid;
	kgid_t gid;
	struct scm_fp_list *fp;
};
#pragma clang attribute pop

/* A position in a queue. The queue is a ring: its head has the same links as a packet. */
struct place {
	__u64 head, packet;
	__u32 left;
};

static __u64 after(__u64 packet)
{
	return (__u64)BPF_CORE_READ((struct sk_buff *)packet, next);
}

static long next_place(__u64 n, struct place *at)
{
	if (at->packet == at->head || !at->packet || !at->left)
		return 1;
	at->packet = after(at->packet);
	at->left--;
	return 0;
}

/* The connection that waits at a place; NULL if the queue is shorter. */
static struct unix_sock *waiting_at(struct sock *listener, __u32 place)
{
	struct place at = { .left = place };
	struct sk_buff *packet;

	at.head = (__u64)listener + bpf_core_field_offset(struct sock, sk_receive_queue);
	at.packet = (__u64)BPF_CORE_READ(listener, sk_receive_queue.next);
	bpf_loop(WAITING_MAX, next_place, &at, 0);
	if (at.left || at.packet == at.head || !at.packet)
		return NULL;
	packet = (struct sk_buff *)at.packet;
	return (struct unix_sock *)BPF_CORE_READ(packet, sk);
}

/* The number of a process in the pid namespace of the reader, or 0. A struct pid has one number for
 * each level of namespaces, so the reader's level selects it if the namespace there is the same. */
static __u32 number_of(struct pid *pid)
{
	struct task_struct *self = (struct task_struct *)bpf_get_current_task();
	struct pid *own = BPF_CORE_READ(self, thread_pid);
	__u32 level = BPF_CORE_READ(own, level), size = bpf_core_type_size(struct upid);
	__u64 at = bpf_core_field_offset(struct pid, numbers) + level * size;
	struct upid *here = (void *)((__u64)own + at), *there = (void *)((__u64)pid + at);

	if (BPF_CORE_READ(pid, level) < level ||
	    BPF_CORE_READ(here, ns) != BPF_CORE_READ(there, ns))
		return 0;
	return BPF_CORE_READ(there, nr);
}

/* A position in the written data. */
struct walk {
	__u64 head, packet;
	__u32 part; /* of a packet: files that come along, its head, its pages */
	__u32 at; /* in that part, in bytes */
	__u32 message;
	__u32 pieces;
	__u32 broken;
	__u64 page, address; /* a page that is known */
};

/* The address of the page with this description: as far from the known page as the descriptions are
 * from each other. */
static __u64 address_of(const struct walk *walk, __u64 page)
{
	__u32 size = bpf_core_type_size(struct page);

	if (page < walk->page)
		return walk->address - ((walk->page - page) / size << PAGE_SHIFT);
	return walk->address + ((page - walk->page) / size << PAGE_SHIFT);
}

/* Goes on to the next part of the packet, or to the next packet. */
static void next_part(struct walk *walk, __u32 last)
{
	walk->at = 0;
	if (walk->part++ < last)
		return;
	walk->part = 0;
	walk->message++;
	walk->packet = after(walk->packet);
}

/* Copies the next piece. Returns 1 to end: at the end of the queue, or if something was not as expected
 * (`broken`). */
static long next_piece(__u64 n, struct walk *walk)
{
	struct sk_buff *packet = (struct sk_buff *)walk->packet;
	struct skb_shared_info *shared;
	struct unix_skb_parms *about;
	struct dm_embryo_piece *piece;
	__u64 from;
	__u32 last, length, bytes, key = walk->pieces;

	if (walk->packet == walk->head)
		return 1;
	if (!packet)
		goto broken;
	shared = (void *)(BPF_CORE_READ(packet, head) + BPF_CORE_READ(packet, end));
	about = (void *)(walk->packet + bpf_core_field_offset(struct sk_buff, cb));
	last = 1 + BPF_CORE_READ(shared, nr_frags);
	if (walk->part == 0) {
		struct scm_fp_list *list = BPF_CORE_READ(about, fp);

		if (!list) {
			next_part(walk, last);
			return 0;
		}
		from = (__u64)list + bpf_core_field_offset(struct scm_fp_list, fp);
		length = BPF_CORE_READ(list, count) * 8;
		if (length > MESSAGE_FILES_MAX * 8)
			goto broken;
	} else if (walk->part == 1) {
		from = (__u64)BPF_CORE_READ(packet, data);
		length = BPF_CORE_READ(packet, len) - BPF_CORE_READ(packet, data_len);
		if (BPF_CORE_READ(shared, frag_list))
			goto broken;
	} else {
		struct skb_frag *part =
			(void *)((__u64)shared +
				 bpf_core_field_offset(struct skb_shared_info, frags) +
				 (walk->part - 2) * bpf_core_type_size(struct skb_frag));
		__u64 page = BPF_CORE_READ(part, netmem);

		if (!walk->address || page & 1) /* memory of a device */
			goto broken;
		from = address_of(walk, page) + BPF_CORE_READ(part, offset);
		length = BPF_CORE_READ(part, len);
	}
	if (walk->at > length)
		goto broken;
	bytes = length - walk->at;
	if (bytes > DM_PIECE_BYTES)
		bytes = DM_PIECE_BYTES;
	/* A head may be empty where there are pages. */
	if (!bytes && (walk->part != 1 || last > 1)) {
		next_part(walk, last);
		return 0;
	}
	piece = bpf_map_lookup_elem(&dm_embryo_piece, &key);
	if (!piece) /* DM_PIECES_MAX */
		goto broken;
	piece->message = walk->message;
	piece->bytes = bytes;
	piece->files = walk->part == 0;
	piece->known = BPF_CORE_READ(about, pid) != NULL;
	if (piece->known) {
		piece->pid = number_of(BPF_CORE_READ(about, pid));
		piece->uid = BPF_CORE_READ(about, uid.val);
		piece->gid = BPF_CORE_READ(about, gid.val);
	}
	if (bpf_probe_read_kernel(piece->data, bytes, (void *)(from + walk->at)))
		goto broken;
	walk->pieces++;
	walk->at += bytes;
	if (walk->at == length)
		next_part(walk, last);
	return 0;
broken:
	walk->broken = 1;
	return 1;
}

/* The credentials of the client, as SO_PEERCRED would return them. */
static void read_peer(struct dm_embryo *result, struct unix_sock *embryo)
{
	struct pid *pid = BPF_CORE_READ(embryo, sk.sk_peer_pid);
	const struct cred *cred = BPF_CORE_READ(embryo, sk.sk_peer_cred);
	struct group_info *groups = BPF_CORE_READ(cred, group_info);
	__u32 bytes = BPF_CORE_READ(groups, ngroups) * sizeof(kgid_t);

	result->pid = number_of(pid);
	result->uid = BPF_CORE_READ(cred, euid.val);
	result->gid = BPF_CORE_READ(cred, egid.val);
	result->groups = bytes / sizeof(kgid_t);
	if (bytes <= sizeof result->group)
		bpf_probe_read_kernel(
			result->group, bytes,
			(void *)((__u64)groups + bpf_core_field_offset(struct group_info, gid)));
}

/* Reads one pending connection into the maps. */
SEC("iter/task_file")
int dm_embryo_read(struct bpf_iter__task_file *context)
{
	struct file *file = context->file;
	struct walk walk = {};
	struct unix_sock *embryo;
	struct socket *socket;
	struct dm_embryo_page *known;
	struct dm_embryo *result;
	struct sock *listener, *client;
	__u32 zero = 0;

	result = bpf_map_lookup_elem(&dm_embryo, &zero);
	if (!file || !result || context->fd != result->fd)
		return 0;
	socket = bpf_sock_from_file(file);
	if (!socket)
		return 0;
	listener = BPF_CORE_READ(socket, sk);
	if (!listener || BPF_CORE_READ(listener, __sk_common.skc_family) != FAMILY_UNIX ||
	    BPF_CORE_READ(listener, __sk_common.skc_state) != STATE_LISTEN)
		return 0;
	embryo = waiting_at(listener, result->place);
	if (!embryo)
		return 0;
	client = BPF_CORE_READ(embryo, peer);
	result->client = BPF_CORE_READ(client, sk_socket, file, f_inode, i_ino);
	result->named = BPF_CORE_READ((struct unix_sock *)client, addr) != NULL;
	read_peer(result, embryo);
	result->urgent = BPF_CORE_READ(embryo, oob_skb) != NULL;
	walk.head = (__u64)embryo + bpf_core_field_offset(struct sock, sk_receive_queue);
	walk.packet = (__u64)BPF_CORE_READ(embryo, sk.sk_receive_queue.next);
	known = bpf_map_lookup_elem(&dm_embryo_page, &zero);
	if (known) {
		walk.page = known->page;
		walk.address = known->address;
	}
	/* Some parts are empty and give no piece: four steps for each piece suffice. */
	bpf_loop(DM_PIECES_MAX * 4, next_piece, &walk, 0);
	result->pieces = walk.pieces;
	result->whole = !walk.broken && walk.packet == walk.head;
	/* Last: the connection was in the queue all the time, so what was read is its own. */
	result->found = waiting_at(listener, result->place) == embryo &&
			BPF_CORE_READ(embryo, peer) == client;
	return 0;
}

/* A search for the address of a page. */
struct search {
	__u64 below;
	struct dm_embryo_page *page;
};

/* Tries one possible start of the direct mapping. An address that is not mapped fails to be read. */
static long next_beginning(__u64 n, struct search *search)
{
	__u64 address = (((search->below >> BEGINS_AT) - n) << BEGINS_AT) +
			(search->page->frame << PAGE_SHIFT);
	__u64 found[4] = {};

	if (bpf_probe_read_kernel(found, sizeof found, (void *)address))
		return 0;
	for (int i = 0; i < 4; i++)
		if (found[i] != search->page->content[i])
			return 0;
	search->page->address = address;
	return 1;
}

/* Finds address and description of the page that the loader has filled. */
SEC("iter/task_file")
int dm_embryo_find(struct bpf_iter__task_file *context)
{
	struct file *file = context->file;
	struct address_space *mapping;
	struct search search = {};
	__u32 zero = 0;
	__u64 page;

	search.page = bpf_map_lookup_elem(&dm_embryo_page, &zero);
	if (!file || !search.page || context->fd != search.page->fd)
		return 0;
	mapping = BPF_CORE_READ(file, f_mapping);
	page = (__u64)BPF_CORE_READ(mapping, i_pages.xa_head);
	if (!page || page & 3) /* more than one page */
		return 0;
	search.page->page = page;
	search.below = (__u64)mapping;
	bpf_loop(BEGINNINGS_MAX, next_beginning, &search, 0);
	return 0;
}

/* Writes an entry for each open file of the process that is in dm_embryo_file. */
SEC("iter/task_file")
int dm_embryo_holders(struct bpf_iter__task_file *context)
{
	__u64 address = (__u64)context->file;
	struct dm_embryo_holder holder = { .file = address, .fd = context->fd };

	if (address && bpf_map_lookup_elem(&dm_embryo_file, &address))
		bpf_seq_write(context->meta->seq, &holder, sizeof holder);
	return 0;
}

char _license[] SEC("license") = "GPL";
