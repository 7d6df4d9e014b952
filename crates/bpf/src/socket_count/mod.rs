//! Sockets of containers, counted and limited; see `socket_count.bpf.c`.
//!
//! The group is attached to the parent cgroup of all containers by the first container with a limit, and stays there.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};

use libbpf_rs::libbpf_sys as sys;

use crate::call::{self, Map, Program};
use crate::error::BpfError;
use crate::group::{Attached, Description, is_named};
use crate::record::{Record, record};

/// The programs and their hooks.
pub static GROUP: Description = Description {
    name: "socket_count",
    object: include_bytes!(concat!(env!("OUT_DIR"), "/socket_count.o")),
    programs: &[
        (CREATE, sys::BPF_CGROUP_INET_SOCK_CREATE),
        ("dm_count_release", sys::BPF_CGROUP_INET_SOCK_RELEASE),
        ("dm_count_ops", sys::BPF_CGROUP_SOCK_OPS),
        ("dm_count_arrive", sys::BPF_CGROUP_INET_INGRESS),
    ],
    anchor: CREATE,
    maps: &[
        OWNERS,
        LIMITS,
        USES,
        PAYERS,
        BOUNDS,
        SUMS,
        PEAKS,
        "dm_count_marks",
        "dm_count_paid",
        "dm_count_about",
    ],
    about: "dm_count_about",
};

const CREATE: &str = "dm_count_create";
const OWNERS: &str = "dm_count_owners";
const LIMITS: &str = "dm_count_limits";
const USES: &str = "dm_count_uses";
const PAYERS: &str = "dm_count_payers";
const BOUNDS: &str = "dm_count_bounds";
const SUMS: &str = "dm_count_sums";
const PEAKS: &str = "dm_count_peaks";

/// LIMIT: containers with a limit of sockets: one per slot of host ids.
pub const OWNERS_MAX: u32 = 1 << 17;
/// LIMIT: accounts that have or had a limit of sockets.
pub const ACCOUNTS_MAX: u32 = 1 << 16;
/// LIMIT: accounts that count one socket.
pub const DEPTH: usize = 8;

record! {
    /// The constants of the programs.
    struct Config = "dm_socket_config" {
        level: u32,
    }
}

record! {
    struct Owner = "dm_socket_owner" {
        slot: u32,
    }
}

record! {
    struct Limit = "dm_socket_limit" {
        serial: u64,
        most: u32,
        is_exempt: u32,
    }
}

record! {
    struct Payers = "dm_socket_payers" {
        accounts: [u32; DEPTH],
    }
}

record! {
    struct Bound = "dm_socket_bound" {
        most: u32,
        reserved: u32,
    }
}

record! {
    struct Uses = "dm_socket_use" {
        sockets: u64,
    }
}

fn constants(level: u32) -> Vec<u8> {
    Config { level }.to_bytes()
}

/// Tests whether this kernel loads the programs (Linux 5.18).
pub fn supported() -> Result<(), BpfError> {
    GROUP.supported(&constants(2))
}

/// The counts of the containers below one parent cgroup.
#[derive(Debug)]
pub struct Counts(Attached);

/// Attaches the programs, or updates them. Containers' cgroups are `level` below the v2 root. Callers hold a lock.
pub fn attach(cgroup: BorrowedFd<'_>, level: u32) -> Result<Counts, BpfError> {
    let attached = GROUP.attach(cgroup, &constants(level), &[])?;
    move_last(cgroup)?;
    Ok(Counts(attached))
}

/// The counts at this cgroup, if the programs are there.
pub fn find(cgroup: BorrowedFd<'_>) -> Result<Option<Counts>, BpfError> {
    Ok(GROUP.find(cgroup)?.map(Counts))
}

/// Takes the programs away.
pub fn detach(cgroup: BorrowedFd<'_>) -> Result<(), BpfError> {
    GROUP.detach(cgroup)
}

/// Makes the program that counts new sockets the last one at its hook, if it is there: a socket that another program
/// refuses is not counted. Callers hold a lock. Sockets that are made meanwhile are not counted.
pub fn move_last(cgroup: BorrowedFd<'_>) -> Result<(), BpfError> {
    let hook = sys::BPF_CGROUP_INET_SOCK_CREATE;
    let ids = call::attached_to_cgroup(cgroup, hook)?;
    for (at, id) in ids.iter().enumerate() {
        let program = Program::by_id(*id)?;
        if !is_named(&program.name, CREATE) {
            continue;
        }
        if at + 1 < ids.len() {
            let failed = |source| BpfError::Attach { program: CREATE, source };
            call::detach_from_cgroup(cgroup, program.as_fd(), hook).map_err(failed)?;
            call::attach_to_cgroup(cgroup, program.as_fd(), hook, None).map_err(failed)?;
        }
        break;
    }
    Ok(())
}

/// The sockets of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Count {
    /// How many there are.
    pub sockets: u64,
    /// The most; `None` if there is no limit.
    pub most: Option<u32>,
}

/// What holds for a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// The most sockets; `None` if there is no limit.
    pub most: Option<u32>,
    /// Whether the limits of its accounts do not hold. Its sockets are counted there all the same.
    pub is_exempt: bool,
}

impl Terms {
    /// Any number of sockets.
    pub const ANY: Self = Self { most: None, is_exempt: true };
}

/// The value of a limit that is none.
const NO_LIMIT: u32 = u32::MAX;

fn limit(serial: u64, terms: Terms) -> Limit {
    let most = terms.most.unwrap_or(NO_LIMIT);
    Limit { serial, most, is_exempt: u32::from(terms.is_exempt) }
}

fn bound(most: Option<u32>) -> Bound {
    Bound { most: most.unwrap_or(NO_LIMIT), reserved: 0 }
}

impl Counts {
    fn map(&self, name: &'static str) -> Result<&Map, BpfError> {
        self.0.map(name).ok_or_else(|| BpfError::Missing { object: GROUP.name, name: name.into() })
    }

    /// Returns whether every program is attached to the cgroup in its place, and of this build.
    pub fn is_current(&self, cgroup: BorrowedFd<'_>, level: u32) -> Result<bool, BpfError> {
        let ids = call::attached_to_cgroup(cgroup, sys::BPF_CGROUP_INET_SOCK_CREATE)?;
        let is_last = ids.last().copied() == self.0.trace(USES).map(|trace| trace.anchor);
        Ok(is_last && GROUP.is_current(&self.0, &constants(level))?)
    }

    /// Begins a life of the container with these host ids: it has no sockets. `serial` was given to no other life.
    /// E2BIG if a map is full.
    ///
    /// ORDER: the limit last. A socket of an earlier life finds another serial number, and counts nothing back.
    pub fn begin(&self, slot: u32, serial: u64, terms: Terms) -> Result<(), BpfError> {
        self.map(LIMITS)?.remove(&slot.to_ne_bytes())?;
        self.map(USES)?.set(&slot.to_ne_bytes(), &Uses { sockets: 0 }.to_bytes())?;
        self.begin_peak(slot)?;
        self.write(slot, serial, terms)
    }

    /// The same for a container that runs already, unless it is counted.
    pub fn begin_new(&self, slot: u32, serial: u64, terms: Terms) -> Result<(), BpfError> {
        for name in [USES, PEAKS] {
            self.map(name)?.set_new(&slot.to_ne_bytes(), &Uses { sockets: 0 }.to_bytes())?;
        }
        self.map(LIMITS)?.set_new(&slot.to_ne_bytes(), &limit(serial, terms).to_bytes())?;
        Ok(())
    }

    /// Begins a life in which the container goes on with the sockets that it has. E2BIG if the map is full.
    pub fn begin_peak(&self, slot: u32) -> Result<(), BpfError> {
        Ok(self.map(PEAKS)?.set(&slot.to_ne_bytes(), &Uses { sockets: 0 }.to_bytes())?)
    }

    fn write(&self, slot: u32, serial: u64, terms: Terms) -> Result<(), BpfError> {
        Ok(self.map(LIMITS)?.set(&slot.to_ne_bytes(), &limit(serial, terms).to_bytes())?)
    }

    /// Changes what holds for a container, in force at once. `false` if it is not counted.
    pub fn set(&self, slot: u32, terms: Terms) -> Result<bool, BpfError> {
        match self.limit(slot)? {
            Some(limit) => self.write(slot, limit.serial, terms).map(|()| true),
            None => Ok(false),
        }
    }

    /// Has these accounts count the sockets that a container makes from now on, in the place of others. Each has a
    /// limit ([`bound`](Self::bound)).
    pub fn pay(&self, slot: u32, accounts: &[u32]) -> Result<(), BpfError> {
        let mut payers = Payers { accounts: [0; DEPTH] };
        payers.accounts.iter_mut().zip(accounts).for_each(|(to, account)| *to = *account);
        match accounts {
            [] => self.map(PAYERS)?.remove(&slot.to_ne_bytes()).map(drop)?,
            _ => self.map(PAYERS)?.set(&slot.to_ne_bytes(), &payers.to_bytes())?,
        }
        Ok(())
    }

    /// Changes the limit of an account, in force at once; `None` is none. E2BIG if the map is full.
    ///
    /// ORDER: the sum first: without it nothing is counted.
    pub fn bound(&self, account: u32, most: Option<u32>) -> Result<(), BpfError> {
        self.map(SUMS)?.set_new(&account.to_ne_bytes(), &Uses { sockets: 0 }.to_bytes())?;
        Ok(self.map(BOUNDS)?.set(&account.to_ne_bytes(), &bound(most).to_bytes())?)
    }

    /// The same for an account that has no limit here yet.
    pub fn bound_new(&self, account: u32, most: Option<u32>) -> Result<(), BpfError> {
        self.map(SUMS)?.set_new(&account.to_ne_bytes(), &Uses { sockets: 0 }.to_bytes())?;
        self.map(BOUNDS)?.set_new(&account.to_ne_bytes(), &bound(most).to_bytes())?;
        Ok(())
    }

    /// The accounts that have or had a limit, each with its sockets and those of the accounts below it.
    pub fn accounts(&self) -> Result<BTreeMap<u32, Count>, BpfError> {
        let mut all = BTreeMap::new();
        for (key, value) in self.map(BOUNDS)?.entries()? {
            let sum = self.map(SUMS)?.get(&key)?;
            let sockets = sum.map_or(0, |sum| Uses::from_bytes(&sum).sockets);
            let most = Some(Bound::from_bytes(&value).most).filter(|most| *most != NO_LIMIT);
            let account = key.first_chunk().map_or(0, |number| u32::from_ne_bytes(*number));
            all.insert(account, Count { sockets, most });
        }
        Ok(all)
    }

    fn limit(&self, slot: u32) -> Result<Option<Limit>, BpfError> {
        let value = self.map(LIMITS)?.get(&slot.to_ne_bytes())?;
        Ok(value.map(|value| Limit::from_bytes(&value)))
    }

    /// Counts the sockets that processes below this cgroup make from now on. E2BIG if the map is full.
    pub fn enter(&self, cgroup_id: u64, slot: u32) -> Result<(), BpfError> {
        Ok(self.map(OWNERS)?.set(&cgroup_id.to_ne_bytes(), &Owner { slot }.to_bytes())?)
    }

    /// Forgets a cgroup that was removed. Sockets from there stay counted until they are closed.
    pub fn leave(&self, cgroup_id: u64) -> Result<bool, BpfError> {
        Ok(self.map(OWNERS)?.remove(&cgroup_id.to_ne_bytes())?)
    }

    /// Ends a life of the container with these host ids.
    ///
    /// ORDER: the limit first, without which no socket is counted.
    pub fn end(&self, slot: u32) -> Result<(), BpfError> {
        self.map(LIMITS)?.remove(&slot.to_ne_bytes())?;
        self.map(USES)?.remove(&slot.to_ne_bytes())?;
        self.map(PAYERS)?.remove(&slot.to_ne_bytes())?;
        self.map(PEAKS)?.remove(&slot.to_ne_bytes())?;
        Ok(())
    }

    /// The most sockets at once in this life of the container with these host ids; `None` if they are not counted.
    pub fn peak(&self, slot: u32) -> Result<Option<u64>, BpfError> {
        let Some(count) = self.of(slot)? else { return Ok(None) };
        // Programs of an earlier build have no such map.
        let peak = match self.0.map(PEAKS) {
            Some(peaks) => peaks.get(&slot.to_ne_bytes())?,
            None => None,
        };
        Ok(Some(peak.map_or(0, |peak| Uses::from_bytes(&peak).sockets).max(count.sockets)))
    }

    /// The sockets of the container with these host ids; `None` if they are not counted.
    pub fn of(&self, slot: u32) -> Result<Option<Count>, BpfError> {
        let Some(limit) = self.limit(slot)? else { return Ok(None) };
        let value = self.map(USES)?.get(&slot.to_ne_bytes())?;
        let sockets = value.map_or(0, |value| Uses::from_bytes(&value).sockets);
        let most = Some(limit.most).filter(|most| *most != NO_LIMIT);
        Ok(Some(Count { sockets, most }))
    }
}

#[cfg(test)]
mod tests {
    use crate::group::tests::assert_full;
    use crate::record::tests::assert_same;

    use super::*;

    record! {
        struct About = "dm_socket_about" {
            version: u64,
        }
    }

    record! {
        struct Mark = "dm_socket_mark" {
            serial: u64,
            cookie: u64,
            slot: u32,
            is_counted: u32,
            flags: u64,
        }
    }

    #[test]
    fn records_have_the_layout_of_the_header() {
        assert_same::<Config>(GROUP.object);
        assert_same::<Owner>(GROUP.object);
        assert_same::<Limit>(GROUP.object);
        assert_same::<Uses>(GROUP.object);
        assert_same::<Payers>(GROUP.object);
        assert_same::<Bound>(GROUP.object);
        assert_same::<Mark>(GROUP.object);
        assert_same::<About>(GROUP.object);
    }

    #[test]
    fn root_kernel_takes_the_programs() {
        supported().unwrap();
    }

    #[test]
    fn root_full_maps_refuse_one_more_entry_and_take_it_after_a_removal() {
        let maps = GROUP.load_alone_with(&constants(2)).unwrap().0;
        for (name, most) in [
            (OWNERS, OWNERS_MAX),
            (LIMITS, OWNERS_MAX),
            (USES, OWNERS_MAX),
            (PAYERS, OWNERS_MAX),
            (BOUNDS, ACCOUNTS_MAX),
            (SUMS, ACCOUNTS_MAX),
            (PEAKS, OWNERS_MAX),
        ] {
            let map = maps.iter().find(|map| map.name == name).unwrap();
            assert_full(map, most);
        }
    }
}
