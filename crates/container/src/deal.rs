//! Limits of the tasks of accounts (`account set --pids`).
//!
//! The kernel bounds tasks by cgroup (`pids.max`), and the containers of an account have no cgroup in common. So the
//! tasks that an account may have beyond those of now, its *room*, are dealt to its running containers: each may have
//! what it has, and an equal part of the room. The sum of what they may have is at most the limit. It therefore holds
//! in the kernel, without a daemon and without gates. Room is dealt again when a container starts, ends, falls asleep
//! or wakes, when a limit or an account changes, and each second by a daemon. So a container with many tasks gets what
//! others do not use.
//!
//! ORDER: lower limits are written first. A container may have made tasks up to then, so all are counted again, and
//! only then others are raised, as far as there is room. One command deals at a time.
//!
//! A container that is restored has `max` until all of its processes are there. It may be more than the room.
//!
//! LIMIT: a fork(2) can fail although another container of the account has room, until it is dealt again.
//!
//! Uses `ground`, `account` and `state`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use dormouse_kernel::cgroup::Cgroup;
use dormouse_model::{Config, ContainerId, Limits, TASKS_UNLIMITED};

use crate::account::{self, Above};
use crate::disk::Lock;
use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::state;

/// A value of `pids.max` that is none.
const ANY: u64 = u64::MAX;

/// How often what is left after equal parts is dealt again: containers that take less leave some.
const ROUNDS: usize = 4;

/// A container with a limited account, as the room is dealt to it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Part {
    /// Tasks that it has.
    now: u64,
    /// The limit of its contract.
    own: u64,
    /// Its limited accounts.
    accounts: Vec<u32>,
}

/// What is left of the limit of each account beside these numbers.
fn rooms(all: &[Part], counts: &[u64], limits: &BTreeMap<u32, u64>) -> BTreeMap<u32, u64> {
    let mut rooms = limits.clone();
    for (part, count) in all.iter().zip(counts) {
        for account in &part.accounts {
            if let Some(room) = rooms.get_mut(account) {
                *room = room.saturating_sub(*count);
            }
        }
    }
    rooms
}

/// Returns how many tasks each container may have: at least those that it has.
fn deal(all: &[Part], limits: &BTreeMap<u32, u64>) -> Vec<u64> {
    let mut dealt: Vec<u64> = all.iter().map(|part| part.now).collect();
    let least =
        |part: &Part, of: &dyn Fn(&u32) -> u64| part.accounts.iter().map(of).min().unwrap_or(ANY);
    for _ in 0..ROUNDS {
        let rooms = rooms(all, &dealt, limits);
        let room = |account: &u32| rooms.get(account).copied().unwrap_or(ANY);
        let mut takers: BTreeMap<u32, u64> = BTreeMap::new();
        for (part, has) in all.iter().zip(&dealt) {
            if *has < part.own && least(part, &room) > 0 {
                part.accounts.iter().for_each(|account| *takers.entry(*account).or_default() += 1);
            }
        }
        let share =
            |account: &u32| room(account) / takers.get(account).copied().unwrap_or(1).max(1);
        for (part, has) in all.iter().zip(&mut dealt) {
            *has += least(part, &share).min(part.own.saturating_sub(*has));
        }
    }
    // Fewer than there are takers: one each, first to those that have least.
    let mut left = rooms(all, &dealt, limits);
    let mut order: Vec<usize> = (0..all.len()).collect();
    order.sort_by_key(|at| dealt[*at]);
    for at in order {
        let (part, has) = (&all[at], &mut dealt[at]);
        let room = |account: &u32| left.get(account).copied().unwrap_or(ANY);
        if *has < part.own && least(part, &room) > 0 {
            *has += 1;
            for account in &part.accounts {
                if let Some(room) = left.get_mut(account) {
                    *room -= 1;
                }
            }
        }
    }
    dealt
}

/// A running container with a limited account.
struct Member {
    id: ContainerId,
    cgroup: Cgroup,
    above: Vec<Above>,
    part: Part,
    /// `pids.max`; `None` is any number.
    may: Option<u64>,
    /// All of its first processes are there.
    is_ready: bool,
}

impl Member {
    /// The most tasks that it has or can get.
    fn bound(&self) -> u64 {
        match self.may {
            Some(may) => self.part.now.max(may),
            None if self.is_ready => ANY,
            None => self.part.now,
        }
    }

    fn set(&mut self, may: u64) -> Result<()> {
        if self.may == Some(may) {
            return Ok(());
        }
        set(&self.cgroup, may)?;
        self.may = Some(may);
        Ok(())
    }
}

fn set(cgroup: &Cgroup, may: u64) -> Result<()> {
    let may = u32::try_from(may).unwrap_or(u32::MAX).max(1);
    Ok(cgroup.set(&Limits { pids_max: Some(may), ..Limits::default() })?)
}

fn own(config: &Config) -> u64 {
    config.spec.limits.tasks_max().map_or(ANY, u64::from)
}

/// The running containers of accounts that operators have made.
fn running(ground: &Ground) -> Result<Vec<(Config, Cgroup)>> {
    let mut all = Vec::new();
    for config in ground.started_configs()? {
        let config = config?;
        if account::is_made(&config)
            && let Some(cgroup) = ground.cgroups()?.find(config.id.as_str())?
        {
            all.push((config, cgroup));
        }
    }
    Ok(all)
}

/// Those with a limited account. The others have the limit of their contract again, if a limit has just been lifted.
fn members(ground: &Ground, has_changed: bool) -> Result<Vec<Member>> {
    let mut all = Vec::new();
    for (config, cgroup) in running(ground)? {
        let above = account::task_limits_above(ground, &config)?;
        if above.is_empty() {
            if has_changed {
                set(&cgroup, own(&config).min(TASKS_UNLIMITED.into()))?;
            }
            continue;
        }
        let init = state::read_init(ground, &config.id)?;
        let part = Part {
            now: cgroup.tasks()?.unwrap_or(0),
            // So many are none to the kernel.
            own: own(&config).min(u64::from(TASKS_UNLIMITED) - 1),
            accounts: above.iter().map(|above| above.number).collect(),
        };
        let may = cgroup.tasks_max()?;
        let is_ready = init.is_some_and(|init| !init.unready);
        all.push(Member { id: config.id, cgroup, above, part, may, is_ready });
    }
    Ok(all)
}

/// The file with the lock of the command that deals. It is there once room was dealt.
fn lock_path(ground: &Ground) -> PathBuf {
    ground.places.run.join("tasks.lock")
}

fn lock(ground: &Ground) -> Result<Lock> {
    Lock::take_new(&lock_path(ground))
}

/// Why room is dealt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cause<'i> {
    /// This container starts. It has no task yet, or its newborn alone.
    Start(&'i ContainerId),
    /// This one was restored.
    Restore(&'i ContainerId),
    /// Limits or accounts have changed.
    Change,
    /// Another one has ended, or time has passed.
    Again,
}

impl<'i> Cause<'i> {
    /// The container to which room is dealt for the first time.
    fn container(self) -> Option<&'i ContainerId> {
        match self {
            Self::Start(id) | Self::Restore(id) => Some(id),
            Self::Change | Self::Again => None,
        }
    }
}

/// Deals the room of all accounts.
fn deal_all(ground: &Ground, cause: Cause<'_>) -> Result<()> {
    let new = cause.container();
    let mut all = members(ground, cause == Cause::Change)?;
    all.iter_mut()
        .filter(|member| Some(&member.id) == new)
        .for_each(|member| member.is_ready = true);
    let limits: BTreeMap<u32, u64> = all
        .iter()
        .flat_map(|member| &member.above)
        .map(|above| (above.number, u64::from(above.most)))
        .collect();
    let parts = |all: &[Member]| -> Vec<Part> {
        let part = |member: &Member| match member.is_ready {
            true => member.part.clone(),
            // Another command starts or restores it: it keeps what it has.
            false => {
                let bound = member.bound();
                Part { now: bound, own: bound, ..member.part.clone() }
            }
        };
        all.iter().map(part).collect()
    };
    let wanted = deal(&parts(&all), &limits);
    for (member, wanted) in all.iter_mut().zip(&wanted).filter(|(member, _)| member.is_ready) {
        let first = match Some(&member.id) == new {
            true => member.part.now.max(1),
            false => *wanted,
        };
        if member.may.is_none_or(|may| first < may) {
            member.set(first.max(1))?;
        }
    }
    for member in &mut all {
        member.part.now = member.cgroup.tasks()?.unwrap_or(0);
    }
    let mut bounds: Vec<u64> = all.iter().map(Member::bound).collect();
    let parts = parts(&all);
    if let Cause::Start(id) = cause {
        refuse(&all, id, &rooms_with_debts(&all, &bounds, &limits))?;
    }
    for (at, member) in all.iter_mut().enumerate().filter(|(_, member)| member.is_ready) {
        let left = rooms(&parts, &bounds, &limits);
        let room = member.part.accounts.iter().filter_map(|account| left.get(account)).min();
        let may = wanted[at].min(bounds[at].saturating_add(room.copied().unwrap_or(0)));
        if member.may.is_some_and(|old| may > old) {
            member.set(may)?;
            bounds[at] = member.bound();
        }
    }
    Ok(())
}

/// The accounts that have more than their limit.
fn rooms_with_debts(
    all: &[Member],
    bounds: &[u64],
    limits: &BTreeMap<u32, u64>,
) -> BTreeMap<u32, u64> {
    let mut sums: BTreeMap<u32, u64> = BTreeMap::new();
    for (member, bound) in all.iter().zip(bounds) {
        for account in &member.part.accounts {
            let sum = sums.entry(*account).or_default();
            *sum = sum.saturating_add(*bound);
        }
    }
    sums.retain(|account, sum| limits.get(account).is_some_and(|limit| *sum > *limit));
    sums
}

/// Refuses the start of a container if its first task is beyond a limit.
fn refuse(all: &[Member], new: &ContainerId, beyond: &BTreeMap<u32, u64>) -> Result<()> {
    let Some(new) = all.iter().find(|member| member.id == *new) else { return Ok(()) };
    match new.above.iter().find(|above| beyond.contains_key(&above.number)) {
        None => Ok(()),
        Some(above) => Err(Error::AccountFull { name: above.name.to_string(), most: above.most }),
    }
}

/// Deals room to a container with a new cgroup, before its first task. One that is restored takes none until
/// [`enforce`].
pub(crate) fn enter(
    ground: &Ground,
    config: &Config,
    cgroup: &Cgroup,
    is_restored: bool,
) -> Result<()> {
    if account::task_limits_above(ground, config)?.is_empty() {
        return Ok(());
    }
    match is_restored {
        true => set(cgroup, ANY),
        false => {
            let _alone = lock(ground)?;
            deal_all(ground, Cause::Start(&config.id))
        }
    }
}

/// Deals room to a restored container. Its processes are there, and have not run yet.
pub(crate) fn enforce(ground: &Ground, config: &Config) -> Result<()> {
    if account::task_limits_above(ground, config)?.is_empty() {
        return Ok(());
    }
    let _alone = lock(ground)?;
    deal_all(ground, Cause::Restore(&config.id))
}

/// Deals the room of a container that has ended, or has another limit, to those of its accounts. After a failure the
/// limits stay as they are, and hold: the next command deals again.
pub(crate) fn again(ground: &Ground, config: &Config) {
    let step = || -> Result<()> {
        if account::task_limits_above(ground, config)?.is_empty() {
            return Ok(());
        }
        let _alone = lock(ground)?;
        deal_all(ground, Cause::Again)
    };
    let _ = step();
}

/// Deals the room of all accounts after a change of limits or accounts on the disk.
pub(crate) fn follow(ground: &Ground) -> Result<()> {
    if !lock_path(ground).exists() && !account::has_task_limits(ground)? {
        return Ok(());
    }
    let _alone = lock(ground)?;
    deal_all(ground, Cause::Change)
}

/// The same from time to time. Returns whether an account has a limit.
pub(crate) fn tick(ground: &Ground) -> Result<bool> {
    if !account::has_task_limits(ground)? {
        return Ok(false);
    }
    let _alone = lock(ground)?;
    deal_all(ground, Cause::Again).map(|()| true)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn part(now: u64, own: u64, accounts: &[u32]) -> Part {
        Part { now, own, accounts: accounts.into() }
    }

    #[test]
    fn room_is_dealt_in_equal_parts_beside_what_there_is() {
        let limits = BTreeMap::from([(1, 100), (2, 20)]);
        let two = [part(10, ANY, &[1]), part(30, ANY, &[1])];
        assert_eq!(deal(&two, &limits), [40, 60]);
        // What one may not take is another's.
        let small = [part(10, 15, &[1]), part(30, ANY, &[1])];
        assert_eq!(deal(&small, &limits), [15, 85]);
        // An account below another one has to keep both limits.
        let below = [part(5, ANY, &[2, 1]), part(5, ANY, &[1])];
        assert_eq!(deal(&below, &limits), [20, 80]);
        // Not divisible, and no room.
        assert_eq!(deal(&[part(0, ANY, &[2]), part(17, ANY, &[2])], &limits), [2, 18]);
        assert_eq!(deal(&[part(25, ANY, &[2]), part(1, ANY, &[2])], &limits), [25, 1]);
        assert!(deal(&[], &limits).is_empty());
    }

    proptest! {
        #[test]
        fn sum_is_never_beyond_a_limit_unless_it_was(
            parts in proptest::collection::vec((0u64..50, 0u64..80, 0usize..4), 0..12),
            a in 0u64..300, b in 0u64..100,
        ) {
            let lines: [&[u32]; 4] = [&[1], &[2, 1], &[2], &[2, 1]];
            let of = |(now, own, line): &(u64, u64, usize)| part(*now, *own, lines[*line]);
            let all: Vec<Part> = parts.iter().map(of).collect();
            let limits = BTreeMap::from([(1, a), (2, b)]);
            let dealt = deal(&all, &limits);
            for (account, limit) in &limits {
                let of = |counts: &mut dyn Iterator<Item = u64>| -> u64 {
                    let all = all.iter().zip(counts);
                    all.filter(|(part, _)| part.accounts.contains(account)).map(|(_, n)| n).sum()
                };
                let now = of(&mut all.iter().map(|part| part.now));
                let sum = of(&mut dealt.iter().copied());
                prop_assert!(sum <= (*limit).max(now), "{all:?} {limits:?} {dealt:?}");
            }
            for (part, dealt) in all.iter().zip(&dealt) {
                prop_assert!(*dealt >= part.now && *dealt <= part.own.max(part.now));
            }
        }
    }
}
