//! Watches by fanotify(7): added at the end, when the restore touches no file any more.

use dormouse_record::{Fanotify, Result, Table, Thing};

use super::open;
use super::plan::Plan;

use crate::inject::program::{Arg, Call, Cell, Sequence};

pub(super) fn make(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    fanotify: &Fanotify,
) -> Result<Cell> {
    let cell = plan.cell();
    let args = [fanotify.flags.into(), fanotify.event_flags.into()];
    sequence.call_into(what, cell, Call::new(libc::SYS_fanotify_init, args));
    Ok(cell)
}

/// The marks of the groups that this table is the first to have.
pub(super) fn watch(plan: &mut Plan<'_>, sequence: &mut Sequence, table: Table<'_>) {
    let records = plan.records;
    for (index, object) in records.objects.iter().enumerate() {
        let Thing::Fanotify(fanotify) = &object.thing else { continue };
        let mut all = records.tables().flat_map(|it| {
            it.descriptors.iter().filter(|d| d.object == index).map(move |d| (it.task, d.number))
        });
        let Some((_, number)) = all.next().filter(|(id, _)| *id == table.task) else { continue };
        for mark in &fanotify.marks {
            let what = format!("the mark of '{}' by descriptor {number}", mark.path);
            open::check_path(plan, sequence, &what, &mark.path);
            let path = plan.builder.text(mark.path.as_bytes());
            let add = |flags: u32, mask: u64| {
                let flags = libc::FAN_MARK_ADD | flags;
                let at = Arg::from(libc::AT_FDCWD);
                let args = [number.into(), flags.into(), mask.into(), at, path.into()];
                Call::new(libc::SYS_fanotify_mark, args)
            };
            let evictable = mark.flags & libc::FAN_MARK_EVICTABLE;
            if mark.mask != 0 {
                sequence.call(what.clone(), add(evictable, mark.mask));
            }
            if mark.ignored != 0 {
                let way = match mark.flags & libc::FAN_MARK_IGNORE {
                    0 => libc::FAN_MARK_IGNORED_MASK,
                    ignore => ignore,
                };
                let survives = mark.flags & libc::FAN_MARK_IGNORED_SURV_MODIFY;
                sequence.call(what, add(evictable | way | survives, mark.ignored));
            }
        }
    }
}
