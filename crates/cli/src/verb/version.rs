//! `dormouse version`

use anyhow::Result;
use serde::Serialize;

use crate::command::Global;
use crate::output;

/// Show the version of this program and of the kernel
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Version<'a> {
    version: &'a str,
    kernel: &'a str,
    architecture: &'a str,
}

pub(crate) fn run(_: &Global, args: Args) -> Result<u8> {
    let system = rustix::system::uname();
    let version = Version {
        version: env!("CARGO_PKG_VERSION"),
        kernel: &system.release().to_string_lossy(),
        architecture: std::env::consts::ARCH,
    };
    if args.json {
        output::json(&version)?;
    } else {
        output::line(&format!("dormouse {} (Linux {})", version.version, version.kernel))?;
    }
    Ok(0)
}
