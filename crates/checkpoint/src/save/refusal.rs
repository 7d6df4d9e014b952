//! Refusals: the reasons why something cannot be saved, as texts.

use dormouse_record::Refusal;

/// The reason why something cannot be saved, in words that follow its name.
pub(crate) type Reason = String;

/// A refusal of an object that belongs to no process.
pub(super) fn of_object(why: Reason) -> Refusal {
    Refusal { pid: 0, process: String::new(), what: String::new(), why }
}
