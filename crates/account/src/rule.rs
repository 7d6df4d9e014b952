//! Rules: whose work a task does after a *passage*, a place where work can pass from one account to another.
//!
//! | word | meaning |
//! |---|---|
//! | home of a task | the account of the container that it runs in |
//! | label of a task | the account that it works for now: its home, until a passage changes it |
//! | peer | the account of the container at the other side of a socket |
//! | gate | a kind of passage, and the program in the kernel that sees it |
//! | rank of a rule | its priority, and among rules of one priority, how specific it is |
//!
//! An operator writes [`Rules`] as a file in TOML. A reader takes the whole file or reports all of its errors.
//! [`Rules::compile`] replaces names by numbers, and returns a [`Table`] in which the first row that matches a
//! passage decides. This is what the kernel's programs evaluate. Without a row the label is kept.
//!
//! **Rank.** Of two rules that match a passage, the one with the higher priority decides, and of one priority the
//! more specific one: each of its conditions is at least as narrow as the other's, and one is narrower. Neither may
//! be more specific than the other. If their results differ then, the file has a conflict, and is refused, unless a
//! third rule ranks before both and matches all passages that both match. "Specific" is decided by names and the
//! hierarchy alone: accounts and containers that are made later cause no conflict. A move of an account can, and is
//! refused then.
//!
//! **Shared containers** work for their clients without a rule in the file. Theirs rank below all others
//! ([`Rules::share`]).
//!
//! Source: Reumann et al., *Virtual Services*, USENIX 2000, section 3.2 (classification, and the order of rules).

mod compile;
mod explain;
mod propose;
mod table;
#[cfg(test)]
mod tests;
mod text;

pub use compile::{Compiled, Own};
pub use explain::{Explanation, Other};
pub use propose::{Seen, propose};
pub use table::{
    ACCEPTED, ANY, BELOW_HOME, BELOW_LABEL, BELOW_PEER, Becomes, Gate, LINE, PATH_BYTES_MAX,
    Passage, ROWS_MAX, Row, Table,
};
pub use text::{Errno, Origin, Rule, RuleError, Rules, TEXT_BYTES_MAX, Then, Who};
