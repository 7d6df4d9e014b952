//! Fixtures of the whole-system tests.
//!
//! A [`Host`] is a small private machine: network and mount namespaces that play the host, a
//! neighbour on the wire that plays the outside world, and a scratch `--root`. Nothing is mocked;
//! the kernel is made small instead. The drop of a host removes every container, requests a reset
//! from the program, and then *inspects* the host: a remaining process, mount, cgroup, link, route
//! or nftables rule fails the test.
//!
//! [`image`] makes root filesystems from Debian's archive, once, below `target/testkit`.
//! [`Terminal`] is a person at a keyboard, [`Led`] a program that is traced from step to step.
//! [`seen`] reads the state of a container from procfs as [`fact`]s that tests compare.
//!
//! Fixtures panic on errors: they are called by tests, which can only report an error.
#![forbid(unsafe_code)]

mod cache;
pub mod debian;
mod host;
pub mod image;
mod led;
pub mod leftover;
mod process;
mod registry;
pub mod seen;
pub mod ssh;
mod terminal;
pub mod waiting;

pub use dormouse_record::fact;
pub use host::Host;
pub use led::Led;
pub use process::{
    Output, dormouse, fault_stride, program, run, slowness, soon, wait_until, weak_dormouse,
};
pub use registry::Registry;
pub use terminal::Terminal;
