//! Containers in lists and in full.

use std::collections::BTreeMap;
use std::net::IpAddr;

use dormouse_model::{Config, Publish};
use serde::Serialize;

/// A container in `ps --json` and, with more, in `inspect --json`.
#[derive(Debug, Serialize)]
pub struct Summary<'a> {
    /// Identity: 32 hex digits.
    pub id: &'a str,
    /// Name given by the operator.
    pub name: &'a str,
    /// The image's name, or the directory of `--rootfs`.
    pub image: String,
    /// The image's id; null with `--rootfs`.
    pub image_id: Option<&'a str>,
    /// `created`, `running`, `paused`, `drowsy`, `asleep` or `stopped`.
    pub state: &'a str,
    /// The host's pid of the first process; null when it is not running.
    pub pid: Option<u32>,
    /// The first of its addresses; null if it has none.
    pub address: Option<IpAddr>,
    /// All of its addresses.
    pub addresses: &'a [IpAddr],
    /// `address`, `host` or `none`.
    pub network: &'a str,
    /// Its trust domain; null with `--net host` and `--net none`.
    pub domain: Option<&'a str>,
    /// Ports of the host that lead to it.
    pub ports: Vec<Port>,
    /// Program and arguments.
    pub command: &'a [String],
    /// Free-form labels.
    pub labels: &'a BTreeMap<String, String>,
    /// Time of creation (RFC 3339).
    pub created: String,
    /// Time of the last start; null if there was none.
    pub started: Option<String>,
    /// Time of the last exit; null if there was none, and while the container lives.
    pub finished: Option<String>,
    /// Since when it is drowsy or asleep; null in other states.
    pub asleep: Option<String>,
    /// Last exit code of its first process; null if there was none or it is unknown.
    pub exit_code: Option<i32>,
    /// The kernel's OOM killer ended a process of its last run.
    pub oom_killed: bool,
    /// The next wake of an asleep container has less to make; absent if not.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub warm: bool,
    /// Failed wakes of an asleep container; absent if its last wake did not fail.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wake_failed: Option<WakeFailed<'a>>,
}

/// Failed wakes of an asleep container.
#[derive(Debug, Serialize)]
pub struct WakeFailed<'a> {
    /// The cause of the last failure.
    pub cause: &'a str,
    /// Time of the first failure since the container fell asleep (RFC 3339).
    pub since: String,
    /// Time of the last one.
    pub last: String,
    /// Number of failed attempts.
    pub attempts: u32,
}

/// A published port.
#[derive(Debug, Serialize)]
pub struct Port {
    /// The host's address; null is every address.
    pub host_ip: Option<IpAddr>,
    /// The host's port.
    pub host_port: u16,
    /// The container's port.
    pub container_port: u16,
    /// `tcp` or `udp`.
    pub protocol: &'static str,
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
    pub fn host(&self) -> String {
        match self.host_ip {
            Some(IpAddr::V6(ip)) => format!("[{ip}]:{}", self.host_port),
            Some(ip) => format!("{ip}:{}", self.host_port),
            None => format!("*:{}", self.host_port),
        }
    }

    /// `80/tcp`
    pub fn container(&self) -> String {
        format!("{}/{}", self.container_port, self.protocol)
    }
}

/// A container in `inspect --json`.
#[derive(Debug, Serialize)]
pub struct Inspect<'a> {
    /// The fields of the list.
    #[serde(flatten)]
    pub summary: Summary<'a>,
    /// The account that its use is charged to, as `dormouse account` names it.
    pub account: String,
    /// What it does for a client is charged to the client's account.
    pub shared: bool,
    /// The object because of which its last checkpoint was not proven by a trial restore.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unproven: Option<String>,
    /// Resources that programs inside do not see as its limits are.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub not_shown_inside: Vec<&'a str>,
    /// Memory that is charged to a warm sleeper, in bytes; absent for other containers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warm_memory_bytes: Option<u64>,
    /// Calls that reached out of the container and were refused by the barrier; absent without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub barrier_refused: Option<u64>,
    /// Limits that this host takes and does not enforce, in words.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub not_enforced: Vec<String>,
    /// Files of its output.
    pub logs: Vec<String>,
    /// The whole configuration from its creation, as it is stored.
    pub config: &'a Config,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_without_optional_values_has_nulls() {
        let labels = BTreeMap::new();
        let summary = Summary {
            id: "0123456789abcdef0123456789abcdef",
            name: "web",
            image: "/srv/root".into(),
            image_id: None,
            state: "created",
            pid: None,
            address: None,
            addresses: &[],
            network: "none",
            domain: None,
            ports: Vec::new(),
            command: &[],
            labels: &labels,
            created: crate::rfc3339(0),
            started: None,
            finished: None,
            asleep: None,
            warm: false,
            exit_code: None,
            oom_killed: false,
            wake_failed: None,
        };
        let json = concat!(
            r#"{"id":"0123456789abcdef0123456789abcdef","name":"web","#,
            r#""image":"/srv/root","image_id":null,"state":"created","pid":null,"#,
            r#""address":null,"addresses":[],"network":"none","domain":null,"ports":[],"#,
            r#""command":[],"labels":{},"created":"1970-01-01T00:00:00.000Z","#,
            r#""started":null,"finished":null,"asleep":null,"exit_code":null,"#,
            r#""oom_killed":false}"#,
        );
        assert_eq!(serde_json::to_string(&summary).unwrap(), json);
    }

    #[test]
    fn port_is_printed_with_and_without_an_address() {
        let port = |host_ip: Option<&str>| Port {
            host_ip: host_ip.map(|ip| ip.parse().unwrap()),
            host_port: 8080,
            container_port: 80,
            protocol: "tcp",
        };
        assert_eq!(port(None).host(), "*:8080");
        assert_eq!(port(Some("0.0.0.0")).host(), "0.0.0.0:8080");
        assert_eq!(port(Some("::1")).host(), "[::1]:8080");
        assert_eq!(port(None).container(), "80/tcp");
        let json = r#"{"host_ip":"::1","host_port":8080,"container_port":80,"protocol":"tcp"}"#;
        assert_eq!(serde_json::to_string(&port(Some("::1"))).unwrap(), json);
    }
}
