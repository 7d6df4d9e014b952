//! POSIX message queues: those with a name, from their file system, and open ones without a name.
//!
//! A message can only be read by receiving it. Once everything is stopped, all messages of a queue
//! are therefore received and sent again at once, in the same order; no thread is blocked on the
//! queue then. A process registered by mq_notify(3) would be notified of that message, and its
//! registration cannot be read. A queue with such a process is refused.
//!
//! LIMIT: if this program is killed in between (some 10 us), the messages are lost.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use dormouse_kernel::mqueue;
use dormouse_record::{
    Bytes, Error, MessageQueue, OpenQueue, QueuedMessage, Result as Outcome, Thing,
};
use rustix::fs::{Dir, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::open::Open;
use super::refusal::{self, Reason};
use super::seen::Seen;
use super::survey::{Found, Survey};
use crate::look::ipc::Tables;

/// The size of the file of a queue, whatever is in the queue (FILENT_SIZE in the kernel).
const FILE_BYTES: u64 = 80;

/// Finds the queues that have a name.
pub(super) fn find(
    survey: &mut Survey<'_>,
    seen: &Seen,
    tables: &Tables,
    namespace: Option<usize>,
) -> Outcome<()> {
    let opened = named(tables.queues());
    let opened = opened.map_err(Error::of("open the message queues", seen.pid))?;
    for (name, queue) in opened {
        let Some(queue) = queue else {
            let why = format!("the message queue '/{name}', with a lease");
            survey.found.refusals.push(refusal::of_object(why));
            continue;
        };
        if let Err(why) = add(survey, seen, Some(name), (queue, namespace)) {
            survey.found.refusals.push(refusal::of_object(why));
        }
    }
    Ok(())
}

/// Opens every queue of a directory. None is one with a lease, which the opening breaks.
fn named(directory: &OwnedFd) -> Result<Vec<(String, Option<OwnedFd>)>, Errno> {
    let mut all = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if [c".", c".."].contains(&name) {
            continue;
        }
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match rustix::fs::openat(directory, name, flags, Mode::empty()) {
            Err(Errno::NOENT) => {} // removed meanwhile
            Err(e) if e != Errno::AGAIN => return Err(e),
            queue => {
                all.push((name.to_str().map_err(|_| Errno::ILSEQ)?.to_owned(), queue.ok()));
            }
        }
    }
    Ok(all)
}

pub(super) fn is_queue(open: &Open<'_>) -> bool {
    let is_there = |f: rustix::fs::StatFs| f.f_type as u64 == mqueue::MAGIC;
    FileType::from_raw_mode(open.stat.st_mode) == FileType::RegularFile
        && rustix::fs::fstatfs(&open.copy).is_ok_and(is_there)
}

pub(super) fn save(survey: &mut Survey<'_>, open: &Open<'_>) -> Result<Thing, Reason> {
    let failed = |e: Errno| format!("a message queue: {e}");
    // Those of mq_open(2), and those that fcntl(2) may have set.
    const KEPT: i32 =
        libc::O_ACCMODE | libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_APPEND | libc::O_NOATIME;
    let flags = open.flags() & KEPT as u32;
    let identity = (open.stat.st_dev, open.stat.st_ino);
    let queue = match survey.message_queues.get(&identity) {
        Some(queue) => *queue,
        None if open.stat.st_nlink != 0 => {
            return Err("a message queue of an IPC namespace outside the container".into());
        }
        None => {
            // The process's own descriptor may be write-only.
            let path = format!("/proc/self/fd/{}", open.copy.as_raw_fd());
            let access = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let queue = rustix::fs::open(path, access, Mode::empty()).map_err(failed)?;
            let namespace = survey.ipc.of_queues(open.stat.st_dev);
            add(survey, open.process, None, (queue, namespace))?
        }
    };
    Ok(Thing::OpenQueue(OpenQueue { queue, flags, offset: open.offset() }))
}

fn add(
    survey: &mut Survey<'_>,
    seen: &Seen,
    name: Option<String>,
    (queue, namespace): (OwnedFd, Option<usize>),
) -> Result<usize, Reason> {
    let called = match &name {
        Some(name) => format!("the message queue '/{name}'"),
        None => "a message queue that was removed".to_owned(),
    };
    let failed = |e: Errno| format!("{called}: {e}");
    if tells_somebody(&queue).map_err(failed)? {
        return Err(format!("{called}, with a registered process (mq_notify)"));
    }
    let stat = rustix::fs::fstat(&queue).map_err(failed)?;
    let attributes = mqueue::attributes(queue.as_fd()).map_err(failed)?;
    let (uid, gid) = seen.maps().owner(stat.st_uid, stat.st_gid);
    let index = survey.add(Thing::MessageQueue(MessageQueue {
        name,
        mode: stat.st_mode & 0o777,
        uid,
        gid,
        messages_max: attributes.messages_max,
        message_bytes: attributes.message_bytes,
        namespace,
        file_bytes: Some(stat.st_size as u64).filter(|bytes| *bytes != FILE_BYTES),
        messages: Vec::new(),
    }));
    survey.message_queues.insert((stat.st_dev, stat.st_ino), index);
    survey.found.message_queues.push((index, queue));
    Ok(index)
}

/// Whether a process is registered for notification, by `QSIZE:N NOTIFY:N SIGNO:N NOTIFY_PID:N`.
fn tells_somebody(queue: &OwnedFd) -> Result<bool, Errno> {
    let mut buffer = [0; 128];
    let length = rustix::io::pread(queue, &mut buffer, 0)?;
    let text = String::from_utf8_lossy(&buffer[..length]);
    let pid = text.split("NOTIFY_PID:").nth(1).map(str::trim);
    Ok(pid.ok_or(Errno::BADMSG)? != "0")
}

/// Reads the messages of all queues. Everything is stopped.
pub(super) fn contents(found: &mut Found) -> Outcome<()> {
    for (index, queue) in &found.message_queues {
        let Thing::MessageQueue(record) = &mut found.objects[*index].thing else { continue };
        let (messages, read) = take(queue, record.message_bytes as usize);
        for one in &messages {
            let sent = mqueue::send(queue.as_fd(), &one.data.0, one.priority);
            sent.map_err(Error::call("put back a message of a queue"))?;
        }
        read.map_err(Error::call("read a message queue"))?;
        record.messages = messages;
    }
    Ok(())
}

/// Receives all messages; returns the received ones even after an error.
fn take(queue: &OwnedFd, most_bytes: usize) -> (Vec<QueuedMessage>, Result<(), Errno>) {
    let mut buffer = vec![0; most_bytes];
    let mut all = Vec::new();
    loop {
        match mqueue::receive(queue.as_fd(), &mut buffer) {
            Ok((length, priority)) => {
                all.push(QueuedMessage { priority, data: Bytes(buffer[..length].to_vec()) });
            }
            Err(Errno::AGAIN) => return (all, Ok(())),
            Err(e) => return (all, Err(e)),
        }
    }
}
