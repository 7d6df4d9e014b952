//! eventfd, signalfd, epoll: fdinfo contains the whole state.

use dormouse_kernel::call;
use dormouse_record::{Epoll, EpollItem, Event, SignalFd, Thing};

use super::open::Open;
use super::refusal::Reason;
use super::survey::Survey;
use crate::look::descriptor::epoll_item;

fn is(open: &Open<'_>, name: &str) -> bool {
    open.link.strip_prefix("anon_inode:").is_some_and(|n| n.trim_matches(['[', ']']) == name)
}

pub(crate) fn is_event(open: &Open<'_>) -> bool {
    is(open, "eventfd")
}

pub(crate) fn is_signal(open: &Open<'_>) -> bool {
    is(open, "signalfd")
}

pub(crate) fn is_epoll(open: &Open<'_>) -> bool {
    is(open, "eventpoll")
}

fn missing(name: &str) -> Reason {
    format!("an {name} with an incomplete fdinfo")
}

pub(crate) fn event(_: &mut Survey<'_>, open: &Open<'_>) -> Result<Thing, Reason> {
    let count = open.field("eventfd-count");
    let count = count.and_then(|c| u64::from_str_radix(c, 16).ok());
    let count = count.ok_or_else(|| missing("eventfd"))?;
    // KERNEL(6.5): eventfd-semaphore; before, fdinfo does not contain it.
    let semaphore = open.field("eventfd-semaphore").ok_or_else(|| missing("eventfd"))? != "0";
    Ok(Thing::Event(Event { count, semaphore, flags: open.flags() }))
}

pub(crate) fn signal(_: &mut Survey<'_>, open: &Open<'_>) -> Result<Thing, Reason> {
    let mask = open.field("sigmask").and_then(|m| u64::from_str_radix(m, 16).ok());
    let mask = mask.ok_or_else(|| missing("signalfd"))?;
    Ok(Thing::Signal(SignalFd { mask, flags: open.flags() }))
}

pub(crate) fn epoll(_: &mut Survey<'_>, open: &Open<'_>) -> Result<Thing, Reason> {
    let mut items: Vec<EpollItem> = Vec::new();
    for line in open.info.lines().filter(|line| line.starts_with("tfd:")) {
        let mut item = epoll_item(line).ok_or_else(|| missing("epoll"))?;
        item.pid = open.task.1;
        let nth = items.iter().filter(|i| i.number == item.number).count() as u32;
        let pid = open.task.0;
        let same = call::is_epoll_target((pid, item.number), (pid, open.number), item.number, nth);
        if !same.unwrap_or(false) {
            let number = item.number;
            return Err(format!(
                "an epoll with an entry for descriptor {number}, which is another file now"
            ));
        }
        items.push(item);
    }
    Ok(Thing::Epoll(Epoll { items, flags: open.flags() }))
}
