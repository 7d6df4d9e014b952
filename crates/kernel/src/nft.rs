//! nft(8): rules for the network namespace of the thread that calls.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// LIMIT: lines of nft's output that an error repeats.
const LINES: usize = 3;

/// Why rules are not in force.
#[derive(Debug, thiserror::Error)]
pub enum NftError {
    /// The program could not be run.
    #[error("{0}; it is in the package nftables")]
    NotRun(#[source] std::io::Error),
    /// nft refused the rules, with its message.
    #[error("{0}")]
    Refused(String),
}

/// Applies these rules with nft, all of them or none (`nft -f -`).
pub fn apply(rules: &str) -> Result<(), NftError> {
    run(&["-f", "-"], rules).map(drop)
}

/// Applies rules in JSON (libnftables-json(5)). nft reads other text as rules in its own language.
pub fn apply_json(rules: &str) -> Result<(), NftError> {
    run(&["-j", "-f", "-"], rules).map(drop)
}

/// All rules that are in force, as JSON.
pub fn list() -> Result<String, NftError> {
    run(&["-j", "list", "ruleset"], "")
}

/// Runs nft; returns its output.
fn run(arguments: &[&str], input: &str) -> Result<String, NftError> {
    // Debian's path: the process that cleans up after a container may have no PATH.
    let usual = "/usr/sbin/nft";
    let mut child = Command::new(if Path::new(usual).exists() { usual } else { "nft" })
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(NftError::NotRun)?;
    if let Some(mut stdin) = child.stdin.take() {
        // If nft exits early its message is the error.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child.wait_with_output().map_err(NftError::NotRun)?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let message = String::from_utf8_lossy(&output.stderr);
    Err(NftError::Refused(message.lines().take(LINES).collect::<Vec<_>>().join(" ")))
}
