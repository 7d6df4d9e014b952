//! The command line that containerd gives a shim: flags as Go programs read them, then an action.

use anyhow::{Context, Result, bail};

/// The command line.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// containerd's namespace.
    pub namespace: String,
    /// The container that is started or deleted.
    pub id: String,
    /// Its bundle; the working directory where it is empty.
    pub bundle: String,
    /// containerd's own socket.
    pub address: String,
    /// `start`, `delete`, or our own `serve`.
    pub action: String,
    /// Show the version.
    pub version: bool,
    /// Show the features of the runtime.
    pub info: bool,
}

impl Flags {
    /// Reads words.
    pub fn read(words: impl IntoIterator<Item = String>) -> Result<Self> {
        let mut flags = Self::default();
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            let Some(flag) = word.strip_prefix('-').map(|w| w.strip_prefix('-').unwrap_or(w))
            else {
                flags.action = word;
                break;
            };
            let (name, value) = match flag.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (flag, None),
            };
            let place = match name {
                "v" | "version" => {
                    flags.version = true;
                    continue;
                }
                "info" => {
                    flags.info = true;
                    continue;
                }
                "debug" => continue,
                "namespace" => &mut flags.namespace,
                "id" => &mut flags.id,
                "bundle" => &mut flags.bundle,
                "address" => &mut flags.address,
                // Events go over TTRPC_ADDRESS.
                "publish-binary" | "socket" => &mut String::new(),
                other => bail!("there is no flag -{other}"),
            };
            *place = match value {
                Some(value) => value,
                None => words.next().with_context(|| format!("-{name} wants a value"))?,
            };
        }
        Ok(flags)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containerds_arguments_are_parsed() {
        let line = "-namespace k8s.io -address /run/x.sock -publish-binary=/bin/c -id web -bundle /b \
                    delete";
        let flags = Flags::read(line.split_whitespace().map(str::to_owned)).expect("good");
        assert_eq!((flags.namespace.as_str(), flags.id.as_str()), ("k8s.io", "web"));
        assert_eq!((flags.bundle.as_str(), flags.action.as_str()), ("/b", "delete"));
        for bad in ["-nothing", "-id"] {
            assert!(Flags::read([bad.to_owned()]).is_err(), "{bad}");
        }
    }
}
