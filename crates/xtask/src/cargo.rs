//! Cargo, run by a program that Cargo runs.

use std::process::Command;

/// Cargo without the variables that it has set for this program. Build scripts that depend on one of them would
/// run again, and all that depends on them would be compiled again, each time.
pub fn cargo() -> Command {
    let mut command = Command::new("cargo");
    let of_ours = |name: &str| {
        let prefixes = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_"];
        prefixes.iter().any(|prefix| name.starts_with(prefix))
    };
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(of_ours) {
            command.env_remove(name);
        }
    }
    command
}
