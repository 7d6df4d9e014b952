//! The operator sees the containers of all trust domains and instances of a host. No container does.

use std::collections::BTreeSet;

use dormouse_testkit::Host;
use serde_json::Value;

use crate::contracts::id;

fn parsed(text: &str) -> Vec<Value> {
    let value: Value = serde_json::from_str(text).expect("JSON");
    value.as_array().expect("a list").clone()
}

/// Starts a container with two processes.
#[track_caller]
fn start(host: &Host, name: &str, options: &[&str]) {
    let script = "sleep 1000000 & exec sleep 1000000";
    let words = [&["run", "-d", "--name", name], options, &["busybox", "sh", "-c", script]];
    host.dm(&words.concat()).ok();
    host.wait_inside(name, "test $(ls -d /proc/[0-9]* | wc -l) -ge 3");
}

/// Instances share ids and cgroups of the host, and nothing that shows one to the other.
#[test]
fn vm_operator_sees_all_containers_of_the_host_and_containers_see_their_own() {
    let (host, other) = (Host::with_busybox(), Host::with_busybox());
    start(&host, "x", &["--domain", "first"]);
    start(&host, "y", &["--domain", "second"]);
    start(&other, "z", &["--net", "none"]);
    host.dm(&["create", "--name", "c", "--net", "none", "busybox", "true"]).ok();
    let root = |host: &Host| host.root().canonicalize().expect("the root").display().to_string();
    // The one that looks is named as on its command line.
    let expected = [
        (host.root().display().to_string(), Value::from("first"), id(&host, "x"), "x"),
        (host.root().display().to_string(), Value::from("second"), id(&host, "y"), "y"),
        (root(&other), Value::Null, id(&other, "z"), "z"),
    ];

    let containers = parsed(&host.dm(&["ps", "--all-domains", "--json"]).ok());
    let processes = parsed(&host.dm(&["top", "--all-domains", "--json"]).ok());
    let mut pids = Vec::new();
    for (instance, domain, id, name) in &expected {
        // Other tests run on this host.
        let row = containers.iter().find(|row| row["id"] == **id).expect("the container");
        assert_eq!((&row["instance"], &row["domain"]), (&instance.as_str().into(), domain));
        assert_eq!((&row["name"], &row["state"]), (&(*name).into(), &"running".into()));
        let own: Vec<&Value> = processes.iter().filter(|row| row["container_id"] == **id).collect();
        assert_eq!(own.len(), 2, "{own:?}");
        assert_eq!(own[0]["host_pid"], row["pid"], "the first process");
        assert_eq!((&own[0]["pid"], &own[0]["user"]), (&1.into(), &"0".into()));
        assert_eq!((&own[1]["parent_pid"], &own[1]["container"]), (&1.into(), &(*name).into()));
        assert_eq!(own[1]["command"], serde_json::json!(["sleep", "1000000"]));
        let host_pids: Vec<&Value> = own.iter().map(|row| &row["host_pid"]).collect();
        assert_eq!(serde_json::json!(host_pids), row["processes"]);
        pids.push(row["pid"].as_u64().expect("a pid"));
    }
    let rest = parsed(&host.dm(&["ps", "--all", "--all-domains", "--json"]).ok());
    let created = rest.iter().find(|row| row["id"] == id(&host, "c")).expect("the container");
    assert_eq!(
        (&created["state"], &created["processes"]),
        (&"created".into(), &Value::from([0; 0]))
    );

    let table = other.dm(&["top", "--all-domains"]).ok();
    assert!(table.starts_with("INSTANCE"), "{table}");
    let names: BTreeSet<&str> =
        table.lines().filter_map(|line| line.split_whitespace().nth(2)).collect();
    assert!(["x", "y", "z"].iter().all(|name| names.contains(name)), "{table}");
    let table = other.dm(&["ps", "--all-domains", "--filter", "name=^y$"]).ok();
    assert!(table.contains(" second ") && !table.contains(" first "), "{table}");
    host.dm(&["top", "--all-domains", "x"]).fails();

    // Inside there are the container's own processes, and no pid, file or socket that leads to another one.
    for (host, name) in [(&host, "x"), (&host, "y"), (&other, "z")] {
        let inside = |script: &str| host.dm(&["exec", name, "sh", "-c", script]);
        let commands = inside("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").ok();
        assert_eq!(commands.matches("sleep 1000000").count(), 2, "{commands}");
        for pid in &pids {
            // A pid of the host is none inside, or one of the container's own.
            let out = inside(&format!("kill -9 {pid}"));
            assert_ne!(out.status, 0, "{name}: {out}");
        }
        for path in ["/var/lib/dormouse-ids", "/var/lib/dormouse", "/run/dormouse"] {
            assert_ne!(inside(&format!("test -e {path}")).status, 0, "{name}: {path}");
        }
        let cgroups = inside("cat /proc/self/cgroup /proc/1/cgroup").ok();
        for (_, _, id, _) in &expected {
            assert!(!cgroups.contains(id.as_str()), "{name}: {cgroups}");
        }
    }
    for (host, name) in [(&host, "x"), (&host, "y"), (&other, "z")] {
        assert_eq!(host.state_of(name), "running", "{name}");
    }
}

/// The directory of another instance may be gone, or be another one by now.
#[test]
fn removed_instance_is_not_listed_and_not_made_again() {
    let host = Host::with_busybox();
    host.dm(&["create", "--name", "x", "--net", "none", "busybox", "true"]).ok();
    let id = id(&host, "x");
    let lib = host.root().join("lib");
    let moved = host.dir().join("moved");
    std::fs::rename(&lib, &moved).expect("a move");
    let looks = Host::new();
    let list = looks.dm(&["ps", "--all", "--all-domains", "--json"]).ok();
    assert!(!list.contains(&id), "{list}");
    assert!(!lib.exists(), "it was made again");
    std::fs::rename(&moved, &lib).expect("a move");
    let list = looks.dm(&["ps", "--all", "--all-domains", "--json"]).ok();
    assert!(list.contains(&id), "{list}");
}
