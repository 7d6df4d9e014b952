//! Network stacks that are private to some processes: how one is read, and how a copy is made.
//!
//! Configuration that a [`Net`] cannot hold is found without a list of all that a stack may have. A
//! copy is made from the record, and everything that the kernel reports for only one of the two is
//! a difference. So a device of a kind without a record, a tunnel of a route, or a limit of a queue
//! is refused by its name.
//!
//! A pair of devices may have its ends in two stacks. While one of them is read, the other end is
//! in an empty stack in place of the other one. When both are restored, the first of them makes the
//! pair.
//!
//! LIMIT: the kernel is queried for links, addresses, routes, routing rules, queueing disciplines,
//! permanent neighbours, packet filters and settings. IPsec policies, IPVS rules and tracked
//! connections (conntrack) are not queried. A route that the kernel makes for an address is made
//! again, even if a process had removed it.

mod filter;
mod link;
mod message;
mod route;
mod setting;

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use dormouse_kernel::call::CloneFlags;
use dormouse_kernel::error::Result;
use dormouse_kernel::netlink::{Message, attributes, u16_at, u32_at};
use dormouse_kernel::{CallError, Errno, process};
use dormouse_record::check::link::{LOOPBACK, far_end, is_among};
use dormouse_record::check::setting::link_of;
use dormouse_record::{Elsewhere, Link, LinkKind, Net};

use message::{answer, list, missing};
use route::{ADDRESSES, ROUTES, RULES};

use crate::stack::inside_of;

/// How long addresses may take; those of a device that is down never become usable.
const SETTLE_MS: u32 = 200;

/// The kernel's report of a stack: the name of an entry, its contents, and whether the kernel may
/// add one by itself at any time.
type Reported = Vec<(String, Vec<u8>, bool)>;

/// The record of the calling thread's stack, or the name of something that a record cannot hold.
/// Another thread makes a copy to compare. `others` are stacks in which a pair may have its other
/// end.
pub fn look(others: &[(Elsewhere, OwnedFd)]) -> Result<Result<Net, String>, Errno> {
    look_here(others, || Ok(())).map_err(|e| Errno::from_raw_os_error(e.errno()))
}

/// `begin` is called in the new stack first.
fn look_here(
    others: &[(Elsewhere, OwnedFd)],
    begin: impl FnOnce() -> Result<()> + Send,
) -> Result<Result<Net, String>> {
    settle()?;
    let stack = Stack::look()?;
    let others = match stack.links.iter().any(|link| link.elsewhere.is_some()) {
        true => named(others)?,
        false => HashMap::new(),
    };
    // A separate thread creates a new stack, which is removed when the thread ends.
    in_thread(|| {
        process::unshare(CloneFlags::NEWNET)?;
        begin()?;
        stack.record(&others)
    })
}

fn in_thread<T: Send>(act: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let failed = || CallError::new("clone3", "a thread in a new stack".into(), libc::EIO);
    std::thread::scope(|scope| scope.spawn(act).join().unwrap_or_else(|_| Err(failed())))
}

/// A new stack.
fn empty() -> Result<OwnedFd> {
    in_thread(|| {
        process::unshare(CloneFlags::NEWNET)?;
        let path = "/proc/thread-self/ns/net";
        let failed = |e: std::io::Error| {
            CallError::new("openat", format!("{path:?}"), e.raw_os_error().unwrap_or(libc::EIO))
        };
        Ok(File::open(path).map_err(failed)?.into())
    })
}

/// Stacks by the ids that the calling thread's stack has for them (ip-netns(8), list-id); those
/// without an id are left out.
fn named(stacks: &[(Elsewhere, OwnedFd)]) -> Result<HashMap<u32, Elsewhere>> {
    const GET_NUMBER: u16 = 90;
    /// `NETNSA_*`.
    const NUMBER: u16 = 1;
    const DESCRIPTOR: u16 = 3;
    let mut all = HashMap::new();
    for (stack, netns) in stacks {
        let descriptor = netns.as_raw_fd().to_ne_bytes();
        let reported = answer(GET_NUMBER, &Message::new(&[0]).with(DESCRIPTOR, &descriptor))?;
        let found = attributes(reported.get(4..).unwrap_or_default()).unwrap_or_default();
        let number = found.iter().find(|(kind, _)| *kind == NUMBER);
        let number = number.and_then(|(_, value)| u32_at(value, 0));
        all.extend(number.filter(|number| (*number as i32) >= 0).map(|number| (number, *stack)));
    }
    Ok(all)
}

/// The error of a thread that cannot enter a stack.
fn not_entered(e: Errno) -> CallError {
    CallError::new("setns", "CLONE_NEWNET".into(), e.raw_os_error())
}

/// A stack to be configured as a record: new, except that the loopback device may be up.
pub struct Site<'a> {
    /// Its identity in the checkpoint.
    pub stack: Elsewhere,
    /// Its network namespace.
    pub netns: OwnedFd,
    /// Its record.
    pub net: &'a Net,
}

/// Configures stacks as their records; the error is the first that cannot be, and the cause.
///
/// ORDER: step by step for all of them. Defaults for new devices of a stack are set before another
/// stack makes an end of a pair in it, and both ends are up before there are routes over them.
pub fn build(sites: &[Site<'_>]) -> Result<(), (Elsewhere, Unlike)> {
    for site in sites {
        site.step(|| {
            let is_of_stack = |(path, _): &&(String, String)| !is_of_link(path);
            let net = site.net;
            setting::adopt(net.inherited.iter().filter(is_of_stack)).map_err(Unlike::What)?;
            setting::make(net.settings.iter().filter(is_of_stack)).map_err(Unlike::What)?;
            Ok(link::set_loopback(site.net.up)?)
        })?;
    }
    let mut made = HashSet::new();
    for site in sites {
        site.step(|| Ok(make_devices(site, sites, &mut made)?))?;
    }
    for site in sites {
        site.step(|| {
            let of_links = |(path, _): &&(String, String)| is_of_link(path);
            let net = site.net;
            setting::adopt(net.inherited.iter().filter(of_links)).map_err(Unlike::What)?;
            setting::make(net.settings.iter().filter(of_links)).map_err(Unlike::What)?;
            Ok(link::raise(&site.net.links)?)
        })?;
    }
    for site in sites {
        site.step(|| {
            ADDRESSES.make_all(&site.net.addresses)?;
            ROUTES.make_all(&site.net.routes)?;
            RULES.make_all(&site.net.rules)?;
            filter::make(&site.net.filters).map_err(Unlike::What)?;
            Ok(settle()?)
        })?;
    }
    Ok(())
}

/// Why a stack cannot be configured as its record.
#[derive(Debug)]
pub enum Unlike {
    /// Something that it cannot have.
    What(String),
    /// An error of the kernel.
    Refused(CallError),
}

impl From<CallError> for Unlike {
    fn from(e: CallError) -> Self {
        Self::Refused(e)
    }
}

impl Site<'_> {
    fn step(
        &self,
        act: impl FnOnce() -> Result<(), Unlike> + Send,
    ) -> Result<(), (Elsewhere, Unlike)> {
        let done = inside_of(&self.netns, || Ok(act())).map_err(not_entered);
        done.map_err(Unlike::Refused).flatten().map_err(|why| (self.stack, why))
    }
}

/// Makes the devices of one stack, and the connected ends in others; `made` are those.
fn make_devices(
    site: &Site<'_>,
    sites: &[Site<'_>],
    made: &mut HashSet<(Elsewhere, u32)>,
) -> Result<()> {
    link::make(&site.net.links, |link, elsewhere| {
        if made.contains(&(site.stack, link.number)) {
            return Ok(None);
        }
        let other = sites.iter().find(|other| other.stack == elsewhere);
        let other = other.ok_or_else(|| missing(link.number))?;
        let far = far_end(link, site.stack, &other.net.links);
        let far = far.ok_or_else(|| missing(link.number))?;
        made.insert((elsewhere, far.number));
        Ok(Some(link::Far { record: far.clone(), stack: &other.netns }))
    })
}

fn is_of_link(path: &str) -> bool {
    link_of(path).is_some()
}

/// The kernel's report of a stack.
struct Stack {
    links: Vec<link::Seen>,
    addresses: Vec<route::Seen>,
    routes: Vec<route::Seen>,
    rules: Vec<route::Seen>,
    settings: setting::Settings,
    filters: Result<String, String>,
    /// Entries without a record.
    other: Reported,
}

impl Stack {
    /// Reads the calling thread's stack.
    fn look() -> Result<Self> {
        let links = link::all()?;
        Ok(Self {
            addresses: ADDRESSES.all()?,
            routes: ROUTES.all()?,
            rules: RULES.all()?,
            settings: setting::all(links.iter().map(|link| &*link.name)),
            filters: filter::all(),
            other: other(&links)?,
            links,
        })
    }

    /// Its record. The calling thread's stack is new, and becomes a copy.
    fn record(&self, others: &HashMap<u32, Elsewhere>) -> Result<Result<Net, String>> {
        let filters = match &self.filters {
            Ok(filters) => filters.clone(),
            Err(what) => return Ok(Err(what.clone())),
        };
        let new = Self::look()?;
        let is_up = |link: &link::Seen| link.number == LOOPBACK && link.is_up();
        let mut net = Net {
            up: self.links.iter().any(is_up),
            filters,
            inherited: setting::inherited(&new.settings),
            ..Net::default()
        };
        let is_new = |link: &&link::Seen| {
            let is_it =
                |other: &link::Seen| (other.number, &other.name) == (link.number, &link.name);
            !new.links.iter().any(is_it)
        };
        for link in self.links.iter().filter(is_new) {
            match link.record(others) {
                Ok(record) => net.links.push(record),
                Err(what) => return Ok(Err(what)),
            }
        }
        let alone = net.links.iter().find(|link| !is_among(link, &net.links));
        if let Some(link) = alone {
            return Ok(Err(format!("with a link {} that depends on a missing one", link.name)));
        }
        let of_links = |(path, _): &(String, String)| is_of_link(path);
        let mut settings = setting::changed(&self.settings, &new.settings);
        settings.retain(|one| !of_links(one));
        if let Err(what) = setting::make(settings.iter()) {
            return Ok(Err(what));
        }
        // The loopback device may have received defaults for new devices (ip-sysctl, conf/default).
        let mut more = setting::changed(&self.settings, &setting::all(std::iter::empty()));
        more.retain(|one| !of_links(one));
        if let Err(what) = setting::make(more.iter()) {
            return Ok(Err(what));
        }
        settings.extend(more);
        link::set_loopback(net.up)?;
        let stand_ins = stand_ins(&net.links)?;
        link::make(&net.links, |link, elsewhere| {
            let stack = stand_ins.get(&elsewhere).ok_or_else(|| missing(link.number))?;
            Ok(Some(link::Far { record: substitute(link), stack }))
        })?;
        // Options of the devices that differ from new ones.
        let like = link::all()?;
        for link in &mut net.links {
            let LinkKind::Bridge { options } = &mut link.kind else { continue };
            let of = |all: &[link::Seen]| all.iter().position(|one| one.number == link.number);
            if let (Some(it), Some(new)) = (of(&self.links), of(&like)) {
                *options = self.links[it].options_unlike(&like[new]);
            }
            link::set_options(link.number, &link.kind)?;
        }
        if !net.links.is_empty() {
            let like = setting::all(like.iter().map(|link| &*link.name));
            let is_new = |(path, _): &(String, String)| !new.settings.contains_key(path);
            net.inherited.extend(setting::inherited(&like).into_iter().filter(is_new));
            let mut more = setting::changed(&self.settings, &like);
            more.retain(of_links);
            if let Err(what) = setting::make(more.iter()) {
                return Ok(Err(what));
            }
            settings.extend(more);
        }
        link::raise(&net.links)?;
        for (stack, netns) in &stand_ins {
            let is_there = |link: &&Link| elsewhere(link) == Some(*stack);
            let there: Vec<Link> = net.links.iter().filter(is_there).map(substitute).collect();
            inside_of(netns, || Ok(link::raise(&there))).map_err(not_entered)??;
        }
        net.addresses = route::missing(&self.addresses, &ADDRESSES.all()?);
        ADDRESSES.make_all(&net.addresses)?;
        net.routes = route::missing(&self.routes, &ROUTES.all()?);
        if ROUTES.make_all(&net.routes).is_err() {
            return Ok(Err("with a route that cannot be made again".into()));
        }
        net.rules = route::missing(&self.rules, &RULES.all()?);
        RULES.make_all(&net.rules)?;
        if let Err(what) = filter::make(&net.filters) {
            return Ok(Err(what));
        }
        settle()?;
        net.settings = settings;
        let like = Self::look()?;
        Ok(self.is_like(&like).map(|()| net))
    }

    /// Compares a copy with it; the error is what it has more, or less.
    fn is_like(&self, like: &Self) -> Result<(), String> {
        let unlike = self.settings.iter().find(|(path, v)| like.settings.get(*path) != Some(v));
        if let Some((path, _)) = unlike {
            return Err(format!("with the setting net/{path}, which cannot be made again"));
        }
        let (reported, other) = (self.reported(), like.reported());
        let lacks = |one: &Reported, other: &Reported| {
            let is_there = |reported: &Vec<u8>| other.iter().any(|(_, it, _)| it == reported);
            let missing =
                one.iter().find(|(_, reported, may_come)| !may_come && !is_there(reported));
            missing.map(|(name, ..)| name.clone())
        };
        if let Some(name) = lacks(&reported, &other) {
            return Err(format!("with {name}"));
        }
        if let Some(name) = lacks(&other, &reported) {
            return Err(format!("without {name}"));
        }
        match self.filters == like.filters {
            true => Ok(()),
            false => Err("with packet filters that cannot be made again as they are".into()),
        }
    }

    fn reported(&self) -> Reported {
        let links = self.links.iter();
        let links =
            links.map(|link| (format!("a link {}", link.name), link.reported.clone(), false));
        let routes = [&self.addresses, &self.routes, &self.rules].into_iter().flatten();
        let routes = routes.map(|it| (it.name.clone(), it.reported.clone(), it.may_come));
        links.chain(routes).chain(self.other.iter().cloned()).collect()
    }
}

/// The stack of the other end of a pair in two stacks.
fn elsewhere(link: &Link) -> Option<Elsewhere> {
    match link.kind {
        LinkKind::Veth { elsewhere, .. } => elsewhere,
        _ => None,
    }
}

/// A new stack for each one that devices lead to.
fn stand_ins(links: &[Link]) -> Result<HashMap<Elsewhere, OwnedFd>> {
    let all: HashSet<Elsewhere> = links.iter().filter_map(elsewhere).collect();
    all.into_iter().map(|stack| Ok((stack, empty()?))).collect()
}

/// A device in place of the other end of a pair while a stack is read. Its address differs, since
/// each would find the other's address to be a duplicate of its own (RFC 4862, 5.4).
fn substitute(link: &Link) -> Link {
    let number = match link.kind {
        LinkKind::Veth { peer, .. } => peer,
        _ => link.number,
    };
    let mut far = Link { number, name: format!("far{number}"), master: None, ..link.clone() };
    far.flags = libc::IFF_UP as u32;
    far.address.0.last_mut().into_iter().for_each(|last| *last ^= 1);
    far
}

/// Waits until addresses are usable: one of IPv6 is tentative for a moment (ip-address(8)), even
/// without duplicate address detection, and has no route before.
fn settle() -> Result<()> {
    const TENTATIVE: u8 = 0x40;
    const GET_ADDRESS: u16 = 22;
    for _ in 0..SETTLE_MS {
        let mut is_tentative = false;
        list(GET_ADDRESS, &[0; 8], |body| {
            let is_of_loopback = body.get(4..8)? == LOOPBACK.to_ne_bytes();
            is_tentative |= body.get(2)? & TENTATIVE != 0 && is_of_loopback;
            Some(())
        })?;
        if !is_tentative {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Everything else of which a stack may have more than a new one.
fn other(links: &[link::Seen]) -> Result<Reported> {
    const GET_DISCIPLINE: u16 = 38;
    const GET_NEIGHBOUR: u16 = 30;
    const BRIDGE: u8 = 7;
    let mut all = Reported::new();
    // struct tcmsg: family, device, handle, parent, and how many use it.
    list(GET_DISCIPLINE, &[0; 20], |body| {
        let reported = [body.get(..16)?, &chosen(body, 20, &[1, 2])?].concat();
        all.push(("a queueing discipline".into(), reported, false));
        Some(())
    })?;
    for (family, name) in [(0, "a neighbour"), (BRIDGE, "a neighbour of a bridge")] {
        let mut head = [0; 12];
        head[0] = family;
        // struct ndmsg: family, device, state, flags, kind.
        let asked = list(GET_NEIGHBOUR, &head, |body| {
            const STAYS: u16 = 0x80;
            const ADDRESS: u16 = 2;
            let found = attributes(body.get(12..)?)?;
            let address = found.iter().find(|(kind, _)| *kind == ADDRESS).map(|(_, value)| *value);
            let is_of_link = |address: &[u8]| links.iter().any(|link| link.address == address);
            // A bridge has the addresses of all devices, and the groups that they have joined.
            let comes =
                |address: &[u8]| address.first().is_some_and(|b| b & 1 != 0) || is_of_link(address);
            let by_itself = family == BRIDGE && address.is_some_and(comes);
            if u16_at(body, 8)? & STAYS != 0 && !by_itself {
                let reported = [body.get(..12)?, &chosen(body, 12, &[1, 2, 5])?].concat();
                all.push((name.into(), reported, false));
            }
            Some(())
        });
        match asked {
            // A kernel without bridges.
            Err(_) if family == BRIDGE => {}
            other => other?,
        }
    }
    all.extend(filter::tables().into_iter().map(|name| (name.clone(), name.into_bytes(), false)));
    all.extend(filter::old_tables().into_iter().map(|name| (name, Vec::new(), false)));
    Ok(all)
}

/// Some of the attributes of an answer.
fn chosen(body: &[u8], head: usize, kinds: &[u16]) -> Option<Vec<u8>> {
    let mut reported = Vec::new();
    for (kind, value) in attributes(body.get(head..)?)? {
        if kinds.contains(&kind) {
            reported.extend(kind.to_ne_bytes());
            reported.extend(value);
        }
    }
    Some(reported)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dormouse_record::{Bytes, Link, Said};

    /// Calls `act` in a new stack.
    fn in_new<T: Send>(act: impl FnOnce() -> T + Send) -> Option<T> {
        std::thread::scope(|scope| {
            let done = scope.spawn(|| process::unshare(CloneFlags::NEWNET).ok().map(|()| act()));
            done.join().unwrap()
        })
    }

    fn pair() -> Vec<Link> {
        let one = |number: u32, peer, name: &str| Link {
            number,
            name: name.into(),
            kind: LinkKind::Veth { peer, elsewhere: None },
            address: Bytes(vec![2, 0, 0, 0, 0, number as u8]),
            mtu: 1400,
            queue: 500,
            flags: 0x1001,
            master: None,
        };
        // Number 2 and those after it may be the kernel's tunnels.
        vec![one(70, 90, "a.1"), one(90, 70, "b-2")]
    }

    fn said(head: &[u8], attributes: &[(u16, &[u8])]) -> Said {
        let attributes = attributes.iter().map(|(kind, value)| (*kind, Bytes(value.to_vec())));
        Said { head: Bytes(head.to_vec()), attributes: attributes.collect() }
    }

    #[test]
    fn a_stack_is_copied_from_its_record_or_refused_by_name() {
        let inet = libc::AF_INET as u8;
        let ip = [10, 1, 2, 3];
        let address = said(&[inet, 24, 0, 0, 70, 0, 0, 0], &[(1, &ip), (2, &ip), (3, b"a.1\0")]);
        let via = [(1, &[10, 9, 0, 0][..]), (4, &[70, 0, 0, 0]), (5, &[10, 1, 2, 9])];
        let route = said(&[inet, 16, 0, 0, 254, 4, 0, 1, 0, 0, 0, 0], &via);
        let net = Net {
            up: true,
            links: pair(),
            addresses: vec![address],
            routes: vec![route],
            settings: vec![
                ("ipv4/ip_forward".into(), "1".into()),
                // Link-local addresses appear asynchronously.
                ("ipv6/conf/default/disable_ipv6".into(), "1".into()),
                ("ipv4/conf/b-2/rp_filter".into(), "2".into()),
            ],
            ..Net::default()
        };
        let build = |net: &Net| {
            let netns = File::open("/proc/thread-self/ns/net").unwrap().into();
            build(&[Site { stack: Elsewhere::Container, netns, net }])
        };
        let look = || look(&[]).unwrap();
        let looked = in_new(|| {
            let new = look().unwrap();
            build(&net).unwrap();
            let like = look().unwrap();
            // A route over two next hops.
            let hop = |last| [16, 0, 0, 0, 70, 0, 0, 0, 8, 0, 5, 0, 10, 1, 2, last];
            let ways = [hop(8), hop(9)].concat();
            let body = Message::new(&[inet, 8, 0, 0, 254, 4, 0, 1, 0, 0, 0, 0]);
            let body = body.with(1, &[20, 0, 0, 0]).with(9, &ways);
            message::request(24, dormouse_kernel::netlink::NEW, &body).unwrap();
            let ways = look().unwrap();
            (new, like, ways)
        });
        let Some((new, like, ways)) = looked else {
            return eprintln!("SKIPPED: no network namespace can be made");
        };
        assert!(new.is_new(), "{new:?}");
        assert!(like.up && like.links == net.links, "{like:?}");
        assert_eq!((like.addresses.len(), like.routes.len(), like.rules.len()), (1, 1, 0));
        // The host may forward packets, too.
        let has = |one| like.settings.contains(one) || like.inherited.contains(one);
        assert!(net.settings.iter().all(has), "{like:?}");
        assert_eq!(ways.routes.len(), 2);
        // Its record makes a copy.
        let again = in_new(|| {
            build(&ways).unwrap();
            look().unwrap()
        });
        assert_eq!(again, Some(ways));
    }

    fn read(path: &str) -> String {
        std::fs::read_to_string(format!("/proc/sys/net/{path}")).unwrap().trim_end().to_owned()
    }

    /// A new stack on a host with these settings, which the kernel copies from the first stack.
    fn of_host(settings: &[(&str, &str)]) -> Result<()> {
        for (path, value) in settings {
            std::fs::write(format!("/proc/sys/net/{path}"), value).unwrap();
        }
        Ok(())
    }

    #[test]
    fn a_stack_keeps_its_settings_on_a_host_with_other_ones() {
        let one = [
            ("ipv4/ip_forward", "1"),
            ("ipv4/conf/all/accept_redirects", "1"),
            ("ipv4/conf/default/rp_filter", "2"),
            ("ipv4/conf/lo/rp_filter", "2"),
            ("ipv6/conf/default/hop_limit", "65"),
            ("ipv4/tcp_wmem", "4096\t16384\t1000000"),
            ("ipv4/neigh/lo/app_solicit", "3"),
        ];
        let other = [
            ("ipv4/ip_forward", "0"),
            ("ipv4/conf/all/accept_redirects", "0"),
            ("ipv4/conf/default/rp_filter", "0"),
            ("ipv4/conf/lo/rp_filter", "1"),
            ("ipv6/conf/default/hop_limit", "64"),
            ("ipv4/tcp_wmem", "4096\t16384\t2000000"),
            ("ipv4/neigh/lo/app_solicit", "0"),
        ];
        // As the kernel made it; forwarding as the process of it has chosen; with devices.
        let links = Net { links: pair(), ..Net::default() };
        for (from, to) in [(&one, &other), (&other, &one)] {
            for change in [None, Some("0"), Some("1")] {
                for has_links in [false, true] {
                    let site = |net| Site {
                        stack: Elsewhere::Container,
                        netns: File::open("/proc/thread-self/ns/net").unwrap().into(),
                        net,
                    };
                    let saved = in_new(|| {
                        of_host(from).unwrap();
                        let built = if has_links { build(&[site(&links)]) } else { Ok(()) };
                        built.unwrap();
                        change
                            .into_iter()
                            .for_each(|to| of_host(&[("ipv4/ip_forward", to)]).unwrap());
                        let values: Vec<String> = from.iter().map(|(path, _)| read(path)).collect();
                        (look_here(&[], || of_host(from)).unwrap().unwrap(), values)
                    });
                    let Some((net, values)) = saved else {
                        return eprintln!("SKIPPED: no network namespace can be made");
                    };
                    assert_eq!(net.is_new(), !has_links && change.is_none_or(|to| to == from[0].1));
                    let restored = in_new(|| {
                        of_host(to).unwrap();
                        build(&[site(&net)]).unwrap();
                        let values: Vec<String> = from.iter().map(|(path, _)| read(path)).collect();
                        (look_here(&[], || of_host(from)).unwrap(), values)
                    });
                    let (again, found) = restored.unwrap();
                    let again = again.unwrap();
                    assert_eq!(found, values, "{change:?}, devices: {has_links}");
                    // Link-local addresses appear asynchronously.
                    let settings = |net: &Net| [net.settings.clone(), net.inherited.clone()];
                    let differs = settings(&again) != settings(&net);
                    assert!(!differs, "{change:?}, devices: {has_links}: {:?}", again.settings);
                }
            }
        }
    }

    #[test]
    fn refused_route_is_reported_with_the_text_of_the_kernel() {
        let unreachable = [(1, &[10, 9, 0, 0][..]), (5, &[192, 0, 2, 1])];
        let inet = libc::AF_INET as u8;
        let route = said(&[inet, 16, 0, 0, 254, 4, 0, 1, 0, 0, 0, 0], &unreachable);
        let net = Net { up: true, routes: vec![route], ..Net::default() };
        let built = in_new(|| {
            let netns = File::open("/proc/thread-self/ns/net").unwrap().into();
            build(&[Site { stack: Elsewhere::Container, netns, net: &net }])
        });
        let Some(built) = built else {
            return eprintln!("SKIPPED: no network namespace can be made");
        };
        let Err((Elsewhere::Container, Unlike::Refused(error))) = built else {
            panic!("not refused: {built:?}");
        };
        assert_eq!(error.errno(), libc::ENETUNREACH);
        assert_eq!(error.note(), "Nexthop has invalid gateway");
    }
}
