/* Sockets whose group has a program that distributes connections or datagrams
 * (SO_ATTACH_REUSEPORT_CBPF, SO_ATTACH_REUSEPORT_EBPF, socket(7)).
 *
 * No call reports such a program, and the only other one removes it.
 *
 * Hook: an iterator over the open files of one process (iter/task_file, bounded to it by the link): the
 * loader, which has copies of the sockets. The program runs in the loader's context when it reads the
 * iterator, once per open file, with a reference to that file. It is attached to nothing, changes nothing,
 * and ends with the descriptors of the loader.
 *
 * Assumptions: the loader has CAP_BPF and CAP_PERFMON. Processes that share a socket may change its group
 * meanwhile: memory is read with a helper that fails on an unmapped address.
 *
 * KERNEL(6.1): iterators over the files of one task. */
#include <linux/types.h>
#include <stddef.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "record.h"

#define FAMILY_IPV4 2
#define FAMILY_IPV6 10

/* Only for the object's BTF, with which a test compares the loader's record. */
struct dm_reuseport *dm_reuseport_type __attribute__((unused));

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct seq_file;
struct task_struct;
struct file;
struct bpf_iter_meta {
	struct seq_file *seq;
};
struct bpf_iter__task_file {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
	__u32 fd;
	struct file *file;
};
struct bpf_prog;
struct sock_reuseport {
	struct bpf_prog *prog;
};
struct sock_common {
	unsigned short skc_family;
};
struct sock {
	struct sock_common __sk_common;
	struct sock_reuseport *sk_reuseport_cb;
};
struct socket {
	struct sock *sk;
};
#pragma clang attribute pop

SEC("iter/task_file")
int dm_reuseport_read(struct bpf_iter__task_file *context)
{
	struct file *file = context->file;
	struct dm_reuseport found = {};
	struct sock_reuseport *group;
	struct socket *socket;
	struct sock *sock;
	__u16 family;

	if (!file)
		return 0;
	socket = bpf_sock_from_file(file);
	if (!socket)
		return 0;
	sock = BPF_CORE_READ(socket, sk);
	if (!sock)
		return 0;
	family = BPF_CORE_READ(sock, __sk_common.skc_family);
	if (family != FAMILY_IPV4 && family != FAMILY_IPV6)
		return 0;
	group = BPF_CORE_READ(sock, sk_reuseport_cb);
	if (!group || !BPF_CORE_READ(group, prog))
		return 0;
	found.fd = context->fd;
	bpf_seq_write(context->meta->seq, &found, sizeof found);
	return 0;
}

char _license[] SEC("license") = "GPL";
