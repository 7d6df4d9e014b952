//! Clients at the held sockets of a sleeping container, and whether they wake it.
//!
//! Three settings keep connections to a listening TCP socket from waking a container:
//!
//! - With `--wake-on data-first` a *silent* client, which has sent nothing yet, wakes none. A scan of ports connects
//!   and sends nothing.
//! - Connections of *probers* (`[wake] probers`) wake none.
//! - Any other client wakes containers at a rate (`[wake] client-rate`).
//!
//! These connections wait in the queue of the held socket, and the container accepts them at its next wake. The
//! keeper has each new connection looked at, and waiting ones again at growing intervals (`dormouse_keeper`,
//! `custody`).
//!
//! **The rate** is one number for each client: the time at which all its wakes are permitted again. A wake adds
//! an interval to that of each client that waits for it and may wake. Global IPv6 addresses with the same first
//! 64 bits are one client; containers have local ones. The numbers are in `RUN/wakes`, and thus end with the boot.
//!
//! **Probers** fill the queue, since the container accepts none of their connections. When half of a queue is
//! used, and by probers and ended connections alone, its connections are reset. The kernel queues in order: the
//! first ones are those that were there when the queue was read, and a client that arrives since is behind them.
//!
//! LIMIT: silent clients do not keep others out. Where a queue has no room for another connection, a container with
//! `data-first` is woken.
//!
//! LIMIT: only new TCP connections are compared. A datagram, data on an open connection, a client of a unix
//! socket, and any event of a drowsy container wake as ever. Clients beyond the rate may fill a queue, and keep
//! others out of it until the rate permits the next wake.
//!
//! LIMIT: a machine beside the host with a local IPv6 prefix has a rate for each of its addresses.
//!
//! Uses `ground`, `settings`, `hold`, `unwoken` and `admission`.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use dormouse_launch::Keeper;
use dormouse_model::{Config, ContainerId, State};
use dormouse_parcel::Reader;
use dormouse_record::Thing;
use dormouse_stacks::stack::{self, Queue};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::admission;
use crate::disk::{self, Durable, Lock};
use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::hold::NO_SOCKET;
use crate::settings::{self, Callers, Rate};
use crate::unwoken;

/// LIMIT: clients in the record of rates. With more of them, the one that may wake first is forgotten.
const CLIENTS_MAX: usize = 1024;

/// Bits of a global IPv6 address that name a client.
const CLIENT_BITS: u32 = 64;

/// Returns whether a container that an event has called sleeps on: its only events are connections of silent
/// clients, of probers, and of clients beyond their rate. Otherwise the wake is counted.
pub(crate) fn leave_asleep(ground: &Ground, id: &ContainerId) -> Result<bool> {
    // Unreadable settings hold back no client.
    let callers = settings::callers(&ground.settings()).unwrap_or_default();
    let data_first = ground.config(id)?.spec.wake_on.data_first;
    if callers.is_empty() && !data_first {
        return Ok(false);
    }
    let found = admission::lock(ground, id, None)?;
    if found.observed.state != State::Asleep {
        return Ok(false);
    }
    let Some(queues) = called_queues(ground, &found.config)? else { return Ok(false) };
    let waiting = waiting(&callers, queues.iter().map(|(_, queue)| queue), data_first);
    if waiting.is_empty() {
        return clear(&callers, &queues).map(|()| true);
    }
    match callers.rate {
        // A wake that failed was counted, and its clients are to be answered when the cause is gone.
        Some(_) if unwoken::of(ground, id).is_some() => Ok(false),
        Some(rate) => Ok(!permit(ground, rate, &waiting)?),
        None => Ok(false),
    }
}

/// Returns the queues of TCP listeners that have called; `None` if another event has called as well.
fn called_queues(ground: &Ground, config: &Config) -> Result<Option<Vec<(OwnedFd, Queue)>>> {
    let id = config.id.as_str();
    let reader = Reader::open(&ground.asleep_dir(&config.id))?;
    let Some(mut keeper) = Keeper::connect(&ground.places.run)? else { return Ok(None) };
    if keeper.is_ready(id, NO_SOCKET)? {
        return Ok(None);
    }
    let mut queues = Vec::new();
    for (number, object) in (0..).zip(&reader.records().objects) {
        if !object.is_called_from_outside() || !keeper.is_ready(id, number)? {
            continue;
        }
        if !matches!(object.thing, Thing::Listener(_)) {
            return Ok(None);
        }
        let socket = keeper.take(id, number)?;
        let queue = stack::queue(&socket, &config.addresses);
        let queue = queue
            .map_err(|e| Error::file("cannot look at the queue of", "a held socket")(e.into()))?;
        queues.push((socket, queue));
    }
    Ok((!queues.is_empty()).then_some(queues))
}

/// Returns the clients other than probers that wait for a wake.
fn waiting<'q>(
    callers: &Callers,
    queues: impl Iterator<Item = &'q Queue>,
    data_first: bool,
) -> Vec<IpAddr> {
    let calling = |queue: &'q Queue| {
        // Silent clients in a full queue keep others out.
        let all = !data_first || queue.is_full();
        queue.clients.iter().filter(move |client| all || client.has_sent)
    };
    let addresses = queues.flat_map(calling).map(|client| client.address);
    let mut waiting: Vec<IpAddr> =
        addresses.filter(|address| !callers.is_prober(*address)).map(client).collect();
    waiting.sort_unstable();
    waiting.dedup();
    waiting
}

/// Resets the connections of queues that probers and ended connections have filled to the half.
fn clear(callers: &Callers, queues: &[(OwnedFd, Queue)]) -> Result<()> {
    if callers.probers.is_empty() {
        return Ok(());
    }
    for (socket, queue) in queues {
        let is_theirs = queue.clients.iter().all(|client| callers.is_prober(client.address));
        if is_theirs && queue.is_half_full() {
            stack::reset_clients(socket.as_fd(), queue.length)
                .map_err(|e| Error::file("cannot reset probers of", "a held socket")(e.into()))?;
        }
    }
    Ok(())
}

/// The address that stands for a client.
fn client(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        // RFC 4291: global unicast addresses begin with the bits 001.
        IpAddr::V6(ip) if ip.segments()[0] >> 13 == 1 => {
            IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() & (u128::MAX << (128 - CLIENT_BITS))))
        }
        ip => ip,
    }
}

/// Returns whether one of these clients may wake a container, and counts a wake for those that may.
fn permit(ground: &Ground, rate: Rate, clients: &[IpAddr]) -> Result<bool> {
    let path = ground.places.run.join("wakes");
    // ORDER: innermost, for one change of the file.
    let _alone = Lock::take_new(&path.with_extension("lock"))?;
    // A damaged record is begun anew.
    let mut ledger: Ledger = disk::read_json(&path).ok().flatten().unwrap_or_default();
    let now = clock_gettime(ClockId::Boottime);
    let now = Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32);
    let is_permitted = ledger.permit(rate, clients, now);
    if is_permitted {
        // A full disk holds back no client.
        let _ = disk::write_json(&path, &ledger, Durable::No);
    }
    Ok(is_permitted)
}

/// The times, since the boot and in microseconds, at which all wakes of a client are permitted again.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Ledger(BTreeMap<IpAddr, u64>);

impl Ledger {
    fn permit(&mut self, rate: Rate, clients: &[IpAddr], now: Duration) -> bool {
        let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let (now, period) = (us(now), us(rate.period));
        let interval = (period / u64::from(rate.count)).max(1);
        // A later time is of an earlier boot, or of a longer period.
        let last = now.saturating_add(period);
        self.0.retain(|_, full| (now + 1..=last).contains(full));
        let mut is_permitted = false;
        for client in clients {
            let full = self.0.get(client).copied().unwrap_or(now);
            // The interval may be a rounded one: the last of `count` wakes at once is permitted.
            if full.saturating_add(interval) <= last {
                self.0.insert(*client, full.saturating_add(interval));
                is_permitted = true;
            }
        }
        while self.0.len() > CLIENTS_MAX {
            let first = self.0.iter().min_by_key(|(_, full)| **full).map(|(client, _)| *client);
            first.and_then(|client| self.0.remove(&client));
        }
        is_permitted
    }
}

#[cfg(test)]
mod tests {
    use dormouse_stacks::stack::Client;

    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    const RATE: Rate = Rate { count: 3, period: Duration::from_secs(60) };

    #[test]
    fn client_wakes_as_often_as_its_rate_permits() {
        let mut ledger = Ledger::default();
        let mut wakes = |client: &str, at_s: u64| {
            ledger.permit(RATE, &[ip(client)], Duration::from_secs(1000 + at_s))
        };
        assert_eq!(
            [0, 0, 0, 0, 19].map(|at| wakes("10.0.0.1", at)),
            [true, true, true, false, false]
        );
        assert!(wakes("10.0.0.2", 19), "another client");
        assert_eq!([20, 20, 40].map(|at| wakes("10.0.0.1", at)), [true, false, true]);
        // The time since a later boot is shorter.
        assert!(Ledger(ledger.0.clone()).permit(RATE, &[ip("10.0.0.1")], Duration::from_secs(7)));
        let mut wakes = |client: &str, at_s: u64| {
            ledger.permit(RATE, &[ip(client)], Duration::from_secs(1000 + at_s))
        };
        // After a pause as many as at first, and no more.
        assert_eq!([900; 4].map(|at| wakes("10.0.0.1", at)), [true, true, true, false]);
    }

    #[test]
    fn one_permitted_client_wakes_and_only_permitted_ones_are_counted() {
        let mut ledger = Ledger::default();
        let now = Duration::from_secs(50);
        let (often, seldom) = (ip("10.0.0.1"), ip("10.0.0.2"));
        (0..3).for_each(|_| assert!(ledger.permit(RATE, &[often], now)));
        let before = ledger.0[&often];
        assert!(!ledger.permit(RATE, &[often], now));
        assert!(ledger.permit(RATE, &[often, seldom], now));
        assert_eq!((ledger.0[&often], ledger.0[&seldom]), (before, 70_000_000));
        assert!(!ledger.permit(RATE, &[], now), "no client");
    }

    #[test]
    fn ledger_is_bounded_and_forgets_clients_that_may_wake_again() {
        let mut ledger = Ledger::default();
        let one = |n: u32| [IpAddr::V4((0x0a00_0000 + n).into())];
        let (at, later) = (Duration::from_secs(100), Duration::from_secs(101));
        (0..3).for_each(|_| assert!(ledger.permit(RATE, &one(0), at)));
        for n in 1..2 * CLIENTS_MAX as u32 {
            assert!(ledger.permit(RATE, &one(n), at));
        }
        assert_eq!(ledger.0.len(), CLIENTS_MAX);
        assert!(!ledger.permit(RATE, &one(0), later), "the client that waits longest is kept");
        assert!(ledger.permit(RATE, &one(5), Duration::from_secs(300)));
        assert_eq!(ledger.0.len(), 1);
    }

    #[test]
    fn global_addresses_of_one_ipv6_network_are_one_client() {
        assert_eq!(client(ip("2001:db8:1:2:3:4:5:6")), ip("2001:db8:1:2::"));
        assert_eq!(client(ip("::ffff:192.0.2.1")), ip("192.0.2.1"));
        assert_eq!(client(ip("fdea:cf3a:5a43::4")), ip("fdea:cf3a:5a43::4"), "a container");
    }

    #[test]
    fn probers_and_silent_clients_do_not_wait_for_a_wake() {
        let callers = |probers: &str| {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), format!("[wake]\nprobers = [{probers}]\n")).unwrap();
            settings::callers(file.path()).unwrap()
        };
        let peer = |text: &str, has_sent| Client { address: ip(text), has_sent };
        let clients = vec![
            peer("10.0.0.1", true),
            peer("10.0.0.2", false),
            peer("10.0.0.1", false),
            peer("10.0.0.3", true),
        ];
        let queue = Queue { length: 4, limit: 9, clients };
        let full = Queue { limit: 4, ..queue.clone() };
        let all = |queue, probers, data_first| {
            let found = waiting(&callers(probers), [queue].into_iter(), data_first);
            found.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let prober = "\"10.0.0.3\"";
        assert_eq!(all(&queue, "", false), ["10.0.0.1", "10.0.0.2", "10.0.0.3"]);
        assert_eq!(all(&queue, prober, false), ["10.0.0.1", "10.0.0.2"]);
        assert_eq!(all(&queue, prober, true), ["10.0.0.1"]);
        assert_eq!(all(&full, prober, true), ["10.0.0.1", "10.0.0.2"]);
        assert_eq!(all(&full, "\"10.0.0.0/8\"", true), [""; 0]);
    }
}
