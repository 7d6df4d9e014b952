//! Checks of mount namespaces: the parent and the source of each mount are made before it.

use std::collections::HashSet;

use super::{Found, TEXT_MAX, ensure, object};
use crate::{Mount, MountSource, Mounts, Object, PROC_OPTIONS, Records, TMPFS_OPTIONS, Thing};

/// LIMIT: mount namespaces inside, and mounts in all of them.
const NAMESPACES_MAX: usize = 1024;
const MOUNTS_MAX: usize = 1 << 16;

/// Checks that there are no more than a program could have made.
pub(super) fn number(records: &Records) -> Found {
    let counts = records.objects.iter().filter_map(|object| match &object.thing {
        Thing::Mounts(mounts) => Some(mounts.mounts.len()),
        _ => None,
    });
    let (namespaces, mounts) = counts.fold((0, 0), |(n, all), count| (n + 1, all + count));
    let fits = namespaces <= NAMESPACES_MAX && mounts <= MOUNTS_MAX;
    ensure(fits, || format!("{namespaces} mount namespaces with {mounts} mounts"))?;
    let own = |object: &&Object| matches!(&object.thing, Thing::Mounts(mounts) if mounts.own);
    let count = records.objects.iter().filter(own).count();
    ensure(count <= 1, || format!("{count} mount namespaces of the container's own"))?;
    let is_ipc = |object: &&Object| matches!(object.thing, Thing::Ipc(_));
    let count = records.objects.iter().filter(is_ipc).count();
    ensure(count <= NAMESPACES_MAX, || format!("{count} IPC namespaces"))
}

pub(super) fn all(n: usize, mounts: &Mounts, records: &Records) -> Found {
    ensure(!mounts.mounts.is_empty(), || "no mounts".into())?;
    let mut contents = HashSet::new();
    for (number, mount) in mounts.mounts.iter().enumerate() {
        let said = |what: &str| format!("mount {number}: {what}");
        let is_placed = match mount.parent {
            None if mounts.own => is_absolute(&mount.place),
            None => number == 0 && mount.place.is_empty(),
            Some(parent) => parent < number && is_below(&mount.place) && !mounts.own,
        };
        ensure(is_placed, || said("its place"))?;
        let atime = mount.attributes & 0x30;
        let known = mount.attributes & !Mount::ATTRIBUTES == 0 && atime != 0x30;
        ensure(known, || said("its attributes"))?;
        let is_name = |name: &String| name.len() <= Mount::NAME_BYTES_MAX && !name.contains('\0');
        ensure(mount.name.as_ref().is_none_or(is_name), || said("its name"))?;
        source((n, number), &mount.source, records).map_err(|what| said(&what))?;
        if let MountSource::Tmpfs { contents: one, .. } = &mount.source {
            ensure(contents.insert(*one), || said("the contents of another mount"))?;
        }
    }
    Ok(())
}

fn source((n, number): (usize, usize), source: &MountSource, records: &Records) -> Found {
    match source {
        MountSource::Container { path } => ensure(is_absolute(path), || "its path".into()),
        MountSource::Mount { namespace, mount, path } => {
            let count = match object(*namespace, records)? {
                Thing::Mounts(_) if *namespace == n => number,
                Thing::Mounts(other) if *namespace < n => other.mounts.len(),
                _ => 0,
            };
            ensure(*mount < count, || "of one that is not made before".into())?;
            ensure(is_below(path), || "its path".into())
        }
        MountSource::Tmpfs { options, contents } => {
            self::options(options, &TMPFS_OPTIONS)?;
            let is_its =
                matches!(object(*contents, records)?, Thing::Tmpfs(t) if t.namespace == Some(n));
            ensure(is_its, || "its contents".into())
        }
        MountSource::MessageQueues { namespace } => {
            ensure(matches!(object(*namespace, records)?, Thing::Ipc(_)), || "no queues".into())
        }
        MountSource::Proc { options } => self::options(options, &PROC_OPTIONS),
    }
}

fn options(options: &[(String, String)], known: &[&str]) -> Found {
    let sound = |(name, value): &(String, String)| {
        known.contains(&name.as_str()) && value.len() < 64 && !value.contains('\0')
    };
    ensure(options.len() <= known.len() && options.iter().all(sound), || "its options".into())
}

fn is_absolute(path: &str) -> bool {
    path == "/" || path.strip_prefix('/').is_some_and(is_path)
}

fn is_below(path: &str) -> bool {
    path.is_empty() || is_path(path)
}

fn is_path(path: &str) -> bool {
    let part = |part: &str| !part.is_empty() && part != "." && part != "..";
    path.len() < TEXT_MAX && !path.contains('\0') && path.split('/').all(part)
}

#[cfg(test)]
mod tests {
    use super::super::records;
    use super::*;
    use crate::Tmpfs;
    use crate::sample::small;

    /// The first object is a file, the second the contents of a tmpfs, the third a namespace.
    fn namespaces() -> Records {
        let mount = |parent, place: &str, source| Mount {
            parent,
            place: place.into(),
            source,
            attributes: 2,
            shared: false,
            name: Some("none".into()),
        };
        let options = vec![("size".to_owned(), "1024k".to_owned())];
        let mounts = vec![
            mount(None, "", MountSource::Container { path: "/".into() }),
            mount(Some(0), "tmp", MountSource::Tmpfs { options, contents: 1 }),
            mount(Some(0), "proc", MountSource::Proc { options: Vec::new() }),
            mount(
                Some(2),
                "sys",
                MountSource::Mount { namespace: 2, mount: 2, path: "sys".into() },
            ),
        ];
        let mut records = small();
        let tmpfs = Tmpfs { target: "/tmp".into(), namespace: Some(2), entries: Vec::new() };
        records.objects.push(Thing::Tmpfs(tmpfs).into());
        records.objects.push(Thing::Mounts(Mounts { mounts, own: false }).into());
        records.processes[0].mounts = Some(2);
        records
    }

    #[test]
    fn invalid_mounts_are_refused() {
        assert!(records(&namespaces()).is_ok());
        type Case = (fn(&mut Vec<Mount>), &'static str);
        let cases: [Case; 17] = [
            (|m| m[1].name = Some("a".repeat(256)), "its name"),
            (|m| m[1].name = Some("a\0b".into()), "its name"),
            (|m| m.clear(), "no mounts"),
            (|m| m[0].parent = Some(0), "its place"),
            (|m| m[0].place = "a".into(), "its place"),
            (|m| m[1].parent = None, "its place"),
            (|m| m[1].parent = Some(1), "its place"),
            (|m| m[1].place = "../tmp".into(), "its place"),
            (|m| m[1].place = "/tmp".into(), "its place"),
            (|m| m[1].attributes = 0x10_0000, "its attributes"),
            (|m| m[1].attributes = 0x30, "its attributes"),
            (|m| m[0].source = MountSource::Container { path: "/a/../..".into() }, "its path"),
            (
                |m| {
                    let path = String::new();
                    m[2].source = MountSource::Mount { namespace: 2, mount: 2, path };
                },
                "made before",
            ),
            (
                |m| {
                    let path = String::new();
                    m[2].source = MountSource::Mount { namespace: 0, mount: 0, path };
                },
                "made before",
            ),
            (
                |m| {
                    let options = vec![("huge".to_owned(), "always".to_owned())];
                    m[2].source = MountSource::Proc { options };
                },
                "its options",
            ),
            (|m| m[2].source = m[1].source.clone(), "contents of another mount"),
            (|m| m[2].source = MountSource::MessageQueues { namespace: 0 }, "no queues"),
        ];
        for (change, text) in cases {
            let mut all = namespaces();
            let Thing::Mounts(found) = &mut all.objects[2].thing else {
                unreachable!("it is the third");
            };
            change(&mut found.mounts);
            let said = records(&all).unwrap_err().to_string();
            assert!(said.contains(text), "{text}: {said}");
        }
        let mut none = namespaces();
        none.processes[0].mounts = Some(1);
        assert!(records(&none).unwrap_err().to_string().contains("no mount namespace"));
        let mut own = namespaces();
        let Thing::Mounts(found) = &mut own.objects[2].thing else {
            unreachable!("it is the third");
        };
        found.own = true;
        // No process can be in the container's own by its record.
        assert!(records(&own).unwrap_err().to_string().contains("no mount namespace"));
        own.processes[0].mounts = None;
        assert!(records(&own).unwrap_err().to_string().contains("its place"));
        own.objects.push(own.objects[2].clone());
        assert!(records(&own).unwrap_err().to_string().contains("2 mount namespaces of"));
        let mut many = namespaces();
        let one = many.objects[2].clone();
        many.objects.extend(std::iter::repeat_n(one, NAMESPACES_MAX));
        assert!(records(&many).unwrap_err().to_string().contains("1025 mount namespaces"));
    }
}
