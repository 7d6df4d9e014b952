//! eventfd, signalfd, epoll.

use dormouse_record::{Epoll, Event, Result, SignalFd, Table, Thing};

use super::open;
use super::plan::Plan;
use crate::inject::program::{Arg, Call, Cell, Sequence};

pub(super) fn event(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    event: &Event,
) -> Result<Cell> {
    let cell = plan.cell();
    let mut flags = event.flags & open::AT_CREATION;
    if event.semaphore {
        flags |= libc::EFD_SEMAPHORE as u32;
    }
    let first = event.count.min(u64::from(u32::MAX));
    let args = [Arg::Number(first), flags.into()];
    sequence.call_into(what, cell, Call::new(libc::SYS_eventfd2, args));
    open::set_later(sequence, what, cell, event.flags);
    if event.count > first {
        // eventfd2(2) takes an initial value of 32 bits; the rest is added by a write.
        let rest = plan.builder.numbers(&[event.count - first]);
        let args = [cell.into(), rest.into(), Arg::Number(8)];
        sequence.call(what, Call::new(libc::SYS_write, args).returns(8));
    }
    Ok(cell)
}

pub(super) fn signal(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    signal: &SignalFd,
) -> Result<Cell> {
    let cell = plan.cell();
    let mask = plan.builder.numbers(&[signal.mask]);
    let flags = signal.flags & open::AT_CREATION;
    let args = [Arg::from(-1), mask.into(), Arg::Number(8), flags.into()];
    sequence.call_into(what, cell, Call::new(libc::SYS_signalfd4, args));
    open::set_later(sequence, what, cell, signal.flags);
    Ok(cell)
}

pub(super) fn epoll(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    epoll: &Epoll,
) -> Result<Cell> {
    let cell = plan.cell();
    // Of the flags epoll_create1(2) takes this one alone.
    let flags = epoll.flags & libc::O_CLOEXEC as u32;
    sequence.call_into(what, cell, Call::new(libc::SYS_epoll_create1, [flags.into()]));
    if epoll.flags & open::SETTABLE as u32 != 0 {
        open::set_flags(sequence, what, cell, epoll.flags);
    }
    Ok(cell)
}

/// Makes the epolls of a table watch their items. An item is identified by file description and
/// number, so both must be in place. A watched signalfd reports the signals of the process that
/// adds it.
pub(super) fn watch(plan: &mut Plan<'_>, sequence: &mut Sequence, table: Table<'_>) -> Result<()> {
    let records = plan.records;
    for (index, object) in records.objects.iter().enumerate() {
        let Thing::Epoll(epoll) = &object.thing else { continue };
        let own = table.descriptors.iter().find(|d| d.object == index);
        for item in epoll.items.iter().filter(|i| i.pid == table.task) {
            let Some(own) = own else { continue };
            // struct epoll_event is packed: 4 bytes of events, 8 of data.
            let mut event = item.events.to_ne_bytes().to_vec();
            event.extend(item.data.to_ne_bytes());
            let event = plan.builder.data(&event);
            let args = [
                own.number.into(),
                Arg::from(libc::EPOLL_CTL_ADD),
                item.number.into(),
                event.into(),
            ];
            let what = format!(
                "descriptor {} of process {} (watched by {})",
                item.number, table.task, own.number
            );
            sequence.call(what, Call::new(libc::SYS_epoll_ctl, args));
        }
    }
    Ok(())
}
