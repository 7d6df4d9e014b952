//! Instances of a scratch host with a registry of its own. A claim, a return of blocks and a sweep are also ended
//! before each of their changes, as SIGKILL would. The next operation of another instance must find consistent
//! files.

use std::cell::Cell;
use std::os::unix::fs::PermissionsExt;

use dormouse_kernel::process::{CloneFlags, unshare};
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use tempfile::TempDir;

use super::*;

thread_local! {
    /// Changes that this thread still makes before it is killed, and whether it was.
    static LEFT: Cell<(Option<usize>, bool)> = const { Cell::new((None, false)) };
}

pub(super) fn step() -> Result<()> {
    LEFT.with(|left| match left.get() {
        (Some(0), _) => {
            left.set((Some(0), true));
            Err(Error::Missing("killed".into()))
        }
        (Some(n), _) => {
            left.set((Some(n - 1), false));
            Ok(())
        }
        (None, _) => Ok(()),
    })
}

/// Ends an operation before its change `number` (from 0). Returns whether there was such a change.
pub(crate) fn killed_at<T>(number: usize, operation: impl FnOnce() -> T) -> bool {
    LEFT.with(|left| left.set((Some(number), false)));
    drop(operation());
    LEFT.with(|left| left.replace((None, false))).1
}

/// A host with a registry and some instances.
struct Scratch(TempDir);

impl Scratch {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn registry(&self) -> PathBuf {
        self.0.path().join("registry")
    }

    fn instance(&self, name: &str) -> HostIds {
        self.instance_in(&self.0.path().join(name))
    }

    fn instance_in(&self, lib: &Path) -> HostIds {
        fs::create_dir_all(lib.join("ids")).unwrap();
        HostIds::new(&lib.join("ids"), &self.registry())
    }

    fn table(&self) -> Table {
        self.instance("reader").open_table().unwrap().1
    }

    fn owned(&self, ids: &HostIds) -> Blocks {
        ids.read_id().unwrap().map(|id| self.table().of(id)).unwrap_or_default()
    }

    /// Has an instance claim all blocks but these.
    fn fill(&self, name: &str, but: &[u32]) -> HostIds {
        let ids = self.instance(name);
        claim(&ids, &[]).unwrap();
        let id = ids.read_id().unwrap().unwrap();
        let (file, mut table) = ids.open_table().unwrap();
        let all: Vec<u32> =
            (0..BLOCKS).filter(|b| !but.contains(b) && table.owner(*b).is_none()).collect();
        all.iter().for_each(|block| table.set(*block, Some(id)));
        ids.write(&file, &table, all.into_iter()).unwrap();
        ids
    }
}

/// Claims the lowest free block.
fn first_free(_: &Blocks, free: &Blocks) -> Need {
    free.iter().next().map_or(Need::NoneSuits, |block| Need::Block { block, is_preferred: true })
}

/// Claims one more block, as [`crate::slot`] does.
fn claim(ids: &HostIds, taken: &[u32]) -> Result<Blocks> {
    let taken: Blocks = taken.iter().copied().collect();
    match ids.claim(&taken, false, first_free)? {
        Claim::Has(own) => Ok(own),
        Claim::Scarce => {
            ids.sweep()?;
            match ids.claim(&taken, true, first_free)? {
                Claim::Has(own) => Ok(own),
                Claim::Scarce => panic!("swept"),
            }
        }
    }
}

fn blocks(all: &[u32]) -> Blocks {
    all.iter().copied().collect()
}

/// Copies the files of an instance, as cp(1) does.
fn copy(from: &HostIds, to: &HostIds) {
    for entry in fs::read_dir(&from.dir).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, to.dir.join(path.file_name().unwrap())).unwrap();
    }
}

/// Runs in a mount namespace of its own.
fn with_mounts(test: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            unshare(CloneFlags::NEWNS | CloneFlags::FS).unwrap();
            let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
            rustix::mount::mount_change("/", private).unwrap();
            test();
        });
        run.join().unwrap();
    });
}

fn has_handles(dir: &Path) -> bool {
    let is_traceable = Place::of(dir).unwrap().0.is_traceable();
    if !is_traceable {
        eprintln!("not run: the file system of '{}' has no handles", dir.display());
    }
    is_traceable
}

#[test]
fn instances_have_different_blocks_and_know_them_without_the_registry() {
    let scratch = Scratch::new();
    let (a, b) = (scratch.instance("a"), scratch.instance("b"));
    assert_eq!(a.own(), None);
    assert_eq!(claim(&a, &[]).unwrap(), blocks(&[0]));
    assert_eq!(claim(&b, &[]).unwrap(), blocks(&[1]));
    assert_eq!(claim(&a, &[0]).unwrap(), blocks(&[0, 2]));
    // Containers of earlier programs: a block that is free, and one that another instance has.
    assert_eq!(claim(&b, &[2, 7]).unwrap(), blocks(&[1, 3, 7]));
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
    assert_eq!(mode(&scratch.registry()), 0o700);
    assert!([a.table(), a.instance(), a.cache()].iter().all(|path| mode(path) == 0o600));
}

/// LIB/ids/blocks alone is no evidence.
#[test]
fn block_is_used_only_while_the_registry_has_it() {
    let scratch = Scratch::new();
    let (a, b) = (scratch.instance("a"), scratch.instance("b"));
    (0..3).for_each(|_| {
        claim(&a, &[]).unwrap();
    });
    assert!(a.has(0) && a.has(2) && !a.has(3) && !b.has(0));
    // A file of a backup, with a block that was given back and claimed by another instance.
    let old = fs::read(a.cache()).unwrap();
    a.give_back(&blocks(&[0, 1, 2]), &blocks(&[0]));
    claim(&b, &[]).unwrap();
    fs::write(a.cache(), old).unwrap();
    assert_eq!(a.own(), Some(blocks(&[0, 1, 2])));
    assert!(a.has(0) && !a.has(2) && b.has(2));
    // An operator removes the record of an instance that lives.
    let id = a.read_id().unwrap().unwrap();
    fs::rename(a.record(id), scratch.0.path().join("kept")).unwrap();
    assert!(!a.has(0));
    fs::rename(scratch.0.path().join("kept"), a.record(id)).unwrap();
    assert!(a.has(0));
    // Another boot, and a lost registry.
    let text = fs::read_to_string(a.cache()).unwrap();
    fs::write(a.cache(), text.replace(&boot().unwrap(), "an earlier one")).unwrap();
    assert_eq!(a.own(), None);
    fs::remove_dir_all(scratch.registry()).unwrap();
    assert!(!a.has(0) && !b.has(2));
}

/// A killed claim has entries that LIB/ids/blocks lacks.
#[test]
fn instance_with_taken_slots_elsewhere_does_not_leave() {
    let scratch = Scratch::new();
    let a = scratch.instance("a");
    claim(&a, &[]).unwrap();
    let old = fs::read(a.cache()).unwrap();
    claim(&a, &[5]).unwrap();
    fs::write(a.cache(), old).unwrap();
    a.leave(&blocks(&[5]));
    assert!(scratch.owned(&a).contains(5) && a.has(5));
}

/// Neither the removal of a container nor the first command after a boot waits for another instance.
#[test]
fn locked_registry_stops_no_return_of_blocks() {
    let scratch = Scratch::new();
    let a = scratch.instance("a");
    let all = blocks(&[0, 1, 2]);
    (0..3).for_each(|_| {
        claim(&a, &[]).unwrap();
    });
    let lock = a.lock().unwrap();
    a.give_back(&all, &blocks(&[0]));
    a.leave(&blocks(&[]));
    a.recover(&blocks(&[]));
    assert_eq!((a.own(), scratch.owned(&a)), (Some(all.clone()), all.clone()));
    drop(lock);
    a.give_back(&all, &blocks(&[0]));
    assert_eq!(scratch.owned(&a), blocks(&[0, 1]));
}

#[test]
fn idle_block_is_given_back_but_for_one() {
    let scratch = Scratch::new();
    if !has_handles(scratch.0.path()) {
        return;
    }
    let a = scratch.instance("a");
    (0..3).for_each(|_| {
        claim(&a, &[]).unwrap();
    });
    a.give_back(&blocks(&[0, 1, 2]), &blocks(&[1]));
    assert_eq!(a.own(), Some(blocks(&[0, 1])));
    assert_eq!(scratch.owned(&a), blocks(&[0, 1]));
    a.give_back(&blocks(&[0, 1]), &blocks(&[]));
    assert_eq!(scratch.owned(&a), blocks(&[0]));
    a.leave(&blocks(&[0]));
    assert_eq!(scratch.owned(&a), blocks(&[0]));
    a.leave(&blocks(&[]));
    assert_eq!((scratch.owned(&a), a.own()), (blocks(&[]), None));
    assert_eq!(fs::read_dir(a.records()).unwrap().count(), 0);
    // After a boot.
    disk::remove(&a.cache()).unwrap();
    a.recover(&blocks(&[5]));
    assert_eq!(scratch.owned(&a), blocks(&[5]));
    assert_eq!(a.own(), Some(blocks(&[5])));
}

#[test]
fn instance_without_containers_needs_no_registry_after_a_boot() {
    let scratch = Scratch::new();
    let a = scratch.instance("a");
    disk::remove(&a.cache()).unwrap();
    a.recover(&blocks(&[]));
    assert!(!scratch.registry().exists() && !a.instance().exists());
}

#[test]
fn killed_claim_loses_no_block_and_shares_none() {
    let mut steps = 0;
    loop {
        let scratch = Scratch::new();
        let (a, b) = (scratch.instance("a"), scratch.instance("b"));
        if !killed_at(steps, || claim(&a, &[])) {
            break;
        }
        let of_b = claim(&b, &[]).unwrap();
        // A new block only where the killed claim has none.
        let search = |own: &Blocks, free: &Blocks| {
            if own.len() > 0 { Need::Nothing } else { first_free(own, free) }
        };
        let Ok(Claim::Has(of_a)) = a.claim(&blocks(&[]), false, search) else { panic!("{steps}") };
        assert_eq!((of_a.len(), of_b.len()), (1, 1), "{steps}");
        assert_eq!(of_a.without(&of_b), of_a, "{steps}");
        assert_eq!(BLOCKS - scratch.table().free().len(), 2, "{steps}");
        assert_eq!(a.own(), Some(of_a), "{steps}");
        a.sweep().unwrap();
        assert_eq!(fs::read_dir(a.records()).unwrap().count(), 2, "{steps}");
        steps += 1;
    }
    assert_eq!(steps, 5, "id, record, its name, entry, LIB/ids/blocks");
}

#[test]
fn killed_return_of_blocks_loses_none_and_shares_none() {
    let mut steps = 0;
    loop {
        let scratch = Scratch::new();
        if !has_handles(scratch.0.path()) {
            return;
        }
        let (a, b) = (scratch.instance("a"), scratch.instance("b"));
        (0..3).for_each(|_| {
            claim(&a, &[]).unwrap();
        });
        if !killed_at(steps, || a.give_back(&blocks(&[0, 1, 2]), &blocks(&[]))) {
            break;
        }
        let of_b = claim(&b, &[]).unwrap();
        let cached = a.own().unwrap();
        assert_eq!(cached.without(&of_b), cached, "{steps}");
        assert_eq!(cached.without(&scratch.owned(&a)), blocks(&[]), "{steps}");
        // The next claim finds them.
        let Ok(Claim::Has(own)) = a.claim(&blocks(&[]), false, |_, _| Need::Nothing) else {
            panic!("{steps}")
        };
        assert_eq!(own, scratch.owned(&a), "{steps}");
        a.give_back(&own, &blocks(&[]));
        assert_eq!(scratch.owned(&a), blocks(&[0]), "{steps}");
        steps += 1;
    }
    assert_eq!(steps, 4, "begin, LIB/ids/blocks, two entries");
}

#[test]
fn copy_of_a_root_has_blocks_of_its_own() {
    let scratch = Scratch::new();
    let (a, b) = (scratch.instance("a"), scratch.instance("b"));
    claim(&a, &[]).unwrap();
    copy(&a, &b);
    assert_eq!(b.own(), None, "the copied file is not valid here");
    assert_eq!(claim(&b, &[0]).unwrap(), blocks(&[1]));
    assert_ne!(a.read_id().unwrap(), b.read_id().unwrap());
    assert_eq!(claim(&a, &[0]).unwrap(), blocks(&[0, 2]));
    assert_eq!(scratch.owned(&b), blocks(&[1]));
}

#[test]
fn moved_root_keeps_its_blocks_and_its_record_has_the_new_path() {
    let scratch = Scratch::new();
    let a = scratch.instance("a");
    claim(&a, &[]).unwrap();
    let id = a.read_id().unwrap().unwrap();
    fs::rename(scratch.0.path().join("a"), scratch.0.path().join("moved")).unwrap();
    let moved = scratch.instance("moved");
    assert_eq!(moved.own(), Some(blocks(&[0])));
    moved.sweep().unwrap();
    assert_eq!(claim(&moved, &[0]).unwrap(), blocks(&[0, 1]));
    assert_eq!(moved.read_id().unwrap(), Some(id));
    assert!(moved.read_record(id).unwrap().unwrap().path.ends_with("/moved"));
}

#[test]
fn root_moved_as_a_copy_keeps_its_blocks() {
    let scratch = Scratch::new();
    if !has_handles(scratch.0.path()) {
        return;
    }
    let (a, b) = (scratch.instance("a"), scratch.instance("b"));
    claim(&a, &[]).unwrap();
    copy(&a, &b);
    fs::remove_dir_all(scratch.0.path().join("a")).unwrap();
    assert_eq!(claim(&b, &[0]).unwrap(), blocks(&[0, 1]));
}

#[test]
fn root_blocks_of_a_removed_instance_are_used_again() {
    let scratch = Scratch::new();
    if !has_handles(scratch.0.path()) {
        return;
    }
    scratch.fill("large", &[9, 10]);
    let (removed, next) = (scratch.instance("removed"), scratch.instance("next"));
    claim(&removed, &[]).unwrap();
    claim(&next, &[]).unwrap();
    // Another directory at the same path is another instance.
    fs::remove_dir_all(scratch.0.path().join("removed")).unwrap();
    let again = scratch.instance("removed");
    assert_eq!(claim(&again, &[]).unwrap(), blocks(&[9]));
    assert_eq!(scratch.owned(&next), blocks(&[10]));
    assert_eq!(fs::read_dir(next.records()).unwrap().count(), 3);
}

#[test]
fn root_killed_sweep_is_completed_by_the_next() {
    for steps in 0..4 {
        let scratch = Scratch::new();
        if !has_handles(scratch.0.path()) {
            return;
        }
        let (removed, next) = (scratch.instance("removed"), scratch.instance("next"));
        (0..2).for_each(|_| {
            claim(&removed, &[]).unwrap();
        });
        claim(&next, &[]).unwrap();
        fs::remove_dir_all(scratch.0.path().join("removed")).unwrap();
        fs::write(next.records().join("of a killed claim.new"), b"{").unwrap();
        assert_eq!(killed_at(steps, || next.sweep()), steps < 3);
        next.sweep().unwrap();
        assert_eq!(scratch.table().claimed(), 1);
        assert_eq!(fs::read_dir(next.records()).unwrap().count(), 1);
    }
}

#[test]
fn root_instance_on_an_absent_file_system_keeps_its_blocks_until_it_is_lost() {
    with_mounts(|| {
        let scratch = Scratch::new();
        let point = scratch.0.path().join("point");
        let next = scratch.instance("next");
        fs::create_dir(&point).unwrap();
        let mount = || {
            rustix::mount::mount("none", &point, "tmpfs", MountFlags::empty(), None).unwrap();
        };
        mount();
        let a = scratch.instance_in(&point.join("lib"));
        claim(&a, &[]).unwrap();
        let id = a.read_id().unwrap().unwrap();
        next.claim(&blocks(&[]), false, |_, _| Need::Nothing).unwrap();
        next.sweep().unwrap();
        assert_eq!(scratch.table().of(id), blocks(&[0]));
        rustix::mount::unmount(&point, UnmountFlags::DETACH).unwrap();
        next.sweep().unwrap();
        assert_eq!(scratch.table().of(id), blocks(&[0]), "it may be mounted elsewhere");
        mount(); // another file system, at the same path
        next.sweep().unwrap();
        assert_eq!(scratch.table().of(id), blocks(&[0]));
        // After a boot no tmpfs of the last one exists.
        let path = next.record(id);
        let record = next.read_record(id).unwrap().unwrap();
        disk::write_json(&path, &Record { boot: "an earlier one".into(), ..record }, Durable::No)
            .unwrap();
        next.sweep().unwrap();
        assert_eq!(scratch.table().of(id), blocks(&[]));
        assert!(!path.exists());
        rustix::mount::unmount(&point, UnmountFlags::DETACH).unwrap();
    });
}

#[test]
fn root_idle_instance_that_cannot_be_traced_leaves_nothing() {
    with_mounts(|| {
        let scratch = Scratch::new();
        let dir = |name: &str| {
            let path = scratch.0.path().join(name);
            fs::create_dir(&path).unwrap();
            path.to_str().unwrap().to_owned()
        };
        let (lower, upper, work, point) = (dir("lower"), dir("upper"), dir("work"), dir("point"));
        let options = format!("lowerdir={lower},upperdir={upper},workdir={work}");
        let options = std::ffi::CString::new(options).unwrap();
        let mounted = rustix::mount::mount(
            "none",
            &point,
            "overlay",
            MountFlags::empty(),
            Some(options.as_c_str()),
        );
        if let Err(e) = mounted {
            return eprintln!("not run: no overlay on the file system of '{point}': {e}");
        }
        let a = scratch.instance_in(&Path::new(&point).join("lib"));
        assert!(!Place::of(&a.dir).unwrap().0.is_traceable());
        claim(&a, &[]).unwrap();
        claim(&a, &[0]).unwrap();
        a.give_back(&blocks(&[0, 1]), &blocks(&[1]));
        assert_eq!(scratch.owned(&a), blocks(&[0, 1]));
        a.sweep().unwrap();
        assert_eq!(scratch.owned(&a), blocks(&[0, 1]));
        a.give_back(&blocks(&[0, 1]), &blocks(&[]));
        assert_eq!(scratch.owned(&a), blocks(&[]));
        assert_eq!(fs::read_dir(a.records()).unwrap().count(), 0);
        assert_eq!(claim(&a, &[]).unwrap(), blocks(&[0]));
        rustix::mount::unmount(point, UnmountFlags::DETACH).unwrap();
    });
}

#[test]
fn record_that_an_operator_removed_frees_its_blocks() {
    let scratch = Scratch::new();
    let large = scratch.fill("large", &[]);
    let next = scratch.instance("next");
    let e = claim(&next, &[]).unwrap_err().to_string();
    let lib = scratch.0.path().join("large");
    assert!(e.contains(&format!("2048 by '{}'", lib.display())), "{e}");
    assert!(e.contains("2048 of 2048 blocks") && !e.contains('\n'), "{e}");
    assert_eq!(scratch.table().of(large.read_id().unwrap().unwrap()).len(), BLOCKS);
    fs::remove_file(large.record(large.read_id().unwrap().unwrap())).unwrap();
    assert_eq!(claim(&next, &[]).unwrap(), blocks(&[0]));
}

#[test]
fn damage_is_refused_with_file_and_remedy() {
    let scratch = Scratch::new();
    let (a, b) = (scratch.instance("a"), scratch.instance("b"));
    claim(&a, &[]).unwrap();
    claim(&b, &[]).unwrap();
    let refused = |ids: &HostIds, path: &Path| {
        let e = claim(ids, &[]).unwrap_err();
        assert!(matches!(e, Error::HostIds { .. }), "{e}");
        assert!(e.to_string().starts_with(&format!("'{}' is damaged", path.display())), "{e}");
    };
    let id = a.read_id().unwrap().unwrap();
    for (path, refuses) in [(a.table(), &b), (a.record(id), &a), (a.instance(), &a)] {
        let whole = fs::read(&path).unwrap();
        let half = &whole[..whole.len() / 2];
        fs::write(&path, half).unwrap();
        refused(refuses, &path);
        fs::write(&path, &whole).unwrap();
        claim(refuses, &[]).unwrap();
    }
    // A changed entry, also one that was moved to another block, and a lost table.
    let whole = fs::read(a.table()).unwrap();
    for (at, from) in [(3, 4), (ENTRY_BYTES * 100, 0)] {
        let mut changed = whole.clone();
        changed.copy_within(from..from + ENTRY_BYTES, at);
        fs::write(a.table(), &changed).unwrap();
        refused(&b, &a.table());
    }
    fs::remove_file(a.table()).unwrap();
    refused(&b, &b.table());
    disk::remove(&b.cache()).unwrap();
    b.recover(&blocks(&[1])); // other commands go on
    fs::write(a.table(), &whole).unwrap();
    // A damaged record of another instance keeps its blocks and stops no other.
    fs::write(a.record(id), b"{").unwrap();
    b.sweep().unwrap();
    assert!(scratch.owned(&a).contains(0));
    claim(&b, &[]).unwrap();
    fs::write(b.cache(), b"{").unwrap();
    assert_eq!(b.own(), None);
}

#[test]
fn registry_that_others_could_change_is_refused() {
    let scratch = Scratch::new();
    let a = scratch.instance("a");
    let refused = || {
        let e = claim(&a, &[]).unwrap_err().to_string();
        assert!(
            e.starts_with(&format!("'{}' keeps the host ids", scratch.registry().display())),
            "{e}"
        );
    };
    let elsewhere = scratch.0.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, scratch.registry()).unwrap();
    refused();
    fs::remove_file(scratch.registry()).unwrap();
    fs::rename(&elsewhere, scratch.registry()).unwrap();
    fs::set_permissions(scratch.registry(), fs::Permissions::from_mode(0o770)).unwrap();
    refused();
    fs::set_permissions(scratch.registry(), fs::Permissions::from_mode(0o700)).unwrap();
    claim(&a, &[]).unwrap();
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(scratch.registry(), Some(1), None).unwrap();
        refused();
    }
}

#[test]
fn mount_points_behind_foreign_file_systems_are_left_out() {
    let text = b"1 0 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n\
        2 1 0:5 / /net rw - nfs4 host:/ rw\n\
        3 2 8:2 / /net/disk rw - ext4 /dev/sdb1 rw\n\
        4 1 0:6 / /a\\040b\\134 rw shared:2 master:1 - tmpfs none rw\n";
    let rows: Vec<Row> = text.split(|b| *b == b'\n').filter_map(Row::parse).collect();
    let all: HashMap<&[u8], &Row> = rows.iter().map(|row| (row.id, row)).collect();
    let reachable: Vec<bool> = rows.iter().map(|row| row.is_reachable(&all)).collect();
    assert_eq!(reachable, [true, false, false, true]);
    assert_eq!(rows[3].point, Path::new("/a b\\"));
    assert_eq!(rows[3].kind, b"tmpfs");
}
