//! Pipes: ends are open files; the pipe between them is identified by its inode, whether anonymous
//! or a fifo.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use dormouse_record::{
    Bytes, DeletedFifo, Error, Pipe, PipeEnd, Refusal, Result as Outcome, Thing,
};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{Mode, OFlags};
use rustix::pipe::SpliceFlags;

use super::known::stream::PipeEnds;
use super::open::Open;
use super::refusal::Reason;
use super::survey::{Found, Survey};
use super::{deleted, file};
use crate::look::file::tmpfs_at;

pub(crate) fn is_pipe(open: &Open<'_>) -> bool {
    let is_place = open.flags() & libc::O_PATH as u32 != 0;
    open.stat.st_mode & libc::S_IFMT == libc::S_IFIFO && !is_place
}

pub(crate) fn save(survey: &mut Survey<'_>, open: &Open<'_>) -> Result<Thing, Reason> {
    let flags = open.flags();
    let access = flags & libc::O_ACCMODE as u32;
    let writes = access != libc::O_RDONLY as u32;
    let identity = (open.stat.st_dev, open.stat.st_ino);
    let pipe = match survey.pipes.get(&identity) {
        Some(ends) => ends.pipe,
        None => {
            let (path, deleted) = name(survey, open)?;
            let capacity = rustix::pipe::fcntl_getpipe_size(&open.copy);
            let capacity_bytes = capacity.map_err(|e| format!("a pipe: {e}"))? as u32;
            let (content, packets) = (Bytes::default(), Vec::new());
            let has_name = path.is_some();
            let pipe = Pipe { capacity_bytes, content, packets, path, deleted };
            let index = survey.add(Thing::Pipe(pipe));
            let what = format!("descriptor {}", open.number);
            let first = Some(open.process.refuse(what, ""));
            let ends = PipeEnds { pipe: index, first, has_name, ..PipeEnds::default() };
            survey.pipes.insert(identity, ends);
            index
        }
    };
    let copy = open.copy.try_clone().map_err(|e| format!("a pipe: {e}"))?;
    if let Some(ends) = survey.pipes.get_mut(&identity) {
        // A fifo may be opened for both.
        if access != libc::O_WRONLY as u32 {
            ends.reader = Some(copy);
        } else {
            ends.writer = Some(copy);
        }
        ends.has_writer |= writes;
    }
    Ok(Thing::PipeEnd(PipeEnd { pipe, writes, flags }))
}

/// The path of a pipe that has a name, or had one. The path is in the container's own layer or
/// tmpfs, so no process outside can have it open.
fn name(
    survey: &Survey<'_>,
    open: &Open<'_>,
) -> Result<(Option<String>, Option<DeletedFifo>), Reason> {
    if open.link.starts_with("pipe:[") {
        return Ok((None, None));
    }
    let first = open.process.first;
    let root = rustix::fs::stat(format!("/proc/{first}/root"));
    let is_in_memory = |target: &String| {
        let below = open.link.strip_prefix(target.as_str()).is_some_and(|p| p.starts_with('/'));
        let place = || tmpfs_at(first, target).and_then(rustix::fs::fstat);
        below && place().is_ok_and(|place| place.st_dev == open.stat.st_dev)
    };
    let is_own = root.is_ok_and(|root| root.st_dev == open.stat.st_dev)
        || survey.subject.memory.iter().any(is_in_memory);
    if !is_own {
        let fifo = &open.link;
        return Err(format!("the fifo '{fifo}' on a volume, which others may have open, too"));
    }
    if open.stat.st_nlink != 0 {
        file::is_there(first, &open.link, &open.stat)?;
        return Ok((Some(open.link.clone()), None));
    }
    let was = open.link.trim_end_matches(" (deleted)");
    let place = deleted::place(open.process, was, open.copy.as_fd())?;
    let stat = &open.stat;
    let (uid, gid) = open.process.maps().owner(stat.st_uid, stat.st_gid);
    let deleted = DeletedFifo { mode: stat.st_mode & 0o777, uid, gid };
    let path = format!("{}/.dormouse-{}", place.trim_end_matches('/'), open.index);
    Ok((Some(path), Some(deleted)))
}

/// Reads contents, and refuses pipes with an end outside the container.
pub(crate) fn finish(survey: &mut Survey<'_>) {
    for ends in std::mem::take(&mut survey.pipes).into_values() {
        let (reader, writer) = (&ends.reader, &ends.writer);
        let content = match (reader, writer) {
            (Some(reader), _) => {
                let maybe_elsewhere = !ends.has_writer && !ends.has_name;
                let open_elsewhere = maybe_elsewhere && !is_hung_up(reader, PollFlags::HUP);
                if open_elsewhere { Err(outside("writes")) } else { content(reader) }
            }
            (None, Some(writer)) if !ends.has_name && !is_hung_up(writer, PollFlags::ERR) => {
                Err(outside("reads"))
            }
            // A reader may still open it, by its name or through the write end in procfs.
            (None, _) => {
                survey.found.fifos.extend(ends.writer.map(|writer| (ends.pipe, writer)));
                continue;
            }
        };
        match content {
            Ok((content, packets)) => {
                if let Thing::Pipe(pipe) = &mut survey.found.objects[ends.pipe].thing {
                    (pipe.content, pipe.packets) = (Bytes(content), packets);
                }
            }
            Err(why) => {
                let refusal = ends.first.map(|first| Refusal { why, ..first });
                survey.found.refusals.extend(refusal);
            }
        }
    }
}

/// Reads pipes and fifos without an open read end. Everything is stopped: otherwise a process that waits for
/// a reader would take this program for one.
pub(super) fn contents(found: &mut Found) -> Outcome<()> {
    for (index, writer) in &found.fifos {
        let path = format!("/proc/self/fd/{}", writer.as_raw_fd());
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let reader = rustix::fs::open(path, flags, Mode::empty());
        let reader = reader.map_err(Error::call("open a fifo to look into it"))?;
        let read = content(&reader).map_err(Error::Elsewhere)?;
        if let Thing::Pipe(pipe) = &mut found.objects[*index].thing {
            (pipe.content, pipe.packets) = (Bytes(read.0), read.1);
        }
    }
    Ok(())
}

/// Bytes, and their lengths if they are packets.
type Content = (Vec<u8>, Vec<u32>);

fn outside(does: &str) -> Reason {
    format!("a pipe with an end outside the container, which {does}")
}

/// Whether the other end of a pipe is closed everywhere, inside and outside.
fn is_hung_up(end: &OwnedFd, flag: PollFlags) -> bool {
    let mut fds = [PollFd::new(end, PollFlags::empty())];
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().contains(flag)
}

/// Copies the content of a pipe without consuming it (tee(2)).
fn content(reader: &OwnedFd) -> Result<Content, Reason> {
    let failed = |e: rustix::io::Errno| format!("a pipe with unreadable content: {e}");
    let waiting = rustix::io::ioctl_fionread(reader).map_err(failed)? as usize;
    if waiting == 0 {
        return Ok(Content::default());
    }
    let capacity = rustix::pipe::fcntl_getpipe_size(reader).map_err(failed)?;
    let (read, write) =
        rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(failed)?;
    rustix::pipe::fcntl_setpipe_size(&write, capacity).map_err(failed)?;
    // ORDER: one call, as tee always begins at the first byte.
    let copied = match rustix::pipe::tee(reader, &write, waiting, SpliceFlags::NONBLOCK) {
        // Nothing is stopped yet, and a process has read it since.
        Err(rustix::io::Errno::AGAIN) => return Ok(Content::default()),
        copied => copied.map_err(failed)?,
    };
    let mut content = vec![0; copied];
    let (mut at, mut lengths) = (0, Vec::new());
    while at < copied {
        let n = rustix::io::read(&read, &mut content[at..]).map_err(failed)?;
        lengths.push(n as u32);
        at += n;
    }
    if copied != waiting {
        return Err(format!("a pipe of which only {copied} of {waiting} bytes can be read"));
    }
    // A stream is read in one piece. A single packet looks the same, and is restored the same way.
    let packets = if lengths.len() > 1 { lengths } else { Vec::new() };
    Ok((content, packets))
}
