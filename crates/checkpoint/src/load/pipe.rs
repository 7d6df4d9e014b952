//! Pipes: both ends are made, what was in it is written, and each end that was open gets its own
//! open file.

use super::{Plan, file, object};
use crate::error::Result;
use crate::format::{Pipe, Thing};
use crate::inject::program::{Arg, Call, Sequence};

pub(super) fn make(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    index: usize,
    pipe: &Pipe,
) -> Result<()> {
    // pipe2 writes two numbers next to each other: the cells follow one another.
    let (reader, writer) = (plan.cell()?, plan.cell()?);
    let pair = plan.builder.pointer(reader);
    let flags = Arg::from(libc::O_CLOEXEC | libc::O_NONBLOCK);
    sequence.call(what, Call::new(libc::SYS_pipe2, [pair, flags]));
    let size = [writer.into(), Arg::from(libc::F_SETPIPE_SZ), pipe.capacity_bytes.into()];
    sequence.call(what, Call::new(libc::SYS_fcntl, size));
    if !pipe.content.0.is_empty() {
        let bytes = pipe.content.0.len() as u64;
        let at = plan.builder.data(&pipe.content.0);
        let args = [writer.into(), at.into(), bytes.into()];
        sequence.call(what, Call::new(libc::SYS_write, args).returns(bytes));
    }
    let records = plan.records;
    let mut taken = [false; 2];
    for (n, object) in records.objects.iter().enumerate() {
        let Thing::PipeEnd(end) = &object.thing else { continue };
        if end.pipe != index {
            continue;
        }
        let mine = if end.writes { writer } else { reader };
        let taken = &mut taken[usize::from(end.writes)];
        let cell = if std::mem::replace(taken, true) {
            // Opened once more, as programs do through /proc/self/fd: an open file of its own. The
            // number is in the name, so only the process itself could give it.
            return Err(crate::error::Error::Elsewhere(
                "an end of a pipe was opened twice, which is not restored yet".into(),
            ));
        } else {
            object::lift(plan, sequence, what, mine)?
        };
        file::set_flags(sequence, what, cell, end.flags);
        plan.cells[n] = Some(cell);
    }
    Ok(())
}
