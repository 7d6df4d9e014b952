//! System call filters (seccomp(2)): a policy, its compiler, and the policy of the house.
//!
//! **The idea.** A [`Policy`] has an action for every system call number; a few depend on
//! arguments. The compiler turns it into classic BPF: not a list of comparisons, but a binary tree
//! over the *ranges* of numbers with the same action. The kernel runs a new filter once for every
//! number it knows, to learn which ones are always allowed (those never run it again). Loading
//! therefore costs numbers times depth: a tree of some hundred ranges is seven comparisons deep,
//! while a list of 300 numbers has 150 on average.
//!
//! **Form of a program** that lets the kernel recognise "always allowed": the path to the result
//! reads the number and the machine, nothing else. Arguments are only read in the leaves that need
//! them.
//!
//! **Widths.** Many arguments are `int` to the kernel, which ignores their upper half. Comparing
//! all 64 bits would let `ioctl(fd, 1 << 32 | TIOCSTI)` pass a rule about TIOCSTI. So every
//! condition states the width that the kernel uses: [`Argument::Int`] or [`Argument::Long`].
//!
//! **Other ABIs.** One kernel accepts three sets of numbers. Calls of i386 (`int 0x80`, 32-bit
//! programs) end the process with SIGSYS, unless there is a separate policy for them: a program
//! whose every call failed would continue in error, and an attack on the other table gets no second
//! try. Numbers of x32 get ENOSYS, as from nearly all kernels, which are built without it.
//!
//! **Not here**: other machines than x86_64; the listener that answers for [`Action::Notify`].

mod compile;
mod house;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

pub use house::{Network, default_filter, default_filter_for, default_policy};

use crate::call::{self, Instruction};
use crate::error::{Explain, Result};

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
    otherwise: Decision,
    x32: Decision,
    decisions: BTreeMap<u32, Decision>,
    /// The decision for numbers from this one on, in place of `otherwise`.
    beyond: Option<(u32, Decision)>,
    /// The policy for calls of 32-bit programs; without it they end the process.
    i386: Option<Box<Policy>>,
}

/// The first number of x32, a bit on top of the numbers of x86_64.
const X32: u32 = 0x4000_0000;

impl Policy {
    /// A policy that gives the same answer to every call.
    pub fn new(otherwise: Action) -> Self {
        let x32 = Action::Errno(libc::ENOSYS as u16).into();
        Self {
            otherwise: otherwise.into(),
            x32,
            decisions: BTreeMap::new(),
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
        let next = self.decisions.last_key_value().map_or(0, |(last, _)| last + 1);
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
        self.decisions.get(&number).unwrap_or(beyond.map_or(&self.otherwise, |(_, d)| d))
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

    /// Returns the program that implements the policy.
    ///
    /// `None` when it would be longer than the kernel's 4,096 instructions, or when a condition is
    /// about an argument that no system call has, or names more than 255 numbers.
    pub fn compile(&self) -> Option<Filter> {
        compile::compile(self).map(Filter)
    }
}

/// A compiled filter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter(Vec<Instruction>);

impl Filter {
    /// The program.
    pub fn instructions(&self) -> &[Instruction] {
        &self.0
    }

    /// The program as an array of the kernel's `struct sock_filter`, eight bytes each, for
    /// [`call::load_filter_bytes`].
    pub fn to_bytes(&self) -> Vec<u8> {
        self.0
            .iter()
            .flat_map(|instruction| {
                let [a, b] = instruction.code.to_ne_bytes();
                let [c, d, e, f] = instruction.k.to_ne_bytes();
                [a, b, instruction.jump_true, instruction.jump_false, c, d, e, f]
            })
            .collect()
    }

    /// Loads it for the calling thread and what it becomes or makes from now on.
    pub fn load(&self) -> Result<()> {
        call::load_filter(&self.0).explain("seccomp", || format!("{} instructions", self.0.len()))
    }
}
