/* The barrier: calls of a container that reach outside of it fail with EPERM, whatever its namespaces let through.
 *
 * - Signals (task_kill), tracing and everything that needs the same permission, such as /proc/PID/mem and
 *   process_vm_readv(2) (ptrace_access_check), and PTRACE_TRACEME (ptrace_traceme): the other task is to be in the
 *   same container.
 * - Files (file_open, which execve(2) passes as well), and changes of directories and files by their path: the mount is
 *   to be one of the container, or the file is to belong to an id of the container. So a descriptor of a directory of
 *   the host that has come into a container leads to no other file.
 *
 * Hooks of security modules (LSM), for every task of the host. They run in the calling task, before the kernel does
 * what it has asked for. A task outside of all containers costs a lookup of its cgroup; one inside a lookup in
 * dm_barrier as well. The programs are attached by links, and know nothing that a container can write.
 *
 * A container is known by its cgroup (identity.h), which a process can only leave with permissions of the host. Its
 * mounts are those of mount namespaces that belong to its user namespace or to one below. Mounts of the host are those
 * of namespaces of the initial user namespace. One that is attached nowhere, and one that the kernel has for itself
 * (memfd, pipes, layers of an overlay), is neither.
 *
 * A file is judged by the credentials with which it is opened (f_cred). The kernel opens layers of an overlay and the
 * interpreters of binfmt_misc with those of the process that has mounted or registered them.
 *
 * Modes and owners need no hook: their change needs an id of the container as owner.
 *
 * LIMIT: devices, pipes and sockets are left to their own rules. chdir(2), stat(2) and readlink(2) pass no hook with a
 * mount. Objects of System V have no owner that the hooks show.
 *
 * KERNEL(5.7): BPF at the hooks of security modules, with trampolines; CONFIG_SECURITY_PATH. */
#include <linux/types.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#define DM_IDENTITY_OF_CGROUPS
#include "../identity/identity.h"
#include "record.h"

#define E_PERM 1
#define IS_ERROR(pointer) ((unsigned long)(pointer) >= (unsigned long)-4095)
/* The number of a mount namespace that is attached nowhere: none, or since Linux 6.18 MNT_NS_ANON_INO of nsfs.h. */
#define ANONYMOUS 0xEFFFFFF7
#define S_IFMT 00170000
#define S_IFREG 0100000
#define S_IFDIR 0040000

const volatile struct dm_barrier_config config SEC(".rodata.config") = {};

/* Cgroup id -> the ids of the container. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DM_BARRIER_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, struct dm_barrier_ids);
} dm_barrier SEC(".maps");

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct user_namespace {
	int level;
};
struct ns_common {
	unsigned int inum;
};
struct mnt_namespace {
	struct ns_common ns;
	struct user_namespace *user_ns;
};
struct vfsmount {
	int mnt_flags;
};
struct mount {
	struct vfsmount mnt;
	struct mnt_namespace *mnt_ns;
};
typedef struct {
	unsigned int val;
} kuid_t;
struct inode {
	unsigned short i_mode;
	kuid_t i_uid;
};
struct dentry {
	struct inode *d_inode;
};
struct path {
	struct vfsmount *mnt;
	struct dentry *dentry;
};
struct cred {
	struct user_namespace *user_ns;
};
struct file {
	struct path f_path;
	struct inode *f_inode;
	const struct cred *f_cred;
};
struct css_set {
	struct cgroup *dfl_cgrp;
};
struct task_struct {
	struct css_set *cgroups;
	const struct cred *cred;
};
#pragma clang attribute pop

/* The container of the calling task, if it is behind the barrier. */
static __always_inline struct dm_barrier_ids *own(__u64 *container)
{
	*container = dm_current_container(config.level);
	return *container ? bpf_map_lookup_elem(&dm_barrier, container) : 0;
}

static __always_inline int refuse(struct dm_barrier_ids *ids)
{
	__sync_fetch_and_add(&ids->refused, 1);
	return -E_PERM;
}

/* ---- processes ---- */

/* A call of the calling task for another one. */
static __always_inline int reach(struct task_struct *other)
{
	__u64 container;
	struct dm_barrier_ids *ids = own(&container);

	if (!ids || dm_container_of(BPF_CORE_READ(other, cgroups, dfl_cgrp), config.level) == container)
		return 0;
	return refuse(ids);
}

/* A signal with credentials of its own is one of a USB device, which has interrupted the calling task. For the verifier
 * an argument that is a pointer is never NULL: it would remove a comparison with ctx[3]. */
SEC("lsm/task_kill")
int dm_bar_kill(__u64 *ctx)
{
	__u64 credentials = 0;

	bpf_probe_read_kernel(&credentials, sizeof(credentials), ctx + 3);
	return credentials ? 0 : reach((void *)ctx[0]);
}

SEC("lsm/ptrace_access_check")
int dm_bar_trace(__u64 *ctx)
{
	return reach((void *)ctx[0]);
}

SEC("lsm/ptrace_traceme")
int dm_bar_traceme(__u64 *ctx)
{
	return reach((void *)ctx[0]);
}

/* ---- files ---- */

/* Whether a file or directory of this mount is none of the container. */
static __always_inline int is_outside(struct dm_barrier_ids *ids, struct vfsmount *mnt, struct inode *inode)
{
	struct mount *mount = (void *)mnt - bpf_core_field_offset(struct mount, mnt);
	struct mnt_namespace *ns = BPF_CORE_READ(mount, mnt_ns);
	unsigned int kind, number;

	if (!ns || IS_ERROR(ns) || BPF_CORE_READ(ns, user_ns, level) > 0)
		return 0;
	number = BPF_CORE_READ(ns, ns.inum);
	if (!number || number == ANONYMOUS)
		return 0;
	kind = BPF_CORE_READ(inode, i_mode) & S_IFMT;
	if (kind != S_IFREG && kind != S_IFDIR)
		return 0;
	return BPF_CORE_READ(inode, i_uid.val) - ids->base >= ids->count;
}

SEC("lsm/file_open")
int dm_bar_open(__u64 *ctx)
{
	struct file *file = (void *)ctx[0];
	__u64 container;
	struct dm_barrier_ids *ids = own(&container);

	if (!ids || BPF_CORE_READ(file, f_cred, user_ns, level) == 0)
		return 0;
	if (!is_outside(ids, BPF_CORE_READ(file, f_path.mnt), BPF_CORE_READ(file, f_inode)))
		return 0;
	return refuse(ids);
}

/* A change of what is at this path, or in the directory there. */
static __always_inline int change(struct path *path)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	__u64 container;
	struct dm_barrier_ids *ids = own(&container);

	if (!ids || BPF_CORE_READ(task, cred, user_ns, level) == 0)
		return 0;
	if (!is_outside(ids, BPF_CORE_READ(path, mnt), BPF_CORE_READ(path, dentry, d_inode)))
		return 0;
	return refuse(ids);
}

#define CHANGE(hook, argument)                                                                                        \
	SEC("lsm/path_" #hook)                                                                                        \
	int dm_bar_##hook(__u64 *ctx)                                                                                 \
	{                                                                                                             \
		return change((void *)ctx[argument]);                                                                 \
	}

CHANGE(mkdir, 0)
CHANGE(mknod, 0)
CHANGE(symlink, 0)
CHANGE(unlink, 0)
CHANGE(rmdir, 0)
CHANGE(link, 1)
CHANGE(truncate, 0)

SEC("lsm/path_rename")
int dm_bar_rename(__u64 *ctx)
{
	int result = change((void *)ctx[0]);

	return result ? result : change((void *)ctx[2]);
}

char _license[] SEC("license") = "GPL";
