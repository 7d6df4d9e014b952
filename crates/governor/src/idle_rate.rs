//! The rate for idle hosts: a higher limit of CPU time while CPUs are idle.
//!
//! Linux-VServer's token bucket has a second rate for a host that is idle (Soltesz et al., EuroSys 2007, section 3.2).
//! Here it is a second limit M above the limit N of a container:
//!
//! ```text
//! headroom = max(C / 20, 0.2)            CPUs that stay idle, at most C / 4
//! pool     = idle - headroom + sum of max(0, used_i - N_i)
//! limit_i  = N_i + part of the pool by weight, at most M_i
//! ```
//!
//! **Why a headroom.** A container that may use all idle time makes the host look as busy as one on which others wait.
//! While the headroom is idle, no task waits. When less than half of it was idle over the last two decisions, others
//! want CPU time, and every limit is N again with that decision. It rises again after three decisions with enough
//! idle time.
//!
//! **A container that does not use its limit** gets a quarter more than it uses, so that the rest goes to others.
//!
//! The kernel starts a new period at each write of a quota, so a limit that changes by less than a tenth is not
//! written.

use std::collections::BTreeMap;

use dormouse_model::Cpu;

/// The part of all CPUs that stays idle.
const HEADROOM_PART: u64 = 20;
/// LIMIT: the least headroom, in thousandths of a CPU. The kernel counts idle time in hundredths of a second.
const HEADROOM_MILLI: u64 = 200;
/// Decisions with idle time before a limit rises.
const CALM: u32 = 3;
/// A limit is written if it differs by more than a part of this.
const CHANGE: u64 = 10;

/// A container with a rate for idle hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rated<I> {
    /// Its identity.
    pub id: I,
    /// Its contract.
    pub cpu: Cpu,
    /// CPU time since its start.
    pub used_ns: u64,
}

/// What was read at one time.
#[derive(Debug, Clone)]
pub struct Readings<I> {
    /// CPUs that are online, in thousandths.
    pub cpus_milli: u32,
    /// Time since the last readings.
    pub passed_ns: u64,
    /// Idle time of all CPUs in it.
    pub idle_ns: u64,
    /// A container with a reservation gets less than that.
    pub is_hungry: bool,
    /// All containers with a rate for idle hosts.
    pub rated: Vec<Rated<I>>,
}

/// A limit to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting<I> {
    /// The container.
    pub id: I,
    /// CPU time per period.
    pub quota_us: u64,
    /// The period.
    pub period_us: u32,
    /// CPU time that may be saved up: none above the limit of the contract, so that a lower limit holds at once.
    pub burst_us: u64,
    /// It is the limit of the contract.
    pub is_plain: bool,
}

/// The state between decisions. In a new state no limit is known.
#[derive(Debug, Clone)]
pub struct State<I> {
    kept: BTreeMap<I, Kept>,
    /// Idle time at the last decision, and the time that had passed.
    last: Option<(u64, u64)>,
    calm: u32,
}

#[derive(Debug, Clone, Copy)]
struct Kept {
    used_ns: u64,
    /// At the decision before the last.
    earlier_ns: Option<u64>,
    /// The limit in the kernel; `None` if it is not known.
    limit_milli: Option<u64>,
}

impl<I> Default for State<I> {
    fn default() -> Self {
        Self { kept: BTreeMap::new(), last: None, calm: 0 }
    }
}

impl<I> State<I> {
    /// Forgets the limits in the kernel, which another process has written: all are written again.
    pub fn forget_limits(&mut self) {
        self.kept.values_mut().for_each(|kept| kept.limit_milli = None);
    }
}

/// Computes thousandths of a CPU.
fn milli(ns: u64, passed_ns: u64) -> u64 {
    u64::try_from(u128::from(ns) * 1000 / u128::from(passed_ns.max(1))).unwrap_or(u64::MAX)
}

/// What a container wants above its limit, and its weight.
struct Want {
    most_milli: u64,
    weight: u64,
}

/// Decides the limits of all containers with a rate for idle hosts, and returns those that are to be written.
pub fn decide<I: Clone + Ord>(now: &Readings<I>, was: State<I>) -> (State<I>, Vec<Setting<I>>) {
    let cpus = u64::from(now.cpus_milli.max(1));
    let headroom = (cpus / HEADROOM_PART).max(HEADROOM_MILLI).min(cpus / 4);
    let (last_idle, last_passed) = was.last.unwrap_or((0, 0));
    let passed_ns = now.passed_ns.saturating_add(last_passed);
    let idle = milli(now.idle_ns.saturating_add(last_idle), passed_ns).min(cpus);
    let is_calm = !now.is_hungry && was.last.is_some() && idle >= headroom / 2;
    let calm = if is_calm { was.calm.saturating_add(1) } else { 0 };
    let mut state = State { kept: BTreeMap::new(), last: Some((now.idle_ns, now.passed_ns)), calm };
    let mut pool = idle.saturating_sub(headroom);
    let short = headroom.saturating_sub(idle);
    let mut wants = Vec::with_capacity(now.rated.len());
    for one in &now.rated {
        let kept = was.kept.get(&one.id);
        let limit = kept.and_then(|kept| kept.limit_milli);
        let since = |ns: u64, passed| milli(one.used_ns.saturating_sub(ns), passed).min(cpus);
        let last = kept.map_or(0, |kept| since(kept.used_ns, now.passed_ns));
        // In the same time as the idle time, so that what a new limit takes from that is not counted twice.
        let used = kept.and_then(|kept| kept.earlier_ns).map_or(last, |ns| since(ns, passed_ns));
        let plain = u64::from(one.cpu.max_milli.unwrap_or(0));
        let most = u64::from(one.cpu.idle_rate_milli.unwrap_or(0)).max(plain);
        let present = limit.unwrap_or(plain).max(plain);
        pool = pool.saturating_add(used.saturating_sub(plain).min(present - plain));
        let asked = used.max(last);
        let wanted = if asked * 10 >= present * 9 { most } else { (asked * 5 / 4).min(present) };
        wants.push(Want {
            most_milli: wanted.clamp(plain, most) - plain,
            weight: u64::from(one.cpu.weight.max(1)),
        });
        let earlier_ns = kept.map(|kept| kept.used_ns);
        let kept = Kept { used_ns: one.used_ns, earlier_ns, limit_milli: limit };
        state.kept.insert(one.id.clone(), kept);
    }
    let parts = divide(pool.saturating_sub(short), &wants);
    let mut settings = Vec::new();
    for (one, part) in now.rated.iter().zip(parts) {
        let Some(kept) = state.kept.get_mut(&one.id) else { continue };
        let plain = u64::from(one.cpu.max_milli.unwrap_or(0));
        let present = kept.limit_milli;
        let limit = match calm {
            0 => plain,
            // A limit that is not known may be a raised one.
            1..CALM => present.unwrap_or(plain),
            _ => plain + part,
        };
        let is_new = match present {
            None => true,
            Some(old) if limit == plain => old != plain,
            Some(old) => old.abs_diff(limit).saturating_mul(CHANGE) > old,
        };
        if !is_new {
            continue;
        }
        kept.limit_milli = Some(limit);
        let period_us = one.cpu.period_us;
        let is_plain = limit == plain;
        settings.push(Setting {
            id: one.id.clone(),
            quota_us: limit.saturating_mul(u64::from(period_us)) / 1000,
            period_us,
            burst_us: if is_plain { one.cpu.burst_us() } else { 0 },
            is_plain,
        });
    }
    // ORDER: lower limits first.
    settings.sort_by(|a, b| (!a.is_plain, &a.id).cmp(&(!b.is_plain, &b.id)));
    (state, settings)
}

/// Divides a pool by weight. A container gets no more than it wants, and the rest goes to the others.
fn divide(pool: u64, wants: &[Want]) -> Vec<u64> {
    let mut parts = vec![0; wants.len()];
    let mut left = pool;
    let mut open: Vec<usize> = (0..wants.len()).filter(|i| wants[*i].most_milli > 0).collect();
    while left > 0 && !open.is_empty() {
        let weights: u64 = open.iter().map(|i| wants[*i].weight).sum();
        let share = |i: usize| {
            let share = u128::from(left) * u128::from(wants[i].weight) / u128::from(weights.max(1));
            u64::try_from(share).unwrap_or(u64::MAX)
        };
        let (full, rest): (Vec<usize>, Vec<usize>) =
            open.iter().partition(|i| share(**i) >= wants[**i].most_milli);
        if full.is_empty() {
            rest.iter().for_each(|i| parts[*i] = share(*i));
            break;
        }
        let mut taken = 0;
        for i in full {
            parts[i] = wants[i].most_milli;
            taken += parts[i];
        }
        (left, open) = (left - taken.min(left), rest);
    }
    parts
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TICK_NS: u64 = 100_000_000;

    fn contract(max_milli: u32, idle_rate_milli: u32, weight: u32) -> Cpu {
        Cpu::of(&dormouse_model::Limits {
            cpu_max_milli: Some(max_milli),
            cpu_idle_rate_milli: Some(idle_rate_milli),
            cpu_weight: Some(weight),
            ..Default::default()
        })
    }

    /// A simulated host: containers with a rate, and other work, which comes first.
    struct Sim {
        cpus_milli: u64,
        /// What the others want, in thousandths of a CPU.
        others_milli: u64,
        /// Contract, what it wants, CPU time used, and limit in the kernel.
        rated: Vec<(Cpu, u64, u64, u64)>,
        is_hungry: bool,
        state: State<usize>,
        writes: usize,
    }

    impl Sim {
        fn new(rated: &[(Cpu, u64)]) -> Self {
            let one = |(cpu, wants): &(Cpu, u64)| (*cpu, *wants, 0, cpu.max_milli.unwrap().into());
            let rated = rated.iter().map(one).collect();
            let (others_milli, is_hungry, writes) = (0, false, 0);
            Self {
                cpus_milli: 2000,
                others_milli,
                rated,
                is_hungry,
                state: State::default(),
                writes,
            }
        }

        /// One tick, in which the others get all that they want. Returns the CPUs that each container used.
        fn tick(&mut self) -> Vec<u64> {
            let mut left = self.cpus_milli.saturating_sub(self.others_milli);
            let mut used = Vec::new();
            for (_, wants, used_ns, limit) in &mut self.rated {
                let got = (*wants).min(*limit).min(left);
                left -= got;
                *used_ns += got * TICK_NS / 1000;
                used.push(got);
            }
            let of = |(id, (cpu, _, used_ns, _)): (usize, &(Cpu, u64, u64, u64))| Rated {
                id,
                cpu: *cpu,
                used_ns: *used_ns,
            };
            let readings = Readings {
                cpus_milli: self.cpus_milli as u32,
                passed_ns: TICK_NS,
                idle_ns: left * TICK_NS / 1000,
                is_hungry: self.is_hungry,
                rated: self.rated.iter().enumerate().map(of).collect(),
            };
            let (state, settings) = decide(&readings, std::mem::take(&mut self.state));
            self.state = state;
            self.writes += settings.len();
            for Setting { id, quota_us, period_us, .. } in settings {
                self.rated[id].3 = quota_us * 1000 / u64::from(period_us);
            }
            used
        }

        fn ticks(&mut self, number: usize) -> Vec<u64> {
            (0..number).map(|_| self.tick()).last().unwrap()
        }

        fn limits(&self) -> Vec<u64> {
            self.rated.iter().map(|one| one.3).collect()
        }
    }

    #[test]
    fn limit_rises_to_the_idle_rate_and_the_headroom_stays_idle() {
        let mut sim = Sim::new(&[(contract(500, 1500, 100), 4000)]);
        assert_eq!(sim.ticks(10), [1500]);
        let mut sim = Sim::new(&[(contract(500, 2000, 100), 4000)]);
        let used = sim.ticks(20)[0];
        assert!((1700..=1800).contains(&used), "{used} of 2000, of which 200 stay free");
        let writes = sim.writes;
        sim.ticks(50);
        assert!(sim.writes - writes <= 2, "{} writes of a steady container", sim.writes - writes);
    }

    #[test]
    fn limit_is_the_contracts_within_two_decisions_when_others_work() {
        let mut sim = Sim::new(&[(contract(500, 2000, 100), 4000)]);
        sim.ticks(20);
        sim.others_milli = 4000;
        sim.tick();
        sim.tick();
        assert_eq!(sim.limits(), [500]);
        sim.ticks(50);
        assert_eq!(sim.limits(), [500], "it stays while they work");
        sim.others_milli = 0;
        sim.ticks(10);
        assert!(sim.limits()[0] > 1500, "{:?}", sim.limits());
    }

    #[test]
    fn others_that_want_a_part_leave_the_rest() {
        let mut sim = Sim::new(&[(contract(500, 2000, 100), 4000)]);
        sim.others_milli = 1000;
        let used = sim.ticks(20)[0];
        assert!((700..=800).contains(&used), "{used} of 1000, of which 200 stay free");
        sim.others_milli = 1300;
        sim.ticks(3);
        let used = sim.ticks(20)[0];
        assert!((500..=510).contains(&used), "{used}");
    }

    #[test]
    fn hungry_reservation_ends_higher_limits() {
        let mut sim = Sim::new(&[(contract(500, 1000, 100), 4000)]);
        sim.ticks(20);
        assert_eq!(sim.limits(), [1000]);
        sim.is_hungry = true;
        sim.tick();
        assert_eq!(sim.limits(), [500]);
    }

    #[test]
    fn idle_time_is_divided_by_weight() {
        let rated = [(contract(100, 2000, 300), 4000), (contract(100, 2000, 100), 4000)];
        let mut sim = Sim::new(&rated);
        sim.ticks(30);
        let limits = sim.limits();
        let above = |i: usize| limits[i] as f64 - 100.0;
        let ratio = above(0) / above(1);
        assert!((2.5..3.5).contains(&ratio), "{limits:?}");
        // A container that wants little leaves the rest to the other.
        sim.rated[0].1 = 150;
        sim.ticks(30);
        assert!(sim.limits()[1] > 1400, "{:?}", sim.limits());
    }

    #[test]
    fn container_below_its_limit_keeps_it() {
        let mut sim = Sim::new(&[(contract(500, 2000, 100), 300)]);
        sim.ticks(20);
        assert_eq!((sim.limits(), sim.writes), (vec![500], 1), "the first limit is written once");
    }

    #[test]
    fn unknown_limit_is_written_again() {
        let mut sim = Sim::new(&[(contract(500, 1000, 100), 0)]);
        sim.ticks(5);
        sim.state.forget_limits();
        let writes = sim.writes;
        sim.tick();
        assert_eq!(sim.writes, writes + 1);
    }

    proptest! {
        #[test]
        fn limits_stay_within_the_contract_for_any_readings(
            rounds in prop::collection::vec(
                (0..u64::MAX, 0..u64::MAX, any::<bool>(), prop::collection::vec(0..u64::MAX, 3)),
                1..20,
            ),
            cpus_milli in 0_u32..512_000,
            contracts in prop::collection::vec((10_u32..5000, 1_u32..100_000, 0_u32..10_001), 3),
        ) {
            let contracts: Vec<Cpu> =
                contracts.into_iter().map(|(max, more, weight)| contract(max, max + more, weight)).collect();
            let mut state = State::default();
            for (passed_ns, idle_ns, is_hungry, used) in rounds {
                let rated = contracts.iter().zip(used).enumerate();
                let rated = rated.map(|(id, (cpu, used_ns))| Rated { id, cpu: *cpu, used_ns }).collect();
                let now = Readings { cpus_milli, passed_ns, idle_ns, is_hungry, rated };
                let (next, settings) = decide(&now, state);
                for Setting { id, quota_us, period_us, burst_us, is_plain } in settings {
                    let cpu = contracts[id];
                    let limit = quota_us * 1000 / u64::from(period_us);
                    let (max, most) = (cpu.max_milli.unwrap(), cpu.idle_rate_milli.unwrap());
                    prop_assert!((u64::from(max)..=u64::from(most)).contains(&limit), "{limit}");
                    prop_assert_eq!(is_plain, limit == u64::from(max));
                    prop_assert!(is_plain || burst_us == 0);
                    prop_assert!(!is_hungry || is_plain);
                }
                state = next;
            }
        }
    }
}
