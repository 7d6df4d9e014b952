//! Views of containers for lists, `inspect` and JSON.

use std::collections::BTreeMap;
use std::net::IpAddr;

use dormouse_container::Listed;
use dormouse_model::{Config, NetMode, Publish, RootSource, Sleep, State};
use serde::Serialize;

use crate::option::time::{now_ms, rfc3339, span};

/// A container in `ps --json` and, with more, in `inspect --json`. Fields are only ever added.
#[derive(Debug, Serialize)]
pub(crate) struct Summary<'a> {
    id: &'a str,
    name: &'a str,
    /// The image's name, or the directory of `--rootfs`.
    image: String,
    /// The image's id; null with `--rootfs`.
    image_id: Option<&'a str>,
    /// `created`, `running`, `paused`, `drowsy`, `asleep` or `stopped`.
    state: &'a str,
    /// The host's pid of the first process; null when it is not running.
    pid: Option<u32>,
    /// The first of its addresses; null if it has none.
    address: Option<IpAddr>,
    addresses: &'a [IpAddr],
    /// `address`, `host` or `none`.
    network: &'a str,
    /// Its trust domain; null except in address mode.
    domain: Option<&'a str>,
    ports: Vec<Port>,
    command: &'a [String],
    labels: &'a BTreeMap<String, String>,
    created: String,
    started: Option<String>,
    finished: Option<String>,
    /// Since when it is drowsy or asleep; null in other states.
    asleep: Option<String>,
    /// Last exit code of its first process; null if there was none or it is unknown.
    exit_code: Option<i32>,
    /// The kernel's OOM killer ended a process of its last run.
    oom_killed: bool,
}

/// A published port.
#[derive(Debug, Serialize)]
pub(crate) struct Port {
    pub(crate) host_ip: Option<IpAddr>,
    pub(crate) host_port: u16,
    pub(crate) container_port: u16,
    pub(crate) protocol: &'static str,
}

impl From<&Publish> for Port {
    fn from(p: &Publish) -> Self {
        Self {
            host_ip: p.host_ip,
            host_port: p.host_port,
            container_port: p.container_port,
            protocol: p.protocol.as_str(),
        }
    }
}

impl Port {
    /// `0.0.0.0:8080`
    pub(crate) fn host(&self) -> String {
        match self.host_ip {
            Some(IpAddr::V6(ip)) => format!("[{ip}]:{}", self.host_port),
            Some(ip) => format!("{ip}:{}", self.host_port),
            None => format!("*:{}", self.host_port),
        }
    }

    /// `80/tcp`
    pub(crate) fn container(&self) -> String {
        format!("{}/{}", self.container_port, self.protocol)
    }
}

/// A container in `inspect --json`.
#[derive(Debug, Serialize)]
pub(crate) struct Inspect<'a> {
    #[serde(flatten)]
    pub(crate) summary: Summary<'a>,
    /// Files of its output.
    pub(crate) logs: Vec<String>,
    /// The whole configuration from its creation, as it is stored.
    pub(crate) config: &'a Config,
}

impl<'a> Summary<'a> {
    pub(crate) fn of(c: &'a Listed) -> Self {
        let ended = c.exit.as_ref().filter(|_| !is_alive(c.state));
        Self {
            id: c.id.as_str(),
            name: c.name.as_str(),
            image: image(&c.root),
            image_id: match &c.root {
                RootSource::Image { id, .. } => Some(id),
                RootSource::Directory(_) => None,
            },
            state: c.state.as_str(),
            pid: c.pid,
            address: c.addresses.first().copied(),
            addresses: &c.addresses,
            network: match c.net {
                NetMode::Address { .. } => "address",
                NetMode::Host => "host",
                NetMode::None => "none",
            },
            domain: match &c.net {
                NetMode::Address { domain } => Some(domain.as_str()),
                _ => None,
            },
            ports: c.publish.iter().map(Port::from).collect(),
            command: &c.args,
            labels: &c.labels,
            created: rfc3339(c.created_unix_s.saturating_mul(1000)),
            started: c.started_unix_ms.map(rfc3339),
            asleep: c.asleep_unix_ms.map(rfc3339),
            finished: ended.map(|e| rfc3339(e.finished_unix_ms)),
            exit_code: ended.and_then(|e| e.code),
            oom_killed: c.exit.as_ref().is_some_and(|e| e.oom_killed),
        }
    }
}

/// Returns whether a container lives: it has processes, or will have them again after an event.
pub(crate) fn is_alive(state: State) -> bool {
    matches!(state, State::Running | State::Paused | State::Drowsy | State::Asleep)
}

/// `after 90 s without work, drowsy after 30 s`; empty for a container that does neither by itself.
pub(crate) fn sleep(config: &Config) -> String {
    let seconds = |sleep: Sleep| sleep.after().map(|after| after.as_secs_f64());
    match (seconds(config.sleep), seconds(config.drowsy)) {
        (Some(s), None) => format!("after {s} s without work"),
        (Some(s), Some(d)) => format!("after {s} s without work, drowsy after {d} s"),
        (None, Some(d)) => format!("drowsy after {d} s without work"),
        (None, None) => String::new(),
    }
}

/// The image's name, or the directory of `--rootfs`.
pub(crate) fn image(root: &RootSource) -> String {
    match root {
        RootSource::Image { reference, .. } => reference.to_string(),
        RootSource::Directory(dir) => dir.display().to_string(),
    }
}

/// `Up 3 minutes`, `Exited (0) 2 hours ago`.
pub(crate) fn status(c: &Listed) -> String {
    let ago = |ms: i64| span(now_ms() - ms);
    if let (State::Asleep, Some(since)) = (c.state, c.asleep_unix_ms) {
        return format!("Asleep {}", ago(since));
    }
    if let (State::Drowsy, Some(since)) = (c.state, c.asleep_unix_ms) {
        return format!("Drowsy {}", ago(since));
    }
    match (c.state, c.started_unix_ms, &c.exit) {
        (State::Running, Some(started), _) => format!("Up {}", ago(started)),
        (State::Paused, Some(started), _) => format!("Up {} (paused)", ago(started)),
        (State::Stopped, _, Some(exit)) => {
            let code = exit.code.map_or_else(|| "unknown".to_owned(), |c| c.to_string());
            let oom = if exit.oom_killed { ", out of memory" } else { "" };
            format!("Exited ({code}{oom}) {} ago", ago(exit.finished_unix_ms))
        }
        (state, ..) => {
            let mut word = state.as_str().to_owned();
            word[..1].make_ascii_uppercase();
            word
        }
    }
}

/// `*:8080->80/tcp, ...`
pub(crate) fn ports(ports: &[Publish]) -> String {
    let port = |p: &Publish| {
        let p = Port::from(p);
        format!("{}->{}", p.host(), p.container())
    };
    ports.iter().map(port).collect::<Vec<_>>().join(", ")
}

/// `10.136.0.1, fd00::1`
pub(crate) fn addresses(addresses: &[IpAddr]) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
