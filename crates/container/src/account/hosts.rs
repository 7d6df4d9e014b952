//! Hosts with which accounts are shared.
//!
//! Uses `ground`, `gates` and `account::store`.

use std::collections::BTreeMap;
use std::net::IpAddr;

use dormouse_account::{Account, AgreedHost, HOSTS_MAX, Number, sent_along};
use dormouse_bpf::gates::Party;
use serde::{Deserialize, Serialize};

use super::store::{self, Place};
use crate::disk::{self, Durable, Lock};
use crate::error::{Error, Result};
use crate::gates;
use crate::ground::Ground;

/// Format of the record; this file describes 1.
const VERSION: u32 = 1;

/// `LIB/accounts/hosts.json`
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    version: u32,
    hosts: Vec<AgreedHost>,
}

/// Returns the hosts that the operator has named, in the order of their addresses.
pub(crate) fn hosts(ground: &Ground) -> Result<Vec<AgreedHost>> {
    let read = disk::read_with_checksum::<Record>(&Place::of(ground).hosts());
    let record = read.map_err(store::account_damaged)?;
    Ok(record.map(|record| record.hosts).unwrap_or_default())
}

/// Changes the list. With an error nothing changes.
fn change(ground: &Ground, change: impl FnOnce(&mut Vec<AgreedHost>) -> Result<()>) -> Result<()> {
    let place = Place::of(ground);
    place.make()?;
    let _alone = Lock::take(&place.made())?;
    let mut hosts = hosts(ground)?;
    change(&mut hosts)?;
    hosts.sort_unstable();
    let record = disk::with_checksum(&Record { version: VERSION, hosts })?;
    disk::write_json(&place.hosts(), &record, Durable::Yes)?;
    record_change(ground);
    Ok(())
}

/// Has a daemon look at the list, the accounts and their limits again.
pub(crate) fn record_change(ground: &Ground) {
    ground.record("accounts_shared", "", "", &[]);
}

/// Adds hosts to the list. One that is on it stays.
pub(crate) fn add_hosts(ground: &Ground, new: &[AgreedHost]) -> Result<()> {
    change(ground, |hosts| {
        for host in new {
            if !hosts.contains(host) {
                hosts.push(*host);
            }
        }
        if hosts.len() > HOSTS_MAX {
            return Err(Error::Invalid(format!(
                "only {HOSTS_MAX} hosts are permitted: give networks instead of addresses"
            )));
        }
        Ok(())
    })
}

/// Removes hosts from the list.
pub(crate) fn remove_hosts(ground: &Ground, gone: &[AgreedHost]) -> Result<()> {
    change(ground, |hosts| {
        for host in gone {
            if !hosts.contains(host) {
                return Err(Error::Invalid(format!(
                    "host {host} is not on the list: see `dormouse account host ls`"
                )));
            }
        }
        hosts.retain(|host| !gone.contains(host));
        Ok(())
    })
}

/// What packets of other hosts may say about accounts, as the gates believe it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Agreement {
    hosts: Vec<AgreedHost>,
    /// By their numbers.
    accounts: BTreeMap<u32, Party>,
}

impl Agreement {
    /// Returns whether no host may say anything.
    pub fn is_none(&self) -> bool {
        self.hosts.is_empty() || self.accounts.is_empty()
    }

    /// Returns the account with this number, if the address is that of a host which may name it.
    pub fn party(&self, from: IpAddr, number: u32) -> Option<Party> {
        let party = *self.accounts.get(&number)?;
        self.hosts.iter().any(|host| host.contains(from)).then_some(party)
    }

    /// Returns the account that has come along in the options of the first packet (TCP) of a connection.
    pub fn sent_along(&self, from: IpAddr, options: &[u8]) -> Option<Party> {
        // Most packets have none, and the list is long.
        sent_along(options).and_then(|number| self.party(from, number.0))
    }
}

/// Returns what other hosts may say: nothing without gates that see connections.
pub(crate) fn agreement(ground: &Ground) -> Result<Agreement> {
    let gates = gates::find(ground)?;
    if !gates.is_some_and(|gates| gates.sees_connections()) {
        return Ok(Agreement::default());
    }
    let accounts = shared(ground)?.into_iter().map(|party| (party.account, party)).collect();
    Ok(Agreement { hosts: hosts(ground)?, accounts })
}

/// Returns the accounts that several machines share, as gates know them.
pub(crate) fn shared(ground: &Ground) -> Result<Vec<Party>> {
    let book = store::book(ground)?;
    let is_shared =
        |account: &&Account| Number::GLOBAL.contains(&account.number.0) && !account.is_closing;
    let party = |account: &Account| Party { account: account.number.0, owner: account.owner() };
    Ok(book.iter().filter(is_shared).map(party).collect())
}
