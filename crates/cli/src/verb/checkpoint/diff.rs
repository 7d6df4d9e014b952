//! `dormouse checkpoint diff`

use anyhow::Result;
use dormouse_checkpoint::diff;
use dormouse_container::{Engine, From};
use dormouse_parcel::Reader;

use crate::output;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// One JSON line for each difference
    #[arg(long)]
    json: bool,
    /// Name or id
    #[arg(value_name = "CONTAINER")]
    name: String,
    /// Number of the older checkpoint
    #[arg(value_name = "N")]
    old: u32,
    /// Number of the newer one, the last unless given
    #[arg(value_name = "M")]
    new: Option<u32>,
}

pub(crate) fn run(engine: &Engine, args: &Args) -> Result<u8> {
    let id = engine.find(&args.name)?;
    let open = |which: From| -> Result<Reader> {
        let reader = Reader::open(&engine.checkpoint_path(&id, &which)?)?;
        Ok(reader)
    };
    let old = open(From::Number(args.old))?;
    let new = open(args.new.map_or(From::Last, From::Number))?;
    for difference in diff(&old, &new)? {
        match args.json {
            true => output::json_line(&difference)?,
            false => output::line(&output::printable(&difference.to_string()))?,
        }
    }
    Ok(0)
}
