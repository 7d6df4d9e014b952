//! The differences between two checkpoints of a container: the activity of its processes in
//! between.

use std::collections::BTreeMap;

use dormouse_parcel::{PageFiles, Reader};
use dormouse_record::{Error, Memory, PAGE_BYTES, Process, Records, Result, Thing};

/// One difference.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Difference {
    /// The process, by its id inside.
    pub pid: u32,
    /// The name that `ps` shows.
    pub process: String,
    /// The part that differs: `descriptor 5`, `memory at 7f0012340000`; empty for the process
    /// itself.
    pub what: String,
    /// How it differs.
    pub how: String,
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (pid, process) = (self.pid, &self.process);
        match self.what.is_empty() {
            true => write!(f, "process {pid} ({process}): {}", self.how),
            false => write!(f, "process {pid} ({process}), {}: {}", self.what, self.how),
        }
    }
}

/// All differences, process by process.
///
/// Processes are matched by pid, which may have been reused in between.
pub fn diff(old: &Reader, new: &Reader) -> Result<Vec<Difference>> {
    let by_pid = |records: &Records| -> BTreeMap<u32, usize> {
        records.processes.iter().enumerate().map(|(n, p)| (p.pid, n)).collect()
    };
    let (was, is) = (by_pid(old.records()), by_pid(new.records()));
    let mut all = Vec::new();
    for (pid, n) in &was {
        let process = &old.records().processes[*n];
        match is.get(pid) {
            None => all.push(tell(process, "", "is gone")),
            Some(n) => {
                one(&mut all, (old, process), (new, &new.records().processes[*n]))?;
            }
        }
    }
    for (_, n) in is.iter().filter(|(pid, _)| !was.contains_key(pid)) {
        all.push(tell(&new.records().processes[*n], "", "is new"));
    }
    all.sort_by_key(|difference| difference.pid);
    Ok(all)
}

fn tell(process: &Process, what: impl Into<String>, how: impl Into<String>) -> Difference {
    let name = process.name.clone();
    Difference { pid: process.pid, process: name, what: what.into(), how: how.into() }
}

fn one(
    all: &mut Vec<Difference>,
    (old, was): (&Reader, &Process),
    (new, is): (&Reader, &Process),
) -> Result<()> {
    let mut plain = |what: &str, was: String, now: String| {
        if was != now {
            all.push(tell(is, "", format!("{what} was {was}, is {now}")));
        }
    };
    plain("its name", was.name.clone(), is.name.clone());
    plain("its parent", was.parent.to_string(), is.parent.to_string());
    plain("its group", was.group.to_string(), is.group.to_string());
    let alive = |p: &Process| if p.ended.is_some() { "a zombie" } else { "alive" }.to_owned();
    plain("it", alive(was), alive(is));
    plain("the number of its threads", was.threads.len().to_string(), is.threads.len().to_string());
    let directory = |reader: &Reader, p: &Process| {
        p.directory.map_or_else(String::new, |n| describe(reader.records(), n))
    };
    plain("its working directory", directory(old, was), directory(new, is));
    let root = |p: &Process| p.root.clone().unwrap_or_else(|| "/".into());
    plain("its root", root(was), root(is));
    let shared = |of: Option<u32>| of.map_or_else(|| "none".into(), |pid| format!("{pid}"));
    plain("the process with its descriptors", shared(was.table_of), shared(is.table_of));
    plain("the process with its directory", shared(was.place_of), shared(is.place_of));
    descriptors(all, (old.records(), was), (new.records(), is));
    if let (Some(before), Some(after)) = (memory(old, was), memory(new, is)) {
        areas(all, is, before, after);
        pages(all, is, (before, old.pages()), (after, new.pages()))?;
    }
    Ok(())
}

fn memory<'r>(reader: &'r Reader, process: &Process) -> Option<&'r Memory> {
    process.memory.and_then(|n| reader.records().memories.get(n))
}

fn descriptors(
    all: &mut Vec<Difference>,
    (old, was): (&Records, &Process),
    (new, is): (&Records, &Process),
) {
    let table = |records: &Records, process: &Process| -> BTreeMap<u32, String> {
        let one = |d: &dormouse_record::Descriptor| (d.number, describe(records, d.object));
        process.descriptors.iter().map(one).collect()
    };
    let (was, now) = (table(old, was), table(new, is));
    for (number, before) in &was {
        let what = format!("descriptor {number}");
        match now.get(number) {
            None => all.push(tell(is, what, format!("was {before}, is closed"))),
            Some(after) if after != before => {
                all.push(tell(is, what, format!("was {before}, is {after}")));
            }
            Some(_) => {}
        }
    }
    for (number, after) in now.iter().filter(|(number, _)| !was.contains_key(number)) {
        all.push(tell(is, format!("descriptor {number}"), format!("is new: {after}")));
    }
}

/// A short description of an object, which is equal in two checkpoints if the object is.
fn describe(records: &Records, index: usize) -> String {
    let Some(object) = records.objects.get(index) else { return String::new() };
    let name = object.thing.name();
    match &object.thing {
        Thing::File(file) => format!("{name} '{}' at {}", file.path, file.offset),
        Thing::ProcessFile(file) => {
            format!("{name} '{}' at {}", file.whole_path(), file.offset)
        }
        Thing::Device(device) => format!("{name} '/dev/{}'", device.name),
        Thing::External(external) => format!("{name} '{}'", external.name),
        Thing::PipeEnd(end) => match records.objects.get(end.pipe).map(|o| &o.thing) {
            Some(Thing::Pipe(pipe)) => format!("{name} with {} bytes", pipe.content.0.len()),
            _ => name.to_owned(),
        },
        Thing::Listener(listener) => format!("{name} at {}", listener.address),
        Thing::TcpSocket(socket) => match (&socket.address, &socket.connection) {
            (Some(own), Some(it)) => format!("{name} from {own} to {}", it.peer),
            _ => name.to_owned(),
        },
        Thing::UnixSocket(socket) => {
            let bytes: usize = socket.on_its_way().map(|m| m.data.0.len()).sum();
            let path = socket.name.as_ref().map(|n| format!(" {n}")).unwrap_or_default();
            format!("{name}{path} with {bytes} bytes")
        }
        _ => name.to_owned(),
    }
}

/// Areas that were mapped or unmapped; an area that grew counts as both.
fn areas(all: &mut Vec<Difference>, is: &Process, before: &Memory, after: &Memory) {
    let ranges = |memory: &Memory| -> BTreeMap<u64, (u64, u32)> {
        memory.areas.iter().map(|a| (a.start, (a.end, a.access))).collect()
    };
    let (was, now) = (ranges(before), ranges(after));
    for (start, (end, access)) in &was {
        let how = match now.get(start) {
            Some((other, _)) if other != end => {
                format!("had {} bytes, has {}", end - start, other - start)
            }
            Some((_, other)) if other != access => "has another protection".into(),
            Some(_) => continue,
            None => "is unmapped".into(),
        };
        all.push(tell(is, format!("memory at {start:x}"), how));
    }
    for (start, (end, _)) in now.iter().filter(|(start, _)| !was.contains_key(start)) {
        let how = format!("is new, {} bytes", end - start);
        all.push(tell(is, format!("memory at {start:x}"), how));
    }
}

/// Pages with private contents: how many have changed, are new, or were removed.
fn pages(
    all: &mut Vec<Difference>,
    is: &Process,
    (before, old): (&Memory, &PageFiles),
    (after, new): (&Memory, &PageFiles),
) -> Result<()> {
    let (mut was, mut now) = (numbers(before).peekable(), numbers(after).peekable());
    let (mut changed, mut came, mut went, mut same) = (0u64, 0u64, 0u64, 0u64);
    loop {
        let order = match (was.peek(), now.peek()) {
            (None, None) => break,
            (Some(_), None) => std::cmp::Ordering::Less,
            (None, Some(_)) => std::cmp::Ordering::Greater,
            (Some((one, _)), Some((other, _))) => one.cmp(other),
        };
        let (one, other) = match order {
            std::cmp::Ordering::Less => {
                went += 1;
                was.next();
                continue;
            }
            std::cmp::Ordering::Greater => {
                came += 1;
                now.next();
                continue;
            }
            std::cmp::Ordering::Equal => (was.next(), now.next()),
        };
        let (Some((_, one)), Some((_, other))) = (one, other) else { break };
        match page(old, one)? == page(new, other)? {
            true => same += 1,
            false => changed += 1,
        }
    }
    if changed + came + went > 0 {
        let how =
            format!("{changed} pages differ, {came} are new, {went} are gone, {same} are the same");
        all.push(tell(is, "memory", how));
    }
    Ok(())
}

/// Address and number of each page, by address.
fn numbers(memory: &Memory) -> impl Iterator<Item = (u64, u64)> + '_ {
    let runs = memory.areas.iter().flat_map(|area| &area.runs);
    runs.flat_map(|run| (0..run.pages).map(|n| (run.address + n * PAGE_BYTES, run.first + n)))
}

fn page(files: &PageFiles, number: u64) -> Result<[u8; PAGE_BYTES as usize]> {
    let mut page = [0; PAGE_BYTES as usize];
    files
        .read_exact_at(&mut page, number * PAGE_BYTES)
        .map_err(Error::file("cannot read", "pages"))?;
    Ok(page)
}

#[cfg(test)]
mod tests {
    use dormouse_parcel::{DirSink, Sink};
    use dormouse_record::sample::small;
    use dormouse_record::{Descriptor, Device, Run};

    use super::*;

    fn reader(dir: &std::path::Path, name: &str, records: Records, fill: u8) -> Reader {
        let place = dir.join(name);
        let mut writer = Box::new(DirSink::begin(&place).unwrap());
        writer.append(&vec![fill; records.pages.bytes as usize]).unwrap();
        let records = Records { pages: writer.pages().unwrap(), ..records };
        writer.publish(&records).unwrap();
        Reader::open(&place).unwrap()
    }

    #[test]
    fn only_differences_are_reported() {
        let dir = tempfile::tempdir().unwrap();
        let one = reader(dir.path(), "one", small(), 1);
        assert_eq!(diff(&one, &reader(dir.path(), "same", small(), 1)).unwrap(), []);
        let mut records = small();
        let device = Device { name: "null".into(), flags: 0 };
        records.objects.push(Thing::Device(device).into());
        let process = &mut records.processes[0];
        process.name = "b".into();
        process.descriptors.push(Descriptor { number: 3, object: 1, close_on_exec: false });
        let mut child = process.clone();
        (child.pid, child.parent, child.threads[0].tid) = (2, 1, 2);
        child.memory = Some(records.memories.len());
        records.processes.push(child);
        records.memories.push(records.memories[0].clone());
        let area = &mut records.memories[0].areas[0];
        area.end += PAGE_BYTES;
        area.runs.push(Run { address: area.end - PAGE_BYTES, pages: 1, first: 0 });
        let other = reader(dir.path(), "other", records, 2);
        let told: Vec<String> =
            diff(&one, &other).unwrap().iter().map(ToString::to_string).collect();
        assert_eq!(
            told,
            [
                "process 1 (b): its name was a, is b",
                "process 1 (b), descriptor 3: is new: device '/dev/null'",
                "process 1 (b), memory at 100000: had 4096 bytes, has 8192",
                "process 1 (b), memory: 1 pages differ, 1 are new, 0 are gone, 0 are the same",
                "process 2 (b): is new",
            ]
        );
        let back: Vec<String> = diff(&other, &one).unwrap().iter().map(|d| d.how.clone()).collect();
        assert!(back.contains(&"is gone".to_owned()), "{back:?}");
    }
}
