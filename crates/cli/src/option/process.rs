//! Options of the process that `run`, `create` and `exec` start.

use std::path::PathBuf;

use anyhow::{Context, Result};

use super::Invalid;
use super::env::{Environment, Host};

/// Options of a process.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct ProcessArgs {
    /// Keep its standard input open
    #[arg(long, short)]
    pub(crate) interactive: bool,
    /// Give it a terminal
    #[arg(long, short)]
    pub(crate) tty: bool,
    /// Set an environment variable; NAME or PREFIX* take the caller's
    #[arg(long, short, value_name = "NAME=VALUE")]
    pub(crate) env: Vec<String>,
    /// Read environment variables from a file
    #[arg(long, value_name = "FILE")]
    env_file: Vec<PathBuf>,
    /// Working directory inside
    #[arg(long, short, value_name = "DIR")]
    pub(crate) workdir: Option<String>,
    /// Run as this user and group, names or numbers
    #[arg(long, short, value_name = "USER[:GROUP]")]
    pub(crate) user: Option<String>,
}

impl ProcessArgs {
    /// Reads the texts of the `--env-file`s.
    pub(crate) fn read_env_files(&self) -> Result<Vec<String>> {
        let read = |path: &PathBuf| {
            std::fs::read_to_string(path)
                .with_context(|| format!("cannot read environment file '{}'", path.display()))
        };
        self.env_file.iter().map(read).collect()
    }

    /// Sets the variables of the files, then those of `-e`.
    pub(crate) fn set(
        &self,
        environment: &mut Environment,
        files: &[String],
        host: Host,
    ) -> Result<(), Invalid> {
        files.iter().try_for_each(|text| environment.add_file(text, host))?;
        self.env.iter().try_for_each(|text| environment.add(text, host))
    }
}
