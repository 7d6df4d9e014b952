//! Real software runs unmodified, each with a workload and an assertion.
//!
//! One Debian image contains all of it (`dormouse_testkit::image::software`). Each test runs a
//! script of `software/` inside.

use std::time::Duration;

use dormouse_testkit::{Host, image, ssh, wait_until};

/// A host with the image and one container, called `a`, that runs `words`.
#[track_caller]
fn host_with(options: &[&str], words: &[&str]) -> Host {
    let host = Host::new();
    host.import(&image::software(), "software");
    host.dm(&[&["run", "-d", "--name", "a"], options, &["software"], words].concat()).ok();
    host
}

/// Runs a script of `software/` in a new container and returns its output.
#[track_caller]
fn script(name: &str) -> String {
    let host = Host::new();
    host.import(&image::software(), "software");
    let scripts = format!("{}/software:/scripts:ro", env!("CARGO_MANIFEST_DIR"));
    let path = format!("/scripts/{name}.sh");
    let words = ["run", "--rm", "-v", &scripts, "software", "bash", "-eu", &path];
    host.dm_within(Duration::from_secs(180), &words).ok()
}

#[test]
fn vm_nginx_serves_without_errors() {
    let host = Host::new();
    host.import(&image::nginx(), "nginx");
    let words = ["run", "-d", "--name", "web", "-p", "8080:80", "nginx", "nginx", "-g"];
    host.dm(&[&words[..], &["daemon off;"]].concat()).ok();
    let url = format!("http://{}:8080/", Host::ADDRESS);
    assert!(host.fetch(&url).contains("Welcome to nginx"));
    if host.sh("command -v wrk").status != 0 {
        return; // The guest has no wrk: only the page is checked there.
    }
    let out = host.neighbour_sh(&format!("wrk -t 2 -c 16 -d 5s {url}")).ok();
    assert!(!out.contains("Socket errors") && !out.contains("Non-2xx"), "{out}");
    let requests = out.lines().find_map(|line| line.trim().split_once(" requests in"));
    let requests: u64 = requests.and_then(|(n, _)| n.parse().ok()).expect("wrk counts");
    assert!(requests > 1000, "{out}");
}

#[test]
fn big_postgresql_keeps_balances() {
    let out = script("postgresql");
    let lines: Vec<&str> = out.lines().collect();
    assert!(lines[0].contains(": 0 (0.000%)"), "{out}");
    assert_eq!(lines[1], "t", "{out}");
}

#[test]
fn big_redis_returns_what_was_written() {
    assert_eq!(script("redis"), "value321\n3 benchmarks");
}

#[test]
fn big_python_creates_venv_and_installs_package() {
    assert_eq!(script("python"), "42");
}

#[test]
fn big_java_compiles_and_runs() {
    assert_eq!(script("java"), "499999500000");
}

#[test]
fn big_node_answers_over_http() {
    let program =
        "require('http').createServer((q, r) => r.end('node ' + q.url)).listen(80, '0.0.0.0')";
    let host = host_with(&["-p", "8080:80"], &["node", "-e", program]);
    assert_eq!(host.fetch(&format!("http://{}:8080/path", Host::ADDRESS)), "node /path");
}

#[test]
fn big_compiler_builds_runnable_program() {
    assert_eq!(script("compiler"), "ran");
}

#[test]
fn big_apt_installs_a_package_inside() {
    assert_eq!(script("apt"), "dozing\ndozy\ngone");
}

#[test]
fn big_systemd_reaches_its_target_and_shuts_down() {
    let host = host_with(&["--ids", "65536"], &["/sbin/init"]);
    let state = || host.dm(&["exec", "a", "systemctl", "is-system-running"]).stdout;
    let is_up = || ["running", "degraded"].contains(&state().trim());
    assert!(wait_until(Duration::from_secs(60), is_up), "{}", host.dm(&["logs", "a"]));
    let failed = host.dm(&["exec", "a", "systemctl", "list-units", "--failed", "--no-legend"]);
    assert_eq!(failed.ok(), "");
    assert_eq!(state().trim(), "running");
    // logind receives device events (of its own stack), redis has a private user namespace.
    let units = ["multi-user.target", "dbus", "systemd-logind", "redis-server", "nginx"];
    host.dm(&[&["exec", "a", "systemctl", "is-active"], &units[..]].concat()).ok();
    assert_eq!(host.dm(&["exec", "a", "loginctl", "--no-legend", "list-seats"]).ok(), "seat0");
    // A transient unit with a user that exists as long as the unit.
    let run = ["exec", "a", "systemd-run", "--wait", "--pipe", "-q", "-p", "DynamicUser=yes", "id"];
    let user = host.dm(&run).ok();
    assert!(user.contains("uid=6"), "{user}");
    host.dm_within(Duration::from_secs(60), &["stop", "--time", "30", "a"]).ok();
    assert_eq!(host.state_of("a"), "stopped");
    assert_eq!(host.dm(&["wait", "a"]).ok(), "0");
}

#[test]
fn big_sshd_session_has_resizable_terminal() {
    let host = Host::new();
    host.import(&image::software(), "software");
    let mut terminal = ssh::log_in(&host, &["-t"]);
    terminal.send("tty; stty size\n");
    terminal.expect("/dev/pts/");
    terminal.expect("24 80");
    terminal.resize(44, 111);
    std::thread::sleep(Duration::from_millis(800));
    terminal.send("stty size\n");
    terminal.expect("44 111");
    terminal.send("exit 5\n");
    assert_eq!(terminal.wait(), 5);
}
