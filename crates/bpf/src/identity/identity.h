/* The identity of a container, common to all gates.
 *
 * A container is identified by the id of its cgroup (a 64-bit number that the kernel gives once per
 * boot). All containers' cgroups are children of one parent, so the ancestor of any task at their
 * level is the cgroup of its container, however deep the container has nested its own cgroups.
 *
 * The map dm_members leads from this id to the record below. The map belongs to the address
 * programs, which keep it for as long as the parent cgroup exists; another program finds it by its
 * id. An entry is made before the first task of a container and removed after the last.
 *
 * Map full: an insertion fails with E2BIG, and the container does not start. */
#ifndef DORMOUSE_IDENTITY_H
#define DORMOUSE_IDENTITY_H

/* LIMIT: containers with an address: one per address of the largest pool. */
#define DM_CONTAINERS_MAX 262144

/* Programs of earlier versions write 0 to `account`, and ignore it. Only add at the end. */
struct dm_identity {
	__u32 address; /* index of its first address in the pool */
	__u32 account; /* the tenant that it belongs to; 0 is none */
	__u64 netns; /* cookie of its domain's stack: in other stacks it has no address */
};

/* The cgroup id of the container that the current task is in; 0 outside of all containers. `level` is
 * the depth of a container's cgroup below the root of the v2 hierarchy. */
static __always_inline __u64 dm_current_container(__u32 level)
{
	return bpf_get_current_ancestor_cgroup_id(level);
}

#ifdef DM_IDENTITY_OF_CGROUPS
/* For programs that read the cgroup of another socket from the kernel's memory. */
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct kernfs_node {
	__u64 id;
};
struct cgroup {
	int level;
	struct kernfs_node *kn;
	struct cgroup *ancestors[];
};
#pragma clang attribute pop

/* The cgroup id of the container that `cgroup` belongs to; 0 outside of all containers. The caller
 * holds no reference: memory that was freed meanwhile is read as any number, which no container that
 * runs now has. */
static __always_inline __u64 dm_container_of(struct cgroup *cgroup, __u32 level)
{
	struct cgroup *ancestor = 0;

	if (!cgroup || BPF_CORE_READ(cgroup, level) < (int)level)
		return 0;
	/* `ancestors` has level + 1 entries, checked above. */
	if (bpf_probe_read_kernel(&ancestor, sizeof(ancestor), cgroup->ancestors + level) ||
	    !ancestor)
		return 0;
	return BPF_CORE_READ(ancestor, kn, id);
}
#endif

#endif
