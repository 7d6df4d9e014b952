//! The names of records and of their readers and writers, for callers of this crate.

pub use dormouse_parcel::DirSink as Writer;
pub(crate) use dormouse_parcel::warm;
pub use dormouse_parcel::{
    Base, DirSink, MAGIC, PageFiles, Reader, SECTION_BYTES_MAX, Section, Sink, Source, VERSION,
    archive, part_name, seal,
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
