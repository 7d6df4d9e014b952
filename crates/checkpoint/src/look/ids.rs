//! The id maps of a user namespace (user_namespaces(7)): ids inside from ids outside, and back.

use dormouse_kernel::proc;
use dormouse_record::Ids;

/// The id maps of a user namespace: first id inside, first id outside, count.
#[derive(Debug)]
pub(crate) struct Maps {
    pub(crate) uids: Vec<(u32, u32, u32)>,
    pub(crate) gids: Vec<(u32, u32, u32)>,
}

impl Maps {
    /// Reads the maps of the user namespace that a process is in.
    pub(crate) fn read(pid: u32) -> Self {
        let read = |name: &str| {
            let text = proc::whole_text(format!("/proc/{pid}/{name}")).unwrap_or_default();
            let row = |line: &str| {
                let mut numbers = line.split_ascii_whitespace().map(|n| n.parse().ok());
                Some((numbers.next()??, numbers.next()??, numbers.next()??))
            };
            text.lines().filter_map(row).collect()
        };
        Self { uids: read("uid_map"), gids: read("gid_map") }
    }

    /// The maps of users and groups.
    pub(crate) fn ids(&self) -> (Vec<Ids>, Vec<Ids>) {
        let all = |map: &[(u32, u32, u32)]| {
            let ids = |(inside, outside, count): &(u32, u32, u32)| {
                let (inside, outside, count) = (*inside, *outside, *count);
                Ids { inside, outside, count }
            };
            map.iter().map(ids).collect()
        };
        (all(&self.uids), all(&self.gids))
    }

    /// Owner user and group of a file, by ids inside.
    pub(crate) fn owner(&self, uid: u32, gid: u32) -> (u32, u32) {
        (Self::inside(&self.uids, uid), Self::inside(&self.gids, gid))
    }

    /// The ids outside of a user and a group inside.
    pub(crate) fn outside(&self, uid: u32, gid: u32) -> Option<(u32, u32)> {
        let outside = |map: &[(u32, u32, u32)], id: u32| {
            let hit = map.iter().find(|(inside, _, count)| id >= *inside && id - inside < *count);
            hit.map(|(inside, outside, _)| outside + (id - inside))
        };
        Some((outside(&self.uids, uid)?, outside(&self.gids, gid)?))
    }

    /// The id inside of an id outside, by one of the maps; `u32::MAX` if there is none.
    pub(crate) fn inside(map: &[(u32, u32, u32)], id: u32) -> u32 {
        let hit = map.iter().find(|(_, outside, count)| id >= *outside && id - outside < *count);
        hit.map_or(u32::MAX, |(inside, outside, _)| inside + (id - outside))
    }
}
