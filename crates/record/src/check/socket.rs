//! Checks of sockets.

use std::net::SocketAddr;

use super::{CONTENT_MAX, Found, NUMBER_MAX, TEXT_MAX, ensure, object};
use crate::{
    Connection, Datagram, JoinedGroup, Listener, Netlink, OPTIONS, PacketMembership, PacketSocket,
    PeerCredentials, RawSocket, Records, SocketOption, TcpSocket, TcpState, Thing, UdpSocket,
    UnixMessage, UnixPeer, UnixSocket, Waiting,
};

pub(super) fn options(options: &[SocketOption]) -> Found {
    ensure(options.len() <= OPTIONS.len() && options.iter().all(SocketOption::is_known), || {
        "its options".into()
    })
}

/// Whether a socket of that family can have an address.
fn fits(v6: bool, address: &SocketAddr) -> bool {
    v6 == address.is_ipv6()
}

pub(super) fn udp(udp: &UdpSocket) -> Found {
    options(&udp.options)?;
    let mut addresses = udp.address.iter().chain(&udp.peer);
    ensure(addresses.all(|a| fits(udp.v6, a)), || "its address".into())?;
    let has_one = udp.error.is_none() || udp.address.is_some() && udp.peer.is_some();
    ensure(has_one && udp.error.is_none_or(|error| (1..4096).contains(&error)), || {
        "its error".into()
    })?;
    let has_both = udp.v6 && udp.address.is_some() && udp.peer.is_some();
    ensure(!udp.chosen || has_both, || "its address".into())?;
    let is_group = |one: &JoinedGroup| is_device(&one.device) && one.address.is_multicast();
    ensure(udp.groups.len() <= MEMBERSHIPS_MAX && udp.groups.iter().all(is_group), || {
        "its groups".into()
    })?;
    let bytes: usize = udp.received.iter().map(|d| d.data.0.len()).sum();
    let sound = |d: &Datagram| fits(udp.v6, &d.from) && d.data.0.len() < 65_508;
    let sound = bytes <= CONTENT_MAX && udp.received.iter().all(sound);
    ensure(sound && (udp.received.is_empty() || udp.address.is_some()), || {
        "its receive queue".into()
    })
}

pub(super) fn listener(listener: &Listener) -> Found {
    options(&listener.options)?;
    ensure(listener.v6 || listener.address.is_ipv4(), || "its address".into())?;
    ensure(listener.waiting.len() <= WAITING_MAX, || "too many pending connections".into())?;
    for Waiting { address, connection: it } in &listener.waiting {
        let fits = listener.v6 || address.is_ipv4();
        ensure(fits && it.peer.is_ipv4() == address.is_ipv4(), || "a pending connection".into())?;
        let is_new = it.sent.0.is_empty() && it.unsent.0.is_empty();
        let is_open = [TcpState::Established, TcpState::CloseWait].contains(&it.state);
        ensure(is_new && is_open, || "a state of a pending connection".into())?;
        connection(it)?;
    }
    Ok(())
}

/// LIMIT: pending connections of one listener.
const WAITING_MAX: usize = 1 << 16;
/// LIMIT: bytes of one buffer of a connection.
const BUFFER_MAX: u32 = 64 << 20;

pub(super) fn tcp(tcp: &TcpSocket) -> Found {
    options(&tcp.options)?;
    ensure(tcp.address.iter().all(|a| fits(tcp.v6, a)), || "its address".into())?;
    let Some(it) = &tcp.connection else { return Ok(()) };
    ensure(!tcp.held && !tcp.over, || "a connection that is saved and held".into())?;
    ensure(tcp.address.is_some() && fits(tcp.v6, &it.peer), || "its peer".into())?;
    connection(it)
}

fn connection(it: &Connection) -> Found {
    let (sent, received) = (it.sent.0.len() + it.unsent.0.len(), it.received.0.len());
    ensure(sent <= CONTENT_MAX && received <= CONTENT_MAX, || "its queues".into())?;
    let all_known = it.state != TcpState::FinWait2 || sent == 0;
    ensure(all_known, || "unacknowledged bytes and an acknowledged FIN".into())?;
    let is_there = it.state != TcpState::SynSent || sent + received == 0;
    ensure(is_there, || "bytes before it is made".into())?;
    ensure((1..=65_535).contains(&it.segment_bytes), || "its segments".into())?;
    ensure(it.scales.is_none_or(|(a, b)| a <= 14 && b <= 14), || "its window scales".into())?;
    let buffers = it.buffers_bytes.0.max(it.buffers_bytes.1) <= BUFFER_MAX;
    ensure(buffers && it.buffers_locked <= 3, || "its buffers".into())
}

pub(super) fn raw(raw: &RawSocket) -> Found {
    options(&raw.options)?;
    let echo = if raw.v6 { libc::IPPROTO_ICMPV6 } else { libc::IPPROTO_ICMP };
    let is_known = match raw.socket_type {
        libc::SOCK_RAW => (0..256).contains(&raw.protocol),
        libc::SOCK_DGRAM => raw.protocol == echo,
        _ => false,
    };
    ensure(is_known, || "its type".into())?;
    let mut addresses = raw.address.iter().chain(&raw.peer);
    ensure(addresses.all(|a| fits(raw.v6, a)), || "its address".into())
}

/// Whether a device can have this name.
fn is_device(name: &str) -> bool {
    (1..16).contains(&name.len()) && !name.contains('\0')
}

/// LIMIT: memberships of a packet socket, and groups of a UDP socket.
const MEMBERSHIPS_MAX: usize = 4096;

pub(super) fn packet(packet: &PacketSocket) -> Found {
    options(&packet.options)?;
    let known = [libc::SOCK_RAW, libc::SOCK_DGRAM].contains(&packet.socket_type);
    ensure(known, || "its type".into())?;
    ensure(packet.device.as_deref().is_none_or(is_device), || "its device".into())?;
    let sound = |one: &PacketMembership| is_device(&one.device) && one.address.0.len() <= 8;
    let memberships = &packet.memberships;
    ensure(memberships.len() <= MEMBERSHIPS_MAX && memberships.iter().all(sound), || {
        "its memberships".into()
    })
}

/// LIMIT: groups of a netlink socket, and the number of one.
const GROUPS_MAX: usize = 4096;

pub(super) fn netlink(netlink: &Netlink) -> Found {
    options(&netlink.options)?;
    let known = [libc::SOCK_RAW, libc::SOCK_DGRAM].contains(&netlink.socket_type);
    ensure(known && (0..32).contains(&netlink.protocol), || "its type".into())?;
    let group = |n: &u32| (1..=GROUPS_MAX as u32).contains(n);
    let groups = netlink.groups.len() <= GROUPS_MAX && netlink.groups.iter().all(group);
    ensure(groups, || "its groups".into())
}

/// LIMIT: bytes of a unix socket's name (`sun_path`).
const UNIX_NAME_MAX: usize = 108;

/// LIMIT: descriptors of one message (`SCM_MAX_FD`).
const DESCRIPTORS_MAX: usize = 253;

/// LIMIT: supplementary groups (`NGROUPS_MAX`).
const PEER_GROUPS_MAX: usize = 1 << 16;

fn peer_credentials(who: &PeerCredentials) -> bool {
    who.pid.is_none_or(|pid| (1..NUMBER_MAX).contains(&pid)) && who.groups.len() <= PEER_GROUPS_MAX
}

pub(super) fn unix(index: usize, socket: &UnixSocket, records: &Records) -> Found {
    let known = [libc::SOCK_STREAM, libc::SOCK_DGRAM, libc::SOCK_SEQPACKET];
    ensure(known.contains(&socket.socket_type), || "its type".into())?;
    let is_connection = socket.socket_type != libc::SOCK_DGRAM;
    options(&socket.options)?;
    ensure(socket.shut <= 3, || "the directions that are shut down".into())?;
    let bytes: usize = socket.on_its_way().map(|m| m.data.0.len()).sum();
    let sound = |m: &UnixMessage| !m.data.0.is_empty() && m.from.0.len() <= UNIX_NAME_MAX;
    let received = bytes <= CONTENT_MAX && socket.on_its_way().all(sound);
    ensure(received, || "its receive queue".into())?;
    let mut credentials = socket.on_its_way().flat_map(|m| &m.credentials);
    ensure(credentials.all(peer_credentials), || "the credentials of a sender".into())?;
    let by = match &socket.peer {
        UnixPeer::Waiting { by, .. } => by.as_ref(),
        _ => None,
    };
    let left = socket.left.iter().flat_map(|left| &left.by);
    let mut credentials = socket.peer_credentials.iter().chain(by).chain(left);
    ensure(credentials.all(peer_credentials), || "the credentials of its peer".into())?;
    for message in socket.on_its_way() {
        ensure(message.descriptors.len() <= DESCRIPTORS_MAX, || "descriptors".into())?;
        for n in &message.descriptors {
            let thing = object(*n, records)?;
            ensure(thing.may_be_on_its_way(), || {
                format!("object {n} ({}), which cannot be sent", thing.name())
            })?;
        }
    }
    if let Some(name) = &socket.name {
        let length = name.bytes.0.len();
        // An abstract name can be any bytes; a path is text, and ends at its first NUL.
        let is_abstract = name.bytes.0.first() == Some(&0);
        let is_path = name.path().is_some_and(|path| !path.contains('\0'));
        ensure(length <= UNIX_NAME_MAX && (is_abstract || is_path), || "its name".into())?;
        let whole =
            |dir: &String| dir.starts_with('/') && dir.len() < TEXT_MAX && !dir.contains('\0');
        ensure(name.directory.as_ref().is_none_or(whole), || "its directory".into())?;
        let is_relative = name.path().is_some_and(|path| !path.starts_with('/'));
        ensure(name.directory.is_some() == is_relative, || "its directory".into())?;
        ensure(!is_abstract || name.file.is_none(), || "its file".into())?;
        ensure(!name.inherited || is_connection && socket.backlog.is_none(), || {
            "the origin of its name".into()
        })?;
    }
    let listens = socket.backlog.is_some();
    let may_listen = is_connection && socket.name.is_some() && socket.received.is_empty();
    ensure(!listens || may_listen && socket.peer == UnixPeer::None, || "it listens".into())?;
    let may_wait = (listens || socket.left.is_empty()) && socket.left.len() <= WAITING_MAX;
    ensure(may_wait && socket.left.iter().all(|left| left.place < NUMBER_MAX), || {
        "its pending connections".into()
    })?;
    let other = |n: usize| match object(n, records)? {
        Thing::UnixSocket(other) if other.socket_type == socket.socket_type => Ok(other),
        _ => Err("its peer is not such a socket".to_owned()),
    };
    match socket.peer {
        UnixPeer::None => ensure(!is_connection || socket.received.is_empty(), || {
            "a receive queue without a peer".into()
        }),
        UnixPeer::Gone => Ok(()),
        UnixPeer::Waiting { listener, place, .. } => {
            ensure(other(listener)?.backlog.is_some() && place < NUMBER_MAX, || {
                "pending at a socket that is not listening".into()
            })?;
            ensure(socket.received.is_empty(), || "a receive queue without a peer".into())
        }
        UnixPeer::Socket { object: n } => {
            let other = other(n)?;
            let leads_back = other.peer == UnixPeer::Socket { object: index };
            ensure(!is_connection || leads_back, || "its peer has another".into())?;
            ensure(is_connection || leads_back || other.name.is_some(), || {
                "its peer has no name".into()
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::records;
    use super::*;
    use crate::sample::small;
    use crate::{Bytes, Connection, UnixLeft, UnixName};

    /// A pair of sockets, of which the second was accepted at a third, the listener.
    fn sockets() -> Records {
        let name = |inherited| {
            let (bytes, file) = (Bytes(b"/a".to_vec()), None);
            Some(UnixName { bytes, directory: None, file, inherited })
        };
        let socket = |peer, name, backlog| UnixSocket {
            socket_type: libc::SOCK_STREAM,
            flags: 0,
            name,
            backlog,
            peer,
            left: Vec::new(),
            received: Vec::new(),
            peer_credentials: None,
            shut: 0,
            reset: false,
            options: Vec::new(),
            held: false,
        };
        let mut one = socket(UnixPeer::Socket { object: 2 }, None, None);
        let (data, from) = (Bytes(vec![1]), Bytes::default());
        one.received = vec![UnixMessage { data, from, descriptors: vec![0], credentials: None }];
        let all = [
            one,
            socket(UnixPeer::Socket { object: 1 }, name(true), None),
            socket(UnixPeer::None, name(false), Some(5)),
        ];
        let mut records = small();
        records.objects.extend(all.map(|s| Thing::UnixSocket(s).into()));
        let memory = crate::SharedMemory { bytes: 4096, runs: Vec::new(), no_exec: false };
        records.objects.push(Thing::SharedMemory(memory).into());
        records
    }

    fn waits_at(listener: usize, place: u32) -> UnixPeer {
        UnixPeer::Waiting { listener, place, by: None, sent: Vec::new() }
    }

    #[test]
    fn invalid_unix_sockets_are_refused() {
        assert!(records(&sockets()).is_ok());
        type Case = (fn(&mut [&mut UnixSocket]), &'static str);
        let who = |pid| Some(PeerCredentials { pid, uid: 0, gid: 0, groups: Vec::new() });
        assert!(who(None).is_some_and(|who| peer_credentials(&who)));
        assert!(who(Some(7)).is_some_and(|who| peer_credentials(&who)));
        assert!(!who(Some(0)).is_some_and(|who| peer_credentials(&who)));
        assert!(!who(Some(NUMBER_MAX)).is_some_and(|who| peer_credentials(&who)));
        let waiting = |data: &[u8], descriptors, credentials| {
            let (data, from) = (Bytes(data.to_vec()), Bytes::default());
            let sent = vec![UnixMessage { data, from, descriptors, credentials }];
            UnixPeer::Waiting { listener: 3, place: 0, by: None, sent }
        };
        // The first is a pending connection at the third, with sent bytes.
        let written = |data: &[u8], descriptors, credentials| {
            let mut all = sockets();
            let mut things = all.objects.iter_mut().filter_map(|o| match &mut o.thing {
                Thing::UnixSocket(socket) => Some(socket),
                _ => None,
            });
            let (one, other) = (things.next().unwrap(), things.next().unwrap());
            one.peer = waiting(data, descriptors, credentials);
            one.received.clear();
            (other.peer, other.name) = (UnixPeer::None, None);
            records(&all).map(drop).map_err(|e| e.to_string())
        };
        assert_eq!(written(b"a", vec![0], who(Some(7))), Ok(()));
        let refused = |found: std::result::Result<(), String>, text: &str| {
            assert!(found.as_ref().is_err_and(|said| said.contains(text)), "{text}: {found:?}");
        };
        refused(written(b"", Vec::new(), None), "its receive queue");
        refused(written(b"a", vec![99], None), "object 99");
        refused(written(b"a", vec![4], None), "which cannot be sent");
        refused(written(b"a", vec![0; 254], None), "descriptors");
        refused(written(b"a", Vec::new(), who(Some(0))), "the credentials of a sender");
        let left = |data: &[u8], place, pid| {
            let (data, from, by) = (Bytes(data.to_vec()), Bytes::default(), who(pid));
            let sent = vec![UnixMessage { data, from, descriptors: vec![0], credentials: None }];
            UnixLeft { place, by, sent }
        };
        let with_left = |at: usize, left: Vec<UnixLeft>| {
            let mut all = sockets();
            let things = all.objects.iter_mut().filter_map(|o| match &mut o.thing {
                Thing::UnixSocket(socket) => Some(socket),
                _ => None,
            });
            things.skip(at).take(1).for_each(|socket| socket.left.clone_from(&left));
            records(&all).map(drop).map_err(|e| e.to_string())
        };
        assert_eq!(with_left(2, vec![left(b"a", 0, Some(7))]), Ok(()));
        refused(with_left(0, vec![left(b"a", 0, None)]), "its pending connections");
        refused(with_left(2, vec![left(b"a", NUMBER_MAX, None)]), "its pending connections");
        refused(
            with_left(2, vec![left(b"a", 0, None); WAITING_MAX + 1]),
            "its pending connections",
        );
        refused(with_left(2, vec![left(b"a", 0, Some(0))]), "the credentials of its peer");
        refused(with_left(2, vec![left(b"", 0, None)]), "its receive queue");
        let cases: [Case; 17] = [
            (|s| s[0].received[0].descriptors = vec![99], "object 99"),
            (|s| s[0].received[0].descriptors = vec![4], "which cannot be sent"),
            (|s| s[0].received[0].descriptors = vec![0; 254], "descriptors"),
            (|s| s[0].socket_type = libc::SOCK_RAW, "its type"),
            (|s| s[0].shut = 4, "shut down"),
            (|s| s[0].peer = UnixPeer::Socket { object: 99 }, "object 99"),
            (|s| s[0].peer = UnixPeer::Socket { object: 0 }, "not such a socket"),
            (|s| s[0].peer = UnixPeer::Socket { object: 3 }, "has another"),
            (|s| s[0].peer = waits_at(2, 0), "not listening"),
            (|s| s[0].peer = waits_at(3, u32::MAX), "not listening"),
            (|s| s[0].received[0].data.0.clear(), "its receive queue"),
            (|s| s[0].received[0].from.0 = vec![b'a'; 200], "its receive queue"),
            (|s| s[1].name.as_mut().unwrap().bytes.0 = vec![b'a'; 200], "its name"),
            (|s| s[1].name.as_mut().unwrap().bytes.0.clear(), "its name"),
            (|s| s[1].name.as_mut().unwrap().bytes.0 = b"a".to_vec(), "its directory"),
            (|s| s[2].name = None, "it listens"),
            (
                |s| {
                    let (level, name) = (libc::SOL_SOCKET, libc::SO_ATTACH_FILTER);
                    s[0].options = vec![SocketOption { level, name, value: Bytes(vec![0; 4]) }];
                },
                "its options",
            ),
        ];
        for (change, text) in cases {
            let mut all = sockets();
            let things = all.objects.iter_mut().filter_map(|o| match &mut o.thing {
                Thing::UnixSocket(socket) => Some(socket),
                _ => None,
            });
            change(&mut things.collect::<Vec<_>>());
            let said = records(&all).unwrap_err().to_string();
            assert!(said.contains(text), "{text}: {said}");
        }
    }

    #[test]
    fn invalid_netlink_sockets_are_refused() {
        let with = |socket_type, protocol, groups| {
            let (flags, port, peer, options) = (0, 7, (0, 0), Vec::new());
            netlink(&Netlink { socket_type, protocol, flags, port, groups, peer, options })
        };
        assert!(with(libc::SOCK_RAW, 0, vec![1, 33]).is_ok());
        assert!(with(libc::SOCK_STREAM, 0, Vec::new()).is_err());
        assert!(with(libc::SOCK_RAW, 32, Vec::new()).is_err());
        assert!(with(libc::SOCK_RAW, 0, vec![0]).is_err());
        assert!(with(libc::SOCK_RAW, 0, vec![1; GROUPS_MAX + 1]).is_err());
    }

    #[test]
    fn invalid_connections_and_datagrams_are_refused() {
        let own = "10.0.0.1:80".parse().unwrap();
        let address = Some(own);
        let connection = Connection {
            state: TcpState::Established,
            peer: "10.0.0.2:5".parse().unwrap(),
            sent: Bytes(vec![1]),
            unsent: Bytes::default(),
            sent_sequence: u32::MAX,
            received: Bytes::default(),
            received_sequence: 0,
            segment_bytes: 1460,
            scales: Some((7, 7)),
            selective: true,
            timestamp: None,
            window: [u32::MAX; 5],
            buffers_bytes: (1 << 20, 1 << 20),
            buffers_locked: 0,
            window_bytes_max: 0,
            reads_no_more: false,
        };
        type Case = (fn(&mut Connection), &'static str);
        let cases: [Case; 8] = [
            (|_| {}, ""),
            (|c| c.peer = "[::1]:5".parse().unwrap(), "its peer"),
            (|c| c.state = TcpState::FinWait2, "an acknowledged FIN"),
            (|c| c.state = TcpState::SynSent, "before it is made"),
            (|c| c.segment_bytes = 0, "its segments"),
            (|c| c.scales = Some((15, 0)), "its window scales"),
            (|c| c.buffers_bytes.1 = u32::MAX, "its buffers"),
            (|c| c.buffers_locked = 4, "its buffers"),
        ];
        for (change, text) in cases {
            let mut it = connection.clone();
            change(&mut it);
            let (connection, options) = (Some(it), Vec::new());
            let (free, held, over) = (false, false, false);
            let mut socket =
                TcpSocket { v6: false, flags: 0, address, free, connection, held, over, options };
            let said = tcp(&socket).err().unwrap_or_default();
            assert!(said.contains(text) && said.is_empty() == text.is_empty(), "{text}: {said}");
            socket.held = true;
            assert!(tcp(&socket).is_err(), "saved and held");
        }
        let datagram = |bytes| Datagram { from: own, data: Bytes(vec![0; bytes]) };
        let with = |v6, address, received| -> Found {
            let (peer, error, options) = (None, None, Vec::new());
            let (flags, free, shut) = (0, false, 0);
            let groups = vec![JoinedGroup { device: "lo".into(), address: [224, 0, 1, 9].into() }];
            let mut socket = UdpSocket {
                v6,
                flags,
                address,
                free,
                chosen: false,
                peer,
                received,
                error,
                shut,
                groups,
                options,
            };
            udp(&socket)?;
            socket.groups[0].address = [192, 0, 2, 1].into();
            assert!(udp(&socket).is_err(), "not a group");
            Ok(())
        };
        assert!(with(false, address, vec![datagram(9)]).is_ok());
        assert!(with(false, address, vec![datagram(65_508)]).is_err(), "longer than any datagram");
        assert!(with(true, address, Vec::new()).is_err(), "of another family");
        assert!(with(false, None, vec![datagram(9)]).is_err(), "not bound");
    }
}
