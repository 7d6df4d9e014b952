//! CPU: reservations as weights, and a token bucket that repays time that a container did not use.
//!
//! **Entitlement.** With C CPUs, reservations r and weights s of the containers that compete, container i is due
//!
//! ```text
//! e_i = r_i + (C - sum of r) x s_i / (sum of s)
//! ```
//!
//! Time that a container does not use goes to the others (work conservation), so the kernel's weights divide
//! right if they are in proportion to the entitlements. A container without a reservation keeps the weight of
//! its own, and a reservation adds to it:
//!
//! ```text
//! u = (sum of s) / (C - sum of r)      weight of one CPU
//! w_i = s_i + r_i x u
//! ```
//!
//! **Static weights** ([`statics`]) take all running containers for busy. They hold without a daemon, and they
//! promise a share of the time that all containers get, not CPUs: time taken by the host, and time that the
//! container slept, are lost to it. A container whose limit is its reservation has the largest weight instead,
//! because its quota bounds it.
//!
//! **Governed weights** ([`decide`]) count only containers that used CPU time lately, so the reservation of an
//! idle container goes to the others by their shares. Each reservation has a bucket, as Linux-VServer's (Soltesz
//! et al., EuroSys 2007, section 3.2):
//!
//! ```text
//! tokens = clamp(tokens + r x passed - used, -B, B)
//! weight = min(w x 2^(4 x max(0, tokens) / B), HIGH)      HIGH = 2 x u x C
//! ```
//!
//! A container that got less than its reservation has tokens, and a larger weight until they are used. HIGH
//! bounds the disturbance: a weight that is large against the parent's takes time from all containers.
#![allow(
    clippy::cast_precision_loss,
    reason = "weights and times of containers are far below 2^52"
)]

use std::collections::BTreeMap;

use dormouse_model::Cpu;

/// Time between decisions.
pub const TICK_MS: u64 = 100;
/// Time between readings of containers without a reservation.
pub const OTHERS_MS: u64 = 1000;
/// The same while a container gets less than its reservation.
pub const OTHERS_HUNGRY_MS: u64 = 200;
/// The most tokens: CPU time that is repaid.
const BUCKET_NS: i64 = 100_000_000;
/// Doublings of the weight for a full bucket.
const DOUBLINGS: f64 = 4.0;
/// A container without CPU time for so long does not compete.
const AWAKE_NS: u64 = 500_000_000;
/// A container that uses at most this part of its reservation is idle.
const IDLE_PART: u64 = 10;
/// Least CPU time, between two readings, of a container that competes.
const USED_NS: u64 = 500_000;
/// A weight is written if it differs by more than a part of this.
const CHANGE: f64 = 20.0;
/// The weight of one unit of `cpu.weight`, in shares.
const SHARES_PER_WEIGHT: f64 = 10.24;
/// The least weight, in shares.
const SHARES_MIN: f64 = 2.0;

/// The host as far as decisions need it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Host {
    /// CPUs that are online, in thousandths.
    pub cpus_milli: u32,
    /// The largest weight of a container, in shares.
    pub shares_max: u32,
}

/// A container with a reservation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reserved<I> {
    /// Its identity.
    pub id: I,
    /// Its contract.
    pub cpu: Cpu,
    /// CPU time since its start.
    pub used_ns: u64,
}

/// A container without a reservation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Other<I> {
    /// Its identity.
    pub id: I,
    /// Its weight, in shares.
    pub shares: u32,
    /// CPU time since its start.
    pub used_ns: u64,
}

/// What was read at one time.
#[derive(Debug, Clone)]
pub struct Readings<I> {
    /// Time since the last readings.
    pub passed_ns: u64,
    /// All containers with a reservation.
    pub reserved: Vec<Reserved<I>>,
    /// All other containers, if they were read.
    pub others: Option<Vec<Other<I>>>,
}

/// The state between decisions. A new state has full buckets.
#[derive(Debug, Clone)]
pub struct State<I> {
    reserved: BTreeMap<I, Kept>,
    others_used_ns: BTreeMap<I, u64>,
    /// Weight of the other containers that compete, in shares.
    others_shares: u64,
    is_hungry: bool,
}

#[derive(Debug, Clone, Copy)]
struct Kept {
    tokens_ns: i64,
    used_ns: u64,
    idle_ns: u64,
    /// The weight in the kernel; `None` if it is not known.
    shares: Option<u32>,
}

/// A weight to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting<I> {
    /// The container.
    pub id: I,
    /// Its weight, in shares.
    pub shares: u32,
}

impl<I> Default for State<I> {
    fn default() -> Self {
        let (reserved, others_used_ns) = (BTreeMap::new(), BTreeMap::new());
        Self { reserved, others_used_ns, others_shares: 0, is_hungry: false }
    }
}

impl<I> State<I> {
    /// Forgets the weights in the kernel, which another process has written: all are written again.
    pub fn forget_weights(&mut self) {
        self.reserved.values_mut().for_each(|kept| kept.shares = None);
    }

    /// Returns whether a container with a reservation got less than that at the last decision, although it
    /// was not idle.
    pub fn is_hungry(&self) -> bool {
        self.is_hungry
    }
}

/// The weight of a container with a reservation: usual, and the most.
#[derive(Debug, Clone, Copy)]
struct Weight {
    base: f64,
    high: f64,
}

/// Computes a weight among competitors with `reserve_milli` and `shares` in all, its own included.
fn weight(host: &Host, cpu: &Cpu, reserve_milli: u64, shares: f64) -> Weight {
    let cpus = f64::from(host.cpus_milli.max(1)) / 1000.0;
    let free = (cpus - reserve_milli as f64 / 1000.0).max(cpus / 100.0);
    let per_cpu = shares / free;
    let reserve = f64::from(cpu.reserve_milli) / 1000.0;
    let high = 2.0 * per_cpu * cpus;
    let is_capped = cpu.max_milli.is_some_and(|max| max <= cpu.reserve_milli);
    let base = if is_capped { high } else { own_shares(cpu) + reserve * per_cpu };
    Weight { base, high: high.max(base) }
}

/// The weight of a container without its reservation.
fn own_shares(cpu: &Cpu) -> f64 {
    f64::from(cpu.weight) * SHARES_PER_WEIGHT
}

pub(crate) fn clamp(host: &Host, shares: f64) -> u32 {
    // LIMIT: with many busy containers beside one with a reservation, the kernel's largest weight is too
    // small for the reservation: on v2 with some 100 of the default weight, on v1 with some 250.
    shares.round().clamp(SHARES_MIN, f64::from(host.shares_max).max(SHARES_MIN)) as u32
}

/// The weights for containers with a reservation if all containers are busy. `others_shares` is the weight of
/// all containers without one.
pub fn statics<I: Copy>(host: &Host, all: &[(I, Cpu)], others_shares: u64) -> Vec<Setting<I>> {
    let reserve_milli = all.iter().map(|(_, cpu)| u64::from(cpu.reserve_milli)).sum();
    let shares = others_shares as f64 + all.iter().map(|(_, cpu)| own_shares(cpu)).sum::<f64>();
    all.iter()
        .map(|(id, cpu)| {
            let weight = weight(host, cpu, reserve_milli, shares);
            Setting { id: *id, shares: clamp(host, weight.base) }
        })
        .collect()
}

/// Decides the weights of all containers with a reservation. Returns the weights that are to be written, the
/// smallest first, so that no two large weights compete meanwhile.
pub fn decide<I: Clone + Ord>(
    host: &Host,
    now: &Readings<I>,
    was: State<I>,
) -> (State<I>, Vec<Setting<I>>) {
    let mut state = State {
        reserved: BTreeMap::new(),
        others_used_ns: was.others_used_ns,
        others_shares: was.others_shares,
        is_hungry: false,
    };
    if let Some(others) = &now.others {
        read_others(&mut state, others);
    }
    for one in &now.reserved {
        let kept = was.reserved.get(&one.id).copied();
        let (kept, is_hungry) = fill(one, now.passed_ns, kept);
        state.is_hungry |= is_hungry;
        state.reserved.insert(one.id.clone(), kept);
    }
    let competes =
        |one: &Reserved<I>| state.reserved.get(&one.id).is_some_and(|kept| kept.idle_ns < AWAKE_NS);
    let (mut reserve_milli, mut shares) = (0, state.others_shares as f64);
    for one in now.reserved.iter().filter(|one| competes(one)) {
        reserve_milli += u64::from(one.cpu.reserve_milli);
        shares += own_shares(&one.cpu);
    }
    let mut settings = Vec::new();
    for one in &now.reserved {
        // The weight of an idle container is the one that it needs at its next work.
        let (reserve_milli, shares) = match competes(one) {
            true => (reserve_milli, shares),
            false => {
                (reserve_milli + u64::from(one.cpu.reserve_milli), shares + own_shares(&one.cpu))
            }
        };
        let Weight { base, high } = weight(host, &one.cpu, reserve_milli, shares);
        let Some(kept) = state.reserved.get(&one.id) else { continue };
        let full = kept.tokens_ns.max(0) as f64 / BUCKET_NS as f64;
        let shares = clamp(host, (base * (DOUBLINGS * full).exp2()).min(high));
        if kept.shares.is_none_or(|old| differs(old, shares)) {
            settings.push(Setting { id: one.id.clone(), shares });
        }
    }
    for Setting { id, shares } in &settings {
        if let Some(kept) = state.reserved.get_mut(id) {
            kept.shares = Some(*shares);
        }
    }
    // ORDER: by weight, then by identity, so that equal readings have equal results.
    settings.sort_by(|a, b| (a.shares, &a.id).cmp(&(b.shares, &b.id)));
    (state, settings)
}

pub(crate) fn differs(old: u32, new: u32) -> bool {
    f64::from(old.abs_diff(new)) * CHANGE > f64::from(old)
}

/// Adds up the weights of the other containers that used CPU time since the last reading. A container that is
/// read for the first time counts.
fn read_others<I: Clone + Ord>(state: &mut State<I>, others: &[Other<I>]) {
    let is_busy = |one: &&Other<I>| {
        let before = state.others_used_ns.get(&one.id);
        before.is_none_or(|before| one.used_ns.saturating_sub(*before) >= USED_NS)
    };
    state.others_shares = others.iter().filter(is_busy).map(|one| u64::from(one.shares)).sum();
    state.others_used_ns = others.iter().map(|one| (one.id.clone(), one.used_ns)).collect();
}

/// Fills the bucket of a container, and takes the time that it used. Returns whether it got less than its
/// reservation although it was not idle.
fn fill<I>(one: &Reserved<I>, passed_ns: u64, kept: Option<Kept>) -> (Kept, bool) {
    let Some(kept) = kept else {
        let kept = Kept { tokens_ns: BUCKET_NS, used_ns: one.used_ns, idle_ns: 0, shares: None };
        return (kept, false);
    };
    let used = one.used_ns.saturating_sub(kept.used_ns);
    let due = u64::from(one.cpu.reserve_milli).saturating_mul(passed_ns) / 1000;
    let of = |ns: u64| i64::try_from(ns).unwrap_or(i64::MAX);
    let tokens_ns = kept.tokens_ns.saturating_add(of(due)).saturating_sub(of(used));
    // Rare work is no competition for the others, and is no sign that time is missing.
    let is_awake = used > due / IDLE_PART;
    let idle_ns = if is_awake { 0 } else { kept.idle_ns.saturating_add(passed_ns) };
    let tokens_ns = tokens_ns.clamp(-BUCKET_NS, BUCKET_NS);
    let is_hungry = is_awake && used < due / 10 * 9;
    (Kept { tokens_ns, used_ns: one.used_ns, idle_ns, shares: kept.shares }, is_hungry)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HOST: Host = Host { cpus_milli: 2000, shares_max: 262_144 };
    const MS: u64 = 1_000_000;

    fn contract(reserve_milli: u32, weight: u32, max_milli: Option<u32>) -> Cpu {
        let limits = dormouse_model::Limits {
            cpu_reserve_milli: Some(reserve_milli),
            cpu_weight: Some(weight),
            cpu_max_milli: max_milli,
            ..Default::default()
        };
        Cpu::of(&limits)
    }

    /// A simulated container: `work` returns whether it has work in a millisecond.
    struct Task {
        cpu: Cpu,
        threads: f64,
        work: fn(u64) -> bool,
        shares: f64,
        used_ns: f64,
        /// Time used in this period of the quota.
        period_ns: f64,
    }

    impl Task {
        fn new(cpu: Cpu, work: fn(u64) -> bool) -> Self {
            let shares = own_shares(&cpu);
            Self { cpu, threads: 1.0, work, shares, used_ns: 0.0, period_ns: 0.0 }
        }
    }

    /// A simulated host, which divides each millisecond by weights as the kernel does.
    struct Sim {
        tasks: Vec<Task>,
        /// CPUs that the containers get; the rest is the host's.
        cpus: f64,
        now_ms: u64,
        state: State<usize>,
        writes: Vec<(u64, Setting<usize>)>,
        governed: bool,
    }

    fn always(_: u64) -> bool {
        true
    }

    impl Sim {
        /// Hogs with the default weight beside the given containers.
        fn new(reserved: Vec<Task>, hogs: usize) -> Self {
            let mut tasks = reserved;
            tasks.extend((0..hogs).map(|_| Task::new(contract(0, 100, None), always)));
            let state = State::default();
            let (now_ms, writes) = (0, Vec::new());
            let mut sim = Self { tasks, cpus: 2.0, now_ms, state, writes, governed: true };
            sim.write_statics();
            sim
        }

        fn write_statics(&mut self) {
            let is_reserved = |task: &&Task| task.cpu.reserve_milli > 0;
            let all: Vec<(usize, Cpu)> = self
                .tasks
                .iter()
                .enumerate()
                .filter(|(_, t)| is_reserved(t))
                .map(|(i, t)| (i, t.cpu))
                .collect();
            let others: f64 = self.tasks.iter().filter(|t| !is_reserved(t)).map(|t| t.shares).sum();
            for Setting { id, shares } in statics(&HOST, &all, others as u64) {
                self.tasks[id].shares = shares.into();
            }
        }

        fn tick(&mut self) {
            let reserved = self.tasks.iter().enumerate().filter(|(_, t)| t.cpu.reserve_milli > 0);
            let reserved = reserved
                .map(|(id, t)| Reserved { id, cpu: t.cpu, used_ns: t.used_ns as u64 })
                .collect();
            let others = self.now_ms.is_multiple_of(OTHERS_MS).then(|| {
                let all = self.tasks.iter().enumerate().filter(|(_, t)| t.cpu.reserve_milli == 0);
                all.map(|(id, t)| Other { id, shares: t.shares as u32, used_ns: t.used_ns as u64 })
                    .collect()
            });
            let readings = Readings { passed_ns: TICK_MS * MS, reserved, others };
            let (state, settings) = decide(&HOST, &readings, std::mem::take(&mut self.state));
            self.state = state;
            for setting in settings {
                self.tasks[setting.id].shares = setting.shares.into();
                self.writes.push((self.now_ms, setting));
            }
        }

        /// Divides one millisecond: by weight, and what one cannot use goes to the others.
        fn step(&mut self) {
            let mut left = self.cpus * MS as f64;
            let mut wants: Vec<f64> = self
                .tasks
                .iter_mut()
                .map(|task| {
                    if self.now_ms.is_multiple_of(100) {
                        task.period_ns = 0.0;
                    }
                    let quota = task.cpu.quota_us().map_or(f64::MAX, |us| us as f64 * 1000.0);
                    let room = (quota - task.period_ns).max(0.0);
                    if (task.work)(self.now_ms) {
                        (task.threads * MS as f64).min(room)
                    } else {
                        0.0
                    }
                })
                .collect();
            while left > 1.0 {
                let total: f64 = (0..wants.len())
                    .filter(|i| wants[*i] > 0.5)
                    .map(|i| self.tasks[i].shares)
                    .sum();
                if total == 0.0 {
                    break;
                }
                let round = left;
                for (task, want) in self.tasks.iter_mut().zip(&mut wants) {
                    if *want > 0.5 {
                        let got = (round * task.shares / total).min(*want);
                        *want -= got;
                        left -= got;
                        task.used_ns += got;
                        task.period_ns += got;
                    }
                }
            }
            self.now_ms += 1;
        }

        /// Runs for a time, and returns the CPUs that each container got in it.
        fn run(&mut self, ms: u64) -> Vec<f64> {
            let before: Vec<f64> = self.tasks.iter().map(|task| task.used_ns).collect();
            for _ in 0..ms {
                if self.governed && self.now_ms.is_multiple_of(TICK_MS) {
                    self.tick();
                }
                self.step();
            }
            let of = |(task, before): (&Task, &f64)| (task.used_ns - before) / (ms * MS) as f64;
            self.tasks.iter().zip(&before).map(of).collect()
        }
    }

    fn near(got: f64, due: f64, by: f64) {
        assert!((got - due).abs() <= by, "{got} is not {due}");
    }

    #[test]
    fn static_weights_divide_by_entitlement() {
        // 0.5 of 2 CPUs and a share of the rest: 0.5 + 1.5 / 8.
        let mut sim = Sim::new(vec![Task::new(contract(500, 100, None), always)], 7);
        sim.governed = false;
        let got = sim.run(1000);
        near(got[0], 0.6875, 0.01);
        near(got[1], 0.1875, 0.01);
        // Nearly no share: the reservation alone.
        let mut sim = Sim::new(vec![Task::new(contract(500, 1, None), always)], 7);
        sim.governed = false;
        near(sim.run(1000)[0], 0.5, 0.01);
    }

    #[test]
    fn static_weight_of_capped_reservation_is_the_largest() {
        let capped = contract(500, 100, Some(500));
        let all = [(0, capped), (1, contract(500, 100, None))];
        let weights = statics(&HOST, &all, 6 * 1024);
        // u = 8 x 1024 / 1, HIGH = 2 x u x 2.
        assert_eq!(weights[0].shares, 4 * 8192);
        assert_eq!(weights[1].shares, 1024 + 4096);
        let mut sim = Sim::new(vec![Task::new(capped, always)], 7);
        sim.governed = false;
        near(sim.run(1000)[0], 0.5, 0.01);
    }

    #[test]
    fn static_weights_stay_within_the_kernels_bounds() {
        let v2 = Host { shares_max: 102_400, ..HOST };
        let all = [(0, contract(1900, 10_000, None)), (1, contract(10, 1, None))];
        let weights = statics(&v2, &all, 1_000_000);
        assert_eq!(weights[0].shares, 102_400);
        assert!(weights[1].shares >= 2, "{weights:?}");
        assert!(statics::<usize>(&v2, &[], 5).is_empty());
        let whole = statics(&v2, &[(0, contract(2000, 100, None))], 1024);
        assert_eq!(whole[0].shares, 102_400, "all CPUs are reserved");
    }

    #[test]
    fn hungry_reservation_gets_its_cpus_although_the_host_takes_a_part() {
        let mut sim = Sim::new(vec![Task::new(contract(500, 1, None), always)], 7);
        sim.cpus = 1.6;
        sim.run(1000);
        let got = sim.run(5000);
        near(got[0], 0.5, 0.02);
        near(got.iter().sum(), 1.6, 0.001);
        // Static weights give a share of the 1.6 only.
        let mut sim = Sim::new(vec![Task::new(contract(500, 1, None), always)], 7);
        (sim.cpus, sim.governed) = (1.6, false);
        near(sim.run(5000)[0], 0.4, 0.02);
    }

    #[test]
    fn time_slept_is_repaid() {
        let cases: [fn(u64) -> bool; 2] =
            [|ms| (ms / 20).is_multiple_of(2), |ms| (ms / 5).is_multiple_of(2)];
        for work in cases {
            let mut sim = Sim::new(vec![Task::new(contract(500, 1, None), work)], 7);
            sim.run(1000);
            let got = sim.run(5000)[0];
            assert!(got >= 0.93 * 0.5, "{got}");
            assert!(got <= 0.51, "{got}");
            sim.governed = false;
            sim.write_statics();
            let got = sim.run(5000)[0];
            assert!(got < 0.3, "static weights repay nothing: {got}");
        }
    }

    #[test]
    fn idle_reservation_goes_to_the_others_by_share() {
        let idle = |ms: u64| !(1000..9000).contains(&ms);
        let reserved = || Task::new(contract(500, 100, None), always);
        let mut sim = Sim::new(vec![reserved(), Task::new(contract(500, 100, None), idle)], 6);
        sim.run(2000);
        let got = sim.run(5000);
        near(got[0], 0.5 + 1.5 / 7.0, 0.02);
        near(got[2], 1.5 / 7.0, 0.02);
        sim.run(2500); // until the second one works again
        let got = sim.run(2000);
        near(got[0], 0.5 + 1.0 / 8.0, 0.03);
        near(got[1], 0.5 + 1.0 / 8.0, 0.03);
    }

    #[test]
    fn reservation_that_is_hardly_used_goes_to_the_others_by_share() {
        let rare = |ms: u64| ms.is_multiple_of(50);
        let reserved = |work| Task::new(contract(500, 100, None), work);
        let mut sim = Sim::new(vec![reserved(always), reserved(rare)], 6);
        sim.run(2000);
        let got = sim.run(5000);
        near(got[0], 0.5 + 1.48 / 7.0, 0.02);
        near(got[1], 0.02, 0.005);
        near(got[2], 1.48 / 7.0, 0.02);
    }

    #[test]
    fn weights_of_steady_containers_settle() {
        let mut sim = Sim::new(
            vec![
                Task::new(contract(500, 100, None), always),
                Task::new(contract(900, 1, None), always),
            ],
            6,
        );
        sim.run(3000);
        let settled = sim.writes.len();
        let got = sim.run(5000);
        near(got[0], 0.5 + 0.6 / 7.0, 0.02);
        near(got[1], 0.9, 0.02);
        let late = sim.writes.len() - settled;
        assert!(late <= 5, "{late} writes in 50 ticks: {:?}", &sim.writes[settled..]);
    }

    #[test]
    fn limit_holds_under_any_weight() {
        let mut task = Task::new(contract(300, 10_000, Some(400)), always);
        task.threads = 4.0;
        let mut sim = Sim::new(vec![task], 7);
        for _ in 0..20 {
            assert!(sim.run(100)[0] <= 0.4001);
        }
        near(sim.run(2000)[0], 0.4, 0.01);
    }

    #[test]
    fn restarted_governor_converges_within_a_second() {
        let mut sim = Sim::new(vec![Task::new(contract(500, 1, None), always)], 7);
        sim.cpus = 1.6;
        sim.run(3000);
        sim.state = State::default();
        sim.run(1000);
        near(sim.run(1000)[0], 0.5, 0.02);
    }

    #[test]
    fn weight_is_written_again_after_it_was_forgotten() {
        let mut sim = Sim::new(vec![Task::new(contract(500, 100, None), always)], 3);
        sim.run(3000);
        let before = sim.writes.len();
        sim.state.forget_weights();
        sim.run(100);
        assert_eq!(sim.writes.len(), before + 1);
    }

    #[test]
    fn container_with_too_little_time_is_hungry() {
        let reading = |used_ns| Readings {
            passed_ns: TICK_MS * MS,
            reserved: vec![Reserved { id: 0, cpu: contract(500, 100, None), used_ns }],
            others: None,
        };
        let (state, _) = decide(&HOST, &reading(0), State::default());
        assert!(!state.is_hungry());
        let (state, _) = decide(&HOST, &reading(30 * MS), state);
        assert!(state.is_hungry());
        let (state, _) = decide(&HOST, &reading(80 * MS), state);
        assert!(!state.is_hungry());
        let (state, _) = decide(&HOST, &reading(80 * MS), state);
        assert!(!state.is_hungry(), "it was idle");
    }

    proptest! {
        #[test]
        fn decisions_stay_within_bounds_for_any_readings(
            rounds in prop::collection::vec(
                (
                    0..u64::MAX,
                    prop::collection::vec((0_u8..6, 0_u32..5000, 1_u32..10_001, 0..u64::MAX), 0..6),
                    prop::option::of(prop::collection::vec((6_u8..9, any::<u32>(), any::<u64>()), 0..4)),
                ),
                1..12,
            ),
            cpus_milli in 0_u32..512_000,
            shares_max in prop::sample::select(vec![102_400_u32, 262_144]),
        ) {
            let host = Host { cpus_milli, shares_max };
            let mut state = State::default();
            let mut written: BTreeMap<u8, u32> = BTreeMap::new();
            for (passed_ns, mut reserved, others) in rounds {
                reserved.sort_unstable();
                reserved.dedup_by_key(|one| one.0);
                let reserved: Vec<_> = reserved
                    .into_iter()
                    .map(|(id, reserve, weight, used_ns)| Reserved {
                        id, cpu: contract(reserve, weight, None), used_ns,
                    })
                    .collect();
                let others = others.map(|all| {
                    all.into_iter().map(|(id, shares, used_ns)| Other { id, shares, used_ns }).collect()
                });
                let ids: Vec<u8> = reserved.iter().map(|one| one.id).collect();
                let (next, settings) = decide(&host, &Readings { passed_ns, reserved, others }, state);
                prop_assert!(settings.is_sorted_by_key(|one| one.shares));
                written.retain(|id, _| ids.contains(id));
                for Setting { id, shares } in settings {
                    prop_assert!(ids.contains(&id));
                    prop_assert!((2..=shares_max).contains(&shares), "{shares}");
                    if let Some(old) = written.insert(id, shares) {
                        prop_assert!(old.abs_diff(shares) * 20 > old, "{old} to {shares}");
                    }
                }
                for kept in next.reserved.values() {
                    prop_assert!(kept.tokens_ns.abs() <= BUCKET_NS);
                    prop_assert!(kept.shares.is_some());
                }
                state = next;
            }
        }
    }
}
