//! The names of records and of their readers and writers, for callers of this crate.

pub(crate) use dormouse_parcel::warm;
pub use dormouse_parcel::{
    Base, MAGIC, PageFiles, Reader, SECTION_BYTES_MAX, Section, VERSION, Writer, archive,
    part_name, seal,
};
pub use dormouse_record::*;

pub(crate) use crate::terminal_modes;

/// Checks of records.
pub mod check {
    pub use dormouse_record::check::*;

    #[cfg(test)]
    pub(crate) mod tests {
        pub(crate) use dormouse_record::sample::small;
    }
}
