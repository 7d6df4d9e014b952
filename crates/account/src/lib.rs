//! Accounts: what resource use is charged to, and their arithmetic. No I/O, no clock.
//!
//! **Accounts.** Every container has one: its *own*, which lasts as long as the container, or one that an
//! operator has *made*, for several containers and for longer. Made accounts nest below each other. *Root* is
//! above all, and takes the use of containers without an account, and the balances of removed ones. An attribute
//! that an account does not set is its parent's ([`Book::keep_days`], [`Book::labels`]).
//!
//! **Exactness.** The kernel counts the use of a container from the start of its cgroup to its removal, which is
//! one *life* ([`Life`]). A [`Charge`] is a reading of these counters, not a difference. A [`Balance`] remembers
//! the last reading of each life and adds only what is new, so a charge that is applied again, or late, or after a
//! newer one, changes nothing. One order matters: a reading of a life is forgotten only when no charge of that life
//! can arrive any more ([`Balance::forget_ended`]).
//!
//! **Conservation.** In a balance, the total equals the sum of its days and of the days that are no longer kept.
//! A balance that moves into another one ([`Balance::absorb`]) arrives there once.
//!
//! **Numbers** name accounts in the kernel, and are listed in [`Number`].
//!
//! **Work for others.** The gates in the kernel count what a life has worked for other accounts ([`Work`]). A charge
//! has these readings beside the counters of the life, and the balances of both sides add them in the same way: what
//! one gives, the other takes.
//!
//! **Not here**: files and locks (`container`, module `account`), and the gates (`bpf`, module `gates`).
#![forbid(unsafe_code)]

mod balance;
mod book;
mod charge;
mod day;
mod host;
mod number;
pub mod rule;
mod usage;
mod wire;

pub use balance::Balance;
pub use book::{
    Account, Book, BookError, ConnectionLimit, DEPTH_MAX, KEEP_DAYS_DEFAULT, OnLimit, ROOT,
};
pub use charge::{Charge, Client, Held, Holder, Life, Work, fit};
pub use day::Day;
pub use host::{AgreedHost, HOSTS_MAX};
pub use number::Number;
pub use usage::Usage;
pub use wire::sent_along;
