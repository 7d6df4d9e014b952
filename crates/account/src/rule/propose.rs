//! Rules that follow from a trace: which container has received data from which account.
//!
//! - A *service* is an account whose containers receive requests from at least two others. It works for its client.
//! - A *front* is one that receives no requests of containers, and answers of at least two accounts which are clients
//!   of one service, as sites with a common database are. It works for the site whose answer it passes on, and for
//!   itself when it reads the next request.
//!
//! Everything else is listed as a comment. An operator reads the text before it is installed.
//!
//! Source: Reumann et al., *Virtual Services*, USENIX 2000, section 3.2 (tools that trace a system and propose rules).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use super::table::ROWS_MAX;

/// Data that containers of one account have received from another one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// The account of the receiver, as a condition of a rule: `@NAME` or `=NAME`.
    pub home: String,
    /// The account of the sender.
    pub peer: String,
    /// The local port of connections that the sender has opened; `None` for those of unix sockets.
    pub port: Option<u16>,
    /// The receiver has opened the connections: an answer.
    pub is_opened: bool,
    /// How often data was received.
    pub passages: u64,
}

/// Clients of a service, with the number of passages of each, by account and port.
type Services<'s> = BTreeMap<(&'s str, Option<u16>), BTreeMap<&'s str, u64>>;

/// Returns a file of rules, with comments. `head` is a comment for its first line.
pub fn propose(head: &str, seen: &[Seen]) -> String {
    let mut asked: Services<'_> = BTreeMap::new();
    let mut answered: BTreeMap<&str, BTreeMap<&str, u64>> = BTreeMap::new();
    for one in seen.iter().filter(|one| one.home != one.peer) {
        let clients = match one.is_opened {
            true => answered.entry(&one.home).or_default(),
            false => asked.entry((&one.home, one.port)).or_default(),
        };
        *clients.entry(&one.peer).or_default() += one.passages;
    }
    let mut text = format!("# {head}\n");
    let mut rules = 0;
    for ((home, port), clients) in &asked {
        let place = port.map_or("unix sockets".to_owned(), |port| format!("port {port}"));
        let _ = writeln!(text, "\n# {home}, {place}: clients {}", list(clients));
        if clients.len() < 2 {
            text += "# One client alone: not shared.\n";
        } else if port.is_none() && answered.contains_key(home) {
            // A rule without a port matches the answers as well.
            text += "# It receives answers, too: a rule cannot tell these apart. Make it with run --shared.\n";
        } else {
            let name = format!("{home} works for its clients, {place}");
            rule(&mut text, &mut rules, &name, home, None, *port, "peer");
        }
    }
    // Accounts that share a service with others, by service.
    let shared = asked.iter().filter(|(_, clients)| clients.len() > 1);
    let groups: Vec<BTreeSet<&str>> =
        shared.map(|(_, clients)| clients.keys().copied().collect()).collect();
    for (home, from) in &answered {
        let _ = writeln!(text, "\n# {home} has answers of {}", list(from));
        let serves = asked.keys().any(|(service, _)| service == home);
        let are_sites = groups.iter().any(|group| from.keys().all(|one| group.contains(one)));
        if serves || from.len() < 2 || !are_sites {
            text += "# It is a client.\n";
            continue;
        }
        for site in from.keys() {
            let name = format!("{home} works for {site}, whose answer it passes on");
            rule(&mut text, &mut rules, &name, home, Some(site), None, "peer");
        }
        let name = format!("{home} works for itself when it reads a request");
        rule(&mut text, &mut rules, &name, home, None, None, "home");
    }
    if seen.is_empty() {
        text += "# No container has received data from another one over a connection.\n";
    }
    if rules > ROWS_MAX {
        let _ = writeln!(text, "\n# {rules} rules were proposed, of which {ROWS_MAX} are here.");
    }
    text
}

fn list(accounts: &BTreeMap<&str, u64>) -> String {
    let one = |(account, passages): (&&str, &u64)| format!("{account} ({passages})");
    accounts.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// Adds a rule as far as there is room, and counts it in any case. Names of accounts have neither quotes nor
/// backslashes.
fn rule(
    text: &mut String,
    rules: &mut usize,
    name: &str,
    home: &str,
    peer: Option<&str>,
    port: Option<u16>,
    account: &str,
) {
    *rules += 1;
    if *rules > ROWS_MAX {
        return;
    }
    // LIMIT: 128 characters.
    let name: String = name.chars().take(128).collect();
    let _ = write!(text, "[[rule]]\nname = \"{name}\"\ngate = \"receive\"\nhome = \"{home}\"\n");
    if let Some(peer) = peer {
        let _ = writeln!(text, "peer = \"{peer}\"");
    }
    if let Some(port) = port {
        let _ = writeln!(text, "port = {port}");
    }
    let _ = writeln!(text, "account = \"{account}\"");
}

#[cfg(test)]
mod tests {
    use crate::rule::{Rules, Then, Who};

    use super::*;

    fn seen(home: &str, peer: &str, port: Option<u16>, is_opened: bool) -> Seen {
        Seen { home: home.into(), peer: peer.into(), port, is_opened, passages: 7 }
    }

    fn request(home: &str, peer: &str, port: u16) -> Seen {
        seen(home, peer, Some(port), false)
    }

    fn answer(home: &str, peer: &str) -> Seen {
        seen(home, peer, None, true)
    }

    fn rules(all: &[Seen]) -> Vec<(Who, Who, Option<u16>, Then)> {
        let text = propose("a trace", all);
        let rules = Rules::parse(&text).unwrap_or_else(|e| panic!("{e:?} in {text}"));
        let parts = |rule: &crate::rule::Rule| {
            (rule.home.clone(), rule.peer.clone(), rule.port, rule.account.clone())
        };
        rules.all().iter().map(parts).collect()
    }

    fn own(name: &str) -> Who {
        Who::Own(name.parse().unwrap())
    }

    #[test]
    fn service_of_several_accounts_works_for_its_clients() {
        let all = [
            request("@db", "@a", 5432),
            request("@db", "=smith", 5432),
            answer("@a", "@db"),
            answer("=smith", "@db"),
            request("@cache", "@a", 6379),
        ];
        assert_eq!(rules(&all), [(own("db"), Who::Any, Some(5432), Then::Peer)]);
        assert!(propose("", &all).contains("# @cache, port 6379: clients @a (7)\n# One client"));
    }

    #[test]
    fn front_of_sites_with_one_database_works_for_the_site_that_answers() {
        let all = [
            answer("@front", "@a"),
            answer("@front", "@b"),
            request("@a", "@front", 80),
            request("@b", "@front", 80),
            request("@db", "@a", 5432),
            request("@db", "@b", 5432),
        ];
        let expected = [
            (own("db"), Who::Any, Some(5432), Then::Peer),
            (own("front"), own("a"), None, Then::Peer),
            (own("front"), own("b"), None, Then::Peer),
            (own("front"), Who::Any, None, Then::Home),
        ];
        assert_eq!(rules(&all), expected);
    }

    #[test]
    fn client_of_two_services_is_no_front() {
        let all = [answer("@a", "@db"), answer("@a", "@cache"), request("@db", "@a", 5432)];
        assert_eq!(rules(&all), []);
        assert!(propose("", &all).contains("# It is a client."));
    }

    #[test]
    fn unix_service_that_receives_answers_has_no_rule() {
        let unix = [seen("@db", "@a", None, false), seen("@db", "@b", None, false)];
        assert_eq!(rules(&unix), [(own("db"), Who::Any, None, Then::Peer)]);
        let all = [&unix[..], &[answer("@db", "@c")]].concat();
        assert_eq!(rules(&all), []);
    }

    #[test]
    fn proposal_has_no_more_rules_than_a_file_may_have() {
        let of = |n: u16| ["@a", "@b"].map(|client| request("@db", client, n));
        let all: Vec<Seen> = (1..=300).flat_map(of).collect();
        assert_eq!(rules(&all).len(), ROWS_MAX);
        assert!(propose("", &all).contains("# 300 rules were proposed, of which 256 are here."));
        assert!(rules(&[]).is_empty());
    }
}
