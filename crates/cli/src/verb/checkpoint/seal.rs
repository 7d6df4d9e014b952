//! Encryption and decryption of archives, with the formats of `age`.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use dormouse_parcel::seal::{Keys, Recipient, Seal};

/// LIMIT: bytes of a passphrase.
const PASSPHRASE_BYTES_MAX: u64 = 4096;

#[derive(Debug, clap::Args)]
pub(crate) struct SealArgs {
    /// Encrypt the archive for RECIPIENT (age1..., see age-keygen)
    #[arg(long, short, value_name = "RECIPIENT")]
    recipient: Vec<String>,
    /// Encrypt the archive for the recipients in FILE, one a line
    #[arg(long, short = 'R', value_name = "FILE")]
    recipients_file: Vec<PathBuf>,
    /// Encrypt the archive with a passphrase, the first line of FILE
    #[arg(long, value_name = "FILE", conflicts_with_all = ["recipient", "recipients_file"])]
    passphrase_file: Option<PathBuf>,
}

impl SealArgs {
    /// Reads the named files. ORDER: before any process is stopped, since a file may be missing.
    pub(crate) fn read(&self) -> Result<Option<Seal>> {
        if let Some(path) = &self.passphrase_file {
            return Ok(Some(Seal::of_passphrase(passphrase(path)?)));
        }
        if self.recipient.is_empty() && self.recipients_file.is_empty() {
            return Ok(None);
        }
        let mut all = self.recipient.iter().map(|r| r.parse()).collect::<Result<Vec<_>, _>>()?;
        for path in &self.recipients_file {
            let step = || format!("cannot read recipients from '{}'", path.display());
            let text = std::fs::read_to_string(path).with_context(step)?;
            let found = Recipient::read_list(&text).with_context(step)?;
            if found.is_empty() {
                bail!("there is no recipient in '{}'", path.display());
            }
            all.extend(found);
        }
        Ok(Some(Seal::of_recipients(all)?))
    }
}

/// Writes the output of `write`, encrypted if there is a seal.
pub(crate) fn through(
    seal: Option<&Seal>,
    out: &mut dyn Write,
    write: impl FnOnce(&mut dyn Write) -> Result<()>,
) -> Result<()> {
    let Some(seal) = seal else { return write(out) };
    let step = "cannot encrypt the archive";
    let mut sealed = seal.around(out).context(step)?;
    write(&mut sealed)?;
    sealed.finish().context(step)?;
    Ok(())
}

#[derive(Debug, clap::Args)]
pub(crate) struct KeyArgs {
    /// Open an encrypted archive with the keys in FILE, as age-keygen writes them
    #[arg(long, value_name = "FILE")]
    identity: Vec<PathBuf>,
    /// Open an encrypted archive with a passphrase, the first line of FILE
    #[arg(long, value_name = "FILE")]
    passphrase_file: Option<PathBuf>,
}

impl KeyArgs {
    /// Reads the named files.
    pub(crate) fn read(&self) -> Result<Keys> {
        let mut keys = Keys::default();
        for path in &self.identity {
            let step = || format!("cannot read identities from '{}'", path.display());
            keys.add_identities(BufReader::new(secret(path)?)).with_context(step)?;
        }
        if let Some(path) = &self.passphrase_file {
            keys.set_passphrase(passphrase(path)?);
        }
        Ok(keys)
    }
}

/// Opens a file with a secret. A file that other users may read is refused, as ssh(1) does; a pipe
/// is accepted, for example from a program that has the secret.
fn secret(path: &Path) -> Result<File> {
    let step = || format!("cannot open '{}'", path.display());
    let file = File::open(path).with_context(step)?;
    let meta = file.metadata().with_context(step)?;
    if meta.is_file() && meta.mode() & 0o077 != 0 {
        bail!("others may read the secret in '{}': chmod 600 it", path.display());
    }
    Ok(file)
}

fn passphrase(path: &Path) -> Result<String> {
    let mut line = String::with_capacity(PASSPHRASE_BYTES_MAX as usize + 1);
    let read = BufReader::new(secret(path)?).take(PASSPHRASE_BYTES_MAX + 1).read_line(&mut line);
    read.with_context(|| format!("cannot read a passphrase from '{}'", path.display()))?;
    if line.len() as u64 > PASSPHRASE_BYTES_MAX {
        bail!("the first line of '{}' is too long for a passphrase", path.display());
    }
    line.truncate(line.trim_end_matches(['\r', '\n']).len());
    if line.is_empty() {
        bail!("there is no passphrase in the first line of '{}'", path.display());
    }
    Ok(line)
}
