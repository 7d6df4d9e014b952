//! The plan, the protocol and the keeper's client: the messages between engine, keeper and newborn.
//!
//! The engine decides, in a process that may be large; the keeper clones, in a process that is
//! tiny; the newborn executes a flat [`Plan`] and becomes the program. This crate has the messages
//! between them and the engine's side: the plan's builder, the [`Newborn`], the client of the
//! keeper ([`keeper::Keeper`]). The other side is the crate `keeper`.
//!
//! One start, in time:
//!
//! ```text
//! engine                         keeper                      newborn
//!   connect_or_start ---------->
//!   spawn ----------------------> clone3, id maps, proc ----> waits for its plan
//!   <---------------- Spawned ---
//!   Newborn::send_part -------------------------------------> executes a part of it
//!   (mounts, with its user namespace)
//!   Newborn::send ------------------------------------------> executes the last part
//!   Newborn::ready <----------------------------------------- sync, credentials, seccomp
//!   Newborn::go --------------------------------------------> execve
//!   <-------------------------------------------------------- the socket closes
//!   wait <----------- Exited ---- reaps, writes RUN/c/ID/exit
//! ```
//!
//! If the engine exits at any point before `go`, the newborn reads the end of its socket and exits;
//! the keeper reaps it. If the keeper exits, its children continue, and their exit status stays
//! unknown.
#![forbid(unsafe_code)]

mod error;
mod exit;
mod failure;
pub mod fill;
pub mod flat;
pub mod keeper;
mod newborn;
mod plan;
pub mod protocol;
pub mod template;
pub mod wire;
mod word;

pub use error::LaunchError;
pub use exit::{EXIT_FILE, ExitStatus};
pub use failure::{Failure, NEVER_BEGAN};
pub use keeper::{Calling, Expected, Keeper, KeeperStart, Passed, Spawn};
pub use newborn::Newborn;
pub use plan::{
    CapabilityMasks, Exec, FdIndex, Follow, Ids, Node, Plan, Spread, Step, TargetKind, Terminal,
};
pub use protocol::{Kind, Status};
