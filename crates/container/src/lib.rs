//! The engine: the life of a container.
//!
//! A library without a daemon. Every caller opens the same directories, takes the same locks and
//! finds the same truth on disk; none of them has to live longer than its verb. The crate knows the
//! mechanisms (images, network, control groups, the keeper) and orders their steps; it does none of
//! their work itself.
//!
//! # States
//!
//! ```text
//! create -> Created -start-> Running <-pause/resume-> Paused
//!              ^                | first process ends, or the host goes down
//!              |                v
//!            delete <------- Stopped -start-> Running
//! ```
//!
//! A state is never stored where it could be false. *Created* is a directory with a configuration;
//! *running* is a record of a process (pid, start time, boot) that still names a living one;
//! *stopped* is everything else. A record that names a dead process is *settled* by whoever finds
//! it first, under the container's lock: its exit status is kept, its cgroup, addresses and shared
//! directories are given back, its restart policy is applied.
//!
//! # Places
//!
//! ```text
//! LIB/containers/ID/config.json     what the container is; rewritten only by update and rename
//! LIB/containers/ID/exit.json       how its first process ended last
//! LIB/containers/ID/upper, work     its own files, in its own ids
//! LIB/containers/ID/stdout.log, stderr.log    written by the container itself
//! LIB/containers/ID/checkpoints/N/  its processes as files (crate `checkpoint`)
//! LIB/containers/ID/asleep/         the same of a container that sleeps; that it is there says so
//! LIB/containers/ID/woken/          the same of one that is awake again, until it sleeps or ends
//! LIB/containers/ID/asleep/origin.json    it never ran, and goes on from where another was
//! LIB/pending/new-ID/, dead-ID/     a create or removal in progress; locked meanwhile
//! LIB/pending/do-ID.NUMBER          a rename or a short freeze in progress; locked meanwhile
//! LIB/names/NAME                    the id, one file per name: link(2) makes a name unique
//! LIB/ids/slots, owners             one bit per slot of host ids, and whose it is
//! LIB/quiet/ID                      packets that are dropped until it is restored, as rules
//! LIB/volumes/NAME/                 named volumes
//! LIB/events                        one JSON line per event
//! LIB/list                          what lists showed, as long as it holds
//! LIB/custody                       the keeper that holds what sleeping containers left
//! RUN/c/ID/init.json                the first process; gone with the boot
//! RUN/c/ID/exit                     its exit status, written by the keeper
//! RUN/gate.sock                     where the daemon says whether there is memory for one that wakes
//! RUN/shared/ID/                    its /dev, /dev/shm, tmpfs: directories of one tmpfs
//! ```
//!
//! # Locks, outermost first
//!
//! 1. the container's directory (flock on `LIB/containers/ID`), held by every verb that changes it;
//! 2. the names and the id slots, each held for one change, never while waiting for anything;
//! 3. the locks inside image, network and keeper, which know nothing of ours.
//!
//! # Interrupted at any step
//!
//! `create` publishes by one rename, `remove` withdraws by one; what either leaves undone the next
//! command finishes (`pending`). `start` makes everything that lives in the kernel before the record
//! that names it; what a killed start leaves behind is a container without a record, and the next
//! verb tears its leftovers down by name before it makes new ones. Teardown takes half-built things
//! and is repeated until nothing is left.
#![forbid(unsafe_code)]

mod admission;
mod archive;
mod checkpoint;
mod custody;
mod disk;
mod drowsy;
mod engine;
mod error;
mod event;
mod exec;
mod idle;
mod later;
mod life;
mod list;
mod name;
mod pending;
mod place;
mod settings;
mod silence;
mod sleep;
mod slot;
mod spec;
mod start;
mod template;
mod unborn;
mod user;

pub use admission::{Answer, Asker, Gate, Heard, TOLD_EVERY};
pub use checkpoint::{Checkpoint, CheckpointOptions, From, Made};
pub use drowsy::Drowsed;
pub use engine::{Created, Engine};
pub use error::{Error, Result};
pub use event::{Event, Follow};
pub use idle::{Asked, Fell, Idle, Policy, Tier, Why};
pub use life::{Details, Exit, Logs, Root};
pub use list::Listed;
pub use place::Places;
pub use spec::{Create, Exec, Stdio, Stream, Update};
pub use start::Running;
pub use template::Template;
pub use unborn::Unborn;
pub use user::{Account, Accounts};

pub use dormouse_kernel::ErrorKind;
