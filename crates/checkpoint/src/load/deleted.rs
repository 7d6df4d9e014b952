//! Files and directories without a name: created where they were, a file with O_TMPFILE, a
//! directory under a temporary name; then opened once for each file description.

use dormouse_record::{Deleted, File, PAGE_BYTES, Result, Run, Thing};

use super::plan::Plan;
use super::{file, open};
use crate::inject::program::{Arg, Call, Cell, Sequence};

/// Bytes that one sendfile(2) copies at most: the kernel's limit is just below 2 GiB.
const COPY_BYTES_MAX: u64 = 1 << 30;

pub(super) fn make(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    index: usize,
    deleted: &Deleted,
) -> Result<()> {
    let what = format!("{what}, once in '{}'", deleted.place);
    let is_directory = deleted.mode & libc::S_IFMT == libc::S_IFDIR;
    let first = unnamed(plan, index);
    let made = if is_directory {
        directory(plan, sequence, &what, index, deleted)?
    } else {
        regular(plan, sequence, &what, deleted, first.map_or(0, |(_, open)| open.flags))
    };
    let owner = [made.into(), deleted.uid.into(), deleted.gid.into()];
    sequence.call(what.clone(), Call::new(libc::SYS_fchown, owner));
    let mode = [made.into(), Arg::from(deleted.mode & 0o7777)];
    sequence.call(what.clone(), Call::new(libc::SYS_fchmod, mode));
    let second = 1_000_000_000;
    let (seconds, nanoseconds) =
        (deleted.modified_ns.div_euclid(second), deleted.modified_ns.rem_euclid(second));
    let times = [0, libc::UTIME_OMIT as u64, seconds as u64, nanoseconds as u64];
    let times = plan.builder.numbers(&times);
    let args = [made.into(), Arg::Number(0), times.into(), Arg::Number(0)];
    sequence.call(what.clone(), Call::new(libc::SYS_utimensat, args));
    open_all(plan, sequence, &what, index, made)?;
    if let Some((n, open)) = first {
        // Filling the file has moved its offset.
        let args = [made.into(), Arg::Number(open.offset), Arg::from(libc::SEEK_SET)];
        sequence.call(&*what, Call::new(libc::SYS_lseek, args).returns(open.offset));
        file::settle(plan, sequence, &what, made, open);
        open::set_flags(sequence, &what, made, open.flags);
        plan.cells[n] = Some(plan.lift(sequence, &what, made));
    }
    Ok(())
}

/// The file description that was made with the file (O_TMPFILE), which its flags show for ever.
fn unnamed<'r>(plan: &Plan<'r>, index: usize) -> Option<(usize, &'r File)> {
    const TMPFILE: i32 = libc::O_TMPFILE & !libc::O_DIRECTORY;
    let mut objects = plan.records.objects.iter().enumerate();
    objects.find_map(|(n, object)| match &object.thing {
        Thing::File(open) if open.deleted == Some(index) => {
            (open.flags & TMPFILE as u32 != 0).then_some((n, open))
        }
        _ => None,
    })
}

/// Opens a file without a name once for each file description.
pub(super) fn open_all(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    index: usize,
    made: Cell,
) -> Result<()> {
    let records = plan.records;
    for (n, object) in records.objects.iter().enumerate() {
        let Thing::File(open) = &object.thing else { continue };
        let is_first = unnamed(plan, index).is_some_and(|(first, _)| first == n);
        if open.deleted == Some(index) && !is_first {
            let cell = open::again(plan, sequence, what, made, open.flags)?;
            file::settle(plan, sequence, what, cell, open);
            plan.cells[n] = Some(plan.lift(sequence, what, cell));
        }
    }
    Ok(())
}

/// Writes contents, and leaves holes where there are none.
pub(super) fn fill(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    cell: Cell,
    bytes: u64,
    runs: &[Run],
) {
    for run in runs {
        let (mut at, mut left) = (run.address, run.pages * PAGE_BYTES);
        let mut from = run.first * PAGE_BYTES;
        while left > 0 {
            let (pages, place, room) = plan.contents_at(from);
            let now = left.min(COPY_BYTES_MAX).min(room);
            let seek = [cell.into(), Arg::Number(at), Arg::from(libc::SEEK_SET)];
            sequence.call(what, Call::new(libc::SYS_lseek, seek).returns(at));
            let offset = plan.builder.writable_numbers(&[place]);
            let args = [cell.into(), pages.into(), offset.into(), now.into()];
            sequence.call(what, Call::new(libc::SYS_sendfile, args).returns(now));
            at += now;
            from += now;
            left -= now;
        }
    }
    let length = [cell.into(), bytes.into()];
    sequence.call(what, Call::new(libc::SYS_ftruncate, length));
}

fn regular(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    deleted: &Deleted,
    flags: u32,
) -> Cell {
    // Of the flags of its first file description those that cannot be set later.
    const FIRST: i32 = libc::O_ACCMODE | libc::O_SYNC | libc::O_DSYNC;
    let access = if flags == 0 { libc::O_RDWR as u32 } else { flags & FIRST as u32 };
    let flags = (libc::O_TMPFILE | libc::O_CLOEXEC) as u32 | access;
    let cell = open::path_with(plan, sequence, what, &deleted.place, (flags, 0o600));
    fill(plan, sequence, what, cell, deleted.bytes, &deleted.runs);
    for (name, value) in &deleted.attributes {
        let (name, length) = (plan.builder.text(name.as_bytes()), value.0.len() as u64);
        let at = plan.builder.data(&value.0);
        let args = [cell.into(), name.into(), at.into(), length.into(), Arg::Number(0)];
        sequence.call(what, Call::new(libc::SYS_fsetxattr, args));
    }
    cell
}

fn directory(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    index: usize,
    deleted: &Deleted,
) -> Result<Cell> {
    open::check_path(plan, sequence, what, &deleted.place);
    let cell = plan.cell();
    let name = format!("{}/.deleted-{index}", deleted.place.trim_end_matches('/'));
    let name = plan.builder.text(name.as_bytes());
    let at = Arg::from(libc::AT_FDCWD);
    let remove = Call::new(libc::SYS_unlinkat, [at, name.into(), Arg::from(libc::AT_REMOVEDIR)]);
    // Left behind by a restore that was killed here.
    sequence.call(what, remove.clone().lenient());
    let make = [at, name.into(), Arg::Number(0o700)];
    sequence.call(what, Call::new(libc::SYS_mkdirat, make));
    let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    let open = [at, name.into(), Arg::from(flags), Arg::Number(0)];
    sequence.call_into(what, cell, Call::new(libc::SYS_openat, open));
    sequence.call(what, remove);
    Ok(cell)
}
