//! The engine: the life of a container.
//!
//! The crate is a library without a daemon. Each caller opens the same directories, takes the same
//! locks and reads the same state from disk and from the kernel; none has to live longer than its
//! verb. The crate orders the steps of the mechanisms (images, network, control groups, the keeper)
//! and contains none of their work.
//!
//! # States
//!
//! ```text
//! create -> Created -start-> Running <-pause/unpause-> Paused
//!                            Running <-drowsy/wake---> Drowsy -pause-> Paused, -sleep-> Asleep
//!                            Running -sleep-> Asleep -wake-> Running
//!                            Running, Paused, Drowsy, Asleep -its end-> Stopped -start-> Running
//! Created, Stopped -remove-> gone
//! ```
//!
//! A state is never stored where it could become false; `state::observe` derives it. *Running* is a
//! record (`init.json`: pid, start time, boot) of a process that still lives. *Paused* and *drowsy*
//! are the same with a mark in that record. A paused container is frozen until an operator resumes
//! it. A drowsy one is frozen until an event arrives at a descriptor that the keeper watches
//! (`drowsy`). *Asleep* is the directory `asleep/` without a living process (`sleep`). *Created* is
//! a configuration without such a record and without `exit.json`. *Stopped* is every other
//! container.
//!
//! The first command that finds a record of a dead process *settles* the container under its lock:
//! the exit status is written to `exit.json`; cgroup, addresses and shared directories are
//! released. The keeper has `settle` applied to each container that ends, which also applies the
//! restart policy.
//!
//! # Rooms, from the ground up
//!
//! [`Engine`] is the public face: a method calls one function of a module below. Every other function
//! takes `&Ground`. A module uses modules of the lines above it and earlier ones of its own line, never
//! a later one. Its head comment names the modules that it uses besides the plain ones.
//!
//! ```text
//! error place disk bpffs name host_ids slot event settings spec user    plain: files, tables and requests
//! ground                                    directories, tables, mechanisms, locks, configurations
//! scheduler                                 the same, for the host
//! shortage state gates account socket deal gating exit barrier hold log io saved    records and facts of one container
//! silence shared volume usage debt writeback drive rate bandwidth    the same
//! contract view sysinfo                                the same
//! process net stacked freeze pending holder later    one subject each: program, network
//! policy unwoken admission caller                        the same
//! layer root spare warmth create listen template end     file system, creation, sockets, teardown
//! restore twin proof save remove tidy archive            parts of verbs that others need as well
//! start nursery warm drowsy unborn                       ways into a state
//! sleep recover                                          ways out, and after a crash
//! wake exec inspect verb idle list spectator             verbs
//! engine                                                 public face
//! ```
//!
//! # Places
//!
//! ```text
//! RUN/gates/                        a bpffs with the gates, while they are loaded (`gates`, `gating`)
//! RUN/sysinfo/                      a bpffs with the program for sysinfo(2), once a daemon has run (`sysinfo`)
//! RUN/barrier/                      a bpffs with the programs of the barrier (`barrier`)
//! RUN/barrier.refused               the kernel has no trampolines of BPF for it
//! LIB/containers/ID/config.json     what the container is; rewritten only by update and rename
//! LIB/containers/ID/exit.json       how its first process ended last
//! LIB/containers/ID/upper, work     its own files, in its own ids
//! LIB/containers/ID/drive           a file system with those two, where it has a limit of space (`drive`)
//! LIB/containers/ID/drive.growing, drive.saved    it is being enlarged
//! LIB/containers/ID/output.log      its output, written by the keeper's reader (`log`)
//! LIB/containers/ID/stdout.log, stderr.log    the same, written by the container itself
//! LIB/containers/ID/checkpoints/N/  its processes as files (crate `checkpoint`), and in init.json its first one
//! LIB/containers/ID/proven.json     the shapes of its checkpoints that were proven (`proof`)
//! LIB/containers/ID/asleep/         checkpoint of an asleep container; its presence is the state
//! LIB/containers/ID/woken/          checkpoint of a woken container, until it sleeps again or ends
//! LIB/containers/ID/asleep/origin.json    the container never ran; where its checkpoint comes from
//! LIB/containers/ID/asleep/stack.json    the network stack of its own that its held sockets keep (`stacked`)
//! LIB/spares/ID/                    parts of a container made ahead (`spare`); locked meanwhile
//! LIB/pending/new-ID/, dead-ID/     a create or removal in progress; locked meanwhile
//! LIB/pending/do-ID.NUMBER          a rename or a trial restore in progress; locked meanwhile
//! RUN/pending/do-ID.NUMBER          a sleep, a wake or a short freeze in progress; locked meanwhile
//! LIB/names/NAME                    the id, one file per name: link(2) makes a name unique
//! LIB/ids/slots, owners             one bit per slot of host ids, and the container that owns it
//! LIB/ids/instance, blocks          the id of this instance, and its blocks of slots (`host_ids`)
//! LIB/quiet/ID                      packets that are dropped until it is restored, as rules
//! LIB/volumes/NAME/                 named volumes (`volume`)
//! LIB/accounts/                     accounts and what was charged to them (`account`)
//! LIB/events                        one JSON line per event
//! LIB/list                          output of the last list, as long as it is valid
//! LIB/custody                       the keeper that holds the descriptors of sleeping containers
//! /var/lib/dormouse-ids/            the blocks of all instances of the host (`host_ids`)
//! /run/dormouse-writeback/          loop devices with rates of containers, of all instances (`writeback`)
//! RUN/c/ID/init.json                the first process; gone with the boot
//! RUN/c/ID/exit                     its exit status, written by the keeper
//! RUN/c/ID/log.json                 the pipes for its output
//! RUN/c/ID/restored                 the memory with which a command restored it (`contract`)
//! RUN/mounts                        places of the cgroup hierarchies of v1, kept for the next command
//! RUN/contract.json                 reservations of the running containers (`contract`)
//! RUN/governed                      a daemon changes CPU weights of containers; those with a debt (`debt`)
//! RUN/governed-memory               a daemon changes limits of memory of running containers
//! RUN/unwoken-ID                    why its wakes fail; LIB/containers/ID/unwoken.json where RUN is full
//! RUN/wakes                         when clients may wake containers again (`caller`)
//! RUN/gate.sock                     admission control: the daemon grants memory to a wake
//! RUN/tmpfs/N/ID/                   its /dev, /dev/shm, tmpfs: directories of a shared tmpfs
//! RUN/command.sock                  where commands for runners arrive (crate `entry`)
//! RUN/spares.sock                   where the nursery gives spares away
//! RUN/warm/ID                       what the next wake of an asleep container finds made (`warm`)
//! RUN/views/BASE/                   its views: files over those of procfs and sysfs (`view`)
//! ```
//!
//! # Locks, outermost first
//!
//! 1. `RUN/custody.lock`: recovery after the keeper died (`recover`), which takes container locks
//!    below it; `RUN/warm.lock`: held while an asleep container is made warm, container locks are only tried below it
//!    (`warm`);
//! 2. the container's directory (flock on `LIB/containers/ID`), held by every verb that changes the
//!    container;
//! 3. `RUN/c/ID/exec.lock`: shared by an exec from before it releases the container's lock until
//!    its program runs; the other verbs only test whether it is held (`exec`);
//! 4. `RUN/use.lock`: shared by starts and by recovery; exclusive for `dismantle`, which then holds
//!    no container's lock, and for `tidy`, which never waits for it;
//! 5. `LIB/pending`: shared while an entry is made; exclusive, without waiting, while interrupted
//!    work is finished, which only tries the locks of entries and containers (`recover`);
//! 6. the names and the id slots, each held for one change, never while waiting for another lock, except:
//!    `/var/lib/dormouse-ids/lock` below that of the slots, held for one change of the host's table of blocks;
//! 7. `RUN/listen.lock`: held while the helper process makes the sockets of one container
//!    (`listen`); `RUN/tmpfs/N.lock`: held while a shared tmpfs is mounted (`shared`);
//!    `RUN/views.lock`: held while the tmpfs of views is mounted (`view`);
//!    `RUN/sysinfo.lock`: held while the program for sysinfo(2) is loaded, and what it shows is changed
//!    (`sysinfo`);
//!    `RUN/barrier.lock`: held while the programs of the barrier are loaded (`barrier`);
//!    `RUN/spares.lock`: held by the nursery for its life; other processes only try it (`spare`);
//!    `RUN/tasks.lock`: held while the tasks that accounts may have are dealt to containers (`deal`);
//!    `RUN/volume-N.lock`: held while a volume is made, filled or removed (`volume`);
//!    `RUN/limits.lock`: held while limits of memory are written; below it `RUN/contract.lock`: held while
//!    reservations are added up, and container locks and that of the daemon are only tried (`contract`);
//!    `/run/dormouse-writeback/lock`: held while rates of one loop device are changed (`writeback`);
//! 8. `RUN/gates.lock`: held while gates are loaded, unloaded and given rules (`gating`); below it
//!    `LIB/accounts/made`: held while accounts are changed, shared by creates; `LIB/accounts/lock`, below it: held
//!    while charges are added to balances; a file with charges, below both: held for one line (`account`);
//! 9. the locks inside image, network and keeper, which take none of these;
//! 10. `RUN/note.lock`: held for one write of `LIB/custody`; `RUN/wakes.lock`: for one of `RUN/wakes`.
//!
//! The first command after a boot holds the lock of the directory RUN while it clears away the last
//! boot.
//!
//! # Interrupted at any step
//!
//! `create` publishes by one rename, `remove` withdraws by one; the next command finishes the rest
//! (`recover`). `start` makes every kernel object before the record that names them. A killed start
//! therefore leaves a container without a record, and the next verb removes its kernel objects by
//! name before it makes new ones. Teardown accepts half-built objects and is repeated until nothing
//! remains.
#![forbid(unsafe_code)]

mod account;
mod admission;
mod archive;
mod bandwidth;
mod barrier;
mod bpffs;
mod caller;
mod contract;
mod create;
mod deal;
mod debt;
mod disk;
mod drive;
mod drowsy;
mod end;
mod engine;
mod error;
mod event;
mod exec;
mod exit;
mod freeze;
mod gates;
mod gating;
mod ground;
mod hold;
mod holder;
mod host_ids;
mod idle;
mod inspect;
mod io;
mod later;
mod layer;
mod list;
mod listen;
mod log;
mod name;
mod net;
mod nursery;
mod pending;
mod place;
mod policy;
mod process;
mod proof;
mod rate;
mod recover;
mod remove;
mod restore;
mod root;
mod save;
mod saved;
mod scheduler;
mod settings;
mod shared;
mod shortage;
mod silence;
mod sleep;
mod slot;
mod socket;
mod spare;
mod spec;
mod spectator;
mod stacked;
mod start;
mod state;
mod sysinfo;
mod template;
mod tidy;
mod twin;
mod unborn;
mod unwoken;
mod usage;
mod user;
mod verb;
mod view;
mod volume;
mod wake;
mod warm;
mod warmth;
mod writeback;

pub use account::{
    AccountDetails, AccountUpdate, Agreement, ConnectionLimits, LifeReading, NewAccount,
    RuleAnswer, RuleQuestion,
};
pub use admission::{Answer, Gate, Received, WAIT_INTERVAL, Waker};
pub use contract::{MemoryGranted, MemoryLimits, MemoryMember};
pub use create::Created;
pub use debt::{Debtor, Effort, Labels, Services};
pub use dormouse_account::{ConnectionLimit, OnLimit};
pub use dormouse_bpf::gates::{Party, Stat as GateStat, Use};
pub use dormouse_bpf::socket_count::Count as SocketCount;
pub use drive::Writable;
pub use drowsy::PushOut;
pub use engine::Engine;
pub use error::{Error, Result};
pub use event::Follow;
pub use gating::GateState;
pub use idle::Outcome;
pub use inspect::Details;
pub use layer::Root;
pub use list::Listed;
pub use log::Logs;
pub use place::Places;
pub use policy::{Idle, Policy, Reason, Request, Tier};
pub use proof::Trial;
pub use save::{CheckpointOptions, NewCheckpoint};
pub use saved::{Checkpoint, From};
pub use scheduler::Scheduler;
pub use spec::{Create, Exec, Stdio, Stream, Update};
pub use spectator::{Spectated, instances, processes};
pub use start::Running;
pub use state::Exit;
pub use sysinfo::SysinfoCalls;
pub use template::Template;
pub use unborn::Unborn;
pub use unwoken::FailedWake;
pub use view::Viewed;
pub use volume::Volume;
pub use warm::KEPT as WARM_KEPT;
pub use warmth::Warm;

pub use dormouse_kernel::ErrorKind;
