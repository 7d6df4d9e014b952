//! All containers at a glance, a hundred thousand as well.
//!
//! Of one without processes, what a list shows is in the files of its directory. They are never written
//! into: they come, are replaced and go by their names (rename(2), unlink(2)), so as long as the directory
//! was not changed, what was read is what would be read. It is kept in `LIB/list`: a line for each, with its
//! id, the time of that change (st_mtime, in nanoseconds) and what is shown of it, as JSON. Where the time is
//! the same, one statx(2) is all. One that has processes is looked at anew each time.
//!
//! The lines are in the order of their ids: each processor goes through a part of the ids and its part of the
//! lines side by side, and nothing of a hundred thousand has to be looked up.
//!
//! Nothing depends on the file. A line that is none, or not in its place, counts as missing; who finds many
//! missing writes the file anew, and who cannot leaves it.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::net::IpAddr;
use std::panic::resume_unwind;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dormouse_model::{Config, ContainerId, Name, NetMode, Publish, RootSource, State};
use rustix::fs::{AtFlags, Mode, OFlags, Stat, statat};
use serde::{Deserialize, Serialize};

use crate::disk::{self, Durable, Lock};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::life::{Details, Exit};

/// First line of the file. The number changes with what [`Listed`] is, and with the lines' order.
const HEAD: &[u8] = b"containers 2\n";
/// So few containers are looked at by one thread.
const PART_MIN: usize = 200;
/// So many, and one in so many of all, had to be looked at anew when the file is worth writing.
const ANEW_MIN: usize = 100;
const ANEW_IN: usize = 50;
/// LIMIT: two changes in one tick of the clock leave the same time (up to 10 ms, before Linux 6.13): what was
/// changed so short a time ago is not kept.
const SETTLED: Duration = Duration::from_secs(1);

/// What a list shows of a container.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Listed {
    /// Identity.
    pub id: ContainerId,
    /// What the operator calls it.
    pub name: Name,
    /// Where its root filesystem comes from.
    pub root: RootSource,
    /// Seconds since the epoch.
    pub created_unix_s: i64,
    /// Program and arguments.
    pub args: Vec<String>,
    /// How it reaches a network.
    pub net: NetMode,
    /// Its own addresses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<IpAddr>,
    /// Ports of the host that lead to it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub publish: Vec<Publish>,
    /// Free-form labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Its state at the moment of looking.
    pub state: State,
    /// The host's pid of its first process, while it lives.
    #[serde(skip)]
    pub pid: Option<u32>,
    /// When it was last started, in milliseconds since the epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_unix_ms: Option<i64>,
    /// When it fell asleep, or became drowsy, while it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asleep_unix_ms: Option<i64>,
    /// How it ended last; `None` if it never did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<Exit>,
}

impl From<Details> for Listed {
    fn from(details: Details) -> Self {
        let Details { config, state, pid, started_unix_ms, asleep_unix_ms, exit } = details;
        let Config { id, name, root, created_unix_s, process, net, .. } = config;
        let Config { addresses, publish, labels, .. } = config;
        let args = process.args;
        Self {
            id,
            name,
            root,
            created_unix_s,
            args,
            net,
            addresses,
            publish,
            labels,
            state,
            pid,
            started_unix_ms,
            asleep_unix_ms,
            exit,
        }
    }
}

/// What the file says of a container.
#[derive(Debug, Clone, Copy)]
struct Kept<'t> {
    id: &'t [u8],
    changed_ns: i128,
    json: &'t [u8],
}

impl<'t> Kept<'t> {
    fn of(line: &'t [u8]) -> Option<Self> {
        let mut words = line.splitn(3, |byte| *byte == b' ');
        let (id, changed, json) = (words.next()?, words.next()?, words.next()?);
        let changed_ns = std::str::from_utf8(changed).ok()?.parse().ok()?;
        Some(Self { id, changed_ns, json })
    }
}

/// Lines of the file that were not passed yet.
#[derive(Debug, Clone, Copy)]
struct Lines<'t>(&'t [u8]);

impl<'t> Lines<'t> {
    /// All; none of a file of another version.
    fn of(text: &'t [u8]) -> Self {
        Self(text.strip_prefix(HEAD).unwrap_or_default())
    }

    /// Those from this id on.
    fn from(self, id: &ContainerId) -> Self {
        // What begins before `low` is of smaller ids, what begins at `high` or after it is not.
        let (mut low, mut high) = (0, self.0.len());
        while low < high {
            let middle = low + (high - low) / 2;
            let newline = |byte: &u8| *byte == b'\n';
            let begin = low + self.0[low..middle].iter().rposition(newline).map_or(0, |at| at + 1);
            let end =
                self.0[begin..high].iter().position(newline).map_or(high, |at| begin + at + 1);
            match self.0[begin..end] < *id.as_str().as_bytes() {
                true => low = end,
                false => high = begin,
            }
        }
        Self(&self.0[low..])
    }

    /// The line of an id that is greater than those which were asked for before.
    fn pass(&mut self, id: &ContainerId) -> Option<Kept<'t>> {
        loop {
            if self.0.is_empty() {
                return None;
            }
            let end = self.0.iter().position(|byte| *byte == b'\n').unwrap_or(self.0.len());
            let kept = Kept::of(&self.0[..end]);
            let order = kept.map_or(Ordering::Less, |kept| kept.id.cmp(id.as_str().as_bytes()));
            if order == Ordering::Greater {
                return None;
            }
            self.0 = self.0.get(end + 1..).unwrap_or_default();
            if order == Ordering::Equal {
                return kept;
            }
        }
    }
}

/// What was found of one, and the time of change for which that holds, if it may be kept.
struct Found {
    listed: Box<Listed>,
    changed_ns: Option<i128>,
    is_new: bool,
}

fn changed_ns(stat: &Stat) -> i128 {
    i128::from(stat.st_mtime) * 1_000_000_000 + i128::from(stat.st_mtime_nsec)
}

impl Engine {
    /// What a list shows of all containers, oldest first. One that is being removed is left out; one whose
    /// record is damaged is an error, named.
    #[allow(
        clippy::vec_box,
        reason = "half a kilobyte each, and who has the list sorts and sifts it"
    )]
    pub fn list(&self) -> Result<Vec<Box<Listed>>> {
        // ORDER: who has processes, then the directories: one that starts or wakes meanwhile is shown as it
        // was before, or as it is.
        let awake: HashSet<ContainerId> = self.started()?.into_iter().collect();
        let path = self.places().lib.join("list");
        let (ids, text) = std::thread::scope(|scope| {
            let ids = scope.spawn(|| {
                let mut ids = self.ids()?;
                ids.sort_unstable();
                Ok::<_, Error>(ids)
            });
            let text = fs::read(&path).unwrap_or_default(); // nothing depends on it
            (ids.join().unwrap_or_else(|panic| resume_unwind(panic)), text)
        });
        let ids = ids?;
        let lines = Lines::of(&text);
        // Of ten thousand each costs a few system calls: all processors take part.
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let part = ids.len().div_ceil(cpus).max(PART_MIN);
        let mut all = std::thread::scope(|scope| {
            let awake = &awake;
            let glance = |ids| scope.spawn(move || self.glance(ids, awake, lines));
            // What the others allocate they get page by page (malloc(3), arenas): the first part is ours.
            let (ours, theirs) = ids.split_at(part.min(ids.len()));
            let parts: Vec<_> = theirs.chunks(part).map(glance).collect();
            let mut all = self.glance(ours, awake, lines)?;
            all.reserve(theirs.len());
            for part in parts {
                all.extend(part.join().unwrap_or_else(|panic| resume_unwind(panic))?);
            }
            Ok::<_, Error>(all)
        })?;
        // ORDER: the file is written while they are in the order of their ids.
        let anew = all.iter().filter(|found| found.is_new).count();
        if anew >= ANEW_MIN.max(all.len() / ANEW_IN) {
            let _ = self.keep(&all); // the next one looks at all of them again
        }
        // Those of one second stay in the order of their ids.
        all.sort_by_cached_key(|found| found.listed.created_unix_s);
        Ok(all.into_iter().map(|found| found.listed).collect())
    }

    /// What is found of some, in the order of their ids.
    fn glance(
        &self,
        ids: &[ContainerId],
        awake: &HashSet<ContainerId>,
        lines: Lines<'_>,
    ) -> Result<Vec<Found>> {
        let Some(first) = ids.first() else { return Ok(Vec::new()) };
        let mut lines = lines.from(first);
        let path = self.places().containers();
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let containers = rustix::fs::open(&path, flags, Mode::empty());
        let containers = containers.map_err(|e| Error::file("cannot open", &path)(e.into()))?;
        let settled = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default() - SETTLED;
        let mut all = Vec::with_capacity(ids.len());
        for id in ids {
            // ORDER: the time, then the files.
            let at = match awake.contains(id) {
                true => None,
                false => statat(&containers, id.as_str(), AtFlags::SYMLINK_NOFOLLOW).ok(),
            };
            let at = at.map(|stat| changed_ns(&stat));
            let known = lines.pass(id).filter(|kept| Some(kept.changed_ns) == at);
            let known = known.and_then(|kept| serde_json::from_slice(kept.json).ok());
            let found = match known {
                Some(listed) => Found { listed, changed_ns: at, is_new: false },
                None => match self.inspect(id) {
                    Ok(details) => {
                        // One that was started in between is another matter already.
                        let rests = matches!(
                            details.state,
                            State::Created | State::Asleep | State::Stopped
                        );
                        let holds = |at: &i128| rests && *at <= settled.as_nanos() as i128;
                        let changed_ns = at.filter(holds);
                        let is_new = changed_ns.is_some();
                        Found { listed: Box::new(details.into()), changed_ns, is_new }
                    }
                    Err(Error::NoContainer(_)) => continue,
                    Err(e) => return Err(e),
                },
            };
            all.push(found);
        }
        Ok(all)
    }

    /// Writes the file anew, if nobody else is at it.
    fn keep(&self, all: &[Found]) -> Result<()> {
        let lock = self.places().run.join("list.lock");
        let Some(_alone) = Lock::try_take_new(&lock)? else { return Ok(()) };
        let mut text = HEAD.to_vec();
        for Found { listed, changed_ns, .. } in all {
            let Some(changed_ns) = changed_ns else { continue };
            text.extend_from_slice(format!("{} {changed_ns} ", listed.id).as_bytes());
            if serde_json::to_writer(&mut text, listed).is_ok() {
                text.push(b'\n');
            }
        }
        disk::write(&self.places().lib.join("list"), &text, Durable::No)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u8) -> ContainerId {
        ContainerId::from_bytes([number; 16])
    }

    /// A file with lines of these.
    fn file(numbers: &[u8]) -> Vec<u8> {
        let mut text = HEAD.to_vec();
        for number in numbers {
            let json = "x".repeat(usize::from(*number));
            text.extend_from_slice(format!("{} {number} {json}\n", id(*number)).as_bytes());
        }
        text
    }

    #[test]
    fn every_line_is_found_from_wherever_one_begins() {
        let text = file(&[2, 3, 5, 200, 201, 255]);
        for first in 0..=255 {
            let mut lines = Lines::of(&text).from(&id(first));
            for number in first..=255 {
                let is_there = [2, 3, 5, 200, 201, 255].contains(&number);
                let found = lines.pass(&id(number));
                let found = found.map(|kept| (kept.changed_ns, kept.json.len()));
                let wanted = is_there.then_some((i128::from(number), usize::from(number)));
                assert_eq!(found, wanted, "{number} from {first} on");
            }
        }
    }

    #[test]
    fn what_is_no_line_or_not_in_its_place_counts_as_missing() {
        let mut text = file(&[7, 4]);
        assert!(Lines::of(&text).pass(&id(7)).is_some());
        assert!(Lines::of(&text).pass(&id(4)).is_none());
        for garbage in ["\n", "\n\n", "no line\n", "\u{0}", "zz 1", "zz x y\n"] {
            let mut text = text.clone();
            text.extend_from_slice(garbage.as_bytes());
            for number in 0..=255 {
                Lines::of(&text).from(&id(number)).pass(&id(number));
            }
        }
        // A file that was cut.
        while text.pop().is_some() {
            Lines::of(&text).from(&id(4)).pass(&id(7));
        }
        assert!(Lines::of(b"containers 1\n00 1 {}\n").0.is_empty());
    }
}
