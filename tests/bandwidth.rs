//! Bandwidth of containers at the uplink of their domain: ceilings, guarantees, admission, and that nothing is left.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dormouse_testkit::{Host, soon, wait_until};

use crate::contracts::start;

/// Runs until it is killed.
const SLEEP: &[&str] = &["busybox", "sleep", "1000000"];
/// Bytes of a transfer.
const BYTES: u64 = 2 << 20;

/// A host whose uplink has this rate.
#[track_caller]
fn with_uplink(rate: &str) -> Host {
    let host = Host::with_busybox();
    let config = host.root().join("etc/config.toml");
    let text = fs::read_to_string(&config).expect("the settings");
    let section = format!("[network]\nuplink-rate = \"{rate}\"\n");
    let text = match text.contains("[network]\n") {
        true => text.replace("[network]\n", &section),
        false => text + &section,
    };
    fs::write(&config, text).expect("written");
    host
}

/// Bytes that a server has received from each address.
type Received = Arc<Mutex<BTreeMap<IpAddr, u64>>>;

/// A server of the host that sends [`BYTES`] to each client, or counts what it receives.
fn serve(host: &Host, sends: bool) -> (u16, Received) {
    let received = Received::default();
    let counts = received.clone();
    let listener = host.in_network(|| TcpListener::bind("0.0.0.0:0").expect("a port"));
    let listener = listener.join().expect("the thread ends");
    let port = listener.local_addr().expect("an address").port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let counts = counts.clone();
            std::thread::spawn(move || {
                if sends {
                    let _ = stream.write_all(&vec![0; BYTES as usize]); // the client may be killed
                    return;
                }
                let Ok(peer) = stream.peer_addr() else { return };
                let mut buffer = vec![0; 1 << 16];
                while let Ok(read @ 1..) = stream.read(&mut buffer) {
                    *counts.lock().expect("no panic").entry(peer.ip()).or_default() += read as u64;
                }
            });
        }
    });
    (port, received)
}

/// The queueing of each end of the uplink of the default domain: the host's, and the domain's.
#[track_caller]
fn queueing(host: &Host) -> [String; 2] {
    let net = host.root().join("run/domains/default/net");
    let inside = format!("nsenter --net={} ip link show eth0", net.display());
    ["ip link show".to_owned(), inside].map(|script| {
        let text = host.sh(&script).ok();
        let line = text.lines().find(|line| line.contains(": dm") || line.contains(": eth0"));
        let mut words = line.expect("the uplink").split_whitespace();
        words.find(|word| *word == "qdisc").expect("its queueing");
        words.next().expect("a kind").to_owned()
    })
}

#[test]
fn vm_ceiling_bounds_what_a_container_sends_and_receives() {
    ceiling_bounds(&["--net-ceil", "8mbit"]);
}

#[test]
fn vm_ceiling_bounds_what_a_private_container_sends_and_receives() {
    ceiling_bounds(&["--net-ceil", "8mbit", "--net", "private"]);
}

fn ceiling_bounds(options: &[&str]) {
    let host = Host::with_busybox();
    let to = Host::ADDRESS;
    start(&host, "x", options);
    // A burst of 64 kB is sent at once. Packets have headers, which count.
    let least =
        |mbit: f64| Duration::from_secs_f64(((BYTES - 65_536) * 8) as f64 / mbit / 1e6 / 1.06);
    let (port, received) = serve(&host, false);
    let send = format!("dd if=/dev/zero bs=64k count=32 2>/dev/null | nc {to} {port}");
    let at = Instant::now();
    host.dm(&["exec", "x", "sh", "-c", &send]).ok();
    // The client ends when its last bytes are in a buffer.
    let address: IpAddr = host.address_of("x").parse().expect("an address");
    let all = || received.lock().expect("no panic").get(&address) == Some(&BYTES);
    assert!(wait_until(soon(), all), "{received:?}");
    assert!(at.elapsed() >= least(8.0), "sent within {:?}", at.elapsed());

    let (port, _) = serve(&host, true);
    let receive = format!("nc {to} {port} </dev/null | wc -c");
    let timed = || {
        let at = Instant::now();
        assert_eq!(host.dm(&["exec", "x", "sh", "-c", &receive]).ok(), BYTES.to_string());
        at.elapsed()
    };
    let took = timed();
    assert!(took >= least(8.0), "received within {took:?}");
    // A new ceiling holds for a running container, and after a sleep.
    host.dm(&["update", "--net-ceil", "6mbit", "x"]).ok();
    let took = timed();
    assert!(took >= least(6.0), "received within {took:?}");
    host.put_to_sleep("x");
    host.dm(&["wake", "x"]).ok();
    let took = timed();
    assert!(took >= least(6.0), "received within {took:?}");
    let table = host.dm(&["inspect", "--format", "table", "x"]).ok();
    assert!(table.contains("weight 100, at most 6mbit"), "{table}");
}

/// A packet without ports has the class of its container, too.
#[test]
fn vm_ceiling_bounds_echo_requests() {
    const ECHOES: u32 = 300;
    const ECHO_BYTES: u32 = 1400;
    let host = Host::with_busybox();
    start(&host, "x", &["--net-ceil", "512kbit"]);
    let (echoes, bytes) = (ECHOES.to_string(), ECHO_BYTES.to_string());
    let at = Instant::now();
    let said = host.dm(&["exec", "x", "probe", "ping", Host::ADDRESS, &echoes, &bytes]).ok();
    let took = at.elapsed();
    assert_eq!(said.trim(), "answered");
    // Without a ceiling an answer takes less than a millisecond. A burst of 64 kB is sent at once.
    let bits = f64::from(ECHOES * ECHO_BYTES - 65_536) * 8.0;
    assert!(took >= Duration::from_secs_f64(bits / 512e3 / 1.06), "{took:?}");
}

/// The shares are those of a slow uplink, for which any machine has time. Several connections each, so that data waits
/// for the uplink while a client waits for a processor.
#[test]
fn vm_guarantee_is_kept_beside_a_flood_and_the_uplink_is_not_exceeded() {
    let host = with_uplink("10mbit");
    start(&host, "x", &["--net-rate", "8mbit"]);
    start(&host, "y", &[]);
    let (port, received) = serve(&host, false);
    let flood = format!("while :; do cat /dev/zero | nc {} {port}; done", Host::ADDRESS);
    for name in ["y", "x"].into_iter().cycle().take(8) {
        host.dm(&["exec", "-d", name, "sh", "-c", &flood]).ok();
    }
    let [x, y] =
        ["x", "y"].map(|name| host.address_of(name).parse::<IpAddr>().expect("an address"));
    let count = || {
        let counts = received.lock().expect("no panic");
        [x, y].map(|address| counts.get(&address).copied().unwrap_or(0))
    };
    assert!(wait_until(soon(), || count()[0] > 1 << 20));
    let (before, at) = (count(), Instant::now());
    assert!(wait_until(soon(), || { count()[0] - before[0] > 4 << 20 }));
    let (now, took) = (count(), at.elapsed().as_secs_f64());
    let [x, y] = [0, 1].map(|at| (now[at] - before[at]) as f64 * 8.0 / 1e6);
    println!("guaranteed {:.2} Mbit/s, the other {:.2} in {took:.2} s", x / took, y / took);
    // 8 and half of the rest are 9.
    assert!(x / (x + y) >= 0.8, "{x} beside {y}");
    // Buffers of the receiver may be read late.
    assert!((x + y) / took <= 10.0 * 1.06 + 16.0 / took, "{x} and {y} Mbit in {took} s");
}

#[test]
fn vm_guarantees_beyond_the_uplink_are_refused_with_the_numbers() {
    let host = with_uplink("10mbit");
    let run = |name: &str, options: &[&str]| {
        host.dm(&[&["run", "-d", "--name", name], options, SLEEP].concat())
    };
    start(&host, "x", &["--net-rate", "6mbit"]);
    let line = run("y", &["--net-rate", "5mbit"]).fails();
    for part in
        ["'y'", "5mbit of the network", "4mbit of 10mbit are free", "6mbit is guaranteed to 1"]
    {
        assert!(line.contains(part), "{part}: {line}");
    }
    host.put_to_sleep("x");
    run("y", &["--net-rate", "5mbit"]).ok();
    let line = host.dm(&["wake", "x"]).fails();
    assert!(line.contains("5mbit of 10mbit are free"), "{line}");
    let line = host.dm(&["update", "--net-rate", "11mbit", "y"]).fails();
    assert!(line.contains("10mbit of 10mbit are free"), "{line}");
    host.dm(&["update", "--net-rate", "4mbit", "y"]).ok();
    host.dm(&["wake", "x"]).ok();
}

/// The classes at the host's end of the uplinks, by tc(8).
#[track_caller]
fn classes(host: &Host) -> String {
    let devices = r"ip -o link show | sed -n 's/^[0-9]*: \(dm[0-9a-f]*\)@.*/\1/p'";
    host.sh(&format!("for d in $({devices}); do tc class show dev $d; done")).ok()
}

#[test]
fn vm_refused_update_changes_no_class() {
    let host = with_uplink("10mbit");
    start(&host, "x", &["--net-rate", "2mbit", "--net-ceil", "8mbit"]);
    start(&host, "y", &[]);
    let before = classes(&host);
    assert!(before.contains("rate 2Mbit ceil 8Mbit"), "{before}");
    let record = |name: &str| host.inspect(name)["config"]["limits"].clone();
    let records = ["x", "y"].map(record);
    for options in [
        &["--net-rate", "11mbit", "--net-ceil", "0", "x"][..],
        &["--net-ceil", "1mbit", "x"],
        &["--net-ceil", "4mbit", "--io-write-bps", "/no/such/device:1m", "x"],
        &["--net-rate", "9mbit", "y"],
        &["--net-rate", "9mbit", "--ip-add", "10.136.3.201", "y"],
    ] {
        host.dm(&[&["update"], options].concat()).fails();
        assert_eq!(classes(&host), before, "{options:?}");
        assert_eq!(["x", "y"].map(record), records, "{options:?}");
    }
    host.dm(&["update", "--net-rate", "0", "--net-ceil", "0", "x"]).ok();
    assert!(queueing(&host).iter().all(|kind| kind != "htb"));
}

/// The rate of the uplink is that of the settings when a contract was last set.
#[test]
fn vm_uplink_follows_its_setting_with_the_next_contract() {
    let host = with_uplink("10mbit");
    start(&host, "x", &["--net-rate", "2mbit"]);
    let has = |rate: &str| {
        let text = classes(&host);
        let is_top = |line: &str| line.contains(" root ");
        let top = text.lines().find(|line| is_top(line)).unwrap_or_else(|| panic!("{text}"));
        assert!(top.contains(&format!("rate {rate} ceil {rate}")), "{text}");
    };
    has("10Mbit");
    let config = host.root().join("etc/config.toml");
    let text = fs::read_to_string(&config).expect("the settings");
    fs::write(&config, text.replace("\"10mbit\"", "\"20mbit\"")).expect("written");
    start(&host, "y", &["--net-weight", "200"]);
    has("20Mbit");
}

#[test]
fn bad_network_contracts_are_refused_before_anything_is_made() {
    let host = Host::with_busybox();
    let cases: [(&[&str], &str); 6] = [
        (&["--net-rate", "1mbit"], "set 'uplink-rate' under [network]"),
        (&["--net-ceil", "10"], "64kbit to 1000gbit"),
        (&["--net-ceil", "1mbit", "--net", "none"], "need address mode"),
        (&["--net-weight", "200", "--net", "host"], "need address mode"),
        (&["--net-rate", "2mbit", "--net-ceil", "1mbit"], "raise --net-ceil"),
        (&["--net-weight", "1"], "100 to 10000"),
    ];
    for (options, why) in cases {
        let line = host.dm(&[&["run", "-d"], options, SLEEP].concat()).fails();
        assert!(line.contains(why), "{options:?}: {line}");
    }
    assert_eq!(host.dm(&["ps", "-aq"]).ok(), "");
}

/// A domain has classes only while one of its containers has a contract.
#[test]
fn vm_classes_end_with_the_last_contract_of_a_domain() {
    let host = Host::with_busybox();
    start(&host, "plain", &[]);
    let none = queueing(&host);
    assert!(none.iter().all(|kind| kind != "htb"), "{none:?}");
    let some = ["htb", "htb"].map(str::to_owned);
    start(&host, "x", &["--net-ceil", "8mbit"]);
    assert_eq!(queueing(&host), some);
    start(&host, "y", &["--net-weight", "300"]);
    host.dm(&["rm", "-f", "x"]).ok();
    assert_eq!(queueing(&host), some);
    host.dm(&["update", "--net-weight", "100", "y"]).ok();
    assert_eq!(queueing(&host), none, "the contract was changed to none");
    host.dm(&["update", "--net-ceil", "1mbit", "y"]).ok();
    host.put_to_sleep("y");
    assert_eq!(queueing(&host), some, "a sleeper keeps its class");
    host.dm(&["update", "--net-ceil", "0", "y"]).ok();
    assert_eq!(queueing(&host), none, "the contract of a sleeper was changed to none");
    host.dm(&["wake", "y"]).ok();
    assert_eq!(queueing(&host), none);
    // A program that is killed from outside ends its contract, too.
    start(&host, "z", &["--net-ceil", "8mbit"]);
    host.dm(&["kill", "z"]).ok();
    assert!(wait_until(soon(), || queueing(&host) == none));
    // An address that leaves a container leaves its class.
    start(&host, "w", &["--net-ceil", "8mbit"]);
    host.dm(&["update", "--ip-add", "10.136.3.200", "w"]).ok();
    host.dm(&["update", "--ip-rm", "10.136.3.200", "w"]).ok();
    assert_eq!(queueing(&host), some);
    host.dm(&["rm", "-f", "w"]).ok();
    assert_eq!(queueing(&host), none);
}
