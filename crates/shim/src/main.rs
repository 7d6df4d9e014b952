//! `containerd-shim-dormouse-v2`: what containerd starts for a pod, `io.containerd.dormouse.v2`.
//!
//! **The idea.** containerd speaks to a long-lived process, the shim, over a socket (ttrpc). The
//! shim is the parent of the containers of a pod, holds their streams, and reports their exits to
//! containerd. This one starts no container itself: each verb is a call of `dormouse-oci`, which
//! exits afterwards, so that the container becomes the shim's child (subreaper).
//!
//! Why the runtime is called as a program and not as a library: a newborn is a copy of its parent
//! until execve. `dormouse-oci` is one thread, small, and holds nothing of any other container; the
//! shim has threads, the streams and sockets of a whole pod, and lives long. A clone of it would
//! cost more and hold more than the program costs to execute, and a verb that is interrupted is the
//! problem of `dormouse-oci`, which has solved it.
//!
//! ```text
//! containerd ── start ──> containerd-shim-dormouse-v2 start    binds the pod's socket, prints it
//!      │                        └─> containerd-shim-dormouse-v2 serve      (standard input: the socket)
//!      ├── Create ────────────────────> mounts the root, opens the streams, dormouse-oci create
//!      ├── Start ─────────────────────> dormouse-oci start, or exec
//!      │ <───────────────────────────── events: create, start, exit, oom, delete
//!      ├── Delete, Shutdown ──────────> dormouse-oci delete; without containers it ends
//!      └── delete ──> containerd-shim-dormouse-v2 delete       cleans up after a shim that was killed
//! ```
//!
//! **Streams.** A container gets containerd's named pipes themselves: nothing is copied, and no
//! process has to run when the container writes. The shim only keeps them open, so that a reader
//! may close and reopen them. For a terminal it copies between its master and the pipes.
//!
//! **Versions.** The task API is registered under both its names, `containerd.task.v2.Task` of
//! containerd 1.x and `containerd.task.v3.Task` of 2.x: it is one API. The address is printed as
//! plain text, which all versions understand.
//!
//! **Files.** `/run/dormouse-shim/HASH`: the socket of a pod, 0600. `BUNDLE/oci`: the root of
//! `dormouse-oci` for this container; `BUNDLE/runtime.json`: settings for a later shim. Both are
//! removed with the bundle.
//!
//! **Not here**: checkpoints; streams that are a program (`binary://`); a cgroup for the shim. They
//! are refused.
#![forbid(unsafe_code)]

mod children;
mod container;
mod event;
mod flag;
mod metric;
mod rootfs;
mod runtime;
mod serve;
mod start;
mod stream;
mod task;

use std::process::ExitCode;

use flag::Flags;

fn main() -> ExitCode {
    // ORDER: first, so that the caller's umask changes no mode of the instance's files.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    let flags = Flags::read(std::env::args().skip(1));
    let done = flags.and_then(|flags| match flags.action.as_str() {
        _ if flags.version => {
            println!("containerd-shim-dormouse-v2 {}", env!("CARGO_PKG_VERSION"));
            Ok(())
        }
        _ if flags.info => start::info(),
        "start" => start::start(&flags),
        "delete" => start::delete(&flags),
        "serve" => serve::run(&flags),
        other => anyhow::bail!("there is no action {other:?}: containerd calls start and delete"),
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("containerd-shim-dormouse-v2: {e:#}");
            ExitCode::FAILURE
        }
    }
}
