//! Hosts with which accounts are shared.
//!
//! Uses `ground` and `account::store`.

use dormouse_account::{Account, AgreedHost, HOSTS_MAX, Number};
use dormouse_bpf::gates::Party;
use serde::{Deserialize, Serialize};

use super::store::{self, Place};
use crate::disk::{self, Durable, Lock};
use crate::error::{Error, Result};
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
    disk::write_json(&place.hosts(), &record, Durable::Yes)
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

/// Returns the accounts that several machines share, as gates know them.
pub(crate) fn shared(ground: &Ground) -> Result<Vec<Party>> {
    let book = store::book(ground)?;
    let is_shared =
        |account: &&Account| Number::GLOBAL.contains(&account.number.0) && !account.is_closing;
    let party = |account: &Account| Party { account: account.number.0, owner: account.owner() };
    Ok(book.iter().filter(is_shared).map(party).collect())
}
