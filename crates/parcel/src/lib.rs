//! Checkpoints as bytes: directories, archives and encrypted archives.
//!
//! The records of crate `record` and the pages that they refer to are written and read here. This crate
//! knows no process.
//!
//! A checkpoint is written to a [`Sink`] and restored from a [`Source`]; both are directories here.
//!
//! # The format on disk
//!
//! A directory, mode 0700, of files, mode 0600:
//!
//! ```text
//! records   "DORMCKPT"  u32 version  u32 sections
//!           sections:   16 bytes name  u64 offset  u64 length  32 bytes BLAKE3
//!           their bytes, JSON each, in the order of the table
//!           32 bytes    BLAKE3 of everything before
//! pages     contents of memory, 4,096 bytes a page
//! pages.1   more of them; up to `pages.7`
//! ```
//!
//! **Several files of pages** are numbered as one: each begins at a chunk boundary, and no record
//! refers to pages in the gap between two files. All files except the last are files of an earlier
//! checkpoint of the same container, by hard links ([`Base`]): their pages have not changed since,
//! and were not written again. No file is written to after its publication, so removal, move or
//! damage of one checkpoint does not change another.
//!
//! Numbers are little-endian. The section `page` holds a BLAKE3 of every [`CHUNK_BYTES`] of pages,
//! so the last 32 bytes of `records` identify all of a checkpoint. Sections: `about`
//! ([`About`]), `process` ([`Process`]), `memory` ([`Memory`]), `object` ([`Object`]), `page`
//! ([`Pages`]).
//!
//! **Versions.** Records only gain fields and kinds. [`VERSION`] changes if an old reader would
//! misread the records.
//!
//! **Trust.** None: a checkpoint may come from any source. The bytes are checked as a whole and per
//! part ([`Reader`]), and then every number that refers to something ([`check`]), before anything
//! is made from them.
//!
//! **One stream** of a checkpoint and what belongs to it, for a transfer: [`archive`]; encrypted,
//! so that only the chosen recipients can read it: [`seal`].
//!
//! **Published** by rename of a directory that is complete and on the disk ([`DirSink`]).
//!
//! [`About`]: dormouse_record::About
//! [`Process`]: dormouse_record::Process
//! [`Memory`]: dormouse_record::Memory
//! [`Object`]: dormouse_record::Object
//! [`Pages`]: dormouse_record::Pages
//! [`CHUNK_BYTES`]: dormouse_record::CHUNK_BYTES
//! [`check`]: dormouse_record::check
#![forbid(unsafe_code)]

mod append;
pub mod archive;
mod base;
mod dir;
mod part;
mod read;
pub mod seal;
mod section;
mod sink;
mod source;

pub use append::warm;
pub use base::Base;
pub use dir::DirSink;
pub use part::{PageFiles, part_name};
pub use read::Reader;
pub use section::{MAGIC, SECTION_BYTES_MAX, Section, VERSION};
pub use sink::Sink;
pub use source::Source;
