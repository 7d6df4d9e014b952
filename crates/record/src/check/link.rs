//! Checks of network devices.

use super::setting::is_link_name;
use crate::{Elsewhere, Link, LinkKind};

/// The loopback device is the first of every stack.
pub const LOOPBACK: u32 = 1;
/// The configurable flags of `IFF_*`: up, no ARP, promiscuous, all multicasts, multicast.
pub const CHOSEN: u32 = 1 | 0x80 | 0x100 | 0x200 | 0x1000;

/// Options of a bridge that can be configured and do not change by themselves: `IFLA_BR_*`.
pub fn is_bridge_option(kind: u16) -> bool {
    matches!(kind, 1..=9 | 20 | 22..=26 | 28..=39 | 41..=46)
}

/// Checks that a record of a device is valid.
pub fn is_sound(link: &Link) -> bool {
    let options = match &link.kind {
        LinkKind::Bridge { options } => {
            options.len() <= 64
                && options.iter().all(|(kind, value)| is_bridge_option(*kind) && value.0.len() <= 8)
        }
        LinkKind::Dummy | LinkKind::Veth { .. } => true,
    };
    link.number > LOOPBACK
        && link.number <= i32::MAX as u32
        && is_link_name(&link.name)
        && link.address.0.len() == 6
        && link.flags & !CHOSEN == 0
        && options
}

/// Checks that the devices that a record refers to exist: the other end of a pair, which must refer
/// back, and its bridge. [`far_end`] checks a pair in two stacks.
pub fn is_among(link: &Link, all: &[Link]) -> bool {
    let any = |is: &dyn Fn(&Link) -> bool| all.iter().any(is);
    let pair = match link.kind {
        LinkKind::Veth { elsewhere: Some(_), .. } => true,
        LinkKind::Veth { peer, elsewhere: None } => {
            let back = LinkKind::Veth { peer: link.number, elsewhere: None };
            peer != link.number && any(&|other| other.number == peer && other.kind == back)
        }
        LinkKind::Dummy | LinkKind::Bridge { .. } => true,
    };
    let is_bridge = |number: u32| {
        any(&|other| other.number == number && matches!(other.kind, LinkKind::Bridge { .. }))
    };
    pair && link.master.is_none_or(is_bridge)
}

/// The other end of a pair in two stacks, if it refers back to this one, which is in `stack`.
pub fn far_end<'a>(link: &Link, stack: Elsewhere, there: &'a [Link]) -> Option<&'a Link> {
    let LinkKind::Veth { peer, elsewhere: Some(elsewhere) } = link.kind else { return None };
    let back = LinkKind::Veth { peer: link.number, elsewhere: Some(stack) };
    let is_it = |other: &&Link| other.number == peer && other.kind == back;
    there.iter().find(is_it).filter(|_| elsewhere != stack)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bytes;

    #[test]
    fn invalid_links_are_refused() {
        let good = Link {
            number: 2,
            name: "veth0".into(),
            kind: LinkKind::Veth { peer: 3, elsewhere: None },
            address: Bytes(vec![2, 0, 0, 0, 0, 1]),
            mtu: 1500,
            queue: 1000,
            flags: libc::IFF_UP as u32,
            master: None,
        };
        assert!(is_sound(&good));
        let bridge = |options| LinkKind::Bridge { options };
        let bad = [
            Link { number: 1, ..good.clone() },
            Link { name: "../lo".into(), ..good.clone() },
            Link { name: String::new(), ..good.clone() },
            Link { address: Bytes(vec![0; 40]), ..good.clone() },
            Link { flags: 0x40, ..good.clone() },
            Link { kind: bridge(vec![(11, Bytes(vec![0; 8]))]), ..good.clone() },
            Link { kind: bridge(vec![(5, Bytes(vec![0; 9000]))]), ..good.clone() },
        ];
        bad.iter().for_each(|link| assert!(!is_sound(link), "{link:?}"));
        let kind = |number, kind| Link { number, kind, ..good.clone() };
        let other = kind(3, LinkKind::Veth { peer: 2, elsewhere: None });
        assert!(is_among(&good, &[good.clone(), other.clone()]));
        let to_itself = kind(2, LinkKind::Veth { peer: 2, elsewhere: None });
        assert!(!is_among(&to_itself, std::slice::from_ref(&to_itself)));
        for wrong in [LinkKind::Dummy, LinkKind::Veth { peer: 4, elsewhere: None }] {
            assert!(!is_among(&good, &[good.clone(), kind(3, wrong)]));
        }
        let port = Link { master: Some(3), ..kind(2, LinkKind::Dummy) };
        assert!(is_among(&port, &[kind(3, bridge(Vec::new()))]));
        assert!(!is_among(&port, &[other]));
        let (own, inner) = (Elsewhere::Container, Elsewhere::Object(7));
        let far =
            |number, peer, stack| kind(number, LinkKind::Veth { peer, elsewhere: Some(stack) });
        let it = far(2, 2, inner);
        assert!(far_end(&it, own, &[far(2, 2, own)]).is_some());
        for wrong in [far(2, 2, inner), far(3, 2, own), far(2, 3, own), good.clone()] {
            assert!(far_end(&it, own, &[wrong]).is_none());
        }
        assert!(far_end(&it, inner, std::slice::from_ref(&it)).is_none());
    }
}
