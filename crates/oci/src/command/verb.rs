//! The code of each verb.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dormouse_kernel::cgroup::{Forest, Layout};
use dormouse_kernel::weakened;
use serde::Serialize;
use serde_json::{Value, json};

use super::context::Context;
use super::flag::Given;
use crate::create::Create;
use crate::error::{Error, Result};
use crate::events::Event;
use crate::exec::Exec;
use crate::foreground::{self, Signals};
use crate::life::Signal;
use crate::spec::{self, Process};
use crate::store::{Record, Status};
use crate::{OCI_VERSION, feature};

/// Returns the descriptors of `--preserve-fds` and socket activation (sd_listen_fds(3)).
pub(super) fn inherited(given: &Given) -> Result<Vec<OwnedFd>> {
    let count = given.number::<u32>("preserve-fds")?.unwrap_or(0).saturating_add(listen_fds());
    // LIMIT: the capacity of a plan.
    if count > 1024 {
        return Err(Error::Usage("--preserve-fds: more than 1024".into()));
    }
    dormouse_keeper::inherited(3, count)
        .map_err(|(number, e)| Error::file("pass on", format!("descriptor {number}"))(e.into()))
}

/// How many sockets the caller listens at for the program. The variable may be another process's, which
/// passed it on without its descriptors: then there is none.
fn listen_fds() -> u32 {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    let is_other = number("LISTEN_PID").is_some_and(|pid| pid != std::process::id());
    let count = number("LISTEN_FDS").filter(|_| !is_other).unwrap_or(0);
    // LIMIT: what a plan can carry.
    let is_open = count <= 1024 && dormouse_keeper::inherited(3, count).is_ok();
    if is_open { count } else { 0 }
}

/// Prints a document; a closed pipe is no failure.
fn print(value: &impl serde::Serialize, pretty: bool) -> Result<()> {
    let text =
        if pretty { serde_json::to_string_pretty(value) } else { serde_json::to_string(value) };
    let text = text.map_err(|e| Error::Usage(e.to_string()))?;
    print_line(&text)
}

fn print_line(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(Error::file("write", "standard output")),
    }
}

pub(super) fn asked(context: &mut Context<'_>) -> Create {
    let given = context.given;
    let path = |name: &str| given.one(name).filter(|p| !p.is_empty()).map(PathBuf::from);
    Create {
        bundle: path("bundle").unwrap_or_else(|| ".".into()),
        console_socket: path("console-socket"),
        pid_file: path("pid-file"),
        pidfd_socket: path("pidfd-socket"),
        no_pivot: given.has("no-pivot"),
        no_new_keyring: given.has("no-new-keyring"),
        preserve: std::mem::take(&mut context.inherited),
        listen_fds: listen_fds(),
        keep_console: false,
    }
}

pub(super) fn create(mut context: Context<'_>) -> Result<u8> {
    let create = asked(&mut context);
    context.runtime.create(context.given.id()?, &create)?;
    Ok(0)
}

pub(super) fn start(context: Context<'_>) -> Result<u8> {
    context.runtime.start(context.given.id()?)?;
    Ok(0)
}

pub(super) fn run(mut context: Context<'_>) -> Result<u8> {
    let (runtime, given) = (context.runtime, context.given);
    let id = given.id()?;
    let mut create = asked(&mut context);
    let detach = given.has("detach");
    create.keep_console = !detach && create.console_socket.is_none();
    let signals = if detach { None } else { Some(Signals::hold()?) };
    let created = runtime.create(id, &create)?;
    let started = runtime.start(id);
    let Some(signals) = signals else {
        return match started {
            Ok(()) => Ok(0),
            Err(e) => {
                let _ = runtime.delete(id, true); // the first error is returned
                Err(e)
            }
        };
    };
    let ended = started.and_then(|()| foreground::stay(&created, signals));
    if !given.has("keep") || ended.is_err() {
        let deleted = runtime.delete(id, true);
        if ended.is_ok() {
            deleted?;
        }
    }
    Ok(ended? as u8)
}

/// The fields that `state` and `list` print of a container, in runc's order, which scripts rely on.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Described<'r> {
    oci_version: &'static str,
    id: &'r str,
    pid: u32,
    status: Status,
    bundle: &'r Path,
    rootfs: &'r Path,
    created: &'r str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    annotations: &'r BTreeMap<String, String>,
    owner: &'static str,
}

fn described(record: &Record, status: Status) -> Described<'_> {
    Described {
        oci_version: OCI_VERSION,
        id: &record.id,
        pid: if status == Status::Stopped { 0 } else { record.pid },
        status,
        bundle: &record.bundle,
        rootfs: &record.rootfs,
        created: &record.created,
        annotations: &record.annotations,
        owner: "",
    }
}

pub(super) fn state(context: Context<'_>) -> Result<u8> {
    let (record, status) = context.runtime.look(context.given.id()?)?;
    print(&described(&record, status), true)?;
    Ok(0)
}

pub(super) fn kill(context: Context<'_>) -> Result<u8> {
    let (id, signal) = match context.given.rest.as_slice() {
        [id] => (id, "TERM"),
        [id, signal] => (id, signal.as_str()),
        _ => return Err(Error::Usage("an ID is needed, and at most one signal".into())),
    };
    context.runtime.kill(id, signal.parse::<Signal>()?, context.given.has("all"))?;
    Ok(0)
}

pub(super) fn delete(context: Context<'_>) -> Result<u8> {
    if context.given.rest.is_empty() {
        return Err(Error::Usage("the container id is missing".into()));
    }
    let force = context.given.has("force");
    let mut first = Ok(0);
    for id in &context.given.rest {
        if let Err(e) = context.runtime.delete(id, force) {
            first = first.and(Err(e));
        }
    }
    first
}

/// Parses `UID[:GID]`, digits only (CVE-2026-30892); any other text is an error.
fn user(text: &str) -> Result<(u32, Option<u32>)> {
    let bad = || Error::Usage(format!("--user: {text:?} is not UID[:GID]"));
    let id = |text: &str| {
        let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        let plain = digits && (text == "0" || !text.starts_with('0'));
        // (uid_t) -1 means "no change" to the kernel.
        text.parse::<u32>().ok().filter(|id| plain && *id != u32::MAX).ok_or_else(bad)
    };
    match text.split_once(':') {
        None => Ok((id(text)?, None)),
        Some((uid, gid)) => Ok((id(uid)?, Some(id(gid)?))),
    }
}

/// Returns the process of `exec`, from a file or from flags over the container's own.
fn process(context: &Context<'_>) -> Result<(String, Process)> {
    let given = context.given;
    let (id, args) = match given.rest.split_first() {
        Some((id, args)) => (id.clone(), args),
        None => return Err(Error::Usage("the container id is missing".into())),
    };
    if let Some(path) = given.one("process") {
        let mut process: Process = spec::read(Path::new(path))?;
        process.terminal |= given.has("tty");
        return Ok((id, process));
    }
    let mut process = context.runtime.process(&id)?;
    process.args = args.to_vec();
    process.terminal = given.has("tty");
    process.console_size = None;
    process.env.extend(given.many("env").iter().cloned());
    if let Some(cwd) = given.one("cwd") {
        process.cwd = cwd.to_owned();
    }
    if let Some(text) = given.one("user") {
        let (uid, gid) = user(text)?;
        process.user.uid = uid;
        process.user.gid = gid.unwrap_or(process.user.gid);
    }
    for text in given.many("additional-gids") {
        let (gid, _) = user(text)?;
        process.user.additional_gids.push(gid);
    }
    if let Some(label) = given.one("process-label") {
        process.selinux_label = Some(label.to_owned());
    }
    if let Some(profile) = given.one("apparmor") {
        process.apparmor_profile = Some(profile.to_owned());
    }
    if given.one("no-new-privs").is_some() {
        process.no_new_privileges = given.has("no-new-privs");
    }
    if !given.many("cap").is_empty() {
        let more = given.many("cap").to_vec();
        let caps = process.capabilities.get_or_insert_default();
        // Never inheritable, and ambient only if it was inheritable already (CVE-2022-29162).
        for list in [&mut caps.bounding, &mut caps.effective, &mut caps.permitted] {
            list.extend(more.iter().cloned());
        }
        let inherited: Vec<_> =
            more.iter().filter(|name| caps.inheritable.contains(name)).cloned().collect();
        caps.ambient.extend(inherited);
        if weakened("exec-capabilities") {
            caps.inheritable.extend(more);
        }
    }
    Ok((id, process))
}

pub(super) fn exec(mut context: Context<'_>) -> Result<u8> {
    let given = context.given;
    let (id, process) = process(&context)?;
    let path = |name: &str| given.one(name).filter(|p| !p.is_empty()).map(PathBuf::from);
    let console_socket = path("console-socket");
    let detach = given.has("detach");
    let signals = if detach { None } else { Some(Signals::hold()?) };
    let exec = Exec {
        process,
        keep_console: !detach && console_socket.is_none(),
        console_socket,
        pid_file: path("pid-file"),
        pidfd_socket: path("pidfd-socket"),
        preserve: std::mem::take(&mut context.inherited),
        ignore_paused: given.has("ignore-paused"),
        cgroups: given.many("cgroup").to_vec(),
    };
    let created = context.runtime.exec(&id, &exec)?;
    match signals {
        None => Ok(0),
        Some(signals) => Ok(foreground::stay(&created, signals)? as u8),
    }
}

fn format(given: &Given) -> Result<bool> {
    match given.one("format") {
        None | Some("table" | "") => Ok(false),
        Some("json") => Ok(true),
        Some(other) => Err(Error::Usage(format!("invalid format option {other:?}"))),
    }
}

pub(super) fn ps(context: Context<'_>) -> Result<u8> {
    let given = context.given;
    let (id, options) = match given.rest.split_first() {
        Some((id, options)) => (id, options),
        None => return Err(Error::Usage("the container id is missing".into())),
    };
    let pids = context.runtime.pids(id)?;
    if format(given)? {
        print(&pids, false)?;
        return Ok(0);
    }
    let options = if options.is_empty() { vec!["-ef".to_owned()] } else { options.to_vec() };
    let out = std::process::Command::new("ps").args(options).output();
    let out = out.map_err(Error::file("execute", "ps"))?;
    let text = String::from_utf8_lossy(&out.stdout);
    let mut lines = text.lines();
    let head = lines.next().unwrap_or_default();
    let column = head.split_whitespace().position(|word| word == "PID");
    let column = column.ok_or_else(|| Error::Usage("ps shows no column PID".into()))?;
    print_line(head)?;
    for line in lines {
        let pid = line.split_whitespace().nth(column).and_then(|word| word.parse().ok());
        if pid.is_some_and(|pid: u32| pids.contains(&pid)) {
            print_line(line)?;
        }
    }
    Ok(0)
}

pub(super) fn list(context: Context<'_>) -> Result<u8> {
    let json = format(context.given)?;
    let mut all = Vec::new();
    for id in context.runtime.ids()? {
        // A container that is deleted meanwhile is left out.
        if let Ok((record, status)) = context.runtime.look(&id) {
            all.push((record, status));
        }
    }
    if context.given.has("quiet") {
        for (record, _) in &all {
            print_line(&record.id)?;
        }
        return Ok(0);
    }
    if json {
        let all: Vec<_> = all.iter().map(|(record, status)| described(record, *status)).collect();
        print(&all, false)?;
        return Ok(0);
    }
    let head = ["ID", "PID", "STATUS", "BUNDLE", "CREATED", "OWNER"].map(str::to_owned);
    let row = |(record, status): &(Record, Status)| {
        let pid = if *status == Status::Stopped { 0 } else { record.pid };
        let bundle = record.bundle.display().to_string();
        let (status, created) = (status.as_str().to_owned(), record.created.clone());
        [record.id.clone(), pid.to_string(), status, bundle, created, "root".to_owned()]
    };
    let rows: Vec<[String; 6]> = std::iter::once(head).chain(all.iter().map(row)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..6).map(width).collect();
    for row in &rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        print_line(cells.collect::<Vec<_>>().join("   ").trim_end())?;
    }
    Ok(0)
}

pub(super) fn pause(context: Context<'_>) -> Result<u8> {
    context.runtime.pause(context.given.id()?)?;
    Ok(0)
}

pub(super) fn resume(context: Context<'_>) -> Result<u8> {
    context.runtime.resume(context.given.id()?)?;
    Ok(0)
}

/// Parses a duration as Go writes it, in one unit: `500ms`, `5s`, `2m`, `1h`.
fn interval(text: &str) -> Result<Duration> {
    let bad = || Error::Usage(format!("--interval: {text:?} is no time such as 500ms, 5s, 2m"));
    let at = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(bad)?;
    let number: u64 = text[..at].parse().map_err(|_| bad())?;
    let ms = match &text[at..] {
        "ms" => Some(number),
        "s" => number.checked_mul(1000),
        "m" => number.checked_mul(60_000),
        "h" => number.checked_mul(3_600_000),
        _ => None,
    };
    ms.filter(|ms| *ms > 0).map(Duration::from_millis).ok_or_else(bad)
}

pub(super) fn events(context: Context<'_>) -> Result<u8> {
    let (runtime, given) = (context.runtime, context.given);
    let id = given.id()?;
    if given.has("stats") {
        print(&Event::stats(id, runtime.stats(id)?), false)?;
        return Ok(0);
    }
    let interval = given.one("interval").map_or(Ok(Duration::from_secs(5)), interval)?;
    runtime.events(id, interval, |event| print(&event, false))?;
    Ok(0)
}

pub(super) fn spec(given: &Given) -> Result<u8> {
    let mut config: Value = serde_json::from_str(include_str!("default.json"))
        .map_err(|e| Error::Config { path: "default.json".into(), why: e.to_string() })?;
    // With v1 hierarchies as runc has it: programs find their cgroup by `/proc/self/cgroup`.
    if Forest::find().is_ok_and(|forest| forest.layout() != Layout::Unified)
        && let Some(list) = config["linux"]["namespaces"].as_array_mut()
    {
        list.retain(|namespace| namespace["type"] != "cgroup");
    }
    if given.has("rootless") {
        rootless(&mut config);
    }
    let path = Path::new(given.one("bundle").unwrap_or(".")).join("config.json");
    if path.exists() {
        let why = std::io::Error::from(std::io::ErrorKind::AlreadyExists);
        return Err(Error::file("write", path)(why));
    }
    let text = serde_json::to_string_pretty(&config).unwrap_or_default();
    std::fs::write(&path, text + "\n").map_err(Error::file("write", path))?;
    Ok(0)
}

/// Changes a configuration for an unprivileged user: its own ids only, and nothing that needs the
/// host's.
fn rootless(config: &mut Value) {
    let ids = |host: u32| json!([{ "containerID": 0, "hostID": host, "size": 1 }]);
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let linux = &mut config["linux"];
    linux["uidMappings"] = ids(uid);
    linux["gidMappings"] = ids(gid);
    if let Some(fields) = linux.as_object_mut() {
        fields.remove("resources");
    }
    if let Some(list) = linux["namespaces"].as_array_mut() {
        list.retain(|namespace| namespace["type"] != "network");
        list.push(json!({ "type": "user" }));
    }
    if let Some(mounts) = config["mounts"].as_array_mut() {
        for mount in mounts {
            if mount["destination"] == "/sys" {
                let options = ["rbind", "nosuid", "noexec", "nodev", "ro"];
                *mount = json!({
                    "destination": "/sys", "type": "none", "source": "/sys", "options": options,
                });
            }
            if let Some(options) = mount["options"].as_array_mut() {
                options.retain(|o| o.as_str().is_none_or(|o| !o.starts_with("gid=")));
            }
        }
    }
}

pub(super) fn features(_: &Given) -> Result<u8> {
    print(&feature::document(), true)?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_option_takes_plain_numbers_only() {
        assert_eq!(user("0").expect("good"), (0, None));
        assert_eq!(user("1000:7").expect("good"), (1000, Some(7)));
        let bad = [
            "",
            "1:",
            ":1",
            "1:2:3",
            "+1",
            "01",
            "4294967295",
            "4294967296",
            "-1",
            "١",
            "root",
            " 1",
            "1 ",
            "0x1",
        ];
        for text in bad {
            assert!(user(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn interval_without_unit_is_refused() {
        assert_eq!(interval("500ms").expect("good"), Duration::from_millis(500));
        assert_eq!(interval("5s").expect("good"), Duration::from_secs(5));
        for bad in ["5", "s", "0s", "-1s", "1d", ""] {
            assert!(interval(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn initial_configurations_are_valid() {
        let mut config: Value = serde_json::from_str(include_str!("default.json")).expect("JSON");
        for _ in 0..2 {
            let text = serde_json::to_vec(&config).expect("JSON");
            let spec: spec::Spec = spec::parse(&text).expect("a configuration");
            assert_eq!(spec.process.expect("there").args, ["sh"]);
            rootless(&mut config);
        }
        assert_eq!(config["linux"]["uidMappings"][0]["size"], 1);
    }
}
