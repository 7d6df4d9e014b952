//! Trust domains: creation and removal.
//!
//! A domain is a directory `RUN/domains/NAME`:
//! ```text
//! net    its network namespace, bind-mounted        hosts, resolv.conf   for its containers
//! sys    sysfs of that namespace, mounted           hold                 shared lock: in use
//! ready  JSON, written last: what was made
//! ```
//! It is there when `ready` names the namespace that is mounted at `net`. Anything else is the rest
//! of an interrupted creation or removal, or of the time before a reboot; creation clears it away
//! first.
//!
//! Locks, in this order: `RUN/domains/lock` (creation and removal, exclusive), `hold` of the domain
//! (shared by every [`Domain`], exclusive and without waiting for removal), the table of addresses.

use std::fs::{self, File, OpenOptions};
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use dormouse_bpf::address::{self, Programs};
use dormouse_kernel::mount::{self, MountAttr};
use dormouse_kernel::netlink::route::LOOPBACK;
use dormouse_kernel::nft;
use dormouse_model::Name;
use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::ground::{Domain, Network, new_stack};
use crate::link::{End, Link, Links};
use crate::names::{self, Hosts};
use crate::ready::{Ready, read_ready, write_ready};
use crate::settings::Pool;
use crate::stack;
use crate::store::{CHUNK, Plan, lock_file};

/// The device at the domain's end of the uplink.
pub(crate) const INSIDE: &str = "eth0";
/// The numbers of the hardware addresses at the ends of an uplink.
const HOST_END: u32 = 1;
const DOMAIN_END: u32 = 2;

fn chunk_bits(v4: bool) -> u8 {
    let host_bits = CHUNK.trailing_zeros() as u8;
    if v4 { 32 - host_bits } else { 128 - host_bits }
}

/// Both addresses of a number.
fn both(plan: &Plan, number: u32) -> [IpAddr; 2] {
    [plan.v4(number).into(), plan.v6(number).into()]
}

impl Network {
    /// The domain, if it is complete, held against removal.
    pub fn find_domain(&self, name: &Name) -> Result<Option<Domain>> {
        let dir = self.domain_dir(name);
        let hold = match OpenOptions::new().read(true).open(dir.join("hold")) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            other => other.map_err(Error::file("open", dir.join("hold")))?,
        };
        rustix::fs::flock(&hold, FlockOperation::LockShared)
            .map_err(Error::errno("hold the domain", "flock"))?;
        let Some((ready, netns)) = read_ready(&dir)? else { return Ok(None) };
        let sys = open_path(&dir.join("sys"))?;
        protect_sys(&sys)?;
        Ok(Some(Domain { name: name.clone(), netns, sys, ready, dir, hold }))
    }

    /// Creates the domain over the remains of an earlier attempt. The caller holds the lock.
    pub(crate) fn create_domain(&self, name: &Name, rules: &str) -> Result<Domain> {
        self.notice_reboot()?;
        let dir = self.domain_dir(name);
        let uplink = self.uplink(name);
        self.clear_domain(name)?;
        let (plan, chunks) = {
            let store = self.store()?;
            let mut chunks = store.chunks_of(name)?;
            if chunks.is_empty() {
                chunks.push(store.claim_chunk(name)?);
            }
            (store.plan, chunks)
        };
        let mut host = Links::open()?;
        let links = host.all()?;
        let default = self.check_pool(plan.pool, &mut host, &links)?;
        let mtu = links.iter().find(|l| Some(l.index) == default).map_or(1500, |l| l.mtu);

        fs::create_dir_all(dir.join("sys")).map_err(Error::file("create", &dir))?;
        let net = dir.join("net");
        let netns = new_stack()?;
        let cookie = stack::inside(netns.as_fd(), || {
            prepare_stack(&plan)?;
            mount_sys(&dir.join("sys"))?;
            bind_net(&net)?;
            if !rules.is_empty() {
                let step = "give a domain its first rules";
                nft::apply(rules).map_err(|e| Error::Nft { step, message: e.to_string() })?;
            }
            stack::cookie()
        })?;

        let (here, there) =
            (both(&plan, chunks[0] * CHUNK + 1), both(&plan, chunks[0] * CHUNK + 2));
        let ends = [(&*uplink, HOST_END), (INSIDE, DOMAIN_END)];
        let [outer, inner] = ends.map(|(name, hardware)| End { name, index: 0, hardware });
        host.add_pair(&outer, &inner, mtu, netns.as_fd())?;
        let index = host.find(&uplink)?.map_or(0, |l| l.index);
        host.label(index, &self.label())?;
        prepare_host(&uplink)?;
        host.up(index)?;
        for (own, other) in here.into_iter().zip(there) {
            host.add_address(index, own)?;
            host.add_neighbour(index, other, DOMAIN_END)?;
        }
        add_chunks_of_host(&mut host, index, &plan, chunks[0], &chunks)?;
        // In parallel: nft(8) is a process, and the programs take long to load.
        let programs = std::thread::scope(|scope| {
            let rules = scope.spawn(|| self.lead(&plan, &uplink));
            let programs = self.attach();
            rules.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            programs
        })?;
        stack::inside(netns.as_fd(), || {
            let mut links = Links::open()?;
            let index = links.find(INSIDE)?.map_or(0, |l| l.index);
            links.up(index)?;
            for (own, other) in there.into_iter().zip(here) {
                links.add_address(index, own)?;
                links.add_neighbour(index, other, HOST_END)?;
            }
            add_chunks_inside(&mut links, &plan, chunks[0], &chunks)?;
            for via in here {
                links.add_neighbour_route(via, index)?;
                let all = if via.is_ipv4() { [0; 4].into() } else { IpAddr::from([0u8; 16]) };
                links.add_via(all, 0, via, index)?;
            }
            if !self.is_without(address::ARRIVE) {
                programs.steer(&[1, index])?;
            }
            Ok(())
        })?;
        programs.open_domain(cookie)?;
        Hosts::new(&dir).create(&here)?;
        names::write_resolv_conf(&dir.join("resolv.conf"))?;
        lock_file(&dir.join("hold"))?;
        let inode = File::from(netns).metadata().map_err(Error::file("look at", &net))?.ino();
        let mut ready = Ready {
            version: 1,
            netns_inode: inode,
            netns_cookie: cookie,
            uplink,
            chunks,
            trace: (0, 0),
        };
        ready.note(programs.trace()?);
        // ORDER: last: the file marks all of the above as complete.
        write_ready(&dir, &ready)?;
        self.find_domain(name)?.ok_or_else(|| Error::Corrupt {
            path: dir,
            message: "gone as soon as it was made".into(),
        })
    }

    /// The label of this instance's uplinks. LIMIT: a label has 255 bytes.
    fn label(&self) -> String {
        let run = self.run.to_string_lossy();
        run.char_indices().take_while(|(at, c)| at + c.len_utf8() <= 255).map(|(_, c)| c).collect()
    }

    /// Refuses a pool that overlaps a route of the host, to a network or to the domains of another
    /// instance. The other instance would lose its routes to this one. Returns the link of the
    /// default route.
    fn check_pool(&self, pool: Pool, host: &mut Links, links: &[Link]) -> Result<Option<u32>> {
        let (destinations, default) = host.destinations()?;
        let ours: Vec<String> = self.domain_names()?.iter().map(|name| self.uplink(name)).collect();
        for d in destinations.iter().filter(|d| pool.overlaps(d.first, d.bits)) {
            let link = links.iter().find(|l| Some(l.index) == d.link);
            let Some(uplink) = link.filter(|l| l.name.starts_with("dm")) else {
                let route = format!("{}/{}", d.first, d.bits);
                return Err(Error::PoolOverlaps { pool: pool.to_string(), route });
            };
            // The uplink of an instance without its directory leads nowhere and does not count.
            let other = match &uplink.alias {
                _ if ours.contains(&uplink.name) => continue,
                Some(alias) if *alias == self.label() || !Path::new(alias).exists() => continue,
                Some(alias) => alias.clone(),
                None => "an older version".to_owned(),
            };
            let (pool, uplink) = (pool.to_string(), uplink.name.clone());
            return Err(Error::PoolOfAnother { pool, other, uplink });
        }
        Ok(default)
    }

    /// Checks the pool before the first address of an instance is allocated, which fixes the pool.
    pub(crate) fn check_first_pool(&self) -> Result<()> {
        let mut host = Links::open()?;
        let links = host.all()?;
        self.check_pool(self.settings.pool, &mut host, &links).map(drop)
    }

    /// Adds an uplink to the host's rules.
    fn lead(&self, plan: &Plan, uplink: &str) -> Result<()> {
        let mut uplinks = self.uplinks()?;
        if !uplinks.is_empty() && self.table().exists() {
            return self.table().add_uplink(uplink);
        }
        uplinks.push(uplink.to_owned());
        self.table().make(plan, &uplinks)
    }

    /// Adds the routes of chunks that the domain has claimed since it was created.
    pub(crate) fn add_chunk_routes(&self, domain: &Domain, plan: &Plan, chunk: u32) -> Result<()> {
        let _lock = self.lock_domains()?;
        let Some((mut ready, _)) = read_ready(&domain.dir)? else {
            return Err(Error::Corrupt { path: domain.dir.clone(), message: "gone".into() });
        };
        if ready.chunks.contains(&chunk) {
            return Ok(());
        }
        let first = ready.chunks.first().copied().unwrap_or(chunk);
        stack::inside(domain.netns.as_fd(), || {
            add_chunks_inside(&mut Links::open()?, plan, first, &[chunk])
        })?;
        let mut host = Links::open()?;
        let index = host.find(&ready.uplink)?.map_or(0, |l| l.index);
        add_chunks_of_host(&mut host, index, plan, first, &[chunk])?;
        ready.chunks.push(chunk);
        write_ready(&domain.dir, &ready)
    }

    /// Removes the parts of a domain, complete or not. The caller holds the lock.
    pub(crate) fn clear_domain(&self, name: &Name) -> Result<()> {
        let dir = self.domain_dir(name);
        // ORDER: from now on the domain is not taken for complete.
        remove_file(&dir.join("ready"))?;
        let mut host = Links::open()?;
        if let Some(link) = host.find(&self.uplink(name))? {
            host.remove(link.index)?;
        }
        unmount(&dir.join("sys"))?;
        unmount(&dir.join("net"))?;
        match fs::remove_dir_all(&dir) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::file("remove", dir)(e))
            }
            _ => Ok(()),
        }
    }

    /// Clears `RUN` after a reboot, because it may be on a disk.
    fn notice_reboot(&self) -> Result<()> {
        let path = self.run.join("domains/boot_id");
        let boot =
            dormouse_kernel::proc::boot_id().map_err(|e| Error::Step("read the boot id", e))?;
        match fs::read_to_string(&path) {
            Ok(old) if old.trim() == boot.trim() => return Ok(()),
            _ => {}
        }
        self.table().forget()?;
        fs::write(&path, boot).map_err(Error::file("write", path))
    }

    /// Removes the domain if no container is in it and no process holds it. Returns whether it did.
    pub(crate) fn remove_domain(&self, name: &Name, programs: Option<&Programs>) -> Result<bool> {
        let dir = self.domain_dir(name);
        if let Ok(hold) = File::open(dir.join("hold"))
            && rustix::fs::flock(&hold, FlockOperation::NonBlockingLockExclusive).is_err()
        {
            return Ok(false);
        }
        let ready = read_ready(&dir)?.map(|(ready, _)| ready);
        if let (Some(ready), Some(programs)) = (&ready, programs) {
            if programs.identities()?.is_used(ready.netns_cookie)? || self.has_pairs(name)? {
                return Ok(false);
            }
            programs.close_domain(ready.netns_cookie)?;
            // The table may have been flushed by the operator: then the rule is removed already.
            let _ = self.table().remove_uplink(&ready.uplink);
        }
        self.clear_domain(name)?;
        self.store()?.release_chunks(name)?;
        Ok(true)
    }
}

/// Unmounts everything from a mount point, which may be missing.
pub(crate) fn unmount(path: &Path) -> Result<()> {
    loop {
        match mount::detach(path) {
            Ok(()) => {}
            Err(e) if is_absent(e.errno()) => return Ok(()),
            Err(e) => return Err(Error::Step("unmount", e)),
        }
    }
}

/// EINVAL: not a mount point; ENOENT: no such file.
fn is_absent(errno: i32) -> bool {
    [Errno::INVAL, Errno::NOENT].iter().any(|e| e.raw_os_error() == errno)
}

/// Opens a directory as O_PATH, only to be mounted from.
pub(crate) fn open_path(path: &Path) -> Result<OwnedFd> {
    use rustix::fs::{Mode, OFlags};
    rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| Error::file("open", path)(e.into()))
}

/// Makes a sysfs mount read-only. Earlier versions mounted sysfs writable.
pub(crate) fn protect_sys(sys: &OwnedFd) -> Result<()> {
    let flags = rustix::fs::fstatvfs(sys).map_err(Error::errno("look at a sysfs", "fstatvfs"))?;
    if flags.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY)
        || dormouse_kernel::weakened("read-only-sys")
    {
        return Ok(());
    }
    mount::set_attr(sys.as_fd(), false, MountAttr::RDONLY, MountAttr::empty())
        .map_err(|e| Error::Step("make a sysfs read-only", e))
}

fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::file("remove", path)(e)),
        _ => Ok(()),
    }
}

/// Sets the stack's own settings, before any packet.
fn prepare_stack(plan: &Plan) -> Result<()> {
    // Containers have no capability over this stack: these settings allow them operations that root
    // of a machine may do by capability.
    stack::sysctl("net/ipv4/ip_unprivileged_port_start", "0")?;
    // LIMIT: the kernel takes no larger group id: ids above are refused a ping.
    stack::sysctl("net/ipv4/ping_group_range", "0 2147483647")?;
    stack::sysctl_if_there("net/unix/max_dgram_qlen", "512"); // as systemd sets it on a host
    // Added addresses and IPv6 AnyIP: the bind hook refuses what is not the container's own.
    stack::sysctl_if_there("net/ipv6/ip_nonlocal_bind", "1");
    for which in ["all", "default", "lo"] {
        stack::sysctl_if_there(&format!("net/ipv6/conf/{which}/disable_ipv6"), "0");
        stack::sysctl_if_there(&format!("net/ipv6/conf/{which}/accept_ra"), "0");
        stack::sysctl_if_there(&format!("net/ipv6/conf/{which}/accept_dad"), "0");
        stack::sysctl_if_there(&format!("net/ipv4/conf/{which}/rp_filter"), "0");
    }
    let mut links = Links::open()?;
    links.up(LOOPBACK)?;
    // Without a preferred source a packet to a private loopback address comes from that address.
    for half in [[127, 0, 0, 0], [127, 128, 0, 0]] {
        links.add_local(half.into(), 9, None)?;
    }
    links.add_local(plan.loop6(0).into(), 64, None)?;
    Ok(())
}

/// Chunks are the domain's own addresses. `first` is the chunk that its uplink's ends are in.
fn add_chunks_inside(links: &mut Links, plan: &Plan, first: u32, chunks: &[u32]) -> Result<()> {
    for chunk in chunks {
        for to in both(plan, chunk * CHUNK) {
            // Pings, which have no hook for their source, come from the domain's own address.
            let source = Some(plan.v4(first * CHUNK + 2).into());
            links.add_local(to, chunk_bits(to.is_ipv4()), source)?;
        }
    }
    Ok(())
}

/// Routes chunks to the domain through its end of the uplink.
fn add_chunks_of_host(
    host: &mut Links,
    index: u32,
    plan: &Plan,
    first: u32,
    chunks: &[u32],
) -> Result<()> {
    let there = both(plan, first * CHUNK + 2);
    for chunk in chunks {
        for (to, via) in both(plan, chunk * CHUNK).into_iter().zip(there) {
            host.add_via(to, chunk_bits(to.is_ipv4()), via, index)?;
        }
    }
    Ok(())
}

/// Makes the host a router.
fn prepare_host(uplink: &str) -> Result<()> {
    stack::sysctl("net/ipv4/ip_forward", "1")?;
    // Published ports on 127.0.0.1; the table drops loopback addresses that come in.
    stack::sysctl(&format!("net/ipv4/conf/{uplink}/route_localnet"), "1")?;
    stack::sysctl_if_there(&format!("net/ipv6/conf/{uplink}/disable_ipv6"), "0");
    stack::sysctl_if_there(&format!("net/ipv6/conf/{uplink}/accept_ra"), "0");
    stack::sysctl_if_there(&format!("net/ipv6/conf/{uplink}/accept_dad"), "0");
    let forwarding = Path::new("/proc/sys/net/ipv6/conf/all/forwarding");
    if fs::read_to_string(forwarding).is_ok_and(|v| v.trim() == "0") {
        // ORDER: a router ignores router advertisements unless accept_ra is 2, and would lose the
        // default route that an advertisement gave it.
        if let Ok(devices) = fs::read_dir("/proc/sys/net/ipv6/conf") {
            for device in devices.flatten() {
                let path = device.path().join("accept_ra");
                if fs::read_to_string(&path).is_ok_and(|v| v.trim() == "1") {
                    let _ = fs::write(path, "2"); // the device may have gone
                }
            }
        }
        stack::sysctl_if_there("net/ipv6/conf/all/forwarding", "1");
    }
    Ok(())
}

/// Keeps this thread's stack alive, until the path is unmounted.
pub(crate) fn bind_net(path: &Path) -> Result<()> {
    unmount(path)?; // of an interrupted command
    File::create(path).map_err(Error::file("create", path))?;
    rustix::mount::mount_bind("/proc/thread-self/ns/net", path)
        .map_err(Error::errno("keep the network namespace", "mount"))
}

/// Mounts the sysfs of this thread's stack read-only, so that no program of the host's root changes
/// settings through the mount.
pub(crate) fn mount_sys(path: &Path) -> Result<()> {
    let step = |e| Error::Step("mount the sysfs of the network namespace", e);
    let context = mount::FsContext::open("sysfs").map_err(step)?;
    let mut attr = MountAttr::NOSUID | MountAttr::NODEV | MountAttr::NOEXEC;
    attr.set(MountAttr::RDONLY, !dormouse_kernel::weakened("read-only-sys"));
    let sys = context.create(attr).map_err(step)?;
    mount::attach(sys.as_fd(), rustix::fs::CWD, path).map_err(step)
}
