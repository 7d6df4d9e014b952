//! Images: where they are kept, how they come in and go out, and how a container gets a root
//! filesystem from one.
//!
//! **The idea** (composefs, and VServer's unification by other means): the content of every file is
//! an *object*, named by its hash, kept once for all images. A *layer* is a tar that came from
//! somewhere; it is kept as a list of its entries plus a recipe from which the very same bytes can
//! be made again. An *image* is a configuration and a list of layers; their merge is written once as
//! a small EROFS file that holds names, owners, modes and xattrs, and for each file the name of its
//! object. overlayfs puts the two together (`metacopy`, data-only lower layer), and on top of it a
//! container's writable layer. A new container costs one mount; two containers that read the same
//! file share its pages in memory, whichever images they come from.
//!
//! **Never on the host.** A path in an archive names a place in a tree in memory, nothing else: the
//! only files written are objects (named by hashes), layer files, and metadata. So no archive, however
//! hostile, reaches the host's file system: not by `..`, not through symlinks, not by hard links.
//! (The stub directory is written by descriptor and one component at a time, from the merged tree,
//! in which no path leads through a symlink.)
//!
//! Layout, locks and publication are told in [`Store`]'s module, `store`; the way of a layer in
//! `pipeline`; the layer file in `layer`; the tree and OCI's merge rules in `tree`; what overlayfs
//! is asked for in `mount`.
#![forbid(unsafe_code)]

mod archive;
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

pub use change::{Change, ChangeKind, Commit};
pub use digest::{Digest, ObjectId};
pub use error::{ImageError, Result};
pub use ingest::{Expect, Import, Ingested, NewImage};
pub use maintain::{Damage, Prune, Pruned};
pub use mount::{Assembled, Layer, Lower, Volume, assemble};
pub use progress::{Progress, Silent};
pub use save::{Blob, Compression, SaveFormat};
pub use store::{Image, ImageId, LayerRef, Metadata, Store};
