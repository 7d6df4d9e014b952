//! The owners of addresses: `LIB/addresses`, and `LIB/network/ID`.
//!
//! An address is a *number* of the pool; IPv4 and IPv6 follow from it. The pool is cut in chunks of
//! 1,024 numbers, and a chunk belongs to one trust domain, so that a domain is a few routes,
//! however many containers it has. The first four numbers of a chunk belong to no container: 1 is
//! the host's and 2 the domain's end of the uplink.
//!
//! Format of `addresses`, version 1, little endian:
//! ```text
//! 0      "DMADDR01", pool u32, bits u32, IPv6 prefix [u8; 6]
//! 4096   256 chunks of 16 bytes: domain u64 (FNV-1a of its name, 0 is free), used u32, cursor u32
//! 8192   one record of 32 bytes per number: container [u8; 16] (0 is free), cgroup u64, hosts u32, 0
//! ```
//! It is sparse, and every step reads and writes a bounded piece of it. One writer at a time
//! (flock).
//!
//! ORDER: a record is written before its chunk's count, and cleared before it. `used` is thus a
//! hint: too low costs a search of a full chunk, too high hides a free number until
//! [`Store::sweep`]. Nothing is synced: after a power cut an address may be missing here that a
//! container's own configuration still has. [`Store::claim`] takes it back at the next start, or
//! names its new owner.
//!
//! `cgroup` and `hosts` are of this boot: the container's cgroup and its record in the domain's
//! hosts file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use dormouse_model::{ContainerId, Name};
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::settings::Pool;

const MAGIC: &[u8; 8] = b"DMADDR01";
const CHUNKS_AT: u64 = 4096;
const CHUNK_BYTES: u64 = 16;
const RECORDS_AT: u64 = 8192;
const RECORD_BYTES: u64 = 32;

/// Numbers per chunk.
pub(crate) const CHUNK: u32 = 1024;
/// Numbers at the start of a chunk that no container gets.
const RESERVED: u32 = 4;

/// The mapping of numbers to addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Plan {
    pub pool: Pool,
    pub prefix6: [u8; 6],
}

impl Plan {
    pub fn v4(&self, number: u32) -> Ipv4Addr {
        Ipv4Addr::from(u32::from(self.pool.first) + number)
    }

    pub fn v6(&self, number: u32) -> Ipv6Addr {
        self.address6([0, 0], number)
    }

    /// The private `::1` of a container; `number` 0 is their network.
    pub fn loop6(&self, number: u32) -> Ipv6Addr {
        self.address6([0xff, 0xff], number)
    }

    fn address6(&self, subnet: [u8; 2], number: u32) -> Ipv6Addr {
        let mut octets = [0; 16];
        octets[..6].copy_from_slice(&self.prefix6);
        octets[6..8].copy_from_slice(&subnet);
        octets[12..].copy_from_slice(&number.to_be_bytes());
        Ipv6Addr::from(octets)
    }

    /// The number of an address a container may have.
    pub fn number(&self, address: IpAddr) -> Result<u32> {
        let bad = || Error::NotInPool { address, pool: self.describe() };
        let number = match address {
            IpAddr::V4(a) => u32::from(a).checked_sub(u32::from(self.pool.first)),
            IpAddr::V6(a) => {
                let o = a.octets();
                let number = u32::from_be_bytes([o[12], o[13], o[14], o[15]]);
                Some(number).filter(|n| self.v6(*n) == a)
            }
        };
        let number = number.filter(|n| *n < self.pool.count()).ok_or_else(bad)?;
        if number % CHUNK < RESERVED { Err(bad()) } else { Ok(number) }
    }

    pub fn addresses(&self, number: u32) -> [IpAddr; 2] {
        [self.v4(number).into(), self.v6(number).into()]
    }

    fn describe(&self) -> String {
        format!("{}, {}/64", self.pool, self.v6(0))
    }
}

/// The addresses of a container, for as long as it exists: `LIB/network/ID`, JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Holding {
    pub version: u32,
    pub domain: Name,
    /// The first one identifies the container on the packet path.
    pub numbers: Vec<u32>,
}

/// A record of `addresses`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Record {
    pub container: [u8; 16],
    pub cgroup: u64,
    /// Number of the record of the hosts file; 0 means none.
    pub hosts: u32,
}

/// The open table, locked for as long as this exists.
pub(crate) struct Store {
    file: File,
    lib: PathBuf,
    pub plan: Plan,
}

#[derive(Debug, Clone, Copy)]
struct Chunk {
    domain: u64,
    used: u32,
    cursor: u32,
}

impl Chunk {
    fn parse(bytes: &[u8; CHUNK_BYTES as usize]) -> Self {
        let [d0, d1, d2, d3, d4, d5, d6, d7, u0, u1, u2, u3, c0, c1, c2, c3] = *bytes;
        Self {
            domain: u64::from_le_bytes([d0, d1, d2, d3, d4, d5, d6, d7]),
            used: u32::from_le_bytes([u0, u1, u2, u3]),
            cursor: u32::from_le_bytes([c0, c1, c2, c3]),
        }
    }
}

fn domain_key(domain: &Name) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for byte in domain.as_str().bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    }
    hash.max(1)
}

impl Store {
    /// Opens the table, made on first use, and waits for its lock.
    pub fn open(lib: &Path, pool: Pool) -> Result<Self> {
        let path = lib.join("addresses");
        let open = || OpenOptions::new().read(true).write(true).mode(0o600).open(&path);
        let file = match open() {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                fs::create_dir_all(lib.join("network")).map_err(Error::file("create", lib))?;
                OpenOptions::new()
                    .read(true)
                    .write(true)
                    .create(true)
                    .truncate(false)
                    .mode(0o600)
                    .open(&path)
            }
            other => other,
        }
        .map_err(Error::file("open", &path))?;
        rustix::fs::flock(&file, FlockOperation::LockExclusive)
            .map_err(Error::errno("lock the table of addresses", "flock"))?;
        let mut head = [0u8; 22];
        let read = file.read_at(&mut head, 0).map_err(Error::file("read", &path))?;
        let plan = if read == 0 || head[..8] == [0; 8] {
            Self::create(&file, pool).map_err(Error::file("write", &path))?
        } else {
            let corrupt =
                |message: &str| Error::Corrupt { path: path.clone(), message: message.into() };
            if read < head.len() || &head[..8] != MAGIC {
                return Err(corrupt("not a table of addresses of version 1"));
            }
            let word = |at: usize| {
                u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]])
            };
            let bits = u8::try_from(word(12)).map_err(|_| corrupt("no such pool"))?;
            let found = Pool { first: Ipv4Addr::from(word(8)), bits };
            if found != pool {
                let (found, wanted) = (found.to_string(), pool.to_string());
                return Err(Error::PoolChanged { found, wanted, path });
            }
            let mut prefix6 = [0; 6];
            prefix6.copy_from_slice(&head[16..22]);
            Plan { pool, prefix6 }
        };
        Ok(Self { file, lib: lib.into(), plan })
    }

    fn create(file: &File, pool: Pool) -> io::Result<Plan> {
        let mut prefix6 = [0; 6];
        let mut random = File::open("/dev/urandom")?;
        io::Read::read_exact(&mut random, &mut prefix6)?;
        prefix6[0] = 0xfd; // RFC 4193: a unique local prefix, 40 bits of it random
        file.set_len(RECORDS_AT + RECORD_BYTES * u64::from(pool.count()))?;
        let mut head = Vec::with_capacity(22);
        head.extend(MAGIC);
        head.extend(u32::from(pool.first).to_le_bytes());
        head.extend(u32::from(pool.bits).to_le_bytes());
        head.extend(prefix6);
        file.write_all_at(&head, 0)?;
        Ok(Plan { pool, prefix6 })
    }

    fn path(&self) -> PathBuf {
        self.lib.join("addresses")
    }

    fn read(&self, buffer: &mut [u8], at: u64) -> Result<()> {
        self.file.read_exact_at(buffer, at).map_err(Error::file("read", self.path()))
    }

    fn write(&self, buffer: &[u8], at: u64) -> Result<()> {
        self.file.write_all_at(buffer, at).map_err(Error::file("write", self.path()))
    }

    fn chunks(&self) -> Result<Vec<Chunk>> {
        let count = (self.plan.pool.count() / CHUNK) as usize;
        let mut bytes = vec![0; count * CHUNK_BYTES as usize];
        self.read(&mut bytes, CHUNKS_AT)?;
        Ok(bytes.as_chunks().0.iter().map(Chunk::parse).collect())
    }

    /// One of them.
    fn chunk(&self, index: u32) -> Result<Chunk> {
        let mut bytes = [0; CHUNK_BYTES as usize];
        self.read(&mut bytes, CHUNKS_AT + u64::from(index) * CHUNK_BYTES)?;
        Ok(Chunk::parse(&bytes))
    }

    fn set_chunk(&self, index: u32, chunk: Chunk) -> Result<()> {
        let mut bytes = Vec::with_capacity(CHUNK_BYTES as usize);
        bytes.extend(chunk.domain.to_le_bytes());
        bytes.extend(chunk.used.to_le_bytes());
        bytes.extend(chunk.cursor.to_le_bytes());
        self.write(&bytes, CHUNKS_AT + u64::from(index) * CHUNK_BYTES)
    }

    /// The record of a number.
    pub fn record(&self, number: u32) -> Result<Record> {
        let mut b = [0u8; RECORD_BYTES as usize];
        self.read(&mut b, RECORDS_AT + u64::from(number) * RECORD_BYTES)?;
        Ok(parse_record(&b))
    }

    /// Writes the record of a number.
    pub fn set_record(&self, number: u32, record: Record) -> Result<()> {
        let mut b = Vec::with_capacity(RECORD_BYTES as usize);
        b.extend(record.container);
        b.extend(record.cgroup.to_le_bytes());
        b.extend(record.hosts.to_le_bytes());
        b.extend([0; 4]);
        self.write(&b, RECORDS_AT + u64::from(number) * RECORD_BYTES)
    }

    /// The chunks of a domain, in the order of their numbers.
    pub fn chunks_of(&self, domain: &Name) -> Result<Vec<u32>> {
        let key = domain_key(domain);
        let chunks = self.chunks()?;
        Ok((0u32..).zip(chunks).filter(|(_, c)| c.domain == key).map(|(i, _)| i).collect())
    }

    /// Claims one more chunk for the domain.
    pub fn claim_chunk(&self, domain: &Name) -> Result<u32> {
        let free = (0u32..).zip(self.chunks()?).find(|(_, c)| c.domain == 0);
        let (index, _) = free.ok_or_else(|| Error::PoolFull { pool: self.plan.describe() })?;
        self.set_chunk(index, Chunk { domain: domain_key(domain), used: 0, cursor: RESERVED })?;
        Ok(index)
    }

    /// Releases the chunks of a domain, if no container has a number in them.
    pub fn release_chunks(&self, domain: &Name) -> Result<()> {
        let key = domain_key(domain);
        for (index, chunk) in (0u32..).zip(self.chunks()?) {
            if chunk.domain == key && self.used_in(index)? == 0 {
                self.set_chunk(index, Chunk { domain: 0, used: 0, cursor: 0 })?;
            }
        }
        Ok(())
    }

    fn records_in(&self, chunk: u32) -> Result<Vec<Record>> {
        let mut bytes = vec![0; CHUNK as usize * RECORD_BYTES as usize];
        self.read(&mut bytes, RECORDS_AT + u64::from(chunk * CHUNK) * RECORD_BYTES)?;
        Ok(bytes.chunks_exact(RECORD_BYTES as usize).map(parse_record).collect())
    }

    fn used_in(&self, chunk: u32) -> Result<u32> {
        let records = self.records_in(chunk)?;
        Ok(records.iter().filter(|r| r.container != [0; 16]).count() as u32)
    }

    /// Gives a container numbers of its domain: the requested ones, or the next free one.
    pub fn allocate(
        &self,
        domain: &Name,
        id: &ContainerId,
        requested: &[IpAddr],
    ) -> Result<Vec<u32>> {
        let mut numbers = Vec::new();
        for address in requested {
            let number = self.plan.number(*address)?;
            if !numbers.contains(&number) {
                self.check_free(domain, id, number, *address)?;
                numbers.push(number);
            }
        }
        if numbers.is_empty() {
            numbers.push(self.next_free(domain)?);
        }
        for number in &numbers {
            self.take(domain, id, *number)?;
        }
        Ok(numbers)
    }

    /// Takes back a number that is in the container's configuration and may be missing in this
    /// table.
    pub fn claim(&self, domain: &Name, id: &ContainerId, number: u32) -> Result<()> {
        if self.record(number)?.container == id.to_bytes() {
            return Ok(());
        }
        self.check_free(domain, id, number, self.plan.v4(number).into())?;
        self.take(domain, id, number)
    }

    fn check_free(
        &self,
        domain: &Name,
        id: &ContainerId,
        number: u32,
        address: IpAddr,
    ) -> Result<()> {
        let owner = self.record(number)?.container;
        if owner != [0; 16] && owner != id.to_bytes() {
            let owner = format!("container {}", &ContainerId::from_bytes(owner).short());
            return Err(Error::AddressTaken { address, owner });
        }
        let chunk = self.chunk(number / CHUNK)?;
        if chunk.domain != 0 && chunk.domain != domain_key(domain) {
            return Err(Error::AddressTaken { address, owner: "another domain".into() });
        }
        Ok(())
    }

    fn take(&self, domain: &Name, id: &ContainerId, number: u32) -> Result<()> {
        let before = self.record(number)?;
        if before.container == id.to_bytes() {
            return Ok(());
        }
        let index = number / CHUNK;
        let mut chunk = self.chunk(index)?;
        if chunk.domain == 0 {
            chunk = Chunk { domain: domain_key(domain), used: 0, cursor: RESERVED };
            self.set_chunk(index, chunk)?;
        }
        self.set_record(number, Record { container: id.to_bytes(), ..Record::default() })?;
        // The cursor runs ahead, so that an address is reused as late as possible.
        let cursor = number % CHUNK + 1;
        self.set_chunk(index, Chunk { used: chunk.used + 1, cursor, ..chunk })
    }

    fn next_free(&self, domain: &Name) -> Result<u32> {
        let key = domain_key(domain);
        for (index, chunk) in (0u32..).zip(self.chunks()?) {
            if chunk.domain != key || chunk.used >= CHUNK - RESERVED {
                continue;
            }
            let from = chunk.cursor.clamp(RESERVED, CHUNK);
            for part in [from..CHUNK, RESERVED..from] {
                if let Some(number) = self.free_in(index, part)? {
                    return Ok(index * CHUNK + number);
                }
            }
            self.set_chunk(index, Chunk { used: CHUNK - RESERVED, ..chunk })?;
        }
        Ok(self.claim_chunk(domain)? * CHUNK + RESERVED)
    }

    /// Finds the first free number in a part of a chunk, counted from the chunk's start. The next one is free nearly
    /// always, so a few records are read at a time.
    fn free_in(&self, chunk: u32, part: Range<u32>) -> Result<Option<u32>> {
        const PIECE: u32 = 32;
        let mut bytes = [0; PIECE as usize * RECORD_BYTES as usize];
        for first in part.clone().step_by(PIECE as usize) {
            let count = (part.end - first).min(PIECE);
            let bytes = &mut bytes[..(count as usize) * RECORD_BYTES as usize];
            self.read(bytes, RECORDS_AT + u64::from(chunk * CHUNK + first) * RECORD_BYTES)?;
            let mut records = bytes.chunks_exact(RECORD_BYTES as usize);
            if let Some(at) = records.position(|record| record[..16] == [0; 16]) {
                return Ok(Some(first + at as u32));
            }
        }
        Ok(None)
    }

    /// Frees a number, if it is this container's.
    pub fn release(&self, id: &ContainerId, number: u32) -> Result<bool> {
        if self.record(number)?.container != id.to_bytes() {
            return Ok(false);
        }
        let index = number / CHUNK;
        let chunk = self.chunk(index)?;
        // ORDER: the count first: too low a count costs a search, too high a count hides a number.
        self.set_chunk(index, Chunk { used: chunk.used.saturating_sub(1), ..chunk })?;
        self.set_record(number, Record::default())?;
        Ok(true)
    }

    /// Returns how many numbers are in use.
    pub fn count(&self) -> Result<u32> {
        let claimed = (0u32..).zip(self.chunks()?).filter(|(_, chunk)| chunk.domain != 0);
        claimed.map(|(index, _)| self.used_in(index)).sum()
    }

    /// Frees numbers without a container (by `exists`), and counts anew. Returns how many it freed.
    pub fn sweep(&self, exists: &dyn Fn(&ContainerId) -> bool) -> Result<u32> {
        let mut freed = 0;
        for (index, chunk) in (0u32..).zip(self.chunks()?) {
            if chunk.domain == 0 {
                continue;
            }
            for (number, record) in (index * CHUNK..).zip(self.records_in(index)?) {
                let id = ContainerId::from_bytes(record.container);
                if record.container != [0; 16] && !exists(&id) {
                    self.set_record(number, Record::default())?;
                    self.forget(&id)?;
                    freed += 1;
                }
            }
            self.set_chunk(index, Chunk { used: self.used_in(index)?, ..chunk })?;
        }
        Ok(freed)
    }

    fn holding_path(&self, id: &ContainerId) -> PathBuf {
        self.lib.join("network").join(id.as_str())
    }

    /// Returns the addresses of a container, if it has any.
    pub fn holding(&self, id: &ContainerId) -> Result<Option<Holding>> {
        let path = self.holding_path(id);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(Error::file("read", path)(e)),
        };
        match serde_json::from_slice(&text) {
            Ok(holding) => Ok(Some(holding)),
            Err(e) => Err(Error::Corrupt { path, message: e.to_string() }),
        }
    }

    /// Records the addresses of a container.
    pub fn set_holding(&self, id: &ContainerId, holding: &Holding) -> Result<()> {
        let path = self.holding_path(id);
        let text = serde_json::to_vec(holding)
            .map_err(|e| Error::Corrupt { path: path.clone(), message: e.to_string() })?;
        replace(&path, &text)
    }

    /// Removes the addresses of a container, and an incomplete new version of that file.
    pub fn forget(&self, id: &ContainerId) -> Result<()> {
        let path = self.holding_path(id);
        for path in [new_name(&path), path] {
            match fs::remove_file(&path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    return Err(Error::file("remove", path)(e));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

fn parse_record(b: &[u8]) -> Record {
    let mut record = Record::default();
    record.container.copy_from_slice(&b[..16]);
    let mut wide = [0; 8];
    wide.copy_from_slice(&b[16..24]);
    record.cgroup = u64::from_le_bytes(wide);
    record.hosts = u32::from_le_bytes([b[24], b[25], b[26], b[27]]);
    record
}

/// Returns the name of the new version of a file before it is renamed.
fn new_name(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    path.with_file_name(name)
}

/// Opens a lock file, made if it is missing.
pub(crate) fn lock_file(path: &Path) -> Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .map_err(Error::file("open", path))
}

/// Writes a file in one step: a reader finds the old or the new text.
pub(crate) fn replace(path: &Path, text: &[u8]) -> Result<()> {
    let new = new_name(path);
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&new)
        .map_err(Error::file("create", &new))?;
    file.write_all(text).map_err(Error::file("write", &new))?;
    fs::rename(&new, path).map_err(Error::file("rename", path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn id(n: u64) -> ContainerId {
        let mut bytes = [7; 16];
        bytes[..8].copy_from_slice(&n.to_be_bytes());
        ContainerId::from_bytes(bytes)
    }

    fn pool() -> Pool {
        "10.136.0.0/14".parse().unwrap()
    }

    #[test]
    fn numbers_and_addresses_belong_to_each_other() {
        let plan = Plan { pool: pool(), prefix6: [0xfd, 1, 2, 3, 4, 5] };
        assert_eq!(plan.v4(1029), Ipv4Addr::new(10, 136, 4, 5));
        assert_eq!(plan.v6(5).to_string(), "fd01:203:405::5");
        assert_eq!(plan.loop6(5).to_string(), "fd01:203:405:ffff::5");
        for number in [4, 1029, 262_143] {
            for address in plan.addresses(number) {
                assert_eq!(plan.number(address).unwrap(), number);
            }
        }
        for bad in
            ["10.136.0.1", "10.136.4.2", "10.135.0.9", "10.140.0.9", "fd01:203:405:ffff::9", "::1"]
        {
            assert!(plan.number(bad.parse().unwrap()).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_hundred_thousand_containers_never_share_an_address() {
        let dir = tempfile::tempdir().unwrap();
        let domain: Name = "d".parse().unwrap();
        let store = Store::open(dir.path(), pool()).unwrap();
        let mut seen = BTreeSet::new();
        for n in 0..100_000 {
            let numbers = store.allocate(&domain, &id(n), &[]).unwrap();
            assert_eq!(numbers.len(), 1);
            assert!(numbers[0] % CHUNK >= RESERVED);
            assert!(seen.insert(numbers[0]), "{}", numbers[0]);
        }
        assert_eq!(store.chunks_of(&domain).unwrap().len(), 100_000usize.div_ceil(1020));
    }

    #[test]
    fn domains_have_disjoint_chunks_and_addresses_stay_with_their_domain() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b): (Name, Name) = ("a".parse().unwrap(), "b".parse().unwrap());
        let store = Store::open(dir.path(), pool()).unwrap();
        let first = store.allocate(&a, &id(1), &[]).unwrap();
        let second = store.allocate(&b, &id(2), &[]).unwrap();
        assert_ne!(first[0] / CHUNK, second[0] / CHUNK);
        let wanted = IpAddr::from(store.plan.v4(first[0] + 1));
        assert!(matches!(store.allocate(&b, &id(3), &[wanted]), Err(Error::AddressTaken { .. })));
        assert_eq!(store.allocate(&a, &id(3), &[wanted]).unwrap(), [first[0] + 1]);
        let taken = store.allocate(&a, &id(4), &[wanted]);
        assert!(matches!(taken, Err(Error::AddressTaken { .. })));
        store.release(&id(2), second[0]).unwrap();
        store.release_chunks(&b).unwrap();
        store.release_chunks(&a).unwrap();
        assert!(store.chunks_of(&b).unwrap().is_empty());
        assert_eq!(store.chunks_of(&a).unwrap().len(), 1);
    }

    #[test]
    fn forgotten_and_stale_records_are_mended() {
        let dir = tempfile::tempdir().unwrap();
        let domain: Name = "d".parse().unwrap();
        let store = Store::open(dir.path(), pool()).unwrap();
        let number = store.allocate(&domain, &id(1), &[]).unwrap()[0];
        // A power cut: the record is missing, the container's own configuration has the address.
        store.set_record(number, Record::default()).unwrap();
        store.claim(&domain, &id(1), number).unwrap();
        assert_eq!(store.record(number).unwrap().container, id(1).to_bytes());
        assert!(store.claim(&domain, &id(2), number).is_err());
        // A crash before the container's configuration was written.
        assert_eq!(store.sweep(&|_| false).unwrap(), 1);
        store.claim(&domain, &id(2), number).unwrap();
    }

    #[test]
    fn another_pool_is_refused_while_addresses_are_in_use() {
        let dir = tempfile::tempdir().unwrap();
        drop(Store::open(dir.path(), pool()).unwrap());
        let other = Store::open(dir.path(), "10.200.0.0/16".parse().unwrap());
        assert!(matches!(other, Err(Error::PoolChanged { .. })));
    }
}
