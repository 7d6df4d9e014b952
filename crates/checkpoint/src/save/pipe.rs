//! Pipes: ends are open files, the pipe between them is known by its inode.

use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags};
use rustix::pipe::SpliceFlags;

use super::object::{Open, Survey, Why};
use crate::error::Refusal;
use crate::format::{Bytes, Pipe, PipeEnd, Thing};

/// What was seen of one pipe.
#[derive(Debug, Default)]
pub(crate) struct Ends {
    pipe: usize,
    reader: Option<OwnedFd>,
    writer: Option<OwnedFd>,
    /// For the message: who has an end of it.
    first: Option<Refusal>,
}

pub(crate) fn is_pipe(open: &Open<'_>) -> bool {
    open.link.starts_with("pipe:[")
}

pub(crate) fn save(survey: &mut Survey<'_>, open: &Open<'_>) -> Result<Thing, Why> {
    let flags = open.flags();
    if flags & libc::O_DIRECT as u32 != 0 {
        return Err("a pipe of packets (O_DIRECT), which is not saved yet".into());
    }
    let writes = flags & libc::O_ACCMODE as u32 != libc::O_RDONLY as u32;
    let inode = open.stat.st_ino;
    let pipe = match survey.pipes.get(&inode) {
        Some(ends) => ends.pipe,
        None => {
            let capacity = rustix::pipe::fcntl_getpipe_size(&open.copy);
            let capacity_bytes = capacity.map_err(|e| format!("a pipe: {e}"))? as u32;
            let pipe = Pipe { capacity_bytes, content: Bytes::default() };
            let index = survey.add(Thing::Pipe(pipe));
            let what = format!("descriptor {}", open.number);
            let first = Some(open.process.refuse(what, ""));
            survey.pipes.insert(inode, Ends { pipe: index, first, ..Ends::default() });
            index
        }
    };
    let copy = open.copy.try_clone().map_err(|e| format!("a pipe: {e}"))?;
    if let Some(ends) = survey.pipes.get_mut(&inode) {
        if writes { ends.writer = Some(copy) } else { ends.reader = Some(copy) }
    }
    Ok(Thing::PipeEnd(PipeEnd { pipe, writes, flags }))
}

/// Contents, and pipes whose other end is outside.
pub(crate) fn finish(survey: &mut Survey<'_>) {
    for ends in std::mem::take(&mut survey.pipes).into_values() {
        let content = match (&ends.reader, &ends.writer) {
            (Some(reader), writer) => {
                let open_elsewhere = writer.is_none() && !is_hung_up(reader, PollFlags::HUP);
                if open_elsewhere { Err(outside("writes")) } else { content(reader) }
            }
            (None, Some(writer)) if !is_hung_up(writer, PollFlags::ERR) => Err(outside("reads")),
            // Nobody will ever read it.
            (None, _) => Ok(Vec::new()),
        };
        match content {
            Ok(content) => {
                if let Thing::Pipe(pipe) = &mut survey.found.objects[ends.pipe].thing {
                    pipe.content = Bytes(content);
                }
            }
            Err(why) => {
                let refusal = ends.first.map(|first| Refusal { why, ..first });
                survey.found.refusals.extend(refusal);
            }
        }
    }
}

fn outside(does: &str) -> Why {
    format!("a pipe that somebody outside the container {does}")
}

/// Whether the other end of a pipe is closed: nobody has it, here or elsewhere.
fn is_hung_up(end: &OwnedFd, flag: PollFlags) -> bool {
    let mut fds = [PollFd::new(end, PollFlags::empty())];
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().contains(flag)
}

/// What is in a pipe, which keeps it (tee(2)).
fn content(reader: &OwnedFd) -> Result<Vec<u8>, Why> {
    let failed = |e: rustix::io::Errno| format!("a pipe whose content cannot be read: {e}");
    let waiting = rustix::io::ioctl_fionread(reader).map_err(failed)? as usize;
    if waiting == 0 {
        return Ok(Vec::new());
    }
    let capacity = rustix::pipe::fcntl_getpipe_size(reader).map_err(failed)?;
    let (read, write) =
        rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(failed)?;
    rustix::pipe::fcntl_setpipe_size(&write, capacity).map_err(failed)?;
    // ORDER: one call, as tee always begins at the first byte.
    let copied =
        rustix::pipe::tee(reader, &write, waiting, SpliceFlags::NONBLOCK).map_err(failed)?;
    let mut content = vec![0; copied];
    let mut at = 0;
    while at < copied {
        at += rustix::io::read(&read, &mut content[at..]).map_err(failed)?;
    }
    if copied == waiting {
        Ok(content)
    } else {
        Err(format!("a pipe of which only {copied} of {waiting} bytes can be read"))
    }
}
