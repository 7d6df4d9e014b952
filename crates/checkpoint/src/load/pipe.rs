//! Pipes: both ends are created or opened, the content is written, and each end that was open gets
//! a file description.
//!
//! The kernel counts the pages of all pipes of a user, and gives a user with many of them small pipes
//! (pipe(7), `/proc/sys/fs/pipe-user-pages-soft`). The first process makes the pipes of all users, and a twin
//! makes them beside those of its container. So a pipe may be smaller than it was: the engine then enlarges it
//! ([`enlarge`]), and writes contents that did not fit.

use std::collections::HashMap;
use std::os::fd::OwnedFd;

use dormouse_kernel::{Errno, proc};
use dormouse_record::{DeletedFifo, Error, PAGE_BYTES, Pipe, PipeEnd, Result, Thing};
use rustix::fs::{Mode, OFlags};

use super::open;
use super::plan::Plan;
use super::restore::Restore;
use crate::inject::program::{Arg, Call, Cell, Sequence};

pub(super) fn make(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    index: usize,
    pipe: &Pipe,
) -> Result<()> {
    let (reader, writer) = match &pipe.path {
        None => anonymous(plan, sequence, what)?,
        // Opened for both, which never waits for the other end.
        Some(path) => {
            if let Some(fifo) = &pipe.deleted {
                open::check_parent(plan, sequence, what, path);
                name(plan, sequence, what, path, fifo);
            }
            let flags = (libc::O_RDWR | libc::O_NONBLOCK | libc::O_NOFOLLOW) as u32;
            let both = open::path(plan, sequence, &format!("{what} '{path}'"), path, flags)?;
            if pipe.deleted.is_some() {
                let text = plan.builder.text(path.as_bytes());
                let args = [Arg::from(libc::AT_FDCWD), text.into(), Arg::Number(0)];
                sequence.call(what, Call::new(libc::SYS_unlinkat, args));
            }
            (both, both)
        }
    };
    let size = [writer.into(), Arg::from(libc::F_SETPIPE_SZ), pipe.capacity_bytes.into()];
    let capacity = plan.cell();
    sequence.call_into(what, capacity, Call::new(libc::SYS_fcntl, size).lenient());
    plan.pipes.push((index, capacity));
    fill(plan, sequence, what, writer, pipe);
    let mut taken = [false; 2];
    for (n, end) in ends(plan, index) {
        let mine = if end.writes { writer } else { reader };
        let taken = &mut taken[usize::from(end.writes)];
        // An end of a fifo, and one that was opened again through /proc/self/fd, is a separate file
        // description.
        let is_first = !std::mem::replace(taken, true) && pipe.path.is_none();
        let own = match is_first {
            true => mine,
            false => open::again(plan, sequence, what, mine, end.flags | libc::O_NONBLOCK as u32)?,
        };
        let cell = plan.lift_object(sequence, (what, n), own);
        open::set_flags(sequence, what, cell, end.flags);
        plan.cells[n] = Some(cell);
    }
    Ok(())
}

/// The ends of a pipe, with the numbers of their objects. Ends that pipe(2) has made come first: open(2)
/// adds O_LARGEFILE, and pipe(2) does not.
fn ends<'r>(plan: &Plan<'r>, index: usize) -> Vec<(usize, &'r PipeEnd)> {
    let objects = plan.records.objects.iter().enumerate();
    let ends = objects.filter_map(|(n, object)| match &object.thing {
        Thing::PipeEnd(end) if end.pipe == index => Some((n, end)),
        _ => None,
    });
    let mut ends: Vec<_> = ends.collect();
    ends.sort_by_key(|(_, end)| end.flags & open::O_LARGEFILE as u32);
    ends
}

/// Creates a deleted fifo, with a temporary name.
fn name(plan: &mut Plan<'_>, sequence: &mut Sequence, what: &str, path: &str, fifo: &DeletedFifo) {
    let (here, text) = (Arg::from(libc::AT_FDCWD), Arg::from(plan.builder.text(path.as_bytes())));
    let made = [here, text, Arg::from(libc::S_IFIFO | 0o600), Arg::Number(0)];
    sequence.call(what, Call::new(libc::SYS_mknodat, made));
    let nofollow = Arg::from(libc::AT_SYMLINK_NOFOLLOW);
    let owner = [here, text, fifo.uid.into(), fifo.gid.into(), nofollow];
    sequence.call(what, Call::new(libc::SYS_fchownat, owner));
    sequence.call(what, Call::new(libc::SYS_fchmodat, [here, text, fifo.mode.into()]));
}

/// Reader and writer of a new pipe.
fn anonymous(plan: &mut Plan<'_>, sequence: &mut Sequence, what: &str) -> Result<(Cell, Cell)> {
    // pipe2 writes two numbers next to each other: the cells are adjacent.
    let (reader, writer) = (plan.cell(), plan.cell());
    let pair = Arg::At(reader);
    let flags = Arg::from(libc::O_CLOEXEC | libc::O_NONBLOCK);
    sequence.call(what, Call::new(libc::SYS_pipe2, [pair, flags]));
    Ok((reader, writer))
}

/// Buffers of the smallest pipe that the kernel makes, of a page each.
const BUFFERS_MIN: u64 = 2;

/// Whether the content may not fit into the smallest pipe. Each packet takes a buffer.
fn is_large(pipe: &Pipe) -> bool {
    pipe.content.0.len() as u64 > BUFFERS_MIN * PAGE_BYTES
        || pipe.packets.len() as u64 > BUFFERS_MIN
}

/// The content in the pieces in which it is written: one packet at a time if there are packets.
fn pieces(pipe: &Pipe) -> impl Iterator<Item = &[u8]> {
    let whole = std::iter::once(pipe.content.0.len()).filter(|_| pipe.packets.is_empty());
    let mut rest = &pipe.content.0[..];
    let lengths = pipe.packets.iter().map(|n| *n as usize).chain(whole);
    lengths.filter(|n| *n != 0).map(move |length| {
        let (now, later) = rest.split_at(rest.len().min(length));
        rest = later;
        now
    })
}

/// Writes the content.
fn fill(plan: &mut Plan<'_>, sequence: &mut Sequence, what: &str, writer: Cell, pipe: &Pipe) {
    if !pipe.packets.is_empty() {
        open::set_flags(sequence, what, writer, (libc::O_DIRECT | libc::O_NONBLOCK) as u32);
    }
    for piece in pieces(pipe) {
        let (at, length) = (plan.builder.data(piece), piece.len() as u64);
        let call = Call::new(libc::SYS_write, [writer.into(), at.into(), length.into()]);
        // What a pipe without its size does not take, the engine writes.
        sequence.call(what, if is_large(pipe) { call.lenient() } else { call.returns(length) });
    }
}

/// Gives pipes the size that the kernel has refused to the first process, and the contents that they lack.
/// ORDER: the first process has all objects, and no other task reads or writes.
pub(super) fn enlarge(pid: u32, restore: &Restore) -> Result<()> {
    let mut ends = HashMap::new();
    for (n, object) in restore.records.objects.iter().enumerate() {
        if let Thing::PipeEnd(end) = &object.thing {
            ends.entry(end.pipe).or_insert(n);
        }
    }
    for (index, capacity) in &restore.pipes {
        let Some(Thing::Pipe(pipe)) = restore.records.objects.get(*index).map(|it| &it.thing)
        else {
            continue;
        };
        let made = restore.program.value(*capacity).map_err(Error::call("read a number"))?;
        let has_size = made.cast_unsigned() == pipe.capacity_bytes;
        let Some(end) = ends.get(index).filter(|_| !has_size || is_large(pipe)) else { continue };
        let number = restore.number(*end).map_err(Error::of("find a pipe", pid))?;
        let step = complete(&format!("/proc/{pid}/fd/{number}"), pipe);
        step.map_err(|(call, source)| match source {
            Errno::PERM => Error::Elsewhere(format!(
                "object {index} (pipe): its user may have no more pipes of {} bytes: raise \
                 /proc/sys/fs/pipe-user-pages-soft",
                pipe.capacity_bytes
            )),
            source => {
                let what = format!("object {index} (pipe)");
                Error::Restore { what, call: call.to_owned(), source }
            }
        })?;
    }
    Ok(())
}

/// Gives a pipe its size and its contents; returns the call that failed.
fn complete(place: &str, pipe: &Pipe) -> std::result::Result<(), (&'static str, Errno)> {
    let failed = |call| move |e| (call, e);
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let both = rustix::fs::open(place, flags, Mode::empty()).map_err(failed("open"))?;
    let capacity = pipe.capacity_bytes as usize;
    let has = rustix::pipe::fcntl_getpipe_size(&both).map_err(failed("fcntl"))?;
    if has != capacity {
        let most = proc::whole_text("/proc/sys/fs/pipe-max-size");
        let most = most.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0);
        // LIMIT: no more than a process without privileges may have.
        if capacity > most {
            return Err(("fcntl", Errno::PERM));
        }
        rustix::pipe::fcntl_setpipe_size(&both, capacity).map_err(failed("fcntl"))?;
    }
    let waiting = rustix::io::ioctl_fionread(&both).map_err(failed("ioctl"))?;
    if waiting == pipe.content.0.len() as u64 { Ok(()) } else { refill(&both, pipe) }
}

/// Replaces the contents.
fn refill(both: &OwnedFd, pipe: &Pipe) -> std::result::Result<(), (&'static str, Errno)> {
    let mut buffer = vec![0; PAGE_BYTES as usize];
    loop {
        match rustix::io::read(both, &mut buffer[..]) {
            Ok(0) | Err(Errno::AGAIN) => break,
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(("read", e)),
        }
    }
    if !pipe.packets.is_empty() {
        let packets = OFlags::DIRECT | OFlags::NONBLOCK;
        rustix::fs::fcntl_setfl(both, packets).map_err(|e| ("fcntl", e))?;
    }
    for piece in pieces(pipe) {
        match rustix::io::write(both, piece) {
            Ok(n) if n == piece.len() => {}
            Ok(_) => return Err(("write", Errno::AGAIN)),
            Err(e) => return Err(("write", e)),
        }
    }
    Ok(())
}
