//! Options for access to registries, shared by `pull`, `push`, `login` and `logout`.

use std::path::PathBuf;

use anyhow::Result;
use clap::ArgAction;
use dormouse_container::Engine;
use dormouse_image::registry::{Access, Credentials};

use crate::option::{Invalid, flag};

/// Access to a registry.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct RegistryArgs {
    /// Require https and a known certificate; =false for plain http
    #[arg(long, value_name = "BOOL", default_value = "true", num_args = 0..=1, require_equals = true, default_missing_value = "true", action = ArgAction::Set)]
    pub(crate) tls_verify: String,
    /// User and password instead of those stored by login
    #[arg(long, value_name = "USER:PASSWORD")]
    pub(crate) creds: Option<String>,
}

impl RegistryArgs {
    /// Converts the options for the registry's client.
    pub(crate) fn access(&self, engine: &Engine) -> Result<Access> {
        let verify = self.tls_verify.is_empty() || flag("--tls-verify", Some(&self.tls_verify))?;
        let mut access = access(engine.places().etc.clone());
        access.insecure = !verify;
        access.credentials = self.creds.as_deref().map(credentials).transpose()?;
        Ok(access)
    }
}

/// Returns access by the configuration only.
pub(crate) fn access(config_dir: PathBuf) -> Access {
    Access { config_dir, credentials: None, insecure: false }
}

/// Reads `USER:PASSWORD`. The password is never part of an error.
fn credentials(text: &str) -> Result<Credentials, Invalid> {
    match text.split_once(':') {
        Some((user, secret)) if !user.is_empty() => {
            Ok(Credentials { user: user.to_owned(), secret: secret.to_owned() })
        }
        _ => Err(Invalid::new("credentials", "...", "USER:PASSWORD")),
    }
}
