/* Sockets of containers, counted and limited.
 *
 * A container with a limit has a *use*, the number of its sockets of IPv4 and IPv6: those that it made, those that it
 * accepted or could accept, and connections that no process has any more but that are not closed yet. The limit refuses
 * further ones.
 *
 * - dm_count_create counts the sockets of socket(2), and refuses them with EMFILE. The container is that of the
 *   creating task; a descriptor that is passed on stays counted where it was made. ORDER: this program is the last
 *   one at its hook (mod.rs). A socket that another program refuses is not counted, because no hook reports its end.
 * - dm_count_ops counts accepted connections when the handshake is complete. They inherit the mark of their listener.
 * - dm_count_arrive drops packets to listeners of a container at its limit. These are the SYN of new clients, and the
 *   last packet of a handshake. To the client this is a full backlog: it repeats the packet, and is served if a socket
 *   is closed meanwhile.
 * - dm_count_release and dm_count_ops end the count of a socket. A socket that never had a connection ends with its
 *   last descriptor. One with a connection ends when both the last descriptor and the connection are gone. A
 *   connection that ends before accept(2) is no socket of a process, and ends at once.
 *
 * Accounts. An account with a limit counts the sockets of its containers and of the accounts below it. A container has
 * the list of these accounts (dm_count_payers), and each socket has the list with which it was counted (dm_count_paid),
 * so that it is counted back there, whichever account is moved or given another limit meanwhile. A limit of an account
 * is kept as that of a container is.
 *
 * Hooks: all programs are attached to the parent cgroup of all containers (BPF_PROG_ATTACH, several per hook). Those
 * of socket(2) and close(2) run in the calling task, the others also in softirq, for the cgroup that the socket was
 * made in. All run for every container, and do nothing for sockets without a mark. No program may sleep.
 *
 * Releases and ends of connections run at the same time on two processors. Each sets its flag by an atomic operation
 * that returns the flags before, so the later one sees the flag of the earlier one; is_counted is exchanged, so a
 * socket is counted back once.
 *
 * A sleep keeps listeners open in the keeper, with their marks, while the container has no cgroup. The use is therefore
 * that of a slot of host ids. The serial number tells apart two containers that have had the same slot.
 *
 * LIMIT: as many connections more than the limit as processors complete handshakes at the same time. Sockets of SCTP
 * and MPTCP are counted where a process makes them, and not where it accepts them.
 *
 * KERNEL(5.18): bpf_get_retval; sk storage in all of these hooks; atomic operations (5.12). */
#include <linux/types.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "../identity/identity.h"
#include "record.h"

#define E_MFILE 24
#define E_NOBUFS 105
#define STATE_CLOSE 7
#define STATE_LISTEN 10
#define NO_LIMIT (~0u)
#define RAISES 8

const volatile struct dm_socket_config config SEC(".rodata.config") = {};

/* Cgroup id -> container, for containers with a limit. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DM_SOCKET_OWNERS_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, struct dm_socket_owner);
} dm_count_owners SEC(".maps");

/* Slot -> limit. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DM_SOCKET_OWNERS_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct dm_socket_limit);
} dm_count_limits SEC(".maps");

/* Slot -> use. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DM_SOCKET_OWNERS_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct dm_socket_use);
} dm_count_uses SEC(".maps");

/* Slot -> the most sockets at once, since the life of the container has begun. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DM_SOCKET_OWNERS_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct dm_socket_use);
} dm_count_peaks SEC(".maps");

/* BPF_F_CLONE: an accepted connection inherits the mark from its listener. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_CLONE);
	__type(key, int);
	__type(value, struct dm_socket_mark);
} dm_count_marks SEC(".maps");

/* Slot -> accounts. Absent where no account of the container has a limit. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DM_SOCKET_OWNERS_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct dm_socket_payers);
} dm_count_payers SEC(".maps");

/* Number of an account -> limit. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DM_SOCKET_ACCOUNTS_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct dm_socket_bound);
} dm_count_bounds SEC(".maps");

/* Number of an account -> use. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DM_SOCKET_ACCOUNTS_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct dm_socket_use);
} dm_count_sums SEC(".maps");

/* The accounts that count a socket. A connection inherits those of its listener, and gets its own when it counts. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_CLONE);
	__type(key, int);
	__type(value, struct dm_socket_payers);
} dm_count_paid SEC(".maps");

/* The version of the group, written last (group.rs). */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct dm_socket_about);
} dm_count_about SEC(".maps");

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct socket;
struct sock {
	struct socket *sk_socket;
};
#pragma clang attribute pop

/* Notes that the slot has so many sockets.
 *
 * LIMIT: where more processors than RAISES raise the number at the same moment, it can be that of an earlier one. */
static __always_inline void raise_peak(__u32 slot, __u64 sockets)
{
	struct dm_socket_use *peak = bpf_map_lookup_elem(&dm_count_peaks, &slot);
	__u64 known, found;
	int i;

	if (!peak)
		return;
	known = peak->sockets;
	for (i = 0; i < RAISES && known < sockets; i++) {
		found = __sync_val_compare_and_swap(&peak->sockets, known, sockets);
		if (found == known)
			break;
		known = found;
	}
}

/* Counts one more socket of the slot. Returns whether it is within the limit. */
static __always_inline int count(__u32 slot, __u32 most)
{
	struct dm_socket_use *use = bpf_map_lookup_elem(&dm_count_uses, &slot);
	__u64 before;

	if (!use)
		return 1;
	before = __sync_fetch_and_add(&use->sockets, 1);
	if (before >= most)
		return 0;
	raise_peak(slot, before + 1);
	return 1;
}

static __always_inline void count_back(__u32 slot)
{
	struct dm_socket_use *use = bpf_map_lookup_elem(&dm_count_uses, &slot);

	if (use)
		__sync_fetch_and_add(&use->sockets, -1);
}

/* Counts one more socket of these accounts. Returns whether it is within the limit of each. */
static __always_inline int count_paid(const struct dm_socket_payers *payers)
{
	struct dm_socket_bound *bound;
	struct dm_socket_use *use;
	int i, is_within = 1;
	__u32 account;

	for (i = 0; i < DM_SOCKET_DEPTH; i++) {
		account = payers->accounts[i];
		if (!account)
			break;
		bound = bpf_map_lookup_elem(&dm_count_bounds, &account);
		use = bpf_map_lookup_elem(&dm_count_sums, &account);
		if (use && __sync_fetch_and_add(&use->sockets, 1) >= (bound ? bound->most : NO_LIMIT))
			is_within = 0;
	}
	return is_within;
}

static __always_inline void count_back_paid(const struct dm_socket_payers *payers)
{
	struct dm_socket_use *use;
	__u32 account;
	int i;

	for (i = 0; i < DM_SOCKET_DEPTH; i++) {
		account = payers->accounts[i];
		if (!account)
			break;
		use = bpf_map_lookup_elem(&dm_count_sums, &account);
		if (use)
			__sync_fetch_and_add(&use->sockets, -1);
	}
}

/* Whether one of these accounts has as many sockets as it may have. */
static __always_inline int is_full(const struct dm_socket_payers *payers)
{
	struct dm_socket_bound *bound;
	struct dm_socket_use *use;
	__u32 account;
	int i;

	for (i = 0; i < DM_SOCKET_DEPTH; i++) {
		account = payers->accounts[i];
		if (!account)
			break;
		bound = bpf_map_lookup_elem(&dm_count_bounds, &account);
		use = bpf_map_lookup_elem(&dm_count_sums, &account);
		if (use && bound && use->sockets >= bound->most)
			return 1;
	}
	return 0;
}

/* Ends the count of a socket, once. */
static __always_inline void end(void *sk, struct dm_socket_mark *mark)
{
	__u32 slot = mark->slot;
	struct dm_socket_limit *limit;
	struct dm_socket_payers *paid;

	if (!__sync_lock_test_and_set(&mark->is_counted, 0))
		return;
	paid = bpf_sk_storage_get(&dm_count_paid, sk, 0, 0);
	if (paid)
		count_back_paid(paid);
	limit = bpf_map_lookup_elem(&dm_count_limits, &slot);
	/* Of an earlier life: its use is gone. */
	if (limit && limit->serial == mark->serial)
		count_back(slot);
}

/* socket(2), before the socket is used; not for accepted connections. */
SEC("cgroup/sock_create")
int dm_count_create(struct bpf_sock *ctx)
{
	__u64 cgroup = dm_current_container(config.level);
	struct dm_socket_owner *owner = bpf_map_lookup_elem(&dm_count_owners, &cgroup);
	struct dm_socket_payers *payers, *paid;
	struct dm_socket_limit *limit;
	struct dm_socket_mark *mark;
	__u32 slot;

	if (!owner || bpf_get_retval() < 0)
		return 1;
	slot = owner->slot;
	limit = bpf_map_lookup_elem(&dm_count_limits, &slot);
	if (!limit)
		return 1;
	mark = bpf_sk_storage_get(&dm_count_marks, ctx, 0, BPF_SK_STORAGE_GET_F_CREATE);
	/* No memory: the socket would not be counted. */
	if (!mark) {
		bpf_set_retval(-E_NOBUFS);
		return 0;
	}
	payers = bpf_map_lookup_elem(&dm_count_payers, &slot);
	if (payers) {
		paid = bpf_sk_storage_get(&dm_count_paid, ctx, payers, BPF_SK_STORAGE_GET_F_CREATE);
		if (!paid) {
			bpf_set_retval(-E_NOBUFS);
			return 0;
		}
		/* ORDER: of the copy, which does not change. */
		if (!count_paid(paid) && !limit->is_exempt) {
			count_back_paid(paid);
			bpf_set_retval(-E_MFILE);
			return 0;
		}
	}
	if (!count(slot, limit->most)) {
		count_back(slot);
		paid = bpf_sk_storage_get(&dm_count_paid, ctx, 0, 0);
		if (paid)
			count_back_paid(paid);
		bpf_set_retval(-E_MFILE);
		return 0;
	}
	mark->serial = limit->serial;
	mark->cookie = bpf_get_socket_cookie(ctx);
	mark->slot = slot;
	mark->flags = 0;
	mark->is_counted = 1;
	return 1;
}

/* The last close(2) of a socket. */
SEC("cgroup/sock_release")
int dm_count_release(struct bpf_sock *ctx)
{
	struct dm_socket_mark *mark = bpf_sk_storage_get(&dm_count_marks, ctx, 0, 0);
	__u64 before;

	if (!mark || mark->cookie != bpf_get_socket_cookie(ctx))
		return 1;
	before = __sync_fetch_and_or(&mark->flags, DM_SOCKET_RELEASED);
	/* A listen(2) that fails leaves a closed socket without an event, and so may its close(2). */
	if (!(before & DM_SOCKET_CONNECTS) || (before & DM_SOCKET_CLOSED) || ctx->state == STATE_CLOSE)
		end(ctx, mark);
	return 1;
}

/* Whether a process has the socket. */
static __always_inline int has_owner(struct bpf_sock *sk)
{
	struct tcp_sock *tcp = bpf_skc_to_tcp_sock(sk);

	return tcp && BPF_CORE_READ((struct sock *)tcp, sk_socket);
}

/* Events of TCP sockets. STATE_CB only of those for which it was switched on. */
SEC("sockops")
int dm_count_ops(struct bpf_sock_ops *ctx)
{
	struct dm_socket_payers *payers, *paid, none = {};
	struct bpf_sock *sk;
	struct dm_socket_mark *mark;
	struct dm_socket_limit *limit;
	__u32 op = ctx->op, slot;

	if (op != BPF_SOCK_OPS_TCP_CONNECT_CB && op != BPF_SOCK_OPS_TCP_LISTEN_CB &&
	    op != BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB && op != BPF_SOCK_OPS_STATE_CB)
		return 1;
	sk = ctx->sk;
	if (!sk)
		return 1;
	mark = bpf_sk_storage_get(&dm_count_marks, sk, 0, 0);
	if (!mark)
		return 1;
	if (op == BPF_SOCK_OPS_STATE_CB) {
		__u64 before;

		if (ctx->args[1] != STATE_CLOSE || mark->cookie != bpf_get_socket_cookie(ctx))
			return 1;
		before = __sync_fetch_and_or(&mark->flags, DM_SOCKET_CLOSED);
		if ((before & DM_SOCKET_RELEASED) || !has_owner(sk))
			end(sk, mark);
		return 1;
	}
	if (op == BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB) {
		__u64 cookie = bpf_get_socket_cookie(ctx);

		if (mark->cookie == cookie)
			return 1;
		slot = mark->slot;
		mark->cookie = cookie;
		mark->flags = DM_SOCKET_CONNECTS;
		mark->is_counted = 0;
		limit = bpf_map_lookup_elem(&dm_count_limits, &slot);
		/* Of a listener of an earlier life, which another container cannot have by chance. */
		if (limit && limit->serial == mark->serial) {
			count(slot, NO_LIMIT);
			payers = bpf_map_lookup_elem(&dm_count_payers, &slot);
			paid = bpf_sk_storage_get(&dm_count_paid, sk, &none,
						  payers ? BPF_SK_STORAGE_GET_F_CREATE : 0);
			if (paid) {
				/* What it has inherited is counted for its listener. */
				__builtin_memset(paid, 0, sizeof(*paid));
				if (payers)
					*paid = *payers;
				count_paid(paid);
			}
			mark->is_counted = 1;
		}
	} else {
		/* A socket that had a connection before may have another one. */
		__sync_fetch_and_and(&mark->flags, ~(__u64)DM_SOCKET_CLOSED);
		__sync_fetch_and_or(&mark->flags, DM_SOCKET_CONNECTS);
	}
	bpf_sock_ops_cb_flags_set(ctx, ctx->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_STATE_CB_FLAG);
	return 1;
}

/* Every packet to a socket. */
SEC("cgroup_skb/ingress")
int dm_count_arrive(struct __sk_buff *skb)
{
	struct bpf_sock *sk = skb->sk;
	struct dm_socket_mark *mark;
	struct dm_socket_limit *limit;
	struct dm_socket_payers *payers;
	struct dm_socket_use *use;
	__u32 slot;

	if (!sk)
		return 1;
	sk = bpf_sk_fullsock(sk);
	if (!sk || sk->state != STATE_LISTEN)
		return 1;
	mark = bpf_sk_storage_get(&dm_count_marks, sk, 0, 0);
	if (!mark)
		return 1;
	slot = mark->slot;
	limit = bpf_map_lookup_elem(&dm_count_limits, &slot);
	use = bpf_map_lookup_elem(&dm_count_uses, &slot);
	if (!limit || !use || limit->serial != mark->serial)
		return 1;
	payers = limit->is_exempt ? 0 : bpf_map_lookup_elem(&dm_count_payers, &slot);
	return use->sockets < limit->most && (!payers || !is_full(payers));
}

char _license[] SEC("license") = "GPL";
