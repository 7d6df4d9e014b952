//! Making an image of layers.

use crate::error::Result;
use crate::ingest::NewImage;
use crate::store::{ImageId, Store};

pub(crate) fn image(_store: &Store, _image: NewImage<'_>) -> Result<ImageId> {
    Err(crate::not_yet("make an image"))
}
