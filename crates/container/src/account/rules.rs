//! The rules of an operator, and those of shared containers.
//!
//! The file keeps the text as it was given, below a line with a checksum. It is compiled again by each reader,
//! because accounts move and containers come and go.
//!
//! An account that a rule names cannot be removed, and an account cannot move where rules would be in conflict. A
//! container can be removed: its rules are inert until a container has its name again.
//!
//! Uses `ground` and `account::store`.

use dormouse_account::rule::{
    Compiled, Gate, Own, Passage, Rule, RuleError, Rules, Table, Then, Who,
};
use dormouse_account::{Book, Holder, Number, ROOT};
use dormouse_model::{Config, Name};

use super::store::{self, Place, holder};
use crate::disk::{self, Durable, Lock};
use crate::error::{Error, Result};
use crate::ground::Ground;

/// A passage between accounts, by their names.
#[derive(Debug, Clone)]
pub struct Question {
    /// Its kind.
    pub gate: Gate,
    /// Home of the task.
    pub home: String,
    /// Label of the task; its home if `None`.
    pub label: Option<String>,
    /// The peer; `None` if it is outside of all containers, or without a socket.
    pub peer: Option<String>,
    /// Local port of the socket.
    pub port: Option<u16>,
    /// The file that is opened.
    pub path: Option<String>,
}

/// Which rule decides a passage.
#[derive(Debug, Clone)]
pub struct Answer {
    /// The account for which the task works afterwards.
    pub label: String,
    /// The rule that decides; without one, the label is kept.
    pub decides: Option<Rule>,
    /// All others that match, by rank, with the reason why they do not decide.
    pub others: Vec<(Rule, String)>,
}

/// Keeps accounts and rules from being changed; `None` before the first account.
fn hold(ground: &Ground) -> Result<Option<Lock>> {
    let made = Place::of(ground).made();
    if made.is_dir() { Lock::share(&made).map(Some) } else { Ok(None) }
}

/// Compiles rules, with those of shared containers. The caller holds the lock of accounts.
fn compile(ground: &Ground, file: &str, text: &str) -> Result<Compiled> {
    let mut shared = Vec::new();
    for id in ground.ids()? {
        match ground.config(&id) {
            Ok(config) if is_shared(&config) => shared.push(config.name),
            // Removed meanwhile, or damaged: such a container does not start either.
            Ok(_) | Err(Error::NoContainer(_) | Error::Corrupt { .. }) => {}
            Err(e) => return Err(e),
        }
    }
    shared.sort();
    compile_with(ground, file, text, shared)
}

fn compile_with(ground: &Ground, file: &str, text: &str, shared: Vec<Name>) -> Result<Compiled> {
    let failed = |errors: Vec<RuleError>| Error::Rules { file: file.to_owned(), errors };
    let mut rules = Rules::parse(text).map_err(failed)?;
    rules.share(shared);
    with_own(ground, |own| rules.compile(&store::book(ground)?, own).map_err(failed))
}

/// Returns whether a container works for its clients where no rule decides.
pub(crate) fn is_shared(config: &Config) -> bool {
    config.spec.shared && matches!(holder(&config.spec, &config.id), Holder::Own(_))
}

/// Calls `f` with a function that finds own accounts, and returns the first error of this function instead.
fn with_own<T>(ground: &Ground, f: impl FnOnce(&dyn Fn(&Name) -> Own) -> Result<T>) -> Result<T> {
    let failed = std::cell::RefCell::new(None);
    let find = |name: &Name| {
        own(ground, name).unwrap_or_else(|e| {
            failed.borrow_mut().get_or_insert(e);
            Own::Missing
        })
    };
    let value = f(&find);
    failed.into_inner().map_or(value, Err)
}

/// Returns the own account of the container with this name.
fn own(ground: &Ground, name: &Name) -> Result<Own> {
    let Some(id) = ground.names.holder(name)? else { return Ok(Own::Missing) };
    match ground.config(&id) {
        // A name is taken before its container exists, and a rename holds two.
        Ok(config) if config.name != *name => Ok(Own::Missing),
        Err(Error::NoContainer(_) | Error::Corrupt { .. }) => Ok(Own::Missing),
        Err(e) => Err(e),
        Ok(config) => Ok(match holder(&config.spec, &config.id) {
            Holder::Own(_) => Own::Number(Number::own(config.ids)),
            Holder::Root => Own::Other(ROOT.to_owned()),
            Holder::Made(account) => Own::Other(account.to_string()),
        }),
    }
}

/// Checks rules. `file` names them in errors.
pub(crate) fn check(ground: &Ground, file: &str, text: &str) -> Result<Compiled> {
    let _same = hold(ground)?;
    compile(ground, file, text)
}

/// Installs rules in place of all others. With an error nothing changes.
pub(crate) fn apply(ground: &Ground, file: &str, text: &str) -> Result<Compiled> {
    let place = Place::of(ground);
    place.make()?;
    let _alone = Lock::take(&place.made())?;
    let compiled = compile(ground, file, text)?;
    disk::write_text(&place.rules(), text, Durable::Yes)?;
    Ok(compiled)
}

/// Returns the installed rules as they were given; an empty text before the first.
pub(crate) fn rules_text(ground: &Ground) -> Result<String> {
    let text = disk::read_text(&Place::of(ground).rules()).map_err(|e| match e {
        Error::Corrupt { path, what } => Error::RulesDamaged { path, what },
        other => other,
    })?;
    Ok(text.unwrap_or_default())
}

/// Name of the installed rules in errors.
fn file(ground: &Ground) -> String {
    Place::of(ground).rules().display().to_string()
}

/// Returns the installed rules, with those of shared containers.
pub(crate) fn installed(ground: &Ground) -> Result<Compiled> {
    let _same = hold(ground)?;
    compile(ground, &file(ground), &rules_text(ground)?)
}

/// Returns the installed rules of the file as the kernel's programs evaluate them. These know shared containers by
/// their cgroups.
///
/// Other rules, a move of an account, and each create, rename and removal of a container that a rule names make another
/// table. The caller does not hold the lock of accounts.
pub(crate) fn table(ground: &Ground) -> Result<Table> {
    let _same = hold(ground)?;
    Ok(compile_with(ground, &file(ground), &rules_text(ground)?, Vec::new())?.table)
}

/// Returns whether the table depends on the existence of a container with this name and these choices.
pub(crate) fn depends_on(ground: &Ground, config: &Config) -> Result<bool> {
    let names = |rule: &Rule| {
        rule.conditions().iter().any(|who| matches!(who, Who::Own(name) if *name == config.name))
    };
    Ok(parsed(ground)?.all().iter().any(names))
}

fn parsed(ground: &Ground) -> Result<Rules> {
    let errors = |errors| Error::Rules { file: file(ground), errors };
    Rules::parse(&rules_text(ground)?).map_err(errors)
}

/// Returns the first installed rule that names an account. The caller holds the lock of accounts.
pub(super) fn naming(ground: &Ground, account: &Name) -> Result<Option<Rule>> {
    Ok(parsed(ground)?.all().iter().find(|rule| rule.names(account)).cloned())
}

/// Refuses a place of an account in which installed rules are in conflict. The caller holds the lock of accounts.
pub(super) fn check_move(ground: &Ground, book: &Book, name: &Name, parent: &Name) -> Result<()> {
    // Containers change no rank.
    let compiled = parsed(ground)?.compile(book, |_| Own::Missing);
    let Err(errors) = compiled else { return Ok(()) };
    let errors: Vec<_> = errors.iter().map(ToString::to_string).collect();
    Err(Error::Invalid(format!(
        "account '{name}' cannot be below '{parent}' with the installed rules: {}",
        errors.join("; ")
    )))
}

/// Returns which of the installed rules decides a passage.
pub(crate) fn explain(ground: &Ground, question: &Question) -> Result<Answer> {
    let Question { gate, home, label, peer, port, path } = question;
    if !gate.has_peer() && (peer.is_some() || port.is_some()) {
        return Err(Error::Invalid(format!(
            "gate '{gate}' has neither peer nor port, as there is no socket: leave them out"
        )));
    }
    if !gate.has_socket() && port.is_some() {
        return Err(Error::Invalid(format!(
            "gate '{gate}' has no port, as there is no socket: leave it out"
        )));
    }
    if *gate != Gate::Open && path.is_some() {
        return Err(Error::Invalid(format!(
            "gate '{gate}' has no path, as no file is opened: leave it out"
        )));
    }
    let _same = hold(ground)?;
    let compiled = compile(ground, &file(ground), &rules_text(ground)?)?;
    let book = store::book(ground)?;
    let label = label.as_ref().unwrap_or(home);
    let passage = Passage {
        gate: *gate,
        home: number(ground, &book, home)?,
        label: number(ground, &book, label)?,
        peer: peer.as_ref().map(|peer| number(ground, &book, peer)).transpose()?,
        port: port.map_or(0, u32::from),
        path: path.as_deref(),
    };
    let explained = compiled.explain(&passage);
    let label = match explained.decides.map(|rule| &rule.account) {
        None | Some(Then::Keep | Then::Refused(_)) => label.clone(),
        Some(Then::Home) => home.clone(),
        Some(Then::Peer) => peer.as_ref().unwrap_or(home).clone(),
        Some(Then::Account(name)) => name.to_string(),
    };
    let others = explained.others.into_iter().map(|other| (other.rule.clone(), other.why));
    Ok(Answer { label, decides: explained.decides.cloned(), others: others.collect() })
}

/// Returns the number of an account that an operator names.
fn number(ground: &Ground, book: &Book, name: &str) -> Result<u32> {
    let Some(container) = name.strip_prefix('@') else {
        return Ok(book.find(&name.parse()?)?.number.0);
    };
    match own(ground, &container.parse()?)? {
        Own::Number(number) => Ok(number.0),
        Own::Missing => Err(Error::NoContainer(container.to_owned())),
        Own::Other(account) => Err(Error::Invalid(format!(
            "container '{container}' has no account of its own: give '{account}', to which it is charged"
        ))),
    }
}
