//! Debt: the CPU time that a shared service has used for a client is paid from the client's own share.
//!
//! A shared service spends CPU time on its clients, and its own cgroup pays. Without a debt a client of weight 100 gets
//! a share at home, and as much again as the service has for it. With a debt, work for an account counts as its use:
//!
//! ```text
//! level  = use of the containers that compete / sum of their weights      CPUs per share
//! due    = reserve + weight x level                                      CPUs of one container
//! debt   = clamp(debt + taken - max(0, due x passed - home), 0, LONGEST x due)
//! part   = 1 - min(debt / REPAID / due, 15/16)
//! weight = base x part + raise
//! ```
//!
//! *home* is what a container uses for itself, *taken* what others have worked for its account. Time that was due and
//! not used pays the debt, so a container that does nothing at home is never slowed down. Use of its own that is above
//! the level is no debt: time that others leave stays free for all. Reserved time that is used is not in the level, and
//! neither is a container whose limit is below what would be due to it. While nothing is taken, at least a twentieth of
//! what is due counts as not used: a debt ends also where no other container competes.
//!
//! **The weight moves with the work.** A client that gives up weight at home lends it to the services that work for
//! it. `raise` is what a service has beyond its own weight:
//!
//! ```text
//! lent   = weight of the account x min(1, LEAD x taken / due)             divided by the work of each service
//! raise  = max(0, base x min(1, LEAD x home / due) + sum of lent - base)
//! ```
//!
//! So a service with the weight of one container can work for a hundred, is never below its own weight, and never above
//! its weight and those of the accounts that it works for. LEAD lets the weight arrive before all of it is used.
//!
//! **A limit** (`--cpus`) is lowered in the same way, with the limit as the due time, so that home and services
//! together stay below it.
//!
//! **Not here.** Which request a service serves first is the service's own order. A client whose work at a service is
//! above all that is due to it has the least weight at home, and no debt stops the service.
#![allow(
    clippy::cast_precision_loss,
    reason = "weights and times of containers are far below 2^52"
)]

use std::collections::{BTreeMap, BTreeSet};

use dormouse_model::Cpu;

use crate::cpu::{self, Host};

/// Time in which a debt is repaid.
const REPAID_NS: f64 = 300_000_000.0;
/// LIMIT: the longest debt, as time in which nothing is used at home.
const LONGEST_NS: f64 = 1_000_000_000.0;
/// LIMIT: the largest debt.
const LARGEST_NS: f64 = 500_000_000.0;
/// The part of a weight or limit that a debt leaves.
const LEAST: f64 = 1.0 / 16.0;
/// A client has lent all of its weight when it has used a part of this of what is due to it.
const LEAD: f64 = 2.0;
/// Time over which use is averaged.
const SMOOTH_NS: f64 = 500_000_000.0;
/// A container that uses at most this part of what is due to it does not compete.
const IDLE_PART: f64 = 10.0;
/// The least part of what is due by which a debt is paid while nothing is taken.
const FORGIVEN: f64 = 0.05;
/// LIMIT: passes in which containers are found that do not compete.
const PASSES_MAX: usize = 8;
/// Work for others below this rate is none.
const RATE_MIN: f64 = 0.0005;
/// A limit is written if it differs by more than a part of this.
const QUOTA_CHANGE: f64 = 10.0;
/// The least quota of the kernel.
const QUOTA_MIN_US: u64 = 1000;

/// A running container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member<I, A> {
    /// Its identity.
    pub id: I,
    /// Its account; `None` for one that pays no debts.
    pub account: Option<A>,
    /// Its contract.
    pub cpu: Cpu,
    /// The weight of its contract, in shares.
    pub shares: u32,
    /// CPU time since its start; `None` if it was not read this time.
    pub used_ns: Option<u64>,
}

/// What a container has worked for another account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work<I, A> {
    /// The container.
    pub service: I,
    /// The account that it worked for.
    pub account: A,
    /// CPU time, in this life of the container and since the gates were loaded.
    pub cpu_ns: u64,
}

/// What was read at one time.
#[derive(Debug, Clone)]
pub struct Readings<I, A> {
    /// Time since the last readings.
    pub passed_ns: u64,
    /// The load of the gates, as a number that is used once: after another one, work begins at zero.
    pub load: u32,
    /// All running containers.
    pub members: Vec<Member<I, A>>,
    /// All work for others.
    pub works: Vec<Work<I, A>>,
}

/// The state between decisions.
#[derive(Debug, Clone)]
pub struct State<I, A> {
    members: BTreeMap<I, Kept>,
    works: BTreeMap<(I, A), Seen>,
    /// CPUs per share of a container that competes.
    level: f64,
    /// That of the last readings; `None` before the first.
    load: Option<u32>,
}

/// Work up to now.
#[derive(Debug, Clone, Copy)]
struct Seen {
    cpu_ns: u64,
    /// In CPUs.
    rate: f64,
}

#[derive(Debug, Clone, Copy)]
struct Kept {
    used_ns: u64,
    /// Time since `used_ns` was read.
    unread_ns: u64,
    /// Work for others that is not in `used_ns` yet.
    early_ns: u64,
    /// Use of its own, at home and at services.
    own_ns: u64,
    /// Use at home, in CPUs.
    home: f64,
    /// Work of others for it, in CPUs.
    taken: f64,
    debt_ns: f64,
    limit_debt_ns: f64,
    /// The weight in the kernel; `None` if it is not known.
    shares: Option<u32>,
    /// The quota in the kernel; `None` if it is not known, or there is none.
    quota_us: Option<u64>,
}

/// What is to be written for a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting<I> {
    /// The container.
    pub id: I,
    /// Its weight, in shares; `None` leaves the present one.
    pub shares: Option<u32>,
    /// Its quota; `None` leaves the present one.
    pub quota: Option<Quota>,
    /// All of it is as without debts.
    pub is_plain: bool,
}

/// The quota of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quota {
    /// CPU time per period.
    pub quota_us: u64,
    /// The period.
    pub period_us: u32,
    /// CPU time that may be saved up: none while a debt lowers the quota.
    pub burst_us: u64,
}

/// Containers that work for others, or for which others work.
#[derive(Debug, Clone)]
pub struct Involved<I, A> {
    members: BTreeSet<I>,
    accounts: BTreeSet<A>,
    known: BTreeSet<I>,
}

impl<I: Ord, A: Ord> Involved<I, A> {
    /// Returns whether a container is one of them, or was never read.
    pub fn has(&self, id: &I, account: Option<&A>) -> bool {
        self.members.contains(id)
            || account.is_some_and(|account| self.accounts.contains(account))
            || !self.known.contains(id)
    }
}

impl<I, A> Default for State<I, A> {
    fn default() -> Self {
        let (members, works) = (BTreeMap::new(), BTreeMap::new());
        Self { members, works, level: 0.0, load: None }
    }
}

impl<I: Clone + Ord, A: Clone + Ord> State<I, A> {
    /// Returns whether nothing was worked for others lately, and no debt is left.
    pub fn is_at_rest(&self) -> bool {
        let rests = |kept: &Kept| kept.debt_ns == 0.0 && kept.limit_debt_ns == 0.0;
        self.works.values().all(|seen| seen.rate < RATE_MIN) && self.members.values().all(rests)
    }

    /// Returns the containers that are to be read often.
    pub fn involved(&self) -> Involved<I, A> {
        let is_busy = |seen: &&Seen| seen.rate >= RATE_MIN;
        let works = || self.works.iter().filter(|(_, seen)| is_busy(seen));
        let has_debt = |kept: &Kept| kept.debt_ns > 0.0 || kept.limit_debt_ns > 0.0;
        let debtors = self.members.iter().filter(|(_, kept)| has_debt(kept));
        let services = works().map(|((service, _), _)| service);
        Involved {
            members: services.chain(debtors.map(|(id, _)| id)).cloned().collect(),
            accounts: works().map(|((_, account), _)| account.clone()).collect(),
            known: self.members.keys().cloned().collect(),
        }
    }

    /// What is added to the CPU time of a container's cgroup for the time that the container has used for itself, at
    /// home and at services: for its reservation it counts as its use.
    pub fn own_beyond_ns(&self, id: &I) -> i64 {
        let of = |kept: &Kept| kept.own_ns.cast_signed().wrapping_sub(kept.used_ns.cast_signed());
        self.members.get(id).map_or(0, of)
    }

    /// The weight and the quota that a container has in the kernel, which another process may have written.
    pub fn found(&mut self, id: &I, shares: Option<u32>, quota_us: Option<u64>) {
        if let Some(kept) = self.members.get_mut(id) {
            (kept.shares, kept.quota_us) = (shares, quota_us);
        }
    }

    /// Forgets a container, whose cgroup is another one now, and its work, which begins at zero there.
    pub fn forget(&mut self, id: &I) {
        self.members.remove(id);
        self.works.retain(|(service, _), _| service != id);
    }
}

/// Adds what was used since the last readings.
pub fn count<I: Clone + Ord, A: Clone + Ord>(
    host: &Host,
    now: &Readings<I, A>,
    was: State<I, A>,
) -> State<I, A> {
    let passed = now.passed_ns.max(1) as f64;
    let most_ns = u64::from(host.cpus_milli).saturating_mul(now.passed_ns) / 1000;
    let mut state = State { level: was.level, load: Some(now.load), ..State::default() };
    let (mut given_ns, mut taken_ns) = (BTreeMap::new(), BTreeMap::new());
    for work in &now.works {
        let key = (work.service.clone(), work.account.clone());
        let before = was.works.get(&key).copied();
        let seen_ns = match (was.load, before) {
            // A new governor takes the past for paid.
            (None, _) => work.cpu_ns,
            (Some(load), Some(before)) if load == now.load && before.cpu_ns <= work.cpu_ns => {
                before.cpu_ns
            }
            // It has begun since.
            _ => 0,
        };
        // The kernel counts work when a task is switched away from. No more than was possible counts at once.
        let more_ns = (work.cpu_ns - seen_ns).min(most_ns);
        *given_ns.entry(work.service.clone()).or_insert(0) += more_ns;
        *taken_ns.entry(work.account.clone()).or_insert(0) += more_ns;
        let mut rate = average(before.map_or(0.0, |before| before.rate), more_ns as f64, passed);
        if rate < RATE_MIN {
            rate = 0.0;
        }
        state.works.insert(key, Seen { cpu_ns: seen_ns + more_ns, rate });
    }
    let all_shares = of_accounts(&now.members, |member| f64::from(member.shares));
    for member in &now.members {
        // Containers of one account pay by their weights.
        let part = member.account.as_ref().map_or(0.0, |account| {
            f64::from(member.shares) / all_shares.get(account).copied().unwrap_or(1.0).max(1.0)
        });
        let taken = member.account.as_ref().and_then(|account| taken_ns.get(account));
        let taken = taken.copied().unwrap_or(0u64) as f64 * part;
        let given = given_ns.get(&member.id).copied().unwrap_or(0u64);
        let kept = was.members.get(&member.id).copied();
        let kept = kept.unwrap_or_else(|| begin(member));
        state.members.insert(member.id.clone(), read(member, kept, given, taken, now.passed_ns));
    }
    state.level = level(&now.members, &state.members);
    let mut given: BTreeMap<&I, f64> = BTreeMap::new();
    for ((service, _), seen) in &state.works {
        *given.entry(service).or_insert(0.0) += seen.rate;
    }
    for member in &now.members {
        let Some(kept) = state.members.get_mut(&member.id) else { continue };
        if member.account.is_none() {
            // A record that was damaged meanwhile.
            (kept.debt_ns, kept.limit_debt_ns) = (0.0, 0.0);
            continue;
        }
        // What was taken is in the average by now, so the average stands for the last reading, too.
        let due = due(member, state.level);
        let most = (due * LONGEST_NS).min(LARGEST_NS);
        let forgiven = if kept.taken > 0.0 { 0.0 } else { FORGIVEN * due };
        let left = (due - kept.home).max(forgiven);
        kept.debt_ns = owe(kept.debt_ns, kept.taken, left, passed, most);
        if let Some(milli) = member.cpu.max_milli {
            let due = f64::from(milli) / 1000.0;
            let most = (due * LONGEST_NS).min(LARGEST_NS);
            // The kernel's limit counts work for others as well.
            let given = given.get(&member.id).copied().unwrap_or(0.0);
            kept.limit_debt_ns =
                owe(kept.limit_debt_ns, kept.taken, due - kept.home - given, passed, most);
        }
    }
    state
}

/// A debt after a time in which `taken` CPUs were used elsewhere, and `left` CPUs were due and not used.
fn owe(debt_ns: f64, taken: f64, left: f64, passed: f64, most_ns: f64) -> f64 {
    let debt = (debt_ns + (taken - left.max(0.0)) * passed).clamp(0.0, most_ns.max(0.0));
    if debt < 1000.0 { 0.0 } else { debt }
}

fn average(before: f64, more_ns: f64, passed: f64) -> f64 {
    before + (more_ns / passed - before) * (passed / SMOOTH_NS).min(1.0)
}

/// The weight of a container as its contract has it. That of a reservation is not known here.
fn plain_shares<I, A>(member: &Member<I, A>) -> Option<u32> {
    (member.cpu.reserve_milli == 0).then_some(member.shares)
}

/// The CPUs that are due to a container.
fn due<I, A>(member: &Member<I, A>, level: f64) -> f64 {
    f64::from(member.cpu.reserve_milli) / 1000.0 + f64::from(member.shares) * level
}

/// A container that is read for the first time has the settings of its contract.
fn begin<I, A>(member: &Member<I, A>) -> Kept {
    Kept {
        used_ns: member.used_ns.unwrap_or(0),
        unread_ns: 0,
        early_ns: 0,
        own_ns: member.used_ns.unwrap_or(0),
        home: 0.0,
        taken: 0.0,
        debt_ns: 0.0,
        limit_debt_ns: 0.0,
        shares: plain_shares(member),
        quota_us: member.cpu.quota_us(),
    }
}

/// Adds what a container has used.
fn read<I, A>(member: &Member<I, A>, was: Kept, given: u64, taken: f64, passed_ns: u64) -> Kept {
    let mut kept = was;
    kept.taken = average(kept.taken, taken, passed_ns.max(1) as f64);
    if kept.taken < RATE_MIN {
        kept.taken = 0.0;
    }
    kept.own_ns = kept.own_ns.saturating_add(taken as u64);
    kept.unread_ns = kept.unread_ns.saturating_add(passed_ns);
    kept.early_ns = kept.early_ns.saturating_add(given);
    let Some(used_ns) = member.used_ns else { return kept };
    // Both figures of the kernel are a little late, and not at the same time: what was given and is not in the use
    // yet is taken from the next.
    let used = used_ns.saturating_sub(kept.used_ns);
    let home = used.saturating_sub(kept.early_ns);
    kept.early_ns = kept.early_ns.saturating_sub(used);
    kept.own_ns = kept.own_ns.saturating_add(home);
    kept.home = average(kept.home, home as f64, kept.unread_ns.max(1) as f64);
    (kept.used_ns, kept.unread_ns) = (used_ns, 0);
    kept
}

/// Sums up a figure of the containers of each account.
fn of_accounts<I, A: Clone + Ord>(
    members: &[Member<I, A>],
    figure: impl Fn(&Member<I, A>) -> f64,
) -> BTreeMap<A, f64> {
    let mut all = BTreeMap::new();
    for member in members {
        if let Some(account) = &member.account {
            *all.entry(account.clone()).or_insert(0.0) += figure(member);
        }
    }
    all
}

/// The CPUs per share, of the containers that compete.
fn level<I: Ord, A>(members: &[Member<I, A>], kept: &BTreeMap<I, Kept>) -> f64 {
    let mean = |level: f64| {
        let (mut cpus, mut shares) = (0.0, 0.0);
        for member in members {
            let used = kept.get(&member.id).map_or(0.0, |kept| kept.home + kept.taken);
            let due = due(member, level);
            let is_limited = member.cpu.max_milli.is_some_and(|max| f64::from(max) / 1000.0 < due);
            if used >= RATE_MIN && used > due / IDLE_PART && !is_limited {
                cpus += (used - f64::from(member.cpu.reserve_milli) / 1000.0).max(0.0);
                shares += f64::from(member.shares);
            }
        }
        if shares > 0.0 { cpus / shares } else { 0.0 }
    };
    // Each pass leaves out those that use little, or may use no more, at the level of the pass before.
    let mut level = 0.0;
    for _ in 0..PASSES_MAX {
        let next = mean(level);
        if next <= level {
            break;
        }
        level = next;
    }
    level
}

/// Decides the weights and quotas of all containers. `base` has the weights without debts, in shares, of those for
/// which they are not that of the contract.
///
/// The smallest weights come first, so that no two large ones compete meanwhile.
pub fn decide<I: Clone + Ord, A: Clone + Ord>(
    host: &Host,
    members: &[Member<I, A>],
    base: &BTreeMap<I, u32>,
    state: &mut State<I, A>,
) -> Vec<Setting<I>> {
    let lent = lend(members, state);
    let mut settings = Vec::new();
    for member in members {
        let Some(kept) = state.members.get_mut(&member.id) else { continue };
        if plain_shares(member).is_none() && !base.contains_key(&member.id) {
            continue; // its weight is not decided yet
        }
        let plain = base.get(&member.id).copied().unwrap_or(member.shares);
        let own = f64::from(plain);
        let due = due(member, state.level);
        let at_home = if due > 0.0 { (LEAD * kept.home / due).min(1.0) } else { 1.0 };
        let raise = lent.get(&member.id).map_or(0.0, |lent| (own * at_home + lent - own).max(0.0));
        let goal = own * part(kept.debt_ns, due) + raise;
        let goal = if goal == own { plain } else { cpu::clamp(host, goal) };
        let is_due = kept
            .shares
            .is_none_or(|old| cpu::differs(old, goal) || (goal == plain && old != plain));
        if is_due {
            kept.shares = Some(goal);
        }
        let quota = quota(&member.cpu, kept.limit_debt_ns).filter(|quota| {
            let is_whole = Some(quota.quota_us) == member.cpu.quota_us();
            kept.quota_us.is_none_or(|old| {
                let change = quota.quota_us.abs_diff(old) as f64;
                change * QUOTA_CHANGE > old as f64 || (is_whole && change > 0.0)
            })
        });
        if let Some(quota) = quota {
            kept.quota_us = Some(quota.quota_us);
        }
        let is_plain = kept.shares == Some(plain) && kept.quota_us == member.cpu.quota_us();
        if is_due || quota.is_some() {
            let shares = is_due.then_some(goal);
            settings.push(Setting { id: member.id.clone(), shares, quota, is_plain });
        }
    }
    // ORDER: by weight, then by identity, so that equal readings have equal results.
    settings.sort_by(|a, b| (a.shares, &a.id).cmp(&(b.shares, &b.id)));
    settings
}

/// The part of a weight or a limit that a debt leaves.
fn part(debt_ns: f64, due: f64) -> f64 {
    if debt_ns <= 0.0 || due <= 0.0 {
        return 1.0;
    }
    1.0 - (debt_ns / REPAID_NS / due).min(1.0 - LEAST)
}

/// The quota beside a debt; `None` without a limit.
fn quota(cpu: &Cpu, debt_ns: f64) -> Option<Quota> {
    let (whole, milli) = (cpu.quota_us()?, cpu.max_milli?);
    let part = part(debt_ns, f64::from(milli) / 1000.0);
    let quota_us = match part < 1.0 {
        true => ((whole as f64 * part) as u64).max(QUOTA_MIN_US.min(whole)),
        false => whole,
    };
    let burst_us = if quota_us == whole { cpu.burst_us() } else { 0 };
    Some(Quota { quota_us, period_us: cpu.period_us, burst_us })
}

/// The weights that accounts lend to the services that work for them.
fn lend<I: Clone + Ord, A: Clone + Ord>(
    members: &[Member<I, A>],
    state: &State<I, A>,
) -> BTreeMap<I, f64> {
    let mut taken: BTreeMap<&A, f64> = BTreeMap::new();
    for ((_, account), seen) in &state.works {
        *taken.entry(account).or_insert(0.0) += seen.rate;
    }
    let all_shares = of_accounts(members, |member| f64::from(member.shares));
    let all_due = of_accounts(members, |member| due(member, state.level));
    let mut lent = BTreeMap::new();
    for ((service, account), seen) in state.works.iter().filter(|(_, seen)| seen.rate > 0.0) {
        let (Some(shares), Some(all)) = (all_shares.get(account), taken.get(account)) else {
            continue;
        };
        let due = all_due.get(account).copied().unwrap_or(0.0);
        let used = if due > 0.0 { (LEAD * all / due).min(1.0) } else { 1.0 };
        *lent.entry(service.clone()).or_insert(0.0) += shares * used * seen.rate / all;
    }
    lent
}

#[cfg(test)]
mod tests;
