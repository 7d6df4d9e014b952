/* Gates: places in the kernel where a task of one container begins to work for the account of another.
 *
 * A task has a *label*, the account that it works for: its *home*, the account of its container, until a
 * gate changes it. Rows of a table decide (`struct dm_rule`), and where none does, a shared container works
 * for the clients that have opened connections to it (DM_HOME_SHARED). The CPU time of a task with another label
 * than its home is added up by container and account (dm_gate_uses). Time with the label of the home is
 * not: it is the rest of what the cgroup counts.
 *
 * Gates of other sets are in security.h, pipe.h and semaphore.h: they need trampolines, which not every host permits.
 * The call by which a task names its client is in bind.h.
 *
 * Hooks, tracepoints with BTF and cgroup programs, without trampolines:
 *
 * - dm_gate_switch (sched_switch) adds up. It runs with the lock of the run queue held.
 * - dm_gate_fork (sched_process_fork) copies the label to the child, before the child runs.
 * - dm_gate_exit (sched_process_exit) ends the label, so the exit itself is work of the home.
 * - dm_gate_exec (sched_process_exec).
 * - dm_gate_receive (sock_recv_length) and dm_gate_send (sock_send_length) run in the calling task, after
 *   the data was taken or given.
 * - dm_gate_state (inet_sock_set_state) notes with a TCP connection which side opened it, and which
 *   account the other side has. It runs in softirq. Of connections with the outside, only those that a shared
 *   container has opened are noted: an answer from there is no request either.
 * - dm_gate_unix (sock_send_length) notes the same with the other end of a unix connection, and of a UDP socket that
 *   it has sent before it has received.
 * - dm_gate_told (sk_data_ready) runs in the task that sends over a unix socket, before the receiver is woken.
 * - dm_gate_udp4 and dm_gate_udp6 (cgroup/recvmsg4, recvmsg6) note the sender of a datagram, in the call that takes
 *   the datagram: before sock_recv_length, and in the same task. They are attached to the parent of the containers'
 *   cgroups, the others to the kernel as a whole.
 * - dm_gate_wire (sockops) writes the account of a connection into its first packet, and dm_gate_syn
 *   (cgroup_skb/ingress) reads it, of hosts that have agreed (dm_gate_hosts, wire.h). They are at the same cgroup, as
 *   long as a host has agreed.
 *
 * All run for every task and socket of the host, with preemption off, and do nothing outside of the
 * containers of this instance.
 *
 * Time. The scheduler adds up the time of a task (`se.sum_exec_runtime`) together with that of its cgroup,
 * before sched_switch. So the differences from switch to switch are exactly the cgroup's. A label that
 * changes in between ends at an estimate, the time of the last switch and the clock since. `counted` is up
 * to where a task was charged, and never moves back: an estimate that was too large is made up for by the
 * next charges.
 *
 * The other side. A container alone sends from its addresses (address.bpf.c), and a socket that is in the
 * stack of its domain has no others as its peer. So the address names the container. A connection keeps
 * the account that it found when it was established: the address may have another container later, while
 * data of the first is unread. Of a unix socket the peer's cgroup names the container, which is that of
 * the task which made the socket; connect(2) makes the sockets of both ends. A reply is no request:
 * the side that has opened a connection is noted, and shared containers work for that side alone.
 *
 * Trust: a container controls its calls, the bytes and the ports of its packets, and network namespaces of
 * its own, where it has any address. It controls neither its cgroup nor the stack of its domain nor the
 * storages.
 *
 * So the other side is noted when a connection is established, and only then. A socket that is connected again
 * (connect(2) with AF_UNSPEC) has another note, or one without another side. A socket without a note has
 * no other side: a connection from before the load or of a restore, of which it is not known which side has
 * opened it, and one whose note found no room (a container decides how much of it is left).
 *
 * Datagrams. Each has a sender of its own, and the label follows the one that is read: the kernel gives the address
 * of this very datagram to recvmsg4 and recvmsg6, where the call of the service wants an address. A server that
 * answers needs it. A read without it has no other side, and neither has a unix datagram. The address
 * is that of the packet, which a container sends from its addresses alone (address.bpf.c). A UDP socket that sends
 * first is one of a client, and what it receives are answers. LIMIT: a datagram that is read after its container was
 * removed is charged to the next one at the address.
 *
 * Other hosts. A task that works for an account with a shared number and connects to an agreed host has the number sent
 * along: dm_gate_state notes it when the connection begins, and dm_gate_wire writes it into the SYN. The other host's
 * dm_gate_syn sees the SYN on its way to the socket that listens, believes it if the packet is from an agreed host and
 * the account exists there, and notes the account by the addresses, ports and sequence number of the packet. When the
 * handshake has ended, dm_gate_state there finds the note by those of the connection. A packet that another machine
 * sends under the same addresses has another number, or ends no handshake; and the note is there with SYN cookies as
 * well, where the kernel itself keeps nothing of a SYN.
 *
 * A front and a backend. A task that works for a client and asks another service passes its label on: the request
 * is one of the client, and not of the task's container. A unix socket of the receiver has the label noted when
 * data arrives (dm_gate_told), and for TCP there is a note by the addresses and ports of the connection
 * (dm_gate_tolds). A new connection with the same ones ends the note of the one before. The socket keeps the
 * account of its last request (dm_gate_askeds). The answer over it is work for this account: an event loop
 * that reads the answers of many requests works for each in turn. What the backend says in its answers counts
 * for nothing, since it may answer several clients at once. Only a task with a label has notes made, which are
 * as right as its label. LIMIT: a connection that carries requests of several clients at once has the label of
 * the last one.
 * LIMIT: of TCP the note is made after the data was given, so a receiver that is faster finds the note before it.
 *
 * LIMIT: splice(2) from a socket and io_uring's zero-copy receive pass no gate.
 *
 * KERNEL(6.3): sock_recv_length, sock_send_length, sk_data_ready. */
#include <linux/types.h>
#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_core_read.h>
#define DM_IDENTITY_OF_CGROUPS
#include "../identity/identity.h"
#include "../identity/wire.h"
#include "record.h"

#define AF_UNIX 1
#define AF_INET 2
#define AF_INET6 10
#define SOCK_STREAM 1
#define SOCK_DGRAM 2
#define SOCK_SEQPACKET 5
#define STATE_ESTABLISHED 1
#define STATE_SYN_SENT 2
#define STATE_SYN_RECV 3
#define STATE_LISTEN 10
#define IP_TCP 6
#define ETH_IP 0x0800
#define ETH_IP6 0x86DD
#define LOOPBACK_DEVICE 1 /* of every network namespace */
/* Third word of an IPv4 address mapped into IPv6: ::ffff:0:0/96. */
#define MAPPED bpf_htonl(0xffff)

const volatile struct dm_gate_config config SEC(".rodata.config") = {};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DM_GATE_HOMES_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, struct dm_gate_home);
} dm_gate_homes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DM_GATE_PEERS_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct dm_gate_peer);
} dm_gate_peers SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DM_GATE_USES_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct dm_gate_work);
	__type(value, struct dm_gate_use);
} dm_gate_uses SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DM_GATE_USES_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct dm_gate_nth);
	__type(value, struct dm_gate_client);
} dm_gate_clients SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, struct dm_gate_table);
} dm_gate_tables SEC(".maps");

/* The index of the table in force. A program reads it once. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} dm_gate_active SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DM_GATE_LINES_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct dm_gate_place);
	__type(value, struct dm_line);
} dm_gate_lines SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, DM_GATE_COUNT);
	__type(key, __u32);
	__type(value, struct dm_gate_count);
} dm_gate_counts SEC(".maps");

/* An account with its owner, on its way to a decision. */
struct party {
	__u64 owner;
	__u32 account;
};

/* The label of a task. A task without one has that of its home. */
struct label {
	struct dm_gate_work work;
	__u64 counted; /* up to where the task's time was charged */
};
struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct label);
} dm_gate_labels SEC(".maps");

/* What is known of a connection. */
struct connection {
	__u64 owner; /* of the other side */
	__u32 account; /* of the other side, or DM_NOBODY */
	__u32 is_opened; /* this side has opened it */
	__u64 reader; /* the container of the task that has received from it last; 0 for none yet */
};
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct connection);
} dm_gate_sockets SEC(".maps");

/* The sender of the datagram that a task is receiving, by the number of the task. */
struct sender {
	struct party of;
	__u32 is_opened; /* the socket of the task has sent first */
};
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, DM_GATE_SENDERS_MAX);
	__type(key, __u32);
	__type(value, struct sender);
} dm_gate_senders SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, DM_GATE_HOSTS_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct dm_gate_host);
	__type(value, __u32);
} dm_gate_hosts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DM_GATE_KNOWN_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct dm_gate_shared);
} dm_gate_known SEC(".maps");

/* The account that a connection takes along to an agreed host; 0 for none. */
struct wire {
	__u32 account;
};
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct wire);
} dm_gate_wires SEC(".maps");

/* The account that an agreed host has sent along, by the first packet of the connection. */
struct syn {
	__u32 from[4];
	__u32 to[4];
	__be16 from_port;
	__be16 to_port;
	__u32 next; /* the number of the byte that follows it */
};
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, DM_GATE_SYNS_MAX);
	__type(key, struct syn);
	__type(value, struct party);
} dm_gate_syns SEC(".maps");

/* The account of the last request over this socket, which its side has opened. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct party);
} dm_gate_askeds SEC(".maps");

/* The account of the sender of the data that has arrived at this unix socket last; DM_NOBODY for its home. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct party);
} dm_gate_said SEC(".maps");

/* The same for TCP, as long as the sender works for another account than its home. */
struct way {
	__u64 netns;
	__u32 from[4];
	__u32 to[4];
	__be16 from_port;
	__be16 to_port;
	__u32 reserved;
};
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, DM_GATE_TOLDS_MAX);
	__type(key, struct way);
	__type(value, struct party);
} dm_gate_tolds SEC(".maps");

/* 1 while passages are traced. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} dm_gate_trace SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DM_GATE_EDGES_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct dm_gate_edge);
	__type(value, struct dm_gate_edge_count);
} dm_gate_edges SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 2 * DM_GATE_PATHS_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct dm_gate_path);
	__type(value, struct dm_gate_below);
} dm_gate_paths SEC(".maps");

/* The last switch of a processor. */
struct turn {
	__u64 at_ns;
	__u64 counted_ns; /* time of the task that was switched to, up to then */
	__u64 pid;
};
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct turn);
} dm_gate_turns SEC(".maps");

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct sched_entity {
	__u64 sum_exec_runtime;
};
struct css_set {
	struct cgroup *dfl_cgrp;
};
struct task_struct {
	int pid;
	unsigned int on_cpu; /* KERNEL(7.3): a byte; loads of unsigned numbers follow */
	struct sched_entity se;
	struct css_set *cgroups;
	void *stack;
};
struct in6_addr {
	__u32 word[4];
};
struct net {
	__u64 net_cookie;
};
typedef struct {
	struct net *net;
} possible_net_t;
struct sock_common {
	__be32 skc_daddr;
	__be32 skc_rcv_saddr;
	__be16 skc_dport;
	__u16 skc_num;
	unsigned short skc_family;
	volatile unsigned char skc_state;
	struct in6_addr skc_v6_daddr;
	struct in6_addr skc_v6_rcv_saddr;
	possible_net_t skc_net;
};
struct sock_cgroup_data {
	struct cgroup *cgroup;
};
struct sock {
	struct sock_common __sk_common;
	__u16 sk_type;
	struct sock_cgroup_data sk_cgrp_data;
};
struct unix_address;
struct unix_sock {
	struct unix_address *addr;
	struct sock *peer;
};
struct tcp_sock {
	__u32 rcv_nxt;
	__u8 repair : 1;
};
#pragma clang attribute pop

/* A passage through a gate. */
struct passage {
	__u32 gate;
	__u32 port; /* of the socket, 0 where there is none */
	__u32 is_opened; /* this side has opened the connection */
	__u32 is_decided; /* by a row */
	struct party home;
	struct party label;
	struct party peer;
	struct party asked; /* for whom this side has sent the request that is answered, or DM_NOBODY */
	/* What follows is of the search. */
	__u32 table;
	__u32 becomes;
	struct party account;
	struct dm_line lines[3]; /* of home, label and peer, filled if a row asks for those below */
	struct dm_gate_below below; /* the paths above the file */
};

static __always_inline struct dm_gate_count *counts(__u32 gate)
{
	return bpf_map_lookup_elem(&dm_gate_counts, &gate);
}

/* ---- time ---- */

/* The time of the calling task up to now. */
static __always_inline __u64 estimate(struct task_struct *task)
{
	__u64 counted = task->se.sum_exec_runtime, now;
	__u32 zero = 0;
	struct turn *turn = bpf_map_lookup_elem(&dm_gate_turns, &zero);

	if (!turn || !turn->at_ns || turn->pid != (__u64)task->pid)
		return counted;
	now = turn->counted_ns + (bpf_ktime_get_ns() - turn->at_ns);
	return now > counted ? now : counted;
}

/* Charges the time of a task up to `until` to its label. */
static __always_inline void settle(struct label *label, __u64 until)
{
	__s64 more = until - label->counted;
	struct dm_gate_use *use;

	if (more <= 0)
		more = 0;
	else
		label->counted = until;
	if (!label->work.cgroup)
		return;
	use = bpf_map_lookup_elem(&dm_gate_uses, &label->work);
	if (!use)
		return;
	__sync_fetch_and_add(&use->cpu_ns, more);
}

SEC("tp_btf/sched_switch")
int dm_gate_switch(__u64 *ctx)
{
	struct task_struct *prev = (void *)ctx[1], *next = (void *)ctx[2];
	struct label *label = bpf_task_storage_get(&dm_gate_labels, prev, 0, 0);
	__u32 zero = 0;
	struct turn *turn;

	if (label)
		settle(label, prev->se.sum_exec_runtime);
	turn = bpf_map_lookup_elem(&dm_gate_turns, &zero);
	if (!turn)
		return 0;
	turn->at_ns = bpf_ktime_get_ns();
	turn->counted_ns = next->se.sum_exec_runtime;
	turn->pid = next->pid;
	return 0;
}

/* ---- labels ---- */

/* Makes sure that work can be counted, and is found by the end of the container. */
static __always_inline int can_count(struct dm_gate_home *home, const struct dm_gate_work *work)
{
	struct dm_gate_nth nth = { .cgroup = work->cgroup };
	struct dm_gate_client client = { .owner = work->owner, .account = work->account };
	struct dm_gate_use none = {};

	if (bpf_map_lookup_elem(&dm_gate_uses, work))
		return 1;
	/* Each number is read again by the end of the container, also one that was given in vain. */
	if (home->uses >= DM_GATE_USES_MAX)
		return 0;
	/* Full, or another processor was first. */
	if (bpf_map_update_elem(&dm_gate_uses, work, &none, BPF_NOEXIST))
		return bpf_map_lookup_elem(&dm_gate_uses, work) != 0;
	nth.number = __sync_fetch_and_add(&home->uses, 1);
	if (!bpf_map_update_elem(&dm_gate_clients, &nth, &client, BPF_ANY))
		return 1;
	bpf_map_delete_elem(&dm_gate_uses, work);
	return 0;
}

/* Gives a task with this label, or none yet, another one: the calling task, or a child that has not run yet. */
static __always_inline void give(struct task_struct *task, struct label *label, int is_child,
				 __u64 cgroup, struct dm_gate_home *home,
				 const struct passage *at, const struct party *to)
{
	struct dm_gate_work work = { .cgroup = cgroup, .owner = to->owner, .account = to->account };
	struct dm_gate_count *count;
	__u64 until;

	if (work.account == at->home.account && work.owner == at->home.owner) {
		if (!label)
			return;
		__builtin_memset(&work, 0, sizeof(work));
	}
	if (label && label->work.cgroup == work.cgroup && label->work.account == work.account &&
	    label->work.owner == work.owner)
		return;
	until = is_child ? task->se.sum_exec_runtime : estimate(task);
	count = counts(at->gate);
	if (work.cgroup) {
		if (!can_count(home, &work)) {
			if (count)
				count->full++;
			if (!label)
				return;
			__builtin_memset(&work, 0, sizeof(work));
		} else if (!label) {
			struct label fresh = { .counted = until };

			label = bpf_task_storage_get(&dm_gate_labels, task, &fresh,
						     BPF_LOCAL_STORAGE_GET_F_CREATE);
			if (!label) {
				if (count)
					count->full++;
				return;
			}
		}
	}
	if (!label)
		return;
	settle(label, until);
	label->work = work;
	if (count)
		count->changed++;
}

/* The account that a task with this label works for. */
static __always_inline struct party party_of(struct label *label, __u64 cgroup,
					     const struct party *home)
{
	struct party party = *home;

	/* A task that an operator has moved into another container has the label of that one. */
	if (label && label->work.cgroup == cgroup) {
		party.owner = label->work.owner;
		party.account = label->work.account;
	}
	return party;
}

/* ---- rules ---- */

static __always_inline int is_below(const struct dm_line *line, __u32 account)
{
	int i;

	if (!account) /* root is above all */
		return 1;
#pragma unroll
	for (i = 0; i < DM_GATE_DEPTH; i++)
		if (line->accounts[i] == account)
			return 1;
	return 0;
}

static __always_inline int matches(__u32 asked, __u32 below, __u32 account,
				   const struct dm_line *line)
{
	if (asked == DM_ANY || asked == account)
		return 1;
	return below && account != DM_NOBODY && is_below(line, asked);
}

/* Whether a path is one of these. */
static __always_inline int is_in(const struct dm_gate_below *below, __u32 path)
{
	__u64 word = 0;
	__u32 i;

#pragma unroll
	for (i = 0; i < DM_GATE_PATHS_MAX / 64; i++)
		if (path / 64 == i)
			word = below->paths[i];
	return word >> (path % 64) & 1;
}

/* Called by bpf_loop() for each row. */
static long match_row(__u64 index, void *context)
{
	struct passage *at = context;
	struct dm_gate_table *table = bpf_map_lookup_elem(&dm_gate_tables, &at->table);
	struct dm_rule *row;

	if (!table || index >= DM_GATE_ROWS_MAX)
		return 1;
	row = &table->rows[index];
	if (row->gate != at->gate || (row->port && row->port != at->port))
		return 0;
	if (!matches(row->home, row->below & 1, at->home.account, &at->lines[0]) ||
	    !matches(row->label, row->below & 2, at->label.account, &at->lines[1]) ||
	    !matches(row->peer, row->below & 4, at->peer.account, &at->lines[2]))
		return 0;
	if (row->path && !is_in(&at->below, row->path - 1))
		return 0;
	at->is_decided = 1;
	at->becomes = row->becomes;
	at->account.account = row->account;
	at->account.owner = row->owner;
	return 1;
}

static __always_inline void read_line(struct dm_line *to, __u32 table, __u32 account)
{
	struct dm_gate_place place = { .table = table, .account = account };
	struct dm_line *line = bpf_map_lookup_elem(&dm_gate_lines, &place);

	if (line)
		*to = *line;
}

/* The table in force, if a row is for this gate. */
static __always_inline struct dm_gate_table *table_for(__u32 gate, __u32 *index)
{
	__u32 zero = 0, *active = bpf_map_lookup_elem(&dm_gate_active, &zero);
	struct dm_gate_table *table;

	if (!active)
		return 0;
	*index = *active;
	table = bpf_map_lookup_elem(&dm_gate_tables, index);
	return table && table->gates & (1 << gate) ? table : 0;
}

/* The label after a passage. `table` is that of table_for(), and `flags` are those of the home. */
static __always_inline struct party decide(struct passage *at, struct dm_gate_table *table, __u32 flags)
{
	struct dm_gate_count *count = counts(at->gate);
	__u32 rows = table ? table->count : 0;

	if (count) {
		count->passages++;
		if (at->peer.account == DM_NOBODY &&
		    (at->gate <= DM_GATE_SEND || at->gate >= DM_GATE_PIPE))
			count->unknown++;
	}
	if (rows && table->below & 7) {
		read_line(&at->lines[0], at->table, at->home.account);
		read_line(&at->lines[1], at->table, at->label.account);
		read_line(&at->lines[2], at->table, at->peer.account);
	}
	if (rows)
		bpf_loop(rows < DM_GATE_ROWS_MAX ? rows : DM_GATE_ROWS_MAX, match_row, at, 0);
	/* A shared container works for the other side of a connection that this other side has opened, and, when
	 * it has an answer, for the account for which it has asked. */
	if (!at->is_decided && flags & DM_HOME_SHARED && at->gate == DM_GATE_RECEIVE) {
		if (!at->is_opened) {
			at->becomes = DM_BECOMES_PEER;
		} else if (at->asked.account != DM_NOBODY) {
			at->becomes = DM_BECOMES_ACCOUNT;
			at->account = at->asked;
		}
	}
	switch (at->becomes) {
	case DM_BECOMES_HOME:
		return at->home;
	case DM_BECOMES_PEER:
		/* Work for the outside, or for an unknown side, is work of the home. */
		return at->peer.account == DM_NOBODY ? at->home : at->peer;
	case DM_BECOMES_ACCOUNT:
		return at->account;
	}
	return at->label;
}

/* ---- processes ---- */

SEC("tp_btf/sched_process_fork")
int dm_gate_fork(__u64 *ctx)
{
	struct task_struct *parent = (void *)ctx[0], *child = (void *)ctx[1];
	__u64 cgroup = dm_current_container(config.level);
	struct dm_gate_home *home = bpf_map_lookup_elem(&dm_gate_homes, &cgroup);
	struct passage at = { .gate = DM_GATE_FORK, .peer.account = DM_NOBODY };
	struct dm_gate_table *table;
	struct party to;

	if (!home)
		return 0;
	at.home.owner = home->owner;
	at.home.account = home->account;
	at.label = party_of(bpf_task_storage_get(&dm_gate_labels, parent, 0, 0), cgroup, &at.home);
	to = at.label;
	table = table_for(DM_GATE_FORK, &at.table);
	if (table)
		to = decide(&at, table, home->flags);
	give(child, 0, 1, cgroup, home, &at, &to);
	return 0;
}

SEC("tp_btf/sched_process_exit")
int dm_gate_exit(__u64 *ctx)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct label *label = bpf_task_storage_get(&dm_gate_labels, task, 0, 0);

	if (!label)
		return 0;
	settle(label, estimate(task));
	label->work.cgroup = 0;
	return 0;
}

SEC("tp_btf/sched_process_exec")
int dm_gate_exec(__u64 *ctx)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct passage at = { .gate = DM_GATE_EXEC, .peer.account = DM_NOBODY };
	struct dm_gate_table *table = table_for(DM_GATE_EXEC, &at.table);
	__u64 cgroup = table ? dm_current_container(config.level) : 0;
	struct dm_gate_home *home;
	struct label *label;
	struct party to;

	if (!table)
		return 0;
	home = bpf_map_lookup_elem(&dm_gate_homes, &cgroup);
	if (!home)
		return 0;
	at.home.owner = home->owner;
	at.home.account = home->account;
	label = bpf_task_storage_get(&dm_gate_labels, task, 0, 0);
	at.label = party_of(label, cgroup, &at.home);
	to = decide(&at, table, home->flags);
	give(task, label, 0, cgroup, home, &at, &to);
	return 0;
}

/* ---- sockets ---- */

/* The account with this address of the pool. */
static __always_inline struct dm_gate_peer *peer_at(__u32 index)
{
	return index < config.pool_count ? bpf_map_lookup_elem(&dm_gate_peers, &index) : 0;
}

static __always_inline __u32 index4(__be32 address)
{
	return bpf_ntohl(address) - config.pool4;
}

static __always_inline __u32 index6(const __u32 *a)
{
	if (a[0] == 0 && a[1] == 0 && a[2] == bpf_htonl(0xffff))
		return index4(a[3]);
	if (a[0] == config.public6[0] && a[1] == config.public6[1] && a[2] == config.public6[2])
		return bpf_ntohl(a[3]);
	return DM_ANY;
}

/* The account at the other side of a connection. */
static __always_inline struct dm_gate_peer *peer_by_address(struct sock *sk)
{
	__u32 index = DM_ANY, a[4];

	if (sk->__sk_common.skc_family == AF_INET) {
		index = index4(sk->__sk_common.skc_daddr);
	} else if (sk->__sk_common.skc_family == AF_INET6) {
		if (bpf_core_read(a, sizeof(a), &sk->__sk_common.skc_v6_daddr))
			return 0;
		index = index6(a);
	}
	return peer_at(index);
}

/* Whether a task of a shared container has made this socket. */
static __always_inline int is_of_shared(struct sock *sk)
{
	__u64 cgroup = dm_container_of(sk->sk_cgrp_data.cgroup, config.level);
	struct dm_gate_home *home = bpf_map_lookup_elem(&dm_gate_homes, &cgroup);

	return home && home->flags & DM_HOME_SHARED;
}

/* ---- other hosts ---- */

/* Whether the operator has named this address. */
static __always_inline int is_agreed(const __u32 *address)
{
	struct dm_gate_host host = { .bits = 128 };

	__builtin_memcpy(host.address, address, sizeof(host.address));
	return bpf_map_lookup_elem(&dm_gate_hosts, &host) != 0;
}

static __always_inline void map4(__u32 *to, __be32 address)
{
	to[0] = 0;
	to[1] = 0;
	to[2] = MAPPED;
	to[3] = address;
}

/* The addresses of a connection, as in a packet of the other side. Returns 0 if they cannot be read. */
static __always_inline int addresses_of(struct sock *sk, __u32 *theirs, __u32 *ours)
{
	if (sk->__sk_common.skc_family == AF_INET) {
		map4(theirs, sk->__sk_common.skc_daddr);
		map4(ours, sk->__sk_common.skc_rcv_saddr);
		return 1;
	}
	return sk->__sk_common.skc_family == AF_INET6 &&
	       !bpf_core_read(theirs, 16, &sk->__sk_common.skc_v6_daddr) &&
	       !bpf_core_read(ours, 16, &sk->__sk_common.skc_v6_rcv_saddr);
}

/* The way of what this side sends, or, with `is_received`, of what it receives. Returns 0 if it is not known. */
static __always_inline int way_of(struct sock *sk, int is_received, struct way *way)
{
	__be16 theirs = sk->__sk_common.skc_dport, ours = bpf_htons(sk->__sk_common.skc_num);

	way->netns = sk->__sk_common.skc_net.net->net_cookie;
	way->from_port = is_received ? theirs : ours;
	way->to_port = is_received ? ours : theirs;
	return is_received ? addresses_of(sk, way->from, way->to) :
			     addresses_of(sk, way->to, way->from);
}

/* The calling task begins a connection: its label goes along if the other side is an agreed host. */
static __always_inline void note_wire(struct sock *sk)
{
	__u64 cgroup = dm_current_container(config.level);
	struct dm_gate_home *home = bpf_map_lookup_elem(&dm_gate_homes, &cgroup);
	struct task_struct *task = bpf_get_current_task_btf();
	struct wire *known, wire = {};
	struct party own, party;
	__u32 theirs[4], ours[4];

	/* In another stack, packets leave by other ways (dm_arrive). */
	if (!home || !home->netns || sk->__sk_common.skc_net.net->net_cookie != home->netns)
		return;
	own.owner = home->owner;
	own.account = home->account;
	party = party_of(bpf_task_storage_get(&dm_gate_labels, task, 0, 0), cgroup, &own);
	if (party.account >= DM_WIRE_FIRST && party.account <= DM_WIRE_LAST &&
	    addresses_of(sk, theirs, ours) && is_agreed(theirs))
		wire.account = party.account;
	/* Of an earlier connection of this socket. */
	known = bpf_sk_storage_get(&dm_gate_wires, sk, 0, 0);
	if (known)
		*known = wire;
	else if (wire.account)
		bpf_sk_storage_get(&dm_gate_wires, sk, &wire, BPF_LOCAL_STORAGE_GET_F_CREATE);
}

/* Sockets of containers. Runs with the lock of the socket held: in the calling task, or in softirq where a packet is
 * repeated. */
SEC("sockops")
int dm_gate_wire(struct bpf_sock_ops *ctx)
{
	struct dm_wire option = { .kind = DM_WIRE_KIND, .bytes = DM_WIRE_BYTES };
	struct bpf_sock *sk = ctx->sk;
	__u32 op = ctx->op, writes = BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG;
	struct wire *wire;

	if (op != BPF_SOCK_OPS_TCP_CONNECT_CB && op != BPF_SOCK_OPS_HDR_OPT_LEN_CB &&
	    op != BPF_SOCK_OPS_WRITE_HDR_OPT_CB && op != BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB)
		return 1;
	if (!sk)
		return 1;
	wire = bpf_sk_storage_get(&dm_gate_wires, sk, 0, 0);
	if (!wire)
		return 1;
	if (op == BPF_SOCK_OPS_TCP_CONNECT_CB) {
		if (wire->account)
			bpf_sock_ops_cb_flags_set(ctx, ctx->bpf_sock_ops_cb_flags | writes);
	} else if (op == BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB) {
		bpf_sock_ops_cb_flags_set(ctx, ctx->bpf_sock_ops_cb_flags & ~writes);
	} else if (wire->account &&
		   (ctx->skb_tcp_flags & (DM_TCP_SYN | DM_TCP_ACK)) == DM_TCP_SYN) {
		option.experiment = bpf_htonl(DM_WIRE_EXPERIMENT);
		option.account = bpf_htonl(wire->account);
		/* Where there is no room, the connection is one from the outside. */
		if (op == BPF_SOCK_OPS_HDR_OPT_LEN_CB)
			bpf_reserve_hdr_opt(ctx, sizeof(option), 0);
		else
			bpf_store_hdr_opt(ctx, &option, sizeof(option), 0);
	}
	return 1;
}

/* A packet on its way to a socket of a container. The sender controls all of its bytes; the address of the sender
 * counts once the handshake has ended. Lets every packet pass. */
SEC("cgroup_skb/ingress")
int dm_gate_syn(struct __sk_buff *skb)
{
	struct dm_gate_shared *known;
	struct syn syn = {};
	struct party party;
	__u8 head[40], tcp[DM_TCP_HEADER];
	__u32 at, account;

	if (skb->ifindex == LOOPBACK_DEVICE)
		return 1;
	if (skb->protocol == bpf_htons(ETH_IP)) {
		if (bpf_skb_load_bytes(skb, 0, head, 20) || head[9] != IP_TCP)
			return 1;
		at = (head[0] & 0x0f) * 4;
		map4(syn.from, *(__be32 *)(head + 12));
		map4(syn.to, *(__be32 *)(head + 16));
	} else if (skb->protocol == bpf_htons(ETH_IP6)) {
		/* LIMIT: no extension headers. */
		if (bpf_skb_load_bytes(skb, 0, head, 40) || head[6] != IP_TCP)
			return 1;
		at = 40;
		__builtin_memcpy(syn.from, head + 8, 16);
		__builtin_memcpy(syn.to, head + 24, 16);
	} else {
		return 1;
	}
	if (bpf_skb_load_bytes(skb, at, tcp, sizeof(tcp)) ||
	    (tcp[DM_TCP_FLAGS] & (DM_TCP_SYN | DM_TCP_ACK)) != DM_TCP_SYN || !is_agreed(syn.from) ||
	    dm_wire_find(skb, at, &account) != 1)
		return 1;
	known = bpf_map_lookup_elem(&dm_gate_known, &account);
	if (!known)
		return 1;
	party.owner = known->owner;
	party.account = account;
	__builtin_memcpy(&syn.from_port, tcp, 2);
	__builtin_memcpy(&syn.to_port, tcp + 2, 2);
	__builtin_memcpy(&syn.next, tcp + 4, 4);
	syn.next = bpf_ntohl(syn.next) + 1;
	bpf_map_update_elem(&dm_gate_syns, &syn, &party, BPF_ANY);
	return 1;
}

/* Whether an agreed host has sent an account along with a connection whose handshake has just ended. */
static __always_inline int find_wire(struct sock *sk, struct connection *found)
{
	struct syn syn = {};
	struct party *party;

	if (!addresses_of(sk, syn.from, syn.to))
		return 0;
	syn.from_port = sk->__sk_common.skc_dport;
	syn.to_port = bpf_htons(sk->__sk_common.skc_num);
	syn.next = BPF_CORE_READ((struct tcp_sock *)sk, rcv_nxt);
	party = bpf_map_lookup_elem(&dm_gate_syns, &syn);
	if (!party)
		return 0;
	found->owner = party->owner;
	found->account = party->account;
	bpf_map_delete_elem(&dm_gate_syns, &syn);
	return 1;
}

SEC("tp_btf/inet_sock_set_state")
int dm_gate_state(__u64 *ctx)
{
	struct sock *sk = (void *)ctx[0];
	int old = ctx[1], new = ctx[2];
	struct connection *known, found = { .account = DM_NOBODY };
	struct dm_gate_peer *peer;
	struct way way = {};
	int is_noted = 0;

	if (new == STATE_SYN_SENT)
		note_wire(sk);
	if (new != STATE_ESTABLISHED || (old != STATE_SYN_RECV && old != STATE_SYN_SENT))
		return 0;
	/* Before either side can send: what was told over an earlier connection with these ports. */
	if (old == STATE_SYN_SENT && way_of(sk, 0, &way))
		bpf_map_delete_elem(&dm_gate_tolds, &way);
	/* A connection that a restore makes: its side is not known. */
	if (old != STATE_SYN_SENT || !BPF_CORE_READ_BITFIELD_PROBED((struct tcp_sock *)sk, repair)) {
		found.is_opened = old == STATE_SYN_SENT;
		peer = peer_by_address(sk);
		if (peer) {
			found.owner = peer->owner;
			found.account = peer->account;
			is_noted = 1;
		} else if (found.is_opened) {
			is_noted = is_of_shared(sk);
		} else {
			is_noted = find_wire(sk, &found);
		}
	}
	/* Of an earlier connection of this socket. */
	known = bpf_sk_storage_get(&dm_gate_sockets, sk, 0, 0);
	if (known)
		*known = found;
	else if (is_noted)
		bpf_sk_storage_get(&dm_gate_sockets, sk, &found, BPF_LOCAL_STORAGE_GET_F_CREATE);
	return 0;
}

/* In the functions that look at a socket, `of` is the socket, and `sk` the same one for helpers: a program of a cgroup
 * reads the fields by a pointer that helpers do not take. */

/* Finds the account of the last request of this side. */
static __always_inline void look_asked(void *sk, struct passage *at)
{
	struct party *asked = bpf_sk_storage_get(&dm_gate_askeds, sk, 0, 0);

	if (asked)
		at->asked = *asked;
}

/* Finds the other side of a connection of this container. Returns whether this side has opened it. */
static __always_inline int look_inet(void *sk, struct sock *of, const struct dm_gate_home *home,
				     struct passage *at)
{
	struct connection *known = bpf_sk_storage_get(&dm_gate_sockets, sk, 0, 0);
	struct party *told;
	struct way way = {};

	/* In another stack, such as one that the container has made itself, any side has any address. */
	if (known && home->netns && of->__sk_common.skc_net.net->net_cookie == home->netns) {
		at->peer.owner = known->owner;
		at->peer.account = known->account;
	}
	if (at->gate != DM_GATE_RECEIVE)
		return known && known->is_opened;
	if (known && known->is_opened) {
		look_asked(sk, at);
		return 1;
	}
	if (home->netns && of->__sk_common.skc_net.net->net_cookie == home->netns &&
	    way_of(of, 1, &way)) {
		told = bpf_map_lookup_elem(&dm_gate_tolds, &way);
		if (told)
			at->peer = *told;
	}
	return 0;
}

/* Finds the sender of the datagram that this task has just received. Returns whether this side has sent first. */
static __always_inline int look_datagram(struct passage *at)
{
	__u32 task = bpf_get_current_pid_tgid();
	struct sender *found = bpf_map_lookup_elem(&dm_gate_senders, &task);
	int is_opened;

	if (!found)
		return 0;
	at->peer = found->of;
	is_opened = found->is_opened;
	bpf_map_delete_elem(&dm_gate_senders, &task);
	return is_opened;
}

/* Notes the sender of a datagram that the calling task takes from this socket. */
static __always_inline int note_sender(struct bpf_sock_addr *ctx, __u32 index)
{
	__u64 cgroup = dm_current_container(config.level);
	struct dm_gate_home *home = bpf_map_lookup_elem(&dm_gate_homes, &cgroup);
	struct connection *known, first = { .account = DM_NOBODY };
	struct sender sender = { .of.account = DM_NOBODY };
	struct dm_gate_peer *peer;
	__u32 task, table;

	if (!home || (!(home->flags & DM_HOME_SHARED) && !table_for(DM_GATE_RECEIVE, &table)))
		return 1;
	/* In another stack any side has any address. */
	if (!home->netns || bpf_get_netns_cookie(ctx) != home->netns)
		return 1;
	known = bpf_sk_storage_get(&dm_gate_sockets, ctx->sk, &first, BPF_LOCAL_STORAGE_GET_F_CREATE);
	sender.is_opened = known && known->is_opened;
	peer = peer_at(index);
	if (peer) {
		sender.of.owner = peer->owner;
		sender.of.account = peer->account;
	}
	task = bpf_get_current_pid_tgid();
	bpf_map_update_elem(&dm_gate_senders, &task, &sender, BPF_ANY);
	return 1;
}

SEC("cgroup/recvmsg4")
int dm_gate_udp4(struct bpf_sock_addr *ctx)
{
	return note_sender(ctx, index4(ctx->user_ip4));
}

SEC("cgroup/recvmsg6")
int dm_gate_udp6(struct bpf_sock_addr *ctx)
{
	__u32 a[4] = { ctx->user_ip6[0], ctx->user_ip6[1], ctx->user_ip6[2], ctx->user_ip6[3] };

	return note_sender(ctx, index6(a));
}

/* A UDP socket of a shared container that sends before it receives is a client. */
static __always_inline void note_first(struct sock *sk)
{
	struct connection first = { .account = DM_NOBODY, .is_opened = 1 };

	if (!bpf_sk_storage_get(&dm_gate_sockets, sk, 0, 0) && is_of_shared(sk))
		bpf_sk_storage_get(&dm_gate_sockets, sk, &first, BPF_LOCAL_STORAGE_GET_F_CREATE);
}

/* Finds the account for which the sender of what this unix socket has received worked. Returns `is_opened`. */
static __always_inline int look_said(void *sk, struct passage *at, int is_opened)
{
	struct party *said;

	if (at->gate != DM_GATE_RECEIVE)
		return is_opened;
	if (is_opened) {
		look_asked(sk, at);
		return is_opened;
	}
	said = bpf_sk_storage_get(&dm_gate_said, sk, 0, 0);
	if (said && said->account != DM_NOBODY)
		at->peer = *said;
	return is_opened;
}

static __always_inline int look_unix(struct sock *sk, struct passage *at)
{
	struct unix_sock *of = bpf_skc_to_unix_sock(sk);
	struct connection *known, found = {};
	struct dm_gate_home *home;
	struct sock *peer;
	__u64 cgroup;

	/* The peer of a datagram socket is what connect(2) was told. */
	if (!of || (sk->sk_type != SOCK_STREAM && sk->sk_type != SOCK_SEQPACKET))
		return 0;
	known = bpf_sk_storage_get(&dm_gate_sockets, sk, 0, 0);
	if (known) {
		at->peer.owner = known->owner;
		at->peer.account = known->account;
		return look_said(sk, at, known->is_opened);
	}
	/* accept(2) returns a socket with the name of the listener; connect(2) gives none. LIMIT: where a client
	 * has bound its socket, an answer counts as a request of its own container, where connect(2) has made
	 * both ends. */
	found.is_opened = !of->addr;
	found.account = DM_NOBODY;
	peer = of->peer;
	if (peer) {
		cgroup = dm_container_of(BPF_CORE_READ(peer, sk_cgrp_data.cgroup), config.level);
		home = bpf_map_lookup_elem(&dm_gate_homes, &cgroup);
		if (home) {
			found.owner = home->owner;
			found.account = home->account;
		}
	}
	at->peer.owner = found.owner;
	at->peer.account = found.account;
	/* The peer of a connection stays. */
	if (peer)
		bpf_sk_storage_get(&dm_gate_sockets, sk, &found, BPF_LOCAL_STORAGE_GET_F_CREATE);
	return look_said(sk, at, found.is_opened);
}

/* The account that the calling task works for, if it has had a label: 1 with its home in `home`, else 0. */
static __always_inline int works_for(struct party *party, struct party *home)
{
	struct label *label = bpf_task_storage_get(&dm_gate_labels, bpf_get_current_task_btf(), 0, 0);
	struct dm_gate_home *found;
	__u64 cgroup;

	/* Tasks that have always worked for their home are most of a host. */
	if (!label)
		return 0;
	cgroup = dm_current_container(config.level);
	found = bpf_map_lookup_elem(&dm_gate_homes, &cgroup);
	if (!found)
		return 0;
	home->owner = found->owner;
	home->account = found->account;
	*party = party_of(label, cgroup, home);
	return 1;
}

static __always_inline int is_same(const struct party *a, const struct party *b)
{
	return a->account == b->account && a->owner == b->owner;
}

/* Notes the account of a request of the calling task over a socket that its side has opened, and, with TCP, for the
 * other side. */
static __always_inline void note_asked(struct sock *sk, int is_tcp)
{
	struct connection *known;
	struct party party, home, *asked;
	struct way way = {};

	if (!works_for(&party, &home))
		return;
	known = bpf_sk_storage_get(&dm_gate_sockets, sk, 0, 0);
	/* As in look_unix(). */
	if (is_tcp ? !known || !known->is_opened : BPF_CORE_READ((struct unix_sock *)sk, addr) != 0)
		return;
	asked = bpf_sk_storage_get(&dm_gate_askeds, sk, 0, 0);
	if (asked && is_same(asked, &party))
		return;
	if (asked)
		*asked = party;
	else
		bpf_sk_storage_get(&dm_gate_askeds, sk, &party, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (!is_tcp || !way_of(sk, 0, &way))
		return;
	if (is_same(&party, &home))
		bpf_map_delete_elem(&dm_gate_tolds, &way);
	else
		bpf_map_update_elem(&dm_gate_tolds, &way, &party, BPF_ANY);
}

/* Data has arrived at a unix socket. The sender is the calling task. At other sockets data arrives in softirq. */
SEC("tp_btf/sk_data_ready")
int dm_gate_told(__u64 *ctx)
{
	struct sock *sk = (void *)ctx[0];
	struct party party = {}, home = {}, *said;

	if (sk->__sk_common.skc_family != AF_UNIX ||
	    sk->__sk_common.skc_state == STATE_LISTEN ||
	    (sk->sk_type != SOCK_STREAM && sk->sk_type != SOCK_SEQPACKET))
		return 0;
	said = bpf_sk_storage_get(&dm_gate_said, sk, 0, 0);
	if (!works_for(&party, &home) || is_same(&party, &home)) {
		if (said)
			said->account = DM_NOBODY;
		return 0;
	}
	if (said)
		*said = party;
	else
		bpf_sk_storage_get(&dm_gate_said, sk, &party, BPF_LOCAL_STORAGE_GET_F_CREATE);
	return 0;
}

/* A client may be gone when its first request is read: what it sends notes it with the other end. A connection has
 * the same two ends as long as one of them has a caller. */
SEC("tp_btf/sock_send_length")
int dm_gate_unix(__u64 *ctx)
{
	struct sock *sk = (void *)ctx[0], *peer;
	struct connection found = {};
	struct dm_gate_home *home;
	struct unix_sock *of;
	__u64 cgroup;
	__u16 family;

	if ((int)ctx[1] <= 0)
		return 0;
	family = sk->__sk_common.skc_family;
	if ((family == AF_INET || family == AF_INET6) && sk->sk_type == SOCK_DGRAM)
		note_first(sk);
	else if (family == AF_INET || family == AF_INET6)
		note_asked(sk, 1);
	if (family != AF_UNIX)
		return 0;
	of = bpf_skc_to_unix_sock(sk);
	if (!of || (sk->sk_type != SOCK_STREAM && sk->sk_type != SOCK_SEQPACKET))
		return 0;
	note_asked(sk, 0);
	peer = of->peer;
	if (!peer || bpf_sk_storage_get(&dm_gate_sockets, peer, 0, 0))
		return 0;
	cgroup = dm_container_of(sk->sk_cgrp_data.cgroup, config.level);
	home = bpf_map_lookup_elem(&dm_gate_homes, &cgroup);
	if (!home)
		return 0;
	found.owner = home->owner;
	found.account = home->account;
	/* As in look_unix(), seen from the other end. */
	found.is_opened = !BPF_CORE_READ((struct unix_sock *)peer, addr);
	bpf_sk_storage_get(&dm_gate_sockets, peer, &found, BPF_LOCAL_STORAGE_GET_F_CREATE);
	return 0;
}

static __always_inline int is_traced(void)
{
	__u32 zero = 0, *trace = bpf_map_lookup_elem(&dm_gate_trace, &zero);

	return trace && *trace;
}

/* Counts data that a container has received from another account. */
static __always_inline void note_edge(const struct passage *at)
{
	struct dm_gate_edge edge = {
		.home_owner = at->home.owner,
		.peer_owner = at->peer.owner,
		.home = at->home.account,
		.peer = at->peer.account,
		.port = at->is_opened ? 0 : at->port,
		.is_opened = at->is_opened,
	};
	struct dm_gate_edge_count *count, none = {};

	if (edge.peer == DM_NOBODY || (edge.peer == edge.home && edge.peer_owner == edge.home_owner))
		return;
	bpf_map_update_elem(&dm_gate_edges, &edge, &none, BPF_NOEXIST);
	count = bpf_map_lookup_elem(&dm_gate_edges, &edge);
	if (count)
		__sync_fetch_and_add(&count->passages, 1);
}

/* Notes that this container has received from a connection: from now on its tasks may name the client (bind.h). */
static __always_inline void note_reader(struct sock *sk, __u64 cgroup)
{
	struct connection *known = bpf_sk_storage_get(&dm_gate_sockets, sk, 0, 0);

	if (known && known->reader != cgroup)
		known->reader = cgroup;
}

static __always_inline int pass(struct sock *sk, __u32 gate)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct passage at = {
		.gate = gate,
		.peer.account = DM_NOBODY,
		.asked.account = DM_NOBODY,
	};
	struct dm_gate_table *table = table_for(gate, &at.table);
	struct dm_gate_home *home;
	struct label *label;
	struct party to;
	int may_change, traced;
	__u64 cgroup;
	__u16 family;

	/* Most sockets of a host are of no container, and most gates have no row. */
	if (!table && gate != DM_GATE_RECEIVE)
		return 0;
	cgroup = dm_current_container(config.level);
	home = bpf_map_lookup_elem(&dm_gate_homes, &cgroup);
	if (!home)
		return 0;
	may_change = table || home->flags & DM_HOME_SHARED;
	/* LIMIT: connections. Of a datagram it is not always known which side has sent first. */
	traced = gate == DM_GATE_RECEIVE && sk->sk_type != SOCK_DGRAM && is_traced();
	if (!may_change && !traced)
		return 0;
	at.home.owner = home->owner;
	at.home.account = home->account;
	family = sk->__sk_common.skc_family;
	if (family == AF_INET || family == AF_INET6) {
		at.port = sk->__sk_common.skc_num;
		if (sk->sk_type != SOCK_DGRAM)
			at.is_opened = look_inet(sk, sk, home, &at);
		else if (gate == DM_GATE_RECEIVE)
			at.is_opened = look_datagram(&at);
	} else if (family == AF_UNIX) {
		at.is_opened = look_unix(sk, &at);
	} else {
		return 0;
	}
	if (traced)
		note_edge(&at);
	if (!may_change)
		return 0;
	if (gate == DM_GATE_RECEIVE && sk->sk_type != SOCK_DGRAM)
		note_reader(sk, cgroup);
	label = bpf_task_storage_get(&dm_gate_labels, task, 0, 0);
	at.label = party_of(label, cgroup, &at.home);
	to = decide(&at, table, home->flags);
	give(task, label, 0, cgroup, home, &at, &to);
	return 0;
}

SEC("tp_btf/sock_recv_length")
int dm_gate_receive(__u64 *ctx)
{
	return (int)ctx[1] > 0 ? pass((struct sock *)ctx[0], DM_GATE_RECEIVE) : 0;
}

SEC("tp_btf/sock_send_length")
int dm_gate_send(__u64 *ctx)
{
	return (int)ctx[1] > 0 ? pass((struct sock *)ctx[0], DM_GATE_SEND) : 0;
}

#include "security.h"
#include "pipe.h"
#include "semaphore.h"
#include "bind.h"

char _license[] SEC("license") = "GPL";
