//! All containers at a glance, a hundred thousand as well.
//!
//! Of one without processes, what a list shows is in the files of its directory. They are never written
//! into: they come, are replaced and go by their names (rename(2), unlink(2)), so as long as the directory
//! was not changed, what was read is what would be read. It is kept in `LIB/list`: a line for each, with its
//! id, the time of that change (st_mtime, in nanoseconds) and what is shown of it, as JSON. Where the time is
//! the same, one statx(2) is all. One that has processes is looked at anew each time.
//!
//! Nothing depends on the file. A line that is none counts as missing; who finds many missing writes the
//! file anew, and who cannot leaves it.

use std::collections::{BTreeMap, HashMap, HashSet};
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

/// First line of the file. The number changes with what [`Listed`] is.
const HEAD: &[u8] = b"containers 1\n";
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
    changed_ns: i128,
    json: &'t [u8],
}

/// What was found of one, and the time of change for which that holds, if it may be kept.
struct Found {
    listed: Listed,
    changed_ns: Option<i128>,
    is_new: bool,
}

/// Lines by their ids; none of a file of another version.
fn lines(text: &[u8]) -> HashMap<&[u8], Kept<'_>> {
    let Some(text) = text.strip_prefix(HEAD) else { return HashMap::new() };
    let line = |line| {
        let mut words = <[u8]>::splitn(line, 3, |byte| *byte == b' ');
        let (id, changed, json) = (words.next()?, words.next()?, words.next()?);
        let changed_ns = std::str::from_utf8(changed).ok()?.parse().ok()?;
        Some((id, Kept { changed_ns, json }))
    };
    text.split(|byte| *byte == b'\n').filter_map(line).collect()
}

fn changed_ns(stat: &Stat) -> i128 {
    i128::from(stat.st_mtime) * 1_000_000_000 + i128::from(stat.st_mtime_nsec)
}

impl Engine {
    /// What a list shows of all containers, oldest first. One that is being removed is left out; one whose
    /// record is damaged is an error, named.
    pub fn list(&self) -> Result<Vec<Listed>> {
        // ORDER: who has processes, then the directories: one that starts or wakes meanwhile is shown as it
        // was before, or as it is.
        let awake: HashSet<ContainerId> = self.started()?.into_iter().collect();
        let ids = self.ids()?;
        let path = self.places().lib.join("list");
        let text = fs::read(&path).unwrap_or_default(); // nothing depends on it
        let kept = lines(&text);
        // Of ten thousand each costs a few system calls: all processors take part.
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let part = ids.len().div_ceil(cpus).max(PART_MIN);
        let mut all = std::thread::scope(|scope| {
            let (awake, kept) = (&awake, &kept);
            let glance = |ids| scope.spawn(move || self.glance(ids, awake, kept));
            // What the others allocate they get page by page (malloc(3), arenas): the first part is ours.
            let (ours, theirs) = ids.split_at(part.min(ids.len()));
            let parts: Vec<_> = theirs.chunks(part).map(glance).collect();
            let mut all = self.glance(ours, awake, kept)?;
            all.reserve(theirs.len());
            for part in parts {
                all.extend(part.join().unwrap_or_else(|panic| resume_unwind(panic))?);
            }
            Ok::<_, Error>(all)
        })?;
        let anew = all.iter().filter(|found| found.is_new).count();
        if anew >= ANEW_MIN.max(all.len() / ANEW_IN) {
            let _ = self.keep(&all); // the next one looks at all of them again
        }
        let key = |found: &Found| (found.listed.created_unix_s, found.listed.id.to_bytes());
        all.sort_by_cached_key(key);
        Ok(all.into_iter().map(|found| found.listed).collect())
    }

    fn glance(
        &self,
        ids: &[ContainerId],
        awake: &HashSet<ContainerId>,
        kept: &HashMap<&[u8], Kept<'_>>,
    ) -> Result<Vec<Found>> {
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
            let known = kept.get(id.as_str().as_bytes()).filter(|kept| Some(kept.changed_ns) == at);
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
                        Found { listed: details.into(), changed_ns, is_new }
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
