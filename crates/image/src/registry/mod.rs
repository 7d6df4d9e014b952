//! Registries: `pull` and `push` in the OCI distribution protocol, and docker's before it.
//!
//! **The idea.** A pull is a manifest, a configuration and some layers, each named by its SHA-256.
//! The manifest is trusted because the operator named it; everything else because the manifest (or
//! the configuration) contains its digest. Nothing is used before its digest was compared, with one
//! exception: a layer is unpacked during the download and published only if the digest matches. The
//! registry cannot influence memory usage: manifests, configurations, tokens and error texts are
//! read up to a limit, a layer up to the size in the manifest.
//!
//! **Threads.** One thread runs all connections (a tokio runtime that lives as long as the call);
//! each of at most four layers has one more, which pulls bytes out of a short queue and feeds the
//! store. A slow disk fills the queue and so slows the sender down.
//!
//! **Cut connections.** The received bytes of a layer are also written to `partial/DIGITS` in the
//! store. A broken connection is opened again with a `Range` from the next byte. A killed pull
//! leaves the file, and the next one feeds the store from it and requests the rest. The file is
//! removed when the layer is in the store or turns out to be wrong.
//!
//! **Receivers of credentials.** The registry they belong to, over the protocol that was chosen for
//! it, and the token service that it names (never over http if the registry uses https). Hosts of a
//! redirect or of an upload's `Location` get none, and URLs in a manifest are not followed at all
//! (CVE-2020-15157).
//!
//! The files: `access` (configuration, certificates, credentials), `login` (stores credentials that
//! the registry accepts), `client` (requests, tokens,
//! retries), `manifest` (what is accepted, choice of the platform), `download` (one layer),
//! `pull`, `push`, `known` (which blob of which registry is which layer).
//!
//! Deliberately absent: manifests of schema 1, credential helpers, mirrors, signatures.

mod access;
mod client;
mod download;
mod error;
#[cfg(test)]
mod fake;
mod known;
mod login;
mod manifest;
mod pull;
mod push;
#[cfg(test)]
mod tests;

pub use access::{Access, Credentials};
pub use login::{login, logout};
pub use manifest::Platform;
pub use pull::{PullOptions, pull};
pub use push::{PushOptions, push};

pub(crate) use manifest::fuzz as fuzz_manifest;

use error::Failure;

/// Runs the connections of one call on this thread.
fn block_on<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| Failure::Local { step: "start the network runtime", source })?;
    let result = runtime.block_on(work);
    // A resolver that still waits for an answer must not hold up the end of the command.
    runtime.shutdown_background();
    result
}
