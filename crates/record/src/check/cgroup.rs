//! Checks of control groups: each is below the container's own, and only known settings are
//! written.

use std::collections::HashSet;

use super::{Found, TEXT_MAX, ensure};
use crate::{Bytes, Cgroup, Cgroups, Process, Records, SETTINGS, Thing};

/// LIMIT: control groups inside, and their depth (a started container may make as many).
const GROUPS_MAX: usize = 4097;
const DEPTH_MAX: usize = 32;
/// LIMIT: controllers that a group delegates.
const CONTROLLERS_MAX: usize = 32;

pub(super) fn all(cgroups: &Cgroups, records: &Records) -> Found {
    let is_one = |o: &&crate::Object| matches!(o.thing, Thing::Cgroups(_));
    ensure(records.objects.iter().filter(is_one).count() == 1, || "they occur twice".into())?;
    ensure(cgroups.groups.len() <= GROUPS_MAX, || "too many".into())?;
    let mut paths = HashSet::new();
    for (n, group) in cgroups.groups.iter().enumerate() {
        let said = |what: &str| format!("'{}': {what}", group.path.escape_debug());
        let is_own = n == 0 && group.path.is_empty();
        let parent = group.path.rsplit_once('/').map_or("", |(parent, _)| parent);
        ensure(is_own || is_path(&group.path) && paths.contains(parent), || said("its place"))?;
        ensure(paths.insert(group.path.as_str()), || said("it occurs twice"))?;
        ensure(group.mode <= 0o777, || said("its mode"))?;
        let ids = [group.owner.0, group.owner.1, group.manager.0, group.manager.1];
        ensure(ids.iter().all(|id| *id != u32::MAX), || said("its owner"))?;
        settings(group).map_err(|what| said(&what))?;
        ensure(!is_own || group.settings.is_empty() && !group.frozen, || {
            said("a setting of the host")
        })?;
    }
    let is_there = |p: &&Process| p.cgroup.as_deref().is_some_and(|path| paths.contains(path));
    let mut alive = records.processes.iter().filter(|p| p.ended.is_none());
    match alive.find(|p| !is_there(p)) {
        Some(p) => Err(format!("process {} is in none", p.pid)),
        None => Ok(()),
    }
}

fn is_path(path: &str) -> bool {
    let part = |part: &str| !part.is_empty() && part != "." && part != ".." && part.len() < 256;
    let sound = path.len() < TEXT_MAX && !path.contains(['\0', '\n']);
    sound && path.split('/').count() <= DEPTH_MAX && path.split('/').all(part)
}

fn settings(group: &Cgroup) -> Found {
    let word = |word: &String| {
        (1..32).contains(&word.len()) && word.bytes().all(|b| b.is_ascii_lowercase() || b == b'_')
    };
    let sound = group.hands_down.len() <= CONTROLLERS_MAX && group.hands_down.iter().all(word);
    ensure(sound, || "its delegated controllers".into())?;
    let sound = |(file, value): &(String, String)| {
        SETTINGS.iter().any(|(known, _)| known == file)
            && (1..TEXT_MAX).contains(&value.len())
            && !value.contains('\0')
    };
    let sound = group.settings.len() <= SETTINGS.len() && group.settings.iter().all(sound);
    ensure(sound, || "its settings".into())?;
    let known = |name: &str| name.starts_with("user.") && name.len() < 256 && !name.contains('\0');
    let sound = |(name, value): &(String, Bytes)| known(name) && value.0.len() <= 64 << 10;
    let sound = group.attributes.len() <= 256 && group.attributes.iter().all(sound);
    ensure(sound, || "its attributes".into())
}

#[cfg(test)]
mod tests {
    use super::super::records;
    use super::*;
    use crate::sample::small;

    fn groups() -> Records {
        let group = |path: &str| Cgroup {
            path: path.into(),
            mode: 0o755,
            owner: (0, 0),
            manager: (0, 0),
            frozen: false,
            hands_down: Vec::new(),
            settings: Vec::new(),
            attributes: Vec::new(),
        };
        let mut inner = group("a.slice/b.service");
        inner.settings = vec![("pids.max".into(), "7".into())];
        inner.attributes = vec![("user.id".into(), Bytes(vec![1]))];
        let mut outer = group("a.slice");
        outer.hands_down = vec!["pids".into()];
        let mut records = small();
        records.processes[0].cgroup = Some("a.slice/b.service".into());
        let groups = vec![group(""), outer, inner];
        records.objects.push(Thing::Cgroups(Cgroups { groups }).into());
        records
    }

    #[test]
    fn invalid_groups_are_refused() {
        assert!(records(&groups()).is_ok());
        type Case = (fn(&mut Vec<Cgroup>), &'static str);
        let cases: [Case; 16] = [
            (|g| g[1].path = "../a".into(), "its place"),
            (|g| g[1].path = "/a.slice".into(), "its place"),
            (|g| g[1].path = "a.slice/.".into(), "its place"),
            (|g| g[2].path = "c.slice/b.service".into(), "its place"),
            (|g| g[2].path = "a.slice".into(), "twice"),
            (|g| g[1].path = vec!["a"; 40].join("/"), "its place"),
            (|g| drop(g.remove(0)), "its place"),
            (|g| g[1].mode = 0o4755, "its mode"),
            (|g| g[1].owner.1 = u32::MAX, "its owner"),
            (|g| g[1].hands_down = vec!["pids +cpu".into()], "delegated controllers"),
            (|g| g[2].settings[0].0 = "cgroup.procs".into(), "its settings"),
            (|g| g[2].settings[0].1.clear(), "its settings"),
            (|g| g[0].settings = g[2].settings.clone(), "of the host"),
            (|g| g[0].frozen = true, "of the host"),
            (|g| g[2].attributes[0].0 = "trusted.id".into(), "its attributes"),
            (|g| drop(g.remove(2)), "is in none"),
        ];
        for (change, text) in cases {
            let mut all = groups();
            let Some(Thing::Cgroups(found)) = all.objects.last_mut().map(|o| &mut o.thing) else {
                unreachable!("it was added last");
            };
            change(&mut found.groups);
            let said = records(&all).unwrap_err().to_string();
            assert!(said.contains(text), "{text}: {said}");
        }
        let mut twice = groups();
        twice.objects.extend(twice.objects.last().cloned());
        assert!(records(&twice).unwrap_err().to_string().contains("occur twice"));
        let mut none = small();
        none.processes[0].cgroup = Some("a".into());
        assert!(records(&none).unwrap_err().to_string().contains("control group"));
    }
}
