//! Pipes: both ends are created or opened, the content is written, and each end that was open gets
//! a file description.

use dormouse_record::{DeletedFifo, Pipe, PipeEnd, Result, Thing};

use super::open;
use super::plan::Plan;
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
    sequence.call(what, Call::new(libc::SYS_fcntl, size));
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
        let cell = plan.lift(sequence, what, own);
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

/// Writes the content, one packet at a time if there are packets.
fn fill(plan: &mut Plan<'_>, sequence: &mut Sequence, what: &str, writer: Cell, pipe: &Pipe) {
    let whole = [pipe.content.0.len() as u32];
    let lengths = if pipe.packets.is_empty() { &whole[..] } else { &pipe.packets[..] };
    if !pipe.packets.is_empty() {
        open::set_flags(sequence, what, writer, (libc::O_DIRECT | libc::O_NONBLOCK) as u32);
    }
    let mut rest = &pipe.content.0[..];
    for length in lengths.iter().filter(|n| **n != 0) {
        let (now, later) = rest.split_at(rest.len().min(*length as usize));
        let at = plan.builder.data(now);
        let args = [writer.into(), at.into(), Arg::from(*length)];
        sequence.call(what, Call::new(libc::SYS_write, args).returns(u64::from(*length)));
        rest = later;
    }
}
