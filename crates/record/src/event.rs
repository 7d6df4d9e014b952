//! Descriptors that report events: eventfd, signalfd, epoll.

use serde::{Deserialize, Serialize};

/// eventfd(2).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Its counter.
    pub count: u64,
    /// EFD_SEMAPHORE.
    pub semaphore: bool,
    /// `O_*`.
    pub flags: u32,
}

/// signalfd(2).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignalFd {
    /// The signals that it receives.
    pub mask: u64,
    /// `O_*`.
    pub flags: u32,
}

/// epoll_create1(2).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Epoll {
    /// Its items.
    pub items: Vec<EpollItem>,
    /// `O_*`; none in what older versions wrote.
    #[serde(default)]
    pub flags: u32,
}

/// One item of an epoll (epoll_ctl(2)).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EpollItem {
    /// The process of the descriptor.
    pub pid: u32,
    /// The descriptor.
    pub number: u32,
    /// `EPOLL*`.
    pub events: u32,
    /// The program's data (`epoll_event.data`).
    pub data: u64,
}

impl EpollItem {
    /// Flags that stay when an item of EPOLLONESHOT is disarmed by its event (EP_PRIVATE_BITS of the kernel's
    /// fs/eventpoll.c).
    pub const FLAGS: u32 =
        (libc::EPOLLONESHOT | libc::EPOLLET | libc::EPOLLWAKEUP | libc::EPOLLEXCLUSIVE) as u32;

    /// Whether it is of EPOLLONESHOT, has had its event, and was not armed again since.
    pub fn is_spent(&self) -> bool {
        self.events & libc::EPOLLONESHOT as u32 != 0 && self.events & !Self::FLAGS == 0
    }
}
