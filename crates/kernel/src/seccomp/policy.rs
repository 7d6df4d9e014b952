//! A policy: an action for every system call number, by arguments where needed.

use std::collections::BTreeMap;

/// The action for a system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// The call is made.
    Allow,
    /// Fails with this error number and does nothing else.
    Errno(u16),
    /// The whole process ends with SIGSYS.
    Kill,
    /// The calling thread alone does.
    KillThread,
    /// The thread gets SIGSYS, which it may handle.
    Trap,
    /// A tracer decides, which receives this number; ENOSYS without one.
    Trace(u16),
    /// The call is made, and logged.
    Log,
    /// A listener decides (seccomp_unotify(2)).
    Notify,
}

/// An argument of a system call, by position from 0, as wide as the kernel reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Argument {
    /// Its lower 32 bits.
    Int(u8),
    /// All 64 bits.
    Long(u8),
}

/// A test of an argument.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Test {
    /// This number.
    Equal(u64),
    /// One of these.
    OneOf(Vec<u64>),
    /// Any other number.
    NotEqual(u64),
    /// More than this.
    Greater(u64),
    /// This or more.
    AtLeast(u64),
    /// Less than this.
    Less(u64),
    /// This or less.
    AtMost(u64),
    /// The number equals this under a mask.
    Masked {
        /// The mask.
        mask: u64,
        /// The required value of the masked bits.
        value: u64,
    },
}

/// One condition of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition {
    /// The tested argument.
    pub argument: Argument,
    /// The test.
    pub test: Test,
}

impl Condition {
    /// `argument` passes `test`.
    pub fn new(argument: Argument, test: Test) -> Self {
        Self { argument, test }
    }
}

/// An answer that is given when all conditions hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// All must hold.
    pub when: Vec<Condition>,
    /// The action.
    pub then: Action,
}

/// The decision for one system call number: the first rule that holds decides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// In this order.
    pub rules: Vec<Rule>,
    /// The action without a match.
    pub otherwise: Action,
}

impl From<Action> for Decision {
    fn from(action: Action) -> Self {
        Self { rules: Vec::new(), otherwise: action }
    }
}

/// The decisions for all system calls of x86_64.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    pub(super) otherwise: Decision,
    pub(super) x32: Decision,
    pub(super) decisions: Table,
    /// The decision for numbers from this one on, in place of `otherwise`.
    pub(super) beyond: Option<(u32, Decision)>,
    /// The policy for calls of 32-bit programs; without it they end the process.
    pub(super) i386: Option<Box<Policy>>,
}

/// The decisions by number. Every start makes some 400 of them, so they are an array where the numbers of the kernel
/// are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Table {
    /// By number, up to the last one below [`Self::DENSE`] that was decided about.
    low: Vec<Option<Decision>>,
    /// The numbers from [`Self::DENSE`] on.
    high: BTreeMap<u32, Decision>,
}

impl Table {
    /// More than the kernel has calls.
    const DENSE: usize = 1024;

    fn insert(&mut self, number: u32, decision: Decision) {
        let at = number as usize;
        if at >= Self::DENSE {
            self.high.insert(number, decision);
            return;
        }
        if at >= self.low.len() {
            self.low.resize_with(at + 1, || None);
        }
        self.low[at] = Some(decision);
    }

    pub(super) fn get(&self, number: u32) -> Option<&Decision> {
        match number as usize {
            at if at < Self::DENSE => self.low.get(at)?.as_ref(),
            _ => self.high.get(&number),
        }
    }

    fn last(&self) -> Option<u32> {
        // The last one of `low` is always one that was decided about.
        let low = self.low.len().checked_sub(1).map(|last| last as u32);
        self.high.last_key_value().map(|(last, _)| *last).or(low)
    }

    /// In the order of the numbers.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Decision)> {
        let low = (0u32..).zip(&self.low).filter_map(|(n, d)| d.as_ref().map(|d| (n, d)));
        low.chain(self.high.iter().map(|(n, d)| (*n, d)))
    }
}

/// The first number of x32, a bit on top of the numbers of x86_64.
pub(super) const X32: u32 = 0x4000_0000;

impl Policy {
    /// A policy that gives the same answer to every call.
    pub fn new(otherwise: Action) -> Self {
        let x32 = Action::Errno(libc::ENOSYS as u16).into();
        Self {
            otherwise: otherwise.into(),
            x32,
            decisions: Table::default(),
            beyond: None,
            i386: None,
        }
    }

    /// Decides about one number, in place of what was decided before. Numbers of x32 can't be
    /// allowed: they are ignored.
    pub fn set(&mut self, number: u32, decision: impl Into<Decision>) {
        if number < X32 {
            self.decisions.insert(number, decision.into());
        }
    }

    /// Decides about every number beyond the last one that was decided about.
    pub fn set_rest(&mut self, decision: impl Into<Decision>) {
        let next = self.decisions.last().map_or(0, |last| last + 1);
        self.beyond = Some((next, decision.into()));
    }

    /// Lets 32-bit programs make calls, by their own table of numbers.
    pub fn set_i386(&mut self, policy: Policy) {
        self.i386 = Some(Box::new(policy));
    }

    /// Returns the decision for a number.
    pub fn decision(&self, number: u32) -> &Decision {
        if number >= X32 {
            return &self.x32;
        }
        let beyond = self.beyond.as_ref().filter(|(from, _)| number >= *from);
        self.decisions.get(number).unwrap_or(beyond.map_or(&self.otherwise, |(_, d)| d))
    }

    /// Evaluates the policy for one call of x86_64, without the compiler.
    pub fn answer(&self, number: u32, arguments: &[u64; 6]) -> Action {
        let decision = self.decision(number);
        let holds = |condition: &Condition| {
            let found = match condition.argument {
                Argument::Int(index) => arguments[usize::from(index)] & 0xffff_ffff,
                Argument::Long(index) => arguments[usize::from(index)],
            };
            match &condition.test {
                Test::Equal(value) => found == *value,
                Test::OneOf(values) => values.contains(&found),
                Test::NotEqual(value) => found != *value,
                Test::Greater(value) => found > *value,
                Test::AtLeast(value) => found >= *value,
                Test::Less(value) => found < *value,
                Test::AtMost(value) => found <= *value,
                Test::Masked { mask, value } => found & mask == *value,
            }
        };
        let rule = decision.rules.iter().find(|rule| rule.when.iter().all(holds));
        rule.map_or(decision.otherwise, |rule| rule.then)
    }
}
