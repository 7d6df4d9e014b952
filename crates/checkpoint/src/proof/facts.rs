//! The records of a checkpoint as facts ([`dormouse_record::fact`]), with names that do not depend on their
//! order.

use std::collections::{BTreeSet, HashMap};

use dormouse_parcel::PageFiles;
use dormouse_record::fact::Facts;
use dormouse_record::{
    Area, Backing, Bytes, Error, Mounts, PAGE_BYTES, Process, Records, Result, Run, StatePart,
    Thing, TmpfsEntry, TmpfsKind, UnixPeer,
};
use serde_json::Value;

use crate::remaining;

/// The part of an rseq that the kernel writes.
const RSEQ_BYTES: usize = 28;
/// A time that may pass between two looks on a busy machine.
const SHORT_NS: u64 = 20_000_000_000;

/// Fields of records with the number of an object.
const REFERENCES: &[&str] = &[
    "object",
    "directory",
    "program",
    "pipe",
    "terminal",
    "queue",
    "listener",
    "namespace",
    "deleted",
    "net",
    "user",
    "mounts",
    "uts",
    "ipc",
    "time",
    "time_for_children",
    "cgroup_namespace",
    "contents",
];

/// Names of objects that do not depend on the order of the records: each is named by the first place
/// that leads to it.
struct Names<'v> {
    objects: &'v [Value],
    names: Vec<Option<String>>,
}

impl Names<'_> {
    /// The names of all objects, and the objects that processes lead to.
    fn of(records: &Records, value: &Value) -> (Vec<String>, BTreeSet<usize>) {
        let objects = elements(value, "objects");
        let mut names = Names { objects, names: vec![None; objects.len()] };
        let mut processes: Vec<(&Process, &Value)> =
            records.processes.iter().zip(elements(value, "processes")).collect();
        processes.sort_by_key(|(process, _)| process.pid);
        for (process, fields) in processes {
            let place = process.pid.to_string();
            names.visit(&place, "", fields);
            if let Some(n) = process.memory {
                names.visit(&format!("{place}:memory"), "", &value["memories"][n]);
            }
        }
        let is_reached = |n: &usize| names.names[*n].is_some();
        let reached: BTreeSet<usize> = (0..objects.len()).filter(is_reached).collect();
        // Objects that no process leads to: by their records, each kind by itself, and not by one another: a twin
        // has other objects of some kinds.
        let mut rest: Vec<(String, usize)> = (0..objects.len())
            .filter(|n| names.names[*n].is_none())
            .map(|n| (objects[n].to_string(), n))
            .collect();
        rest.sort();
        let mut order = HashMap::new();
        for (_, n) in rest {
            let kind = objects[n]["kind"].as_str().unwrap_or_default();
            let next = order.entry(kind).or_insert(0);
            names.names[n] = Some(format!("{kind}:{next}"));
            *next += 1;
        }
        (names.names.into_iter().map(Option::unwrap_or_default).collect(), reached)
    }

    fn name(&mut self, n: usize, place: String) {
        if self.names.get(n).is_some_and(Option::is_none) {
            let object = &self.objects[n];
            // Each process opens its own again (docs/state.md).
            let place = match object["kind"].as_str() {
                Some("pid-fd") => format!("pid-fd:{}:{}", object["pid"], object["flags"]),
                Some("process-file") => {
                    let (pid, path, flags) = (&object["pid"], &object["path"], &object["flags"]);
                    format!("process-file:{pid}:{path}:{flags}:{}", object["offset"])
                }
                _ => place,
            };
            self.names[n] = Some(place.clone());
            self.visit(&place, "", object);
        }
    }

    fn visit(&mut self, place: &str, field: &str, value: &Value) {
        match value {
            Value::Object(fields) => {
                for (name, value) in fields {
                    self.visit(place, name, value);
                    if let (true, Some(n)) = (REFERENCES.contains(&name.as_str()), value.as_u64()) {
                        let number = fields.get("number").or_else(|| fields.get("start"));
                        let number = number.map_or_else(String::new, Value::to_string);
                        self.name(n as usize, format!("{place}:{name}{number}"));
                    }
                }
            }
            Value::Array(list) => {
                for (n, element) in list.iter().enumerate() {
                    if let ("descriptors", Some(object)) = (field, element.as_u64()) {
                        self.name(object as usize, format!("{place}:sent{n}"));
                    }
                    self.visit(place, "", element);
                }
            }
            _ => {}
        }
    }
}

/// Replaces the numbers of objects by their names.
fn rename(value: &mut Value, field: &str, names: &[String]) {
    let name = |value: &Value| names.get(value.as_u64()? as usize).cloned().map(Value::String);
    match value {
        Value::Object(fields) => {
            for (field, value) in fields.iter_mut() {
                if let (true, Some(name)) = (REFERENCES.contains(&field.as_str()), name(value)) {
                    *value = name;
                } else {
                    rename(value, field, names);
                }
            }
        }
        Value::Array(list) => {
            for element in list {
                match name(element) {
                    Some(name) if field == "descriptors" => *element = name,
                    _ => rename(element, "", names),
                }
            }
        }
        _ => {}
    }
}

/// The records of a checkpoint, and its pages, as facts.
///
/// Errors: of a read of the pages.
pub fn facts(records: &Records, pages: &PageFiles) -> Result<Facts> {
    all(records, Some(pages))
}

/// The same without pages, and without open files that no process leads to.
pub(super) fn of_structure(records: &Records) -> Result<Facts> {
    all(records, None)
}

fn all(records: &Records, contents: Option<&PageFiles>) -> Result<Facts> {
    let mut facts = Facts::default();
    let mut value = json(records)?;
    let (names, reached) = Names::of(records, &value);
    rename(&mut value, "", &names);
    walk(&mut facts, "about", &value["about"]);
    for (process, value) in records.processes.iter().zip(list(&mut value, "processes")) {
        if let Some(n) = process.memory {
            value["memory"] = owner(records, n).into();
        }
        for (thread, value) in process.threads.iter().zip(list(value, "threads")) {
            let extended = in_one_form(&thread.extended.0, &records.about.cpu_state);
            value["extended"] = json(&Bytes(extended))?;
        }
        if contents.is_none() {
            for (thread, value) in process.threads.iter().zip(list(value, "threads")) {
                // A twin is read before it makes its call again, with the remaining time in this register.
                if let Some(register) = thread.time_limit.as_ref().and_then(remaining::register) {
                    value["registers"][register] = Value::Null;
                }
            }
        }
        walk(&mut facts, &format!("process/{}", process.pid), value);
    }
    for (n, value) in list(&mut value, "memories").iter_mut().enumerate() {
        let memory = &records.memories[n];
        let place = format!("memory/{}", owner(records, n));
        let areas = value["areas"].take();
        walk(&mut facts, &place, value);
        let threads = records.processes.iter().filter(|process| process.memory == Some(n));
        let threads = threads.flat_map(|process| &process.threads);
        let rseqs: Vec<u64> = threads.filter_map(|t| Some(t.rseq.as_ref()?.address)).collect();
        let mut whole: Vec<(&Area, u64, Value)> = Vec::new();
        for (area, value) in memory.areas.iter().zip(areas.as_array().into_iter().flatten()) {
            match whole.last_mut() {
                Some((last, _, of)) if continues(last, area) => {
                    of["end"] = value["end"].clone();
                    *last = area;
                }
                _ => whole.push((area, area.start, value.clone())),
            }
            let runs = (&area.runs[..], &rseqs[..]);
            let is_of_file = matches!(area.backing, Backing::Private { .. });
            if let Some(contents) = contents {
                pages(&mut facts, contents, &place, runs, is_of_file)?;
            }
        }
        for (_, start, value) in whole {
            walk(&mut facts, &format!("{place}/area/{start:x}"), &value);
        }
    }
    let mounts: HashMap<String, Vec<String>> = (0..names.len())
        .filter_map(|n| {
            let Thing::Mounts(mounts) = &records.objects[n].thing else { return None };
            Some((names[n].clone(), mount_names(mounts)))
        })
        .collect();
    let descriptors = records.processes.iter().flat_map(|process| &process.descriptors);
    let open: BTreeSet<usize> = descriptors.map(|descriptor| descriptor.object).collect();
    for (n, value) in list(&mut value, "objects").iter_mut().enumerate() {
        if contents.is_none()
            && !reached.contains(&n)
            && !is_without_process(&records.objects[n].thing)
        {
            continue;
        }
        if !open.contains(&n) && value["peer_credentials"].is_object() {
            // Only a process that has a socket open can read the id of a helper, which has exited (docs/state.md).
            value["peer_credentials"]["pid"] = Value::Null;
        }
        without_chance(&records.objects[n].thing, value, (&names[n], &mounts));
        const DIRECTORY: u64 = 0o40_000;
        if value["file_type"] == DIRECTORY || value["deleted"].is_string() {
            // Changed by files in it, as the restore makes them; files in memory are made anew.
            value["modified_ns"] = Value::Null;
            value["bytes"] = Value::Null;
        }
        if let (Thing::File(file), None) = (&records.objects[n].thing, contents)
            && file.deleted.is_none()
        {
            // The file is the same one, and other processes may write to it meanwhile.
            value["modified_ns"] = Value::Null;
            value["bytes"] = Value::Null;
        }
        let place = format!("object/{}", names[n]);
        walk(&mut facts, &place, value);
        if let (Some(runs), Some(contents)) = (runs_of(&records.objects[n].thing), contents) {
            pages(&mut facts, contents, &place, (runs, &[]), false)?;
        }
    }
    Ok(facts)
}

fn json(of: &impl serde::Serialize) -> Result<Value> {
    serde_json::to_value(of).map_err(|e| Error::damaged("records", e.to_string()))
}

/// Extended registers without the choice of the processor: a part that is as in a new program may be marked as such
/// in the header, or written (XSTATE_BV of XSAVE, Intel's manual, volume 1, 13.4). A processor may choose differently
/// each time.
fn in_one_form(extended: &[u8], parts: &[StatePart]) -> Vec<u8> {
    /// Offset of XSTATE_BV, behind the area of x87 and SSE.
    const HEADER: usize = 512;
    /// Initial control word of the x87 unit (FNINIT).
    const CONTROL: [u8; 2] = 0x037f_u16.to_le_bytes();
    let mut state = extended.to_vec();
    let Some(header) = state.get(HEADER..HEADER + 8) else { return state };
    let mut present = u64::from_le_bytes(header.try_into().expect("eight bytes"));
    // x87: all but the register MXCSR and its mask, which belong to SSE and are always written.
    let mut all = vec![(0, [0..24, 32..160]), (1, [160..416, 0..0])];
    for part in parts {
        let from = part.offset as usize;
        all.push((part.number, [from..from.saturating_add(part.bytes as usize), 0..0]));
    }
    for (number, ranges) in all {
        let bit = 1_u64.checked_shl(number).unwrap_or(0);
        let mut is_initial = true;
        for (n, range) in ranges.into_iter().enumerate() {
            let Some(bytes) = state.get_mut(range) else { continue };
            let mut initial = vec![0; bytes.len()];
            if (number, n) == (0, 0) {
                initial[..2].copy_from_slice(&CONTROL);
            }
            if present & bit == 0 {
                bytes.copy_from_slice(&initial);
            }
            is_initial &= *bytes == initial;
        }
        if is_initial {
            present &= !bit;
        }
    }
    state[HEADER..HEADER + 8].copy_from_slice(&present.to_le_bytes());
    state
}

/// Whether an area is the rest of the one before it: the kernel may divide memory in two without a difference
/// (PR_SET_MEMORY_MERGE), and a restore maps it at once.
fn continues(before: &Area, area: &Area) -> bool {
    let follows = |from: u64, to: u64| from + before.bytes() == to;
    let is_same = match (&before.backing, &area.backing) {
        (Backing::Anonymous, Backing::Anonymous) => true,
        (
            Backing::Private { object: one, offset: from },
            Backing::Private { object: other, offset: to },
        )
        | (
            Backing::Shared { object: one, offset: from },
            Backing::Shared { object: other, offset: to },
        ) => one == other && follows(*from, *to),
        _ => false,
    };
    let of = |area: &Area| (area.access, area.flags.clone());
    is_same && before.end == area.start && of(before) == of(area)
}

/// Names of mounts that do not depend on their order in the records: their places, and a number where one covers
/// another.
fn mount_names(mounts: &Mounts) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for mount in &mounts.mounts {
        let parent = mount.parent.map_or("", |parent| &names[parent]);
        let place = mount.place.trim_matches('/').replace('/', ":");
        let name = format!("{parent}:{place}");
        let covered = names.iter().filter(|other| other.split('#').next() == Some(&name)).count();
        names.push(if covered == 0 { name } else { format!("{name}#{covered}") });
    }
    names
}

/// Removes from the record of an object what depends on chance, or on the names of files for the time of a restore.
fn without_chance(
    thing: &Thing,
    value: &mut Value,
    (own, mounts): (&str, &HashMap<String, Vec<String>>),
) {
    match thing {
        Thing::Mounts(_) => {
            let names = &mounts[own];
            let Value::Array(all) = value["mounts"].take() else { return };
            let named = all.into_iter().enumerate().map(|(n, mut mount)| {
                if let Some(parent) = mount["parent"].as_u64() {
                    mount["parent"] = names[parent as usize].as_str().into();
                }
                let source = &mut mount["source"];
                let of = source["namespace"].as_str().and_then(|namespace| mounts.get(namespace));
                if let (Some(of), Some(number)) = (of, source["mount"].as_u64()) {
                    source["mount"] = of[number as usize].as_str().into();
                }
                (names[n].clone(), mount)
            });
            value["mounts"] = Value::Object(named.collect());
        }
        // Which of the links of a file has its contents in the record depends on the order of a directory.
        Thing::Tmpfs(tmpfs) => {
            for (entry, value) in tmpfs.entries.iter().zip(list(value, "entries")) {
                let file = match &entry.what {
                    TmpfsKind::Name { of } => of,
                    _ => &entry.path,
                };
                let is = |other: &&TmpfsEntry| match &other.what {
                    TmpfsKind::Name { of } => of == file,
                    _ => other.path == *file,
                };
                let links: Vec<&TmpfsEntry> = tmpfs.entries.iter().filter(is).collect();
                if links.len() > 1 {
                    let mut links: Vec<&str> = links.iter().map(|one| &*one.path).collect();
                    links.sort_unstable();
                    value["what"] = links.join(" ").into();
                }
                if matches!(entry.what, TmpfsKind::Fifo) {
                    // The restore writes its contents.
                    value["modified_ns"] = Value::Null;
                }
            }
        }
        Thing::Pipe(pipe)
            if pipe.path.as_ref().is_some_and(|path| path.contains("/.dormouse-")) =>
        {
            // The name for a restore has the number of the object.
            value["path"] = "(deleted)".into();
        }
        Thing::Timer(timer) if timer.value_ns == 0 && timer.cancelled_at_set_ns.is_some() => {
            // No time is left, so this is the time of the look.
            value["cancelled_at_set_ns"] = "now".into();
        }
        Thing::File(file) if file.deleted.is_some() => {
            // The restored file had another name for a moment, and is opened by its descriptor, which is a link.
            value["path"] = "(deleted)".into();
            value["flags"] = (file.flags & !(libc::O_NOFOLLOW as u32)).into();
        }
        Thing::UnixSocket(socket) => {
            // Of a datagram socket whose peer has closed: made as one of a pair (docs/state.md).
            const SOCK_DGRAM: i32 = 2;
            if socket.socket_type == SOCK_DGRAM && socket.peer == UnixPeer::Gone {
                value["peer_credentials"] = Value::Null;
            }
        }
        Thing::TcpSocket(tcp) if tcp.connection.is_some() || tcp.held || tcp.over => {
            // The bind of a restore sets it, and it has no effect on a connection (docs/state.md).
            const IPPROTO_IPV6: i32 = 41;
            const IPV6_V6ONLY: i32 = 26;
            let is_v6_only =
                |option: &Value| option["level"] == IPPROTO_IPV6 && option["name"] == IPV6_V6ONLY;
            if let Some(options) = value["options"].as_array_mut() {
                options.retain(|option| !is_v6_only(option));
            }
        }
        _ => {}
    }
}

/// A list of the records, or of one.
fn list<'v>(value: &'v mut Value, name: &str) -> &'v mut [Value] {
    value[name].as_array_mut().map_or(&mut [], Vec::as_mut_slice)
}

/// The same, to be read.
fn elements<'v>(value: &'v Value, name: &str) -> &'v [Value] {
    value[name].as_array().map_or(&[], Vec::as_slice)
}

/// Whether an object exists without a process that leads to it.
fn is_without_process(thing: &Thing) -> bool {
    matches!(
        thing,
        Thing::SystemVMemory(_)
            | Thing::SystemVSemaphores(_)
            | Thing::SystemVQueue(_)
            | Thing::MessageQueue(_)
    )
}

/// The process with an address space.
fn owner(records: &Records, memory: usize) -> String {
    let found = records.processes.iter().find(|process| process.memory == Some(memory));
    found.map_or_else(|| format!("of none {memory}"), |process| process.pid.to_string())
}

fn runs_of(thing: &Thing) -> Option<&[Run]> {
    match thing {
        Thing::SharedMemory(memory) => Some(&memory.runs),
        Thing::SystemVMemory(memory) => Some(&memory.runs),
        Thing::AioContext(context) => Some(&context.runs),
        Thing::MemoryFile(file) => Some(&file.runs),
        Thing::Deleted(file) => Some(&file.runs),
        _ => None,
    }
}

/// A fact for each page: its checksum. A page of zeros is like none, but in a private mapping of a
/// file.
///
/// The kernel writes the number of the CPU to the rseq of each thread, at the addresses `without`.
fn pages(
    facts: &mut Facts,
    contents: &PageFiles,
    place: &str,
    (runs, without): (&[Run], &[u64]),
    zeros_count: bool,
) -> Result<()> {
    let mut page = vec![0; PAGE_BYTES as usize];
    for run in runs {
        for n in 0..run.pages {
            let at = (run.first + n) * PAGE_BYTES;
            contents.read_exact_at(&mut page, at).map_err(Error::file("cannot read", "pages"))?;
            let first = run.address + n * PAGE_BYTES;
            for address in without.iter().filter(|at| (first..first + PAGE_BYTES).contains(at)) {
                let at = (address - first) as usize;
                let end = page.len().min(at + RSEQ_BYTES);
                page[at..end].fill(0);
            }
            if zeros_count || page.iter().any(|byte| *byte != 0) {
                let hash = blake3::hash(&page).to_hex();
                facts.add(format!("{place}/page/{first:x}"), &hash[..16]);
            }
        }
    }
    Ok(())
}

/// The field that names an element of a list; the number in the list where there is none.
fn key_of(list: &str, n: usize, element: &Value) -> String {
    let names: &[&str] = match list {
        "threads" => &["tid"],
        "descriptors" | "notices" | "watches" => &["number"],
        "limits" => &["resource"],
        "actions" => &["signal"],
        "timers" => &["id"],
        "interval_timers" => &["which"],
        "entries" => &["path"],
        "options" => &["level", "name"],
        "groups" => &["device", "address"],
        // The kernel lists them by the addresses of its objects.
        "items" => &["number", "data"],
        _ => &[],
    };
    let keys: Option<Vec<String>> =
        names.iter().map(|name| element.get(*name).map(Value::to_string)).collect();
    match keys {
        Some(keys) if !keys.is_empty() => keys.join("-"),
        _ => n.to_string(),
    }
}

/// Adds a fact for each leaf of a record.
fn walk(facts: &mut Facts, place: &str, value: &Value) {
    match value {
        Value::Object(fields) => {
            time_left(facts, place, value);
            for (name, field) in fields {
                let is_elsewhere = name == "runs"
                    || name.starts_with("value_") && fields.contains_key(&interval_of(name));
                if is_elsewhere {
                    continue;
                }
                match field {
                    Value::Array(list) => {
                        facts.add(format!("{place}/{name}/count"), list.len());
                        for (n, element) in list.iter().enumerate() {
                            let key = key_of(name, n, element);
                            walk(facts, &format!("{place}/{name}/{key}"), element);
                        }
                    }
                    Value::Null => {}
                    _ => walk(facts, &format!("{place}/{name}"), field),
                }
            }
        }
        Value::Array(list) => {
            for (n, element) in list.iter().enumerate() {
                walk(facts, &format!("{place}/{n}"), element);
            }
        }
        Value::String(text) => facts.add(place, text),
        other => facts.add(place, other),
    }
}

fn interval_of(value: &str) -> String {
    value.replacen("value_", "interval_", 1)
}

/// The state of a timer: disarmed, within an interval, or the time left.
fn time_left(facts: &mut Facts, place: &str, timer: &Value) {
    for unit in ["ns", "us"] {
        let number = |name: &str| timer.get(format!("{name}_{unit}"))?.as_u64();
        let (Some(value), Some(interval)) = (number("value"), number("interval")) else { continue };
        match value {
            0 if interval == 0 => facts.add(format!("{place}/state"), "disarmed"),
            // It may expire between two looks.
            _ if interval == 0 && unit == "ns" && value < SHORT_NS => {}
            // Zero is an expiry that was not taken yet.
            _ if value <= interval => facts.add(format!("{place}/state"), "periodic"),
            _ => {
                facts.add(format!("{place}/state"), "armed");
                facts.add(format!("{place}/left_{unit}"), value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_that_are_as_in_a_new_program_have_one_form() {
        let parts = [StatePart { number: 2, offset: 576, bytes: 256 }];
        let state = |present: u64, changes: &[(usize, u8)]| {
            let mut state = vec![0; 832];
            state[..2].copy_from_slice(&[0x7f, 0x03]);
            state[512..520].copy_from_slice(&present.to_le_bytes());
            changes.iter().for_each(|(at, byte)| state[*at] = *byte);
            in_one_form(&state, &parts)
        };
        assert_eq!(state(7, &[]), state(0, &[]));
        // A part that is marked as new has no contents.
        assert_eq!(state(3, &[(600, 1)]), state(0, &[]));
        // Whatever is marked as written counts: x87, SSE, the part beyond them.
        for at in [0, 4, 40, 200, 600] {
            assert_ne!(state(7, &[(at, 1)]), state(7, &[]), "{at}");
        }
        // So does the control register of SSE, which has no mark.
        assert_ne!(state(0, &[(24, 1)]), state(0, &[]));
        assert_eq!(in_one_form(&[1; 16], &parts), [1; 16]);
    }
}
