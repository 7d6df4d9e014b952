//! Networking of containers: addresses of their own in a shared stack, published ports, names.
//!
//! A *trust domain* is one network namespace that many containers share. All addresses of the
//! domain are local there (AnyIP), and BPF programs at the containers' parent cgroup give each
//! container its own: what it binds, where it sends from, what reaches its sockets (see
//! `dormouse_bpf::address`). Inside a domain a packet goes over the loopback device and no other;
//! one veth pair, the *uplink*, leads to the host, which routes, masquerades and publishes
//! ([`publish`](Network::publish)).
//!
//! The namespace belongs to a user namespace that was created for it and that contains no process
//! ([`dormouse_kernel::namespace::new_network`]). Root inside a container has no capability over
//! it, so the kernel itself refuses packet and raw sockets, routes and devices; the host's root,
//! its creator, has all capabilities. In a namespace of the host's user namespace, a listener
//! inside would receive the events of every device of the machine.
//!
//! State: `LIB/addresses` and `LIB/network` (the owners of addresses, which survive a reboot),
//! `RUN/domains` and `RUN/published` (this boot). The *host* is the stack of the calling thread: no
//! code here changes another one.
//!
//! A start needs no process, netlink or libbpf: [`Network::domain`] finds a namespace,
//! [`Network::enter`] writes two map entries. Locks are taken inside and never kept beyond a call,
//! except the one a [`Domain`] holds against removal.
#![forbid(unsafe_code)]

mod domain;
mod error;
mod ground;
mod link;
mod names;
mod pair;
mod publish;
mod ready;
mod settings;
mod shape;
mod stack;
mod store;

use std::collections::BTreeSet;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use dormouse_bpf::address::{self, Constants, Programs};
use dormouse_bpf::identity::Identities;
use dormouse_bpf::socket_count::{self, Counts};
use dormouse_bpf::{BpfError, abstract_unix};
use dormouse_model::{ContainerId, Name, Publish};

pub use error::Error;
use error::Result;
use ground::new_stack;
pub use ground::{Domain, Network};
use names::Hosts;
use ready::read_ready;
pub use settings::{Pool, Settings};
use store::{CHUNK, Holding, Plan, Store};

/// Effects between containers of one domain in address mode, shown by `check` and `run`.
pub const VISIBLE_IN_DOMAIN: &str = "\
containers of one domain share a network stack: each sees the socket tables of all (/proc/net, ss), \
abstract unix socket names in use (they cannot be connected to), the domain's counters and settings; \
a UDP port or an abstract name held by one may be refused to another; use --net private or --domain for \
tenants who must not see each other";

/// Addresses that lead to a domain.
struct Led {
    plan: Plan,
    numbers: Vec<u32>,
    /// The index that identifies the container on the packet path.
    first: u32,
}

impl Network {
    /// Returns the trust domain, created on first use (some 0.1 s, once).
    ///
    /// The domain stays when its last container is removed, until
    /// [`remove_unused`](Self::remove_unused). `rules`, called when the domain is created, returns
    /// the nft(8) rules of its stack, which are in force before it can be reached.
    ///
    /// PoolOverlaps when the host has a route into the pool; Unsupported without cgroup v2, nft(8),
    /// or a kernel that takes the BPF programs (Linux 6.7).
    pub fn domain(&self, name: &Name, rules: impl FnOnce() -> String) -> Result<Domain> {
        if let Some(domain) = self.find_domain(name)? {
            return Ok(domain);
        }
        let _lock = self.lock_domains()?;
        match self.find_domain(name)? {
            Some(domain) => Ok(domain),
            None => self.create_domain(name, &rules()),
        }
    }

    /// Replaces attached programs of an older build by this one's. Running containers keep their
    /// addresses and connections.
    pub fn update_programs(&self) -> Result<()> {
        let _lock = self.lock_domains()?;
        self.attach().map(drop)
    }

    /// Removes every domain without a container, and with the last of them the rules and programs.
    /// Returns the names of the removed ones.
    pub fn remove_unused(&self) -> Result<Vec<Name>> {
        let names = self.domain_names()?;
        if names.is_empty() {
            return Ok(names);
        }
        let _lock = self.lock_domains()?;
        let plan = self.store()?.plan;
        let programs = self.find_programs(&plan)?;
        let mut removed = Vec::new();
        for name in self.domain_names()? {
            if self.remove_domain(&name, programs.as_ref())? {
                removed.push(name);
            }
        }
        if self.domain_names()?.is_empty() {
            self.table().remove()?;
            self.detach()?;
        }
        Ok(removed)
    }

    /// Removes everything that was created since boot: domains with or without containers, uplinks,
    /// rules, programs, mounts. The owners of addresses stay recorded.
    pub fn dismantle(&self) -> Result<()> {
        if !self.run.join("domains").exists() && !self.run.join("none").exists() {
            return Ok(());
        }
        {
            let _lock = self.lock_domains()?;
            for name in self.domain_names()? {
                self.clear_domain(&name)?;
            }
            self.table().remove()?;
            self.table().forget()?;
            self.detach()?;
        }
        self.remove_none()?;
        match fs::remove_dir_all(self.run.join("domains")) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::file("remove", self.run.join("domains"))(e))
            }
            _ => Ok(()),
        }
    }

    /// Returns the root of a sysfs mount (O_PATH) that shows a stack with nothing but a loopback
    /// device, for `--net none`: common to all containers, each of which has a stack created by
    /// itself.
    pub fn empty_sys(&self) -> Result<OwnedFd> {
        let dir = self.run.join("none/sys");
        let is_mounted =
            |path: &Path| rustix::fs::statfs(path).is_ok_and(|s| s.f_type as u64 == SYSFS_MAGIC);
        if !is_mounted(&dir) {
            let _lock = self.lock_domains()?;
            fs::create_dir_all(&dir).map_err(Error::file("create", &dir))?;
            if !is_mounted(&dir) {
                let netns = new_stack()?;
                let net = self.run.join("none/net");
                stack::inside(netns.as_fd(), || {
                    // ORDER: before sysfs, whose superblock does not keep the namespace alive: the
                    // kernel removes the links of a dead one, and the mount would show none.
                    domain::bind_net(&net)?;
                    domain::mount_sys(&dir)
                })?;
            }
        }
        let sys = domain::open_path(&dir)?;
        domain::protect_sys(&sys)?;
        Ok(sys)
    }

    /// Unmounts the mount of [`empty_sys`](Self::empty_sys). Running containers keep their own.
    pub fn remove_none(&self) -> Result<()> {
        let _lock = self.lock_domains()?;
        domain::unmount(&self.run.join("none/sys"))?;
        domain::unmount(&self.run.join("none/net"))?;
        match fs::remove_dir_all(self.run.join("none")) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::file("remove", self.run.join("none"))(e))
            }
            _ => Ok(()),
        }
    }

    /// Gives a container addresses in a domain: the requested ones, or the next free one; each IPv4
    /// address has an IPv6 one that belongs to it. They stay allocated until
    /// [`release`](Self::release).
    ///
    /// NotInPool, AddressTaken (by another container or domain), PoolFull. At the first address of the
    /// instance also PoolOverlaps and PoolOfAnother.
    pub fn allocate(
        &self,
        domain: &Name,
        id: &ContainerId,
        requested: &[IpAddr],
    ) -> Result<Vec<IpAddr>> {
        if !self.lib.join("addresses").exists() {
            self.check_first_pool()?;
        }
        let store = self.store()?;
        if let Some(holding) = store.holding(id)? {
            // The remains of an interrupted attempt.
            for number in holding.numbers {
                store.release(id, number)?;
            }
        }
        let numbers = store.allocate(domain, id, requested)?;
        let addresses = numbers.iter().flat_map(|n| store.plan.addresses(*n)).collect();
        let holding = Holding { version: 1, domain: domain.clone(), numbers };
        store.set_holding(id, &holding).inspect_err(|_| {
            // The first error is the one to return.
            holding.numbers.iter().for_each(|number| drop(store.release(id, *number)));
        })?;
        Ok(addresses)
    }

    /// Releases a container's addresses. Nothing happens if it has none.
    pub fn release(&self, id: &ContainerId) -> Result<()> {
        let Some(store) = self.existing_store()? else { return Ok(()) };
        for number in store.holding(id)?.map(|holding| holding.numbers).unwrap_or_default() {
            store.release(id, number)?;
        }
        // ORDER: last: an interrupted release is tried again.
        store.forget(id)
    }

    /// Returns whether addresses are allocated to a container.
    pub fn has_addresses(&self, id: &ContainerId) -> Result<bool> {
        self.existing_store()?.map_or(Ok(false), |store| Ok(store.holding(id)?.is_some()))
    }

    /// Returns whether a container has an address of the pool, by its index. No other one gets it before a
    /// [`release`](Self::release).
    pub fn is_held(&self, id: &ContainerId, index: u32) -> Result<bool> {
        let Some(store) = self.existing_store()? else { return Ok(false) };
        Ok(store.record(index)?.container == id.to_bytes())
    }

    /// Releases the addresses of containers that do not exist. Returns their number.
    pub fn sweep(&self, exists: &dyn Fn(&ContainerId) -> bool) -> Result<u32> {
        self.existing_store()?.map_or(Ok(0), |store| store.sweep(exists))
    }

    /// Returns how many addresses are in use.
    pub fn addresses_in_use(&self) -> Result<u32> {
        self.existing_store()?.map_or(Ok(0), |store| store.count())
    }

    /// Makes processes in the container's cgroup (its id in the v2 hierarchy) the owner of these
    /// addresses in this domain. Called again with other addresses for a running container, after
    /// [`update`](Self::update).
    pub fn enter(
        &self,
        domain: &Domain,
        id: &ContainerId,
        cgroup_v2_id: u64,
        addresses: &[IpAddr],
    ) -> Result<()> {
        let (led, store) = self.route(domain, id, addresses)?;
        let first = led.first;
        let mut record = store.record(first)?;
        let old = std::mem::replace(&mut record.cgroup, cgroup_v2_id);
        store.set_record(first, record)?;
        drop(store); // ORDER: the lock of the domains comes before that of the table
        let members = self.members(domain, &led.plan)?;
        if old != cgroup_v2_id && old != 0 && members.of(old)?.is_some_and(|it| it.address == first)
        {
            members.leave(old)?; // of an earlier start that was not cleaned up
        }
        self.add_further(&led)?;
        // ORDER: last: from then on the container may create sockets.
        members.enter(cgroup_v2_id, &domain.identity(first))?;
        Ok(())
    }

    /// Returns the cookie of the stack of a running container's domain; `None` if it has no identity.
    pub fn netns_cookie(&self, cgroup_v2_id: u64) -> Result<Option<u64>> {
        let Some(store) = self.existing_store()? else { return Ok(None) };
        let Some(programs) = self.find_programs(&store.plan)? else { return Ok(None) };
        Ok(programs.identities()?.of(cgroup_v2_id)?.map(|identity| identity.netns))
    }

    /// Returns the counts of sockets of the containers of this instance. Attaches the programs that count, if they are
    /// not attached.
    ///
    /// Bpf if the kernel does not take them, NoCgroup2 without cgroup v2.
    pub fn count_sockets(&self) -> Result<Counts> {
        let (cgroup, level) = (self.parent_cgroup()?, self.level());
        if let Some(counts) = socket_count::find(cgroup.as_fd())?
            && counts.is_current(cgroup.as_fd(), level)?
        {
            return Ok(counts);
        }
        // The lock of all programs at the parent cgroup.
        let _lock = self.lock_domains()?;
        Ok(socket_count::attach(cgroup.as_fd(), level)?)
    }

    /// Returns the counts of sockets, if the programs that count are attached.
    pub fn socket_counts(&self) -> Result<Option<Counts>> {
        match self.find_parent()? {
            Some(cgroup) => Ok(socket_count::find(cgroup.as_fd())?),
            None => Ok(None),
        }
    }

    /// Returns the constants of BPF programs that know containers by their addresses.
    pub fn program_constants(&self) -> Result<Constants> {
        Ok(self.constants(&self.store()?.plan))
    }

    /// Returns the indices of addresses in the pool, each once.
    pub fn indices(&self, addresses: &[IpAddr]) -> Result<Vec<u32>> {
        match addresses {
            [] => Ok(Vec::new()),
            _ => numbers(&self.store()?.plan, addresses),
        }
    }

    /// Routes addresses to the domain of a container that has no processes.
    pub fn announce(&self, domain: &Domain, id: &ContainerId, addresses: &[IpAddr]) -> Result<()> {
        // ORDER: the lock of the domains comes before that of the table.
        let (led, _) = self.route(domain, id, addresses)?;
        self.add_further(&led)
    }

    /// Returns what is a container's alone within the stack of its domain.
    pub fn own(&self, addresses: &[IpAddr]) -> Result<Own> {
        let plan = self.store()?.plan;
        let first = numbers(&plan, addresses)?.first().copied();
        let first = first.ok_or_else(|| Error::NoAddress("one without addresses".into()))?;
        let loop4 = u32::from(Ipv4Addr::new(127, 0, 0, 0)) | first << LOOP_BITS;
        Ok(Own { addresses: addresses.to_vec(), loop4, loop6: plan.loop6(first) })
    }

    /// Makes processes in a cgroup that is not a container's create sockets for an
    /// [announced](Self::announce) container, until the cgroup is lent to another. One at a time:
    /// the caller holds a lock.
    pub fn lend(&self, domain: &Domain, cgroup_v2_id: u64, addresses: &[IpAddr]) -> Result<()> {
        let plan = self.store()?.plan;
        let first = numbers(&plan, addresses)?.first().copied();
        let first = first.ok_or_else(|| Error::NoAddress("one that sleeps".into()))?;
        let members = self.members(domain, &plan)?;
        Ok(members.enter(cgroup_v2_id, &domain.identity(first))?)
    }

    /// Ends the effect of [`lend`](Self::lend). The sockets keep their identity.
    pub fn end_lending(&self, cgroup_v2_id: u64) -> Result<()> {
        let Some(store) = self.existing_store()? else { return Ok(()) };
        if let Some(programs) = self.find_programs(&store.plan)? {
            programs.identities()?.leave(cgroup_v2_id)?;
        }
        Ok(())
    }

    /// Makes sure that the addresses are the container's and lead to its domain. Returns the table as well, locked.
    fn route(
        &self,
        domain: &Domain,
        id: &ContainerId,
        addresses: &[IpAddr],
    ) -> Result<(Led, Store)> {
        let store = self.store()?;
        let plan = store.plan;
        let numbers = numbers(&plan, addresses)?;
        let first = *numbers.first().ok_or_else(|| Error::NoAddress(id.short().into()))?;
        for number in &numbers {
            store.claim(&domain.name, id, *number)?;
        }
        let holding = Holding { version: 1, domain: domain.name.clone(), numbers: numbers.clone() };
        if store.holding(id)?.as_ref() != Some(&holding) {
            store.set_holding(id, &holding)?; // forgotten in a power cut
        }
        let mut chunks: Vec<u32> = numbers.iter().map(|number| number / CHUNK).collect();
        chunks.retain(|chunk| !domain.ready.chunks.contains(chunk));
        let led = Led { plan, numbers, first };
        if chunks.is_empty() {
            return Ok((led, store)); // most starts
        }
        drop(store); // ORDER: the lock of the domains comes before that of the table
        for chunk in chunks {
            self.add_chunk_routes(domain, &plan, chunk)?;
        }
        Ok((led, self.store()?))
    }

    /// Maps all addresses but the first to the first.
    fn add_further(&self, led: &Led) -> Result<()> {
        let [_, further @ ..] = &led.numbers[..] else { return Ok(()) };
        if further.is_empty() {
            return Ok(());
        }
        let programs = self.programs(&led.plan)?;
        Ok(further.iter().try_for_each(|number| programs.add(*number, led.first))?)
    }

    fn members(&self, domain: &Domain, plan: &Plan) -> Result<Identities> {
        match self.known_members(&domain.ready)? {
            Some(members) => Ok(members),
            None => Ok(self.programs(plan)?.identities()?),
        }
    }

    /// The container has no processes any more: its name is removed, its addresses stay allocated.
    pub fn leave(&self, id: &ContainerId) -> Result<()> {
        self.part(id, false)
    }

    /// Prepares for sleep: no process creates sockets in the container's name any more. Its
    /// addresses lead to the sockets that it left, its name to its addresses.
    pub fn doze(&self, id: &ContainerId) -> Result<()> {
        self.part(id, true)
    }

    fn part(&self, id: &ContainerId, asleep: bool) -> Result<()> {
        let store = self.store()?;
        let Some(holding) = store.holding(id)? else { return Ok(()) };
        let Some(first) = holding.numbers.first().copied() else { return Ok(()) };
        let mut record = store.record(first)?;
        if record.container != id.to_bytes() {
            return Ok(());
        }
        let known = match read_ready(&self.domain_dir(&holding.domain))? {
            Some((ready, _)) => self.known_members(&ready)?,
            None => None,
        };
        let (members, programs) = match known {
            Some(members) if holding.numbers.len() == 1 => (Some(members), None),
            _ => {
                let programs = self.find_programs(&store.plan)?;
                (programs.as_ref().map(Programs::identities).transpose()?, programs)
            }
        };
        // After a reboot the cgroup's id may be another container's.
        if let Some(members) = members
            && record.cgroup != 0
            && members.of(record.cgroup)?.is_some_and(|it| it.address == first)
        {
            members.leave(record.cgroup)?;
        }
        record.cgroup = 0;
        if asleep {
            return store.set_record(first, record);
        }
        if let Some(programs) = programs {
            for number in &holding.numbers[1..] {
                programs.remove(*number)?;
            }
        }
        if record.hosts != 0 {
            self.clear_name(&holding.domain, record.hosts, id)?;
        }
        record.hosts = 0;
        store.set_record(first, record)
    }

    /// Adds and removes addresses of a container. A running one is then [entered](Self::enter)
    /// again with the returned addresses.
    ///
    /// Invalid if its first address is to be removed: sockets are identified by it.
    pub fn update(
        &self,
        id: &ContainerId,
        add: &[IpAddr],
        remove: &[IpAddr],
    ) -> Result<Vec<IpAddr>> {
        let store = self.store()?;
        let plan = store.plan;
        let mut holding = store.holding(id)?.ok_or_else(|| Error::NoAddress(id.short().into()))?;
        let first = holding.numbers.first().copied();
        let gone = numbers(&plan, remove)?;
        for (number, address) in gone.iter().zip(remove) {
            if Some(*number) == first {
                return Err(Error::FirstAddress(*address));
            }
            if !holding.numbers.contains(number) {
                return Err(Error::NotItsOwn(*address));
            }
        }
        let mut added = Vec::new();
        for number in numbers(&plan, add)? {
            if !holding.numbers.contains(&number) {
                added.push(number);
            }
        }
        if !added.is_empty() {
            let wanted: Vec<IpAddr> = added.iter().map(|n| plan.v4(*n).into()).collect();
            store.allocate(&holding.domain, id, &wanted)?;
        }
        if !gone.is_empty()
            && let Some(programs) = self.find_programs(&plan)?
        {
            for number in &gone {
                programs.remove(*number)?;
            }
        }
        holding.numbers.extend(added);
        holding.numbers.retain(|n| !gone.contains(n));
        store.set_holding(id, &holding)?;
        // ORDER: a number is free for others only when no record assigns it to this container any
        // more.
        for number in gone {
            store.release(id, number)?;
        }
        Ok(holding.numbers.iter().flat_map(|n| plan.addresses(*n)).collect())
    }

    /// Redirects ports of the host to the container's first addresses: all of them or none.
    ///
    /// PortTaken if another container or a process of the host has one.
    pub fn publish(&self, id: &ContainerId, ports: &[Publish], own: &[IpAddr]) -> Result<()> {
        if ports.is_empty() {
            return Ok(());
        }
        let _lock = self.lock_domains()?;
        match self.table().publish(id, ports, own) {
            // The ruleset was flushed: ours is created again.
            Err(Error::Nft { .. }) if !self.table().exists() => {
                let plan = self.store()?.plan;
                self.table().make(&plan, &self.uplinks()?)?;
                self.table().publish(id, ports, own)
            }
            other => other,
        }
    }

    /// Unpublishes all ports of the container.
    pub fn unpublish(&self, id: &ContainerId) -> Result<()> {
        if !self.table().has_ports(id) {
            return Ok(());
        }
        let _lock = self.lock_domains()?;
        self.table().unpublish(id)
    }

    /// Adds the container to its domain's hosts file by these names, in place of an older record.
    pub fn hosts_add(
        &self,
        domain: &Domain,
        id: &ContainerId,
        names: &[&str],
        addresses: &[IpAddr],
    ) -> Result<()> {
        let store = self.store()?;
        let first = numbers(&store.plan, addresses)?.first().copied();
        let first = first.ok_or_else(|| Error::NoAddress(id.short().into()))?;
        store.claim(&domain.name, id, first)?;
        let mut record = store.record(first)?;
        let mut all = names.to_vec();
        all.push(id.short());
        let hosts = Hosts::new(&domain.dir);
        // A record of an earlier instance of the domain may belong to another container by now.
        let old = if hosts.is_of(record.hosts, id.short())? { record.hosts } else { 0 };
        record.hosts = hosts.set(old, &all, addresses)?;
        store.set_record(first, record)
    }

    /// Removes the container's names. [`leave`](Self::leave) does it, too.
    pub fn hosts_remove(&self, domain: &Domain, id: &ContainerId) -> Result<()> {
        let store = self.store()?;
        let Some(holding) = store.holding(id)? else { return Ok(()) };
        let Some(first) = holding.numbers.first().copied() else { return Ok(()) };
        let mut record = store.record(first)?;
        if record.container == id.to_bytes() && record.hosts != 0 {
            self.clear_name(&domain.name, record.hosts, id)?;
            record.hosts = 0;
            store.set_record(first, record)?;
        }
        Ok(())
    }

    fn clear_name(&self, domain: &Name, record: u32, id: &ContainerId) -> Result<()> {
        Hosts::new(&self.domain_dir(domain)).clear(record, id.short())
    }

    /// The domain's `/etc/hosts`. Its inode stays the same.
    pub fn hosts_file(&self, domain: &Domain) -> PathBuf {
        Hosts::new(&domain.dir).path().to_owned()
    }

    /// The domain's `/etc/resolv.conf`, brought up to date with the host's. Its inode stays the
    /// same.
    pub fn resolv_conf(&self, domain: &Domain) -> PathBuf {
        let path = domain.dir.join("resolv.conf");
        let _ = names::write_resolv_conf(&path); // an older text is better than no container
        path
    }
}

/// Tests whether this kernel loads the programs of address networking: the first error is about the
/// connections between containers, the second about abstract unix sockets.
pub fn supported() -> (Result<(), BpfError>, Result<(), BpfError>) {
    let constants = Constants {
        level: 2,
        pool: Ipv4Addr::new(10, 136, 0, 0),
        pool_count: 1 << 18,
        chunk: CHUNK,
        prefix6: [0xfd, 0, 0, 0, 0, 0],
        has_cookies: address::has_cookies(),
    };
    (address::supported(constants), abstract_unix::supported())
}

fn numbers(plan: &Plan, addresses: &[IpAddr]) -> Result<Vec<u32>> {
    let mut seen = BTreeSet::new();
    let mut numbers = Vec::new();
    for address in addresses {
        let number = plan.number(*address)?;
        if seen.insert(number) {
            numbers.push(number);
        }
    }
    Ok(numbers)
}

/// The addresses of a container in the stack of its domain, with its private loopback.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Own {
    addresses: Vec<IpAddr>,
    /// The first of its 64 addresses of 127.0.0.0/8.
    loop4: u32,
    loop6: Ipv6Addr,
}

/// Bits of a private loopback address that the program chooses.
const LOOP_BITS: u32 = 6;

impl Own {
    /// Whether this is one of them. An IPv4 address that is mapped into IPv6 counts as itself.
    pub fn has(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.addresses.contains(&address)
            || match address {
                IpAddr::V4(four) => u32::from(four) >> LOOP_BITS == self.loop4 >> LOOP_BITS,
                IpAddr::V6(six) => six == self.loop6,
            }
    }
}

const SYSFS_MAGIC: u64 = 0x6265_6572;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_addresses_are_those_of_a_container_and_its_private_loopback() {
        let of = |text: &str| text.parse::<IpAddr>().unwrap();
        let addresses = vec![of("10.136.0.5"), of("fd00::5")];
        let loop4 = u32::from(Ipv4Addr::new(127, 0, 1, 64));
        let own = Own { addresses, loop4, loop6: "fd00:0:0:ffff::5".parse().unwrap() };
        let its = ["10.136.0.5", "fd00::5", "127.0.1.65", "127.0.1.127", "::ffff:127.0.1.65"];
        assert!(its.into_iter().chain(["fd00:0:0:ffff::5"]).all(|text| own.has(of(text))));
        let others = ["10.136.0.6", "fd00::6", "127.0.1.63", "127.0.1.128", "127.0.0.1", "::1"];
        assert!(!others.into_iter().any(|text| own.has(of(text))));
    }
}
