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
mod filter;
mod house;
mod policy;
#[cfg(test)]
mod tests;

pub use filter::Filter;
pub use house::{
    Network, default_filter, default_filter_for, default_filter_without_aio, default_policy,
};
pub use policy::{Action, Argument, Condition, Decision, Policy, Rule, Test};
