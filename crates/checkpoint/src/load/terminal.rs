//! Terminals: created in the order of their numbers, as the kernel assigns the lowest free one. The
//! console exists already: it was created with the newborn, and its master belongs to the engine.
//!
//! Recorded input and output are written while nothing echoes. The terminal modes are set once all
//! processes exist, and the kernel has long processed the data.

use dormouse_record::{Error, Result, Terminal, TerminalSide, Thing};

use super::open;
use super::plan::Plan;
use crate::inject::program::{Arg, Call, Cell, Sequence};
use crate::terminal_modes as modes;

const TIOCSPTLCK: u64 = 0x4004_5431;
const TIOCPKT: u64 = 0x5420;
const TIOCEXCL: u64 = 0x540c;
const TIOCSWINSZ: u64 = 0x5414;
const TIOCSCTTY: u64 = 0x540e;
const TIOCSPGRP: u64 = 0x5410;
const TIOCGPTPEER: u64 = 0x5441;
const TCSETS2: u64 = 0x402c_542b;

fn ioctl(cell: Cell, request: u64, argument: impl Into<Arg>) -> Call {
    Call::new(libc::SYS_ioctl, [cell.into(), Arg::Number(request), argument.into()])
}

fn all<'r>(plan: &Plan<'r>) -> Vec<(usize, &'r Terminal)> {
    let records = plan.records;
    let objects = records.objects.iter().enumerate();
    let mut all: Vec<_> = objects
        .filter_map(|(n, object)| match &object.thing {
            Thing::Terminal(terminal) => Some((n, terminal)),
            _ => None,
        })
        .collect();
    all.sort_unstable_by_key(|(_, terminal)| terminal.number);
    all
}

/// Makes all terminals, and opens their sides.
pub(super) fn make_all(plan: &mut Plan<'_>, sequence: &mut Sequence) -> Result<()> {
    let has_console = plan.allowed.console;
    let mut next = u32::from(has_console);
    for (index, terminal) in all(plan) {
        let number = terminal.number;
        let what = format!("object {index} (terminal /dev/pts/{number})");
        if terminal.is_console != (has_console && number == 0) {
            return Err(Error::Elsewhere(format!(
                "{what} is {}the console of this container",
                if terminal.is_console { "not " } else { "" }
            )));
        }
        let master = if terminal.is_console { None } else { Some(plan.cell()) };
        while let Some(cell) = master.filter(|_| next <= number) {
            // The last one is used; those between stay open until all numbers are assigned.
            let text = plan.builder.text(b"/dev/pts/ptmx");
            let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
            let args = [Arg::from(libc::AT_FDCWD), text.into(), Arg::from(flags), Arg::Number(0)];
            sequence.call_into(what.clone(), cell, Call::new(libc::SYS_openat, args));
            next += 1;
        }
        make(plan, sequence, &what, index, terminal, master)?;
    }
    Ok(())
}

/// Makes a terminal with that master, the console without one, and opens its sides.
fn make(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    index: usize,
    terminal: &Terminal,
    master: Option<Cell>,
) -> Result<()> {
    let records = plan.records;
    let sides = records.objects.iter().enumerate().filter_map(|(n, object)| match &object.thing {
        Thing::TerminalSide(side) if side.terminal == index => Some((n, side)),
        _ => None,
    });
    let sides: Vec<_> = sides.collect();
    if let Some(master) = master {
        let zero = plan.builder.data(&[0; 4]);
        sequence.call(what, ioctl(master, TIOCSPTLCK, zero));
    }
    // A slave that was not open is not opened: its close would be an event at the master.
    let is_open = terminal.session != 0 || sides.iter().any(|(_, side)| !side.is_master);
    let slave = match is_open || master.is_none() {
        true => {
            let made = open::path(plan, sequence, what, &path_of(terminal), libc::O_RDWR as u32)?;
            Some(plan.lift(sequence, what, made))
        }
        false => None,
    };
    let Some(control) = slave.or(master) else { return Ok(()) };
    plan.terminals.insert(index, control);
    let size: Vec<u8> = terminal.size.iter().flat_map(|n| n.to_ne_bytes()).collect();
    let size = plan.builder.data(&size);
    sequence.call(what, ioctl(control, TIOCSWINSZ, size));
    if let Ok(own) = terminal.termios.0[..].try_into() {
        let quiet = plan.builder.data(&modes::quiet(own));
        sequence.call(what, ioctl(control, TCSETS2, quiet));
    }
    if let Some(slave) = slave {
        let (uid, gid, mode) = terminal.owner;
        let owner = [slave.into(), uid.into(), gid.into()];
        sequence.call(what, Call::new(libc::SYS_fchown, owner));
        sequence.call(what, Call::new(libc::SYS_fchmod, [slave.into(), mode.into()]));
        write(plan, sequence, what, slave, &terminal.written.0);
    }
    if let Some(master) = master {
        write(plan, sequence, what, master, &terminal.typed.0);
        if terminal.packet {
            let one = plan.builder.data(&1u32.to_ne_bytes());
            sequence.call(what, ioctl(master, TIOCPKT, one));
        }
    }
    for (n, side) in sides {
        let cell = open_side(plan, sequence, what, (terminal, side), master)?;
        plan.cells[n] = Some(cell);
    }
    if terminal.exclusive {
        sequence.call(what, ioctl(control, TIOCEXCL, 0u32));
    }
    if let Some(master) = master.filter(|_| terminal.locked) {
        let one = plan.builder.data(&1u32.to_ne_bytes());
        sequence.call(what, ioctl(master, TIOCSPTLCK, one));
    }
    Ok(())
}

/// Opens a side of a terminal.
fn open_side(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    (terminal, side): (&Terminal, &TerminalSide),
    master: Option<Cell>,
) -> Result<Cell> {
    match (side.is_master, master) {
        (true, Some(master)) => {
            let cell = plan.lift(sequence, what, master);
            open::set_flags(sequence, what, cell, side.flags);
            Ok(cell)
        }
        (true, None) => {
            let text = format!("{what} has a master inside, and is the console");
            Err(Error::damaged("section 'object'", text))
        }
        // Opened by its master, as openpty(3) does: only open(2) adds O_LARGEFILE.
        (false, Some(master)) if side.flags & open::O_LARGEFILE as u32 == 0 => {
            let flags = side.flags | libc::O_NOCTTY as u32;
            let made = plan.cell();
            sequence.call_into(what, made, ioctl(master, TIOCGPTPEER, flags));
            Ok(plan.lift(sequence, what, made))
        }
        (false, _) => {
            let path = match side.as_console {
                true => "/dev/console".to_owned(),
                false => path_of(terminal),
            };
            let made = open::path(plan, sequence, what, &path, side.flags)?;
            Ok(plan.lift(sequence, what, made))
        }
    }
}

/// The path of the slave.
fn path_of(terminal: &Terminal) -> String {
    format!("/dev/pts/{}", terminal.number)
}

fn write(plan: &mut Plan<'_>, sequence: &mut Sequence, what: &str, cell: Cell, bytes: &[u8]) {
    if !bytes.is_empty() {
        let (at, length) = (plan.builder.data(bytes), bytes.len() as u64);
        let args = [cell.into(), at.into(), length.into()];
        sequence.call(what, Call::new(libc::SYS_write, args).returns(length));
    }
}

/// Makes the leader of a session acquire its terminal. ORDER: before it creates children, which
/// inherit it.
pub(super) fn take(plan: &mut Plan<'_>, sequence: &mut Sequence, session: u32) {
    for (index, terminal) in all(plan) {
        if terminal.session == session
            && !(terminal.is_console && session == 1)
            && let Some(cell) = plan.terminals.get(&index)
        {
            let what = format!("the terminal of session {session}");
            sequence.call(what, ioctl(*cell, TIOCSCTTY, 0u32));
        }
    }
}

/// Sets the foreground process group. ORDER: once all groups exist.
pub(super) fn foreground(plan: &mut Plan<'_>, sequence: &mut Sequence, session: u32) {
    for (index, terminal) in all(plan) {
        if terminal.session == session
            && terminal.foreground != 0
            && let Some(cell) = plan.terminals.get(&index).copied()
        {
            let group = plan.builder.data(&terminal.foreground.to_ne_bytes());
            let what = format!("the foreground of session {session}");
            // The foreground group may have no member any more.
            sequence.call(what, ioctl(cell, TIOCSPGRP, group).lenient());
        }
    }
}

/// Sets the terminal modes. ORDER: after the kernel has processed the input, which it does
/// asynchronously unless the terminal is polled: adding it to an epoll polls it.
pub(super) fn settle(plan: &mut Plan<'_>, sequence: &mut Sequence) -> Result<()> {
    for (index, terminal) in all(plan) {
        let Some(cell) = plan.terminals.get(&index).copied() else { continue };
        let what = format!("object {index} (terminal /dev/pts/{})", terminal.number);
        if !terminal.typed.0.is_empty() {
            let epoll = plan.cell();
            let create = Call::new(libc::SYS_epoll_create1, [Arg::Number(0)]);
            sequence.call_into(what.clone(), epoll, create);
            let event = plan.builder.data(&[0; 12]);
            let args = [epoll.into(), Arg::from(libc::EPOLL_CTL_ADD), cell.into(), event.into()];
            sequence.call(what.clone(), Call::new(libc::SYS_epoll_ctl, args));
        }
        let termios = plan.builder.data(&terminal.termios.0);
        sequence.call(what, ioctl(cell, TCSETS2, termios));
    }
    Ok(())
}
