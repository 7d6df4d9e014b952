//! Images from files: a directory, a tar, an OCI layout or archive, a docker archive.

use std::path::Path;

use dormouse_model::Reference;

use crate::error::Result;
use crate::progress::Progress;
use crate::store::{ImageId, Store};

impl Store {
    /// Takes in what is at `path`, told by its content: a directory with an `oci-layout` file, any
    /// other directory (a root filesystem), an archive of an OCI layout, of `docker save`, or a tar
    /// of a root filesystem; archives may be compressed by gzip or zstd.
    ///
    /// A root filesystem becomes an image of one layer with an empty configuration. Without `name`
    /// the image gets the names that the archive says.
    pub fn import(
        &self,
        _path: &Path,
        _name: Option<&Reference>,
        _progress: &dyn Progress,
    ) -> Result<ImageId> {
        Err(crate::not_yet("import"))
    }
}
