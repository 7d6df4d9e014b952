//! The output of a command.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

/// The standard output of a command; an error contains its standard error.
pub fn output_of(mut command: Command) -> Result<String> {
    let shown = format!("{command:?}");
    let output = command.stdin(Stdio::null()).output().with_context(|| shown.clone())?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{shown}: {}\n{stderr}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
