//! Rules that follow from a trace of a running system.
//!
//! Uses `ground` and `account::store`.

use std::collections::BTreeMap;

use dormouse_account::rule::{Seen, propose as text_of};
use dormouse_account::{Client, Number};
use dormouse_bpf::gates::{Edge, Party};
use dormouse_model::ContainerId;

use super::{made, store};
use crate::error::Result;
use crate::ground::Ground;

/// Returns a file of rules for what a trace has seen. Accounts of containers that were removed meanwhile are left out,
/// and so is root, which is the account of many.
pub(crate) fn propose(ground: &Ground, edges: &[Edge]) -> Result<String> {
    let book = store::book(ground)?;
    let all = ground.ids()?.into_iter();
    let own: BTreeMap<u64, ContainerId> = all.map(|id| (Client::owner(&id), id)).collect();
    let name = |party: Party| {
        let client = Client { number: Number(party.account), owner: party.owner, load: 0 };
        if client.number == Number::ROOT {
            return None;
        }
        if let Some(account) = made(&book, &client) {
            return Some(format!("={}", account.name));
        }
        let config = ground.config(own.get(&party.owner)?).ok()?;
        Some(format!("@{}", config.name))
    };
    let seen = |edge: &Edge| {
        Some(Seen {
            home: name(edge.home)?,
            peer: name(edge.peer)?,
            port: Some(edge.port).filter(|port| *port != 0),
            is_opened: edge.is_opened,
            passages: edge.passages,
        })
    };
    let mut all: Vec<Seen> = edges.iter().filter_map(seen).collect();
    all.sort_by(|a, b| (&a.home, a.port, &a.peer).cmp(&(&b.home, b.port, &b.peer)));
    let head = "Proposed by `dormouse account trace`: read it, and install it with `dormouse rules apply FILE`.";
    Ok(text_of(head, &all))
}
