//! Watches: added at the end, when the restore touches no file any more, with their recorded
//! numbers.

use dormouse_record::{Inotify, Result, Table, Thing};

use super::open;
use super::plan::Plan;

use crate::inject::program::{Arg, Call, Cell, Sequence};

/// `_IOW('I', 0, __s32)`: the number of the next watch. KERNEL(4.16), with CHECKPOINT_RESTORE.
const SET_NEXT: u64 = 0x4004_4900;

pub(super) fn make(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    inotify: &Inotify,
) -> Result<Cell> {
    let cell = plan.cell();
    let flags = inotify.flags & open::AT_CREATION;
    sequence.call_into(what, cell, Call::new(libc::SYS_inotify_init1, [flags.into()]));
    open::set_later(sequence, what, cell, inotify.flags);
    Ok(cell)
}

/// The watches of the instances that this table is the first to have.
pub(super) fn watch(plan: &mut Plan<'_>, sequence: &mut Sequence, table: Table<'_>) {
    let records = plan.records;
    for (index, object) in records.objects.iter().enumerate() {
        let Thing::Inotify(inotify) = &object.thing else { continue };
        // A held instance has its watches, and reports the events since.
        if plan.held.contains_key(&index) {
            continue;
        }
        let mut all = records.tables().flat_map(|it| {
            it.descriptors.iter().filter(|d| d.object == index).map(move |d| (it.task, d.number))
        });
        let Some((_, number)) = all.next().filter(|(id, _)| *id == table.task) else { continue };
        for watch in &inotify.watches {
            let what = format!("the watch of '{}' by descriptor {number}", watch.path);
            let next = [number.into(), Arg::Number(SET_NEXT), watch.number.into()];
            sequence.call(what.clone(), Call::new(libc::SYS_ioctl, next));
            open::check_path(plan, sequence, &what, &watch.path);
            let path = plan.builder.text(watch.path.as_bytes());
            let args = [number.into(), path.into(), watch.mask.into()];
            let call = Call::new(libc::SYS_inotify_add_watch, args);
            sequence.call(what, call.returns(watch.number.into()));
        }
    }
}
