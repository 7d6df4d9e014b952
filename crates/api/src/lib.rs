//! The data that Dormouse shows to programs: one type for each JSON object of the commands.
//!
//! The types hold values and their serialization, and nothing else. The engine fills them, and a
//! program prints or sends them. Fields are only ever added, and their order is the printed order.
//!
//! | type | printed by |
//! |---|---|
//! | [`Summary`] | `ps --json` |
//! | [`Inspect`], [`Image`] | `inspect --json` |
//! | [`compatible`] | `inspect`, and lists with `--format json` |
//! | [`Stats`] | `stats --json` |
//! | [`Event`] | `events --json`, and stored in `LIB/events` |
//!
//! Types that borrow describe a list of a hundred thousand containers without a copy of each.
#![forbid(unsafe_code)]

pub mod compatible;
mod container;
mod event;
mod image;
mod stats;
mod time;

pub use container::{Inspect, Port, Summary, WakeFailed};
pub use event::{Event, EventKind};
pub use image::Image;
pub use stats::Stats;
pub use time::rfc3339;
