//! A model of verbs that are interleaved at every step: each verb is a thread, and one of them runs at a time. After
//! each access to the ledger, a lock or a group, a pseudo-random number chooses the next one.
//!
//! A group is killed when its memory grows above its limit, as the kernel does with memory that it cannot reclaim.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use dormouse_kernel::cgroup::{LimitSet, ParentMemory};
use dormouse_model::{ContainerId, Limits};

use super::super::ledger::{Extent, Grant, InForce, Ledger};
use super::{Member, Site, begin, settle, snapshot, write_one};
use crate::error::Result;

const MB: u64 = 1 << 20;
const ROOM: u64 = 400 * MB;
/// Memory of the container that wakes.
const SLEEPER: u64 = 280 * MB;
/// Parts in which it arrives.
const PARTS: u64 = 4;
/// Schedules of each test.
const SCHEDULES: u64 = 600;

/// The container with a guarantee from the beginning, one that gets a guarantee, the one that wakes, and one that runs.
const HOLDER: u8 = 1;
const NEW: u8 = 2;
const WAKES: u8 = 3;
const RUNS: u8 = 4;
const LATER: u8 = 5;

fn id(number: u8) -> ContainerId {
    ContainerId::from_bytes([number; 16])
}

#[derive(Default)]
struct State {
    ledger: Ledger,
    /// Sizes that [`Order::Names`] keeps in the ledger.
    restored_in_ledger: BTreeMap<ContainerId, u64>,
    is_ledger_locked: bool,
    is_writer_locked: bool,
    /// `RUN/c`, with the sizes of restored containers.
    started: BTreeSet<ContainerId>,
    restored: BTreeMap<ContainerId, u64>,
    /// All groups that were made: limit and usage.
    groups: Vec<(u64, u64)>,
    /// The present group of each container.
    present: BTreeMap<ContainerId, usize>,
    parent: Option<u64>,
    killed: Vec<usize>,
    /// Writes of limits that are interrupted by signals from now on.
    interrupts: u32,
    /// The thread that runs, those that have not ended, and the schedule.
    turn: usize,
    live: Vec<usize>,
    random: u64,
    /// A thread and the number of its steps after which it is killed.
    dies: Option<(usize, u64)>,
}

impl State {
    fn next(&mut self) {
        // xorshift64
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        // Mostly the same one, so that a whole verb fits between two steps of another.
        let goes_on = self.random >> 60 < 13 && self.live.contains(&self.turn);
        if !goes_on && !self.live.is_empty() {
            self.turn = self.live[(self.random >> 33) as usize % self.live.len()];
        }
    }

    fn has_ledger(&self) -> bool {
        !self.ledger.granted.is_empty() || self.ledger.memory.is_some()
    }
}

#[derive(Default)]
struct Model {
    state: Mutex<State>,
    changed: Condvar,
}

/// A killed verb.
struct Killed;

impl Model {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs verbs to their end, in an order that follows from `seed`.
    fn run(&self, seed: u64, verbs: &[&(dyn Fn(&Verb<'_>) + Sync)]) {
        {
            let mut state = self.lock();
            state.random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            state.live = (0..verbs.len()).collect();
            state.next();
        }
        std::thread::scope(|scope| {
            for (me, verb) in verbs.iter().enumerate() {
                scope.spawn(move || {
                    let it = Verb { model: self, me };
                    it.wait_for_turn();
                    let ended = catch_unwind(AssertUnwindSafe(|| verb(&it)));
                    let mut state = self.lock();
                    state.live.retain(|live| *live != me);
                    state.next();
                    self.changed.notify_all();
                    drop(state);
                    if let Err(cause) = ended
                        && !cause.is::<Killed>()
                    {
                        resume_unwind(cause);
                    }
                });
            }
        });
    }
}

/// One verb, or the daemon.
struct Verb<'a> {
    model: &'a Model,
    me: usize,
}

/// A lock, which a killed process releases too.
struct Held<'a> {
    model: &'a Model,
    flag: fn(&mut State) -> &mut bool,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        *(self.flag)(&mut self.model.lock()) = false;
    }
}

impl<'a> Verb<'a> {
    fn wait_for_turn(&self) {
        let state = self.model.lock();
        let wait = self.model.changed.wait_while(state, |state| state.turn != self.me);
        drop(wait.unwrap_or_else(PoisonError::into_inner));
    }

    /// Does one step, after which another verb may run.
    fn step<T>(&self, step: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.model.lock();
        let is_killed = match &mut state.dies {
            Some((who, steps)) if *who == self.me => {
                *steps = steps.saturating_sub(1);
                *steps == 0
            }
            _ => false,
        };
        if is_killed {
            state.dies = None;
            drop(state);
            resume_unwind(Box::new(Killed));
        }
        let done = step(&mut state);
        state.next();
        drop(state);
        self.model.changed.notify_all();
        self.wait_for_turn();
        done
    }

    fn try_take(&self, flag: fn(&mut State) -> &mut bool) -> Option<Held<'a>> {
        let is_taken = self.step(|state| !std::mem::replace(flag(state), true));
        is_taken.then(|| Held { model: self.model, flag })
    }

    fn take(&self, flag: fn(&mut State) -> &mut bool) -> Held<'a> {
        loop {
            if let Some(held) = self.try_take(flag) {
                return held;
            }
        }
    }

    fn make_group(&self, of: &ContainerId) {
        self.step(|state| {
            state.groups.push((u64::MAX, 0));
            let group = state.groups.len() - 1;
            state.present.insert(of.clone(), group);
        });
    }

    /// Memory of a container grows.
    fn charge(&self, of: &ContainerId, bytes: u64) {
        self.step(|state| {
            let Some(&group) = state.present.get(of) else { return };
            let (limit, used) = &mut state.groups[group];
            *used += bytes;
            if *used > *limit {
                state.killed.push(group);
            }
        });
    }
}

impl<'a> Site for Verb<'a> {
    type Group = usize;
    type Writer = Held<'a>;

    fn ledger<T>(&self, change: impl FnOnce(&mut Ledger) -> Result<T>) -> Result<T> {
        let _alone = self.take(|state| &mut state.is_ledger_locked);
        let mut ledger = self.step(|state| {
            let State { ledger, started, .. } = state;
            ledger.granted.retain(|id, _| started.contains(id));
            ledger.clone()
        });
        let changed = change(&mut ledger);
        self.step(|state| state.ledger = ledger);
        changed
    }

    fn writer(&self, extent: Extent) -> Result<Option<Held<'a>>> {
        Ok(match extent {
            Extent::All => Some(self.take(|state| &mut state.is_writer_locked)),
            Extent::Raises => self.try_take(|state| &mut state.is_writer_locked),
        })
    }

    fn started(&self) -> Result<Vec<ContainerId>> {
        Ok(self.step(|state| state.started.iter().cloned().collect()))
    }

    fn member(&self, id: &ContainerId) -> Result<Option<Member<usize>>> {
        let Some(group) = self.step(|state| state.present.get(id).copied()) else {
            return Ok(None);
        };
        let restored = self.step(|state| state.restored.get(id).copied());
        let (id, own_bytes) = (id.clone(), u64::MAX);
        Ok(Some(Member { id, group, own_bytes, restored_bytes: restored.unwrap_or(0) }))
    }

    fn set_parent(&self, memory: ParentMemory, extent: Extent) -> Result<()> {
        self.step(|state| {
            let of = |max: Option<u64>| max.unwrap_or(u64::MAX);
            if extent == Extent::All || of(memory.max_bytes) > of(state.parent) {
                state.parent = memory.max_bytes;
            }
        });
        Ok(())
    }

    fn limit_bytes(&self, group: &usize) -> Result<Option<u64>> {
        let is_present = |state: &State| state.present.values().any(|present| present == group);
        Ok(self.step(|state| is_present(state).then(|| state.groups[*group].0)))
    }

    fn set(&self, group: &usize, bytes: u64) -> Result<LimitSet> {
        self.step(|_| ()); // the time of the reclaim
        Ok(self.step(|state| {
            if !state.present.values().any(|present| present == group) {
                return LimitSet::Removed;
            }
            let is_interrupted = state.interrupts > 0;
            state.interrupts = state.interrupts.saturating_sub(1);
            let (limit, used) = &mut state.groups[*group];
            if is_interrupted || bytes < *used {
                return LimitSet::Stays;
            }
            *limit = bytes;
            LimitSet::Set
        }))
    }
}

/// The order in which a verb writes limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// That of this module.
    Descriptors,
    /// An older one: groups are opened by name for each write, a turn is compared after all writes, and the size of a
    /// restored container is recorded in the ledger, if there is one. It kills, which shows that this model finds it.
    Names,
}

impl Order {
    /// A start or a wake: with a guarantee, or with the memory of a checkpoint.
    fn start(self, it: &Verb<'_>, of: u8, min_bytes: u64, restored_bytes: u64) {
        let of = id(of);
        it.step(|state| state.started.insert(of.clone()));
        if self == Self::Descriptors && restored_bytes > 0 {
            it.step(|state| state.restored.insert(of.clone(), restored_bytes));
        }
        let limits = Limits { memory_min_bytes: Some(min_bytes), ..Limits::default() };
        if let Some(grant) = Grant::of(&limits) {
            it.ledger(|ledger| Ok(ledger.granted.insert(of.clone(), grant))).unwrap();
        }
        it.make_group(&of);
        if it.step(|state| state.has_ledger()) {
            match self {
                Self::Descriptors => {
                    it.ledger(|ledger| {
                        ledger.decide(ROOM, false);
                        begin(it, ledger, &of)
                    })
                    .unwrap();
                    settle(it, extent(min_bytes)).unwrap();
                }
                Self::Names => by_names(it, Some(&of), restored_bytes),
            }
        }
        for _ in 0..PARTS {
            it.charge(&of, restored_bytes / PARTS);
        }
    }

    fn stop(self, it: &Verb<'_>, of: u8) {
        let of = id(of);
        it.step(|state| state.present.remove(&of));
        if it.step(|state| state.has_ledger()) {
            let leave = |ledger: &mut Ledger| {
                ledger.granted.remove(&of);
                ledger.decide(ROOM, false);
                Ok(())
            };
            it.ledger(leave).unwrap();
            match self {
                Self::Descriptors => settle(it, Extent::Raises).unwrap(),
                Self::Names => by_names(it, None, 0),
            }
        }
        it.step(|state| {
            state.started.remove(&of);
            state.restored.remove(&of);
        });
    }
}

fn extent(min_bytes: u64) -> Extent {
    if min_bytes > 0 { Extent::All } else { Extent::Raises }
}

/// [`Order::Names`], after the cgroup of `own` was made.
fn by_names(it: &Verb<'_>, own: Option<&ContainerId>, restored_bytes: u64) {
    let read = |ledger: &Ledger| {
        let restored = it.step(|state| state.restored_in_ledger.clone());
        Ok((ledger.clone(), restored))
    };
    let (mut ledger, mut restored) = it
        .ledger(|ledger| {
            if let Some(own) = own.filter(|_| restored_bytes > 0) {
                it.step(|state| state.restored_in_ledger.insert(own.clone(), restored_bytes));
            }
            ledger.decide(ROOM, false);
            read(ledger)
        })
        .unwrap();
    let mut is_all = ledger.is_due(Extent::All);
    for _ in 0..super::TURNS {
        let Some(turn) = ledger.memory.as_ref().map(|now| now.turn) else { return };
        let all = match (is_all, own) {
            (true, _) => it.started().unwrap(),
            (false, own) => own.into_iter().cloned().collect(),
        };
        for of in all {
            let Some(member) = it.member(&of).unwrap() else { continue };
            let size = restored.get(&of).copied().unwrap_or(0);
            it.set(&member.group, ledger.limit_bytes(&of, u64::MAX, size)).unwrap();
        }
        let (now, sizes) = it.ledger(|now| read(now)).unwrap();
        if now.is_turn(turn) {
            it.ledger(|now| {
                now.settle(turn, Extent::All, false);
                Ok(())
            })
            .unwrap();
            return;
        }
        (ledger, restored, is_all) = (now, sizes, true);
    }
}

/// The daemon, which lowers limits.
fn lower(it: &Verb<'_>) {
    for _ in 0..3 {
        let Some(granted) = snapshot(it).unwrap() else { continue };
        let turn = granted.ledger.memory.as_ref().unwrap().turn;
        for member in granted.members {
            let used = it.step(|state| state.groups[member.group].1);
            // As the decisions: not below what is in use, nor below what was restored.
            let lower = used.max(member.restored_bytes).max(20 * MB);
            if write_one(it, turn, &member.group, lower).unwrap().is_none() {
                break;
            }
        }
    }
}

/// The end of the daemon, which writes the static limits.
fn give_back(it: &Verb<'_>) {
    it.ledger(|ledger| {
        ledger.memory = Some(InForce::of(ledger, ROOM));
        Ok(())
    })
    .unwrap();
    settle(it, Extent::All).unwrap();
}

/// A host on which containers run, one with a guarantee of this size.
fn host(order: Order, min_bytes: u64) -> Model {
    let model = Model::default();
    model.run(
        1,
        &[&|it| order.start(it, RUNS, 0, 0), &|it| {
            if min_bytes > 0 {
                order.start(it, HOLDER, min_bytes, 0);
            }
        }],
    );
    model
}

/// Returns the containers with limits below those of the ledger.
fn too_low(model: &Model) -> Vec<ContainerId> {
    let state = model.lock();
    let is_too_low = |(of, group): &(&ContainerId, &usize)| {
        let restored = state.restored.get(*of).copied().unwrap_or(0);
        state.groups[**group].0 < state.ledger.limit_bytes(of, u64::MAX, restored)
    };
    state.present.iter().filter(is_too_low).map(|(of, _)| of.clone()).collect()
}

/// Returns the limits that are not those of the ledger.
fn wrong(model: &Model) -> Vec<String> {
    let state = model.lock();
    let mut wrong: Vec<String> = Vec::new();
    for (of, group) in &state.present {
        let restored = state.restored.get(of).copied().unwrap_or(0);
        let due = state.ledger.limit_bytes(of, u64::MAX, restored);
        let (limit, _) = state.groups[*group];
        if limit != due {
            wrong.push(format!("{of}: {} MB, and {} are due", limit / MB, due / MB));
        }
    }
    let due = state.ledger.memory.as_ref().and_then(|now| now.parent().max_bytes);
    if state.parent != due {
        wrong.push(format!("all: {:?}, and {due:?} is due", state.parent));
    }
    if state.ledger.is_due(Extent::Raises) || !state.has_ledger() && state.parent.is_some() {
        wrong.push("limits are due".into());
    }
    wrong
}

/// A container wakes while another one gets a guarantee of 200 MB.
fn wake_beside(order: Order, holder_bytes: u64, seed: u64) -> Model {
    let model = host(order, holder_bytes);
    model.run(
        seed,
        &[&|it| order.start(it, NEW, 200 * MB, 0), &|it| {
            order.start(it, WAKES, 0, SLEEPER);
        }],
    );
    model
}

#[test]
fn wake_is_not_limited_below_its_memory_by_another_start() {
    for seed in 1..=SCHEDULES {
        for holder_bytes in [0, 100 * MB] {
            let model = wake_beside(Order::Descriptors, holder_bytes, seed);
            assert!(model.lock().killed.is_empty(), "{seed}, {holder_bytes}");
            assert!(wrong(&model).is_empty(), "{seed}, {holder_bytes}: {:?}", wrong(&model));
        }
    }
}

#[test]
fn model_finds_the_kill_of_an_order_by_names() {
    let is_killed = |holder_bytes, seed| {
        !wake_beside(Order::Names, holder_bytes, seed).lock().killed.is_empty()
    };
    // The first guarantee, of which a wake before has no record; and an old ceiling over a container that wakes.
    for holder_bytes in [0, 100 * MB] {
        assert!((1..=SCHEDULES).any(|seed| is_killed(holder_bytes, seed)), "{holder_bytes}");
    }
}

#[test]
fn limits_are_those_of_the_ledger_after_verbs_and_the_daemon() {
    let order = Order::Descriptors;
    for seed in 1..=SCHEDULES {
        let model = host(order, 100 * MB);
        model.run(
            seed,
            &[
                &|it| order.start(it, NEW, 50 * MB, 0),
                &|it| order.stop(it, HOLDER),
                &|it| {
                    order.start(it, WAKES, 0, SLEEPER);
                    order.stop(it, WAKES);
                    order.start(it, WAKES, 0, SLEEPER + MB);
                },
                &|it| {
                    lower(it);
                    give_back(it);
                },
            ],
        );
        assert!(model.lock().killed.is_empty(), "{seed}");
        assert!(wrong(&model).is_empty(), "{seed}: {:?}", wrong(&model));
        model.run(seed, &[&|it| order.stop(it, NEW), &|it| order.stop(it, RUNS)]);
        assert!(wrong(&model).is_empty(), "{seed}: {:?}", wrong(&model));
        assert_eq!(model.lock().ledger, Ledger::default(), "{seed}: nothing is left");
    }
}

#[test]
fn limits_that_are_left_to_another_writer_are_written() {
    let order = Order::Descriptors;
    for seed in 1..=SCHEDULES {
        let model = host(order, 100 * MB);
        model.run(seed, &[&|it| order.start(it, NEW, 50 * MB, 0), &|it| order.stop(it, HOLDER)]);
        assert!(wrong(&model).is_empty(), "{seed}: {:?}", wrong(&model));
        model.run(seed, &[&|it| order.start(it, HOLDER, 100 * MB, 0)]);
        model.run(seed, &[&lower, &|it| order.stop(it, HOLDER)]);
        assert!(!model.lock().ledger.is_due(Extent::Raises), "{seed}: raised by the daemon");
        model.run(seed, &[&give_back]);
        assert!(wrong(&model).is_empty(), "{seed}: {:?}", wrong(&model));
    }
}

#[test]
fn first_limit_that_stays_is_due_for_the_next_writer() {
    let model = host(Order::Descriptors, 100 * MB);
    assert!(!model.lock().ledger.is_due(Extent::All));
    model.lock().interrupts = 1;
    model.run(1, &[&|it| Order::Descriptors.start(it, LATER, 0, 0)]);
    assert_eq!(wrong(&model).len(), 1, "{:?}", wrong(&model));
    assert!(model.lock().ledger.is_due(Extent::All));
    model.run(1, &[&|it| settle(it, Extent::All).unwrap()]);
    assert!(wrong(&model).is_empty(), "{:?}", wrong(&model));
}

#[test]
fn killed_verb_leaves_no_limit_after_the_next_verbs() {
    let order = Order::Descriptors;
    for seed in 1..=SCHEDULES {
        let model = host(order, 100 * MB);
        model.lock().dies = Some(((seed % 2) as usize, 1 + seed / 2 % 60));
        model.run(
            seed,
            &[&|it| order.start(it, NEW, 50 * MB, 0), &|it| order.stop(it, HOLDER), &|it| {
                order.start(it, WAKES, 0, SLEEPER)
            }],
        );
        model.lock().dies = None;
        model.run(seed, &[&|it| order.start(it, LATER, 0, 0)]);
        assert!(too_low(&model).is_empty(), "{seed}: {:?}", too_low(&model));
        // A later command undoes the interrupted start and finishes the interrupted stop.
        model.run(seed, &[&|it| order.stop(it, NEW)]);
        model.run(seed, &[&|it| order.stop(it, HOLDER)]);
        assert!(model.lock().killed.is_empty(), "{seed}");
        assert!(wrong(&model).is_empty(), "{seed}: {:?}", wrong(&model));
        assert_eq!(model.lock().ledger, Ledger::default(), "{seed}: nothing is left");
    }
}
