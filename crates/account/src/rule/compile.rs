//! From names to numbers, and from ranks to an order.
//!
//! A condition is a set of accounts. Of two conditions on the same account, one contains the other or they have
//! nothing in common, because accounts form a tree. Two rules therefore have passages in common exactly if each pair
//! of conditions has, and what they have in common is what a third rule would match, with the narrower condition of
//! each pair.
//!
//! Each condition has a number that is larger for a narrower one, and rules of one priority are ordered by the sum
//! of these. A more specific rule then stands before the others.

use std::collections::BTreeMap;

use dormouse_model::Name;

use super::table::{
    ACCEPTED, ANY, BELOW_HOME, BELOW_LABEL, BELOW_PEER, Becomes, LINE, Row, Table, is_below,
};
use super::text::{ERRORS_MAX, Origin, Rule, RuleError, Rules, Then, Who, finish};
use crate::book::{Account, Book, BookError, ROOT};
use crate::number::Number;

/// The own account of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Own {
    /// Its number.
    Number(Number),
    /// No container has this name.
    Missing,
    /// The container is charged to this account instead.
    Other(String),
}

/// Rules with the table that was made from them.
#[derive(Debug, Clone)]
pub struct Compiled {
    rules: Rules,
    /// The table for the kernel.
    pub table: Table,
    /// For each row, the index of its rule.
    order: Vec<usize>,
    /// Rules without a row, by their index, each with the reason.
    inert: BTreeMap<usize, String>,
    above: Above,
}

/// The accounts above each account that rules name.
#[derive(Debug, Clone, Default)]
pub(super) struct Above(BTreeMap<Name, Vec<Name>>);

impl Rules {
    /// Makes the table.
    ///
    /// Errors: an account that does not exist, and each pair of rules that are in conflict.
    pub fn compile(
        self,
        book: &Book,
        own: impl Fn(&Name) -> Own,
    ) -> Result<Compiled, Vec<RuleError>> {
        let mut errors = Vec::new();
        let above = Above::of(&self, book);
        for rule in self.all() {
            errors.extend(missing(rule, book));
        }
        errors.extend(conflicts(&self, &above));
        let mut compiled = Compiled {
            rules: self,
            table: Table::default(),
            order: Vec::new(),
            inert: BTreeMap::new(),
            above,
        };
        compiled.fill(book, &own);
        finish(compiled, errors)
    }
}

impl Compiled {
    /// The rules.
    pub fn rules(&self) -> &[Rule] {
        self.rules.all()
    }

    /// The rules of the rows, in the order of the table.
    pub fn in_order(&self) -> impl Iterator<Item = &Rule> {
        self.order.iter().filter_map(|index| self.rules().get(*index))
    }

    /// The rules without a row, each with the reason.
    pub fn inert(&self) -> impl Iterator<Item = (&Rule, &str)> {
        self.inert.iter().filter_map(|(index, why)| Some((self.rules().get(*index)?, why.as_str())))
    }

    /// Returns the rule of a row.
    pub(super) fn rule(&self, row: usize) -> Option<&Rule> {
        self.rules().get(*self.order.get(row)?)
    }

    /// Returns an earlier rule that matches all passages of the rule of a row, which then decides none.
    pub fn covered_by(&self, row: usize) -> Option<&Rule> {
        let rule = self.rule(row)?;
        self.in_order().take(row).find(|earlier| self.above.is_within(rule, earlier))
    }

    /// Whether all passages that `rule` matches are also matched by `wide`, which matches more.
    pub(super) fn is_narrower(&self, rule: &Rule, wide: &Rule) -> bool {
        self.above.is_narrower(rule, wide)
    }

    fn fill(&mut self, book: &Book, own: &impl Fn(&Name) -> Own) {
        let rules = self.rules.all();
        let mut order: Vec<usize> = (0..rules.len()).collect();
        // The sort is stable: rules of one rank keep the order of the file.
        order.sort_by_key(|index| {
            rules
                .get(*index)
                .map(|rule| std::cmp::Reverse((rule.priority, self.above.narrowness(rule))))
        });
        for index in order {
            let Some(rule) = rules.get(index) else { continue };
            match row(rule, book, own) {
                Ok(row) => {
                    let path =
                        rule.path.as_ref().map_or(0, |path| place(&mut self.table.paths, path));
                    self.table.rows.push(Row { path, ..row });
                    self.order.push(index);
                }
                Err(why) => drop(self.inert.insert(index, why)),
            }
        }
        self.table.lines = lines(&self.table.rows, book);
    }
}

/// Returns 1 and the index of a path, which is added if it is new.
fn place(paths: &mut Vec<String>, path: &str) -> u32 {
    let index = paths.iter().position(|known| known == path).unwrap_or_else(|| {
        paths.push(path.to_owned());
        paths.len() - 1
    });
    index as u32 + 1
}

/// Returns the row of a rule, without its path, or the reason for which it has none.
fn row(rule: &Rule, book: &Book, own: &impl Fn(&Name) -> Own) -> Result<Row, String> {
    let number =
        |name: &Name| book.find(name).map(|found| found.number.0).map_err(|e| e.to_string());
    let mut below = 0;
    let mut condition = |who: &Who, bit: u32| match who {
        Who::Any => Ok(ANY),
        Who::Only(name) => number(name),
        Who::Below(name) => {
            below |= bit;
            number(name)
        }
        Who::Own(name) => match own(name) {
            Own::Number(number) => Ok(number.0),
            Own::Missing => Err(format!("no container is called '{name}'")),
            Own::Other(account) => Err(format!(
                "container '{name}' has no account of its own: it is charged to '{account}'"
            )),
        },
    };
    let home = condition(&rule.home, BELOW_HOME)?;
    let label = condition(&rule.label, BELOW_LABEL)?;
    let peer = condition(&rule.peer, BELOW_PEER)?;
    let (becomes, account, owner) = match &rule.account {
        Then::Keep => (Becomes::Keep, 0, 0),
        Then::Home => (Becomes::Home, 0, 0),
        Then::Peer => (Becomes::Peer, 0, 0),
        Then::Account(name) => {
            let account = book.find(name).map_err(|e| e.to_string())?;
            (Becomes::Account, account.number.0, account.owner())
        }
        Then::Refused(errno) => (Becomes::Refused, errno.number(), 0),
    };
    if matches!(rule.origin, Origin::Shared(_)) {
        below |= ACCEPTED;
    }
    let (gate, becomes) = (rule.gate as u32, becomes as u32);
    Ok(Row {
        gate,
        becomes,
        account,
        home,
        label,
        peer,
        below,
        port: rule.port.map_or(0, u32::from),
        owner,
        path: 0,
    })
}

/// Returns the lines of the accounts below those that rows name with the accounts below them. For all others, a row
/// that names root decides as if they were directly below it.
fn lines(rows: &[Row], book: &Book) -> Vec<(u32, [u32; LINE])> {
    let named = |number: u32| {
        let pattern = |row: &Row| {
            [(BELOW_HOME, row.home), (BELOW_LABEL, row.label), (BELOW_PEER, row.peer)]
                .iter()
                .any(|(bit, account)| row.below & bit != 0 && *account == number)
        };
        number != Number::ROOT.0 && rows.iter().any(pattern)
    };
    let mut lines = Vec::new();
    for account in book.iter() {
        // A line that is broken by hand ends at root.
        let Ok(line) = book.line(&account.name) else { continue };
        if line.iter().skip(1).any(|above| named(above.number.0)) {
            let mut numbers = [Number::ROOT.0; LINE];
            for (to, from) in numbers.iter_mut().zip(line) {
                *to = from.number.0;
            }
            lines.push((account.number.0, numbers));
        }
    }
    lines
}

/// Returns an error for each account of a rule that does not exist.
fn missing(rule: &Rule, book: &Book) -> Vec<RuleError> {
    let named = rule.conditions().into_iter().filter_map(|who| match who {
        Who::Below(name) | Who::Only(name) => Some(name),
        Who::Any | Who::Own(_) => None,
    });
    let after = match &rule.account {
        Then::Account(name) => Some(name),
        Then::Keep | Then::Home | Then::Peer | Then::Refused(_) => None,
    };
    let open = |name| book.open(name).map(|_: &Account| ());
    let errors = named.chain(after).filter_map(|name| open(name).err());
    errors.map(|e: BookError| RuleError { line: rule.line(), reason: e.to_string() }).collect()
}

/// Returns an error for each pair of rules of which neither ranks before the other, and whose results differ.
fn conflicts(rules: &Rules, above: &Above) -> Vec<RuleError> {
    let mut errors = Vec::new();
    let of_file = || rules.all().iter().filter(|rule| rule.priority.is_some());
    for (n, later) in of_file().enumerate() {
        for earlier in of_file().take(n) {
            if !are_in_conflict(rules, above, earlier, later) {
                continue;
            }
            if errors.len() > ERRORS_MAX {
                return errors;
            }
            let reason = match earlier.conditions() == later.conditions()
                && earlier.port == later.port
                && earlier.path == later.path
            {
                true => format!("it has the conditions of {earlier}, and another account"),
                false => format!(
                    "it matches passages that {earlier} matches, and neither is more specific: give one a higher \
                     priority, or add a rule for what both match"
                ),
            };
            errors.push(RuleError { line: later.line(), reason });
        }
    }
    errors
}

fn are_in_conflict(rules: &Rules, above: &Above, a: &Rule, b: &Rule) -> bool {
    if a.priority != b.priority
        || a.account == b.account
        || above.is_narrower(a, b)
        || above.is_narrower(b, a)
    {
        return false;
    }
    let Some(both) = above.both(a, b) else { return false };
    let decides = |third: &Rule| {
        let is_before = third.priority > a.priority
            || third.priority == a.priority
                && above.is_narrower(third, a)
                && above.is_narrower(third, b);
        is_before && above.is_within(&both, third)
    };
    !rules.all().iter().any(decides)
}

impl Above {
    fn of(rules: &Rules, book: &Book) -> Self {
        let mut all = BTreeMap::new();
        for who in rules.all().iter().flat_map(Rule::conditions) {
            if let Who::Below(name) | Who::Only(name) = who {
                all.entry(name.clone()).or_insert_with(|| {
                    let line = book.line(name).unwrap_or_default();
                    line.iter().skip(1).map(|above| above.name.clone()).collect()
                });
            }
        }
        Self(all)
    }

    fn is_below(&self, name: &Name, above: &Name) -> bool {
        self.0.get(name).is_some_and(|line| line.contains(above))
    }

    /// Whether all accounts of `a` are accounts of `b`.
    fn contains(&self, b: &Who, a: &Who) -> bool {
        match (a, b) {
            (_, Who::Any) => true,
            (Who::Below(a) | Who::Only(a), Who::Below(b)) => a == b || self.is_below(a, b),
            (Who::Own(_), Who::Below(b)) => b.as_str() == ROOT,
            (Who::Only(a), Who::Only(b)) | (Who::Own(a), Who::Own(b)) => a == b,
            _ => false,
        }
    }

    /// Whether all passages of `a` are passages of `b`.
    fn is_within(&self, a: &Rule, b: &Rule) -> bool {
        let mut pairs = a.conditions().into_iter().zip(b.conditions());
        a.gate == b.gate
            && (b.port.is_none() || a.port == b.port)
            && is_path_within(a.path.as_deref(), b.path.as_deref())
            && pairs.all(|(a, b)| self.contains(b, a))
    }

    /// Whether all passages of `a` are passages of `b`, which has more.
    fn is_narrower(&self, a: &Rule, b: &Rule) -> bool {
        self.is_within(a, b) && !self.is_within(b, a)
    }

    /// A rule that matches what both match; `None` if that is nothing.
    fn both(&self, a: &Rule, b: &Rule) -> Option<Rule> {
        let narrower = |a: &Who, b: &Who| {
            if self.contains(b, a) {
                Some(a.clone())
            } else {
                self.contains(a, b).then(|| b.clone())
            }
        };
        let port = match (a.port, b.port) {
            (Some(a), Some(b)) if a != b => return None,
            (a, b) => a.or(b),
        };
        let (home, label) = (narrower(&a.home, &b.home)?, narrower(&a.label, &b.label)?);
        let peer = narrower(&a.peer, &b.peer)?;
        let path = if is_path_within(a.path.as_deref(), b.path.as_deref()) {
            a.path.clone()
        } else {
            is_path_within(b.path.as_deref(), a.path.as_deref()).then(|| b.path.clone())?
        };
        (a.gate == b.gate).then(|| Rule { home, label, peer, port, path, ..a.clone() })
    }

    /// A number that is larger for a rule that is narrower than another one.
    fn narrowness(&self, rule: &Rule) -> usize {
        let of = |who: &Who| match who {
            Who::Any => 0,
            Who::Below(name) => 1 + self.0.get(name).map_or(0, Vec::len),
            Who::Only(_) | Who::Own(_) => 1 + LINE,
        };
        let path = rule
            .path
            .as_ref()
            .map_or(0, |path| 1 + path.trim_end_matches('/').matches('/').count());
        rule.conditions().into_iter().map(of).sum::<usize>()
            + usize::from(rule.port.is_some())
            + path
    }
}

/// Whether all files of `a` are files of `b`.
fn is_path_within(a: Option<&str>, b: Option<&str>) -> bool {
    b.is_none_or(|b| a.is_some_and(|a| is_below(a, b)))
}
