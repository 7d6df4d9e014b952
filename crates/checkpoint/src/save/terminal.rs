//! Terminals: the two sides are open files; the terminal between them is identified by its number
//! in devpts, which the kernel reports for every side, under whatever name it was opened.
//!
//! Data in transit through a terminal can only be read by consuming it. The data is put back at
//! once: input by TIOCSTI, output by writing it again, with every mode switched off meanwhile that
//! would echo or change it. All processes are stopped then.

use std::os::fd::{AsFd, BorrowedFd};

use dormouse_kernel::Errno;
use dormouse_kernel::call::{self, TERMIOS_BYTES, TerminalNumber};
use dormouse_record::check::ON_THE_WAY_MAX;
use dormouse_record::{Bytes, Error, Result as Outcome, Terminal, TerminalSide, Thing};
use rustix::event::{PollFd, PollFlags};

use super::known::stream::TerminalSides;
use super::open::Open;
use super::refusal::Reason;
use super::seen::Seen;
use super::survey::{Found, Survey};
use crate::look::ids::Maps;
use crate::terminal_modes as modes;

/// Major numbers of slaves in devpts.
const SLAVES: std::ops::RangeInclusive<u32> = 136..=143;

/// The device number of `/dev/tty`, and that of `/dev/ptmx`.
const OWN: (u32, u32) = (5, 0);

const MASTER: (u32, u32) = (5, 2);

fn device(open: &Open<'_>) -> (u32, u32) {
    (rustix::fs::major(open.stat.st_rdev), rustix::fs::minor(open.stat.st_rdev))
}

pub(crate) fn is_terminal(open: &Open<'_>) -> bool {
    let is_device = open.stat.st_mode & libc::S_IFMT == libc::S_IFCHR;
    let device = device(open);
    let is_place = open.flags() & libc::O_PATH as u32 != 0;
    is_device && !is_place && (SLAVES.contains(&device.0) || [OWN, MASTER].contains(&device))
}

pub(crate) fn save(survey: &mut Survey<'_>, open: &Open<'_>) -> Result<Thing, Reason> {
    let is_master = device(open) == MASTER;
    // A notice of the process has O_ASYNC.
    let flags = open.flags() & !libc::O_ASYNC as u32;
    let number = call::terminal_number(open.copy.as_fd(), TerminalNumber::Device);
    let number = number.map_err(|e| match e {
        Errno::IO | Errno::NOTTY => "a terminal that has hung up, which is not saved yet".into(),
        e => format!("a terminal without a readable number: {e}"),
    })?;
    let (major, minor) = (rustix::fs::major(number.into()), rustix::fs::minor(number.into()));
    if !SLAVES.contains(&major) {
        return Err(format!("the device {major}:{minor}, a terminal that is not the container's"));
    }
    let number = (major - SLAVES.start()) * 256 + minor;
    if !is_of(open, number) {
        return Err("a terminal that is not the container's".into());
    }
    let terminal = match survey.terminals.get(&number) {
        Some(sides) => sides.object,
        None => {
            let record = state(open, number).map_err(|e| format!("a terminal: {e}"))?;
            let object = survey.add(Thing::Terminal(record));
            survey.terminals.insert(number, TerminalSides { object, master: None, slave: None });
            object
        }
    };
    let copy = open.copy.try_clone().map_err(|e| format!("a terminal: {e}"))?;
    if let Some(sides) = survey.terminals.get_mut(&number) {
        if is_master { sides.master = Some(copy) } else { sides.slave = Some(copy) }
    }
    if is_master && let Thing::Terminal(record) = &mut survey.found.objects[terminal].thing {
        record.is_console = false;
        let of_master = |what| call::terminal_number(open.copy.as_fd(), what).unwrap_or(0) != 0;
        record.locked = of_master(TerminalNumber::Locked);
        record.packet = of_master(TerminalNumber::Packet);
    }
    let as_console = open.link == "/dev/console";
    Ok(Thing::TerminalSide(TerminalSide { terminal, is_master, as_console, flags }))
}

/// Whether a side belongs to the devpts of the container, under the same number.
fn is_of(open: &Open<'_>, number: u32) -> bool {
    let first = open.process.first;
    let own = rustix::fs::stat(format!("/proc/{first}/root/dev/pts/{number}"));
    // For a master or `/dev/console` the inode is that of the node which was opened, on the same
    // devpts.
    own.is_ok_and(|own| own.st_dev == open.stat.st_dev || open.link == "/dev/tty")
}

/// Everything but the data in transit.
fn state(open: &Open<'_>, number: u32) -> Result<Terminal, Errno> {
    let fd = open.copy.as_fd();
    let size = rustix::termios::tcgetwinsize(fd)?;
    let first = open.process.first;
    let node = rustix::fs::stat(format!("/proc/{first}/root/dev/pts/{number}"))?;
    let (uid, gid) = Maps::read(first).owner(node.st_uid, node.st_gid);
    Ok(Terminal {
        number,
        // True until its master is found inside.
        is_console: true,
        termios: Bytes(call::termios(fd)?.to_vec()),
        size: [size.ws_row, size.ws_col, size.ws_xpixel, size.ws_ypixel],
        owner: (uid, gid, node.st_mode & 0o777),
        locked: false,
        packet: false,
        exclusive: call::terminal_number(fd, TerminalNumber::Exclusive).unwrap_or(0) != 0,
        typed: Bytes::default(),
        written: Bytes::default(),
        foreground: 0,
        session: 0,
    })
}

/// Sets the session and foreground group of each terminal, as the processes of its session show
/// them.
pub(crate) fn sessions(survey: &mut Survey<'_>, processes: &[Seen]) {
    for seen in processes.iter().filter(|p| !p.is_zombie) {
        let field = |n| seen.stat()?.field(n)?.parse::<i64>().ok();
        let (Some(device), Some(foreground)) = (field(7), field(8)) else { continue };
        let device = device as u64;
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        if device == 0 || !SLAVES.contains(&major) {
            continue;
        }
        let number = (major - SLAVES.start()) * 256 + minor;
        let Some(sides) = survey.terminals.get(&number) else {
            // No process has it open, and none can open it: it can only be the console of the
            // session.
            let why = "its terminal is open nowhere in the container, not saved yet";
            survey.found.refusals.push(seen.refuse("", why));
            continue;
        };
        let inside = |group: u32| {
            let of = |p: &&Seen| {
                let outer = p.fields.field("NSpgid")?.split_ascii_whitespace().next()?;
                (outer.parse() == Ok(group)).then(|| p.innermost("NSpgid"))?
            };
            processes.iter().find_map(|p| of(&p)).unwrap_or(0)
        };
        let (session, group) = (seen.innermost("NSsid"), u32::try_from(foreground).map(inside));
        if let Thing::Terminal(record) = &mut survey.found.objects[sides.object].thing {
            record.session = session.unwrap_or(0);
            record.foreground = group.unwrap_or(0);
        }
    }
}

/// Reads the data in transit, and puts it back.
pub(crate) fn contents(found: &mut Found) -> Outcome<()> {
    for sides in std::mem::take(&mut found.terminals) {
        let Thing::Terminal(record) = &mut found.objects[sides.object].thing else { continue };
        let number = record.number;
        let step = |e| {
            let path = format!("/dev/pts/{number}");
            Error::file("cannot read what is on its way through", path)(std::io::Error::from(e))
        };
        on_the_way(&sides, record).map_err(step)?;
    }
    Ok(())
}

fn on_the_way(sides: &TerminalSides, record: &mut Terminal) -> Result<(), Errno> {
    // A slave that no process has open is not opened here: its close would be an event at the
    // master.
    let Some(slave) = &sides.slave else { return Ok(()) };
    let Ok(own) = <[u8; TERMIOS_BYTES]>::try_from(&record.termios.0[..]) else { return Ok(()) };
    let quiet = modes::quiet(&own);
    call::set_termios(slave.as_fd(), &modes::raw(&quiet))?;
    let moved = || -> Result<(Vec<u8>, Vec<u8>), Errno> {
        let typed = take(slave.as_fd())?;
        let written = match &sides.master {
            Some(master) if !record.packet => take(master.as_fd())?,
            _ => Vec::new(),
        };
        Ok((typed, written))
    };
    let put_back = |(typed, written): &(Vec<u8>, Vec<u8>)| -> Result<(), Errno> {
        call::set_termios(slave.as_fd(), &quiet)?;
        typed.iter().try_for_each(|byte| call::type_byte(slave.as_fd(), *byte))?;
        let mut rest = &written[..];
        while !rest.is_empty() {
            let n = rustix::io::write(slave, rest)?;
            rest = &rest[n..];
        }
        Ok(())
    };
    let moved = moved().and_then(|moved| put_back(&moved).map(|()| moved));
    call::set_termios(slave.as_fd(), &own)?;
    let (typed, written) = moved?;
    (record.typed, record.written) = (Bytes(typed), Bytes(written));
    Ok(())
}

/// Reads all available data without blocking.
fn take(side: BorrowedFd<'_>) -> Result<Vec<u8>, Errno> {
    let mut all = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let mut fds = [PollFd::new(&side, PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut fds, Some(&now))?;
        if !fds[0].revents().contains(PollFlags::IN) {
            return Ok(all);
        }
        match rustix::io::read(side, &mut buffer) {
            // A master with all slaves closed.
            Ok(0) | Err(Errno::IO | Errno::AGAIN) => return Ok(all),
            found => all.extend_from_slice(&buffer[..found?]),
        }
        if all.len() > ON_THE_WAY_MAX {
            return Err(Errno::NOBUFS);
        }
    }
}
