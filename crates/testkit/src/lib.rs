//! Fixtures of the whole-system tests.
//!
//! A [`Host`] is a small machine of its own: network and mount namespaces that play the host, a
//! neighbour on the wire that plays the outside world, and a scratch `--root`. Nothing is mocked;
//! the kernel is made small instead. When a host is dropped it removes every container, asks the
//! program to give the host back, and then *looks*: a process, mount, cgroup, link, route or
//! nftables rule that is left fails the test.
//!
//! [`image`] makes root filesystems from Debian's archive, once, below `target/testkit`.
//! [`Terminal`] is a person at a keyboard, [`Led`] a program that is led from step to step.
//!
//! Fixtures panic where they cannot go on: they are called by tests, and a test has no other use
//! for an error than to show it.
#![forbid(unsafe_code)]

pub mod debian;
mod host;
pub mod image;
mod led;
pub mod leftover;
mod process;
mod registry;
pub mod ssh;
mod terminal;

pub use host::Host;
pub use led::Led;
pub use process::{Output, dormouse, program, run, slowness, wait_until, weak_dormouse};
pub use registry::Registry;
pub use terminal::Terminal;
