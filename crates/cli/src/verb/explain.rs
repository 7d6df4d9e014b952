//! `dormouse explain`

use anyhow::Result;

use crate::command::Global;
use crate::output;
use crate::target::Target;

/// Show whether a container can be checkpointed or sleep, and the reasons if not
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// One JSON line for each object that cannot be saved
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    target: Target,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let (engine, id) = args.target.find(global)?;
    let refusals = engine.explain(&id)?;
    for refusal in &refusals {
        match args.json {
            true => output::json_line(refusal)?,
            false => output::line(&output::printable(&refusal.to_string()))?,
        }
    }
    if refusals.is_empty() && !args.json {
        output::line("it can be checkpointed")?;
    } else if !args.json && engine.explain_sleep(&id)?.is_empty() {
        output::line(
            "it can sleep all the same: the keeper holds its connections to the outside meanwhile",
        )?;
    }
    if !args.json {
        for wait in engine.stirs(&id)? {
            let (pid, process, call) = (wait.pid, &wait.process, wait.call);
            let seconds = wait.at_most.as_secs_f64();
            output::line(&output::printable(&format!(
                "it does not fall asleep by itself while process {pid} ({process}) waits for no \
                 longer than {seconds} s, in {call}(2)"
            )))?;
        }
    }
    // As grep(1) does: 1 for a negative answer without an error.
    Ok(u8::from(!refusals.is_empty()))
}
