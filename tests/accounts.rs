//! Accounts: what containers use is charged once, to the right account, whatever is killed meanwhile, and stays when
//! they are gone.

use std::fs;
use std::time::Duration;

use dormouse_testkit::{Host, Led, Terminal, dormouse, soon, wait_until};
use serde_json::Value;

use crate::gates::images_ns;

/// Some thousand page faults, and then a loop that takes CPU time for ever.
const BURN: &str =
    "i=0; while [ $i -lt 100 ]; do /bin/busybox true; i=$((i+1)); done; while :; do :; done";
/// One that ends after some 50 ms of CPU time, of which the end of a process is less than a hundredth.
const BURN_A_LITTLE: &str = "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done";

/// All accounts, with all that was charged until now.
#[track_caller]
fn accounts(host: &Host) -> Vec<Value> {
    let text = host.dm(&["account", "ls", "--format", "json"]).ok();
    serde_json::from_str(&text).expect("JSON")
}

/// One figure of one account in a list; `None` if there is no such account.
fn figure(all: &[Value], account: &str, name: &str) -> Option<u64> {
    let found = all.iter().find(|a| a["Name"] == account)?;
    Some(found[name].as_u64().unwrap_or_else(|| panic!("{name} of {found}")))
}

/// One figure of one account now.
#[track_caller]
fn charged(host: &Host, account: &str, name: &str) -> u64 {
    let all = accounts(host);
    figure(&all, account, name).unwrap_or_else(|| panic!("no account '{account}': {all:?}"))
}

/// The list without page faults, of which the kernel shows those of a running container up to two seconds late.
fn without_faults(mut all: Vec<Value>) -> Vec<Value> {
    for account in all.iter_mut().filter_map(Value::as_object_mut) {
        account.remove("PageFaults");
        account.remove("MajorFaults");
    }
    all
}

/// The sum of a figure over all accounts.
fn sum(all: &[Value], name: &str) -> u64 {
    all.iter().map(|a| a[name].as_u64().expect("a number")).sum()
}

/// CPU time of a cgroup below the one of all containers (""), as the kernel counts it, in nanoseconds.
#[track_caller]
fn kernel_ns(host: &Host, below: &str) -> u64 {
    for dir in host.cgroups() {
        let stat = fs::read_to_string(dir.join(below).join("cpu.stat")).unwrap_or_default();
        if let Some(us) = stat.lines().find_map(|line| line.strip_prefix("usage_usec ")) {
            return us.trim().parse::<u64>().expect("a number") * 1000;
        }
    }
    panic!("no cpu.stat below {:?}", host.cgroups())
}

/// CPU time of all containers.
#[track_caller]
fn of_containers_ns(host: &Host) -> u64 {
    kernel_ns(host, "") - kernel_ns(host, "keeper") - images_ns(host)
}

#[track_caller]
fn id(host: &Host, name: &str) -> String {
    host.inspect(name)["id"].as_str().expect("an id").to_owned()
}

/// Asserts that two times differ by at most one per cent.
#[track_caller]
fn assert_near(charged_ns: u64, counted_ns: u64) {
    let difference = charged_ns.abs_diff(counted_ns);
    assert!(
        difference * 100 <= counted_ns,
        "{charged_ns} ns are charged, and {counted_ns} ns counted"
    );
}

/// The record of a balance.
fn balance(host: &Host, file: &str) -> std::path::PathBuf {
    host.root().join("lib/accounts/balances").join(file)
}

#[test]
fn vm_account_has_the_use_that_the_cgroup_counts() {
    let host = Host::with_busybox();
    host.dm(&["run", "-d", "--name", "x", "busybox", "sh", "-c", BURN]).ok();
    let cgroup = id(&host, "x");
    let burnt = || kernel_ns(&host, &cgroup) >= 300_000_000;
    assert!(wait_until(soon(), burnt), "the loop does not run");
    host.dm(&["pause", "x"]).ok();
    // A task is frozen some instructions before it leaves its processor, and on a busy machine waits in between.
    let mut counted = kernel_ns(&host, &cgroup);
    let rests = || {
        let before = counted;
        std::thread::sleep(Duration::from_millis(100));
        counted = kernel_ns(&host, &cgroup);
        counted == before
    };
    assert!(wait_until(soon(), rests), "the paused container uses CPU time");
    let all = accounts(&host);
    assert_near(figure(&all, "@x", "CpuNs").expect("its account"), counted);
    for name in ["CpuUserNs", "PageFaults", "MemoryPeakBytes"] {
        assert!(figure(&all, "@x", name) > Some(0), "{name}: {all:?}");
    }
    assert_eq!(figure(&all, "@x", "Lives"), Some(1));
    assert_eq!(charged(&host, "@x", "CpuNs"), counted, "a second look adds nothing");
    host.dm(&["unpause", "x"]).ok();
    host.dm(&["exec", "x", "dd", "if=/dev/zero", "of=/file", "bs=64k", "count=64", "conv=fsync"])
        .ok();
    // The last figures of a life are read after its processes have ended.
    host.dm(&["run", "-d", "--name", "other", "busybox", "sleep", "100000"]).ok();
    host.dm(&["kill", "x"]).ok();
    host.wait_for_state("x", "stopped");
    // A settler may be about to charge its end, while the state is known already.
    let is_charged = || charged(&host, "@x", "CpuNs") > counted;
    assert!(wait_until(soon(), is_charged), "the end of a life is charged");
    let all = accounts(&host);
    let (x, other) = (figure(&all, "@x", "CpuNs"), figure(&all, "@other", "CpuNs"));
    let (x, other) = (x.expect("its account"), other.expect("its account"));
    // The kernel keeps the figures of removed cgroups in the one above.
    let of_containers = of_containers_ns(&host);
    assert_near(x + other, of_containers);
    assert_eq!(sum(&all, "CpuNs"), x + other);
    assert_eq!(charged(&host, "@x", "CpuNs"), x, "nothing runs");
}

/// The kernel keeps the most of each life, also where no reading sees it. What several containers had together is known
/// from readings.
#[test]
fn vm_account_has_the_most_processes_and_sockets_of_a_period() {
    // Twenty processes at once, of which none is left.
    const CROWD: &str =
        "for n in $(seq 20); do sleep 100000 & all=\"$all $!\"; done; kill $all; wait";
    let host = Host::with_busybox();
    host.dm(&["account", "create", "smith"]).ok();
    host.dm(&["account", "set", "--sockets", "1000", "smith"]).ok();
    let run = ["run", "-d", "--account", "smith", "--name"];
    for name in ["a", "b", "c"] {
        host.dm(&[&run[..], &[name, "busybox", "sleep", "100000"]].concat()).ok();
    }
    let most = |name| charged(&host, "smith", name);
    assert_eq!((most("SocketsPeak"), most("PidsPeak")), (0, 3));
    host.dm(&["exec", "a", "sh", "-c", CROWD]).ok();
    host.dm(&["exec", "a", "probe", "sockets", "30", "0"]).ok();
    host.dm(&["exec", "b", "probe", "sockets", "7", "0"]).ok();
    // The first process of the container, and the shell. The keeper's process before it is one for a moment.
    let pids = most("PidsPeak");
    assert!((22..=24).contains(&pids), "{pids}");
    assert_eq!(most("SocketsPeak"), 30);
    for (name, count) in [("a", "25"), ("b", "20")] {
        host.dm(&["exec", "-d", name, "probe", "sockets", count, "100000"]).ok();
    }
    assert!(wait_until(soon(), || most("SocketsPeak") == 45), "{}", most("SocketsPeak"));
    // A life that ends between two readings.
    let probe = ["d", "busybox", "probe", "sockets", "60", "0"];
    host.dm(&[&run[..], &probe].concat()).ok();
    host.wait_for_state("d", "stopped");
    host.dm(&["rm", "--force", "a", "b", "c", "d"]).ok();
    let expected = (most("PidsPeak"), 60);
    assert_eq!((most("PidsPeak"), most("SocketsPeak")), expected);
    assert!(expected.0 >= pids);
    let report = |options: &[&str]| {
        host.dm(&[&["account", "report"][..], options, &["smith"]].concat()).ok()
    };
    let csv = report(&["--format", "csv"]);
    let [head, row] = csv.lines().collect::<Vec<_>>()[..] else { panic!("{csv}") };
    assert!(head.ends_with(",pids_peak,sockets_peak"), "{csv}");
    assert!(row.ends_with(&format!(",{},60", expected.0)), "{csv}");
    let days: Value = serde_json::from_str(&report(&["--days", "--format", "json"])).expect("JSON");
    let days = days.as_array().expect("rows");
    let of_days = |name: &str| days.iter().filter_map(|day| day[name].as_u64()).max();
    assert_eq!((of_days("PidsPeak"), of_days("SocketsPeak")), (Some(expected.0), Some(60)));
    assert!(report(&[]).contains("SOCKETS PEAK"));
    let shown =
        host.dm(&["account", "inspect", "-f", "{{.TotalWithBelow.SocketsPeak}}", "smith"]).ok();
    assert_eq!(shown.trim(), "60");
}

/// A wake begins a life with the sockets that the container has, and not with the most that it had before.
#[test]
fn vm_most_sockets_of_a_life_end_with_a_sleep() {
    let host = Host::with_busybox();
    host.dm(&["account", "create", "smith"]).ok();
    host.dm(&["account", "set", "--sockets", "1000", "smith"]).ok();
    let run = ["run", "-d", "--account", "smith", "--name", "x", "busybox", "probe"];
    host.dm(&[&run[..], &["count", "0.0.0.0", "80"]].concat()).ok();
    host.wait_inside("x", "grep -q :0050 /proc/net/tcp");
    host.dm(&["exec", "x", "probe", "sockets", "40", "0"]).ok();
    assert_eq!(charged(&host, "smith", "SocketsPeak"), 41);
    host.put_to_sleep("x");
    // Balances that are gone cannot hide what the next life reports.
    accounts(&host);
    fs::remove_file(balance(&host, "made-smith.json")).expect("removed");
    host.dm(&["wake", "x"]).ok();
    let most = charged(&host, "smith", "SocketsPeak");
    assert!((1..20).contains(&most), "{most}");
}

/// A trial restore of a container is charged beside its life, which goes on.
#[test]
fn vm_trial_restore_is_charged_once_beside_the_life() {
    let host = Host::with_busybox();
    host.dm(&["run", "-d", "--name", "x", "busybox", "sleep", "100000"]).ok();
    host.dm(&["exec", "x", "sh", "-c", BURN_A_LITTLE]).ok();
    charged(&host, "@x", "CpuNs");
    host.dm(&["checkpoint", "x"]).ok();
    host.dm(&["restore", "x"]).ok();
    // This adds the charges, and does not read running containers.
    host.dm(&["account", "create", "other"]).ok();
    host.dm(&["account", "rm", "other"]).ok();
    let all = accounts(&host);
    assert_near(sum(&all, "CpuNs"), of_containers_ns(&host));
    assert_eq!(figure(&all, "@x", "Lives"), Some(2));
}

#[test]
fn vm_charges_last_over_sleep_wake_restart_and_removal() {
    let host = Host::with_busybox();
    host.dm(&["run", "-d", "--name", "other", "busybox", "sleep", "100000"]).ok();
    host.dm(&["run", "-d", "--name", "x", "busybox", "httpd", "-f", "-h", "/www"]).ok();
    host.dm(&["exec", "x", "sh", "-c", BURN_A_LITTLE]).ok();
    let awake = charged(&host, "@x", "CpuNs");
    host.put_to_sleep("x");
    let asleep = accounts(&host);
    let lives = figure(&asleep, "@x", "Lives").expect("its account");
    let wakes = figure(&asleep, "@x", "Wakes").expect("its account");
    assert!(figure(&asleep, "@x", "CpuNs") >= Some(awake));
    assert_eq!(accounts(&host), asleep, "an asleep container uses nothing");
    host.dm(&["wake", "x"]).ok();
    host.dm(&["exec", "x", "sh", "-c", BURN_A_LITTLE]).ok();
    let woken = accounts(&host);
    assert_eq!(figure(&woken, "@x", "Wakes"), Some(wakes + 1));
    assert_eq!(figure(&woken, "@x", "Lives"), Some(lives + 1));
    assert!(figure(&woken, "@x", "CpuNs") > figure(&asleep, "@x", "CpuNs"));
    host.dm(&["restart", "--time", "0", "x"]).ok();
    assert_eq!(charged(&host, "@x", "Lives"), lives + 2);
    host.dm(&["rename", "x", "y"]).ok();
    let before = accounts(&host);
    assert_eq!(figure(&before, "@y", "Lives"), Some(lives + 2), "it is named as the container is");
    let root = figure(&before, "root", "CpuNs").expect("root");
    let moved = figure(&before, "@y", "CpuNs").expect("its account");
    host.dm(&["rm", "--force", "y"]).ok();
    let after = accounts(&host);
    assert_eq!(figure(&after, "@y", "CpuNs"), None);
    assert!(figure(&after, "root", "CpuNs") >= Some(root + moved));
    assert_eq!(figure(&after, "root", "Lives"), Some(lives + 2));
    assert_near(sum(&after, "CpuNs"), of_containers_ns(&host));
    assert_eq!(accounts(&host).first(), after.first(), "the balance moves once");
}

/// Processes that end while others look, and a storm of forks that is killed in its middle.
#[test]
fn vm_short_lived_processes_are_charged_to_their_container() {
    const FORKS: &str = "i=0; while [ $i -lt 300 ]; do /bin/busybox true & i=$((i+1)); done; wait";
    const STORM: &str =
        "f() { while :; do /bin/busybox true; done; }; for i in 1 2 3 4 5 6 7 8; do f & done; wait";
    let host = Host::with_busybox();
    host.dm(&["run", "-d", "--name", "other", "busybox", "sleep", "100000"]).ok();
    host.dm(&["run", "--rm", "busybox", "sh", "-c", FORKS]).ok();
    assert_near(sum(&accounts(&host), "CpuNs"), of_containers_ns(&host));
    host.dm(&["run", "-d", "--name", "x", "--pids", "100", "busybox", "sh", "-c", STORM]).ok();
    let cgroup = id(&host, "x");
    let burnt = || kernel_ns(&host, &cgroup) >= 200_000_000;
    assert!(wait_until(soon(), burnt), "the storm does not begin");
    accounts(&host);
    host.dm(&["rm", "--force", "x"]).ok();
    let all = accounts(&host);
    assert_near(sum(&all, "CpuNs"), of_containers_ns(&host));
    assert!(figure(&all, "root", "CpuNs") >= Some(200_000_000), "{all:?}");
}

#[test]
fn drowsy_wakes_are_counted_in_one_life() {
    let host = Host::with_busybox();
    host.dm(&["run", "-d", "--name", "x", "busybox", "httpd", "-f", "-h", "/www"]).ok();
    for _ in 0..3 {
        // A container that was active when it was frozen wakes at once.
        let drowsy = wait_until(soon(), || {
            host.dm(&["sleep", "--drowsy", "x"]).ok();
            host.state_of("x") == "drowsy"
        });
        assert!(drowsy, "it stays awake");
        let before = charged(&host, "@x", "Wakes");
        assert_eq!(host.state_of("x"), "drowsy", "a look does not wake");
        host.dm(&["wake", "x"]).ok();
        assert_eq!(charged(&host, "@x", "Wakes"), before + 1);
    }
    assert_eq!(charged(&host, "@x", "Lives"), 1);
}

#[test]
fn containers_that_are_removed_at_their_end_are_charged_to_root() {
    let host = Host::with_busybox();
    for _ in 0..3 {
        host.dm(&["run", "--rm", "busybox", "sh", "-c", BURN_A_LITTLE]).ok();
    }
    let all = accounts(&host);
    assert_eq!(all.len(), 1, "{all:?}");
    assert_eq!(figure(&all, "root", "Lives"), Some(3));
    assert!(figure(&all, "root", "CpuNs") > Some(0));
}

#[test]
fn made_account_takes_its_containers_and_keeps_their_balance() {
    let host = Host::with_busybox();
    assert_eq!(host.dm(&["account", "create", "--label", "customer=7", "c"]).ok(), "1");
    assert_eq!(host.dm(&["account", "create", "--parent", "c", "shop"]).ok(), "2");
    let global = ["account", "create", "--number", "1073741824", "--keep-days", "3", "g"];
    assert_eq!(host.dm(&global).ok(), "1073741824");
    host.dm(&["run", "--rm", "--account", "shop", "busybox", "sh", "-c", BURN_A_LITTLE]).ok();
    host.dm(&["run", "-d", "--name", "x", "--account", "shop", "busybox", "sleep", "100000"]).ok();
    assert_eq!(host.inspect("x")["account"], "shop");
    let all = accounts(&host);
    assert_eq!(figure(&all, "shop", "Lives"), Some(2));
    assert_eq!(figure(&all, "shop", "Containers"), Some(1));
    assert_eq!(figure(&all, "c", "Lives"), Some(0));
    let whole = host.dm(&["account", "inspect", "shop"]).ok();
    let whole: Value = serde_json::from_str(&whole).expect("JSON");
    assert_eq!(whole[0]["Labels"]["customer"], "7", "shared with its parent: {whole}");
    assert_eq!(whole[0]["Shared"], serde_json::json!(["keep-days", "labels"]));
    assert_eq!(whole[0]["Containers"], serde_json::json!(["x"]));

    // A clone has the account of its original.
    host.dm(&["clone", "--name", "y", "x"]).ok();
    assert_eq!(host.inspect("y")["account"], "shop");

    let refused = host.dm(&["account", "rm", "c"]).fails();
    assert!(refused.contains("shop"), "{refused}");
    let refused = host.dm(&["account", "rm", "shop"]).fails();
    assert!(refused.contains("x, y") && refused.contains("remove these"), "{refused}");
    host.dm(&["rm", "--force", "x", "y"]).ok();
    let refused = host.dm(&["account", "rm", "shop"]).fails();
    assert!(refused.contains("--merge"), "{refused}");

    let report = |options: &[&str]| {
        host.dm(&[&["account", "report", "--format", "csv", "--noheading"], options].concat()).ok()
    };
    let lives = charged(&host, "shop", "Lives");
    let of =
        |line: &str| line.split(',').nth(11).expect("a cell").parse::<u64>().expect("a number");
    assert_eq!(of(report(&["shop"]).trim()), lives);
    assert_eq!(of(report(&["c"]).trim()), 0);
    assert_eq!(of(report(&["--recursive", "c"]).trim()), lives);
    assert_eq!(of(report(&["--until", "2001-01-01", "shop"]).trim()), 0);
    let daily = report(&["--days", "--since", "2001-01-01", "shop"]);
    assert_eq!(daily.lines().map(of).sum::<u64>(), lives, "{daily}");

    assert_eq!(host.dm(&["account", "rm", "--merge", "shop"]).ok(), "shop");
    let all = accounts(&host);
    assert_eq!(figure(&all, "shop", "Lives"), None);
    assert_eq!(figure(&all, "c", "Lives"), Some(lives));
    host.dm(&["account", "rm", "g"]).ok();
    assert_eq!(host.dm(&["account", "create", "next"]).ok(), "3", "a number is not given again");
    let line = host.dm(&["run", "--rm", "--account", "shop", "busybox", "true"]).err(125);
    assert!(line.contains("account create shop"), "{line}");
}

#[test]
fn accounts_move_and_share_again() {
    let host = Host::new();
    for (name, parent) in [("a", "root"), ("b", "a"), ("c", "b")] {
        host.dm(&["account", "create", "--parent", parent, name]).ok();
    }
    let shown = |name: &str| -> Value {
        let text = host.dm(&["account", "inspect", name]).ok();
        serde_json::from_str::<Value>(&text).expect("JSON")[0].clone()
    };
    host.dm(&["account", "set", "--keep-days", "30", "--label", "k=1", "a"]).ok();
    assert_eq!((&shown("c")["KeepDays"], &shown("c")["Labels"]["k"]), (&30.into(), &"1".into()));
    host.dm(&["account", "set", "--label", "l=2", "c"]).ok();
    host.dm(&["account", "set", "--label", "k=3", "a"]).ok();
    assert_eq!(shown("c")["Labels"], serde_json::json!({"k": "1", "l": "2"}));
    assert_eq!(shown("b")["Labels"], serde_json::json!({"k": "3"}));
    host.dm(&["account", "set", "--share", "labels", "--parent", "root", "c"]).ok();
    assert_eq!(shown("c")["Labels"], serde_json::json!({}));
    assert_eq!((&shown("c")["KeepDays"], &shown("c")["Parent"]), (&400.into(), &"root".into()));
    host.dm(&["account", "set", "--keep-days", "9", "root"]).ok();
    assert_eq!(shown("c")["KeepDays"], 9);
    let line = host.dm(&["account", "set", "--parent", "b", "a"]).err(125);
    assert!(line.contains("below"), "{line}");
    assert_eq!(shown("a")["Parent"], "root", "a refused change changes nothing");
}

#[test]
fn report_has_all_forms() {
    let host = Host::with_busybox();
    host.dm(&["run", "--name", "x", "busybox", "true"]).ok();
    let csv = host.dm(&["account", "report", "--format", "csv"]).ok();
    let mut lines = csv.lines();
    let columns = lines.next().expect("headings").split(',').count();
    let rows: Vec<&str> = lines.collect();
    assert_eq!(rows.len(), 2, "{csv}");
    assert!(rows.iter().all(|row| row.split(',').count() == columns), "{csv}");
    let json = host.dm(&["account", "report", "--format", "json", "@x"]).ok();
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!((&json[0]["Name"], &json[0]["Lives"]), (&"@x".into(), &1.into()));
    let text = host.dm(&["account", "report", "--format", "{{.Name}} {{.Lives}}", "@x"]).ok();
    assert_eq!(text, "@x 1");
    let table = host.dm(&["account", "report", "--days"]).ok();
    assert!(table.starts_with("NAME") && table.contains("@x"), "{table}");
    assert_eq!(host.dm(&["account", "ls", "--quiet"]).ok(), "root\n@x");
    host.dm(&["account", "report", "--since", "2026-02-02", "--until", "2026-02-01"]).err(125);
}

/// The end of a life counts it once, and so does a look at accounts, whichever step is the last one.
#[test]
fn charge_survives_kill_at_any_step() {
    let host = Host::with_busybox();
    host.dm(&["run", "-d", "--name", "other", "busybox", "sleep", "100000"]).ok();
    host.dm(&["run", "-d", "--name", "x", "busybox", "sleep", "100000"]).ok();
    host.dm(&["stop", "--time", "0", "x"]).ok();
    let mut lives = charged(&host, "@x", "Lives");
    let mut cpu_ns = charged(&host, "@x", "CpuNs");
    for command in [&["stop", "--time", "0", "x"][..], &["account", "ls"]] {
        let mut number = 0;
        loop {
            host.dm(&["start", "x"]).ok();
            lives += 1;
            if command[0] == "account" {
                // A life that is in the file, and one that is read.
                host.dm(&["restart", "--time", "0", "x"]).ok();
                lives += 1;
            }
            let mut led = Led::start(&host.dormouse(command), &dormouse());
            let call = (0..=number).try_fold("", |_, _| led.next_step());
            if call.is_some() {
                led.kill();
            }
            let what = format!("{command:?} killed at step {number}, {call:?}");
            host.dm(&["stop", "--time", "0", "x"]).ok();
            let all = accounts(&host);
            assert_eq!(figure(&all, "@x", "Lives"), Some(lives), "{what}");
            let now = figure(&all, "@x", "CpuNs").expect("its account");
            assert!(now > cpu_ns, "{what}");
            assert_eq!(
                without_faults(accounts(&host)),
                without_faults(all),
                "{what}: a sleep runs"
            );
            cpu_ns = now;
            if call.is_none() {
                break;
            }
            number += 1;
        }
        assert!(number > 5, "{command:?} has {number} steps");
    }
    assert_near(sum(&accounts(&host), "CpuNs"), of_containers_ns(&host));
}

#[test]
fn removal_of_account_survives_kill_at_any_step() {
    let host = Host::with_busybox();
    host.dm(&["account", "create", "above"]).ok();
    let mut lives = 0;
    for command in
        [&["account", "rm", "--merge", "x"][..], &["account", "create", "--parent", "above", "x"]]
    {
        let mut number = 0;
        loop {
            if command[1] == "rm" {
                host.dm(&["account", "create", "--parent", "above", "x"]).ok();
                host.dm(&["run", "--rm", "--account", "x", "busybox", "true"]).ok();
                lives += 1;
            }
            let mut led = Led::start(&host.dormouse(command), &dormouse());
            let call = (0..=number).try_fold("", |_, _| led.next_step());
            if call.is_some() {
                led.kill();
            }
            let what = format!("{command:?} killed at step {number}, {call:?}");
            let all = accounts(&host);
            assert_eq!(sum(&all, "Lives"), lives, "{what}: {all:?}");
            if figure(&all, "x", "Lives").is_some() {
                host.dm(&["account", "rm", "--merge", "x"]).ok();
            }
            assert_eq!(charged(&host, "above", "Lives"), lives, "{what}");
            if call.is_none() {
                break;
            }
            number += 1;
        }
        assert!(number > 3, "{command:?} has {number} steps");
    }
}

#[test]
fn many_ends_are_added_up_without_a_look() {
    let host = Host::with_busybox();
    let run = || {
        host.dm(&["run", "--rm", "busybox", "true"]).ok();
        host.await_removals(); // charged behind the answer
    };
    run();
    let charges = host.root().join("lib/accounts/charges");
    let line = fs::read_to_string(&charges).expect("a charge");
    // As after thousands of ends, of which each was charged.
    fs::write(&charges, line.repeat((1 << 20) / line.len() + 1)).expect("written");
    run();
    assert!(!charges.exists(), "the end of a life adds up a large file");
    assert!(balance(&host, "root.json").exists());
    assert_eq!(charged(&host, "root", "Lives"), 2);
}

#[test]
fn damaged_records_are_named_and_set_aside() {
    let host = Host::with_busybox();
    host.dm(&["account", "create", "c"]).ok();
    host.dm(&["run", "--name", "x", "--account", "c", "busybox", "true"]).ok();
    assert_eq!(charged(&host, "c", "Lives"), 1);
    // A line that a killed command has cut short.
    let charges = host.root().join("lib/accounts/charges");
    fs::write(&charges, "\n{\"to\":\"root\",\"li").expect("written");
    host.dm(&["start", "x"]).ok();
    host.wait_for_state("x", "stopped");
    // A charge that arrives after the balance was damaged would begin the next one.
    let cgroup = id(&host, "x");
    host.await_charged(&cgroup);
    assert_eq!(charged(&host, "c", "Lives"), 2);

    let file = balance(&host, "made-c.json");
    let text = fs::read_to_string(&file).expect("a balance");
    fs::write(&file, text.replacen("\"lives\":2", "\"lives\":9", 1)).expect("written");
    assert_eq!(charged(&host, "c", "Lives"), 0, "its checksum is another");
    let events = fs::read_to_string(host.root().join("lib/events")).expect("events");
    assert!(events.contains("charge_lost") && events.contains("made-c."), "{events}");
    let all = fs::read_dir(file.parent().expect("a directory")).expect("a directory");
    let names: Vec<_> = all.map(|e| e.expect("an entry").file_name().into_string()).collect();
    assert!(names.iter().flatten().any(|name| name.ends_with(".damaged")), "{names:?}");

    let record = host.root().join("lib/accounts/made/c.json");
    fs::write(&record, "{}").expect("written");
    let line = host.dm(&["account", "ls"]).err(125);
    assert!(line.contains("made/c.json") && line.contains("damaged"), "{line}");
    // A container ends, whatever its account is like.
    host.dm(&["start", "x"]).ok();
    host.wait_for_state("x", "stopped");
    fs::remove_file(&record).expect("removed");
    assert_eq!(charged(&host, "root", "Lives"), 1, "without its account it is charged to root");
}

#[test]
fn daemon_charges_running_containers_by_itself() {
    let host = Host::with_busybox();
    let config = host.root().join("etc/config.toml");
    let text = fs::read_to_string(&config).expect("the settings");
    fs::write(&config, text + "[account]\nevery = \"1s\"\n").expect("written");
    let mut daemon = crate::contracts::Daemon::start(&host);
    host.dm(&["run", "-d", "--name", "x", "busybox", "sleep", "100000"]).ok();
    let file = balance(&host, &format!("own-{}.json", id(&host, "x")));
    let read = || fs::read_to_string(&file).is_ok_and(|text| text.contains("cpu_ns"));
    assert!(wait_until(soon(), read), "no balance is written");
    daemon.kill();
    assert_eq!(charged(&host, "@x", "Lives"), 1);
}

/// One table of `account top`, and the rows of its accounts.
#[track_caller]
fn table(line: &str) -> (Value, Vec<Value>) {
    let table: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}"));
    let rows = table["Accounts"].as_array().expect("accounts").clone();
    (table, rows)
}

/// The CPU time of an account in all tables together.
#[track_caller]
fn shown_ns(tables: &str, account: &str) -> f64 {
    let of = |line: &str| {
        let (table, rows) = table(line);
        let row = rows.iter().find(|row| row["Name"] == account);
        let percent = row.and_then(|row| row["CpuPercent"].as_f64()).unwrap_or(0.0);
        percent * 1e7 * table["Seconds"].as_f64().expect("a number")
    };
    tables.lines().map(of).sum()
}

#[test]
fn top_shows_the_cpu_time_of_accounts_per_second() {
    let host = Host::with_busybox();
    host.dm(&["account", "create", "customer"]).ok();
    host.dm(&["account", "create", "--parent", "customer", "shop"]).ok();
    host.dm(&["run", "-d", "--name", "x", "--account", "shop", "busybox", "sh", "-c", BURN]).ok();
    host.dm(&["run", "-d", "--name", "idle", "busybox", "sleep", "100000"]).ok();
    let cgroup = id(&host, "x");
    let before = charged(&host, "shop", "CpuNs");
    let top = ["account", "top", "--count", "3", "--every", "300ms", "--format", "json"];
    let tables = host.dm(&[&top[..], &["--recursive"]].concat()).ok();
    let counted = kernel_ns(&host, &cgroup) - before;
    assert_eq!(tables.lines().count(), 3, "{tables}");
    for line in tables.lines() {
        let (whole, rows) = table(line);
        let row = |name: &str| rows.iter().find(|row| row["Name"] == name).expect("a row");
        let percent = |row: &Value| row["CpuPercent"].as_f64().expect("a number");
        let shop = percent(row("shop"));
        assert_eq!(percent(row("customer")), shop, "with the accounts below: {line}");
        assert!(percent(row("root")) >= shop && percent(&whole) >= shop, "{line}");
        assert_eq!(row("shop")["Containers"], 1);
        assert_eq!(
            (&row("@idle")["Containers"], &row("root")["Containers"]),
            (&1.into(), &2.into())
        );
    }
    // The tables are a part of the time from before to after.
    let used = shown_ns(&tables, "shop");
    assert!(used > 0.0 && used <= counted as f64 * 1.000_001, "{used} of {counted} ns: {tables}");
    let text = host.dm(&["account", "top", "--count", "2", "--every", "100ms"]).ok();
    assert_eq!(text.matches("NAME").count(), 2, "{text}");
    assert!(text.contains("shop") && !text.contains("customer"), "{text}");
    // A look at it charges nothing.
    let file = balance(&host, "made-shop.json");
    let read = || fs::read_to_string(&file).expect("a balance");
    let balance = read();
    host.dm(&["account", "top", "--count", "1", "--every", "100ms"]).ok();
    assert_eq!(read(), balance);
    for bad in [&["--every", "1ms"][..], &["--count", "0"], &["--format", "xml"]] {
        host.dm(&[&["account", "top"], bad].concat()).err(125);
    }
}

/// Lives that end between two tables are part of the next one.
#[test]
fn top_has_containers_that_have_ended() {
    let host = Host::with_busybox();
    let file = host.dir().join("tables");
    let out = fs::File::create(&file).expect("a file");
    let top = ["account", "top", "--every", "300ms", "--format", "json"];
    let mut child = host.dormouse(&top).stdout(out).spawn().expect("it starts");
    let tables = || fs::read_to_string(&file).expect("a file");
    let reaches = |count: usize| wait_until(soon(), || tables().lines().count() >= count);
    assert!(reaches(1), "no table");
    for _ in 0..3 {
        host.dm(&["run", "--rm", "busybox", "sh", "-c", BURN_A_LITTLE]).ok();
    }
    host.await_removals();
    // The one in progress may have been read before.
    assert!(reaches(tables().lines().count() + 2), "{}", tables());
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("it runs");
    assert_eq!(child.wait().expect("it ends").code(), Some(0), "a signal ends it in order");
    let used = shown_ns(&tables(), "root");
    let charged = charged(&host, "root", "CpuNs") as f64;
    assert!((used - charged).abs() < charged / 1e6, "{used} of {charged} ns: {}", tables());
}

#[test]
fn top_ends_at_a_key_and_restores_the_terminal() {
    let host = Host::with_busybox();
    host.dm(&["run", "-d", "--name", "x", "busybox", "sleep", "100000"]).ok();
    for key in ["q", "\u{3}"] {
        let top = host.dormouse(&["account", "top", "--every", "100ms"]);
        let mut shell = std::process::Command::new("sh");
        shell
            .args(["-c", "\"$@\" && stty -a && exit 7", "sh"])
            .arg(top.get_program())
            .args(top.get_args());
        let mut terminal = Terminal::spawn(&shell);
        terminal.expect("@x");
        terminal.send("x");
        terminal.expect("@x");
        terminal.send(key);
        terminal.expect("isig icanon");
        assert_eq!(terminal.wait(), 7, "{key:?}");
    }
}
