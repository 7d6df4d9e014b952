//! Compiles `linux.seccomp` to a program for the kernel, with the compiler of
//! `dormouse_kernel::seccomp` and libseccomp's semantics. The first matching entry of a call
//! decides. Conditions about one argument are alternatives; conditions about different arguments
//! must all hold.
//!
//! Calls with numbers above the last one in a profile are newer than the profile. They return
//! ENOSYS, so that programs fall back, if the profile would deny them (runc does the same).

use std::str::FromStr;

use dormouse_kernel::call::CloneFlags;
use dormouse_kernel::seccomp::{Action, Argument, Condition, Decision, Policy, Rule, Test};

use syscalls::x86_64::Sysno;

use crate::error::{Error, Result};
use crate::spec::{self, Seccomp};

/// A compiled filter.
#[derive(Debug)]
pub(crate) struct Compiled {
    /// An array of `struct sock_filter`.
    pub(crate) program: Vec<u8>,
    /// SECCOMP_FILTER_FLAG_*.
    pub(crate) flags: u16,
    /// A listener decides about some call.
    pub(crate) notifies: bool,
    /// The filter permits making a user namespace (unshare(2), clone(2)).
    pub(crate) user_namespaces: bool,
    /// The filter permits chroot(2).
    pub(crate) chroots: bool,
}

const ENOSYS: u16 = 38;
const EPERM: u16 = 1;

/// Actions listed by `features`.
pub(crate) const ACTIONS: [&str; 9] = [
    "SCMP_ACT_ALLOW",
    "SCMP_ACT_ERRNO",
    "SCMP_ACT_KILL",
    "SCMP_ACT_KILL_PROCESS",
    "SCMP_ACT_KILL_THREAD",
    "SCMP_ACT_LOG",
    "SCMP_ACT_NOTIFY",
    "SCMP_ACT_TRACE",
    "SCMP_ACT_TRAP",
];
/// Comparisons listed by `features`.
pub(crate) const OPERATORS: [&str; 7] = [
    "SCMP_CMP_EQ",
    "SCMP_CMP_GE",
    "SCMP_CMP_GT",
    "SCMP_CMP_LE",
    "SCMP_CMP_LT",
    "SCMP_CMP_MASKED_EQ",
    "SCMP_CMP_NE",
];
/// Architectures listed by `features`.
pub(crate) const ARCHITECTURES: [&str; 3] = ["SCMP_ARCH_X32", "SCMP_ARCH_X86", "SCMP_ARCH_X86_64"];
/// SECCOMP_FILTER_FLAG_SPEC_ALLOW.
const SPEC_ALLOW: u16 = 4;
/// SECCOMP_FILTER_FLAG_NEW_LISTENER.
const NEW_LISTENER: u16 = 8;
/// SECCOMP_FILTER_FLAG_TSYNC: the newborn has one thread.
const TSYNC: u16 = 1;
/// Flags, with the kernel's bits (seccomp(2)).
pub(crate) const FLAGS: [(&str, u16); 4] = [
    ("SECCOMP_FILTER_FLAG_TSYNC", TSYNC),
    ("SECCOMP_FILTER_FLAG_LOG", 2),
    ("SECCOMP_FILTER_FLAG_SPEC_ALLOW", SPEC_ALLOW),
    ("SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV", 32),
];

fn action(field: &str, word: &str, errno: Option<u32>) -> Result<Action> {
    let number = || {
        let number = u16::try_from(errno.unwrap_or(u32::from(EPERM)));
        number
            .ok()
            .filter(|n| *n <= 4095)
            .ok_or_else(|| Error::field(format!("{field}: errnoRet"), "it is not one of 0 to 4095"))
    };
    if errno.is_some() && !matches!(word, "SCMP_ACT_ERRNO" | "SCMP_ACT_TRACE") {
        return Err(Error::field(format!("{field}: errnoRet"), format!("{word} has none")));
    }
    Ok(match word {
        "SCMP_ACT_ALLOW" => Action::Allow,
        "SCMP_ACT_ERRNO" => Action::Errno(number()?),
        "SCMP_ACT_KILL" | "SCMP_ACT_KILL_THREAD" => Action::KillThread,
        "SCMP_ACT_KILL_PROCESS" => Action::Kill,
        "SCMP_ACT_LOG" => Action::Log,
        "SCMP_ACT_NOTIFY" => Action::Notify,
        "SCMP_ACT_TRACE" => Action::Trace(number()?),
        "SCMP_ACT_TRAP" => Action::Trap,
        other => return Err(Error::field(field, format!("there is no action {other:?}"))),
    })
}

/// Compiles a profile.
pub(crate) fn compile(given: &Seccomp) -> Result<Compiled> {
    let field = |name: &str| format!("linux.seccomp.{name}");
    let otherwise =
        action(&field("defaultAction"), &given.default_action, given.default_errno_ret)?;
    if otherwise == Action::Notify {
        let why = "a listener cannot decide about every call: execve itself would wait for it";
        return Err(Error::field(field("defaultAction"), why));
    }
    let mut with_i386 = false;
    for (at, name) in given.architectures.iter().enumerate() {
        match name.as_str() {
            "SCMP_ARCH_X86" => with_i386 = true,
            // Kernels have no x32: its calls return ENOSYS either way.
            name if name.starts_with("SCMP_ARCH_") => {}
            other => {
                let field = field(&format!("architectures[{at}]"));
                return Err(Error::field(field, format!("there is no architecture {other:?}")));
            }
        }
    }
    // Without a list as with runc: a filter is no reason to slow its processes down.
    let mut flags = if given.flags.is_none() { SPEC_ALLOW } else { 0 };
    for (at, name) in given.flags.iter().flatten().enumerate() {
        let known = FLAGS.iter().find(|(known, _)| known == name);
        let (_, bit) = known.ok_or_else(|| {
            Error::field(field(&format!("flags[{at}]")), format!("there is no flag {name:?}"))
        })?;
        flags |= bit;
    }
    let mut table = Table { otherwise, ours: Policy::new(otherwise), i386: Policy::new(otherwise) };
    let mut notifies = false;
    for (at, entry) in given.syscalls.iter().enumerate() {
        let field = field(&format!("syscalls[{at}]"));
        let then = action(&format!("{field}.action"), &entry.action, entry.errno_ret)?;
        if entry.names.is_empty() {
            return Err(Error::field(format!("{field}.names"), "it is empty"));
        }
        notifies |= then == Action::Notify;
        let rules = rules(&field, &entry.args, then)?;
        entry.names.iter().for_each(|name| table.add(name, &rules, then));
    }
    if notifies && given.listener_path.is_none() {
        let why = "it is missing: a listener decides about some call";
        return Err(Error::field(field("listenerPath"), why));
    }
    let listener = if notifies { NEW_LISTENER } else { 0 };
    crate::log::debug(&format!("seccomp filter flags: {}", flags & !TSYNC | listener));
    let policy = table.finish(with_i386);
    let filter = policy.compile().ok_or_else(|| {
        Error::field("linux.seccomp.syscalls", "more rules than a filter of the kernel can hold")
    })?;
    let lets = |call: Sysno, first: u64| {
        let args = [first, 0, 0, 0, 0, 0];
        matches!(policy.answer(call.id().cast_unsigned(), &args), Action::Allow | Action::Log)
    };
    let new = CloneFlags::NEWUSER.bits();
    let user_namespaces = lets(Sysno::unshare, new) || lets(Sysno::clone, new);
    let chroots = lets(Sysno::chroot, 0);
    Ok(Compiled { program: filter.to_bytes(), flags, notifies, user_namespaces, chroots })
}

struct Table {
    otherwise: Action,
    ours: Policy,
    i386: Policy,
}

impl Table {
    fn add(&mut self, name: &str, rules: &[Rule], then: Action) {
        // An unknown name belongs to another architecture, or is newer.
        if let Ok(call) = Sysno::from_str(name) {
            add(&mut self.ours, self.otherwise, call.id().cast_unsigned(), rules, then);
        }
        if let Ok(call) = syscalls::x86::Sysno::from_str(name) {
            add(&mut self.i386, self.otherwise, call.id().cast_unsigned(), rules, then);
        }
    }

    fn finish(mut self, with_i386: bool) -> Policy {
        if !matches!(self.otherwise, Action::Allow | Action::Log) {
            self.ours.set_rest(Action::Errno(ENOSYS));
            self.i386.set_rest(Action::Errno(ENOSYS));
        }
        if with_i386 {
            self.ours.set_i386(self.i386);
        }
        self.ours
    }
}

fn add(policy: &mut Policy, otherwise: Action, number: u32, rules: &[Rule], then: Action) {
    let mut decision = policy.decision(number).clone();
    if rules.is_empty() {
        // The first entry without conditions is final: later ones are not reached.
        if decision.otherwise == otherwise {
            decision.otherwise = then;
        }
    } else {
        decision.rules.extend(rules.iter().cloned());
    }
    policy.set(number, Decision { rules: decision.rules, otherwise: decision.otherwise });
}

/// Converts the conditions of an entry: several about one argument are alternatives.
fn rules(field: &str, args: &[spec::Argument], then: Action) -> Result<Vec<Rule>> {
    let mut conditions = Vec::new();
    for (at, given) in args.iter().enumerate() {
        let field = |name: &str| format!("{field}.args[{at}].{name}");
        let index = u8::try_from(given.index).ok().filter(|index| *index < 6);
        let index = index.ok_or_else(|| Error::field(field("index"), "it is not one of 0 to 5"))?;
        let value = given.value;
        let test = match given.op.as_str() {
            "SCMP_CMP_EQ" => Test::Equal(value),
            "SCMP_CMP_NE" => Test::NotEqual(value),
            "SCMP_CMP_GT" => Test::Greater(value),
            "SCMP_CMP_GE" => Test::AtLeast(value),
            "SCMP_CMP_LT" => Test::Less(value),
            "SCMP_CMP_LE" => Test::AtMost(value),
            "SCMP_CMP_MASKED_EQ" => Test::Masked { mask: value, value: given.value_two },
            other => {
                return Err(Error::field(field("op"), format!("there is no comparison {other:?}")));
            }
        };
        conditions.push((index, Condition::new(Argument::Long(index), test)));
    }
    let mut seen = Vec::new();
    let repeated = conditions.iter().any(|(index, _)| {
        let again = seen.contains(index);
        seen.push(*index);
        again
    });
    let conditions = conditions.into_iter().map(|(_, condition)| condition);
    Ok(match (args.is_empty(), repeated) {
        (true, _) => Vec::new(),
        (_, true) => conditions.map(|c| Rule { when: vec![c], then }).collect(),
        (_, false) => vec![Rule { when: conditions.collect(), then }],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile(text: &str) -> Result<Compiled> {
        compile(&spec::parse::<Seccomp>(text.as_bytes()).expect("JSON"))
    }

    fn why(text: &str) -> String {
        profile(text).expect_err("it is bad").to_string()
    }

    #[test]
    fn bad_profile_is_refused_with_its_field() {
        let text = r#"{"defaultAction": "SCMP_ACT_X"}"#;
        assert!(why(text).starts_with("linux.seccomp.defaultAction"));
        let text = r#"{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [
            {"names": ["read"], "action": "SCMP_ACT_ERRNO",
             "args": [{"index": 6, "value": 1, "op": "SCMP_CMP_EQ"}]}]}"#;
        assert!(why(text).starts_with("linux.seccomp.syscalls[0].args[0].index"), "{}", why(text));
        let text = r#"{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [
            {"names": ["read"], "action": "SCMP_ACT_NOTIFY"}]}"#;
        assert!(why(text).starts_with("linux.seccomp.listenerPath"));
    }

    #[test]
    fn filter_reports_whether_user_namespaces_and_chroot_are_permitted() {
        let text = |action: &str, args: &str| {
            format!(
                r#"{{"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [{{"names": ["unshare"],
                    "action": "{action}", "args": [{args}]}}]}}"#
            )
        };
        let lets = |text: &str| profile(text).expect("good").user_namespaces;
        assert!(lets(&text("SCMP_ACT_ALLOW", "")));
        assert!(!lets(&text("SCMP_ACT_KILL", "")));
        // As in the profile of docker and others.
        let none_of_these = r#"{"index": 0, "value": 2114060288, "op": "SCMP_CMP_MASKED_EQ"}"#;
        assert!(!lets(&text("SCMP_ACT_ALLOW", none_of_these)));
        let all = r#"{"defaultAction": "SCMP_ACT_ALLOW"}"#;
        assert!(lets(all));
        assert!(profile(all).expect("good").chroots);
        assert!(!profile(&text("SCMP_ACT_ALLOW", "")).expect("good").chroots);
    }

    #[test]
    fn large_profile_fits_into_one_program() {
        let names: Vec<String> = (0..450)
            .filter_map(syscalls::x86_64::Sysno::new)
            .filter(|call| call.id() % 3 != 0)
            .map(|call| format!("{:?}", call.name()))
            .collect();
        let text = format!(
            r#"{{"defaultAction": "SCMP_ACT_ERRNO", "architectures": ["SCMP_ARCH_X86"],
                "syscalls": [{{"names": [{}], "action": "SCMP_ACT_ALLOW"}}]}}"#,
            names.join(",")
        );
        assert!(profile(&text).expect("good").program.len() < 8 * 4096);
    }
}
