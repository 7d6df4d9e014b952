//! Kernel parameters (proc_sys(5)), by name: which of them a container may set.
//!
//! Only those that belong to a namespace other than the host's; [`owner`] is the one place that
//! maps a name to its namespace. Code that takes a name from a user calls it, and so does the plan
//! that carries the name into the container. There the first process writes it through the
//! container's own procfs, with no more rights than root inside has.

use crate::call::Namespace;

/// LIMIT: longest value, in bytes; the kernel takes less than a page.
const VALUE_MAX: usize = 4095;

/// The namespace that a parameter belongs to; `None` when it is the whole host's, or unknown.
///
/// | parameters | namespace | page |
/// |---|---|---|
/// | `kernel.hostname`, `kernel.domainname`, by system call: the files are the host root's | uts | uts_namespaces(7) |
/// | `kernel.msg*`, `kernel.sem*`, `kernel.shm*` of System V, `fs.mqueue.*` | ipc | ipc_namespaces(7) |
/// | `kernel.pid_max`, KERNEL(6.14): before, the kernel refuses | pid | pid_namespaces(7) |
/// | `user.max_*`: limits on namespaces, inotify and fanotify, for each user inside | user | namespaces(7) |
/// | `net.*` | network, where it belongs to the container's user namespace | network_namespaces(7) |
///
/// Names are written with dots or slashes: `net.ipv4.ip_forward`, `net/ipv4/ip_forward`.
pub fn owner(name: &str) -> Option<Namespace> {
    let path = path(name)?;
    match path.as_str() {
        "kernel/hostname" | "kernel/domainname" => Some(Namespace::Uts),
        "kernel/auto_msgmni"
        | "kernel/msgmax"
        | "kernel/msgmnb"
        | "kernel/msgmni"
        | "kernel/msg_next_id"
        | "kernel/sem"
        | "kernel/sem_next_id"
        | "kernel/shmall"
        | "kernel/shmmax"
        | "kernel/shmmni"
        | "kernel/shm_next_id"
        | "kernel/shm_rmid_forced" => Some(Namespace::Ipc),
        "kernel/pid_max" => Some(Namespace::Pid),
        _ if path.starts_with("fs/mqueue/") => Some(Namespace::Ipc),
        _ if path.starts_with("user/max_") => Some(Namespace::User),
        _ if path.starts_with("net/") => Some(Namespace::Net),
        _ => None,
    }
}

/// The path below `/proc/sys`; `None` when the name is not that of a parameter.
///
/// A name with a slash is a path already: there a dot is part of a name, as in
/// `net/ipv4/conf/eth0.1/forwarding`.
pub fn path(name: &str) -> Option<String> {
    let path = if name.contains('/') { name.to_owned() } else { name.replace('.', "/") };
    let good = |part: &str| {
        let known = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.@:".contains(&byte);
        !part.is_empty() && part != "." && part != ".." && part.bytes().all(known)
    };
    (path.contains('/') && path.split('/').all(good)).then_some(path)
}

/// Returns whether this is a valid value of a parameter: one line of text.
pub fn is_value(value: &str) -> bool {
    value.len() <= VALUE_MAX && value.bytes().all(|byte| byte >= b' ' || byte == b'\t')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameter_of_the_host_has_no_owner() {
        for name in ["kernel.core_pattern", "vm.swappiness", "kernel.shm", "fs.mqueue", "net"] {
            assert_eq!(owner(name), None, "{name}");
        }
        assert_eq!(owner("kernel.shmmax"), Some(Namespace::Ipc));
        assert_eq!(owner("kernel.domainname"), Some(Namespace::Uts));
        assert_eq!(owner("kernel/pid_max"), Some(Namespace::Pid));
        assert_eq!(owner("fs.mqueue.msg_max"), Some(Namespace::Ipc));
        assert_eq!(owner("user.max_user_namespaces"), Some(Namespace::User));
        assert_eq!(owner("user.name"), None);
        assert_eq!(owner("net.ipv4.ip_forward"), Some(Namespace::Net));
        assert_eq!(owner("net/ipv4/conf/eth0.1/forwarding"), Some(Namespace::Net));
    }

    #[test]
    fn name_cannot_leave_its_tree() {
        for name in ["net/../kernel/core_pattern", "net..x", "", "net", "net/", "/net/x", "net.a b"]
        {
            assert_eq!(path(name), None, "{name}");
        }
    }

    #[test]
    fn value_cannot_carry_a_second_setting() {
        assert!(is_value("1\t2 3") && is_value("") && is_value(&"1".repeat(4095)));
        assert!(!is_value("a\nb") && !is_value("a\0b") && !is_value(&"1".repeat(4096)));
    }
}
