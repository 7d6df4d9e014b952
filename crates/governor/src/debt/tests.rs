//! A simulated host divides CPU time by weights. The debts of clients of a service are governed as in the daemon.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::cpu::TICK_MS;

const HOST: Host = Host { cpus_milli: 1000, shares_max: 262_144 };
const MS: u64 = 1_000_000;

fn contract(weight: u32, max_milli: Option<u32>) -> Cpu {
    let limits = dormouse_model::Limits {
        cpu_weight: Some(weight),
        cpu_max_milli: max_milli,
        ..Default::default()
    };
    Cpu::of(&limits)
}

/// A simulated container. Its account has its own number.
struct Task {
    cpu: Cpu,
    /// Has work of its own in a millisecond.
    work: fn(u64) -> bool,
    /// Requests for a service, in microseconds each, and how many it keeps waiting there.
    asks: Option<(usize, f64, usize)>,
    /// Requests that wait here: the client, and the time that is left.
    queue: VecDeque<(usize, f64)>,
    shares: f64,
    quota_us: f64,
    used_ns: f64,
    /// Time used in this period of the quota.
    period_ns: f64,
    /// Time between a request's end and the next one, in milliseconds.
    thinks: u64,
    asks_again: Vec<u64>,
}

impl Task {
    fn new(weight: u32, work: fn(u64) -> bool) -> Self {
        Self::of(contract(weight, None), work)
    }

    fn of(cpu: Cpu, work: fn(u64) -> bool) -> Self {
        Self {
            cpu,
            work,
            asks: None,
            queue: VecDeque::new(),
            shares: shares(&cpu).into(),
            quota_us: cpu.quota_us().map_or(f64::MAX, |us| us as f64),
            used_ns: 0.0,
            period_ns: 0.0,
            thinks: 0,
            asks_again: Vec::new(),
        }
    }

    /// A client that has `count` requests of `us` microseconds at a service, each some time after the last.
    fn asking(mut self, service: usize, us: f64, count: usize, thinks: u64) -> Self {
        (self.asks, self.thinks) = (Some((service, us, count)), thinks);
        self.asks_again = vec![0; count];
        self
    }
}

fn own_ns(state: &State<usize, usize>, id: usize) -> Option<u64> {
    state.members.get(&id).map(|kept| kept.own_ns)
}

fn shares(cpu: &Cpu) -> u32 {
    cpu.weight * 1024 / 100
}

struct Sim {
    tasks: Vec<Task>,
    cpus: f64,
    now_ms: u64,
    /// What each service has worked for each client.
    works: BTreeMap<(usize, usize), f64>,
    state: State<usize, usize>,
    governed: bool,
    writes: usize,
}

fn always(_: u64) -> bool {
    true
}

fn never(_: u64) -> bool {
    false
}

impl Sim {
    fn new(tasks: Vec<Task>) -> Self {
        let (works, state) = (BTreeMap::new(), State::default());
        Self { tasks, cpus: 1.0, now_ms: 0, works, state, governed: true, writes: 0 }
    }

    fn members(&self) -> Vec<Member<usize, usize>> {
        let one = |(id, task): (usize, &Task)| Member {
            id,
            account: Some(id),
            cpu: task.cpu,
            shares: shares(&task.cpu),
            used_ns: Some(task.used_ns as u64),
        };
        self.tasks.iter().enumerate().map(one).collect()
    }

    fn tick(&mut self) {
        let works = self.works.iter().map(|((service, account), ns)| Work {
            service: *service,
            account: *account,
            cpu_ns: *ns as u64,
        });
        let now = Readings {
            passed_ns: TICK_MS * MS,
            load: 1,
            members: self.members(),
            works: works.collect(),
        };
        self.state = count(&HOST, &now, std::mem::take(&mut self.state));
        for setting in decide(&HOST, &now.members, &BTreeMap::new(), &mut self.state) {
            let task = &mut self.tasks[setting.id];
            if let Some(shares) = setting.shares {
                task.shares = shares.into();
            }
            if let Some(quota) = setting.quota {
                task.quota_us = quota.quota_us as f64;
            }
            self.writes += 1;
        }
    }

    /// Divides one millisecond by weights; a container has one thread, and what one cannot use goes to the others.
    fn step(&mut self) {
        let now = self.now_ms;
        for client in 0..self.tasks.len() {
            let Some((service, us, _)) = self.tasks[client].asks else { continue };
            let (ready, wait): (Vec<u64>, Vec<u64>) =
                self.tasks[client].asks_again.iter().copied().partition(|at| *at <= now);
            self.tasks[client].asks_again = wait;
            self.tasks[service].queue.extend(ready.iter().map(|_| (client, us * 1000.0)));
        }
        let wants = |task: &mut Task| {
            if now.is_multiple_of(100) {
                task.period_ns = 0.0;
            }
            let room = (task.quota_us * 1000.0 - task.period_ns).max(0.0);
            let asked: f64 = task.queue.iter().map(|(_, ns)| ns).sum();
            let wanted = if (task.work)(now) { MS as f64 } else { asked };
            wanted.min(MS as f64).min(room)
        };
        let mut wants: Vec<f64> = self.tasks.iter_mut().map(wants).collect();
        let mut left = self.cpus * MS as f64;
        while left > 1.0 {
            let open: Vec<usize> = (0..wants.len()).filter(|i| wants[*i] > 0.5).collect();
            let total: f64 = open.iter().map(|i| self.tasks[*i].shares).sum();
            if total == 0.0 {
                break;
            }
            let round = left;
            for i in open {
                let got = (round * self.tasks[i].shares / total).min(wants[i]);
                wants[i] -= got;
                left -= got;
                self.spend(i, got);
            }
        }
        self.now_ms += 1;
    }

    /// A container works for its queue first.
    fn spend(&mut self, i: usize, ns: f64) {
        let now = self.now_ms;
        self.tasks[i].used_ns += ns;
        self.tasks[i].period_ns += ns;
        let mut left = ns;
        while left > 0.0
            && let Some((client, wanted)) = self.tasks[i].queue.front_mut()
        {
            let (client, spent) = (*client, wanted.min(left));
            *wanted -= spent;
            let is_done = *wanted < 0.5;
            left -= spent;
            *self.works.entry((i, client)).or_insert(0.0) += spent;
            if is_done {
                self.tasks[i].queue.pop_front();
                let again = now + 1 + self.tasks[client].thinks;
                self.tasks[client].asks_again.push(again);
            }
        }
    }

    /// Runs for a time, and returns the CPUs of each container in it: at home, and at services.
    fn run(&mut self, ms: u64) -> Vec<(f64, f64)> {
        let at = |sim: &Self| -> Vec<(f64, f64)> {
            let of = |i: usize| {
                let given: f64 =
                    sim.works.iter().filter(|((s, _), _)| *s == i).map(|(_, ns)| ns).sum();
                let taken: f64 =
                    sim.works.iter().filter(|((_, c), _)| *c == i).map(|(_, ns)| ns).sum();
                (sim.tasks[i].used_ns - given, taken)
            };
            (0..sim.tasks.len()).map(of).collect()
        };
        let before = at(self);
        for _ in 0..ms {
            if self.governed && self.now_ms.is_multiple_of(TICK_MS) {
                self.tick();
            }
            self.step();
        }
        let time = (ms * MS) as f64;
        let less = |(after, before): (&(f64, f64), &(f64, f64))| {
            ((after.0 - before.0) / time, (after.1 - before.1) / time)
        };
        at(self).iter().zip(&before).map(less).collect()
    }
}

#[track_caller]
fn near(got: f64, due: f64, by: f64) {
    assert!((got - due).abs() <= by, "{got} is not {due}");
}

/// A service, a busy client that has 0.3 CPUs of work done there, and a busy container.
fn client_and_other(cpu: Cpu) -> Sim {
    let client = Task::of(cpu, always).asking(0, 3000.0, 1, 6);
    Sim::new(vec![Task::new(100, never), client, Task::new(100, always)])
}

#[test]
fn client_pays_at_home_what_a_service_works_for_it() {
    let mut sim = client_and_other(contract(100, None));
    sim.governed = false;
    let free = sim.run(5000);
    assert!(free[1].0 + free[1].1 > 0.6, "without debts it has a share and the service: {free:?}");
    let mut sim = client_and_other(contract(100, None));
    sim.run(3000);
    let got = sim.run(10_000);
    near(got[1].0 + got[1].1, 0.5, 0.02);
    near(got[2].0, 0.5, 0.02);
    assert!(got[1].1 >= free[1].1, "the service is not slowed down: {got:?} {free:?}");
}

#[test]
fn weights_of_the_contracts_divide_home_and_services_together() {
    // 1:3, the smaller one has 0.2 CPUs of work done elsewhere.
    let client = Task::new(100, always).asking(0, 2000.0, 1, 7);
    let mut sim = Sim::new(vec![Task::new(100, never), client, Task::new(300, always)]);
    sim.run(3000);
    let got = sim.run(10_000);
    near(got[1].0 + got[1].1, 0.25, 0.02);
    near(got[2].0, 0.75, 0.02);
}

#[test]
fn service_has_the_weight_of_its_clients() {
    // Nine busy containers, and two that only ask.
    let mut tasks = vec![Task::new(10, never)];
    tasks.extend((0..2).map(|_| Task::new(100, never).asking(0, 1000.0, 4, 0)));
    tasks.extend((0..8).map(|_| Task::new(100, always)));
    let mut sim = Sim::new(tasks);
    sim.governed = false;
    let before = sim.run(3000);
    near(before[1].1 + before[2].1, 0.1 / 8.1, 0.01);
    sim.governed = true;
    sim.run(5000);
    let got = sim.run(10_000);
    near(got[1].1 + got[2].1, 0.2, 0.02);
    near(got[3].0, 0.1, 0.01);
    assert!(sim.tasks[0].shares <= 10.0 * 10.24 + 2.0 * 1024.0 + 1.0, "bounded by its clients");
}

#[test]
fn debt_is_given_back_after_the_work() {
    let mut sim = client_and_other(contract(100, None));
    sim.run(5000);
    assert!(sim.tasks[1].shares < 700.0, "{}", sim.tasks[1].shares);
    sim.tasks[1].asks_again.clear();
    sim.tasks[1].asks = None;
    sim.tasks[0].queue.clear();
    sim.run(5000);
    assert_eq!(sim.tasks[1].shares, 1024.0);
    assert_eq!(sim.tasks[0].shares, 1024.0);
    assert!(sim.state.is_at_rest());
    let writes = sim.writes;
    let got = sim.run(2000);
    near(got[1].0, 0.5, 0.01);
    assert_eq!(sim.writes, writes, "nothing is written at rest");
}

#[test]
fn debt_ends_where_no_other_container_competes() {
    let at_first = |ms: u64| ms < 5000;
    let mut sim = client_and_other(contract(100, None));
    sim.tasks[2].work = at_first;
    sim.run(5000);
    assert!(sim.tasks[1].shares < 700.0, "{}", sim.tasks[1].shares);
    sim.tasks[1].asks_again.clear();
    sim.tasks[1].asks = None;
    sim.tasks[0].queue.clear();
    // 0.5 s of debt, and 0.05 CPUs.
    sim.run(12_000);
    assert_eq!(sim.tasks[1].shares, 1024.0);
    assert!(sim.state.is_at_rest());
}

#[test]
fn container_at_its_limit_lowers_no_share_of_others() {
    let client = Task::new(200, always).asking(0, 2000.0, 1, 7);
    let limited = Task::of(contract(100, Some(50)), always);
    let other = Task::new(100, always);
    let mut sim = Sim::new(vec![Task::new(100, never), client, other, limited]);
    sim.run(3000);
    let got = sim.run(10_000);
    near(got[3].0, 0.05, 0.01);
    near(got[1].0 + got[1].1, 0.95 * 2.0 / 3.0, 0.02);
    near(got[2].0, 0.95 / 3.0, 0.02);
}

#[test]
fn time_that_others_leave_is_free() {
    // Two CPUs: each of the three has what it wants.
    let mut sim = client_and_other(contract(100, None));
    sim.cpus = 3.0;
    sim.run(3000);
    let got = sim.run(5000);
    near(got[1].0, 1.0, 0.01);
    near(got[2].0, 1.0, 0.01);
    near(got[1].1, 0.3, 0.1);
}

#[test]
fn client_above_its_share_keeps_a_sixteenth_at_home() {
    // The service is always busy for the client, whose share is a half.
    let client = Task::new(100, always).asking(0, 1000.0, 8, 0);
    let mut sim = Sim::new(vec![Task::new(100, never), client, Task::new(100, always)]);
    sim.run(3000);
    let got = sim.run(5000);
    assert!(sim.tasks[1].shares >= 64.0, "{}", sim.tasks[1].shares);
    near(got[2].0, 0.48, 0.03);
    assert!(got[1].0 > 0.01, "{got:?}");
}

#[test]
fn idle_client_is_not_slowed_down_at_its_next_work() {
    // It asks for less than is due to it, and does nothing at home until later.
    let later = |ms: u64| ms >= 4000;
    let client = Task::new(100, later).asking(0, 1000.0, 1, 9);
    let mut sim = Sim::new(vec![Task::new(100, never), client, Task::new(100, always)]);
    sim.run(4000);
    assert_eq!(sim.tasks[1].shares, 1024.0, "unused time pays");
}

#[test]
fn limit_holds_for_home_and_services_together() {
    let mut sim = client_and_other(contract(100, Some(400)));
    sim.cpus = 3.0;
    sim.run(5000);
    let got = sim.run(10_000);
    assert!(got[1].1 > 0.2, "{got:?}");
    near(got[1].0 + got[1].1, 0.4, 0.03);
    assert_eq!(sim.tasks[1].shares, 1024.0, "there is no competition");
    // The work at the service is above the limit: a sixteenth of it is left at home.
    let client = Task::of(contract(100, Some(400)), always).asking(0, 1000.0, 2, 0);
    let mut sim = Sim::new(vec![Task::new(100, never), client]);
    sim.cpus = 2.0;
    sim.run(5000);
    near(sim.run(5000)[1].0, 0.025, 0.005);
    assert_eq!(sim.tasks[1].quota_us, 2500.0);
    sim.tasks[1].asks_again.clear();
    sim.tasks[1].asks = None;
    sim.tasks[0].queue.clear();
    sim.run(4000);
    assert_eq!(sim.tasks[1].quota_us, 40_000.0);
    near(sim.run(2000)[1].0, 0.4, 0.01);
}

#[test]
fn past_work_is_no_debt_of_a_new_governor() {
    let member = |used_ns| Member {
        id: 1,
        account: Some(1),
        cpu: contract(100, None),
        shares: 1024,
        used_ns: Some(used_ns),
    };
    let work = |cpu_ns| Work { service: 0, account: 1, cpu_ns };
    let at = |used_ns, cpu_ns| Readings {
        passed_ns: TICK_MS * MS,
        load: 1,
        members: vec![member(used_ns)],
        works: vec![work(cpu_ns)],
    };
    let state = count(&HOST, &at(500 * MS, 3_600_000 * MS), State::default());
    assert!(state.is_at_rest());
    // A label that ends after an hour counts a tick at a time.
    let state = count(&HOST, &at(500 * MS, 7_200_000 * MS), state);
    assert_eq!(own_ns(&state, 1), Some(600 * MS));
    // Other gates: their figures begin at zero.
    let state = count(&HOST, &at(500 * MS, 10 * MS), state);
    assert_eq!(own_ns(&state, 1), Some(610 * MS));
    // Others again, which have counted more by now than those before them.
    let now = Readings { load: 2, ..at(500 * MS, 20 * MS) };
    let state = count(&HOST, &now, state);
    assert_eq!(own_ns(&state, 1), Some(630 * MS));
    let state = count(&HOST, &now, state);
    assert_eq!(own_ns(&state, 1), Some(630 * MS));
}

#[test]
fn use_of_its_own_is_without_work_for_others_whichever_is_read_first() {
    let at = |used_ns, cpu_ns| Readings {
        passed_ns: TICK_MS * MS,
        load: 1,
        members: vec![Member {
            id: 0,
            account: Some(0),
            cpu: contract(100, None),
            shares: 1024,
            used_ns: Some(used_ns),
        }],
        works: vec![Work { service: 0, account: 1, cpu_ns }],
    };
    let mut state = count(&HOST, &at(0, 0), State::default());
    for (used, given, own) in [(50, 60, 0), (110, 100, 10), (110, 110, 10), (220, 210, 10)] {
        state = count(&HOST, &at(used * MS, given * MS), state);
        assert_eq!(own_ns(&state, 0), Some(own * MS), "{used} {given}");
    }
}

#[test]
fn containers_of_one_account_pay_by_their_weights() {
    let members = |ns| {
        let one = |(id, weight): (usize, u32)| Member {
            id,
            account: Some(7),
            cpu: contract(weight, None),
            shares: weight,
            used_ns: Some(ns),
        };
        [(1, 100), (2, 300)].map(one).to_vec()
    };
    let at = |ns| Readings {
        passed_ns: TICK_MS * MS,
        load: 1,
        members: members(0),
        works: vec![Work { service: 0, account: 7, cpu_ns: ns }],
    };
    let state = count(&HOST, &at(0), State::default());
    let state = count(&HOST, &at(80 * MS), state);
    assert_eq!([own_ns(&state, 1), own_ns(&state, 2)], [Some(20 * MS), Some(60 * MS)]);
}

#[test]
fn account_that_pays_nothing_lends_nothing() {
    let mut sim = client_and_other(contract(100, None));
    let root = |sim: &Sim| {
        let mut members = sim.members();
        members.iter_mut().for_each(|member| member.account = None);
        members
    };
    sim.run(100);
    let works = vec![Work { service: 0, account: 1, cpu_ns: 80 * MS }];
    let now = Readings { passed_ns: TICK_MS * MS, load: 1, members: root(&sim), works };
    let mut state = count(&HOST, &now, State { load: Some(1), ..State::default() });
    let settings = decide(&HOST, &now.members, &BTreeMap::new(), &mut state);
    assert_eq!(settings, []);
}

#[test]
fn settings_of_another_process_are_changed_again() {
    let mut sim = client_and_other(contract(100, Some(900)));
    sim.run(5000);
    let members = sim.members();
    let settle = |sim: &mut Sim| decide(&HOST, &members, &BTreeMap::new(), &mut sim.state);
    let paid = sim.state.members[&1];
    assert!(paid.shares.is_some_and(|shares| shares < 900), "{paid:?}");
    assert_eq!(settle(&mut sim), [], "nothing has changed");
    sim.state.found(&1, Some(1024), Some(90_000));
    let again = settle(&mut sim);
    assert_eq!(again.len(), 1);
    assert_eq!((again[0].id, again[0].is_plain), (1, false));
    assert!(again[0].shares.is_some_and(|shares| shares < 900), "{again:?}");
    sim.state.found(&2, None, None);
    let again = settle(&mut sim);
    assert_eq!((again[0].id, again[0].shares, again[0].is_plain), (2, Some(1024), true));
}

#[test]
fn debt_ends_with_its_account() {
    let mut sim = client_and_other(contract(100, Some(400)));
    sim.run(1000);
    let debts = |state: &State<usize, usize>| {
        let kept = state.members[&1];
        [kept.debt_ns, kept.limit_debt_ns].map(|debt| debt > 0.0)
    };
    let kept = sim.state.members.get_mut(&1).unwrap();
    (kept.debt_ns, kept.limit_debt_ns) = (LARGEST_NS, LARGEST_NS);
    let mut now = Readings { passed_ns: 1, load: 1, members: sim.members(), works: Vec::new() };
    let state = count(&HOST, &now, sim.state.clone());
    assert_eq!(debts(&state), [true, true]);
    now.members[1].account = None;
    let state = count(&HOST, &now, state);
    assert_eq!(debts(&state), [false, false]);
}

#[test]
fn next_life_of_a_service_has_all_of_its_work_counted() {
    let at = |cpu_ns| Readings {
        passed_ns: TICK_MS * MS,
        load: 1,
        members: vec![Member {
            id: 1,
            account: Some(1),
            cpu: contract(100, None),
            shares: 1024,
            used_ns: Some(0),
        }],
        works: vec![Work { service: 0, account: 1, cpu_ns }],
    };
    let mut state = count(&HOST, &at(10 * MS), State::default());
    state.forget(&0);
    let state = count(&HOST, &at(30 * MS), state);
    assert_eq!(own_ns(&state, 1), Some(30 * MS));
}

#[test]
fn containers_that_take_no_part_are_read_rarely() {
    let mut sim = client_and_other(contract(100, None));
    assert!(sim.state.involved().has(&2, Some(&2)), "it was never read");
    sim.run(1000);
    let involved = sim.state.involved();
    assert_eq!([0, 1, 2].map(|id| involved.has(&id, Some(&id))), [true, true, false]);
    assert!(involved.has(&2, Some(&1)), "another container of the client's account");
}

#[test]
fn time_at_a_service_counts_for_a_reservation() {
    let mut sim = client_and_other(contract(100, None));
    sim.run(2000);
    let taken = sim.works[&(0, 1)] as i64;
    assert!((sim.state.own_beyond_ns(&1) - taken).abs() < 40 * MS as i64);
    assert!((sim.state.own_beyond_ns(&0) + taken).abs() < 40 * MS as i64);
    assert_eq!(sim.state.own_beyond_ns(&2), 0);
}

/// A reservation has its weight from `base`, and its due time.
#[test]
fn reserved_container_pays_from_its_governed_weight() {
    let mut sim = client_and_other(contract(100, None));
    let mut members = sim.members();
    members[1].cpu.reserve_milli = 300;
    sim.run(200);
    let before = sim.works[&(0, 1)] as u64;
    let at = |sim: &Sim, members: &[Member<usize, usize>]| Readings {
        passed_ns: TICK_MS * MS,
        load: 1,
        members: members.to_vec(),
        works: vec![Work { service: 0, account: 1, cpu_ns: sim.works[&(0, 1)] as u64 }],
    };
    let mut state = count(&HOST, &at(&sim, &members), State::default());
    sim.governed = false;
    for _ in 0..10 {
        sim.run(TICK_MS);
        for (member, task) in members.iter_mut().zip(&sim.tasks) {
            member.used_ns = Some(task.used_ns as u64);
        }
        state = count(&HOST, &at(&sim, &members), state);
    }
    assert!(sim.works[&(0, 1)] as u64 > before);
    let settings = decide(&HOST, &members, &BTreeMap::new(), &mut state.clone());
    assert!(settings.iter().all(|one| one.id != 1), "its weight is not known");
    let base = BTreeMap::from([(1, 4096)]);
    let settings = decide(&HOST, &members, &base, &mut state);
    let its = settings.iter().find(|one| one.id == 1).and_then(|one| one.shares).unwrap();
    assert!((256..=4096).contains(&its), "{its}");
}

proptest! {
    #[test]
    fn settings_stay_within_bounds_for_any_readings(
        rounds in prop::collection::vec(
            (
                (0..u64::MAX / 4, 0_u32..2),
                prop::collection::vec(
                    (0_u8..6, 0_u8..4, 1_u32..10_001, prop::option::of(10_u32..64_000), prop::option::of(any::<u64>())),
                    0..6,
                ),
                prop::collection::vec((0_u8..6, 0_u8..4, any::<u64>()), 0..6),
            ),
            1..12,
        ),
        cpus_milli in 0_u32..512_000,
    ) {
        let host = Host { cpus_milli, shares_max: 262_144 };
        let mut state = State::default();
        for ((passed_ns, load), mut members, mut works) in rounds {
            members.sort_unstable();
            members.dedup_by_key(|one| one.0);
            works.sort_unstable();
            works.dedup_by_key(|one| (one.0, one.1));
            let members: Vec<Member<u8, u8>> = members
                .into_iter()
                .map(|(id, account, weight, max, used_ns)| {
                    let cpu = contract(weight, max);
                    let account = (account > 0).then_some(account);
                    Member { id, account, cpu, shares: shares(&cpu).max(2), used_ns }
                })
                .collect();
            let works = works
                .into_iter()
                .map(|(service, account, cpu_ns)| Work { service, account, cpu_ns })
                .collect();
            let now = Readings { passed_ns, load, members, works };
            state = count(&host, &now, state);
            let all: u64 = now.members.iter().map(|member| u64::from(member.shares)).sum();
            for setting in decide(&host, &now.members, &BTreeMap::new(), &mut state) {
                let member = now.members.iter().find(|member| member.id == setting.id).unwrap();
                if let Some(shares) = setting.shares {
                    let least = (f64::from(member.shares) * LEAST).floor().max(2.0) as u32;
                    prop_assert!(shares >= least, "{shares} of {}", member.shares);
                    prop_assert!(u64::from(shares) <= u64::from(member.shares) + all + 1);
                }
                if let Some(quota) = setting.quota {
                    let whole = member.cpu.quota_us().unwrap();
                    prop_assert!((QUOTA_MIN_US.min(whole)..=whole).contains(&quota.quota_us));
                    prop_assert!(quota.burst_us <= quota.quota_us);
                }
            }
            for kept in state.members.values() {
                prop_assert!(kept.debt_ns >= 0.0 && kept.debt_ns <= LARGEST_NS);
                prop_assert!(kept.home.is_finite() && kept.taken.is_finite());
            }
        }
    }
}
