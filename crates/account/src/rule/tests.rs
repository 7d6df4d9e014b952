//! Files that are read or refused, and tables against a simple evaluation of the rules that they are made from.

use std::collections::BTreeMap;

use dormouse_model::Name;
use proptest::prelude::*;

use super::*;
use crate::book::{Account, Book};
use crate::number::Number;

const OWN: [(&str, u32); 2] = [("db", 70_000), ("web", 70_001)];

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

/// Accounts by name and parent, with the numbers 1, 2, ...
fn book(accounts: &[(&str, &str)]) -> Book {
    let mut book = Book::default();
    for (account, parent) in accounts {
        let number = book.next_number(0).unwrap();
        book.add(Account::new(number, name(account), name(parent), 0)).unwrap();
    }
    book
}

/// Containers db and web with accounts of their own, and one that is charged to root.
fn own(container: &Name) -> Own {
    match OWN.iter().find(|(name, _)| *name == container.as_str()) {
        Some((_, number)) => Own::Number(Number(*number)),
        None if container.as_str() == "temporary" => Own::Other("root".into()),
        None => Own::Missing,
    }
}

fn customers() -> Book {
    book(&[
        ("customers", "root"),
        ("smith", "customers"),
        ("shop", "smith"),
        ("jones", "customers"),
    ])
}

fn compile(text: &str) -> Result<Compiled, Vec<String>> {
    let line = |e: &RuleError| format!("{}: {}", e.line, e.reason);
    let rules = Rules::parse(text).unwrap_or_else(|e| panic!("{text}: {e:?}"));
    rules.compile(&customers(), own).map_err(|errors| errors.iter().map(line).collect())
}

/// A rule in one line: the conditions, and then the account.
fn rule(conditions: &str, account: &str) -> String {
    format!("[[rule]]\ngate = \"receive\"\n{conditions}\naccount = \"{account}\"\n")
}

fn passage(home: u32, label: u32, peer: Option<u32>, port: u32) -> Passage<'static> {
    Passage { gate: Gate::Receive, home, label, peer, port, path: None }
}

const WHOLE: &str = r#"
[[rule]]
name = "the database works for its client"
gate = "receive"
home = "@db"
label = "=shop"
peer = "customers"
port = 5432
account = "peer"
priority = -7

[[rule]]
gate = "fork"
account = "=peer"
"#;

#[test]
fn file_is_read_with_all_keys() {
    let rules = Rules::parse(WHOLE).unwrap();
    let [first, second] = rules.all() else { panic!("{rules:?}") };
    let whole = Rule {
        origin: Origin::Line(2),
        name: Some("the database works for its client".into()),
        gate: Gate::Receive,
        home: Who::Own(name("db")),
        label: Who::Only(name("shop")),
        peer: Who::Below(name("customers")),
        port: Some(5432),
        path: None,
        account: Then::Peer,
        priority: Some(-7),
    };
    assert_eq!(*first, whole);
    assert_eq!(second.account, Then::Account(name("peer")));
    assert_eq!((second.line(), second.priority), (12, Some(0)));
    assert_eq!(second.conditions(), [&Who::Any; 3]);
    for empty in ["", "# none\n", "rule = []"] {
        assert_eq!(Rules::parse(empty), Ok(Rules::default()), "{empty}");
    }
}

/// All errors of a file, each with its line and a word of its reason.
#[test]
fn errors_are_reported_together_with_their_lines() {
    type Case = (&'static str, &'static [(usize, &'static str)]);
    let cases: [Case; 23] = [
        ("[[rule]]\n", &[(1, "no account"), (1, "no gate")]),
        (
            "\n[[rule]]\ngate = 3\naccount = []\n",
            &[(3, "gate is a text"), (4, "account is a text")],
        ),
        (
            "[[rule]]\ngate = \"recieve\"\naccount = \"@db\"\nprot = 3\n",
            &[(2, "recieve"), (3, "own account"), (4, "'prot' is unknown")],
        ),
        ("[[rule]]\ngate = \"fork\"\naccount = \"peer\"\n", &[(3, "no peer")]),
        (
            "[[rule]]\ngate = \"exec\"\naccount = \"home\"\npeer = \"a\"\nport = 1\n",
            &[(4, "no peer"), (5, "no port")],
        ),
        (
            "[[rule]]\ngate = \"send\"\naccount = \"home\"\nport = 0\npriority = 1001\n",
            &[(4, "1 to 65535"), (5, "-1000 to 1000")],
        ),
        (
            "[[rule]]\ngate = \"send\"\naccount = \"home\"\nport = 65536\npriority = 99999999999\n",
            &[(4, "1 to 65535"), (5, "-1000 to 1000")],
        ),
        (
            "[[rule]]\ngate = \"send\"\naccount = \"a b\"\nhome = \"@\"\nlabel = \"=\"\npeer = \"\"\n",
            &[(3, "a b"), (4, "name"), (5, "name"), (6, "name")],
        ),
        ("[rule]\ngate = \"send\"\n", &[(1, "[[rule]]")]),
        ("rules = 3\nrule = 4\n", &[(1, "'rules' is unknown"), (2, "[[rule]]")]),
        ("rule = [1]\n", &[(1, "[[rule]]")]),
        ("[[rule]]\ngate = \"send\"\ngate = \"fork\"\naccount = \"home\"\n", &[(3, "duplicate")]),
        (
            "[[rule]]\ngate = \"create\"\naccount = \"home\"\npath = \"/srv\"\n",
            &[(3, "changes no label"), (4, "no path")],
        ),
        ("[[rule]]\ngate = \"create\"\naccount = \"keep\"\nerrno = \"EAGAIN\"\n", &[(4, "either")]),
        ("[[rule]]\ngate = \"create\"\nerrno = \"EFAULT\"\n", &[(3, "EFAULT")]),
        (
            "[[rule]]\ngate = \"message\"\nport = 1\nerrno = \"EAGAIN\"\n",
            &[(3, "no port"), (4, "no errno")],
        ),
        (
            "[[rule]]\ngate = \"pipe\"\nport = 1\nerrno = \"EIO\"\n",
            &[(3, "no port"), (4, "no errno")],
        ),
        (
            "[[rule]]\ngate = \"semaphore\"\npath = \"/srv\"\naccount = \"peer\"\n",
            &[(3, "no path")],
        ),
        ("[[rule]]\ngate = \"shm\"\nerrno = \"EIO\"\n", &[(3, "no errno")]),
        (
            "[[rule]]\ngate = \"open\"\naccount = \"shop\"\npath = \"/srv/\"\n",
            &[(3, "with home"), (4, "path")],
        ),
        (
            "[[rule]]\ngate = \"open\"\nerrno = \"EIO\"\npath = \"srv\"\npeer = \"shop\"\n\
             [[rule]]\ngate = \"open\"\nerrno = \"EIO\"\npath = \"/a/../b\"\n",
            &[(4, "path"), (5, "no peer"), (9, "path")],
        ),
        // Each rule is read, whatever the others are.
        (
            "[[rule]]\ngate = \"send\naccount = \"home\"\n[[rule]]\ngate = \"x\"\naccount = \"home\"\n",
            &[(2, "string"), (5, "gate 'x'")],
        ),
        ("[[rule]]\nname = \"a\\u001b\"\ngate = \"send\"\naccount = \"keep\"\n", &[(2, "printed")]),
    ];
    for (text, expected) in cases {
        let errors = Rules::parse(text).expect_err(text);
        let is_found = |(line, word): &(usize, &str)| {
            errors.iter().any(|e| e.line == *line && e.reason.contains(word))
        };
        assert!(expected.iter().all(is_found), "{text}: {errors:?}");
        assert_eq!(errors.len(), expected.len(), "{text}: {errors:?}");
    }
}

#[test]
fn size_of_a_file_and_its_errors_is_bounded() {
    let many = |n| rule("", "keep").repeat(n);
    assert_eq!(Rules::parse(&many(ROWS_MAX)).unwrap().all().len(), ROWS_MAX);
    let errors = Rules::parse(&many(ROWS_MAX + 1)).unwrap_err();
    assert_eq!((errors.len(), errors[0].line), (1, 4 * ROWS_MAX + 1));
    assert_eq!(Rules::parse(&"#".repeat(TEXT_BYTES_MAX + 1)).unwrap_err().len(), 1);
    let errors = Rules::parse(&"[[rule]]\n".repeat(200)).unwrap_err();
    assert!(errors.len() == 101 && errors[100].reason.contains("300 more"), "{errors:?}");
    // Each pair of these is in conflict.
    let all: String =
        (0..200).map(|n| rule("", if n % 2 == 0 { "keep" } else { "home" })).collect();
    let errors = compile(&all).unwrap_err();
    assert_eq!(errors.len(), 101, "{errors:?}");
}

#[test]
fn unknown_accounts_are_errors_and_unknown_containers_are_not() {
    let text = rule("home = \"@gone\"", "nobody")
        + &rule("peer = \"=nothing\"", "keep")
        + "priority = 1\n";
    let errors = compile(&text).unwrap_err();
    assert_eq!(errors.len(), 2, "{errors:?}");
    assert!(errors[0].starts_with("1: no account is called 'nobody'"), "{errors:?}");
    assert!(errors[1].starts_with("5: no account is called 'nothing'"), "{errors:?}");
    let text = rule("home = \"@gone\"", "keep") + &rule("peer = \"@temporary\"", "keep");
    let compiled = compile(&text).unwrap();
    assert!(compiled.table.rows.is_empty());
    let inert: Vec<_> = compiled.inert().map(|(rule, why)| (rule.line(), why)).collect();
    assert!(inert[0].0 == 1 && inert[0].1.contains("no container is called 'gone'"), "{inert:?}");
    assert!(inert[1].0 == 5 && inert[1].1.contains("charged to 'root'"), "{inert:?}");
    let mut closing = customers();
    closing.find_mut(&name("jones")).unwrap().is_closing = true;
    let rules = Rules::parse(&rule("peer = \"jones\"", "keep")).unwrap();
    let errors = rules.compile(&closing, own).unwrap_err();
    assert!(errors[0].reason.contains("being removed"), "{errors:?}");
}

#[test]
fn rows_have_numbers_of_accounts_and_lines_those_above() {
    let compiled = compile(WHOLE.replace("=peer", "=jones").as_str()).unwrap();
    let [first, second] = &compiled.table.rows[..] else { panic!("{compiled:?}") };
    let (gate, becomes, account, home) = (1, 2, 0, 70_000);
    let (label, peer, below, port) = (3, 1, BELOW_PEER, 5432);
    let expected =
        Row { gate, becomes, account, home, label, peer, below, port, owner: 0, path: 0 };
    assert_eq!(*second, expected, "{first:?}");
    assert_eq!((first.gate, first.becomes, first.account), (3, 3, 4));
    // jones, smith, and shop below smith; customers itself needs none.
    let line = |all: &[u32]| {
        let mut line = [0; LINE];
        line[..all.len()].copy_from_slice(all);
        (all[0], line)
    };
    assert_eq!(compiled.table.lines, [line(&[4, 1]), line(&[3, 2, 1]), line(&[2, 1])]);
}

#[test]
fn files_below_a_path_are_matched_by_whole_names() {
    let open = |path: &str, then: &str| {
        format!("[[rule]]\ngate = \"open\"\nhome = \"@db\"\npath = \"{path}\"\n{then}\n")
    };
    let text = open("/", "account = \"home\"")
        + &open("/srv/shop", "account = \"shop\"")
        + &open("/srv/shop/closed", "errno = \"EACCES\"");
    let compiled = compile(&text).unwrap();
    let table = &compiled.table;
    assert_eq!(table.paths, ["/srv/shop/closed", "/srv/shop", "/"]);
    let refused = &table.rows[0];
    assert_eq!((refused.becomes, refused.account), (Becomes::Refused as u32, 13));
    let decide = |path| {
        let passage = Passage { gate: Gate::Open, path: Some(path), ..passage(70_000, 4, None, 0) };
        table.decide(&passage)
    };
    for (path, row) in [
        ("/srv/shop", 1),
        ("/srv/shop/x", 1),
        ("/srv/shops/x", 2),
        ("/srv", 2),
        ("/srv/shop/closed", 0),
        ("/srv/shop/closed/x/y", 0),
        ("/srv/shop/closed2", 1),
    ] {
        assert_eq!(decide(path), Some(row), "{path}");
    }
    // Another errno is another result.
    let other = open("/srv/shop/closed", "errno = \"EIO\"");
    let errors = compile(&(text + &other)).unwrap_err();
    assert!(errors[0].contains("it has the conditions of line"), "{errors:?}");
}

#[test]
fn conflict_names_both_lines() {
    let home = rule("home = \"@db\"", "home");
    let peer = rule("peer = \"smith\"", "peer");
    let errors = compile(&(home.clone() + &peer)).unwrap_err();
    assert!(
        errors.len() == 1 && errors[0].starts_with("5: ") && errors[0].contains("line 1"),
        "{errors:?}"
    );
    let errors = compile(&(peer.clone() + &peer.replace("\"peer\"", "\"keep\""))).unwrap_err();
    assert!(errors[0].starts_with("5: it has the conditions of line 1"), "{errors:?}");
    for solved in [
        // Another priority, the same account, a third rule for both, no passage of both.
        home.clone() + &peer + "priority = 1\n",
        home.replace("\"home\"", "\"peer\"") + &peer,
        home.clone() + &peer + &rule("home = \"@db\"\npeer = \"smith\"", "keep"),
        home.clone() + &peer + &rule("", "keep") + "priority = 3\n",
        home.clone() + &rule("home = \"@web\"\npeer = \"smith\"", "peer"),
        rule("port = 1\nhome = \"@db\"", "home") + &rule("port = 2\npeer = \"smith\"", "peer"),
        rule("label = \"=smith\"\nhome = \"@db\"", "home") + &rule("label = \"shop\"", "peer"),
        rule("home = \"smith\"", "home") + &rule("home = \"=customers\"\npeer = \"shop\"", "peer"),
    ] {
        compile(&solved).unwrap_or_else(|e| panic!("{solved}: {e:?}"));
    }
    for unsolved in [
        rule("home = \"customers\"", "home") + &rule("home = \"=customers\"\n", "peer") + &peer,
        home.clone() + &peer + &rule("home = \"@db\"\npeer = \"shop\"", "keep"),
        home.clone() + &peer + &rule("", "keep") + "priority = -3\n",
    ] {
        compile(&unsolved).expect_err(&unsolved);
    }
}

#[test]
fn explanation_names_the_deciding_rule_and_the_others() {
    let text = rule("peer = \"customers\"", "peer")
        + &rule("peer = \"customers\"", "peer")
        + &rule("home = \"@db\"\npeer = \"shop\"", "smith")
        + &rule("home = \"@db\"", "keep")
        + "priority = -1\n"
        + &rule("home = \"@web\"", "peer");
    let mut rules = Rules::parse(&text).unwrap();
    rules.share([name("db")]);
    let compiled = rules.compile(&customers(), own).unwrap();
    let explained = compiled.explain(&passage(70_000, 70_000, Some(3), 5432));
    assert_eq!((explained.decides.unwrap().line(), explained.label), (9, 2));
    let others: Vec<String> =
        explained.others.iter().map(|other| format!("{}: {}", other.rule, other.why)).collect();
    assert_eq!(
        others,
        [
            "line 1: line 9 is more specific",
            "line 5: line 9 is more specific",
            "line 14: its priority, -1, is below 0",
            "shared container 'db': rules of shared containers rank below all others",
        ]
    );
    let explained = compiled.explain(&passage(1, 1, Some(4), 5432));
    assert_eq!((explained.decides.unwrap().line(), explained.label), (1, 4));
    assert!(explained.others[0].why.contains("same rank"), "{explained:?}");
    let explained = compiled.explain(&passage(1, 9, Some(70_000), 0));
    assert_eq!((explained.decides, explained.label), (None, 9));
    let covered: Vec<_> = (0..6).map(|row| compiled.covered_by(row).map(Rule::line)).collect();
    assert_eq!(covered, [None, None, None, Some(1), None, Some(14)]);
}

#[test]
fn more_specific_rule_decides_wherever_it_stands() {
    let pairs = [
        ("", "home = \"root\""),
        ("home = \"root\"", "home = \"customers\""),
        ("label = \"customers\"", "label = \"smith\""),
        ("peer = \"smith\"", "peer = \"shop\""),
        ("peer = \"shop\"", "peer = \"=shop\""),
        ("home = \"root\"", "home = \"@db\""),
        ("home = \"=shop\"", "home = \"=shop\"\nport = 1"),
        ("port = 1", "home = \"root\"\nport = 1"),
    ];
    for (wide, narrow) in pairs {
        let (wide, narrow) = (rule(wide, "home"), rule(narrow, "peer"));
        for text in [wide.clone() + &narrow, narrow + &wide] {
            let compiled = compile(&text).unwrap_or_else(|e| panic!("{text}: {e:?}"));
            let order: Vec<_> = compiled.in_order().map(|rule| &rule.account).collect();
            assert_eq!(order, [&Then::Peer, &Then::Home], "{text}");
        }
    }
}

#[test]
fn work_for_no_container_is_that_of_the_home() {
    let mut rules = Rules::default();
    rules.share([name("db"), name("gone")]);
    let compiled = rules.compile(&customers(), own).unwrap();
    let label = |passage| compiled.table.label(&passage);
    assert_eq!(label(passage(70_000, 3, Some(4), 5432)), 4, "the next client");
    assert_eq!(label(passage(70_000, 3, None, 5432)), 70_000, "a peer outside of all containers");
    assert_eq!(label(passage(70_001, 3, Some(4), 5432)), 3, "another container");
    assert_eq!(compiled.inert().count(), 1);
}

#[test]
fn shared_containers_take_no_rows_from_the_file() {
    let many = (0..ROWS_MAX).map(|n| rule(&format!("port = {}", n + 1), "keep"));
    let mut rules = Rules::parse(&many.collect::<String>()).unwrap();
    rules.share((0..ROWS_MAX + 1).map(|n| name(&format!("c{n}"))));
    let all = |_: &Name| Own::Number(Number(1 << 17));
    let compiled = rules.compile(&customers(), all).unwrap();
    assert_eq!(compiled.inert().count(), 0);
    assert_eq!(compiled.table.of_file().count(), ROWS_MAX);
    assert_eq!(compiled.table.rows.len(), 2 * ROWS_MAX + 1);
}

/// How narrow a condition is that matches an account: none for one that does not.
fn level(who: &Who, account: Option<u32>, book: &Book) -> Option<usize> {
    let by_number = |number| book.iter().find(|account| account.number.0 == number);
    let container = OWN.iter().find(|(_, number)| Some(*number) == account);
    match who {
        Who::Any => Some(0),
        Who::Own(name) => container.filter(|(own, _)| name.as_str() == *own).map(|_| 100),
        Who::Only(name) => (by_number(account?)?.name == *name).then_some(100),
        // From the account upwards, and of a container's own account directly to root.
        Who::Below(name) => {
            let mut at = match container {
                Some(_) => Some(book.root()),
                None => by_number(account?),
            };
            let mut line = Vec::new();
            while let Some(account) = at {
                line.push(&account.name);
                at = account.parent.as_ref().and_then(|parent| book.find(parent).ok());
            }
            line.iter().rev().position(|above| *above == name).map(|depth| 1 + depth)
        }
    }
}

/// The results of the rules that match a passage and before which no other ranks, by their numbers.
fn naive(rules: &[Rule], book: &Book, passage: &Passage<'_>) -> Vec<u32> {
    let matching = rules.iter().filter_map(|rule| {
        let levels = [
            level(&rule.home, Some(passage.home), book)?,
            level(&rule.label, Some(passage.label), book)?,
            level(&rule.peer, passage.peer, book)?,
            match rule.port {
                None => 0,
                Some(port) if u32::from(port) == passage.port => 1,
                Some(_) => return None,
            },
            match (rule.path.as_deref(), passage.path) {
                (None, _) => 0,
                (Some("/srv"), Some("/srv/a/x" | "/srv/b")) => 1,
                (Some("/srv/a"), Some("/srv/a/x")) => 2,
                (Some(_), _) => return None,
            },
        ];
        (rule.gate == passage.gate).then_some((rule, levels))
    });
    let matching: Vec<_> = matching.collect();
    let highest = matching.iter().map(|(rule, _)| rule.priority).max();
    let top: Vec<_> = matching.iter().filter(|(rule, _)| Some(rule.priority) == highest).collect();
    let is_more_specific =
        |a: &[usize; 5], b: &[usize; 5]| a != b && a.iter().zip(b).all(|(a, b)| a >= b);
    let first =
        top.iter().filter(|(_, levels)| !top.iter().any(|(_, l)| is_more_specific(l, levels)));
    let label = |rule: &Rule| match &rule.account {
        Then::Keep | Then::Refused(_) => passage.label,
        Then::Home => passage.home,
        Then::Peer => passage.peer.unwrap_or(passage.home),
        Then::Account(name) => book.find(name).unwrap().number.0,
    };
    let mut labels: Vec<u32> = first.map(|(rule, _)| label(rule)).collect();
    labels.sort_unstable();
    labels.dedup();
    labels
}

/// All passages between the accounts of a book and the two containers.
fn passages(book: &Book) -> Vec<Passage<'static>> {
    let accounts: Vec<u32> =
        book.iter().map(|a| a.number.0).chain(OWN.iter().map(|(_, number)| *number)).collect();
    let peers: Vec<Option<u32>> = accounts.iter().copied().map(Some).chain([None]).collect();
    let mut all = Vec::new();
    for (home, label) in
        accounts.iter().flat_map(|home| accounts.iter().map(move |label| (home, label)))
    {
        let (home, label) = (*home, *label);
        for peer in &peers {
            for (gate, port) in
                [(Gate::Receive, 1), (Gate::Receive, 2), (Gate::Send, 1), (Gate::Send, 2)]
            {
                all.push(Passage { gate, home, label, peer: *peer, port, path: None });
            }
        }
        let fork = Passage { gate: Gate::Fork, home, label, peer: None, port: 0, path: None };
        all.push(fork);
        let paths = ["/srv/a/x", "/srv/b", "/srv2"].into_iter();
        all.extend(paths.map(|path| Passage { gate: Gate::Open, path: Some(path), ..fork }));
    }
    all
}

/// Books of one to four accounts called a0, a1, ..., each below one of those before or root.
fn any_book() -> impl Strategy<Value = Vec<usize>> {
    proptest::collection::vec(0_usize..6, 1..5)
}

fn make_book(parents: &[usize]) -> Book {
    let of = |n: usize| if n == 0 { "root".to_owned() } else { format!("a{}", n - 1) };
    let accounts: Vec<(String, String)> = parents
        .iter()
        .enumerate()
        .map(|(n, parent)| (format!("a{n}"), of(parent % (n + 1))))
        .collect();
    let accounts: Vec<_> = accounts.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
    book(&accounts)
}

/// The choices of one rule, as [`write_rule`] reads them.
type Choices = (usize, [usize; 3], usize, usize, i32);

/// Rules of which each is like the one before in most choices: others seldom match one passage.
fn any_rules() -> impl Strategy<Value = Vec<Choices>> {
    let who = proptest::array::uniform3(0_usize..24);
    let choices = (0_usize..6, who, 0_usize..3, 0_usize..6, 0_i32..2);
    let same = proptest::array::uniform7(proptest::bool::weighted(0.7));
    proptest::collection::vec((choices, same), 0..7).prop_map(|all| {
        let mut rules: Vec<Choices> = Vec::new();
        for ((gate, who, port, then, priority), same) in all {
            let rule = match rules.last() {
                None => (gate, who, port, then, priority),
                Some(last) => (
                    if same[0] { last.0 } else { gate },
                    [0, 1, 2].map(|n| if same[1 + n] { last.1[n] } else { who[n] }),
                    if same[4] { last.2 } else { port },
                    if same[5] { last.3 } else { then },
                    if same[6] { last.4 } else { priority },
                ),
            };
            rules.push(rule);
        }
        rules
    })
}

/// A rule as an operator writes it, of a book with so many accounts.
fn write_rule(accounts: usize, rule: &Choices) -> String {
    let (gate, who, port, then, priority) = rule;
    let gate = ["receive", "receive", "open", "send", "fork", "open"][*gate];
    let has_socket = !matches!(gate, "fork" | "open");
    let account = |n: usize| match n % (accounts + 1) {
        0 => "root".to_owned(),
        n => format!("a{}", n - 1),
    };
    let mut text = format!("[[rule]]\ngate = \"{gate}\"\npriority = {priority}\n");
    for (key, who) in ["home", "label", "peer"].iter().zip(who) {
        if *key == "peer" && !has_socket {
            continue;
        }
        let who = match who {
            0..12 => continue,
            12..14 => OWN[who - 12].0.to_owned(),
            14 => "gone".to_owned(),
            15..18 => format!("={}", account(*who)),
            _ => account(*who),
        };
        let at = if OWN.iter().any(|(own, _)| *own == who) || who == "gone" { "@" } else { "" };
        text += &format!("{key} = \"{at}{who}\"\n");
    }
    if *port > 0 && has_socket {
        text += &format!("port = {port}\n");
    }
    if *port > 0 && gate == "open" {
        text += &format!("path = \"{}\"\n", ["/srv", "/srv/a"][port - 1]);
    }
    let then = match then {
        0 => "keep".to_owned(),
        1 | 2 if has_socket => "peer".to_owned(),
        1..4 => "home".to_owned(),
        // Without a home, it changes no account.
        _ if gate == "open" && who[0] < 12 => "keep".to_owned(),
        n => account(*n),
    };
    text + &format!("account = \"{then}\"\n")
}

proptest! {
    /// The first row that matches is what the rules themselves say, for every passage there is.
    #[test]
    fn table_decides_as_its_rules(
        parents in any_book(),
        rules in any_rules(),
        shares in any::<bool>(),
    ) {
        let book = make_book(&parents);
        let text: String = rules.iter().map(|rule| write_rule(parents.len(), rule)).collect();
        let mut rules = Rules::parse(&text).map_err(|e| TestCaseError::fail(format!("{text}: {e:?}")))?;
        if shares {
            rules.share(OWN.map(|(own, _)| name(own)));
        }
        let all = rules.all().to_vec();
        match rules.compile(&book, own) {
            Ok(compiled) => {
                for passage in passages(&book) {
                    let labels = naive(&all, &book, &passage);
                    let expected = match &labels[..] {
                        [] => passage.label,
                        [label] => *label,
                        several => return Err(TestCaseError::fail(format!("{text}: {several:?}"))),
                    };
                    prop_assert_eq!(compiled.table.label(&passage), expected, "{} {:?}", text, passage);
                    let explained = compiled.explain(&passage);
                    prop_assert_eq!(explained.label, expected);
                    prop_assert_eq!(explained.decides.is_some(), !labels.is_empty());
                }
                for row in 0..compiled.table.rows.len() {
                    let decided = passages(&book).iter().any(|p| compiled.table.decide(p) == Some(row));
                    prop_assert!(!decided || compiled.covered_by(row).is_none(), "{} row {}", text, row);
                }
            }
            // Each pair alone has a passage with two results, where all containers exist.
            Err(errors) => {
                let by_line: BTreeMap<usize, &Rule> = all.iter().map(|rule| (rule.line(), rule)).collect();
                for error in errors {
                    let words: Vec<&str> = error.reason.split([' ', ',']).collect();
                    let at = words.iter().position(|word| *word == "line").unwrap();
                    let pair = [by_line[&error.line], by_line[&words[at + 1].parse().unwrap()]];
                    let pair = pair.map(|rule| Rule {
                        home: with_container(&rule.home),
                        label: with_container(&rule.label),
                        peer: with_container(&rule.peer),
                        ..rule.clone()
                    });
                    let is_open = |p: &Passage<'_>| {
                        let gate = if p.gate == Gate::Fork { pair[0].gate } else { p.gate };
                        naive_accounts(&pair, &book, &Passage { gate, ..*p })
                    };
                    prop_assert!(passages(&book).iter().any(is_open), "{} {:?}", text, pair);
                }
            }
        }
    }
}

/// Whether two rules before which no other ranks have different accounts, though perhaps not here.
fn naive_accounts(pair: &[Rule; 2], book: &Book, passage: &Passage<'_>) -> bool {
    let alone = |rule: &Rule| !naive(std::slice::from_ref(rule), book, passage).is_empty();
    let [a, b] = pair;
    let probe =
        |rule: &Rule, then: &str| Rule { account: Then::Account(name(then)), ..rule.clone() };
    let labels = naive(&[probe(a, "root"), probe(b, "a0")], book, passage);
    alone(a) && alone(b) && labels.len() == 2 && a.account != b.account
}

/// A container that exists in place of one that does not.
fn with_container(who: &Who) -> Who {
    match who {
        Who::Own(own) if own.as_str() == "gone" => Who::Own(name("web")),
        other => other.clone(),
    }
}
