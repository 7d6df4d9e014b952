/* The call by which a task names its client: setsockopt(2) at a level of our own (DM_BIND_LEVEL).
 *
 * A program with user-level threads, or with queues of its own between reading a request and working on it, goes on
 * with an earlier request without a passage of any gate. The call says with which one. It is a passage of `receive` of
 * that connection in which no data is read: the rules for `receive` decide, and without one a shared container works
 * for the client.
 *
 * dm_gate_bind (cgroup/setsockopt) runs in the calling task before the kernel sees the call, and answers it. It is
 * attached to the parent of the containers' cgroups, with the gate `receive`. Without it the kernel answers with the
 * error for an unknown level.
 *
 * Trust: the call names a descriptor, and no account. It counts for connections from which a task of the same
 * container has received data, as the gate `receive` has noted (`reader`). So a container names accounts alone that
 * have sent to it, for which it works by that gate anyway. A socket of another container that was passed on as a
 * descriptor (SCM_RIGHTS), one in a stack that the container has made, a pair of its own, and one of an earlier life
 * give no other account than its own. A container that neither is shared nor has a rule for `receive` is refused.
 *
 * LIMIT: datagrams have a sender each, and a socket of them no client.
 *
 * KERNEL(6.16): the storage of a task in programs of cgroups. Without it this program alone is refused. */

extern void *bpf_rdonly_cast(const void *object, __u32 type) __weak __ksym;

/* LIMIT: of an option with more bytes than a page, a program sees the first page. */
#define PAGE_BYTES 4096
#define E_PERM 1
#define E_INVAL 22
#define E_NOPROTOOPT 92
#define E_NOTCONN 107

/* Finds the client of a unix connection. Returns whether this side has opened the connection. */
static __always_inline int look_bound_unix(struct bpf_sock *sk, struct passage *at)
{
	struct connection *known = bpf_sk_storage_get(&dm_gate_sockets, sk, 0, 0);

	if (!known)
		return 0;
	at->peer.owner = known->owner;
	at->peer.account = known->account;
	return look_said(sk, at, known->is_opened);
}

/* Finds the client of a connection from which this container has received. Returns whether this side has opened it. */
static __always_inline int look_bound(struct bpf_sock *sk, const struct dm_gate_home *home, __u64 cgroup,
				      struct passage *at)
{
	struct connection *known = bpf_sk_storage_get(&dm_gate_sockets, sk, 0, 0);
	struct sock *of = bpf_rdonly_cast(sk, bpf_core_type_id_kernel(struct sock));

	if (!known || known->reader != cgroup)
		return 0;
	if (sk->family == AF_UNIX)
		return look_bound_unix(sk, at);
	return sk->type == SOCK_STREAM ? look_inet(sk, of, home, at) : 0;
}

/* Gives the calling task the label that it has asked for. Returns the errno of the call. With preemption off. */
static __always_inline __u32 bind_task(struct bpf_sock *sk, int is_client, __u64 cgroup,
				       struct dm_gate_home *home)
{
	struct passage at = {
		.gate = DM_GATE_RECEIVE,
		.peer.account = DM_NOBODY,
		.asked.account = DM_NOBODY,
	};
	struct task_struct *task = bpf_get_current_task_btf();
	struct label *label = bpf_task_storage_get(&dm_gate_labels, task, 0, 0);
	struct dm_gate_table *table = table_for(DM_GATE_RECEIVE, &at.table);
	struct party to;
	__u32 errno = 0;

	at.home.owner = home->owner;
	at.home.account = home->account;
	at.port = sk->family == AF_UNIX ? 0 : sk->src_port;
	if (is_client)
		at.is_opened = look_bound(sk, home, cgroup, &at);
	else
		at.peer = at.home;
	at.label = party_of(label, cgroup, &at.home);
	to = decide(&at, table, home->flags);
	if (!at.is_decided) {
		if (!(home->flags & DM_HOME_SHARED))
			return E_PERM;
		/* The client of an earlier request is not to pay for this one. */
		if (at.is_opened ? at.asked.account == DM_NOBODY : at.peer.account == DM_NOBODY) {
			to = at.home;
			errno = E_NOTCONN;
		}
	}
	give(task, label, 0, cgroup, home, &at, &to);
	return errno;
}

SEC("cgroup/setsockopt")
int dm_gate_bind(struct bpf_sockopt *ctx)
{
	struct bpf_sock *sk = ctx->sk;
	__u32 *value = ctx->optval;
	struct dm_gate_home *home;
	__u32 errno, what;
	__u64 cgroup;

	if (ctx->level != DM_BIND_LEVEL) {
		/* Without a length the kernel takes what the caller has given, and not the page. */
		if (ctx->optlen > PAGE_BYTES)
			ctx->optlen = 0;
		return 1;
	}
	cgroup = dm_current_container(config.level);
	home = bpf_map_lookup_elem(&dm_gate_homes, &cgroup);
	if (!home || !sk)
		return 1;
	errno = E_NOPROTOOPT;
	if (ctx->optname == DM_BIND_WORK_FOR) {
		errno = E_INVAL;
		if (ctx->optlen == sizeof(*value) && (void *)(value + 1) <= ctx->optval_end) {
			what = *value;
			if (what == DM_BIND_CLIENT || what == DM_BIND_SELF) {
				bpf_preempt_disable();
				errno = bind_task(sk, what == DM_BIND_CLIENT, cgroup, home);
				bpf_preempt_enable();
			}
		}
	}
	if (errno) {
		bpf_set_retval(-(int)errno);
		return 0;
	}
	/* The call is done. */
	ctx->optlen = -1;
	return 1;
}
