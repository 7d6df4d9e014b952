//! `dormouse completion`

use anyhow::Result;

use crate::command::{Global, whole};
use crate::output;

/// Print the completion script of a shell
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Name of the shell
    shell: clap_complete::Shell,
}

pub(crate) fn run(_: &Global, args: Args) -> Result<u8> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut whole(), "dormouse", &mut text);
    output::print(text)?;
    Ok(0)
}
