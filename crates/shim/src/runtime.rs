//! Calls of `dormouse-oci`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, bail, ensure};
use containerd_shim_protos::protobuf::Message;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::shim::oci::Options;
use serde::{Deserialize, Serialize};

use crate::stream::Ends;

/// The file in the bundle with settings for a later shim.
const RECORD: &str = "runtime.json";
/// In the bundle: the root of `dormouse-oci`.
const ROOT: &str = "oci";

/// The call of the runtime for one container.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Runtime {
    /// `dormouse-oci`.
    pub program: PathBuf,
    root: PathBuf,
    systemd_cgroup: bool,
    no_pivot: bool,
    no_new_keyring: bool,
    #[serde(skip)]
    bundle: PathBuf,
}

impl Runtime {
    /// By containerd's options, which are those of its runc shim.
    pub fn new(bundle: &Path, options: Option<&Any>) -> Result<Self> {
        let options = match options {
            Some(any) if any.type_url.ends_with("containerd.runc.v1.Options") => {
                Options::parse_from_bytes(&any.value).context("reading the runtime's options")?
            }
            _ => Options::new(),
        };
        ensure!(options.shim_cgroup.is_empty(), "ShimCgroup: this shim stays where it is started");
        let program = match options.binary_name.as_str() {
            "" => beside_us().unwrap_or_else(|| "dormouse-oci".into()),
            name => name.into(),
        };
        let root = match options.root.as_str() {
            "" => bundle.join(ROOT),
            root => root.into(),
        };
        let runtime = Self {
            program,
            root,
            systemd_cgroup: options.systemd_cgroup,
            no_pivot: options.no_pivot_root,
            no_new_keyring: options.no_new_keyring,
            bundle: bundle.to_owned(),
        };
        let text = serde_json::to_vec(&runtime).context("writing down the runtime")?;
        fs::write(bundle.join(RECORD), text).context("writing down the runtime")?;
        Ok(runtime)
    }

    /// As it was written down when the container was made.
    pub fn of(bundle: &Path) -> Result<Self> {
        match fs::read(bundle.join(RECORD)) {
            Ok(text) => {
                let read: Self = serde_json::from_slice(&text).context(RECORD)?;
                Ok(Self { bundle: bundle.to_owned(), ..read })
            }
            // Without the record nothing was created.
            Err(_) => Self::new(bundle, None),
        }
    }

    /// A call, by hand.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("--root").arg(&self.root);
        if self.systemd_cgroup {
            command.arg("--systemd-cgroup");
        }
        command.args(words).stdin(Stdio::null());
        command
    }

    /// Calls a verb; gives what it prints.
    pub async fn call(&self, words: &[&str]) -> Result<Vec<u8>> {
        let out = tokio::process::Command::from(self.command(words)).output().await;
        let out = out.with_context(|| format!("executing {}", self.program.display()))?;
        if out.status.success() {
            return Ok(out.stdout);
        }
        let stderr = String::from_utf8_lossy(&out.stderr);
        bail!("{}", message(&stderr))
    }

    /// Calls a verb that gives its standard streams to a process of the container.
    pub async fn start(&self, words: &[&str], ends: Ends) -> Result<()> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        // Errors cannot be reported over the container's streams.
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let log = self.bundle.join(format!("oci-{number}.log"));
        let mut command = Command::new(&self.program);
        command.arg("--root").arg(&self.root).arg("--log").arg(&log);
        if self.systemd_cgroup {
            command.arg("--systemd-cgroup");
        }
        command.args(words);
        let [input, output, error] = ends.0;
        command.stdin(input).stdout(output).stderr(error);
        let status = tokio::process::Command::from(command).status().await;
        let errors = fs::read_to_string(&log).unwrap_or_default();
        let _ = fs::remove_file(&log); // may be missing
        let status = status.with_context(|| format!("executing {}", self.program.display()))?;
        ensure!(status.success(), "{}", message(&errors));
        Ok(())
    }

    /// Flags of `create` that the options stand for.
    pub fn create_flags(&self) -> impl Iterator<Item = &'static str> {
        let flags = [(self.no_pivot, "--no-pivot"), (self.no_new_keyring, "--no-new-keyring")];
        flags.into_iter().filter(|(given, _)| *given).map(|(_, flag)| flag)
    }
}

/// The runtime that was installed together with this program.
fn beside_us() -> Option<PathBuf> {
    let path = std::env::current_exe().ok()?.with_file_name("dormouse-oci");
    path.is_file().then_some(path)
}

/// Returns the message of the last error line of a log: `time="..." level=error msg="..."`.
fn message(log: &str) -> String {
    let line = log.lines().rev().find(|line| line.contains("level=error"));
    let quoted = line.and_then(|line| line.split_once(" msg=")).map(|(_, quoted)| quoted);
    // A text in quotes as Rust writes it is one of JSON, but for rare characters.
    let text = quoted.and_then(|quoted| serde_json::from_str(quoted).ok());
    text.or_else(|| quoted.map(str::to_owned)).unwrap_or_else(|| log.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_is_found_in_a_line_of_the_log() {
        let log = "time=\"x\" level=warning msg=\"no\"\n\
                   time=\"x\" level=error msg=\"dormouse-oci create: \\\"a\\\" is bad\"\n";
        assert_eq!(message(log), "dormouse-oci create: \"a\" is bad");
        assert_eq!(message("it ended\n"), "it ended");
    }
}
