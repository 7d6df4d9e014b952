//! The files with balances and made accounts, and the account of a container.
//!
//! Uses `ground`.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use dormouse_account::{Account, Balance, Book, Holder, KEEP_DAYS_DEFAULT, Number, ROOT};
use dormouse_model::{ContainerId, Name, Spec};

use crate::disk::{self, Durable, FILE_MODE, Lock};
use crate::error::{Error, Result};
use crate::event::now_unix_ms;
use crate::ground::Ground;

/// LIMIT: a larger balance is damaged. One life that may be read again has some 200 bytes.
const BALANCE_BYTES_MAX: u64 = 256 << 20;

/// Balances that are synchronized to the disk one by one; more are synchronized together, with all other files of
/// the file system.
const ONE_BY_ONE: usize = 8;

/// The files below `LIB/accounts`.
pub(super) struct Place(PathBuf);

impl Place {
    pub(super) fn of(ground: &Ground) -> Self {
        Self(ground.places.lib.join("accounts"))
    }

    pub(super) fn make(&self) -> Result<()> {
        disk::make_dir(&self.made(), 0o700)?;
        disk::make_dir(&self.balances(), 0o700)
    }

    pub(super) fn charges(&self) -> PathBuf {
        self.0.join("charges")
    }

    pub(super) fn taken(&self) -> PathBuf {
        self.0.join("charges.taken")
    }

    pub(super) fn made(&self) -> PathBuf {
        self.0.join("made")
    }

    pub(super) fn rules(&self) -> PathBuf {
        self.0.join("rules.toml")
    }

    pub(super) fn hosts(&self) -> PathBuf {
        self.0.join("hosts.json")
    }

    fn given(&self) -> PathBuf {
        self.0.join("given")
    }

    fn lock(&self) -> PathBuf {
        self.0.join("lock")
    }

    fn balances(&self) -> PathBuf {
        self.0.join("balances")
    }

    fn account(&self, name: &Name) -> PathBuf {
        self.made().join(format!("{name}.json"))
    }

    fn balance(&self, holder: &Holder) -> PathBuf {
        self.balances().join(format!("{}.json", stem(holder)))
    }
}

/// Returns the account of a container with these choices. A container that is removed when it stops would take an
/// account of its own with it.
pub(super) fn holder(spec: &Spec, id: &ContainerId) -> Holder {
    match &spec.account {
        Some(name) if name.as_str() == ROOT => Holder::Root,
        Some(name) => Holder::Made(name.clone()),
        None if spec.auto_remove => Holder::Root,
        None => Holder::Own(id.clone()),
    }
}

fn stem(holder: &Holder) -> String {
    match holder {
        Holder::Root => "root".to_owned(),
        Holder::Own(id) => format!("own-{id}"),
        Holder::Made(name) => format!("made-{name}"),
    }
}

fn holder_of(stem: &str) -> Option<Holder> {
    match stem.split_once('-') {
        None if stem == "root" => Some(Holder::Root),
        Some(("own", id)) => id.parse().ok().map(Holder::Own),
        Some(("made", name)) => name.parse().ok().map(Holder::Made),
        _ => None,
    }
}

/// Waits for the lock of the balances.
pub(super) fn lock(ground: &Ground) -> Result<Lock> {
    Lock::take_new(&Place::of(ground).lock())
}

/// Takes the lock of the balances if it is free.
pub(super) fn try_lock(ground: &Ground) -> Result<Option<Lock>> {
    Lock::try_take_new(&Place::of(ground).lock())
}

/// Reads the accounts that operators have made.
pub(super) fn book(ground: &Ground) -> Result<Book> {
    let mut accounts: Vec<Account> = Vec::new();
    for path in records(&Place::of(ground).made())? {
        let read = disk::read_with_checksum::<Account>(&path).map_err(account_damaged)?;
        accounts.extend(read); // one may have been removed meanwhile
    }
    Ok(Book::new(accounts))
}

/// Reads one account that an operator has made; `None` without a record.
pub(super) fn made(ground: &Ground, name: &Name) -> Result<Option<Account>> {
    disk::read_with_checksum(&Place::of(ground).account(name)).map_err(account_damaged)
}

pub(super) fn account_damaged(e: Error) -> Error {
    match e {
        Error::Corrupt { path, what } => Error::AccountDamaged { path, what },
        other => other,
    }
}

/// The records in a directory, without files in progress.
fn records(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(Error::file("cannot list", dir))?,
    };
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry.map_err(Error::file("cannot list", dir))?.path();
        if path.extension().is_some_and(|e| e == "json") {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// Writes an account.
pub(super) fn write_account(ground: &Ground, account: &Account) -> Result<()> {
    let path = Place::of(ground).account(&account.name);
    disk::write_json(&path, &disk::with_checksum(account)?, Durable::Yes)
}

/// Removes the accounts that were closed and whose balance has moved.
pub(super) fn remove_closed(ground: &Ground, book: &Book) -> Result<()> {
    let place = Place::of(ground);
    for account in book.iter().filter(|account| account.is_closing) {
        disk::remove(&place.account(&account.name))?;
    }
    Ok(())
}

/// Returns the largest number that was given to an account.
pub(super) fn given(ground: &Ground) -> Result<u32> {
    let path = Place::of(ground).given();
    Ok(disk::read_json(&path).map_err(account_damaged)?.unwrap_or(0))
}

pub(super) fn write_given(ground: &Ground, number: Number) -> Result<()> {
    disk::write_json(&Place::of(ground).given(), &number, Durable::Yes)
}

/// Returns the accounts that have a balance.
pub(super) fn holders(ground: &Ground) -> Result<Vec<Holder>> {
    let paths = records(&Place::of(ground).balances())?;
    let stem = |path: &PathBuf| holder_of(path.file_stem()?.to_str()?);
    Ok(paths.iter().filter_map(stem).collect())
}

/// Reads a balance. A damaged one is set aside, and an event names it: what was charged since begins again, with
/// the lives that are read again.
pub(super) fn read(ground: &Ground, holder: &Holder) -> Result<Balance> {
    let path = Place::of(ground).balance(holder);
    match disk::read_with_checksum_within(&path, BALANCE_BYTES_MAX) {
        Err(Error::Corrupt { what, .. }) => {
            let aside = path.with_extension(format!("{}.damaged", now_unix_ms()));
            fs::rename(&path, &aside).map_err(Error::file("cannot set aside", &path))?;
            let file = aside.display().to_string();
            ground.record("charge_lost", "", "", &[("balance", file), ("error", what)]);
            Ok(Balance::default())
        }
        other => Ok(other?.unwrap_or_default()),
    }
}

/// Replaces balances, each in one step. They are on the disk when this returns.
///
/// ORDER: contents, then names: after a power cut a name never has half of a balance.
pub(super) fn write(ground: &Ground, balances: &[(Holder, Balance)]) -> Result<()> {
    if balances.is_empty() {
        return Ok(());
    }
    let place = Place::of(ground);
    place.make()?;
    let dir = place.balances();
    let open = File::open(&dir).map_err(Error::file("cannot open", &dir))?;
    for (holder, balance) in balances {
        let path = new(&place, holder);
        let text = serde_json::to_vec(&disk::with_checksum(balance)?)
            .map_err(|e| Error::Invalid(e.to_string()))?;
        let step = || -> std::io::Result<()> {
            let mut options = File::options();
            let options = options.write(true).create(true).truncate(true).mode(FILE_MODE);
            let mut file = options.open(&path)?;
            file.write_all(&text)?;
            if balances.len() <= ONE_BY_ONE { file.sync_all() } else { Ok(()) }
        };
        step().map_err(Error::file("cannot write", &path))?;
    }
    if balances.len() > ONE_BY_ONE {
        let synced = rustix::fs::syncfs(&open);
        synced.map_err(|e| Error::file("cannot synchronize", &dir)(e.into()))?;
    }
    for (holder, _) in balances {
        let (from, to) = (new(&place, holder), place.balance(holder));
        fs::rename(&from, &to).map_err(Error::file("cannot write", &to))?;
    }
    open.sync_all().map_err(Error::file("cannot synchronize", &dir))
}

fn new(place: &Place, holder: &Holder) -> PathBuf {
    place.balance(holder).with_extension("new")
}

/// Removes a balance that has moved.
pub(super) fn remove(ground: &Ground, holder: &Holder) -> Result<()> {
    disk::remove(&Place::of(ground).balance(holder))
}

/// Returns how many days the figures of a day are kept in a balance.
pub(super) fn keep_days(book: &Book, holder: &Holder) -> u32 {
    match holder {
        Holder::Made(name) => book.keep_days(name),
        Holder::Root | Holder::Own(_) => book.root().keep_days.unwrap_or(KEEP_DAYS_DEFAULT),
    }
}

/// Returns the account to which the balance of one that is gone moves.
pub(super) fn heir(book: &Book, holder: &Holder) -> Holder {
    match holder {
        Holder::Made(name) => match book.find(name).ok().and_then(|account| account.parent.clone())
        {
            Some(parent) if parent != book.root().name => Holder::Made(parent),
            _ => Holder::Root,
        },
        Holder::Root | Holder::Own(_) => Holder::Root,
    }
}

/// Returns the key by which a balance that has moved is known. Of accounts by one name each has its own number.
pub(super) fn key(book: &Book, holder: &Holder) -> String {
    let number = match holder {
        Holder::Made(name) => book.find(name).ok().map(|account| account.number),
        Holder::Root | Holder::Own(_) => None,
    };
    number.map_or_else(|| stem(holder), |number| format!("{} {number}", stem(holder)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_lead_back_to_accounts() {
        let own = Holder::Own(ContainerId::from_bytes([7; 16]));
        for holder in [Holder::Root, own, Holder::Made("own-x.json".parse().unwrap())] {
            assert_eq!(holder_of(&stem(&holder)), Some(holder));
        }
        for other in ["", "roots", "own-7", "made-", "made-a/b", "x-y"] {
            assert_eq!(holder_of(other), None, "{other}");
        }
    }
}
