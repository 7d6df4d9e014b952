//! What has been charged to one account.

use std::collections::{BTreeMap, BTreeSet};

use dormouse_model::ContainerId;
use serde::{Deserialize, Serialize};

use crate::charge::{Charge, Client, Held, Life, Work};
use crate::day::Day;
use crate::usage::Usage;

/// Format of the record; this page describes 1.
const VERSION: u32 = 1;

/// What has been charged to one account, in all and by days.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Balance {
    version: u32,
    /// All of it.
    pub total: Usage,
    /// The part of days that are no longer kept.
    #[serde(default)]
    pub older: Usage,
    /// The rest by days, each the day of the reading.
    #[serde(default)]
    pub days: BTreeMap<Day, Usage>,
    /// The last reading of each life that may be read again.
    #[serde(default)]
    lives: BTreeMap<Life, Usage>,
    /// The last readings of the work of these lives for other accounts.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    given: Parts,
    /// The last readings of the work of other lives for this account.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    taken: Parts,
    /// Keys of the balances that have moved into this one and may be found again.
    #[serde(default)]
    absorbed: BTreeSet<String>,
}

/// Work by life and client, in nanoseconds.
type Parts = BTreeMap<Life, BTreeMap<Client, u64>>;

/// Returns what a reading of work has beyond the last one.
fn beyond(parts: &mut Parts, life: &Life, work: &Work) -> u64 {
    let counted = parts.entry(life.clone()).or_default().entry(work.client).or_default();
    let new = work.cpu_ns.saturating_sub(*counted);
    *counted += new;
    new
}

impl Default for Balance {
    fn default() -> Self {
        Self {
            version: VERSION,
            total: Usage::default(),
            older: Usage::default(),
            days: BTreeMap::new(),
            lives: BTreeMap::new(),
            given: Parts::new(),
            taken: Parts::new(),
            absorbed: BTreeSet::new(),
        }
    }
}

impl Balance {
    /// Adds the part of a reading that was not added yet.
    pub fn apply(&mut self, charge: &Charge) {
        let counted = self.lives.entry(charge.life.clone()).or_default();
        let latest = counted.latest(charge.usage);
        let mut new = latest.beyond(*counted);
        let is_newer = latest != *counted;
        *counted = latest;
        for work in &charge.work {
            new.cpu_given_ns += beyond(&mut self.given, &charge.life, work);
        }
        if is_newer || new.cpu_given_ns > 0 {
            self.add(charge.unix_ms, new);
        }
    }

    /// Notes what all lives of the account had together at this time, in milliseconds since the epoch.
    pub fn note(&mut self, unix_ms: i64, held: Held) {
        let noted =
            Usage { tasks_peak: held.tasks, sockets_peak: held.sockets, ..Usage::default() };
        if !noted.is_none() {
            self.add(unix_ms, noted);
        }
    }

    /// Adds the part of a reading of work for this account, of a life that is charged to another one, that was not
    /// added yet.
    pub fn take(&mut self, charge: &Charge, work: &Work) {
        let new = beyond(&mut self.taken, &charge.life, work);
        if new > 0 {
            self.add(charge.unix_ms, Usage { cpu_taken_ns: new, ..Usage::default() });
        }
    }

    /// Returns whether work of a life for this account, under this name, was added before.
    pub fn has_taken(&self, life: &Life, client: &Client) -> bool {
        self.taken.get(life).is_some_and(|parts| parts.contains_key(client))
    }

    fn add(&mut self, unix_ms: i64, new: Usage) {
        self.total = self.total.plus(new);
        let day = self.days.entry(Day::of_unix_ms(unix_ms)).or_default();
        *day = day.plus(new);
    }

    /// Forgets the last readings of lives of which no charge can arrive any more. `boot` is that of the host, `filed`
    /// are all charges from the file, and `running` those of all containers that run. `has_life` is whether a
    /// container may have had a life when the file was taken.
    ///
    /// A charge is in the file before its life ends. So all charges of a container without a life were in the file,
    /// and all of lives that began before one in the file. A life that runs proves nothing: the last charge of the life
    /// before may be in the next file. So may that of a life after one in the file, which ran when it was read before,
    /// and has ended since the file was taken. A file may be added again, so lives in it are kept.
    pub fn forget_ended(
        &mut self,
        boot: &str,
        (filed, running): (&[Charge], &[Charge]),
        has_life: impl Fn(&ContainerId) -> bool,
    ) {
        let read: BTreeSet<&Life> = filed.iter().chain(running).map(|c| &c.life).collect();
        // The last of each container. A trial restore, or an interrupted start, is beside a life and follows none.
        let mut last: BTreeMap<&ContainerId, u64> = BTreeMap::new();
        for charge in filed.iter().filter(|c| c.usage.lives > 0 && c.life.boot == boot) {
            let cgroup = last.entry(&charge.life.container).or_default();
            *cgroup = charge.life.cgroup.max(*cgroup);
        }
        let is_followed =
            |life: &Life| last.get(&life.container).is_some_and(|cgroup| *cgroup > life.cgroup);
        // The cgroups of an earlier boot are gone.
        let can_arrive =
            |life: &Life| life.boot == boot && has_life(&life.container) && !is_followed(life);
        let is_kept = |life: &Life| read.contains(life) || can_arrive(life);
        self.lives.retain(|life, _| is_kept(life));
        self.given.retain(|life, _| is_kept(life));
        self.taken.retain(|life, _| is_kept(life));
    }

    /// Returns the lives that may be read again.
    pub fn lives(&self) -> impl Iterator<Item = &Life> {
        self.lives.keys()
    }

    /// Adds up days before `first`.
    pub fn keep_from(&mut self, first: Day) {
        let kept = self.days.split_off(&first);
        let dropped = std::mem::replace(&mut self.days, kept);
        self.older = dropped.into_values().fold(self.older, Usage::plus);
    }

    /// Moves another balance into this one, once for each key. Work of lives that go on continues here.
    pub fn absorb(&mut self, key: &str, other: &Self) {
        if !self.absorbed.insert(key.to_owned()) {
            return;
        }
        self.total = self.total.plus(other.total);
        self.older = self.older.plus(other.older);
        for (day, usage) in &other.days {
            let sum = self.days.entry(*day).or_default();
            *sum = sum.plus(*usage);
        }
        for (life, parts) in &other.taken {
            let counted = self.taken.entry(life.clone()).or_default();
            for (client, cpu_ns) in parts {
                let counted = counted.entry(*client).or_default();
                *counted = (*counted).max(*cpu_ns);
            }
        }
    }

    /// Forgets keys of balances that cannot be found again.
    pub fn forget_absorbed(&mut self, is_gone: impl Fn(&str) -> bool) {
        self.absorbed.retain(|key| !is_gone(key));
    }

    /// Returns the use on the days from `since` to `until`, both included. Days that are no longer kept are part
    /// of it only if the period has no beginning.
    pub fn between(&self, since: Option<Day>, until: Option<Day>) -> Usage {
        let is_in = |day: &Day| since.is_none_or(|s| s <= *day) && until.is_none_or(|u| *day <= u);
        let kept: Usage = self.days.iter().filter(|(day, _)| is_in(day)).map(|(_, u)| *u).sum();
        if since.is_none() { kept.plus(self.older) } else { kept }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::charge::Holder;
    use crate::number::Number;

    const DAY_MS: i64 = 86_400_000;

    fn life(n: u8) -> Life {
        Life { container: ContainerId::from_bytes([n; 16]), boot: "b".into(), cgroup: n.into() }
    }

    fn charge(of: u8, day: i64, cpu_ns: u64) -> Charge {
        let usage = Usage { cpu_ns, memory_peak_bytes: cpu_ns, ..Usage::default() };
        let (life, unix_ms) = (life(of), day * DAY_MS);
        Charge { to: Holder::Root, life, unix_ms, usage, work: Vec::new(), held: Held::default() }
    }

    fn is_whole(balance: &Balance) -> bool {
        let days: Usage = balance.days.values().copied().sum();
        days.plus(balance.older) == balance.total
    }

    #[test]
    fn charge_counts_once_and_on_the_day_of_its_reading() {
        let mut balance = Balance::default();
        for (day, cpu_ns) in [(1, 10), (1, 10), (2, 25), (2, 15), (3, 25)] {
            balance.apply(&charge(1, day, cpu_ns));
        }
        assert_eq!(balance.total.cpu_ns, 25);
        let days: Vec<_> =
            balance.days.iter().map(|(day, u)| (day.to_string(), u.cpu_ns)).collect();
        assert_eq!(days, [("1970-01-02".to_owned(), 10), ("1970-01-03".to_owned(), 15)]);
        balance.apply(&charge(2, 3, 7));
        assert_eq!((balance.total.cpu_ns, balance.total.memory_peak_bytes), (32, 25));
    }

    /// A life has 9 tasks on the first day, then fewer, and 12 on the fourth; another one beside it has 5.
    #[test]
    fn most_tasks_are_those_of_the_day() {
        let mut balance = Balance::default();
        for (of, day, tasks_peak) in [(1, 1, 7), (1, 1, 9), (1, 2, 9), (1, 4, 12), (2, 4, 5)] {
            let mut charge = charge(of, day, day as u64);
            charge.usage.tasks_peak = tasks_peak;
            balance.apply(&charge);
        }
        balance.note(2 * DAY_MS, Held { tasks: 3, sockets: 8 });
        balance.note(3 * DAY_MS, Held::default());
        balance.note(4 * DAY_MS, Held { tasks: 14, sockets: 2 });
        let most = |n| {
            let day = Some(Day::of_unix_ms(n * DAY_MS));
            let usage = balance.between(day, day);
            (usage.tasks_peak, usage.sockets_peak)
        };
        assert_eq!([1, 2, 3, 4].map(most), [(9, 0), (3, 8), (0, 0), (14, 2)]);
        assert_eq!((balance.total.tasks_peak, balance.total.sockets_peak), (14, 8));
        assert!(is_whole(&balance));
    }

    #[test]
    fn life_is_forgotten_when_no_charge_of_it_can_arrive() {
        let of = |cgroup: u64| {
            let mut charge = charge(1, 1, 10);
            charge.life.cgroup = cgroup;
            charge
        };
        let (first, mut second, beside, mut earlier) = (of(2), of(3), of(4), of(1));
        (second.usage.lives, earlier.usage.lives) = (1, 1);
        for (filed, running, has_life, kept) in [
            (&[][..], &[][..], true, true),
            (&[], &[], false, false),
            (std::slice::from_ref(&first), &[], false, true),
            (std::slice::from_ref(&second), &[], true, false),
            (&[first.clone(), second.clone()], &[], false, true),
            (std::slice::from_ref(&beside), &[], true, true),
            // The last charge of the first life may have missed the file.
            (&[], std::slice::from_ref(&second), true, true),
            // It has ended since the file was taken, which has the charge of the life before it.
            (std::slice::from_ref(&earlier), &[], true, true),
        ] {
            let mut balance = Balance::default();
            balance.apply(&first);
            filed.iter().chain(running).for_each(|charge| balance.apply(charge));
            balance.forget_ended("b", (filed, running), |_| has_life);
            let is_kept = balance.lives().any(|life| *life == first.life);
            assert_eq!(is_kept, kept, "{filed:?} {running:?} {has_life}");
        }
        let mut balance = Balance::default();
        balance.apply(&first);
        balance.forget_ended("the next boot", (&[], &[]), |_| true);
        assert_eq!(balance.lives().count(), 0);
    }

    #[test]
    fn balance_moves_once() {
        let (mut from, mut to) = (Balance::default(), Balance::default());
        from.apply(&charge(1, 1, 10));
        from.apply(&charge(1, 5, 30));
        from.keep_from(Day::of_unix_ms(3 * DAY_MS));
        to.apply(&charge(2, 5, 5));
        to.absorb("a", &from);
        to.absorb("a", &from);
        assert_eq!((to.total.cpu_ns, to.older.cpu_ns), (35, 10));
        assert!(is_whole(&to));
        to.forget_absorbed(|key| key == "a");
        to.absorb("a", &from);
        assert_eq!(to.total.cpu_ns, 65);
    }

    #[test]
    fn period_includes_both_days() {
        let mut balance = Balance::default();
        for day in 1..=5 {
            balance.apply(&charge(day as u8, day, 1 << day));
        }
        balance.keep_from(Day::of_unix_ms(2 * DAY_MS));
        let day = |n: i64| Some(Day::of_unix_ms(n * DAY_MS));
        for (since, until, sum) in [
            (None, None, 62),
            (None, day(2), 6),
            (day(1), day(2), 4),
            (day(3), day(4), 24),
            (day(4), None, 48),
            (day(4), day(3), 0),
        ] {
            assert_eq!(balance.between(since, until).cpu_ns, sum, "{since:?} {until:?}");
        }
    }

    #[test]
    fn older_and_newer_records_are_read() {
        let text = r#"{"version":1,"total":{"cpu_ns":3},"field_of_a_later_version":[]}"#;
        let mut balance: Balance = serde_json::from_str(text).unwrap();
        balance.apply(&charge(1, 1, 4));
        assert_eq!(balance.total.cpu_ns, 7);
        let text = serde_json::to_string(&balance).unwrap();
        assert_eq!(serde_json::from_str::<Balance>(&text).unwrap(), balance);
    }

    fn client(number: u32) -> Client {
        Client { number: Number(number), owner: 0, load: 1 }
    }

    #[test]
    fn work_moves_from_the_life_to_its_client() {
        let (mut service, mut one, mut two) =
            (Balance::default(), Balance::default(), Balance::default());
        let mut last = charge(1, 1, 100);
        for parts in [[10, 20], [10, 20], [30, 20], [15, 60]] {
            last.work = vec![
                Work { client: client(1), cpu_ns: parts[0] },
                Work { client: client(2), cpu_ns: parts[1] },
            ];
            service.apply(&last);
            one.take(&last, &last.work[0]);
            two.take(&last, &last.work[1]);
            let sum: u64 = [&service, &one, &two].iter().map(|b| b.total.charged_ns()).sum();
            assert_eq!(sum, 100);
            assert!([&service, &one, &two].into_iter().all(is_whole));
        }
        assert_eq!((one.total.charged_ns(), two.total.charged_ns()), (30, 60));
        assert_eq!(service.total.charged_ns(), 10);
        // The client's balance moves, and the work goes on.
        let mut heir = Balance::default();
        assert!(one.has_taken(&last.life, &client(1)) && !one.has_taken(&last.life, &client(2)));
        heir.absorb("one", &one);
        heir.absorb("one", &one);
        last.work.truncate(1);
        last.work[0].cpu_ns = 35;
        heir.take(&last, &last.work[0]);
        assert_eq!(heir.total.charged_ns(), 35);
        for balance in [&mut heir, &mut service] {
            balance.forget_ended("b", (&[], &[]), |_| false);
        }
        assert!(!heir.has_taken(&last.life, &client(1)));
        assert!(service.given.is_empty());
    }

    proptest! {
        /// Readings of one life with its work for three clients, in any order and again: the balances have the
        /// time of the life together, and none is negative.
        #[test]
        fn work_is_neither_lost_nor_made(
            steps in proptest::collection::vec((0_u64..50, 0_u64..50, 0_u64..50, 0_u64..50, 0_usize..9), 1..30),
        ) {
            let mut balances: [Balance; 4] = std::array::from_fn(|_| Balance::default());
            let (mut all, mut cpu_ns, mut parts) = (Vec::new(), 0, [0; 3]);
            for (own, a, b, c, again) in steps {
                for (part, more) in parts.iter_mut().zip([a, b, c]) {
                    *part += more;
                }
                cpu_ns += own + a + b + c;
                let mut reading = charge(1, 1, cpu_ns);
                let work = |(number, cpu_ns): (u32, u64)| Work { client: client(number), cpu_ns };
                reading.work = (1..).zip(parts).map(work).collect();
                all.push(reading);
                for charge in all.iter().rev().take(again + 1).rev().chain(all.first()) {
                    balances[0].apply(charge);
                    for (balance, work) in balances[1..].iter_mut().zip(&charge.work) {
                        balance.take(charge, work);
                    }
                }
                let sum: u64 = balances.iter().map(|balance| balance.total.charged_ns()).sum();
                prop_assert_eq!(sum, cpu_ns);
                prop_assert!(balances.iter().all(is_whole));
                for (balance, part) in balances[1..].iter().zip(parts) {
                    prop_assert_eq!(balance.total.charged_ns(), part);
                }
            }
        }

        /// Readings that arrive in any order, several times, with days dropped and lives forgotten as soon as
        /// their last reading was applied: the total is the sum of the last readings.
        #[test]
        fn total_is_the_sum_of_the_last_readings(
            readings in proptest::collection::vec((0_u8..6, 0_i64..9, 0_u64..1000, 0_usize..4), 1..60),
        ) {
            let mut balance = Balance::default();
            let mut last = BTreeMap::new();
            let mut order: Vec<_> = readings.iter().map(|r| (r.0, r.1, r.2)).collect();
            for (n, (of, day, cpu_ns, again)) in readings.iter().enumerate() {
                let newest = last.entry(*of).or_insert(0_u64);
                *newest = (*cpu_ns).max(*newest);
                // Late and repeated ones.
                for earlier in order[..n].iter().rev().take(*again).copied().collect::<Vec<_>>() {
                    balance.apply(&charge(earlier.0, earlier.1, earlier.2));
                }
                balance.apply(&charge(*of, *day, *cpu_ns));
                balance.keep_from(Day::of_unix_ms((*day - 4) * DAY_MS));
                prop_assert!(is_whole(&balance));
            }
            order.sort_unstable();
            order.iter().for_each(|(of, day, cpu_ns)| balance.apply(&charge(*of, *day, *cpu_ns)));
            prop_assert_eq!(balance.total.cpu_ns, last.values().sum::<u64>());
            prop_assert!(is_whole(&balance));
            balance.forget_ended("b", (&[], &[]), |_| false);
            prop_assert_eq!(balance.lives().count(), 0);
            prop_assert_eq!(balance.between(None, None), balance.total);
        }
    }
}
