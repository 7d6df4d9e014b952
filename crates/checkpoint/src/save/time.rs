//! Time namespaces: the offsets of the clocks of each from the container's own.
//!
//! A namespace's offsets are read from a process that creates its children there
//! (`/proc/PID/timens_offsets`), and if there is none, from a helper process that enters the
//! namespace.

use dormouse_record::{CLOCK_MAX_NS, Result as Outcome, Thing, Time};

use super::known::namespace::Links;
use super::refusal::Reason;
use super::seen::{Seen, link_of_first};
use super::survey::Survey;
use crate::clock::{self, Offsets};

/// The links of the time namespace of a process, and of that of its children. KERNEL(5.6): before,
/// there is none.
fn links(seen: &Seen) -> [Option<&str>; 2] {
    ["time", "time_for_children"].map(|name| seen.link(name))
}

/// The link of the namespace that a process has created for its children, if it is not in that
/// itself.
pub(super) fn for_children(seen: &Seen) -> Option<String> {
    let [own, for_children] = links(seen);
    // A process that has exited meanwhile has no link.
    for_children.filter(|link| own.is_some_and(|own| own != *link)).map(str::to_owned)
}

/// The objects of the namespace of a process, and of the one for its children.
pub(super) fn of(survey: &mut Survey<'_>, links: &Links) -> Result<[Option<usize>; 2], Reason> {
    let mut found = [None; 2];
    for (to, link) in found.iter_mut().zip([&links.time, &links.time_for_children]) {
        let Some(link) = link else { continue };
        *to = Some(match survey.times.by_link.get(link) {
            Some(Ok(object)) => *object,
            Some(Err(why)) => return Err(format!("it has a time namespace of its own {why}")),
            None => return Err(survey.passing("it has made a time namespace just now".into())),
        });
    }
    Ok(found)
}

/// Finds all namespaces.
pub(super) fn find(survey: &mut Survey<'_>, tree: &[Seen]) -> Outcome<()> {
    let first = survey.subject.init;
    survey.times.own = clock::offsets_of_process(first)?;
    let container = link_of_first(first, tree, "time");
    let alive = tree.iter().filter(|seen| !seen.is_zombie);
    let links: Vec<(u32, [Option<&str>; 2])> = alive.map(|seen| (seen.pid, links(seen))).collect();
    for (pid, link) in links.iter().flat_map(|(pid, both)| both.iter().map(move |l| (*pid, l))) {
        // The process may have exited meanwhile: nothing is stopped yet.
        let is_another = |link: &&str| Some(*link) != container.as_deref();
        let Some(link) = link.filter(is_another) else { continue };
        if survey.times.by_link.contains_key(link) {
            continue;
        }
        let makes_children = |(_, both): &&(u32, [Option<&str>; 2])| both[1] == Some(link);
        let offsets = match links.iter().find(makes_children) {
            Some((maker, _)) => clock::offsets_of(maker),
            None => clock::offsets_of_process(pid),
        };
        let found = match offsets {
            Ok(offsets) => time(survey.times.own, offsets)?.map(|it| survey.add(Thing::Time(it))),
            Err(e) => Err(format!("that cannot be inspected: {e}")),
        };
        survey.times.by_link.insert(link.to_owned(), found);
    }
    Ok(())
}

/// The record of a namespace with these offsets.
fn time(own: Offsets, offsets: Offsets) -> Outcome<Result<Time, Reason>> {
    let time = Time {
        monotonic_ns: offsets.monotonic_ns.saturating_sub(own.monotonic_ns),
        boottime_ns: offsets.boottime_ns.saturating_sub(own.boottime_ns),
    };
    let now = clock::now(offsets)?;
    let fits = |ns: i64| ns.unsigned_abs() < CLOCK_MAX_NS as u64;
    let all = [time.monotonic_ns, time.boottime_ns, now.monotonic_ns, now.boottime_ns];
    match all.into_iter().all(fits) {
        true => Ok(Ok(time)),
        false => Ok(Err("with clocks that are 73 years ahead or more, which is not saved".into())),
    }
}
