//! The list of all containers, for a hundred thousand as well.
//!
//! For a container without processes, the listed facts are in the files of its directory. Those
//! files are never written in place: they are created, replaced and removed by name (rename(2),
//! unlink(2)). As long as the directory's time is unchanged, a cached result is therefore valid.
//! The cache is `LIB/list`: one line per container, with its id, the directory's time of change
//! (st_mtime, in nanoseconds) and the listed facts as JSON. If the time is unchanged, one statx(2)
//! is enough. A container with processes is always read.
//!
//! The lines are sorted by id. Each processor merges a part of the ids with its part of the lines,
//! so no index of a hundred thousand entries is needed.
//!
//! No result depends on the file. An invalid or misplaced line counts as missing; a list that finds
//! many missing lines writes the file again, if it can.
//!
//! Uses `ground`, `state`, `unwoken` and `inspect`.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::net::IpAddr;
use std::panic::resume_unwind;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dormouse_api::{Port, Summary, WakeFailed, rfc3339};
use dormouse_model::{Config, ContainerId, Name, NetMode, Publish, RootSource, Spec, State};
use rustix::fs::{AtFlags, Mode, OFlags, Stat, statat};
use serde::{Deserialize, Serialize};

use crate::disk::{self, Durable, Lock};
use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::inspect::{self, Details};
use crate::state::Exit;
use crate::unwoken::{self, FailedWake};

/// First line of the file. The number changes with the definition of [`Listed`], and with the
/// lines' order.
const HEAD: &[u8] = b"containers 4\n";
/// A thread handles at least this many containers.
const PART_MIN: usize = 200;
/// The file is written again if at least so many containers, and one in so many of all, were not in
/// it.
const ANEW_MIN: usize = 100;
const ANEW_IN: usize = 50;
/// LIMIT: two changes in one tick of the clock leave the same time (up to 10 ms, before Linux
/// 6.13). A container that changed within this time is not cached.
const SETTLED: Duration = Duration::from_secs(1);

/// The listed facts about a container.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Listed {
    /// Identity.
    pub id: ContainerId,
    /// Name given by the operator.
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
    /// Host pid of its first process, while it lives.
    #[serde(skip)]
    pub pid: Option<u32>,
    /// When it was last started, in milliseconds since the epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_unix_ms: Option<i64>,
    /// When it fell asleep or became drowsy, if it is in that state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asleep_unix_ms: Option<i64>,
    /// Last exit; `None` if there was none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<Exit>,
    /// Why it could not be woken, while it is asleep.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed_wake: Option<FailedWake>,
    /// It is asleep because it has used its memory.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_short_of_memory: bool,
    /// Its memory above its guarantee, in bytes, if it is asleep because the host was short.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evicted_above_bytes: Option<u64>,
    /// It is asleep and warm. One that is has a directory in RUN and is always read.
    #[serde(skip)]
    pub is_warm: bool,
}

impl From<Details> for Listed {
    fn from(details: Details) -> Self {
        let Details {
            config,
            state,
            pid,
            started_unix_ms,
            asleep_unix_ms,
            exit,
            failed_wake,
            is_short_of_memory,
            evicted_above_bytes,
            is_warm,
            ..
        } = details;
        let Config { id, name, created_unix_s, addresses, spec, .. } = config;
        let Spec { root, process, net, publish, labels, .. } = spec;
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
            failed_wake,
            is_short_of_memory,
            evicted_above_bytes,
            is_warm,
        }
    }
}

impl Listed {
    /// Returns the facts as they are shown to programs.
    pub fn summary(&self) -> Summary<'_> {
        let ended = self.exit.as_ref().filter(|_| !self.state.is_alive());
        let (image, image_id) = match &self.root {
            RootSource::Image { reference, id } => (reference.to_string(), Some(id.as_str())),
            RootSource::Directory(dir) => (dir.display().to_string(), None),
        };
        let (network, domain) = (self.net.as_str(), self.net.domain().map(Name::as_str));
        Summary {
            id: self.id.as_str(),
            name: self.name.as_str(),
            image,
            image_id,
            state: self.state.as_str(),
            pid: self.pid,
            address: self.addresses.first().copied(),
            addresses: &self.addresses,
            network,
            domain,
            ports: self.publish.iter().map(Port::from).collect(),
            command: &self.args,
            labels: &self.labels,
            created: rfc3339(self.created_unix_s.saturating_mul(1000)),
            started: self.started_unix_ms.map(rfc3339),
            asleep: self.asleep_unix_ms.map(rfc3339),
            finished: ended.map(|e| rfc3339(e.finished_unix_ms)),
            exit_code: ended.and_then(|e| e.code),
            oom_killed: self.exit.as_ref().is_some_and(|e| e.oom_killed),
            warm: self.is_warm,
            wake_failed: self.failed_wake.as_ref().map(|failed| WakeFailed {
                cause: &failed.cause,
                since: rfc3339(failed.since_unix_ms),
                last: rfc3339(failed.last_unix_ms),
                attempts: failed.attempts,
            }),
        }
    }
}

/// A line of the file.
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

/// The remaining lines of the file.
#[derive(Debug, Clone, Copy)]
struct Lines<'t>(&'t [u8]);

impl<'t> Lines<'t> {
    /// Returns all lines; none for a file of another version.
    fn of(text: &'t [u8]) -> Self {
        Self(text.strip_prefix(HEAD).unwrap_or_default())
    }

    /// Returns the lines from this id on.
    fn from(self, id: &ContainerId) -> Self {
        // Lines before `low` have smaller ids; lines at `high` or after it do not.
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

    /// Returns the line of an id; the ids of successive calls must increase.
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

/// A container's facts, and the directory time for which they hold, if they may be cached.
struct Found {
    listed: Box<Listed>,
    changed_ns: Option<i128>,
    is_new: bool,
}

fn changed_ns(stat: &Stat) -> i128 {
    i128::from(stat.st_mtime) * 1_000_000_000 + i128::from(stat.st_mtime_nsec)
}

/// Returns the listed facts of all containers, oldest first. A container that is being removed
/// is left out; a damaged record is an error that names the file.
#[allow(clippy::vec_box, reason = "half a kilobyte each, and callers sort and filter the list")]
pub(crate) fn list(ground: &Ground) -> Result<Vec<Box<Listed>>> {
    list_with(ground, true)
}

/// Does the same, and writes nothing.
#[allow(clippy::vec_box, reason = "as of `list`")]
pub(crate) fn list_only(ground: &Ground) -> Result<Vec<Box<Listed>>> {
    list_with(ground, false)
}

#[allow(clippy::vec_box, reason = "as of `list`")]
fn list_with(ground: &Ground, keeps: bool) -> Result<Vec<Box<Listed>>> {
    // ORDER: the containers with processes, then the directories: a container that starts or
    // wakes meanwhile is shown in its old or its new state. The time of its directory does not show a
    // failed wake either.
    let mut awake: HashSet<ContainerId> = ground.started()?.into_iter().collect();
    awake.extend(unwoken::in_run(ground));
    let path = ground.places.lib.join("list");
    let (ids, text) = std::thread::scope(|scope| {
        let ids = scope.spawn(|| {
            let mut ids = ground.ids()?;
            ids.sort_unstable();
            Ok::<_, Error>(ids)
        });
        let text = fs::read(&path).unwrap_or_default(); // only a cache
        (ids.join().unwrap_or_else(|panic| resume_unwind(panic)), text)
    });
    let ids = ids?;
    let lines = Lines::of(&text);
    // Each of ten thousand containers costs a few system calls: use all processors.
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let part = ids.len().div_ceil(cpus).max(PART_MIN);
    let mut all = std::thread::scope(|scope| {
        let awake = &awake;
        let begin = |ids| scope.spawn(move || glance(ground, ids, awake, lines));
        // Other threads get their memory page by page (malloc(3), arenas): the first part is
        // done here.
        let (ours, theirs) = ids.split_at(part.min(ids.len()));
        let parts: Vec<_> = theirs.chunks(part).map(begin).collect();
        let mut all = glance(ground, ours, awake, lines)?;
        all.reserve(theirs.len());
        for part in parts {
            all.extend(part.join().unwrap_or_else(|panic| resume_unwind(panic))?);
        }
        Ok::<_, Error>(all)
    })?;
    // ORDER: the file is written while the list is sorted by id.
    let anew = all.iter().filter(|found| found.is_new).count();
    if keeps && anew >= ANEW_MIN.max(all.len() / ANEW_IN) {
        let _ = keep(ground, &all); // on failure the next list reads all again
    }
    // Stable: containers of the same second stay sorted by id.
    all.sort_by_cached_key(|found| found.listed.created_unix_s);
    Ok(all.into_iter().map(|found| found.listed).collect())
}

/// Returns the facts of some containers, in the order of their ids.
fn glance(
    ground: &Ground,
    ids: &[ContainerId],
    awake: &HashSet<ContainerId>,
    lines: Lines<'_>,
) -> Result<Vec<Found>> {
    let Some(first) = ids.first() else { return Ok(Vec::new()) };
    let mut lines = lines.from(first);
    let path = ground.places.containers();
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let containers = rustix::fs::open(&path, flags, Mode::empty());
    let containers = containers.map_err(|e| Error::file("cannot open", &path)(e.into()))?;
    let settled = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default() - SETTLED;
    let mut all = Vec::with_capacity(ids.len());
    for id in ids {
        // ORDER: the time is read before the files.
        let at = match awake.contains(id) {
            true => None,
            false => statat(&containers, id.as_str(), AtFlags::SYMLINK_NOFOLLOW).ok(),
        };
        let at = at.map(|stat| changed_ns(&stat));
        let known = lines.pass(id).filter(|kept| Some(kept.changed_ns) == at);
        let known = known.and_then(|kept| serde_json::from_slice(kept.json).ok());
        let found = match known {
            Some(listed) => Found { listed, changed_ns: at, is_new: false },
            None => match inspect::inspect(ground, id) {
                Ok(details) => {
                    // A container that was started in between is not cached.
                    let rests =
                        matches!(details.state, State::Created | State::Asleep | State::Stopped);
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

/// Writes the file again, unless another process is doing so.
fn keep(ground: &Ground, all: &[Found]) -> Result<()> {
    let lock = ground.places.run.join("list.lock");
    let Some(_alone) = Lock::try_take_new(&lock)? else { return Ok(()) };
    let mut text = HEAD.to_vec();
    for Found { listed, changed_ns, .. } in all {
        let Some(changed_ns) = changed_ns else { continue };
        text.extend_from_slice(format!("{} {changed_ns} ", listed.id).as_bytes());
        if serde_json::to_writer(&mut text, listed).is_ok() {
            text.push(b'\n');
        }
    }
    disk::write(&ground.places.lib.join("list"), &text, Durable::No)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u8) -> ContainerId {
        ContainerId::from_bytes([number; 16])
    }

    #[test]
    fn summary_is_printed_as_by_earlier_versions() {
        let mut listed = Listed {
            id: id(0xab),
            name: "web".parse().unwrap(),
            root: RootSource::Image { reference: "alpine:3".parse().unwrap(), id: "cd".into() },
            created_unix_s: 1_700_000_000,
            args: vec!["nginx".into(), "-g".into()],
            net: NetMode::Address { domain: "default".parse().unwrap() },
            addresses: vec!["10.136.0.3".parse().unwrap(), "fd00::3".parse().unwrap()],
            publish: vec!["127.0.0.1:8080:80/udp".parse().unwrap()],
            labels: BTreeMap::from([("k".into(), "v".into())]),
            state: State::Asleep,
            pid: None,
            started_unix_ms: Some(1_700_000_001_002),
            asleep_unix_ms: Some(1_700_000_003_000),
            exit: Some(Exit {
                code: Some(137),
                signal: Some(9),
                oom_killed: true,
                started_unix_ms: 1,
                finished_unix_ms: 1_600_000_000_000,
                failures: 0,
                short_runs: 0,
                stopped: false,
            }),
            failed_wake: None,
            is_short_of_memory: false,
            evicted_above_bytes: None,
            is_warm: false,
        };
        let json = |listed: &Listed| serde_json::to_string(&listed.summary()).unwrap();
        assert_eq!(
            json(&listed),
            concat!(
                r#"{"id":"abababababababababababababababab","name":"web","#,
                r#""image":"alpine:3","image_id":"cd","state":"asleep","pid":null,"#,
                r#""address":"10.136.0.3","addresses":["10.136.0.3","fd00::3"],"network":"address","#,
                r#""domain":"default","ports":[{"host_ip":"127.0.0.1","host_port":8080,"#,
                r#""container_port":80,"protocol":"udp"}],"command":["nginx","-g"],"#,
                r#""labels":{"k":"v"},"created":"2023-11-14T22:13:20.000Z","#,
                r#""started":"2023-11-14T22:13:21.002Z","finished":null,"#,
                r#""asleep":"2023-11-14T22:13:23.000Z","exit_code":null,"oom_killed":true}"#,
            )
        );
        (listed.state, listed.asleep_unix_ms) = (State::Stopped, None);
        (listed.root, listed.net) = (RootSource::Directory("/srv".into()), NetMode::None);
        let json = json(&listed);
        assert!(json.contains(r#""image":"/srv","image_id":null,"state":"stopped""#), "{json}");
        assert!(json.contains(r#""network":"none","domain":null"#), "{json}");
        assert!(
            json.contains(r#""finished":"2020-09-13T12:26:40.000Z","asleep":null,"exit_code":137"#)
        );
    }

    /// Returns a file with lines of these numbers.
    fn file(numbers: &[u8]) -> Vec<u8> {
        let mut text = HEAD.to_vec();
        for number in numbers {
            let json = "x".repeat(usize::from(*number));
            text.extend_from_slice(format!("{} {number} {json}\n", id(*number)).as_bytes());
        }
        text
    }

    #[test]
    fn every_line_is_found_from_any_start() {
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
    fn invalid_or_misplaced_line_counts_as_missing() {
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
        // A truncated file.
        while text.pop().is_some() {
            Lines::of(&text).from(&id(4)).pass(&id(7));
        }
        assert!(Lines::of(b"containers 1\n00 1 {}\n").0.is_empty());
    }
}
