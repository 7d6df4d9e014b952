//! Keeping the store: removing, sweeping, verifying.

use std::time::Duration;

use crate::error::Result;
use crate::store::{Image, ImageId, Store};

/// What is swept.
#[derive(Debug, Clone, Default)]
pub struct Prune {
    /// Images that containers are made from: these stay, whatever else is said.
    pub in_use: Vec<ImageId>,
    /// Remove images that have no name.
    pub unnamed: bool,
    /// Remove every image that is not in use.
    pub all: bool,
    /// Layers of no image are kept for so long, for a pull that was cut and comes again.
    pub grace: Duration,
}

/// What was swept.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pruned {
    /// Images removed.
    pub images: Vec<ImageId>,
    /// Layers removed.
    pub layers: usize,
    /// Objects removed.
    pub objects: usize,
    /// Bytes of disk given back.
    pub bytes: u64,
}

/// Something in the store that is not what it was when it was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// Path below the store's directory.
    pub path: String,
    /// What is wrong with it.
    pub problem: String,
}

impl Store {
    /// Removes an image and its names. Its layers and objects go with the next prune. Whether a
    /// container is made from it is for the caller to know.
    pub fn remove(&self, _image: &Image) -> Result<()> {
        Err(crate::not_yet("remove an image"))
    }

    /// After a failed import: removes what it left, if nobody else imports now.
    pub(crate) fn sweep_if_idle(&self) {}

    /// Removes what nothing refers to. Waits for imports that are under way.
    pub fn prune(&self, _prune: &Prune) -> Result<Pruned> {
        Err(crate::not_yet("sweep the store"))
    }

    /// Reads every object, layer and metadata file and compares it with its hash.
    pub fn verify(&self) -> Result<Vec<Damage>> {
        Err(crate::not_yet("verify the store"))
    }
}
