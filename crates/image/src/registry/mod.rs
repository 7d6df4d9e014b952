//! Registries: `pull` and `push` in the OCI distribution protocol, and docker's before it.
//!
//! **The idea.** A pull is a manifest, a configuration and some layers, each named by its SHA-256.
//! The manifest is trusted because the operator named it, everything else because the manifest (or
//! the configuration) names its digest: so nothing is used before its digest was compared, but a
//! layer's bytes, which are unpacked while they come and published only when they are the right
//! ones. Nothing a registry sends decides how much memory is used: manifests, configurations,
//! tokens and error texts are read up to a limit, a layer up to the size that the manifest states.
//!
//! **Threads.** One thread runs all connections (a tokio runtime that lives as long as the call);
//! each of at most four layers has one more, which pulls bytes out of a short queue and feeds the
//! store. A slow disk fills the queue and so slows the sender down.
//!
//! **Cut connections.** What arrives of a layer is also written to `partial/DIGITS` in the store.
//! A connection that breaks is opened again with a `Range` from the byte that was reached; a pull
//! that was killed leaves the file, and the next one feeds the store from it and asks for the rest.
//! The file goes when the layer is in the store or turns out to be wrong.
//!
//! **Whom credentials are shown to.** The registry they belong to, over the protocol that was
//! chosen for it, and the token service that it names (never over http when the registry speaks
//! https). Not to hosts that a redirect or an upload's `Location` leads to, and not to URLs in a
//! manifest (CVE-2020-15157), which are not followed at all.
//!
//! The files: `access` (configuration, certificates, credentials), `client` (requests, tokens,
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
mod manifest;
mod pull;
mod push;
#[cfg(test)]
mod tests;

pub use access::{Access, Credentials, login, logout};
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
