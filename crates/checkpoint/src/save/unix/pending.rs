//! Pending connections of unix listeners: sockets that no process has open.
//!
//! No call reads the data in their receive queues. A BPF program does ([`dormouse_bpf::embryo`]), if it can
//! be loaded. For in-flight descriptors it returns the addresses of the file descriptions, and the processes
//! that have those open.
//!
//! LIMIT: if the program may not be loaded, or a file is open nowhere else, the save waits a moment for the
//! connection to be accepted.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::{Mutex, OnceLock, PoisonError};

use dormouse_bpf::embryo::{self, Embryo, Embryos};
use dormouse_record::{Bytes, PeerCredentials, Thing, UnixLeft, UnixMessage};

use super::queue::Translator;
use crate::save::known::socket::{Socket, UnixSockets};
use crate::save::refusal::Reason;
use crate::save::seen::Seen;
use crate::save::survey::Survey;

/// The reason why a socket cannot be saved.
pub(super) enum Refused {
    For(Reason),
    /// The refusal is likely to pass in a moment.
    Passing(Reason),
}

impl From<Reason> for Refused {
    fn from(why: Reason) -> Self {
        Self::For(why)
    }
}

/// Reads the data that a socket has sent on a connection which is pending at a place of a
/// listener's queue.
pub(super) fn written(
    survey: &Survey<'_>,
    socket: &Socket,
    listener: &Socket,
    place: u32,
    tree: &[Seen],
) -> Result<Vec<UnixMessage>, Refused> {
    let own = rustix::fs::fstat(&socket.copy).map_err(|e| not_now(&format!(": {e}")))?.st_ino;
    let (found, sent) = look_into(survey, listener, place, tree)?;
    match found.client == own {
        true => Ok(sent),
        false => Err(accepted_now()),
    }
}

/// The pending connections of a listener whose clients have closed them. No pending connection
/// comes from outside.
pub(super) fn left(
    survey: &Survey<'_>,
    listener: &Socket,
    waiting: &[u32],
    known: &UnixSockets,
    tree: &[Seen],
) -> Result<Vec<UnixLeft>, Refused> {
    check_pending(waiting, known)?;
    let mut all = Vec::new();
    for (place, _) in waiting.iter().enumerate().filter(|(_, inode)| **inode == 0) {
        let place = place as u32;
        let (found, sent) = look_into(survey, listener, place, tree)?;
        if found.client != 0 {
            return Err(accepted_now());
        }
        if found.named {
            return Err(not_now(" of a named client that has closed it, which is not saved"));
        }
        let seen = tree.iter().find(|seen| seen.pid == listener.pid);
        let by = seen.and_then(|seen| Translator { tree, maps: seen.maps() }.of(found.by));
        let by = match (by, found.groups) {
            (Some(credentials), Some(groups)) => {
                let maps = seen.map(Seen::maps);
                let inside = |gid| maps.map_or(u32::MAX, |maps| maps.owner(0, gid).1);
                let groups = groups.into_iter().map(inside).filter(|gid| *gid != u32::MAX);
                Some(PeerCredentials { groups: groups.collect(), ..credentials })
            }
            _ => {
                return Err(not_now(
                    " of an unknown client that has closed it, which is not saved",
                ));
            }
        };
        all.push(UnixLeft { place, by, sent });
    }
    Ok(all)
}

/// The refusal passes when the connection is accepted.
fn not_now(what: &str) -> Refused {
    Refused::Passing(format!("a unix socket with a pending connection{what}"))
}

fn accepted_now() -> Refused {
    not_now(", accepted just now")
}

/// The pending connection at a place of a listener's queue, and the data sent on it.
fn look_into(
    survey: &Survey<'_>,
    listener: &Socket,
    place: u32,
    tree: &[Seen],
) -> Result<(Embryo, Vec<UnixMessage>), Refused> {
    /// Loaded on first use. The program reads one connection at a time.
    static EMBRYOS: OnceLock<Result<Mutex<Embryos>, Reason>> = OnceLock::new();
    let loaded = EMBRYOS.get_or_init(|| Embryos::load().map(Mutex::new).map_err(|e| e.to_string()));
    let mut embryos = match loaded {
        Ok(embryos) => embryos.lock().unwrap_or_else(PoisonError::into_inner),
        Err(why) => {
            let what = format!(" with data, which only BPF can read ({why})");
            return Err(not_now(&what));
        }
    };
    let failed = |e: dormouse_kernel::CallError| not_now(&format!(": {e}"));
    let seen = tree.iter().find(|seen| seen.pid == listener.pid).ok_or_else(accepted_now)?;
    let found = embryos.read(listener.copy.as_fd(), place).map_err(failed)?;
    let mut found = found.ok_or_else(accepted_now)?;
    if found.urgent {
        return Err(not_now(" with a byte out of band (MSG_OOB), which is not saved"));
    }
    let messages = found.messages.take();
    let messages = messages.ok_or_else(|| not_now(" with more data than is saved"))?;
    let mut files: Vec<u64> = messages.iter().flat_map(|m| &m.files).copied().collect();
    files.sort_unstable();
    files.dedup();
    if files.len() > embryo::FILES_MAX {
        return Err(not_now(" with more in-flight descriptors than are saved"));
    }
    let mut objects = HashMap::new();
    if !files.is_empty() {
        // Files that are in flight elsewhere are open in this program.
        let holders = tree.iter().filter(|seen| !seen.is_zombie).map(|seen| seen.pid);
        for pid in holders.chain([std::process::id()]) {
            let holds = embryos.holders(pid, &files).map_err(failed)?;
            let known = holds.into_iter().map(|(file, at)| (file, survey.open_at(pid, at)));
            objects.extend(known.filter_map(|(file, object)| Some((file, object?))));
        }
    }
    let Thing::UnixSocket(record) = &survey.found.objects[listener.object].thing else {
        return Err(accepted_now());
    };
    let is_stream = record.socket_type == libc::SOCK_STREAM;
    let translator = Translator { tree, maps: seen.maps() };
    let mut all: Vec<UnixMessage> = Vec::new();
    for message in messages {
        if message.data.is_empty() {
            return Err(not_now(" with an empty packet, which is not saved"));
        }
        let object = |file| objects.get(file).copied();
        let descriptors: Option<Vec<usize>> = message.files.iter().map(object).collect();
        let Some(descriptors) = descriptors else {
            let what = " with an in-flight descriptor that no process has open, which is not saved";
            return Err(not_now(what));
        };
        let can_be_sent = |n: &usize| survey.found.objects[*n].thing.may_be_on_its_way();
        if !descriptors.iter().all(can_be_sent) {
            return Err(not_now(" with an in-flight descriptor of a kind that is not saved"));
        }
        let credentials = message.sender.and_then(|sender| translator.of(sender));
        let goes_on = |last: &&mut UnixMessage| {
            let alone = descriptors.is_empty() && last.descriptors.is_empty();
            is_stream && alone && last.credentials == credentials
        };
        match all.last_mut().filter(goes_on) {
            Some(last) => last.data.0.extend(message.data),
            None => {
                let (data, from) = (Bytes(message.data), Bytes::default());
                all.push(UnixMessage { data, from, descriptors, credentials });
            }
        }
    }
    Ok((found, all))
}

/// Checks that no pending connection of a listener comes from outside.
fn check_pending(waiting: &[u32], known: &UnixSockets) -> Result<(), Refused> {
    if waiting.iter().all(|inode| *inode == 0 || known.contains_key(&u64::from(*inode))) {
        return Ok(());
    }
    let why = "a unix socket with a pending connection from outside the container";
    Err(Refused::Passing(why.into()))
}
