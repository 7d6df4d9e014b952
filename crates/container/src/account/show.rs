//! Accounts as verbs show them.
//!
//! Uses `ground` and `account::store`.

use std::collections::BTreeMap;

use dormouse_account::{Balance, Book, ConnectionLimit, Holder, Number, ROOT, Usage};
use dormouse_model::{ContainerId, Name};

use super::store::{self, Place, holder};
use crate::error::{Error, Result};
use crate::ground::Ground;

/// One account with its balance.
#[derive(Debug, Clone)]
pub struct AccountDetails {
    /// Its number.
    pub number: Number,
    /// Its name: of a container's own account, `@` and the name of the container.
    pub name: String,
    /// The name of the account above; only root has none.
    pub parent: Option<String>,
    /// The container, if it is one's own account.
    pub own: Option<ContainerId>,
    /// Names of the containers that are charged to it.
    pub containers: Vec<String>,
    /// How many days the figures of a day are kept.
    pub keep_days: u32,
    /// Whether that is the parent's number.
    pub shares_keep_days: bool,
    /// Free-form labels.
    pub labels: BTreeMap<String, String>,
    /// Whether these are the parent's.
    pub shares_labels: bool,
    /// When it was made, in milliseconds since the epoch; 0 for root.
    pub created_unix_ms: i64,
    /// Connections that it may have, with the accounts below it.
    pub limit: Option<ConnectionLimit>,
    /// Sockets that it may have, with the accounts below it.
    pub sockets_max: Option<u32>,
    /// Processes and threads that it may have, in the same way.
    pub pids_max: Option<u32>,
    /// What was charged to it alone.
    pub balance: Balance,
}

impl AccountDetails {
    /// Returns the sum of a figure over an account and all accounts below it.
    pub fn with_below(&self, all: &[Self], figure: &dyn Fn(&Balance) -> Usage) -> Usage {
        let below = all.iter().filter(|other| other.parent.as_ref() == Some(&self.name));
        below.map(|child| child.with_below(all, figure)).fold(figure(&self.balance), Usage::plus)
    }
}

/// Returns the names of containers by their account, in the order of the names.
pub(super) fn containers(ground: &Ground) -> Result<BTreeMap<Holder, Vec<Name>>> {
    let mut found: BTreeMap<Holder, Vec<Name>> = BTreeMap::new();
    for id in ground.ids()? {
        match ground.config(&id) {
            Ok(config) => found.entry(holder(&config.spec, &id)).or_default().push(config.name),
            Err(Error::NoContainer(_)) => {} // removed meanwhile
            Err(e) => return Err(e),
        }
    }
    found.values_mut().for_each(|names| names.sort());
    Ok(found)
}

/// Returns all accounts: root, then those that operators have made, then those of containers, each by name.
pub(crate) fn all(ground: &Ground) -> Result<Vec<AccountDetails>> {
    Place::of(ground).make()?;
    // A balance that moves is in one account or the other.
    let _alone = store::lock(ground)?;
    let book = store::book(ground)?;
    let mut containers = containers(ground)?;
    let mut all = Vec::new();
    let made = book.iter().filter(|account| account.parent.is_some());
    for account in [book.root()].into_iter().chain(made) {
        // A line that is broken by hand ends at root; the verb that changes accounts reports it.
        let is_whole = book.line(&account.name).is_ok();
        let parent = account.parent.as_ref().map(|parent| match is_whole {
            true => parent.to_string(),
            false => ROOT.to_owned(),
        });
        let holder = match account.parent {
            None => Holder::Root,
            Some(_) => Holder::Made(account.name.clone()),
        };
        let charged = containers.remove(&holder).unwrap_or_default();
        all.push(AccountDetails {
            number: account.number,
            name: account.name.to_string(),
            parent,
            own: None,
            containers: charged.iter().map(Name::to_string).collect(),
            keep_days: book.keep_days(&account.name),
            shares_keep_days: account.parent.is_some() && account.keep_days.is_none(),
            labels: book.labels(&account.name),
            shares_labels: account.parent.is_some() && account.labels.is_none(),
            created_unix_ms: account.created_unix_ms,
            limit: account.limit,
            sockets_max: account.sockets,
            pids_max: account.pids,
            balance: store::read(ground, &holder)?,
        });
    }
    let mut own = Vec::new();
    for holder in containers.into_keys() {
        // A container with an account that has no record is charged to root by the next fold.
        if let Holder::Own(id) = &holder {
            own.extend(own_account(ground, &book, id)?);
        }
    }
    own.sort_by(|a, b| a.name.cmp(&b.name));
    all.extend(own);
    Ok(all)
}

/// The own account of a container; `None` if the container was removed meanwhile.
fn own_account(ground: &Ground, book: &Book, id: &ContainerId) -> Result<Option<AccountDetails>> {
    let config = match ground.config(id) {
        Err(Error::NoContainer(_)) => return Ok(None),
        other => other?,
    };
    let holder = Holder::Own(id.clone());
    Ok(Some(AccountDetails {
        number: Number::own(config.ids),
        name: format!("@{}", config.name),
        parent: Some(ROOT.to_owned()),
        own: Some(id.clone()),
        containers: vec![config.name.to_string()],
        keep_days: store::keep_days(book, &holder),
        shares_keep_days: true,
        labels: book.labels(&book.root().name),
        shares_labels: true,
        created_unix_ms: config.created_unix_s.saturating_mul(1000),
        limit: None,
        sockets_max: None,
        pids_max: None,
        balance: store::read(ground, &holder)?,
    }))
}
