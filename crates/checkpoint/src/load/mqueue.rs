//! POSIX message queues: created by the first process with their messages, and opened once for each
//! file description. Removed queues have a name meanwhile.

use dormouse_record::{MessageQueue, Result, Thing};

use super::open;
use super::plan::Plan;
use crate::inject::program::{Arg, Call, Sequence};

pub(super) fn make(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    index: usize,
    queue: &MessageQueue,
) -> Result<()> {
    let name = queue.name.clone().unwrap_or_else(|| format!(".dormouse-{index}"));
    let what = format!("{what} '/{name}'");
    let name = Arg::from(plan.builder.text(name.as_bytes()));
    // struct mq_attr: flags, the most messages, the most bytes of one; the rest is not read.
    let most = [0, queue.messages_max, queue.message_bytes, 0, 0, 0, 0, 0];
    let most = plan.builder.numbers(&most);
    let made = plan.cell();
    let how = libc::O_CREAT | libc::O_EXCL | libc::O_RDWR | libc::O_NONBLOCK | libc::O_CLOEXEC;
    let args = [name, Arg::from(how), Arg::from(queue.mode), most.into()];
    sequence.call_into(what.clone(), made, Call::new(libc::SYS_mq_open, args));
    for message in &queue.messages {
        let data = plan.builder.data(&message.data.0);
        let length = Arg::Number(message.data.0.len() as u64);
        let args = [made.into(), data.into(), length, message.priority.into()];
        sequence.call(what.clone(), Call::new(libc::SYS_mq_timedsend, args));
    }
    if let Some(bytes) = queue.file_bytes {
        let args = [made.into(), Arg::Number(bytes)];
        sequence.call(what.clone(), Call::new(libc::SYS_ftruncate, args));
    }
    let records = plan.records;
    for (n, other) in records.objects.iter().enumerate() {
        let Thing::OpenQueue(it) = &other.thing else { continue };
        if it.queue != index {
            continue;
        }
        let cell = plan.cell();
        let taken = (libc::O_ACCMODE | open::AT_CREATION as i32) as u32;
        let args = [name, Arg::from(it.flags & taken)];
        sequence.call_into(what.clone(), cell, Call::new(libc::SYS_mq_open, args));
        // mq_open(2) takes no other flag of a file.
        open::set_later(sequence, &what, cell, it.flags);
        if it.offset != 0 {
            let args = [cell.into(), Arg::Number(it.offset), Arg::from(libc::SEEK_SET)];
            let seek = Call::new(libc::SYS_lseek, args).returns(it.offset);
            sequence.call(what.clone(), seek);
        }
        plan.cells[n] = Some(plan.lift(sequence, &what, cell));
    }
    // ORDER: last, since the mode for the owner may exclude others.
    let owner = [made.into(), queue.uid.into(), queue.gid.into()];
    sequence.call(what.clone(), Call::new(libc::SYS_fchown, owner));
    let mode = [made.into(), queue.mode.into()];
    sequence.call(what.clone(), Call::new(libc::SYS_fchmod, mode));
    if queue.name.is_none() {
        sequence.call(what.clone(), Call::new(libc::SYS_mq_unlink, [name]));
    }
    Ok(())
}
