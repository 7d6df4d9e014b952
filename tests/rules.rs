//! Rules: a file is installed whole or not at all, and the table of the kernel's gates follows the installed rules, the
//! hierarchy of accounts and the containers.

use std::cell::RefCell;
use std::fs;
use std::path::PathBuf;

use dormouse_bpf::call::{self, Map};
use dormouse_bpf::gates::Rule;
use dormouse_testkit::{Host, Led, dormouse, soon, wait_until};
use serde_json::Value;

use crate::gates::{accounts, assert_taken, clients, work};

const DATABASE: &str = r#"
[[rule]]
name = "the database works for its client"
gate = "receive"
home = "@db"
peer = "customers"
port = 5432
account = "peer"
"#;

/// A file with rules on this host.
fn file(host: &Host, name: &str, text: &str) -> String {
    let path = host.dir().join(name);
    fs::write(&path, text).expect("written");
    path.to_str().expect("plain text").to_owned()
}

/// Installs rules, of which some may be inert.
#[track_caller]
fn apply(host: &Host, path: &str) {
    let applied = host.dm(&["rules", "apply", path]);
    assert_eq!(applied.status, 0, "{applied}");
}

fn installed(host: &Host) -> PathBuf {
    host.root().join("lib/accounts/rules.toml")
}

/// The rules that `rules show` lists.
#[track_caller]
fn shown(host: &Host) -> Vec<Value> {
    let text = host.dm(&["rules", "show", "--format", "json"]).ok();
    serde_json::from_str(&text).expect("JSON")
}

/// Lines and states of the rules; a shared container has its name instead of a line.
#[track_caller]
fn states(host: &Host) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let place =
        |row: &Value| if row["Line"].is_null() { text(&row["Shared"]) } else { text(&row["Line"]) };
    shown(host).iter().map(|row| (place(row), text(&row["State"]))).collect()
}

/// Accounts customers, shop and blog below it, and other.
fn with_accounts(host: Host) -> Host {
    for (name, parent) in
        [("customers", "root"), ("shop", "customers"), ("blog", "customers"), ("other", "root")]
    {
        host.dm(&["account", "create", "--parent", parent, name]).ok();
    }
    host
}

#[test]
fn rules_are_applied_shown_and_explained() {
    let host = with_accounts(Host::with_busybox());
    host.dm(&["create", "--name", "db", "busybox", "true"]).ok();
    assert_eq!(host.dm(&["rules", "show", "--file"]).ok(), "");
    let path = file(&host, "rules", DATABASE);
    assert_eq!(host.dm(&["rules", "check", &path]).ok(), "1 rule");
    assert!(shown(&host).is_empty(), "a check installs nothing");
    assert_eq!(host.dm(&["rules", "apply", &path]).ok(), "1 rule");
    assert_eq!(host.dm(&["rules", "show", "--file"]).stdout, DATABASE);
    let row = &shown(&host)[0];
    for (key, value) in [
        ("Line", 2.into()),
        ("Name", "the database works for its client".into()),
        ("Gate", "receive".into()),
        ("Home", "@db".into()),
        ("Label", "any".into()),
        ("Peer", "customers".into()),
        ("Port", 5432.into()),
        ("Path", "".into()),
        ("Account", "peer".into()),
        ("Priority", 0.into()),
        ("State", "active".into()),
    ] as [(&str, Value); 11]
    {
        assert_eq!(row[key], value, "{key} of {row}");
    }
    let table = host.dm(&["rules", "show"]).ok();
    assert!(table.starts_with("LINE") && table.contains("@db"), "{table}");
    assert_eq!(host.dm(&["rules", "show", "--format", "{{.Line}} {{.Peer}}"]).ok(), "2 customers");

    let explain = |more: &[&str]| {
        host.dm(&[&["rules", "explain", "--gate", "receive", "--home", "@db"], more].concat()).ok()
    };
    assert_eq!(
        explain(&["--peer", "shop", "--port", "5432"]),
        "line 2 ('the database works for its client') decides: the task then works for shop"
    );
    for kept in
        [&["--peer", "shop", "--port", "80"][..], &["--peer", "other", "--port", "5432"], &[]]
    {
        assert_eq!(explain(kept), "no rule matches: the task goes on to work for @db", "{kept:?}");
    }
    let more = format!(
        "{DATABASE}[[rule]]\ngate = \"receive\"\npeer = \"=shop\"\naccount = \"other\"\npriority = 3\n\
         [[rule]]\ngate = \"receive\"\nhome = \"@db\"\npeer = \"customers\"\nport = 5432\naccount = \"peer\"\n"
    );
    // From standard input, with a note about a rule that decides nothing.
    let applied = host.dm_with_input(more.as_bytes(), &["rules", "apply", "-"]);
    assert!(applied.stderr.contains("line 14: decides nothing: line 2 "), "{applied}");
    assert_eq!(applied.ok(), "3 rules");
    assert_eq!(
        explain(&["--peer", "shop", "--port", "5432", "--label", "blog"]),
        "line 9 decides: the task then works for other\n\
         line 2 ('the database works for its client') matches, too: its priority, 0, is below 3\n\
         line 14 matches, too: its priority, 0, is below 3"
    );
    let json = explain(&["--peer", "blog", "--port", "5432", "--format", "json"]);
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!((&json["Label"], &json["Decides"]["Line"]), (&"blog".into(), &2.into()));
    assert_eq!(json["Others"][0]["Line"], 14);
    assert_eq!(host.dm_with_input(b"", &["rules", "apply", "-"]).ok(), "0 rules");
    assert!(shown(&host).is_empty());
}

/// The worked example of docs/accounts.md, with the output that it shows.
#[test]
fn example_of_the_guide_decides_as_it_says() {
    let host = Host::with_busybox();
    let guide = include_str!("../docs/accounts.md");
    let blocks: Vec<&str> = guide.split("```").skip(1).step_by(2).collect();
    let block = |begin: &str| {
        let found = blocks.iter().find_map(|block| block.strip_prefix(begin));
        found.unwrap_or_else(|| panic!("the guide has no block that begins with {begin}"))
    };
    for (name, parent) in [
        ("customers", "root"),
        ("smith", "customers"),
        ("smith-tests", "smith"),
        ("jones", "customers"),
        ("hoster", "root"),
    ] {
        host.dm(&["account", "create", "--parent", parent, name]).ok();
    }
    for name in ["db", "front"] {
        host.dm(&["create", "--name", name, "busybox", "true"]).ok();
    }
    let rules = block("toml\n[[rule]]").replacen("", "[[rule]]", 1);
    let applied = host.dm_with_input(rules.as_bytes(), &["rules", "apply", "-"]);
    assert_eq!(applied.stderr, "", "no rule is inert or covered");
    assert_eq!(applied.ok(), "4 rules");
    let console = block("console\n# dormouse rules explain ");
    let (arguments, output) = console.split_once('\n').expect("a command and its output");
    let arguments: Vec<&str> = arguments.split_whitespace().collect();
    let explained = host.dm(&[&["rules", "explain"], &arguments[..]].concat());
    assert_eq!(explained.ok(), output.trim_end());
    for (home, label, peer, port, becomes) in [
        ("@db", "@db", "smith", "5432", "smith"),
        ("@db", "smith", "jones", "5432", "jones"),
        ("@db", "smith", "hoster", "5432", "smith"),
        ("@front", "jones", "smith", "40000", "smith"),
        ("@front", "smith", "hoster", "80", "@front"),
        ("@front", "smith", "", "80", "@front"),
    ] {
        let args = ["rules", "explain", "--gate", "receive", "--home", home, "--label", label];
        let peer = if peer.is_empty() { vec![] } else { vec!["--peer", peer] };
        let more = ["--port", port, "--format", "{{.Label}}"];
        let found = host.dm(&[&args[..], &peer, &more].concat()).ok();
        assert_eq!(found, becomes, "{home} {label} {peer:?} {port}");
    }
}

/// All errors are reported with file, line and reason, and the rules in force stay.
#[test]
fn bad_rules_change_nothing() {
    let host = with_accounts(Host::new());
    let path = file(&host, "rules", DATABASE);
    apply(&host, &path);
    let before = fs::read(installed(&host)).expect("installed");
    let conflict = "[[rule]]\ngate = \"receive\"\nhome = \"shop\"\naccount = \"home\"\n\
                    [[rule]]\ngate = \"receive\"\npeer = \"blog\"\naccount = \"peer\"\n";
    type Case<'c> = (&'c [u8], &'c [&'c str]);
    let cases: [Case<'_>; 6] = [
        (b"[[rule]]\ngate = \"recieve\"\nport = 0\n", &["line 1: ", "line 2: ", "line 3: "]),
        (
            b"[[rule]]\ngate = \"receive\"\naccount = \"sop\"\n",
            &["line 1: no account is called 'sop'"],
        ),
        (conflict.as_bytes(), &["line 5: it matches passages that line 1 matches"]),
        (b"[[rule]]\ngate = \"receive\n", &["line 2: "]),
        (b"\n\xff\n", &["line 2: "]),
        (b"[[rule]]\nname = \"\\u001b[2J\"\ngate = \"fork\"\naccount = \"keep\"\n", &["line 2: "]),
    ];
    for (text, expected) in cases {
        let path = host.dir().join("bad");
        fs::write(&path, text).expect("written");
        let path = path.to_str().expect("plain text");
        let text = String::from_utf8_lossy(text);
        for (verb, named) in [("check", path), ("apply", path), ("apply", "standard input")] {
            let refused = match named {
                "standard input" => {
                    host.dm_with_input(&fs::read(path).expect("the file"), &["rules", verb, "-"])
                }
                path => host.dm(&["rules", verb, path]),
            };
            assert_eq!(refused.status, 125, "{text}: {refused}");
            let lines: Vec<&str> = refused.stderr.lines().collect();
            assert_eq!(lines.len(), expected.len(), "{text}: {refused}");
            for (line, expected) in lines.iter().zip(expected) {
                assert!(line.contains(&format!("{named}: {expected}")), "{text}: {line}");
            }
            assert_eq!(fs::read(installed(&host)).expect("installed"), before, "{text}");
        }
    }
    let many = "[[rule]]\ngate = \"fork\"\naccount = \"keep\"\n".repeat(257);
    let line = host.dm_with_input(many.as_bytes(), &["rules", "apply", "-"]).err(125);
    assert!(line.contains("line 769: only 256 rules"), "{line}");
    let line = host.dm_with_input(&vec![b'#'; 1 << 20], &["rules", "apply", "-"]).err(125);
    assert!(line.contains("256 KiB"), "{line}");
    host.dm(&["rules", "check", "/no/such/file"]).err(125);
    for wrong in [
        &["--gate", "opne", "--home", "shop"][..],
        &["--gate", "fork", "--home", "shop", "--path", "/srv"],
        &["--gate", "message", "--home", "shop", "--port", "1"],
        &["--gate", "fork", "--home", "shop", "--peer", "blog"],
        &["--gate", "fork", "--home", "shop", "--port", "1"],
        &["--gate", "receive", "--home", "sop"],
        &["--gate", "receive", "--home", "@gone"],
        &["--gate", "receive", "--home", "shop", "--port", "0"],
        &["--home", "shop"],
    ] {
        host.dm(&[&["rules", "explain"], wrong].concat()).err(125);
    }
    assert_eq!(fs::read(installed(&host)).expect("installed"), before);
}

#[test]
fn account_of_a_rule_stays_and_a_container_leaves_its_rule_inert() {
    let host = with_accounts(Host::with_busybox());
    let text =
        format!("{DATABASE}[[rule]]\ngate = \"fork\"\nlabel = \"=blog\"\naccount = \"other\"\n");
    let path = file(&host, "rules", &text);
    // A container that is to come, which may be a misspelled one.
    let applied = host.dm(&["rules", "apply", &path]);
    assert!(applied.stderr.contains("line 2: inert: no container is called 'db'"), "{applied}");
    assert_eq!(applied.status, 0);
    let inert = |line: &str| (line.to_owned(), "inert".to_owned());
    let active = |line: &str| (line.to_owned(), "active".to_owned());
    assert_eq!(states(&host), [active("9"), inert("2")]);
    host.dm(&["create", "--name", "db", "busybox", "true"]).ok();
    assert_eq!(states(&host), [active("2"), active("9")]);
    host.dm(&["rename", "db", "old"]).ok();
    assert_eq!(states(&host), [active("9"), inert("2")]);
    host.dm(&["create", "--name", "db", "--account", "shop", "busybox", "true"]).ok();
    let row = shown(&host).pop().expect("a rule");
    assert!(row["Why"].as_str().is_some_and(|why| why.contains("charged to 'shop'")), "{row}");
    host.dm(&["rm", "db"]).ok();
    host.dm(&["rename", "old", "db"]).ok();
    assert_eq!(states(&host), [active("2"), active("9")]);

    for (account, line) in [("blog", "line 9"), ("other", "line 9")] {
        let refused = host.dm(&["account", "rm", account]).fails();
        assert!(refused.contains(line) && refused.contains("rules apply"), "{refused}");
        host.dm(&["account", "rm", "--merge", account]).fails();
    }
    host.dm(&["account", "rm", "shop"]).ok();
    let refused = host.dm(&["account", "rm", "customers"]).fails();
    assert!(refused.contains("blog"), "accounts are below it: {refused}");
    host.dm(&["account", "set", "--parent", "other", "blog"]).ok();
    let refused = host.dm(&["account", "rm", "customers"]).fails();
    assert!(refused.contains("line 2 ('the database works for its client')"), "{refused}");
    host.dm_with_input(b"", &["rules", "apply", "-"]).ok();
    for account in ["blog", "customers", "other"] {
        host.dm(&["account", "rm", account]).ok();
    }
}

#[test]
fn hierarchy_changes_what_rules_match_and_causes_no_conflict() {
    let host = with_accounts(Host::new());
    let text = "[[rule]]\ngate = \"receive\"\nhome = \"customers\"\npeer = \"other\"\naccount = \"peer\"\n\
                [[rule]]\ngate = \"receive\"\nhome = \"other\"\naccount = \"home\"\n";
    let path = file(&host, "rules", text);
    host.dm(&["rules", "apply", &path]).ok();
    let label = |home: &str| {
        let args = [
            "rules", "explain", "--gate", "receive", "--home", home, "--label", "blog", "--peer",
            "other",
        ];
        host.dm(&[&args[..], &["--format", "{{.Label}}"]].concat()).ok()
    };
    assert_eq!(label("shop"), "other");
    host.dm(&["account", "set", "--parent", "root", "shop"]).ok();
    assert_eq!(label("shop"), "blog", "no rule matches");
    // Below other, both rules match, and the first is more specific.
    host.dm(&["account", "set", "--parent", "other", "customers"]).ok();
    host.dm(&["account", "set", "--parent", "root", "customers"]).ok();
    // Below customers, neither is.
    let refused = host.dm(&["account", "set", "--parent", "customers", "other"]).err(125);
    assert!(refused.contains("line 6") && refused.contains("line 1"), "{refused}");
    let parent = host.dm(&["account", "ls", "--format", "{{.Name}} {{.Parent}}"]).ok();
    assert!(parent.lines().any(|line| line == "other root"), "{parent}");
}

#[test]
fn shared_container_works_for_its_clients_below_all_rules() {
    let host = with_accounts(Host::with_busybox());
    host.dm(&["run", "-d", "--name", "db", "--shared", "busybox", "sleep", "100000"]).ok();
    assert_eq!(host.inspect("db")["shared"], true);
    let text = host.dm(&["inspect", "--format", "table", "db"]).stdout;
    assert!(text.lines().any(|line| line.starts_with("shared")), "{text}");
    assert_eq!(states(&host), [("db".to_owned(), "active".to_owned())]);
    let explain = |more: &[&str]| {
        let args = ["rules", "explain", "--gate", "receive", "--home", "@db", "--port", "5432"];
        host.dm(&[&args[..], &["--label", "blog", "--format", "{{.Label}}"], more].concat()).ok()
    };
    assert_eq!(explain(&["--peer", "shop"]), "shop");
    assert_eq!(explain(&[]), "@db", "the peer is outside of all containers");
    let text = DATABASE.replace("account = \"peer\"", "account = \"other\"\npriority = -1000");
    let path = file(&host, "rules", &text);
    host.dm(&["rules", "apply", &path]).ok();
    assert_eq!(
        (explain(&["--peer", "shop"]), explain(&["--peer", "other"])),
        ("other".into(), "other".into())
    );

    // Clones and restored containers are shared as well.
    host.dm(&["clone", "--name", "two", "db"]).ok();
    host.dm(&["checkpoint", "db"]).ok();
    host.dm(&["restore", "--name", "three", "db"]).ok();
    host.dm(&["restore", "db"]).ok();
    host.put_to_sleep("db");
    for name in ["db", "two", "three"] {
        assert_eq!(host.inspect(name)["shared"], true, "{name}");
    }
    assert_eq!(states(&host).len(), 4);
    host.dm(&["rm", "--force", "db", "two", "three"]).ok();
    assert_eq!(states(&host), [("2".to_owned(), "inert".to_owned())]);
    for without in [&["--rm"][..], &["--account", "shop"], &["--account", "root"]] {
        let words = [&["run", "--shared"], without, &["busybox", "true"]].concat();
        let refused = host.dm(&words).err(125);
        assert!(refused.contains("account of its own"), "{refused}");
    }
    host.dm(&["run", "--name", "plain", "busybox", "true"]).ok();
    assert_eq!(host.inspect("plain")["shared"], false);
}

/// Whichever step is the last one, the old rules are installed or the new ones.
#[test]
fn application_of_rules_survives_kill_at_any_step() {
    let host = with_accounts(Host::new());
    let new = file(&host, "new", &DATABASE.replace("@db", "shop").replace("5432", "80"));
    let old = file(&host, "old", DATABASE);
    let port = || shown(&host)[0]["Port"].as_u64().expect("a port");
    let mut number = 0;
    let mut was_new = false;
    loop {
        apply(&host, &old);
        assert_eq!(port(), 5432);
        let mut led = Led::start(&host.dormouse(&["rules", "apply", &new]), &dormouse());
        let call = (0..=number).try_fold("", |_, _| led.next_step());
        if call.is_some() {
            led.kill();
        }
        let what = format!("killed at step {number}, {call:?}");
        let is_new = port() == 80;
        assert!(is_new || port() == 5432, "{what}");
        assert!(is_new >= was_new, "{what}: a later step has the old rules");
        was_new = is_new;
        // Nothing of it is in the way of what follows.
        let text = host.dm(&["rules", "show", "--file"]).ok();
        assert!(text.contains(if is_new { "shop" } else { "@db" }), "{what}: {text}");
        if call.is_none() {
            assert!(is_new);
            break;
        }
        number += 1;
    }
    assert!(number > 3, "it has {number} steps");
}

/// The ports of the rules that the kernel's programs have.
#[track_caller]
fn ports_in_the_kernel(host: &Host) -> Vec<u32> {
    // The bpffs is in the mount namespace of the host.
    let gates = host.root().join("run/gates");
    let gates = PathBuf::from(format!("/proc/{}/root{}", host.pid(), gates.display()));
    let map = |name: &str| {
        let found = call::pinned(&gates.join(name)).expect("a bpffs").expect("gates are loaded");
        Map::new(found).expect("a map")
    };
    let index = map("dm_gate_active").get(&0_u32.to_ne_bytes()).expect("read").expect("a number");
    let table = map("dm_gate_tables").get(&index).expect("read").expect("a table");
    let number = |at: usize| u32::from_ne_bytes(table[at..at + 4].try_into().expect("4 bytes"));
    // The header has 16 bytes, and the port of a row is at 28.
    let rows = usize::try_from(number(0)).expect("a number");
    (0..rows).map(|row| number(16 + row * size_of::<Rule>() + 28)).collect()
}

/// Whichever step of a change is the last one, the kernel follows the disk from the next command on.
#[test]
fn kernel_follows_the_disk_after_a_kill_at_any_step() {
    let host = with_accounts(Host::with_busybox());
    host.dm(&["create", "--name", "db", "busybox", "true"]).ok();
    let new = file(&host, "new", &DATABASE.replace("5432", "80"));
    let old = file(&host, "old", DATABASE);
    host.dm(&["gate", "load", "receive"]).ok();
    for (change, back) in [
        (&["rules", "apply", &new][..], &["rules", "apply", &old][..]),
        (&["rename", "db", "database"], &["rename", "database", "db"]),
    ] {
        apply(&host, &old);
        let mut number = 0;
        loop {
            let mut led = Led::start(&host.dormouse(change), &dormouse());
            let call = (0..=number).try_fold("", |_, _| led.next_step());
            if call.is_some() {
                led.kill();
            }
            let what = format!("{change:?} killed at step {number}, {call:?}");
            host.dm(&["ps"]).ok();
            let active = shown(&host).into_iter().filter(|row| row["State"] == "active");
            let ports = active.map(|row| row["Port"].as_u64().expect("a port") as u32);
            assert_eq!(ports_in_the_kernel(&host), ports.collect::<Vec<_>>(), "{what}");
            host.dm(back);
            if call.is_none() {
                break;
            }
            number += 1;
        }
        assert!(number > 3, "{change:?} has {number} steps");
    }
    let pending = host.root().join("lib/pending");
    assert_eq!(fs::read_dir(pending).expect("a directory").count(), 0);
}

#[test]
fn damaged_rules_are_named_and_replaced() {
    let host = with_accounts(Host::new());
    let path = file(&host, "rules", DATABASE);
    apply(&host, &path);
    let text = fs::read_to_string(installed(&host)).expect("installed");
    for damaged in [text.replace("5432", "5433"), String::new(), DATABASE.to_owned()] {
        fs::write(installed(&host), &damaged).expect("written");
        for command in [
            &["rules", "show"][..],
            &["rules", "explain", "--gate", "fork", "--home", "shop"],
            &["account", "rm", "blog"],
            &["account", "set", "--parent", "root", "blog"],
        ] {
            let line = host.dm(command).err(125);
            assert!(line.contains("rules.toml") && line.contains("rules apply"), "{line}");
        }
    }
    // Accounts that no rule concerns can be made and used.
    host.dm(&["account", "create", "next"]).ok();
    host.dm(&["account", "set", "--keep-days", "3", "blog"]).ok();
    apply(&host, &path);
    host.dm(&["account", "rm", "blog"]).ok();
}

/// Two sites, a front that asks them, and a database that they ask: the trace proposes the rules of the guide, and they
/// charge the sites for the database.
#[test]
fn trace_proposes_rules_for_what_it_sees() {
    let host = Host::with_busybox();
    let refused = host.dm(&["account", "trace", "--during", "100ms"]);
    assert!(refused.status != 0 && refused.stderr.contains("gate load receive"), "{refused}");
    for name in ["a", "b", "db"] {
        let burn = ["probe", "burn", "0.0.0.0", "80"];
        host.dm(&[&["run", "-d", "--name", name, "busybox"], &burn[..]].concat()).ok();
    }
    clients(&host, &["front"]);
    host.dm(&["gate", "load", "receive"]).ok();
    let empty = host.dm(&["account", "trace", "--during", "100ms"]).ok();
    assert!(empty.contains("# No container has received data"), "{empty}");
    for (client, services) in [("front", "a b"), ("a", "db"), ("b", "db")] {
        let again = format!(
            "until [ -e /tmp/stop ]; do for s in {services}; do probe work $s 80 2 100; done; done"
        );
        host.dm(&["exec", "-d", client, "sh", "-c", &again]).ok();
    }
    let text = RefCell::new(String::new());
    let is_complete = || {
        text.replace(host.dm(&["account", "trace", "--during", "1s"]).ok());
        let text = text.borrow();
        text.matches("whose answer it passes on").count() == 2 && text.contains("port = 80")
    };
    assert!(wait_until(soon(), is_complete), "{text:?}");
    let text = text.into_inner();
    for name in ["front", "a", "b"] {
        host.dm(&["exec", name, "touch", "/tmp/stop"]).ok();
    }
    let trace = || host.dm(&["account", "trace", "--during", "100ms"]).ok();
    assert!(wait_until(soon(), || trace().contains("# No container has received data")));
    let file = host.dir().join("proposed.toml");
    let file = file.to_str().expect("UTF-8");
    fs::write(file, &text).expect("written");
    host.dm(&["rules", "check", file]).ok();
    host.dm(&["rules", "apply", file]).ok();
    let explained = |home: &str, peer: &str, port: &str| {
        let words = ["--gate", "receive", "--home", home, "--peer", peer, "--port", port];
        host.dm(&[&["rules", "explain"], &words[..]].concat()).ok()
    };
    for site in ["@a", "@b"] {
        assert!(explained("@db", site, "80").contains(&format!("works for {site}")), "{text}");
        let front = explained("@front", site, "40000");
        assert!(front.contains(&format!("works for {site}")), "{text}");
        // The site is asked by the front alone.
        assert!(!explained(site, "@front", "80").contains("works for @front"), "{text}");
    }
    work(&host, "a", "db", 50, 1000);
    assert_taken(&accounts(&host), "@a", 50);
}
