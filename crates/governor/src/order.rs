//! Order: which pending connection of a shared service is admitted next.
//!
//! Connections wait in a queue for each listener, in the order of arrival for each account. The account with the
//! least service by its weight comes first. Service is CPU time, as the gates read it:
//!
//! ```text
//! tag = service of the account / its weight         V = tag of the connection that was admitted last
//! an account without a waiting connection that gets one: tag = max(tag, min(V, least tag of those that wait))
//! ```
//!
//! So an account that has used nothing for a while is next, and saves nothing up: start-time fair queueing (Goyal et
//! al., SIGCOMM 1996). A reading comes late, so an admitted connection adds the mean cost of one at once, and the
//! readings replace these estimates: over time the tags are the readings. A reading that comes while a connection is
//! worked for has not all of it, so an estimate is replaced by the reading after the next one.
//!
//! An account that begins at the tag of another one begins at its readings *and* its estimates ([`Tag`]). When readings
//! take the estimates of the other one back, they take these back as well. Otherwise it would stay behind by the error
//! of estimates that are no longer there. So it is ahead by what the other one has used in the last two readings.
//!
//! A tag is at most one second of service above V. An account that has had more waits no longer for that.
//!
//! **What a connection costs** is more than what its account is charged. The service accepts it, and may make a process
//! or thread for it, as itself. A server like that has charged almost nothing for a connection when it has done most of
//! its work. So each connection also adds an equal part of what the service has used for itself meanwhile, and
//! readings do not take that back.
//!
//! **How many are admitted.** Connections that the service has not accepted yet are in the order of the kernel. They
//! should be few, but the service should not have to wait for the next look either. [`Limit`] finds their number as the
//! kernel's queue limits of network devices do (lib/dynamic_queue_limits.c): doubled when all were accepted since the
//! last look, lowered by those that were left over in each of some looks. Where none waits, it is doubled when as many
//! were begun within [`BETWEEN_NS_MAX`]. It is found with the connections of the past.
//! If those of the account that is next are known to be costly, only as many are admitted as make [`AHEAD_NS`] of work,
//! or work until the next look where looks are farther apart: a service is not to wait for them.
//!
//! **Connections that need not wait.** While none waits, so many may go on before the next look ([`Queue::allowance`]):
//! as many as would be admitted then, at the cost of the costliest ones that are known. So never more are pending than
//! the limit. They are admitted afterwards ([`Queue::passed`]), and have the same estimates. None are allowed before a
//! cost is known.
//!
//! A server that accepts at once, and works for all by processes or threads, has an empty backlog whatever it has to
//! do. More connections do not make it faster when its tasks already wait for a processor. Meanwhile ([`Bounds`]) an
//! account that has as many connections in service as that, and one, waits until one of these was answered. Others are
//! admitted before it: an account without a connection in service never waits for the work of another one.
#![allow(
    clippy::cast_precision_loss,
    reason = "times and weights of connections are far below 2^52"
)]

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// The cost of a connection before anything is known.
const COST_NS: f64 = 1_000_000.0;
/// LIMIT: an account's connections that wait at one listener. The next one is dropped, as by a full backlog.
pub const WAITING_MAX: usize = 256;
/// LIMIT: accounts of which a service remembers the service.
const ACCOUNTS_MAX: usize = 4096;
/// LIMIT: the service by which an account is behind others at most, at weight 1.
const BEHIND_NS: f64 = 1e9;
/// The work that a service may have that it has not begun with, if that is more than one connection.
const AHEAD_NS: f64 = 2e6;
/// LIMIT: time between looks for which a service has work.
const BETWEEN_NS_MAX: f64 = 5e6;
/// What is kept of the sums behind a mean cost at each reading.
const KEPT: f64 = 0.9;
/// LIMIT: what a service uses for itself for one connection. It may do other work meanwhile.
const OWN_NS_MAX: f64 = 10e6;

/// Service by weight.
#[derive(Debug, Clone, Copy, Default)]
struct Tag {
    /// By readings.
    read: f64,
    /// Estimates that no reading has replaced: of the last period, and of this one.
    estimated: [f64; 2],
}

impl Tag {
    fn sum(&self) -> f64 {
        self.read + self.estimated.iter().sum::<f64>()
    }

    /// The estimates of the last period end.
    fn ages(&mut self) {
        self.estimated = [self.estimated[1], 0.0];
    }

    /// Raises it to another one.
    fn reaches(&mut self, other: &Self) {
        let left = other.sum() - self.read.max(other.read);
        if self.sum() >= other.sum() {
            return;
        }
        let first = other.estimated[0].min(left).max(0.0);
        self.read = self.read.max(other.read);
        self.estimated = [first, (left - first).max(0.0)];
    }

    /// Lowers it to this sum.
    fn is_at_most(&mut self, sum: f64) {
        self.read -= (self.sum() - sum).max(0.0);
    }
}

/// What an account has had of a service.
#[derive(Debug, Clone, Default)]
struct Account {
    tag: Tag,
    /// Connections admitted since the last reading.
    admitted: u32,
    /// The number of the last one.
    last: u64,
    mean: Mean,
}

/// The mean cost of a connection, by two sums that fade.
#[derive(Debug, Clone, Copy, Default)]
struct Mean {
    used_ns: f64,
    admitted: f64,
}

impl Mean {
    fn add(&mut self, used_ns: f64, admitted: u32) {
        self.used_ns = self.used_ns * KEPT + used_ns;
        self.admitted = self.admitted * KEPT + f64::from(admitted);
    }

    fn cost_ns(&self) -> Option<f64> {
        (self.admitted >= 1.0 && self.used_ns > 0.0).then(|| self.used_ns / self.admitted)
    }
}

/// The accounts of one service.
#[derive(Debug)]
pub struct Service<A> {
    accounts: BTreeMap<A, Account>,
    /// The last readings, also of accounts that had no connection yet.
    readings: BTreeMap<A, u64>,
    /// The largest tag of a connection that was admitted.
    reached: Tag,
    /// Connections admitted.
    count: u64,
    mean: Mean,
    /// What the service uses for itself, for each connection.
    own: Mean,
    /// The last reading of that.
    own_read_ns: Option<u64>,
    /// The largest mean cost of an account's connections at the last reading.
    costliest_ns: Option<f64>,
    /// Connections were admitted in the last two periods, the last one first.
    admits: [bool; 2],
    /// The counters that readings are of.
    load: u32,
    /// The mean time between looks.
    between_ns: f64,
}

impl<A> Default for Service<A> {
    fn default() -> Self {
        Self {
            accounts: BTreeMap::new(),
            readings: BTreeMap::new(),
            reached: Tag::default(),
            count: 0,
            mean: Mean::default(),
            own: Mean::default(),
            own_read_ns: None,
            costliest_ns: None,
            admits: [false; 2],
            load: 0,
            between_ns: 0.0,
        }
    }
}

impl<A: Ord + Clone> Service<A> {
    /// A connection of the account arrives; `least`: if none of it waits at this listener, the least tag of those that
    /// do.
    fn arrives(&mut self, account: &A, weight: u32, least: Option<Option<Tag>>) {
        let reached = self.reached.sum();
        if self.accounts.len() >= ACCOUNTS_MAX && !self.accounts.contains_key(account) {
            // Those below the reached tag would begin there all the same.
            self.accounts.retain(|_, one| one.tag.sum() > reached);
        }
        let one = self.accounts.entry(account.clone()).or_default();
        match least {
            Some(Some(least)) if least.sum() < reached => one.tag.reaches(&least),
            Some(_) => one.tag.reaches(&self.reached),
            None => {}
        }
        one.tag.is_at_most(reached + BEHIND_NS / f64::from(weight.max(1)));
    }

    /// What the service uses for itself for a connection.
    fn own_ns(&self) -> f64 {
        self.own.cost_ns().unwrap_or(0.0).min(OWN_NS_MAX)
    }

    /// A look at the pending connections, so long after the one before.
    pub fn looked(&mut self, since: Duration) {
        let since_ns = (since.as_nanos() as f64).min(BETWEEN_NS_MAX);
        self.between_ns = self.between_ns * KEPT + since_ns * (1.0 - KEPT);
    }

    /// How many connections of the account are [`AHEAD_NS`] of work, or that until the next look; at least one.
    pub fn ahead(&self, account: &A) -> u32 {
        let charged = self.accounts.get(account).and_then(|one| one.mean.cost_ns());
        self.ahead_at(charged.or(self.mean.cost_ns()).unwrap_or(0.0) + self.own_ns())
    }

    /// The same for the account with the costliest connections; 0 if no cost is known.
    pub fn ahead_of_any(&self) -> u32 {
        self.costliest_ns.map_or(0, |cost_ns| self.ahead_at(cost_ns + self.own_ns()))
    }

    fn ahead_at(&self, cost_ns: f64) -> u32 {
        if cost_ns <= 0.0 {
            return LIMIT_MAX;
        }
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "it is in these bounds"
        )]
        let count =
            (AHEAD_NS.max(self.between_ns) / cost_ns).clamp(1.0, f64::from(LIMIT_MAX)) as u32;
        count
    }

    fn tag(&self, account: &A) -> Tag {
        self.accounts.get(account).map_or(self.reached, |one| one.tag)
    }

    /// The place of an account: its tag, and of equal ones the account that has waited longest.
    fn place(&self, account: &A) -> (f64, u64) {
        let last = self.accounts.get(account).map_or(0, |one| one.last);
        (self.tag(account).sum(), last)
    }

    /// A connection of the account was admitted.
    fn admitted(&mut self, account: &A, weight: u32) {
        let (mean_ns, own_ns) = (self.mean.cost_ns(), self.own_ns());
        self.count += 1;
        self.admits[0] = true;
        // One that was forgotten meanwhile has its place there.
        let forgotten = || Account { tag: self.reached, ..Account::default() };
        let one = self.accounts.entry(account.clone()).or_insert_with(forgotten);
        if one.tag.sum() > self.reached.sum() {
            self.reached = one.tag;
        }
        let cost_ns = one.mean.cost_ns().or(mean_ns).unwrap_or(COST_NS);
        let weight = weight.max(1);
        one.tag.read += own_ns / f64::from(weight);
        one.tag.estimated[1] += cost_ns / f64::from(weight);
        one.admitted = one.admitted.saturating_add(1);
        one.last = self.count;
    }

    /// Takes a reading: CPU time that the service has used in all, if that is known, and what it has used for each
    /// account since the gates were loaded, by counters with this number.
    pub fn read<'a>(
        &mut self,
        load: u32,
        used_ns: Option<u64>,
        readings: impl Iterator<Item = (&'a A, u64)>,
        weight: impl Fn(&A) -> u32,
    ) where
        A: 'a,
    {
        let is_new = std::mem::replace(&mut self.load, load) != load;
        let mut now: BTreeMap<A, u64> = BTreeMap::new();
        for (account, ns) in readings {
            *now.entry(account.clone()).or_default() += ns;
        }
        let (mut used, mut admitted, mut costliest_ns) = (0.0, 0, None);
        self.reached.ages();
        let reached = self.reached.sum();
        for (account, one) in &mut self.accounts {
            let ns = now.get(account).copied().unwrap_or(0);
            // New counters may have anything, others begin at 0.
            let was_ns = match is_new {
                true => ns,
                false => self.readings.get(account).copied().unwrap_or(0),
            };
            let new_ns = ns.saturating_sub(was_ns) as f64;
            let weight = f64::from(weight(account).max(1));
            one.tag.read += new_ns / weight;
            one.tag.ages();
            one.tag.is_at_most(reached + BEHIND_NS / weight);
            one.mean.add(new_ns, one.admitted);
            costliest_ns = costliest_ns.into_iter().chain(one.mean.cost_ns()).reduce(f64::max);
            used += new_ns;
            admitted += std::mem::take(&mut one.admitted);
        }
        let charged_ns = now.values().fold(0, |sum: u64, ns| sum.saturating_add(*ns));
        let own_ns = used_ns.map(|all| all.saturating_sub(charged_ns));
        let was_ns = std::mem::replace(&mut self.own_read_ns, own_ns);
        // What it uses for itself long after connections is not for these.
        if let (Some(own_ns), Some(was_ns), true) =
            (own_ns, was_ns.filter(|_| !is_new), self.admits.contains(&true))
        {
            self.own.add(own_ns.saturating_sub(was_ns) as f64, admitted);
        }
        self.admits = [false, self.admits[0]];
        self.readings = now;
        self.costliest_ns = costliest_ns;
        self.mean.add(used, admitted);
    }
}

/// How many connections a service may have that it has not accepted yet.
#[derive(Debug, Clone)]
pub struct Limit {
    limit: u32,
    /// Admitted since the last look.
    admitted: u32,
    /// The least number that was left over in the last looks.
    left: u32,
    looks: u32,
    /// A time, those pending then, and the number admitted since.
    since: Option<(Duration, u32, u32)>,
}

/// LIMIT: connections that wait in the kernel.
pub const LIMIT_MAX: u32 = 16;
/// Looks after which the limit is lowered.
const LOOKS: u32 = 8;

impl Default for Limit {
    fn default() -> Self {
        Self { limit: 1, admitted: 0, left: u32::MAX, looks: 0, since: None }
    }
}

impl Limit {
    /// A look at a regular time, while connections are held: `pending` are in the kernel.
    pub fn look(&mut self, pending: u32) {
        let admitted = std::mem::take(&mut self.admitted);
        if pending == 0 && admitted >= self.limit {
            self.doubles();
            return;
        }
        self.left = self.left.min(pending);
        self.looks += 1;
        if self.looks == LOOKS {
            self.limit = self.limit.saturating_sub(self.left).max(1);
            (self.left, self.looks) = (u32::MAX, 0);
        }
    }

    /// A connection arrives where none is held: `pending` are in the kernel. There are no regular looks then. A service
    /// that begins with as many as the limit within [`BETWEEN_NS_MAX`] may have more. Only looks lower the limit.
    ///
    /// `at`: by a clock that stands still while the caller waits for a processor.
    pub fn arrives(&mut self, pending: u32, at: Duration) {
        if let Some((since, before, admitted)) = self.since
            && at.saturating_sub(since).as_nanos() as f64 <= BETWEEN_NS_MAX
        {
            if before.saturating_add(admitted).saturating_sub(pending) < self.limit {
                return;
            }
            self.doubles();
        }
        self.since = Some((at, pending, 0));
    }

    fn doubles(&mut self) {
        self.limit = (self.limit * 2).min(LIMIT_MAX);
        (self.left, self.looks) = (u32::MAX, 0);
    }

    /// So many were admitted.
    pub fn admitted(&mut self, count: u32) {
        self.admitted = self.admitted.saturating_add(count);
        if let Some((.., admitted)) = &mut self.since {
            *admitted = admitted.saturating_add(count);
        }
    }
}

/// Which accounts have to wait for themselves.
#[derive(Clone, Copy)]
pub struct Bounds<'a, A> {
    /// What the service is working for while its tasks wait for a processor: by account, connections that were admitted
    /// and not answered yet. `None` while the service has the processors that it needs.
    pub serving: Option<&'a BTreeMap<A, u32>>,
    /// Whether an account has as many connections as it may have.
    pub is_full: &'a dyn Fn(&A) -> bool,
}

impl<A> Bounds<'_, A> {
    /// None has to.
    pub const NONE: Self = Self { serving: None, is_full: &|_| false };
}

/// The connections that wait at one listener.
#[derive(Debug)]
pub struct Queue<A, T> {
    waiting: BTreeMap<A, VecDeque<T>>,
    /// How many the service may have.
    pub limit: Limit,
}

impl<A, T> Default for Queue<A, T> {
    fn default() -> Self {
        Self { waiting: BTreeMap::new(), limit: Limit::default() }
    }
}

impl<A: Ord + Clone, T> Queue<A, T> {
    /// Adds a connection at the end of its account's; returns it if too many wait.
    pub fn push(
        &mut self,
        service: &mut Service<A>,
        account: &A,
        weight: u32,
        one: T,
    ) -> Option<T> {
        if self.waiting.get(account).is_some_and(|waiting| waiting.len() >= WAITING_MAX) {
            return Some(one);
        }
        self.arrives(service, account, weight);
        self.waiting.entry(account.clone()).or_default().push_back(one);
        None
    }

    fn arrives(&self, service: &mut Service<A>, account: &A, weight: u32) {
        let least = (!self.waiting.contains_key(account)).then(|| {
            let tags = self.waiting.keys().map(|waits| service.tag(waits));
            tags.min_by(|a, b| a.sum().total_cmp(&b.sum()))
        });
        service.arrives(account, weight, least);
    }

    /// How many may go on before the next look while none waits, whatever accounts they are of; so many are pending.
    pub fn allowance(&self, service: &Service<A>, pending: u32) -> u32 {
        match self.is_empty() {
            true => self.limit.limit.min(service.ahead_of_any()).saturating_sub(pending),
            false => 0,
        }
    }

    /// A connection of the account has used an allowance.
    pub fn passed(&mut self, service: &mut Service<A>, account: &A, weight: u32) {
        self.arrives(service, account, weight);
        service.admitted(account, weight);
        self.limit.admitted(1);
    }

    /// How many may be admitted now, while so many are pending.
    pub fn room(&self, service: &Service<A>, pending: u32, bounds: Bounds<'_, A>) -> u32 {
        let Some(account) = self.next(service, bounds) else { return 0 };
        self.limit.limit.min(service.ahead(&account)).saturating_sub(pending)
    }

    /// The account that is next, of those that need not wait for their own connections in service.
    fn next(&self, service: &Service<A>, bounds: Bounds<'_, A>) -> Option<A> {
        let by_place = |a: &&A, b: &&A| {
            let (a, b) = (service.place(a), service.place(b));
            a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))
        };
        let may = |account: &&A| {
            let own = bounds.serving.and_then(|all| all.get(*account)).copied().unwrap_or(0);
            own <= service.ahead(account) && !(bounds.is_full)(account)
        };
        self.waiting.keys().filter(may).min_by(by_place).cloned()
    }

    /// The connection that is next, if none has to wait for others in service.
    pub fn peek(&self, service: &Service<A>) -> Option<&T> {
        self.waiting.get(&self.next(service, Bounds::NONE)?)?.front()
    }

    /// Admits the connection that is next, and returns its account with it.
    pub fn pop(
        &mut self,
        service: &mut Service<A>,
        weight: impl Fn(&A) -> u32,
        bounds: Bounds<'_, A>,
    ) -> Option<(A, T)> {
        let (account, one) = self.take(service, bounds)?;
        service.admitted(&account, weight(&account));
        self.limit.admitted(1);
        Some((account, one))
    }

    /// Ends the waiting of the connection that [`peek`](Self::peek) returns. It is no service of its account.
    pub fn skip(&mut self, service: &Service<A>) -> Option<T> {
        self.take(service, Bounds::NONE).map(|(_, one)| one)
    }

    fn take(&mut self, service: &Service<A>, bounds: Bounds<'_, A>) -> Option<(A, T)> {
        let account = self.next(service, bounds)?;
        let waiting = self.waiting.get_mut(&account)?;
        let one = waiting.pop_front();
        if waiting.is_empty() {
            self.waiting.remove(&account);
        }
        Some((account, one?))
    }

    /// Finds a waiting connection.
    pub fn find(&mut self, account: &A, mut is_it: impl FnMut(&T) -> bool) -> Option<&mut T> {
        self.waiting.get_mut(account)?.iter_mut().find(|one| is_it(one))
    }

    /// Ends the waiting of all of an account.
    pub fn take_of(&mut self, account: &A) -> VecDeque<T> {
        self.waiting.remove(account).unwrap_or_default()
    }

    /// Ends the waiting of all, in no order.
    pub fn take_all(&mut self) -> impl Iterator<Item = T> + use<A, T> {
        std::mem::take(&mut self.waiting).into_values().flatten()
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Plain = Queue<char, u32>;

    fn push(
        queue: &mut Plain,
        service: &mut Service<char>,
        account: char,
        numbers: std::ops::Range<u32>,
    ) {
        for number in numbers {
            assert_eq!(queue.push(service, &account, 100, number), None);
        }
    }

    fn drain(
        queue: &mut Plain,
        service: &mut Service<char>,
        weight: impl Fn(&char) -> u32,
    ) -> Vec<u32> {
        std::iter::from_fn(|| queue.pop(service, &weight, Bounds::NONE).map(|(_, one)| one))
            .collect()
    }

    fn pop(queue: &mut Plain, service: &mut Service<char>, weight: u32) -> Option<u32> {
        queue.pop(service, |_| weight, Bounds::NONE).map(|(_, one)| one)
    }

    #[test]
    fn accounts_alternate_and_each_is_served_in_its_order() {
        let (mut queue, mut service) = (Plain::default(), Service::default());
        push(&mut queue, &mut service, 'b', 0..4);
        assert_eq!(pop(&mut queue, &mut service, 100), Some(0));
        push(&mut queue, &mut service, 'a', 10..12);
        assert_eq!(queue.peek(&service), Some(&10));
        assert_eq!(drain(&mut queue, &mut service, |_| 100), [10, 1, 11, 2, 3]);
        assert!(queue.is_empty());
    }

    #[test]
    fn weights_divide_the_service() {
        let (mut queue, mut service) = (Plain::default(), Service::default());
        push(&mut queue, &mut service, 'a', 0..100);
        push(&mut queue, &mut service, 'b', 100..200);
        let order = drain(&mut queue, &mut service, |of| if *of == 'a' { 400 } else { 100 });
        let of_a = order[..100].iter().filter(|number| **number < 100).count();
        assert!((79..=81).contains(&of_a), "{of_a}");
    }

    #[test]
    fn account_with_costly_connections_has_fewer() {
        let (mut queue, mut service) = (Plain::default(), Service::default());
        let (mut used, mut load) = ([0u64; 2], Vec::new());
        for round in 0..200 {
            for (account, first) in [('a', 0), ('b', 1000)] {
                if queue.find(&account, |_| true).is_none() {
                    push(&mut queue, &mut service, account, first..first + 8);
                }
            }
            let is_a = pop(&mut queue, &mut service, 100).is_some_and(|number| number < 1000);
            used[usize::from(!is_a)] += if is_a { 1_000_000 } else { 4_000_000 };
            load.push(is_a);
            if round % 5 == 0 {
                service.read(1, None, [(&'a', used[0]), (&'b', used[1])].into_iter(), |_| 100);
            }
        }
        let part = used[0] as f64 / used[1] as f64;
        assert!((0.9..1.1).contains(&part), "{part} of the time after {load:?}");
    }

    /// A server that makes a process of 2 ms for each connection, as itself, before it charges 0.05 ms; now and then 5.
    #[test]
    fn work_of_the_service_for_itself_is_a_part_of_each_connection() {
        let (mut queue, mut service) = (Plain::default(), Service::default());
        push(&mut queue, &mut service, 'b', 0..200);
        push(&mut queue, &mut service, 'a', 1000..1100);
        let (mut used, mut all_ns) = ([0u64; 2], 7_000_000_000);
        let read = |service: &mut Service<char>, used: [u64; 2], all_ns| {
            let readings = [('a', used[0]), ('b', used[1])];
            service.read(1, Some(all_ns), readings.iter().map(|(a, ns)| (a, *ns)), |_| 100);
        };
        read(&mut service, used, all_ns);
        let mut of_a = 0;
        for round in 0..100 {
            let is_a = pop(&mut queue, &mut service, 100).unwrap() >= 1000;
            of_a += usize::from(is_a);
            let charged = if round == 20 { 5_000_000 } else { 50_000 };
            used[usize::from(!is_a)] += charged;
            all_ns += 2_000_000 + charged;
            if round % 10 == 9 {
                read(&mut service, used, all_ns);
            }
        }
        assert!((45..=55).contains(&of_a), "{of_a} of 100");
        assert_eq!(service.ahead(&'a'), 1, "of more than 2 ms each");
        // Other work of the service, long after.
        for _ in 0..3 {
            all_ns += 1_000_000_000;
            read(&mut service, used, all_ns);
        }
        assert!(service.own_ns() <= OWN_NS_MAX);
    }

    fn bounds(serving: &BTreeMap<char, u32>) -> Bounds<'_, char> {
        Bounds { serving: Some(serving), ..Bounds::NONE }
    }

    #[test]
    fn account_that_has_all_its_connections_lets_others_pass() {
        let (mut queue, mut service) = (Plain::default(), Service::default());
        push(&mut queue, &mut service, 'b', 0..3);
        push(&mut queue, &mut service, 'a', 10..13);
        let bounds = Bounds { is_full: &|account| *account == 'b', ..Bounds::NONE };
        let popped = [(); 4].map(|()| Some(queue.pop(&mut service, |_| 100, bounds)?.1));
        assert_eq!(popped, [Some(10), Some(11), Some(12), None]);
        assert_eq!(queue.room(&service, 0, bounds), 0);
        assert_eq!(drain(&mut queue, &mut service, |_| 100), [0, 1, 2]);
    }

    #[test]
    fn account_waits_for_its_own_connections_while_tasks_wait_for_a_processor() {
        let (mut queue, mut service) = with_costs(&[('a', 1_000_000), ('b', 50_000_000)]);
        push(&mut queue, &mut service, 'b', 0..9);
        queue.limit.limit = LIMIT_MAX;
        let mut serving = BTreeMap::new();
        let mut pop = |queue: &mut Plain, serving: &mut BTreeMap<char, u32>| {
            let (account, _) = queue.pop(&mut service, |_| 100, bounds(serving))?;
            *serving.entry(account).or_default() += 1;
            Some(account)
        };
        // One that is served, and the next one.
        let two = [(); 3].map(|()| pop(&mut queue, &mut serving));
        assert_eq!(two, [Some('b'), Some('b'), None]);
        queue.waiting.insert('a', (100..109).collect());
        let three = [(); 4].map(|()| pop(&mut queue, &mut serving));
        assert_eq!(
            three,
            [Some('a'), Some('a'), Some('a'), None],
            "2 ms of work, and the next one"
        );
        let serving_now = bounds(&serving);
        assert_eq!(queue.room(&service, 0, serving_now), 0);
        assert_eq!(
            queue.room(&service, 0, Bounds::NONE),
            2,
            "the service has the processors that it needs"
        );
        serving.insert('b', 1);
        assert_eq!(queue.room(&service, 0, bounds(&serving)), 1, "one of b was answered");
    }

    #[test]
    fn account_that_was_idle_saves_nothing_up() {
        let (mut queue, mut service) = (Plain::default(), Service::default());
        push(&mut queue, &mut service, 'a', 0..1);
        push(&mut queue, &mut service, 'b', 100..200);
        for _ in 0..50 {
            pop(&mut queue, &mut service, 100);
        }
        push(&mut queue, &mut service, 'a', 1..20);
        let order = drain(&mut queue, &mut service, |_| 100);
        let of_a = order[..20].iter().filter(|number| **number < 100).count();
        assert!((9..=11).contains(&of_a), "{order:?}");
    }

    #[test]
    fn new_counters_charge_nothing_twice() {
        let (mut queue, mut service) = (Plain::default(), Service::default());
        push(&mut queue, &mut service, 'a', 0..2);
        pop(&mut queue, &mut service, 1);
        service.read(1, None, [(&'a', 5)].into_iter(), |_| 1);
        service.read(1, None, [(&'a', 2_000_005)].into_iter(), |_| 1);
        let before = service.place(&'a').0;
        service.read(2, None, [(&'a', 90_000_000)].into_iter(), |_| 1);
        assert!((service.place(&'a').0 - before).abs() < 1.0);
        service.read(2, None, [(&'a', 91_000_000)].into_iter(), |_| 1);
        assert!((service.place(&'a').0 - before - 1_000_000.0).abs() < 1.0);
    }

    #[test]
    fn account_has_a_bound_of_waiting_connections() {
        let (mut queue, mut service) = (Plain::default(), Service::default());
        push(&mut queue, &mut service, 'b', 0..WAITING_MAX as u32);
        assert_eq!(queue.push(&mut service, &'b', 100, 7777), Some(7777));
        assert_eq!(queue.push(&mut service, &'a', 100, 1), None);
        assert_eq!(queue.take_all().count(), WAITING_MAX + 1);
        for account in 0..2 * ACCOUNTS_MAX as u32 {
            let account = char::from_u32(0x1_0000 + account).unwrap();
            queue.push(&mut service, &account, 100, 1);
            assert!(service.accounts.len() <= ACCOUNTS_MAX);
            queue.take_all().for_each(drop);
        }
    }

    #[test]
    fn limit_follows_the_speed_of_the_service() {
        let (mut queue, mut service) = (Plain::default(), Service::default());
        push(&mut queue, &mut service, 'a', 0..WAITING_MAX as u32);
        // Each look finds that all were accepted: the service is faster than looks are.
        for expected in [2, 4, 8, 16, 16] {
            for _ in 0..queue.room(&service, 0, Bounds::NONE) {
                pop(&mut queue, &mut service, 100);
            }
            queue.limit.look(0);
            assert_eq!(queue.room(&service, 0, Bounds::NONE), expected);
        }
        // It accepts one in several looks now.
        for _ in 0..LOOKS {
            queue.limit.look(15);
        }
        assert_eq!(queue.room(&service, 0, Bounds::NONE), 1);
        for _ in 0..10 * LOOKS {
            queue.limit.look(1);
        }
        assert_eq!([0, 1, 5].map(|pending| queue.room(&service, pending, Bounds::NONE)), [1, 0, 0]);
    }

    /// A service with one connection of each account admitted, and a reading of their cost.
    fn with_costs(costs_ns: &[(char, u64)]) -> (Plain, Service<char>) {
        let (mut queue, mut service) = (Plain::default(), Service::default());
        service.read(1, None, std::iter::empty(), |_| 100);
        for (account, _) in costs_ns {
            push(&mut queue, &mut service, *account, 0..1);
        }
        drain(&mut queue, &mut service, |_| 100);
        service.read(1, None, costs_ns.iter().map(|(account, ns)| (account, *ns)), |_| 100);
        (queue, service)
    }

    #[test]
    fn fewer_are_admitted_where_the_next_are_costly() {
        let (mut queue, mut service) =
            with_costs(&[('a', 10_000), ('b', 900_000), ('c', 50_000_000)]);
        queue.limit.limit = LIMIT_MAX;
        for (account, expected) in [('a', LIMIT_MAX), ('b', 2), ('c', 1)] {
            push(&mut queue, &mut service, account, 0..1);
            assert_eq!(queue.room(&service, 0, Bounds::NONE), expected, "{account}");
            queue.take_all().for_each(drop);
        }
    }

    /// Arrivals where none waits, in turn, of a service that begins with a connection each so many microseconds.
    #[test]
    fn limit_grows_where_none_waits_while_the_service_is_fast() {
        for (us, clients, expected) in [(100, 1, 16), (100, 4, 16), (1000, 1, 8), (6000, 1, 1)] {
            let (mut limit, mut now) =
                (Limit { limit: clients, ..Limit::default() }, Duration::ZERO);
            for _ in 0..100 {
                limit.arrives(clients - 1, now);
                // One, and those that use an allowance before the next one arrives.
                let count = 1 + limit.limit.saturating_sub(clients);
                limit.admitted(count);
                now += Duration::from_micros(us) * count;
            }
            assert_eq!(limit.limit, expected, "{us} us, {clients} clients");
        }
    }

    #[test]
    fn allowance_is_what_the_costliest_account_would_have() {
        let (mut queue, service) = with_costs(&[('a', 10_000), ('b', 900_000)]);
        queue.limit.limit = LIMIT_MAX;
        assert_eq!([0, 1, 2, 9].map(|pending| queue.allowance(&service, pending)), [2, 1, 0, 0]);
        let (mut queue, mut service) = with_costs(&[('a', 10_000)]);
        for (limit, expected) in [(1, 1), (4, 4), (LIMIT_MAX, LIMIT_MAX)] {
            queue.limit.limit = limit;
            assert_eq!(queue.allowance(&service, 0), expected);
        }
        // While one waits, and while no cost is known, none goes on.
        push(&mut queue, &mut service, 'b', 0..1);
        assert_eq!(queue.allowance(&service, 0), 0);
        assert_eq!(Plain::default().allowance(&Service::default(), 0), 0);
    }

    /// A flood within an allowance: those that come after it wait behind another account.
    #[test]
    fn account_that_has_used_an_allowance_waits_afterwards() {
        let (mut queue, mut service) = with_costs(&[('a', 50_000), ('b', 50_000)]);
        (queue.limit.limit, queue.limit.admitted) = (LIMIT_MAX, 0);
        for _ in 0..queue.allowance(&service, 0) {
            queue.passed(&mut service, &'b', 100);
        }
        assert_eq!(queue.limit.admitted, LIMIT_MAX);
        push(&mut queue, &mut service, 'b', 0..20);
        push(&mut queue, &mut service, 'a', 1000..1010);
        let order = drain(&mut queue, &mut service, |_| 100);
        let last_of_a = order.iter().rposition(|number| *number >= 1000).unwrap();
        assert!(last_of_a <= 20, "{order:?}");
    }

    /// Looks every 4 ms, as on a busy machine, each half millisecond again, and then hardly any.
    #[test]
    fn service_has_work_until_the_next_look() {
        let (mut queue, mut service) = with_costs(&[('b', 900_000)]);
        queue.limit.limit = LIMIT_MAX;
        push(&mut queue, &mut service, 'b', 0..1);
        for (between_us, expected) in [(4000, 4), (500, 2), (1_000_000, 5)] {
            (0..60).for_each(|_| service.looked(Duration::from_micros(between_us)));
            assert_eq!(queue.room(&service, 0, Bounds::NONE), expected, "{between_us} us");
        }
    }

    #[test]
    fn account_is_not_charged_for_what_it_had_before_its_first_connection() {
        let (mut queue, mut service) = (Plain::default(), Service::default());
        push(&mut queue, &mut service, 'b', 0..20);
        let old_ns = 500_000_000;
        service.read(1, None, [(&'a', old_ns), (&'b', 0)].into_iter(), |_| 100);
        push(&mut queue, &mut service, 'a', 100..120);
        for round in 1..8 {
            let next = pop(&mut queue, &mut service, 100).unwrap();
            pop(&mut queue, &mut service, 100).unwrap();
            assert!(next % 100 < 20, "{next}");
            let readings = [('a', old_ns + round * 1_000_000), ('b', round * 1_000_000)];
            service.read(1, None, readings.iter().map(|(account, ns)| (account, *ns)), |_| 100);
        }
        let left = |queue: &Plain, account| queue.waiting[&account].len();
        let (of_a, of_b) = (left(&queue, 'a'), left(&queue, 'b'));
        assert!(of_a.abs_diff(of_b) <= 1, "{of_a} and {of_b} wait");
    }

    #[test]
    fn account_is_behind_others_by_a_bounded_time() {
        let (mut queue, mut service) = with_costs(&[('a', 3_600_000_000_000), ('b', 1_000_000)]);
        push(&mut queue, &mut service, 'a', 0..1);
        let behind = service.place(&'a').0 - service.reached.sum();
        assert!(behind <= BEHIND_NS / 100.0, "{behind}");
        // The mean cost of a connection is the estimate.
        push(&mut queue, &mut service, 'b', 100..110);
        let order = drain(&mut queue, &mut service, |_| 100);
        assert_eq!(order.last(), Some(&0));
        push(&mut queue, &mut service, 'a', 1..2);
        let weight = 400;
        service.read(1, None, [(&'a', 7_200_000_000_000)].into_iter(), |_| weight);
        let behind = service.place(&'a').0 - service.reached.sum();
        assert!(behind <= BEHIND_NS / f64::from(weight), "{behind}");
    }

    #[test]
    fn newcomer_is_not_behind_those_that_wait() {
        let (mut queue, mut service) = (Plain::default(), Service::default());
        service.read(1, None, std::iter::empty(), |_| 100);
        push(&mut queue, &mut service, 'b', 0..200);
        // Estimates of a millisecond each, which readings take back: the service was cheap.
        for _ in 0..50 {
            pop(&mut queue, &mut service, 100);
        }
        for ns in [500_000, 500_000, 500_000] {
            service.read(1, None, [(&'b', ns)].into_iter(), |_| 100);
        }
        assert!(service.place(&'b').0 < 1e4);
        push(&mut queue, &mut service, 'a', 1000..1010);
        let order: Vec<u32> = (0..20).filter_map(|_| pop(&mut queue, &mut service, 100)).collect();
        let of_a = order.iter().filter(|number| **number >= 1000).count();
        assert!(of_a >= 9, "{order:?}");
    }

    /// A service charges a hundredth of the first estimate. An account that comes meanwhile begins at a tag that is
    /// made of estimates.
    #[test]
    fn newcomer_is_not_behind_by_the_errors_of_estimates() {
        let (mut queue, mut service) = (Plain::default(), Service::default());
        service.read(1, None, std::iter::empty(), |_| 100);
        push(&mut queue, &mut service, 'b', 0..40);
        for _ in 0..6 {
            pop(&mut queue, &mut service, 100);
        }
        push(&mut queue, &mut service, 'a', 1000..1010);
        let (mut order, mut used) = (Vec::new(), [0, 60_000]);
        for _ in 0..20 {
            let next = pop(&mut queue, &mut service, 100).unwrap();
            used[usize::from(next < 1000)] += 10_000;
            order.push(next);
            let readings = [('a', used[0]), ('b', used[1])];
            service.read(1, None, readings.iter().map(|(a, ns)| (a, *ns)), |_| 100);
        }
        let of_a = order.iter().filter(|number| **number >= 1000).count();
        assert!(of_a >= 8, "{order:?}");
    }

    #[test]
    fn forgotten_account_goes_on_at_the_reached_tag() {
        let (mut queue, mut service) = (Plain::default(), Service::default());
        push(&mut queue, &mut service, 'b', 0..10);
        pop(&mut queue, &mut service, 1);
        pop(&mut queue, &mut service, 1);
        service.accounts.clear();
        pop(&mut queue, &mut service, 1);
        assert!(service.place(&'b').0 > service.reached.sum() && service.reached.sum() > 0.0);
    }

    proptest! {
        #[test]
        fn each_connection_is_admitted_once_and_accounts_keep_their_order(
            steps in prop::collection::vec((0u8..3, 0u8..4, 1u32..1000), 1..200)
        ) {
            let (mut queue, mut service) = (Queue::<u8, (u8, usize)>::default(), Service::default());
            let (mut count, mut admitted) = (0usize, Vec::new());
            let weight = |account: &u8| 1 + u32::from(*account) * 50;
            for (step, account, number) in steps {
                match step {
                    0 => {
                        prop_assert_eq!(queue.push(&mut service, &account, weight(&account), (account, count)), None);
                        count += 1;
                    }
                    1 => admitted.extend(queue.pop(&mut service, weight, Bounds::NONE).map(|(_, one)| one)),
                    _ => service.read(1, None, [(&account, u64::from(number))].into_iter(), weight),
                }
                prop_assert!(service.reached.sum().is_finite());
            }
            admitted.extend(std::iter::from_fn(|| queue.pop(&mut service, weight, Bounds::NONE).map(|(_, one)| one)));
            prop_assert_eq!(admitted.len(), count);
            for account in 0..4 {
                let of: Vec<_> = admitted.iter().filter(|one| one.0 == account).collect();
                prop_assert!(of.is_sorted());
            }
        }
    }
}
