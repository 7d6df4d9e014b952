//! Accounts that an operator has made, and their hierarchy.

use std::collections::BTreeMap;

use dormouse_model::Name;
use serde::{Deserialize, Serialize};

use crate::number::Number;

/// Format of the record; this page describes 1.
const VERSION: u32 = 1;

/// Name of the account above all.
pub const ROOT: &str = "root";

/// LIMIT: accounts above one, root included.
pub const DEPTH_MAX: usize = 8;

/// How many days the figures of a day are kept, where no account sets another number: 13 months.
pub const KEEP_DAYS_DEFAULT: u32 = 400;

/// What becomes of a connection beyond a limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnLimit {
    /// It waits until another one has ended, in the order of arrival.
    #[default]
    Wait,
    /// It is reset: connect(2) fails with ECONNREFUSED.
    Refuse,
    /// Its packets are lost: connect(2) repeats them, and fails with ETIMEDOUT in the end.
    Drop,
    /// It is made all the same.
    Pass,
}

/// How many connections to shared services an account has at once, with the accounts below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectionLimit {
    /// The most.
    pub connections: u32,
    /// What becomes of others.
    #[serde(default)]
    pub on_limit: OnLimit,
}

/// An account that an operator has made, or root.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Account {
    version: u32,
    /// Its number.
    pub number: Number,
    /// Its name.
    pub name: Name,
    /// The account above; only root has none.
    pub parent: Option<Name>,
    /// When it was made, in milliseconds since the epoch.
    #[serde(default)]
    pub created_unix_ms: i64,
    /// How many days the figures of a day are kept; the parent's number if `None`.
    #[serde(default)]
    pub keep_days: Option<u32>,
    /// Free-form labels; the parent's if `None`.
    #[serde(default)]
    pub labels: Option<BTreeMap<String, String>>,
    /// Connections that it may have; root has no limit.
    #[serde(default)]
    pub limit: Option<ConnectionLimit>,
    /// Sockets that its containers may have, with those of the accounts below it; root has no limit.
    #[serde(default)]
    pub sockets: Option<u32>,
    /// Processes and threads, in the same way.
    #[serde(default)]
    pub pids: Option<u32>,
    /// It is being removed: it takes no container, and its balance moves to its parent.
    #[serde(default)]
    pub is_closing: bool,
}

impl Account {
    /// Returns a new account, which shares everything with its parent.
    pub fn new(number: Number, name: Name, parent: Name, created_unix_ms: i64) -> Self {
        Self {
            version: VERSION,
            number,
            name,
            parent: Some(parent),
            created_unix_ms,
            keep_days: None,
            labels: None,
            limit: None,
            sockets: None,
            pids: None,
            is_closing: false,
        }
    }

    /// Returns what tells it apart from an earlier account with its number: an operator may choose the number of a
    /// removed one. 0 where numbers are given once.
    pub fn owner(&self) -> u64 {
        match Number::GLOBAL.contains(&self.number.0) {
            true => self.created_unix_ms.unsigned_abs(),
            false => 0,
        }
    }

    fn root() -> Self {
        let name = root_name();
        let labels = Some(BTreeMap::new());
        let keep_days = Some(KEEP_DAYS_DEFAULT);
        Self { parent: None, labels, keep_days, ..Self::new(Number::ROOT, name.clone(), name, 0) }
    }
}

fn root_name() -> Name {
    ROOT.parse().expect("it is a name")
}

/// A hierarchy that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BookError {
    /// No such account.
    #[error(
        "no account is called '{0}': see `dormouse account ls`, or make it with `dormouse account create {0}`"
    )]
    Missing(Name),
    /// The account is being removed.
    #[error("account '{0}' is being removed: choose another one")]
    Closing(Name),
    /// The name belongs to another account.
    #[error("an account is called '{0}' already: choose another name")]
    Exists(Name),
    /// The number belongs to another account.
    #[error("account number {number} is that of account '{holder}': choose another one")]
    NumberTaken {
        /// The number.
        number: Number,
        /// The account that has it.
        holder: Name,
    },
    /// An account would be above itself.
    #[error("account '{name}' cannot be below '{parent}', which is below '{name}'")]
    Circle {
        /// The account.
        name: Name,
        /// Its new parent.
        parent: Name,
    },
    /// Too many levels.
    #[error(
        "account '{0}' would be on level {depth} below root, and {max} levels are permitted: choose a parent above",
        depth = .1,
        max = DEPTH_MAX
    )]
    TooDeep(Name, usize),
    /// Root has a fixed place.
    #[error("account 'root' has no parent, and cannot be made, moved or removed")]
    Root,
    /// The parent is absent from the records.
    #[error(
        "account '{name}' is below '{parent}', which has no record: give it another place with \
         `dormouse account set --parent root {name}`"
    )]
    NoParent {
        /// The account.
        name: Name,
        /// The absent one.
        parent: Name,
    },
}

/// All accounts that operators have made, and root.
#[derive(Debug, Clone)]
pub struct Book(BTreeMap<Name, Account>);

impl Default for Book {
    fn default() -> Self {
        Self::new(std::iter::empty())
    }
}

impl Book {
    /// Collects records. A record of root replaces the default one.
    pub fn new(accounts: impl IntoIterator<Item = Account>) -> Self {
        let mut all = BTreeMap::from([(root_name(), Account::root())]);
        all.extend(accounts.into_iter().map(|account| (account.name.clone(), account)));
        Self(all)
    }

    /// All of them, by name.
    pub fn iter(&self) -> impl Iterator<Item = &Account> {
        self.0.values()
    }

    /// Finds an account, also one that is being removed.
    pub fn find(&self, name: &Name) -> Result<&Account, BookError> {
        self.0.get(name).ok_or_else(|| BookError::Missing(name.clone()))
    }

    /// Finds an account that may take containers and accounts.
    pub fn open(&self, name: &Name) -> Result<&Account, BookError> {
        match self.find(name)? {
            account if account.is_closing => Err(BookError::Closing(name.clone())),
            account => Ok(account),
        }
    }

    /// Root.
    pub fn root(&self) -> &Account {
        &self.0[&root_name()]
    }

    /// The accounts directly below one, by name.
    pub fn children(&self, name: &Name) -> impl Iterator<Item = &Account> {
        self.0.values().filter(move |account| account.parent.as_ref() == Some(name))
    }

    /// Returns an account and those above it, root last.
    pub fn line(&self, name: &Name) -> Result<Vec<&Account>, BookError> {
        let mut line = vec![self.find(name)?];
        while let Some(account) = line.last()
            && let Some(parent) = &account.parent
        {
            if line.iter().any(|below| below.name == *parent) {
                return Err(BookError::Circle {
                    name: account.name.clone(),
                    parent: parent.clone(),
                });
            }
            let (name, parent) = (account.name.clone(), parent.clone());
            let above = self.0.get(&parent).ok_or(BookError::NoParent { name, parent })?;
            line.push(above);
        }
        Ok(line)
    }

    /// Adds an account, if its name, its number and its place are permitted.
    pub fn add(&mut self, account: Account) -> Result<(), BookError> {
        let parent = account.parent.clone().ok_or(BookError::Root)?;
        if account.name.as_str() == ROOT {
            return Err(BookError::Root);
        }
        if self.0.contains_key(&account.name) {
            return Err(BookError::Exists(account.name));
        }
        if let Some(holder) = self.0.values().find(|other| other.number == account.number) {
            let (number, holder) = (account.number, holder.name.clone());
            return Err(BookError::NumberTaken { number, holder });
        }
        self.open(&parent)?;
        self.check_depth(&account.name, &parent, 0)?;
        self.0.insert(account.name.clone(), account);
        Ok(())
    }

    /// Moves an account below another parent.
    pub fn move_below(&mut self, name: &Name, parent: &Name) -> Result<(), BookError> {
        if name.as_str() == ROOT {
            return Err(BookError::Root);
        }
        self.find(name)?;
        self.open(parent)?;
        if self.line(parent)?.iter().any(|above| above.name == *name) {
            return Err(BookError::Circle { name: name.clone(), parent: parent.clone() });
        }
        self.check_depth(name, parent, self.height(name, DEPTH_MAX))?;
        if let Some(account) = self.0.get_mut(name) {
            account.parent = Some(parent.clone());
        }
        Ok(())
    }

    /// Levels below an account, as far as they are counted.
    fn height(&self, name: &Name, most: usize) -> usize {
        let below = |child: &Account| 1 + self.height(&child.name, most - 1);
        if most == 0 { 0 } else { self.children(name).map(below).max().unwrap_or(0) }
    }

    fn check_depth(&self, name: &Name, parent: &Name, height: usize) -> Result<(), BookError> {
        let depth = self.line(parent)?.len() + height;
        if depth > DEPTH_MAX { Err(BookError::TooDeep(name.clone(), depth)) } else { Ok(()) }
    }

    /// Changes an account.
    pub fn find_mut(&mut self, name: &Name) -> Result<&mut Account, BookError> {
        match self.0.get_mut(name) {
            None => Err(BookError::Missing(name.clone())),
            Some(account) if account.is_closing => Err(BookError::Closing(name.clone())),
            Some(account) => Ok(account),
        }
    }

    /// Returns the attribute of the nearest account that sets it. A broken line upwards ends at root.
    fn nearest<'b, T>(&'b self, name: &Name, get: impl Fn(&'b Account) -> Option<T>) -> Option<T> {
        let line = self.line(name).unwrap_or_default();
        line.into_iter().chain([self.root()]).find_map(get)
    }

    /// Returns how many days the figures of a day are kept.
    pub fn keep_days(&self, name: &Name) -> u32 {
        self.nearest(name, |account| account.keep_days).unwrap_or(KEEP_DAYS_DEFAULT)
    }

    /// Returns the labels.
    pub fn labels(&self, name: &Name) -> BTreeMap<String, String> {
        self.nearest(name, |account| account.labels.as_ref()).cloned().unwrap_or_default()
    }

    /// Returns the accounts with a limit among an account and those above it.
    pub fn limits(&self, name: &Name) -> Vec<(Number, ConnectionLimit)> {
        let line = self.line(name).unwrap_or_default();
        line.into_iter().filter_map(|account| Some((account.number, account.limit?))).collect()
    }

    /// Returns the number of the next account that is made here, given the largest number that was ever given;
    /// `None` when all were given.
    pub fn next_number(&self, given: u32) -> Option<Number> {
        let here = self.0.values().map(|account| account.number.0);
        let used = here.filter(|number| Number::MADE.contains(number)).max().unwrap_or(0);
        let next = used.max(given).checked_add(1)?;
        Number::MADE.contains(&next).then_some(Number(next))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    fn add(book: &mut Book, text: &str, parent: &str) -> Result<(), BookError> {
        let number = book.next_number(0).unwrap();
        book.add(Account::new(number, name(text), name(parent), 0))
    }

    #[test]
    fn attribute_is_shared_until_it_is_set() {
        let mut book = Book::default();
        add(&mut book, "a", "root").unwrap();
        add(&mut book, "b", "a").unwrap();
        assert_eq!(book.keep_days(&name("b")), KEEP_DAYS_DEFAULT);
        let labels = BTreeMap::from([("customer".to_owned(), "7".to_owned())]);
        let a = book.find_mut(&name("a")).unwrap();
        (a.keep_days, a.labels) = (Some(30), Some(labels.clone()));
        assert_eq!((book.keep_days(&name("b")), book.labels(&name("b"))), (30, labels.clone()));
        book.find_mut(&name("b")).unwrap().keep_days = Some(5);
        book.find_mut(&name("a")).unwrap().keep_days = Some(31);
        assert_eq!((book.keep_days(&name("a")), book.keep_days(&name("b"))), (31, 5));
        assert_eq!(book.labels(&name("b")), labels, "each attribute is set by itself");
        book.find_mut(&name("b")).unwrap().keep_days = None;
        assert_eq!(book.keep_days(&name("b")), 31);
        book.find_mut(&name("root")).unwrap().keep_days = Some(9);
        book.find_mut(&name("a")).unwrap().keep_days = None;
        assert_eq!(book.keep_days(&name("b")), 9);
    }

    #[test]
    fn limits_are_those_of_the_line_upwards() {
        let mut book = Book::default();
        for (child, parent) in [("a", "root"), ("b", "a"), ("c", "root")] {
            add(&mut book, child, parent).unwrap();
        }
        let limit = |connections| ConnectionLimit { connections, on_limit: OnLimit::Wait };
        book.find_mut(&name("a")).unwrap().limit = Some(limit(9));
        book.find_mut(&name("b")).unwrap().limit = Some(limit(3));
        assert_eq!(book.limits(&name("b")), [(Number(2), limit(3)), (Number(1), limit(9))]);
        assert_eq!(book.limits(&name("a")), [(Number(1), limit(9))]);
        assert!(book.limits(&name("c")).is_empty());
        // A record of an earlier version has none.
        let mut text = serde_json::to_value(book.find(&name("b")).unwrap()).unwrap();
        text.as_object_mut().unwrap().remove("limit");
        assert_eq!(serde_json::from_value::<Account>(text).unwrap().limit, None);
    }

    #[test]
    fn impossible_places_are_refused() {
        let mut book = Book::default();
        for (child, parent) in [("a", "root"), ("b", "a"), ("c", "b")] {
            add(&mut book, child, parent).unwrap();
        }
        assert_eq!(add(&mut book, "a", "root"), Err(BookError::Exists(name("a"))));
        assert_eq!(add(&mut book, "root", "root"), Err(BookError::Root));
        assert_eq!(add(&mut book, "x", "y"), Err(BookError::Missing(name("y"))));
        let circle = Err(BookError::Circle { name: name("a"), parent: name("c") });
        assert_eq!(book.move_below(&name("a"), &name("c")), circle);
        assert!(book.move_below(&name("a"), &name("a")).is_err());
        assert_eq!(book.move_below(&name("root"), &name("a")), Err(BookError::Root));
        let taken = Account::new(Number(2), name("d"), name("root"), 0);
        let holder = name("b");
        assert_eq!(book.add(taken), Err(BookError::NumberTaken { number: Number(2), holder }));
        book.find_mut(&name("c")).unwrap().is_closing = true;
        assert_eq!(add(&mut book, "e", "c"), Err(BookError::Closing(name("c"))));
        assert_eq!(book.find_mut(&name("c")).err(), Some(BookError::Closing(name("c"))));
        book.move_below(&name("b"), &name("root")).unwrap();
        assert_eq!(book.line(&name("c")).unwrap().len(), 3);
    }

    #[test]
    fn levels_are_bounded() {
        let mut book = Book::default();
        let mut parent = ROOT.to_owned();
        for level in 1..=DEPTH_MAX {
            let child = format!("l{level}");
            add(&mut book, &child, &parent).unwrap();
            parent = child;
        }
        let too_deep = BookError::TooDeep(name("x"), DEPTH_MAX + 1);
        assert_eq!(add(&mut book, "x", &parent), Err(too_deep));
        add(&mut book, "top", "root").unwrap();
        let moved = book.move_below(&name("l1"), &name("top"));
        assert_eq!(
            moved,
            Err(BookError::TooDeep(name("l1"), DEPTH_MAX + 1)),
            "what is below counts"
        );
        book.move_below(&name("l2"), &name("top")).unwrap();
    }

    #[test]
    fn number_is_not_given_twice() {
        let mut book = Book::default();
        assert_eq!(book.next_number(0), Some(Number(1)));
        add(&mut book, "a", "root").unwrap();
        let global = Number::global(1 << 30).unwrap();
        book.add(Account::new(global, name("g"), name("root"), 0)).unwrap();
        assert_eq!(book.next_number(0), Some(Number(2)));
        assert_eq!(book.next_number(7), Some(Number(8)), "7 was given to a removed one");
        assert_eq!(book.next_number(65_535), None);
    }

    #[test]
    fn only_a_number_that_may_be_given_again_has_an_owner() {
        let made = |number: u32| Account::new(Number(number), name("a"), name("root"), 77);
        assert_eq!((made(1).owner(), made(1 << 30).owner()), (0, 77));
    }

    #[test]
    fn damaged_hierarchy_ends_at_root() {
        let broken = |child: &str, parent: &str, number| {
            Account::new(Number(number), name(child), name(parent), 0)
        };
        let book = Book::new([broken("a", "b", 1), broken("b", "a", 2), broken("c", "gone", 3)]);
        for child in ["a", "b", "c"] {
            assert!(book.line(&name(child)).is_err(), "{child}");
            assert_eq!(book.keep_days(&name(child)), KEEP_DAYS_DEFAULT);
        }
    }

    proptest! {
        /// Any sequence of moves, permitted or refused, keeps a tree: every account reaches root.
        #[test]
        fn hierarchy_stays_a_tree(moves in proptest::collection::vec((0_usize..12, 0_usize..13), 0..80)) {
            let mut book = Book::default();
            let text = |n: usize| if n == 12 { ROOT.to_owned() } else { format!("a{n}") };
            (0..12).for_each(|n| add(&mut book, &text(n), ROOT).unwrap());
            for (child, parent) in moves {
                let before = book.line(&name(&text(child))).unwrap().len();
                let moved = book.move_below(&name(&text(child)), &name(&text(parent)));
                let line = book.line(&name(&text(child))).unwrap();
                prop_assert_eq!(moved.is_ok() || line.len() == before, true);
                for n in 0..12 {
                    let line = book.line(&name(&text(n))).unwrap();
                    prop_assert_eq!(line.last().unwrap().number, Number::ROOT);
                    prop_assert!(line.len() <= DEPTH_MAX + 1);
                }
            }
        }
    }
}
