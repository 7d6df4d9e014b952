//! Descriptors: each object takes its recorded numbers, and no other descriptor stays open.

use std::collections::HashMap;

use dormouse_record::{Result, Table};

use super::plan::Plan;
use super::{pidfd, user};
use crate::inject::program::{Arg, Call, Sequence};

/// Gives a task its descriptors, and all that share its table. `user` is the user namespace that its process will
/// enter.
pub(super) fn place(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    table: Table<'_>,
    user: Option<usize>,
) -> Result<()> {
    let mut numbers = Vec::new();
    // By object: duplicates within the process stay one open file.
    let mut own = HashMap::new();
    if let Some(user) = user {
        user::keep(plan, sequence, table.task, user)?;
        numbers.push(plan.kept());
    }
    for descriptor in table.descriptors {
        let what = format!("descriptor {} of process {}", descriptor.number, table.task);
        let thing = &plan.records.objects[descriptor.object].thing;
        let cell = match own.get(&descriptor.object) {
            Some(cell) => *cell,
            None => match pidfd::make(plan, sequence, &what, thing)? {
                Some(cell) => *own.entry(descriptor.object).or_insert(cell),
                None => plan.object(descriptor.object)?,
            },
        };
        if plan.seats.get(&descriptor.object) == Some(&descriptor.number) {
            let flags = if descriptor.close_on_exec { libc::FD_CLOEXEC } else { 0 };
            let args = [descriptor.number.into(), Arg::from(libc::F_SETFD), Arg::from(flags)];
            sequence.call(what, Call::new(libc::SYS_fcntl, args));
            numbers.push(descriptor.number);
            continue;
        }
        let flags = if descriptor.close_on_exec { libc::O_CLOEXEC } else { 0 };
        let args = [cell.into(), descriptor.number.into(), Arg::from(flags)];
        sequence.call(what, Call::new(libc::SYS_dup3, args));
        numbers.push(descriptor.number);
    }
    Plan::close_others(sequence, numbers, u32::MAX);
    Ok(())
}
