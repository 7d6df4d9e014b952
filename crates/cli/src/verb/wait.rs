//! `dormouse wait`

use anyhow::Result;

use crate::command::Global;
use crate::{fail, output};

/// Wait until containers stop and print their exit codes
///
/// An unknown exit is printed as "unknown".
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Names or ids
    #[arg(required = true, value_name = "CONTAINER")]
    names: Vec<String>,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    Ok(fail::for_each(&args.names, |name| {
        let exit = engine.wait(&engine.find(name)?)?;
        output::line(&exit.code.map_or_else(|| "unknown".to_owned(), |c| c.to_string()))
    }))
}
