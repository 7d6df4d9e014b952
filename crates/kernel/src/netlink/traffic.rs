//! Queueing of packets at a device, by rtnetlink(7): a tree of classes (HTB, tc-htb(8)), and a program for packets that
//! come in (tc-bpf(8)).
//!
//! A class sends at its *rate* in any case, and up to its *ceil* what the class above has left. What is left is
//! divided in turns of a *quantum*. A packet belongs to the class whose number is its priority (`skb->priority`), or to
//! the default one.
//!
//! KERNEL(2.6.20): HTB. The defaults of tc(8) are wrong for packets that the device cuts (GSO): a turn, and a burst,
//! have at least one such packet of 64 kB.

use std::os::fd::{AsRawFd, BorrowedFd};

use super::message::Message;

/// Adds queueing to a device.
pub const NEW_DISCIPLINE: u16 = libc::RTM_NEWQDISC;
/// Removes it, with its classes.
pub const REMOVE_DISCIPLINE: u16 = libc::RTM_DELQDISC;
/// Adds or changes a class.
pub const NEW_CLASS: u16 = libc::RTM_NEWTCLASS;
/// Removes a class.
pub const REMOVE_CLASS: u16 = libc::RTM_DELTCLASS;

/// Adds a filter.
pub const NEW_FILTER: u16 = libc::RTM_NEWTFILTER;

/// The parent of the hooks of a device (`TC_H_CLSACT`), their number, and the parent of filters for packets that come
/// in (`TC_H_MIN_INGRESS`).
const HOOKS: u32 = 0xffff_fff1;
const HOOKS_NUMBER: u32 = 0xffff_0000;
const INCOMING: u32 = 0xffff_fff2;
/// `TCA_BPF_FD`, `TCA_BPF_NAME`, `TCA_BPF_FLAGS`; the program decides (`TCA_BPF_FLAG_ACT_DIRECT`).
const PROGRAM: u16 = 6;
const PROGRAM_NAME: u16 = 7;
const PROGRAM_FLAGS: u16 = 8;
const DECIDES: u32 = 1;

/// The parent of the outermost queueing of a device (`TC_H_ROOT`).
const ROOT: u32 = u32::MAX;
/// The number of the tree, the upper half of the numbers of its classes.
const TREE: u32 = 1 << 16;

/// `TCA_KIND`, `TCA_OPTIONS`.
const KIND: u16 = 1;
const OPTIONS: u16 = 2;
/// `TCA_HTB_PARMS`, `TCA_HTB_INIT`, `TCA_HTB_RATE64`, `TCA_HTB_CEIL64`.
const PARAMETERS: u16 = 1;
const INIT: u16 = 2;
const RATE: u16 = 6;
const CEIL: u16 = 7;
/// The version of the interface (`TC_HTB_PROTOVER`).
const VERSION: u32 = 3;
/// `TC_LINKLAYER_ETHERNET`: the kernel needs no table of rates.
const ETHERNET: u8 = 1;
/// Bytes of the largest packet before the device cuts it.
const PACKET_BYTES: u64 = 1 << 16;
/// Nanoseconds of a tick of the packet scheduler (`PSCHED_SHIFT`).
const TICK_NS: u64 = 64;

/// A class of the tree. Rates are in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Class {
    /// The number of the class above; 0 is the tree itself.
    pub above: u16,
    /// What it sends in any case.
    pub rate: u64,
    /// The most that it sends.
    pub ceil: u64,
    /// Bytes of its turn when it uses what others have left.
    pub quantum: u32,
}

/// The priority of packets of a class.
pub fn priority(class: u16) -> u32 {
    TREE | u32::from(class)
}

/// `struct tcmsg`.
fn head(device: u32, handle: u32, parent: u32) -> Message {
    Message::new([0, device, handle, parent, 0].map(u32::to_ne_bytes).as_flattened())
}

/// Hooks for filters at a device (`clsact`, Linux 4.5).
pub fn hooks(device: u32) -> Message {
    head(device, HOOKS_NUMBER, HOOKS).with_text(KIND, "clsact")
}

/// A filter for all packets that come in at a device with [`hooks`]: a program of the type SCHED_CLS, which decides
/// what becomes of a packet (Linux 4.4).
pub fn filter(device: u32, program: BorrowedFd<'_>, name: &str) -> Message {
    const FIRST: u32 = 1 << 16;
    const ALL: u16 = libc::ETH_P_ALL as u16;
    let options = Message::new(&[])
        .with(PROGRAM, &program.as_raw_fd().to_ne_bytes())
        .with_text(PROGRAM_NAME, name)
        .with(PROGRAM_FLAGS, &DECIDES.to_ne_bytes());
    let words = [0, device, 0, INCOMING, FIRST | u32::from(ALL.to_be())].map(u32::to_ne_bytes);
    Message::new(words.as_flattened()).with_text(KIND, "bpf").nested(OPTIONS, &options)
}

/// An empty tree at a device, with the number of its default class.
pub fn tree(device: u32, default: u16) -> Message {
    let init = [VERSION, 10, default.into(), 0, 0].map(u32::to_ne_bytes);
    let options = Message::new(&[]).with(INIT, init.as_flattened());
    head(device, TREE, ROOT).with_text(KIND, "htb").nested(OPTIONS, &options)
}

/// The tree of a device, to be removed.
pub fn no_tree(device: u32) -> Message {
    head(device, 0, ROOT)
}

/// A class at a device.
pub fn class(device: u32, number: u16, class: &Class) -> Message {
    let rate = class.rate.max(1);
    let ceil = class.ceil.max(rate);
    let mut parameters = [specification(rate), specification(ceil)].concat();
    let rest = [buffer(rate), buffer(ceil), class.quantum, 0, 0].map(u32::to_ne_bytes);
    parameters.extend(rest.as_flattened());
    let options = Message::new(&[])
        .with(PARAMETERS, &parameters)
        .with(RATE, &rate.to_ne_bytes())
        .with(CEIL, &ceil.to_ne_bytes());
    let parent = if class.above == 0 { TREE } else { priority(class.above) };
    head(device, priority(number), parent).with_text(KIND, "htb").nested(OPTIONS, &options)
}

/// A class, to be removed.
pub fn no_class(device: u32, number: u16) -> Message {
    head(device, priority(number), 0)
}

/// `struct tc_ratespec`; a larger rate is in an attribute of its own.
fn specification(rate: u64) -> Vec<u8> {
    let mut bytes = vec![0, ETHERNET, 0, 0, 0, 0, 0, 0];
    bytes.extend(u32::try_from(rate).unwrap_or(u32::MAX).to_ne_bytes());
    bytes
}

/// The time that a burst takes at a rate, in ticks: a packet, or 16 ms.
fn buffer(rate: u64) -> u32 {
    let bytes = PACKET_BYTES.max(rate / 62);
    let ns = u128::from(bytes) * 1_000_000_000 / u128::from(rate);
    u32::try_from(ns / u128::from(TICK_NS)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::super::{NEW, Protocol, REPLACE, Socket};
    use super::*;
    use crate::call::Namespace;
    use crate::namespace;

    #[test]
    fn burst_is_a_packet_or_sixteen_milliseconds() {
        let ms = |rate| u64::from(buffer(rate)) * TICK_NS / 1_000_000;
        assert_eq!([ms(65_536_000), ms(1_000_000), ms(1_000_000_000)], [16, 65, 16]);
        assert_eq!(buffer(1), u32::MAX);
    }

    #[test]
    fn root_tree_takes_classes_that_change_and_go() {
        let Ok(stack) = namespace::new_network().inspect_err(|e| eprintln!("SKIPPED: {e}")) else {
            return;
        };
        let work = || {
            let mut socket = Socket::open(Protocol::Route).unwrap();
            let lo = super::super::route::LOOPBACK;
            if let Err(e) = socket.request(NEW_DISCIPLINE, NEW, &tree(lo, 9)) {
                eprintln!("SKIPPED: {e}");
                return;
            }
            let one = Class { above: 0, rate: 1 << 20, ceil: 1 << 40, quantum: 60_000 };
            let two = Class { above: 1, ..one };
            socket.request(NEW_CLASS, NEW, &class(lo, 1, &one)).unwrap();
            socket.request(NEW_CLASS, NEW, &class(lo, 2, &two)).unwrap();
            socket.request(NEW_CLASS, REPLACE, &class(lo, 2, &Class { rate: 1, ..two })).unwrap();
            // A class with others below it changes, too.
            socket
                .request(NEW_CLASS, REPLACE, &class(lo, 1, &Class { rate: 1 << 21, ..one }))
                .unwrap();
            assert!(socket.request(NEW_CLASS, NEW, &class(lo, 2, &two)).is_err());
            socket.request(REMOVE_CLASS, 0, &no_class(lo, 2)).unwrap();
            assert!(socket.request(REMOVE_CLASS, 0, &no_class(lo, 2)).is_err());
            socket.request(REMOVE_DISCIPLINE, 0, &no_tree(lo)).unwrap();
        };
        namespace::visit(std::os::fd::AsFd::as_fd(&stack), Namespace::Net, work).unwrap();
    }
}
