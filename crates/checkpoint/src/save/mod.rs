//! From processes to records: [`save`] does all steps, and [`explain`] only the first.
//!
//! 1. [`explain`]: inspects the container and lists everything without a record; nothing is
//!    stopped. Large memory is copied then, while its processes run (`ahead`).
//! 2. [`stop`]: seizes and interrupts every task of the container, until a walk of the tree finds
//!    no new one. Stopped tasks create none.
//! 3. `Stopped::read`: makes records from procfs, copies of descriptors (pidfd_getfd(2)), pagemaps
//!    and a few calls that are injected into the processes themselves.
//! 4. `Draft::publish`: completes the checkpoint on disk. Processes that are to continue are
//!    resumed before ([`Stopped`] is dropped). The others stay stopped until then, and the caller
//!    kills them: they do nothing between the checkpoint and their end.
//!
//! Nothing is left in the processes: the page with results of calls is unmapped, registers and
//! signal masks are restored. If this program is killed in the middle, the kernel resumes the
//! tasks. LIMIT: a task in which calls are being injected at that moment (some 0.2 ms of each)
//! resumes inside them.
//!
//! One module per kind of object, of the same names as in [`crate::format`] and [`crate::load`].
//!
//! # Rooms, from the ground up
//!
//! A module uses modules of the lines above it and earlier ones of its own line, never a later one.
//!
//! ```text
//! subject held refusal restart diag option nowhere          words: plain data and registers
//! rescue                                            a second process
//! seen tree limit wait stop thaw calls due halt     tasks: found, waiting, stopped
//! credentials landlock keyring vfork host schedule policy login signal thread    parts without a survey
//! mapping pages ahead                               memory, without its objects
//! known open survey                                 everything that was found so far: data
//! lock deleted file tmpfs pipe aio memory           kinds: files and memory
//! event timer terminal pidfd inotify fanotify       kinds: events
//! address netlink raw udp tcp unix socket           kinds: sockets
//! system_v mqueue ipc mount net time user uts       kinds: namespaces and their contents
//! cgroup cgroup_namespace namespace                 control groups; the namespaces of a process
//! shared process                                    processes
//! object inspect                                    the table of kinds, and the steps of a survey
//! drowsy stopped                                    verbs
//! ```
//!
//! `object` has the table of kinds: it decides which module reads which open file, and no module of a kind
//! uses it. This file alone uses [`crate::load`], to rehearse the restore of every checkpoint.

mod address;
mod ahead;
mod aio;
mod calls;
mod cgroup;
mod cgroup_namespace;
mod credentials;
mod deleted;
mod diag;
mod drowsy;
mod due;
mod event;
mod fanotify;
mod file;
mod halt;
mod held;
mod host;
mod inotify;
mod inspect;
mod ipc;
mod keyring;
mod known;
mod landlock;
mod limit;
mod lock;
mod login;
mod mapping;
mod memory;
mod mount;
mod mqueue;
mod namespace;
mod net;
mod netlink;
mod nowhere;
mod object;
mod open;
mod option;
mod pages;
mod pidfd;
mod pipe;
mod policy;
mod process;
mod raw;
mod refusal;
mod rescue;
mod restart;
mod schedule;
mod seen;
mod shared;
mod signal;
mod socket;
mod stop;
mod stopped;
mod subject;
mod survey;
mod system_v;
mod tcp;
mod terminal;
mod thaw;
mod thread;
mod time;
mod timer;
mod tmpfs;
mod tree;
mod udp;
mod unix;
mod user;
mod uts;
mod vfork;
mod wait;

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::load;
use ahead::Ahead;
use dormouse_parcel::{Base, DirSink, Sink};
use dormouse_record::{Error, Records, Refusal, Result};
pub use drowsy::{Calls, Still, stand_still};
pub use held::{HeldFile, Wakes};
use host::Host;
use inspect::{Look, look, unless_refused};
pub use limit::Wait;
use pages::Known;
use seen::Seen;
use stopped::Before;
pub use stopped::{Figures, Stopped, Written};
pub use subject::{Names, Outside, Places, Subject};
pub use tcp::rescue_connections;
pub use wait::Blocks;

/// Lists everything that prevents this container from being saved. Nothing is stopped.
pub fn explain(subject: &Subject) -> Result<Vec<Refusal>> {
    Ok(inspected(subject, None)?.found.refusals)
}

/// The threads of a container that are blocked with a timeout. Nothing is stopped.
pub fn waits(subject: &Subject) -> Result<Vec<Wait>> {
    Ok(tree::look(subject)?.iter().flat_map(limit::waits).collect())
}

/// Stops all processes of a container, after a check that everything can be saved.
///
/// Errors: [`Error::Refused`] lists what cannot be saved; then nothing was stopped.
/// [`Error::Passing`] if every refusal is likely to pass in a moment.
pub fn stop(subject: &Subject) -> Result<Stopped> {
    let (_, before) = ready(subject, None)?;
    stopped::stop(subject, before, load::rehearse)
}

/// Inspects a container. Processes that a restore could not create so that they share again what they share are
/// refused, too.
fn inspected(subject: &Subject, ahead: Option<&Ahead>) -> Result<Look> {
    let mut look = look(subject, ahead)?;
    let processes = std::mem::take(&mut look.found.outline);
    if !processes.is_empty()
        && let Err(Error::Elsewhere(why)) =
            load::can_be_created(&Records { processes, ..Records::default() })
    {
        look.found.refusals.push(refusal::of_object(why));
    }
    Ok(look)
}

/// Reads the records of a complete twin, and ends it. `first` is its process 1.
pub(crate) fn read_twin(
    subject: &Subject,
    twin: load::Complete,
    first: OwnedFd,
    waits: Blocks,
) -> Result<Records> {
    let before = || before(look(subject, None)?, |_| Blocks::default()).map(|(_, before)| before);
    stopped::read_twin(subject, (twin.tasks, first), waits, before, load::rehearse)
}

/// Inspects a container in which everything can be saved. ORDER: slow steps that can be done before
/// the stop are done here.
fn ready(subject: &Subject, ahead: Option<&Ahead>) -> Result<(Vec<Seen>, Before)> {
    before(inspected(subject, ahead)?, Blocks::for_waiting)
}

/// What an inspection has found, with a program that reads waits.
fn before(look: Look, blocks: impl FnOnce(&[Seen]) -> Blocks) -> Result<(Vec<Seen>, Before)> {
    let Look { tree, found, tables, settings } = look;
    let found = unless_refused(found)?;
    let (fresh, rings) = (found.fresh, found.rings.into_iter());
    let asynchronous = rings.map(|(_, pid, _)| pid).collect();
    let (blocks, host) = (blocks(&tree), Host::look()?);
    Ok((tree, Before { blocks, host, tables, settings, fresh, asynchronous }))
}

/// How long to wait for states that pass in a moment: connections that are being accepted or
/// closed.
const PASSES_WITHIN: Duration = Duration::from_secs(1);

/// Writes the processes of a container to the directory `place`, and returns them with the figures:
/// they are stopped until they are dropped or killed. With `go_on` they resume as soon as all is
/// read, before it is on the disk. Pages of an earlier checkpoint (`base`) are not written again.
///
/// Errors: as [`stop`], after a wait for states that pass in a moment.
pub fn save(
    subject: &Subject,
    place: &Path,
    base: Option<&Base>,
    go_on: bool,
) -> Result<(Option<Stopped>, Figures)> {
    let began = Instant::now();
    loop {
        let saved = DirSink::begin_upon(place, base.cloned()).and_then(|sink| {
            let mut sink: Box<dyn Sink> = Box::new(sink);
            let (tree, mut before) = ready(subject, None)?;
            let mut known = Known::default();
            let ahead = ahead::copy(subject, &tree, &before.blocks, &mut known, &mut *sink)?;
            if ahead.is_some() {
                (_, before) = ready(subject, ahead.as_ref())?; // the processes have run since
            }
            let bytes = memory::own_bytes(&tree);
            known.make_room(bytes);
            sink.make_room(bytes);
            let mut stopped = stopped::stop(subject, before, load::rehearse)?;
            let draft = stopped.read(subject, ahead.as_ref(), known, sink)?;
            let stopped = (!go_on).then_some(stopped);
            // ORDER: the processes resume first, since removing the protection takes a while.
            drop(ahead);
            Ok((stopped, draft.publish()?.figures))
        });
        match saved {
            Err(Error::Passing(_)) if began.elapsed() < PASSES_WITHIN => {
                std::thread::sleep(Duration::from_millis(5)); // the processes run meanwhile
            }
            other => return other,
        }
    }
}
