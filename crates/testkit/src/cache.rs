//! The place of what tests make once and keep.

use std::path::{Path, PathBuf};

/// The directory of images: `target/testkit` of the repository.
pub fn cache() -> PathBuf {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2);
    top.expect("the crate lies two folders below the top").join("target/testkit")
}
