//! Credentials of threads, by ids inside.

use dormouse_kernel::proc;
use dormouse_record::{Credentials, PeerCredentials};

use super::seen::Seen;
use crate::look::ids::Maps;

/// The credentials of a thread, by the fields of its status.
pub(super) fn credentials(seen: &Seen, fields: &proc::Fields) -> Credentials {
    let maps = seen.maps();
    let ids = |field: &str, map: &[(u32, u32, u32)]| {
        let mut all = [0; 4];
        let words = fields.field(field).unwrap_or_default().split_ascii_whitespace();
        for (slot, word) in all.iter_mut().zip(words) {
            *slot = word.parse().map_or(u32::MAX, |id| Maps::inside(map, id));
        }
        all
    };
    let groups = fields.field("Groups").unwrap_or_default().split_ascii_whitespace();
    let groups = groups.filter_map(|g| g.parse().ok()).map(|g| Maps::inside(&maps.gids, g));
    let capability = |name| fields.mask(name).unwrap_or(0);
    Credentials {
        uids: ids("Uid", &maps.uids),
        gids: ids("Gid", &maps.gids),
        groups: groups.collect(),
        capabilities: ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"].map(capability),
        securebits: 0,
        no_new_privileges: fields.number("NoNewPrivs") == Some(1),
        filters: fields.number("Seccomp_filters").unwrap_or(0) as u32,
    }
}

/// The credentials that a process has for the peer of a unix socket.
pub(super) fn as_peer(seen: &Seen) -> PeerCredentials {
    const EFFECTIVE: usize = 1;
    let Credentials { uids, gids, groups, .. } = credentials(seen, &seen.fields);
    let (uid, gid) = (uids[EFFECTIVE], gids[EFFECTIVE]);
    PeerCredentials { pid: Some(seen.inner), uid, gid, groups }
}
