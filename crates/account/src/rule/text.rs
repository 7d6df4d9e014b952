//! The file of rules.
//!
//! ```toml
//! [[rule]]
//! name = "the database works for its client"   # for messages; by default none
//! gate = "receive"          # receive, send, fork, exec, create, open, message, pipe, semaphore, shm
//! home = "@db"              # of the task; any by default
//! label = "=shop"           # of the task before the passage; any by default
//! peer = "customers"        # any by default
//! port = 5432               # local port of the socket; any by default
//! path = "/srv/shop"        # gate open: the file is this one or below it; any by default
//! account = "peer"          # the label afterwards: peer, home, keep, or a made account
//! errno = "EAGAIN"          # instead of account, gates create and open: the call fails
//! priority = 0              # -1000 to 1000; 0 by default
//! ```
//!
//! `home`, `label` and `peer` name accounts: `NAME` is a made account with all accounts below it, `=NAME` is this
//! account alone, and `@NAME` is the own account of the container NAME. `=NAME` is also accepted as the result, for
//! an account that is called peer, home or keep.
//!
//! A file with errors gives none of its rules: [`Rules::parse`] returns all errors, each with its line.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use dormouse_model::{Invalid, Name};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::table::{Gate, PATH_BYTES_MAX, ROWS_MAX};

/// LIMIT: bytes of a file.
pub const TEXT_BYTES_MAX: usize = 256 << 10;

/// LIMIT: errors that are reported of one file.
pub(super) const ERRORS_MAX: usize = 100;

/// LIMIT: characters of the name of a rule.
const NAME_CHARS_MAX: usize = 128;

/// Priorities of rules in files.
const PRIORITIES: std::ops::RangeInclusive<i32> = -1000..=1000;

/// Keys of a rule.
const KEYS: [&str; 10] =
    ["name", "gate", "home", "label", "peer", "port", "path", "account", "errno", "priority"];

/// An error in a file of rules.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
#[error("line {line}: {reason}")]
pub struct RuleError {
    /// Its line, from 1.
    pub line: usize,
    /// The cause, and what to do.
    pub reason: String,
}

/// The place from which a rule comes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// A line of the file.
    Line(usize),
    /// A container that was made with `--shared`.
    Shared(Name),
}

/// A condition on an account.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Who {
    /// Any account; at the peer also none.
    Any,
    /// A made account, and all accounts below it.
    Below(Name),
    /// A made account alone.
    Only(Name),
    /// The own account of the container with this name.
    Own(Name),
}

/// The label after a passage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Then {
    /// The same as before.
    Keep,
    /// The task's home.
    Home,
    /// The peer; the task's home where the peer is outside of all containers.
    Peer,
    /// A made account.
    Account(Name),
    /// The same as before, and the call fails.
    Refused(Errno),
}

/// An error of a call (errno(3)), of those that a rule can choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Errno(usize);

/// Names and numbers, which are those of all architectures that Dormouse has.
const ERRNOS: [(&str, u32); 12] = [
    ("EPERM", 1),
    ("ENOENT", 2),
    ("EIO", 5),
    ("EAGAIN", 11),
    ("ENOMEM", 12),
    ("EACCES", 13),
    ("EBUSY", 16),
    ("ENFILE", 23),
    ("EMFILE", 24),
    ("ENOSPC", 28),
    ("EROFS", 30),
    ("EDQUOT", 122),
];

impl Errno {
    /// Its name.
    pub fn name(self) -> &'static str {
        ERRNOS.get(self.0).map_or("", |(name, _)| name)
    }

    /// Its number.
    pub fn number(self) -> u32 {
        ERRNOS.get(self.0).map_or(0, |(_, number)| *number)
    }
}

impl FromStr for Errno {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let found = ERRNOS.iter().position(|(name, _)| *name == text);
        found.map(Self).ok_or_else(|| {
            let hint = "one of EPERM, ENOENT, EIO, EAGAIN, ENOMEM, EACCES, EBUSY, ENFILE, EMFILE, ENOSPC, \
                        EROFS, EDQUOT";
            Invalid::new("errno", text, hint)
        })
    }
}

/// One rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// The place from which it comes.
    pub origin: Origin,
    /// Its name in messages, if it has one.
    pub name: Option<String>,
    /// The passages that it is for.
    pub gate: Gate,
    /// Home of the task.
    pub home: Who,
    /// Label of the task before.
    pub label: Who,
    /// The peer.
    pub peer: Who,
    /// Local port of the socket; any if `None`.
    pub port: Option<u16>,
    /// The file is this one, or below it; any if `None`.
    pub path: Option<String>,
    /// The label afterwards.
    pub account: Then,
    /// Its priority; `None` is below all others.
    pub priority: Option<i32>,
}

impl Rule {
    /// The accounts that it names as conditions.
    pub fn conditions(&self) -> [&Who; 3] {
        [&self.home, &self.label, &self.peer]
    }

    /// Whether it names a made account.
    pub fn names(&self, account: &Name) -> bool {
        let is = |who: &&Who| matches!(who, Who::Below(n) | Who::Only(n) if n == account);
        self.conditions().iter().any(is)
            || matches!(&self.account, Then::Account(name) if name == account)
    }

    /// Its line; 0 without one.
    pub fn line(&self) -> usize {
        match self.origin {
            Origin::Line(line) => line,
            Origin::Shared(_) => 0,
        }
    }
}

impl fmt::Display for Rule {
    /// `line 3 ('the database works for its client')`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.origin, &self.name) {
            (Origin::Line(line), None) => write!(f, "line {line}"),
            (Origin::Line(line), Some(name)) => write!(f, "line {line} ('{name}')"),
            (Origin::Shared(container), _) => write!(f, "shared container '{container}'"),
        }
    }
}

impl fmt::Display for Who {
    /// As in a file.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("any"),
            Self::Below(name) => name.fmt(f),
            Self::Only(name) => write!(f, "={name}"),
            Self::Own(name) => write!(f, "@{name}"),
        }
    }
}

impl fmt::Display for Then {
    /// As in a file.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Keep => f.write_str("keep"),
            Self::Home => f.write_str("home"),
            Self::Peer => f.write_str("peer"),
            Self::Account(name) if matches!(name.as_str(), "keep" | "home" | "peer") => {
                write!(f, "={name}")
            }
            Self::Account(name) => name.fmt(f),
            Self::Refused(errno) => f.write_str(errno.name()),
        }
    }
}

/// All rules: those of a file, and those of shared containers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rules(pub(super) Vec<Rule>);

impl Rules {
    /// Reads a file.
    ///
    /// Errors: all of the file, in the order of its lines.
    pub fn parse(text: &str) -> Result<Self, Vec<RuleError>> {
        if text.len() > TEXT_BYTES_MAX {
            let reason = format!("the file has more than {} KiB", TEXT_BYTES_MAX >> 10);
            return Err(vec![RuleError { line: 1, reason }]);
        }
        let (document, wrong) = DeTable::parse_recoverable(text);
        let mut reader = Reader { text, errors: Vec::new() };
        let rules = reader.rules(document.get_ref());
        let mut broken: Vec<RuleError> = wrong.iter().map(|error| reader.broken(error)).collect();
        // What follows in the line of an error seldom says more.
        broken.dedup_by_key(|error| error.line);
        // Of a rule that is no TOML, the values are those that remain.
        let sections: Vec<usize> = broken.iter().map(|e| reader.section(e.line)).collect();
        let mut errors = reader.errors.clone();
        errors.retain(|e| !sections.contains(&reader.section(e.line)));
        errors.extend(broken);
        finish(Self(rules), errors)
    }

    /// Adds the rules of shared containers: each works for its peer when it receives.
    pub fn share(&mut self, containers: impl IntoIterator<Item = Name>) {
        self.0.extend(containers.into_iter().map(|name| Rule {
            origin: Origin::Shared(name.clone()),
            name: None,
            gate: Gate::Receive,
            home: Who::Own(name),
            label: Who::Any,
            peer: Who::Any,
            port: None,
            path: None,
            account: Then::Peer,
            priority: None,
        }));
    }

    /// The rules, in the order of the file.
    pub fn all(&self) -> &[Rule] {
        &self.0
    }
}

/// Returns the value, or the errors in the order of their lines.
pub(super) fn finish<T>(value: T, mut errors: Vec<RuleError>) -> Result<T, Vec<RuleError>> {
    if errors.is_empty() {
        return Ok(value);
    }
    errors.sort();
    errors.dedup();
    let more = errors.len().saturating_sub(ERRORS_MAX);
    errors.truncate(ERRORS_MAX);
    if let Some(last) = errors.last()
        && more > 0
    {
        errors.push(RuleError { line: last.line, reason: format!("and {more} more errors") });
    }
    Err(errors)
}

/// Reads values, and collects errors.
struct Reader<'t> {
    text: &'t str,
    errors: Vec<RuleError>,
}

type Value<'t> = Spanned<DeValue<'t>>;

impl Reader<'_> {
    fn line(&self, at: usize) -> usize {
        let before = self.text.as_bytes().get(..at).unwrap_or(self.text.as_bytes());
        1 + before.iter().filter(|byte| **byte == b'\n').count()
    }

    fn error(&mut self, at: Range<usize>, reason: impl Into<String>) {
        let line = self.line(at.start);
        self.errors.push(RuleError { line, reason: reason.into() });
    }

    /// Returns an error of the TOML itself.
    fn broken(&self, error: &toml::de::Error) -> RuleError {
        let at = error.span().map_or(self.text.len(), |span| span.start);
        RuleError { line: self.line(at), reason: error.message().trim().replace('\n', ", ") }
    }

    /// Returns the line of the header above a line.
    fn section(&self, line: usize) -> usize {
        let lines = self.text.lines().take(line).enumerate();
        let headers = lines.filter(|(_, text)| text.trim_start().starts_with('['));
        headers.last().map_or(0, |(index, _)| index + 1)
    }

    fn rules(&mut self, document: &DeTable<'_>) -> Vec<Rule> {
        let mut rules = Vec::new();
        for (key, value) in document {
            if key.get_ref() != "rule" {
                self.error(
                    key.span(),
                    format!("'{}' is unknown: only [[rule]] is here", cut(key.get_ref())),
                );
                continue;
            }
            let Some(all) = value.get_ref().as_array() else {
                self.error(key.span(), "each rule begins with a line '[[rule]]'");
                continue;
            };
            for each in all.iter() {
                let Some(table) = each.get_ref().as_table() else {
                    self.error(each.span(), "each rule begins with a line '[[rule]]'");
                    continue;
                };
                if rules.len() == ROWS_MAX {
                    self.error(each.span(), format!("only {ROWS_MAX} rules are permitted"));
                    return rules;
                }
                rules.extend(self.rule(each.span(), table));
            }
        }
        rules
    }

    fn rule(&mut self, at: Range<usize>, table: &DeTable<'_>) -> Option<Rule> {
        let before = self.errors.len();
        for key in table.keys() {
            if !KEYS.contains(&key.get_ref().as_ref()) {
                let known = KEYS.join(", ");
                self.error(
                    key.span(),
                    format!("'{}' is unknown: a rule has {known}", cut(key.get_ref())),
                );
            }
        }
        let name = self.text_of(table, "name").and_then(|(span, name)| self.name(span, name));
        let gate = self.required(at.clone(), table, "gate").and_then(|(span, text)| {
            let gate = text.parse::<Gate>();
            gate.map_err(|e| self.error(span, e.to_string())).ok()
        });
        let [home, label, peer] = ["home", "label", "peer"].map(|key| self.who(table, key));
        let port = self.number(table, "port", 1, u16::MAX.into());
        let path = self.text_of(table, "path").and_then(|(span, path)| self.path(span, path));
        let account = match self.text_of(table, "errno") {
            None => self.required(at.clone(), table, "account").and_then(|(span, text)| {
                let account = then(&text);
                account.map_err(|reason| self.error(span, reason)).ok()
            }),
            Some((span, text)) => {
                if table.get("account").is_some() {
                    self.error(span.clone(), "a rule has either an account or an errno");
                }
                let errno = text.parse::<Errno>();
                errno.map_err(|e| self.error(span, e.to_string())).ok().map(Then::Refused)
            }
        };
        let (least, most) = (*PRIORITIES.start(), *PRIORITIES.end());
        let priority = self.number(table, "priority", least, most).unwrap_or(0);
        if let Some(gate) = gate {
            self.fits(gate, table, &home, account.as_ref());
        }
        if self.errors.len() > before {
            return None;
        }
        Some(Rule {
            origin: Origin::Line(self.line(at.start)),
            name,
            gate: gate?,
            home,
            label,
            peer,
            port: port.and_then(|port| port.try_into().ok()),
            path,
            account: account?,
            priority: Some(priority),
        })
    }

    /// Reports the keys of a rule that its gate has no use for.
    fn fits(&mut self, gate: Gate, table: &DeTable<'_>, home: &Who, account: Option<&Then>) {
        let unfit = [
            ("peer", gate.has_peer(), "as there is no socket"),
            ("port", gate.has_socket(), "as there is no socket"),
            ("path", gate == Gate::Open, "as no file is opened"),
            ("errno", gate.can_refuse(), "as the call cannot fail there"),
        ];
        for (key, has, why) in unfit {
            if let (false, Some(value)) = (has, table.get(key)) {
                self.error(value.span(), format!("gate '{gate}' has no {key}, {why}"));
            }
        }
        let Some((account, at)) = account.zip(table.get("account").map(Spanned::span)) else {
            return;
        };
        match account {
            Then::Peer if !gate.has_peer() => {
                self.error(at, format!("gate '{gate}' has no peer, as there is no socket"));
            }
            Then::Account(_) if gate == Gate::Open && *home == Who::Any => {
                let reason = "a container chooses the paths of its files: say with home whose files these are";
                self.error(at, reason);
            }
            // Both keys are there, which is an error already.
            Then::Keep | Then::Refused(_) => {}
            _ if gate == Gate::Create => {
                let reason =
                    "gate 'create' changes no label: choose keep or an errno, or the gate fork";
                self.error(at, reason);
            }
            _ => {}
        }
    }

    fn path(&mut self, at: Range<usize>, path: String) -> Option<String> {
        let mut parts = path.split('/').skip(1);
        let is_plain = path == "/"
            || path.starts_with('/')
                && parts.all(|part| !matches!(part, "" | "." | ".."))
                && !path.chars().any(char::is_control);
        if is_plain && path.len() <= PATH_BYTES_MAX {
            return Some(path);
        }
        self.error(
            at,
            format!(
                "a path begins with '/', has no '//', '.', '..' and '/' at its end, and at most \
                 {PATH_BYTES_MAX} bytes"
            ),
        );
        None
    }

    fn name(&mut self, at: Range<usize>, name: String) -> Option<String> {
        let is_plain = !name.trim().is_empty() && !name.chars().any(char::is_control);
        if is_plain && name.chars().count() <= NAME_CHARS_MAX {
            return Some(name);
        }
        self.error(at, format!("a name has 1 to {NAME_CHARS_MAX} characters that can be printed"));
        None
    }

    fn text_of(&mut self, table: &DeTable<'_>, key: &str) -> Option<(Range<usize>, String)> {
        let value: &Value<'_> = table.get(key)?;
        match value.get_ref().as_str() {
            Some(text) => Some((value.span(), text.to_owned())),
            None => {
                self.error(value.span(), format!("{key} is a text in quotes"));
                None
            }
        }
    }

    fn required(
        &mut self,
        at: Range<usize>,
        table: &DeTable<'_>,
        key: &str,
    ) -> Option<(Range<usize>, String)> {
        if table.get(key).is_none() {
            self.error(at, format!("the rule has no {key}"));
        }
        self.text_of(table, key)
    }

    fn who(&mut self, table: &DeTable<'_>, key: &str) -> Who {
        let Some((span, text)) = self.text_of(table, key) else { return Who::Any };
        who(&text).unwrap_or_else(|reason| {
            self.error(span, reason);
            Who::Any
        })
    }

    fn number(&mut self, table: &DeTable<'_>, key: &str, least: i32, most: i32) -> Option<i32> {
        let value: &Value<'_> = table.get(key)?;
        let number = value.get_ref().as_integer();
        let number = number.and_then(|n| i32::from_str_radix(n.as_str(), n.radix()).ok());
        let number = number.filter(|number| (least..=most).contains(number));
        if number.is_none() {
            self.error(value.span(), format!("{key} is a number from {least} to {most}"));
        }
        number
    }
}

/// Reads a condition on an account.
pub(super) fn who(text: &str) -> Result<Who, String> {
    let name = |text: &str| text.parse::<Name>().map_err(|e| e.to_string());
    if let Some(container) = text.strip_prefix('@') {
        return Ok(Who::Own(name(container)?));
    }
    if let Some(alone) = text.strip_prefix('=') {
        return match alone.strip_prefix('@') {
            Some(container) => Ok(Who::Own(name(container)?)),
            None => Ok(Who::Only(name(alone)?)),
        };
    }
    Ok(Who::Below(name(text)?))
}

fn then(text: &str) -> Result<Then, String> {
    match text {
        "keep" => Ok(Then::Keep),
        "home" => Ok(Then::Home),
        "peer" => Ok(Then::Peer),
        _ if text.contains('@') => Err(format!(
            "'{}' is the own account of a container: choose a made account, peer, home or keep",
            cut(text)
        )),
        _ => match text.strip_prefix('=').unwrap_or(text).parse() {
            Ok(name) => Ok(Then::Account(name)),
            Err(e) => Err(Invalid::to_string(&e)),
        },
    }
}

/// The first characters of a text from the file.
fn cut(text: &str) -> String {
    text.chars().take(80).collect()
}
