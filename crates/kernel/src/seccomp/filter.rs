//! A compiled filter, and its load into the kernel.

use crate::call::{self, Instruction};
use crate::error::{Explain, Result};

/// A compiled filter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter(pub(super) Vec<Instruction>);

impl Filter {
    /// The program.
    pub fn instructions(&self) -> &[Instruction] {
        &self.0
    }

    /// The program as an array of the kernel's `struct sock_filter`, eight bytes each, for
    /// [`call::load_filter_bytes`].
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.0.len() * 8);
        for instruction in &self.0 {
            let [a, b] = instruction.code.to_ne_bytes();
            let [c, d, e, f] = instruction.k.to_ne_bytes();
            let (jump_true, jump_false) = (instruction.jump_true, instruction.jump_false);
            bytes.extend_from_slice(&[a, b, jump_true, jump_false, c, d, e, f]);
        }
        bytes
    }

    /// Loads it for the calling thread and what it becomes or makes from now on.
    pub fn load(&self) -> Result<()> {
        call::load_filter(&self.0).explain("seccomp", || format!("{} instructions", self.0.len()))
    }
}
