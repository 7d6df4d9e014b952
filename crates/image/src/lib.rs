//! Images: storage, import and export, and root file systems for containers.
//!
//! **The idea** (composefs, and VServer's unification by other means): the content of every file is
//! an *object*, named by its hash and stored once for all images. A *layer* is an imported tar,
//! stored as a list of its entries plus a recipe that reproduces the same bytes. An *image* is a
//! configuration and a list of layers. The merged layers are written once as a small EROFS file
//! with names, owners, modes and xattrs, and for each file the name of its object. overlayfs
//! combines the two (`metacopy`, data-only lower layer), with a container's writable layer on top.
//! A new container costs one mount; two containers that read the same file share its pages in
//! memory, even from different images.
//!
//! **Never on the host.** A path in an archive is only a place in a tree in memory. The only files
//! written are objects (named by hashes), layer files, and metadata. Therefore no archive, however
//! hostile, reaches the host's file system: not by `..`, not through symlinks, not by hard links.
//! (The stub directory is written by descriptor and one component at a time, from the merged tree,
//! in which no path leads through a symlink.)
//!
//! Layout, locks and publication are described in [`Store`]'s module, `store`; the import of a
//! layer in `pipeline`; the layer file in `layer`; the tree and OCI's merge rules in `tree`; the
//! requests to overlayfs in `mount`.
#![forbid(unsafe_code)]

mod archive;
mod arrival;
mod bound;
mod build;
mod change;
mod codec;
mod digest;
mod error;
#[doc(hidden)]
pub mod fuzz;
mod import;
mod ingest;
mod layer;
mod maintain;
mod metadata;
mod mount;
mod object;
mod pipeline;
mod progress;
pub mod registry;
mod save;
mod store;
mod tree;
mod walk;

pub use arrival::{Expect, Ingested, NewImage};
pub use change::{Change, ChangeKind, Commit};
pub use digest::{Digest, ObjectId};
pub use error::{ImageError, Result};
pub use ingest::Import;
pub use maintain::{Damage, Prune, Pruned};
pub use mount::{Assembled, Layer, Lower, Volume, assemble};
pub use progress::{Progress, Silent};
pub use save::{Blob, Compression, SaveFormat};
pub use store::{Charge, Image, ImageId, LayerRef, Metadata, Store};
