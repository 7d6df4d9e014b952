//! The network stack of an asleep container with `--net private`.
//!
//! The stack lives as long as a socket in it, and the keeper holds the sockets that clients reach. So connections stay
//! open, and the pair to the domain stays. The number of the stack is in `asleep/stack.json`, and a wake enters the
//! stack of the held socket that has this number: a held socket may also be of another stack, if it was accepted from a
//! client on a volume. Without such a socket the newborn makes a new stack.
//!
//! A new user namespace comes with the wake, which has no capability over the old stack. A container that may use
//! CAP_NET_ADMIN or CAP_NET_RAW is therefore not put to sleep ([`crate::spec::saved_network`]).
//!
//! Uses `ground` and `disk`.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use dormouse_bpf::call::netns_cookie;
use dormouse_kernel::Errno;
use dormouse_kernel::call::{Namespace, network_of};
use dormouse_kernel::pidfd;
use dormouse_model::{Config, ContainerId, NetMode};
use dormouse_stacks::stack;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};

use crate::disk::{self, Durable};
use crate::error::{Error, Result};
use crate::ground::Ground;

/// `asleep/stack.json`.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Stack {
    /// The number that the kernel gives every network namespace of a boot (SO_NETNS_COOKIE).
    cookie: u64,
}

fn path(asleep: &Path) -> PathBuf {
    asleep.join("stack.json")
}

fn cookie_here() -> std::result::Result<u64, Errno> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)
        .map_err(|e| Errno::from_raw_os_error(e.raw_os_error()))?;
    netns_cookie(socket.as_fd()).map_err(|e| Errno::from_raw_os_error(e.errno()))
}

/// Records the stack of a container that falls asleep, if it has one of its own.
pub(crate) fn record_of(ground: &Ground, config: &Config, process: BorrowedFd<'_>) -> Result<()> {
    if !matches!(config.spec.net, NetMode::Private { .. }) {
        return Ok(());
    }
    let netns = pidfd::namespace(process, Namespace::Net)
        .map_err(Error::call("cannot open the container's network namespace"))?;
    record(&ground.asleep_dir(&config.id), &netns)
}

/// Records a stack in which sockets of the asleep container with this checkpoint are held.
pub(crate) fn record(asleep: &Path, netns: &OwnedFd) -> Result<()> {
    let enter = |e: Errno| Error::file("cannot enter", "a network namespace")(e.into());
    let cookie = stack::inside_of(netns, cookie_here).map_err(enter)?;
    disk::write_json(&path(asleep), &Stack { cookie }, Durable::No)
}

/// Returns the stack that held sockets have kept.
pub(crate) fn kept(
    ground: &Ground,
    id: &ContainerId,
    held: &[(u32, OwnedFd)],
) -> Result<Option<OwnedFd>> {
    let Some(recorded) = disk::read_json::<Stack>(&path(&ground.asleep_dir(id)))? else {
        return Ok(None);
    };
    // Other objects than sockets are held, too.
    let is_there =
        |socket: &OwnedFd| netns_cookie(socket.as_fd()).is_ok_and(|it| it == recorded.cookie);
    let Some((_, socket)) = held.iter().find(|(_, socket)| is_there(socket)) else {
        return Ok(None);
    };
    let netns = network_of(socket.as_fd());
    netns
        .map(Some)
        .map_err(|e| Error::file("cannot open", "the network of a held socket")(e.into()))
}
