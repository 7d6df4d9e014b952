//! Network namespaces that were found, and the namespace of a socket, by the number that the kernel gives
//! every namespace (SO_NETNS_COOKIE, Linux 5.14).

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};

use dormouse_kernel::call;
use rustix::io::Errno;
use rustix::net::AddressFamily;

use crate::save::refusal::Reason;

const SO_NETNS_COOKIE: i32 = 71;

/// All network namespaces but the container's own.
#[derive(Debug, Default)]
pub(crate) struct NetNamespaces {
    /// By their links in procfs; or why one cannot be saved.
    pub(crate) by_link: HashMap<String, Result<usize, Reason>>,
    /// By the kernel's numbers of the namespaces.
    pub(crate) by_cookie: HashMap<u64, usize>,
    /// The number of the container's own.
    pub(crate) own: Option<u64>,
    /// Descriptors of the namespaces.
    pub(crate) open: Vec<OwnedFd>,
}

impl NetNamespaces {
    /// The object of a namespace, by its link; `None` if it was created just now, while nothing is
    /// stopped.
    pub(crate) fn object(&self, link: &str) -> Option<Result<usize, Reason>> {
        let why = |why: &Reason| format!("it is in a network namespace of its own {why}");
        Some(self.by_link.get(link)?.as_ref().copied().map_err(why))
    }

    /// All namespaces that can be saved.
    pub(crate) fn open(&self) -> &[OwnedFd] {
        &self.open
    }

    /// The object of the namespace of a socket; `None` for the container's own.
    pub(crate) fn of_socket(&self, socket: &OwnedFd) -> Result<Option<usize>, Reason> {
        if self.by_link.is_empty() {
            return Ok(None);
        }
        let found = cookie(socket).map_err(|e| format!("a socket: {e}"))?;
        if self.own == Some(found) {
            return Ok(None);
        }
        match self.by_cookie.get(&found) {
            Some(object) => Ok(Some(*object)),
            // An accepted connection is in the namespace of the client, which may be outside.
            None if is_unix(socket) => Ok(None),
            None => Err("a socket of a network namespace that is not saved".into()),
        }
    }
}

fn is_unix(socket: &OwnedFd) -> bool {
    rustix::net::sockopt::socket_domain(socket).is_ok_and(|family| family == AddressFamily::UNIX)
}

/// The number of the namespace of a socket.
pub(crate) fn cookie(socket: &OwnedFd) -> Result<u64, Errno> {
    let mut bytes = [0; 8];
    call::socket_option(socket.as_fd(), libc::SOL_SOCKET, SO_NETNS_COOKIE, &mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}
