//! Address networking: a container has private addresses, and is reached at its published ports.

use std::time::Duration;

use dormouse_testkit::{Host, Output, image, soon, wait_until};

const SERVE: &[&str] = &["httpd", "-f", "-p", "80", "-h", "/www"];

/// Fetches a page from inside a container.
fn fetch_inside(host: &Host, container: &str, url: &str) -> Output {
    host.dm(&["exec", container, "timeout", "5", "wget", "-q", "-O", "-", url])
}

#[track_caller]
fn serve(host: &Host, name: &str, options: &[&str]) {
    host.dm(&[&["run", "-d", "--name", name], options, &["busybox"], SERVE].concat()).ok();
}

#[test]
fn vm_published_port_is_reached_from_another_machine() {
    let host = Host::with_busybox();
    serve(&host, "web", &["-p", "8080:80"]);
    let page = host.fetch(&format!("http://{}:8080/", Host::ADDRESS));
    assert_eq!(page, "hello from a container");
    assert!(host.dm(&["port", "web"]).ok().contains("8080"));
    host.dm(&["stop", "--time", "0", "web"]).ok();
    let gone =
        host.neighbour_sh(&format!("timeout 2 busybox wget -O - http://{}:8080/", Host::ADDRESS));
    assert_ne!(gone.status, 0, "{gone}");
    // The same port again, by another container.
    serve(&host, "other", &["-p", "8080:80"]);
    assert_eq!(host.fetch(&format!("http://{}:8080/", Host::ADDRESS)), "hello from a container");
}

#[test]
fn vm_published_port_is_reached_from_the_host_and_over_ipv6() {
    let host = Host::with_busybox();
    serve(&host, "web", &["-p", "8080:80"]);
    host.fetch(&format!("http://{}:8080/", Host::ADDRESS));
    let page =
        host.sh(&format!("timeout 5 busybox wget -q -O - http://{}:8080/", Host::ADDRESS)).ok();
    assert_eq!(page, "hello from a container");
    let page = host.fetch(&format!("http://[{}]:8080/", Host::ADDRESS6));
    assert_eq!(page, "hello from a container");
}

#[test]
fn vm_host_reaches_container_at_its_address() {
    let host = Host::with_busybox();
    serve(&host, "web", &[]);
    let url = format!("http://{}/", host.address_of("web"));
    let get = || host.sh(&format!("timeout 2 busybox wget -q -O - {url}")).status == 0;
    assert!(wait_until(soon(), get), "{url}");
}

#[test]
fn vm_containers_resolve_names_and_see_client_address() {
    let host = Host::with_busybox();
    serve(&host, "web", &[]);
    host.dm(&["run", "-d", "--name", "client", "busybox", "sleep", "1000"]).ok();
    host.wait_inside("client", "wget -q -O - http://web/");
    assert_eq!(fetch_inside(&host, "client", "http://web/").ok(), "hello from a container");
    // The server sees the client's own address.
    let serve_peer = ["run", "-d", "--name", "seen", "busybox", "probe", "who", "0.0.0.0", "9000"];
    host.dm(&serve_peer).ok();
    host.wait_inside("client", "probe ask seen 9000");
    let shown = host.dm(&["exec", "client", "probe", "ask", "seen", "9000"]).ok();
    assert_eq!(shown, host.address_of("client"));
    // A name is removed with its container.
    host.dm(&["rm", "--force", "web"]).ok();
    assert_ne!(fetch_inside(&host, "client", "http://web/").status, 0);
}

#[test]
fn vm_hosts_file_has_the_names_of_the_domain_without_padding() {
    let host = Host::with_busybox();
    for (name, domain) in [("a", "default"), ("b", "default"), ("c", "other")] {
        let run = ["run", "-d", "--name", name, "--domain", domain, "busybox", "sleep", "1000"];
        host.dm(&run).ok();
    }
    let names = |of: &str| -> Vec<String> {
        let text = host.dm(&["exec", of, "cat", "/etc/hosts"]).ok();
        let is_padded = |line: &str| line.is_empty() || line != line.trim_end();
        assert!(!text.lines().any(is_padded), "{text:?}");
        let all = text.lines().flat_map(|line| line.split(' ').skip(1));
        let mut all: Vec<_> = all.filter(|name| name.len() == 1).map(str::to_owned).collect();
        all.dedup();
        all
    };
    assert_eq!(names("a"), ["a", "b"]);
    assert_eq!(names("c"), ["c"]);
    // The last one leaves no line, and others see later names at once.
    host.dm(&["rm", "--force", "b"]).ok();
    host.dm(&["run", "-d", "--name", "d", "busybox", "sleep", "1000"]).ok();
    assert_eq!(names("a"), ["a", "d"]);
}

#[test]
fn vm_outbound_traffic_has_address_of_host() {
    let host = Host::with_busybox();
    let site = host.dir().join("site");
    std::fs::create_dir(&site).expect("a directory of the test");
    std::fs::write(site.join("index.html"), "outside\n").expect("a page");
    let mut outside = host
        .neighbour_command("busybox")
        .args(["httpd", "-f", "-v", "-p", "80", "-h"])
        .arg(&site)
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("busybox starts");
    host.dm(&["run", "-d", "--name", "a", "busybox", "sleep", "1000"]).ok();
    let url = format!("http://{}/", Host::NEIGHBOUR);
    let page = wait_until(soon(), || fetch_inside(&host, "a", &url).status == 0);
    outside.kill().and_then(|()| outside.wait()).expect("end the process");
    let mut log = String::new();
    let mut stderr = outside.stderr.take().expect("a pipe");
    std::io::Read::read_to_string(&mut stderr, &mut log).expect("a pipe can be read");
    assert!(page, "no page from outside: {log}");
    assert!(log.contains(Host::ADDRESS), "masqueraded: {log}");
}

#[test]
fn vm_servers_bound_to_any_address_do_not_collide() {
    let host = Host::with_busybox();
    for name in ["a", "b", "c"] {
        let script = format!("echo {name} >/www/index.html; exec httpd -f -p 80 -h /www");
        host.dm(&["run", "-d", "--name", name, "busybox", "sh", "-c", &script]).ok();
    }
    for name in ["a", "b", "c"] {
        host.wait_inside(name, "wget -q -O - http://127.0.0.1/");
        assert_eq!(fetch_inside(&host, name, "http://127.0.0.1/").ok(), name);
        assert_eq!(fetch_inside(&host, name, "http://b/").ok(), "b");
    }
}

#[test]
fn vm_addresses_can_be_requested_added_and_removed() {
    let host = Host::with_busybox();
    serve(&host, "web", &["--ip", "10.136.7.7"]);
    assert_eq!(host.address_of("web"), "10.136.7.7");
    host.dm(&["run", "-d", "--name", "client", "busybox", "sleep", "1000"]).ok();
    host.wait_inside("client", "wget -q -O - http://10.136.7.7/");
    let taken = host.dm(&["run", "--rm", "--ip", "10.136.7.7", "busybox", "true"]).err(125);
    assert!(taken.contains("10.136.7.7"), "{taken}");
    host.dm(&["update", "--ip-add", "10.136.9.9", "web"]).ok();
    let bind = ["exec", "web", "probe", "bind", "10.136.9.9", "81"];
    assert_eq!(host.dm(&bind).ok(), "bound");
    host.dm(&["update", "--ip-rm", "10.136.9.9", "web"]).ok();
    assert_ne!(host.dm(&bind).status, 0);
}

#[test]
fn vm_domains_do_not_reach_each_other() {
    let host = Host::with_busybox();
    let out = fetch_from_other_domain(&host);
    assert_ne!(out.status, 0, "{out}");
    assert_ne!(fetch_inside(&host, "far", "http://web/").status, 0);
    if let Some(weak) = Host::without("closed-domains") {
        assert_eq!(fetch_from_other_domain(&weak).ok(), "hello from a container");
    }
}

/// Serves a page in one domain, and fetches it from a container of another.
fn fetch_from_other_domain(host: &Host) -> Output {
    serve(host, "web", &["--domain", "red"]);
    let address = host.address_of("web");
    host.dm(&["run", "-d", "--name", "near", "--domain", "red", "busybox", "sleep", "1000"]).ok();
    host.dm(&["run", "-d", "--name", "far", "--domain", "blue", "busybox", "sleep", "1000"]).ok();
    let url = format!("http://{address}/");
    host.wait_inside("near", &format!("timeout 2 wget -q -O - {url}"));
    host.dm(&["exec", "far", "timeout", "2", "wget", "-q", "-O", "-", &url])
}

#[test]
fn vm_net_none_has_loopback_only_and_net_host_is_shared() {
    let host = Host::with_busybox();
    let script =
        "ip -o link | wc -l; timeout 1 wget -O - http://192.0.2.2/ 2>/dev/null || echo none";
    let out = host.dm(&["run", "--rm", "--net", "none", "busybox", "sh", "-c", script]);
    assert_eq!(out.ok(), "1\nnone");
    // The private stack works for every user, with root's rights to ping and to low ports.
    for user in ["root", "user", "nobody"] {
        let words = ["run", "--rm", "--net", "none", "-u", user, "busybox", "probe"];
        assert_eq!(host.dm(&[&words[..], &["ping", "127.0.0.1"]].concat()).ok(), "answered");
        assert_eq!(host.dm(&[&words[..], &["bind", "127.0.0.1", "80"]].concat()).ok(), "bound");
    }
    let out = host.dm(&["run", "--rm", "--net", "host", "busybox", "ip", "-o", "addr"]).ok();
    assert!(out.contains(Host::ADDRESS), "{out}");
}

#[test]
fn vm_ports_in_use_are_refused_with_one_line() {
    let host = Host::with_busybox();
    serve(&host, "web", &["-p", "8080:80"]);
    let words = ["run", "--rm", "-p", "8080:80", "busybox", "true"];
    assert!(host.dm(&words).err(125).contains("8080"));
}

#[test]
fn vm_udp_and_ping_work_inside_a_domain() {
    let host = Host::with_busybox();
    let echo = ["probe", "udp-echo", "0.0.0.0", "53"];
    host.dm(&[&["run", "-d", "--name", "udp", "busybox"][..], &echo].concat()).ok();
    host.dm(&["run", "-d", "--name", "a", "busybox", "sleep", "1000"]).ok();
    host.wait_inside("a", "probe udp-ask udp 53 question");
    assert_eq!(host.dm(&["exec", "a", "probe", "udp-ask", "udp", "53", "again"]).ok(), "again");
    assert_eq!(host.dm(&["exec", "a", "probe", "ping", "udp"]).ok(), "answered");
}

#[test]
fn second_instance_needs_another_pool() {
    let host = Host::with_busybox();
    serve(&host, "web", &[]);
    let other = host.dir().join("other");
    let instance = |words: &[&str]| {
        let mut command = host.command(dormouse_testkit::dormouse());
        command.arg("--root").arg(&other).args(words);
        dormouse_testkit::run(command, b"", Duration::from_secs(180))
    };
    let image = dormouse_testkit::image::busybox();
    instance(&["import", "--name", "busybox", image.to_str().expect("UTF-8")]).ok();
    let run = ["run", "-d", "--name", "web", "busybox", "sleep", "1000"];
    let out = instance(&run);
    assert_eq!(out.status, 125, "{out}");
    let first = host.root().join("run");
    assert!(
        out.stderr.contains(first.to_str().expect("UTF-8")),
        "the message names the other instance: {out}"
    );
    assert!(out.stderr.contains("'pool' under [network]"), "{out}");
    // The first instance still serves.
    let url = format!("http://{}/", host.address_of("web"));
    let get = || host.sh(&format!("timeout 2 busybox wget -q -O - {url}")).status == 0;
    assert!(wait_until(soon(), get), "{url}");
    std::fs::create_dir_all(other.join("etc")).expect("made");
    let pool = "[network]\npool = \"10.200.0.0/16\"\n";
    std::fs::write(other.join("etc/config.toml"), pool).expect("written");
    instance(&run).ok();
    assert!(get(), "{url}");
    let ids = |text: String| -> i64 {
        let value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        value["ids"]["base"].as_i64().expect("a number")
    };
    let config = |root: &std::path::Path| {
        let all = std::fs::read_dir(root.join("lib/containers")).expect("there");
        let one = all.flatten().next().expect("a container").path().join("config.json");
        std::fs::read_to_string(one).expect("read")
    };
    assert_ne!(ids(config(&host.root())), ids(config(&other)), "the host ids differ");
    instance(&["rm", "--force", "web"]).ok();
    instance(&["internal", "reset"]).ok();
}

/// Sends datagrams to closed ports of the host, to more of them than a container's part of the connection
/// table. Returns the tracked connections and the part.
fn tracked(host: &Host) -> (u32, u32) {
    for name in ["greedy", "other"] {
        host.dm(&["run", "-d", "--name", name, "busybox", "sleep", "1000"]).ok();
    }
    let number = |name: &str| -> u32 {
        let text = host.sh(&format!("cat /proc/sys/net/netfilter/nf_conntrack_{name}")).ok();
        text.trim().parse().expect("a number")
    };
    let part = number("max") / 16;
    let ports = (part + 3000).min(64_000).to_string();
    host.dm(&["exec", "greedy", "probe", "udp-ports", Host::ADDRESS, &ports]).ok();
    (number("count"), part)
}

#[test]
fn container_fills_only_its_part_of_the_connection_table() {
    let host = Host::with_busybox();
    let (count, part) = tracked(&host);
    assert!(count > 0 && count <= part + 100, "{count}, the part is {part}");
    if let Some(weak) = Host::without("connection-bound") {
        let (count, part) = tracked(&weak);
        assert!(count > part + 100, "{count}, the part would be {part}");
    }
    // Another container has its own part.
    let socket = host.in_network(|| {
        let socket = std::net::UdpSocket::bind((Host::ADDRESS, 60_000)).expect("bound");
        socket.set_read_timeout(Some(Duration::from_secs(60))).expect("set");
        socket
    });
    let socket = socket.join().expect("no panic");
    let echo = std::thread::spawn(move || {
        let mut bytes = [0; 64];
        let (n, from) = socket.recv_from(&mut bytes).expect("a datagram");
        socket.send_to(&bytes[..n], from).expect("sent");
    });
    let answer = host.dm(&["exec", "other", "probe", "udp-ask", Host::ADDRESS, "60000", "word"]);
    assert_eq!(answer.ok(), "word");
    echo.join().expect("no panic");
}

/// Runs a probe that takes so many objects and keeps them.
fn hold(host: &Host, name: &str, probe: &[&str], count: &str) {
    host.dm(&[&["run", "-d", "--name", name, "busybox", "probe"], probe].concat()).ok();
    let has_all = || host.dm(&["logs", name]).ok().trim() == count;
    assert!(wait_until(Duration::from_secs(60), has_all), "{}", host.dm(&["logs", name]));
}

#[test]
fn vm_connections_have_ports_while_another_container_holds_them_all() {
    let host = Host::with_busybox();
    serve(&host, "web", &[]);
    host.dm(&["run", "-d", "--name", "client", "busybox", "sleep", "1000"]).ok();
    let answers = || fetch_inside(&host, "client", "http://web/").status == 0;
    assert!(wait_until(soon(), answers), "the server is ready");
    hold(&host, "greedy", &["hold-ports", "32768", "60999"], "28232");
    for _ in 0..10 {
        let page = fetch_inside(&host, "client", "http://web/");
        assert_eq!(page.ok(), "hello from a container");
    }
}

#[test]
fn vm_own_abstract_names_are_reached_behind_thousands_of_others() {
    let host = Host::with_busybox();
    host.import(&image::busybox_with_attack(), "attack");
    let run = ["run", "-d", "--name", "victim", "attack", "attack", "abstract-listen", "name"];
    host.dm(&run).ok();
    host.wait_inside("victim", "until grep -q @name /proc/net/unix; do sleep 0.1; done");
    let connect =
        |container: &str| host.dm(&["exec", container, "attack", "abstract-connect", "name"]);
    let connects = |container| connect(container).stdout.contains("broken: connected");
    assert!(connects("victim"), "the name is its own");
    hold(&host, "greedy", &["crowd", "name", "5000"], "5000");
    assert!(connects("victim"), "{}", connect("victim"));
    let other = host.dm(&["run", "--rm", "attack", "attack", "abstract-connect", "name"]);
    assert!(other.stdout.contains("stopped: connect"), "{other}");
}
