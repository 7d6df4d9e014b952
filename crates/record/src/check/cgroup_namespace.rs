//! Checks of cgroup namespaces: the group at the root of each exists.

use super::{Found, ensure, object};
use crate::{CgroupNamespace, Object, Process, Records, Thing};

/// LIMIT: cgroup namespaces inside.
const NAMESPACES_MAX: usize = 1024;

/// Checks that there are no more than a program could have made.
pub(super) fn number(records: &Records) -> Found {
    let is_one = |object: &&Object| matches!(object.thing, Thing::CgroupNamespace(_));
    let count = records.objects.iter().filter(is_one).count();
    ensure(count <= NAMESPACES_MAX, || format!("{count} cgroup namespaces"))
}

/// Checks that a process's cgroup namespace is one.
pub(super) fn of_process(process: &Process, records: &Records) -> Found {
    let Some(n) = process.cgroup_namespace else { return Ok(()) };
    let is_one = matches!(object(n, records)?, Thing::CgroupNamespace(_));
    ensure(is_one, || "in no cgroup namespace".into())
}

pub(super) fn namespace(it: &CgroupNamespace, records: &Records) -> Found {
    let is_there = match records.cgroups() {
        Some(cgroups) => cgroups.groups.iter().any(|group| group.path == it.root),
        None => it.root.is_empty(),
    };
    ensure(is_there, || format!("its root '{}'", it.root.escape_debug()))
}

#[cfg(test)]
mod tests {
    use super::super::records;
    use super::*;
    use crate::sample::small;

    #[test]
    fn invalid_cgroup_namespaces_are_refused() {
        let mut all = small();
        let n = all.objects.len();
        all.objects.push(Thing::CgroupNamespace(CgroupNamespace::default()).into());
        all.processes[0].cgroup_namespace = Some(n);
        assert!(records(&all).is_ok());
        all.processes[0].cgroup_namespace = Some(0);
        assert!(records(&all).unwrap_err().to_string().contains("no cgroup namespace"));
        all.processes[0].cgroup_namespace = None;
        let root = CgroupNamespace { root: "a.slice".into() };
        all.objects[n].thing = Thing::CgroupNamespace(root);
        assert!(records(&all).unwrap_err().to_string().contains("its root 'a.slice'"));
        let own = Thing::CgroupNamespace(CgroupNamespace::default());
        all.objects.extend(std::iter::repeat_n(Object::from(own), NAMESPACES_MAX));
        assert!(records(&all).unwrap_err().to_string().contains("1025 cgroup namespaces"));
    }
}
