//! `dormouse explain`

use anyhow::Result;

use crate::command::Global;
use crate::output;

/// Tell whether a container can be checkpointed, and if not, what is why
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// One JSON line for each thing that cannot be saved
    #[arg(long)]
    json: bool,
    /// Name or id
    #[arg(value_name = "CONTAINER")]
    name: String,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    let refusals = engine.explain(&engine.find(&args.name)?)?;
    for refusal in &refusals {
        match args.json {
            true => output::json_line(refusal)?,
            false => output::line(&output::printable(&refusal.to_string()))?,
        }
    }
    if refusals.is_empty() && !args.json {
        output::line("it can be checkpointed")?;
    }
    // As grep does: 1 where the answer is no, and nothing failed.
    Ok(u8::from(!refusals.is_empty()))
}
