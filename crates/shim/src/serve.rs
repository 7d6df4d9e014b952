//! The shim itself: its socket, its children, its end.

use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use containerd_shim_protos::shim_async::create_task;
use containerd_shim_protos::ttrpc::r#async::Server;
use containerd_shim_protos::ttrpc::r#async::transport::Listener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Notify;

use crate::children::Children;
use crate::event::Events;
use crate::flag::Flags;
use crate::task::Pod;

/// Time for sending the last events before exit.
const LAST_WORDS: Duration = Duration::from_secs(10);
/// The names of the same API in both generations of containerd.
const NAMES: [&str; 2] = ["containerd.task.v2.Task", "containerd.task.v3.Task"];

/// Serves a pod until its last container is deleted. Standard input is the socket.
pub fn run(flags: &Flags) -> Result<()> {
    let socket = rustix::io::dup(std::io::stdin().as_fd()).context("taking the socket")?;
    let listener = UnixListener::from(socket);
    let path = listener.local_addr().context("looking at the socket")?;
    let path = path.as_pathname().context("standard input is no socket of a shim")?.to_owned();
    // Standard input of later children.
    let null = std::fs::File::open("/dev/null").context("opening /dev/null")?;
    rustix::stdio::dup2_stdin(&null).context("letting go of standard input")?;
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .context("becoming the parent of orphans")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let served = runtime.context("starting")?.block_on(serve(flags, listener));
    // ORDER: unlink the socket as soon as the server stops.
    let _ = std::fs::remove_file(path);
    served
}

async fn serve(flags: &Flags, listener: UnixListener) -> Result<()> {
    let address = std::env::var("TTRPC_ADDRESS").context("TTRPC_ADDRESS is not set")?;
    let (events, telling) = Events::to(&address, &flags.namespace);
    let (children, done) = (Arc::new(Children::default()), Arc::new(Notify::new()));
    let pod = Pod::new(events, children.clone(), done.clone());
    listener.set_nonblocking(true).context("using the socket")?;
    let listener = Listener::try_from(listener).context("using the socket")?;
    let mut server = Server::new().add_listener(listener);
    for name in NAMES {
        let services = create_task(pod.clone());
        let named = services.into_values().map(|service| (name.to_owned(), service));
        server = server.register_service(named.collect());
    }
    let mut orphans = signal(SignalKind::child()).context("listening for signals")?;
    // A shim ends with its last container; a stop of its starter (containerd) must not end it.
    let _ignored = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()]
        .map(|kind| signal(kind).context("listening for signals"));
    server.start().await.context("starting to serve")?;
    loop {
        tokio::select! {
            () = done.notified() => break,
            _ = orphans.recv() => children.sweep(),
        }
    }
    server.shutdown().await.context("ending")?;
    drop((server, pod));
    let _ = tokio::time::timeout(LAST_WORDS, telling).await;
    Ok(())
}
