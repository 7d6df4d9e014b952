//! From a policy to classic BPF.
//!
//! Jumps only lead forward, over blocks of known length, so there are no labels. A jump that
//! depends on a comparison reaches 255 instructions; over a longer block an unconditional jump,
//! which reaches everywhere, is inserted.

use super::filter::Filter;
use super::policy::{Action, Argument, Condition, Decision, Policy, Rule, Test, X32};
use crate::call::Instruction;

/// LIMIT: the kernel's, of one filter (BPF_MAXINSNS).
const LONGEST: usize = 4096;

const LOAD: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS
const AND: u16 = 0x54; // BPF_ALU | BPF_AND | BPF_K
const JUMP: u16 = 0x05; // BPF_JMP | BPF_JA
const EQUAL: u16 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
const AT_LEAST: u16 = 0x35; // BPF_JMP | BPF_JGE | BPF_K
const RETURN: u16 = 0x06; // BPF_RET | BPF_K

// Places in the kernel's `struct seccomp_data`.
const NUMBER: u32 = 0;
const MACHINE: u32 = 4;
const ARGUMENTS: u32 = 16;

const MORE: u16 = 0x25; // BPF_JMP | BPF_JGT | BPF_K

/// AUDIT_ARCH_X86_64
const X86_64: u32 = 0xc000_003e;
/// AUDIT_ARCH_I386
const I386: u32 = 0x4000_0003;

fn plain(code: u16, k: u32) -> Instruction {
    Instruction { code, jump_true: 0, jump_false: 0, k }
}

fn answer(action: Action) -> Instruction {
    let value = match action {
        Action::Allow => libc::SECCOMP_RET_ALLOW,
        Action::Errno(errno) => libc::SECCOMP_RET_ERRNO | u32::from(errno),
        Action::Kill => libc::SECCOMP_RET_KILL_PROCESS,
        Action::KillThread => libc::SECCOMP_RET_KILL_THREAD,
        Action::Trap => libc::SECCOMP_RET_TRAP,
        Action::Trace(number) => libc::SECCOMP_RET_TRACE | u32::from(number),
        Action::Log => libc::SECCOMP_RET_LOG,
        Action::Notify => libc::SECCOMP_RET_USER_NOTIF,
    };
    plain(RETURN, value)
}

impl Policy {
    /// Returns the program that implements the policy.
    ///
    /// `None` when it would be longer than the kernel's 4,096 instructions, or when a condition is
    /// about an argument that no system call has, or names more than 255 numbers.
    pub fn compile(&self) -> Option<Filter> {
        compile(self).map(Filter)
    }
}

fn compile(policy: &Policy) -> Option<Vec<Instruction>> {
    let mut program = vec![plain(LOAD, MACHINE)];
    if let Some(i386) = &policy.i386 {
        let mut other = vec![plain(LOAD, NUMBER)];
        tree(&ranges(i386), &mut other)?;
        let over = other.len() as u32;
        program.push(Instruction { code: EQUAL, jump_true: 0, jump_false: 1, k: I386 });
        program.push(plain(JUMP, 1));
        program.push(plain(JUMP, over));
        program.extend(other);
        // The machine is tested once more: 64-bit calls have jumped over the table.
    }
    program.extend([
        Instruction { code: EQUAL, jump_true: 1, jump_false: 0, k: X86_64 },
        answer(Action::Kill),
        plain(LOAD, NUMBER),
    ]);
    tree(&ranges(policy), &mut program)?;
    (program.len() <= LONGEST).then_some(program)
}

/// The first number of each range that is treated alike, and how; in order, from 0 on.
fn ranges(policy: &Policy) -> Vec<(u32, &Decision)> {
    let mut found: Vec<(u32, &Decision)> = Vec::new();
    let mut add = |start, decision| {
        if found.last().is_none_or(|(_, last)| *last != decision) {
            found.push((start, decision));
        }
    };
    let mut next = 0;
    for (number, decision) in policy.decisions.iter() {
        if number > next {
            add(next, &policy.otherwise);
        }
        add(number, decision);
        next = number + 1;
    }
    if let Some((from, decision)) = &policy.beyond
        && *from < X32
    {
        if next < *from {
            add(next, &policy.otherwise);
        }
        add(*from, decision);
    } else if next < X32 {
        add(next, &policy.otherwise);
    }
    add(X32, &policy.x32);
    found
}

/// Appends code that finds the range of the number in the accumulator, and decides.
fn tree(ranges: &[(u32, &Decision)], code: &mut Vec<Instruction>) -> Option<()> {
    let [(_, first), rest @ ..] = ranges else { return None };
    if rest.is_empty() {
        return leaf(first, code);
    }
    let (low, high) = ranges.split_at(ranges.len() / 2);
    let (start, _) = *high.first()?;
    let jump = code.len();
    code.push(Instruction { code: AT_LEAST, jump_true: 0, jump_false: 0, k: start });
    tree(low, code)?;
    let over = code.len() - jump - 1;
    match u8::try_from(over) {
        Ok(over) => code[jump].jump_true = over,
        Err(_) => {
            code[jump].jump_false = 1;
            code.insert(jump + 1, plain(JUMP, over as u32));
        }
    }
    tree(high, code)
}

/// Code that decides about one number.
fn leaf(decision: &Decision, code: &mut Vec<Instruction>) -> Option<()> {
    for Rule { when, then } in &decision.rules {
        code.extend(rule(when, *then)?);
    }
    code.push(answer(decision.otherwise));
    Some(())
}

/// Code that answers when all conditions hold, and otherwise arrives at its own end.
fn rule(when: &[Condition], then: Action) -> Option<Vec<Instruction>> {
    let mut code = vec![answer(then)];
    for condition in when.iter().rev() {
        code = checked(condition, code)?;
    }
    Some(code)
}

/// `then`, entered only if the condition holds; otherwise its end is.
fn checked(condition: &Condition, then: Vec<Instruction>) -> Option<Vec<Instruction>> {
    let (index, long) = match condition.argument {
        Argument::Int(index) => (index, false),
        Argument::Long(index) => (index, true),
    };
    if index > 5 {
        return None;
    }
    let low = ARGUMENTS + 8 * u32::from(index);
    match &condition.test {
        Test::Equal(value) => Some(equal(low, long, u64::MAX, *value, then)),
        Test::NotEqual(value) => Some(short(then, |then| other_than(low, long, *value, then))),
        Test::Greater(value) => {
            Some(short(then, |then| ordered(low, long, *value, (MORE, true), then)))
        }
        Test::AtLeast(value) => {
            Some(short(then, |then| ordered(low, long, *value, (AT_LEAST, true), then)))
        }
        Test::Less(value) => {
            Some(short(then, |then| ordered(low, long, *value, (AT_LEAST, false), then)))
        }
        Test::AtMost(value) => {
            Some(short(then, |then| ordered(low, long, *value, (MORE, false), then)))
        }
        Test::Masked { mask, value } => Some(equal(low, long, *mask, *value, then)),
        Test::OneOf(values) => one_of(low, long, values, then),
    }
}

/// Compares the lower half and, for a long, the upper one.
fn equal(low: u32, long: bool, mask: u64, value: u64, then: Vec<Instruction>) -> Vec<Instruction> {
    // A masked number has no bits outside the mask, and an int none above 32.
    let impossible = value & !mask != 0 || (!long && value >> 32 != 0);
    if impossible {
        return vec![plain(JUMP, 0)];
    }
    let mut then = half(low, mask as u32, value as u32, then);
    if long {
        then = half(low + 4, (mask >> 32) as u32, (value >> 32) as u32, then);
    }
    then
}

fn half(place: u32, mask: u32, value: u32, then: Vec<Instruction>) -> Vec<Instruction> {
    if mask == 0 {
        return then;
    }
    let mut code = vec![plain(LOAD, place)];
    if mask != u32::MAX {
        code.push(plain(AND, mask));
    }
    unless(Instruction { code: EQUAL, jump_true: 0, jump_false: 0, k: value }, then, &mut code);
    code
}

/// Appends `compare` so that `then` is skipped where it fails.
fn unless(compare: Instruction, then: Vec<Instruction>, code: &mut Vec<Instruction>) {
    match u8::try_from(then.len()) {
        Ok(over) => code.push(Instruction { jump_false: over, ..compare }),
        Err(_) => {
            code.push(Instruction { jump_true: 1, jump_false: 0, ..compare });
            code.push(plain(JUMP, then.len() as u32));
        }
    }
    code.extend(then);
}

/// If `then` is longer than a conditional jump reaches, the comparison selects one of two jumps
/// instead.
fn short(
    then: Vec<Instruction>,
    compare: impl FnOnce(Vec<Instruction>) -> Vec<Instruction>,
) -> Vec<Instruction> {
    if then.len() < 250 {
        return compare(then);
    }
    let mut code = compare(vec![plain(JUMP, 1)]);
    code.push(plain(JUMP, then.len() as u32));
    code.extend(then);
    code
}

/// `then`, which is short, where the number is another one. An int has nothing in its upper half.
fn other_than(low: u32, long: bool, value: u64, then: Vec<Instruction>) -> Vec<Instruction> {
    let mut code = Vec::new();
    if long {
        code.push(plain(LOAD, low + 4));
        let k = (value >> 32) as u32;
        code.push(Instruction { code: EQUAL, jump_true: 0, jump_false: 2, k });
    } else if value >> 32 != 0 {
        return then;
    }
    code.push(plain(LOAD, low));
    let over = then.len() as u8;
    code.push(Instruction { code: EQUAL, jump_true: over, jump_false: 0, k: value as u32 });
    code.extend(then);
    code
}

/// Emits `then`, which is short, for numbers that pass: for which `compare` with the lower half of
/// `value` holds, or does not hold if `holds` is false.
fn ordered(
    low: u32,
    long: bool,
    value: u64,
    (compare, holds): (u16, bool),
    then: Vec<Instruction>,
) -> Vec<Instruction> {
    let (high, k, over) = ((value >> 32) as u32, value as u32, then.len() as u8);
    // A jump if the comparison holds, or if it does not.
    let jump = |code, if_true: bool, over, k| {
        let (jump_true, jump_false) = if if_true { (over, 0) } else { (0, over) };
        Instruction { code, jump_true, jump_false, k }
    };
    let mut code = Vec::new();
    if long {
        code.push(plain(LOAD, low + 4));
        // The upper half alone decides, unless both are equal.
        code.push(jump(if holds { MORE } else { AT_LEAST }, holds, 3, high));
        code.push(jump(EQUAL, false, over + 2, high));
    } else if high != 0 {
        // An int is less than `value`.
        return if holds { vec![plain(JUMP, 0)] } else { then };
    }
    code.push(plain(LOAD, low));
    code.push(jump(compare, !holds, over, k));
    code.extend(then);
    code
}

/// Compares with each value in turn.
fn one_of(
    low: u32,
    long: bool,
    values: &[u64],
    then: Vec<Instruction>,
) -> Option<Vec<Instruction>> {
    let fits = |value: &&u64| long || **value >> 32 == 0;
    let mut values: Vec<u64> = values.iter().filter(fits).copied().collect();
    values.sort_unstable();
    values.dedup();
    if !long || values.iter().all(|value| value >> 32 == 0) {
        let mut tests = vec![plain(LOAD, low)];
        for (at, value) in values.iter().enumerate() {
            // The comparisons that are left, and the jump behind them, are skipped.
            let over = u8::try_from(values.len() - at).ok()?;
            let k = *value as u32;
            tests.push(Instruction { code: EQUAL, jump_true: over, jump_false: 0, k });
        }
        tests.push(plain(JUMP, then.len() as u32));
        tests.extend(then);
        return Some(if long { half(low + 4, u32::MAX, 0, tests) } else { tests });
    }
    // Longs beyond 32 bits are rare: each in turn, with a copy of what follows.
    let mut code = Vec::new();
    for value in values {
        code.extend(equal(low, true, u64::MAX, value, then.clone()));
    }
    Some(code)
}
