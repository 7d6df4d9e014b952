//! Pending (un-accepted) connections of a listening unix socket, and the data written into them;
//! see `embryo.bpf.c`.

use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use dormouse_kernel::CallError;

use crate::call::{Map, Program};
use crate::error::BpfError;
use crate::group::{Description, is_named};
use crate::record::{Field, Record, record};

static GROUP: Description = Description {
    name: "embryo",
    object: include_bytes!(concat!(env!("OUT_DIR"), "/embryo.o")),
    programs: &[],
    anchor: READ,
    maps: &[ASKED, PIECES, PAGE, FILES],
    about: ASKED,
};

const READ: &str = "dm_embryo_read";
const FIND: &str = "dm_embryo_find";
const HOLDERS: &str = "dm_embryo_holders";
const ASKED: &str = "dm_embryo";
const PIECES: &str = "dm_embryo_piece";
const PAGE: &str = "dm_embryo_page";
const FILES: &str = "dm_embryo_file";

/// Bytes of a page.
const PAGE_BYTES: usize = 4096;
/// Supplementary groups that are reported.
const GROUPS_MAX: usize = 256;
/// Bytes of one piece.
const PIECE_BYTES: usize = 4096;

/// LIMIT: open files in one search for holders.
pub const FILES_MAX: usize = 4096;

record! {
    /// The request, and the result.
    struct Asked = "dm_embryo" {
        fd: u32,
        place: u32,
        found: u32,
        whole: u32,
        urgent: u32,
        pieces: u32,
        client: u64,
        named: u32,
        pid: u32,
        uid: u32,
        gid: u32,
        groups: u32,
        reserved: u32,
        group: [u32; GROUPS_MAX],
    }
}

record! {
    /// A part of a message.
    struct Piece = "dm_embryo_piece" {
        message: u32,
        bytes: u32,
        files: u32,
        pid: u32,
        uid: u32,
        gid: u32,
        known: u32,
        reserved: u32,
        data: [u8; PIECE_BYTES],
    }
}

record! {
    /// A page with known description and address.
    struct Page = "dm_embryo_page" {
        page: u64,
        address: u64,
        frame: u64,
        content: [u64; 4],
        fd: u32,
        reserved: u32,
    }
}

record! {
    /// A holder of an open file.
    struct Holder = "dm_embryo_holder" {
        file: u64,
        fd: u32,
        reserved: u32,
    }
}

/// A pending connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Embryo {
    /// The inode of the client's socket; 0 if that was closed.
    pub client: u64,
    /// Whether that socket has a name.
    pub named: bool,
    /// Process, user and group of the client, as this process sees them. The process is 0 if it is
    /// in another pid namespace.
    pub by: [u32; 3],
    /// Its supplementary groups. LIMIT: None if there are more than 256.
    pub groups: Option<Vec<u32>>,
    /// The written data. LIMIT: None if that is more than 1,024 pieces of a page each; a message is
    /// at least one piece.
    pub messages: Option<Vec<Message>>,
    /// One byte of it is out of band (`MSG_OOB`).
    pub urgent: bool,
}

/// A packet in the queue of a connection.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Message {
    /// The bytes of the message.
    pub data: Vec<u8>,
    /// Addresses of open files sent along.
    pub files: Vec<u64>,
    /// Process, user and group of the sender, as this process sees them, if they were sent along.
    /// The process is 0 if it is in another pid namespace.
    pub sender: Option<[u32; 3]>,
}

/// The programs and their maps, loaded for as long as this is there.
#[derive(Debug)]
pub struct Embryos {
    read: Program,
    holders: Program,
    asked: Map,
    pieces: Map,
    files: Map,
    /// As long as the program that reads it.
    _page: Map,
}

/// Tests whether this kernel loads the programs (Linux 6.9).
pub fn supported() -> Result<(), BpfError> {
    GROUP.supported(&[])
}

impl Embryos {
    /// Loads the programs, which takes some 100 ms.
    pub fn load() -> Result<Self, BpfError> {
        let missing = |name: &str| BpfError::Missing { object: GROUP.name, name: name.into() };
        let (maps, programs) = GROUP.load_alone()?;
        let mut maps = maps.into_iter();
        let mut map = |name| maps.next().ok_or_else(|| missing(name));
        let (asked, pieces, page, files) = (map(ASKED)?, map(PIECES)?, map(PAGE)?, map(FILES)?);
        let mut programs: Vec<Program> = programs;
        let mut program = |name: &str| {
            let at = programs.iter().position(|program| is_named(&program.name, name));
            at.map(|at| programs.swap_remove(at)).ok_or_else(|| missing(name))
        };
        let (read, find, holders) = (program(READ)?, program(FIND)?, program(HOLDERS)?);
        // If the page is not found, messages of more than a page cannot be read.
        let _ = find_page(&page, &find);
        Ok(Self { read, holders, asked, pieces, files, _page: page })
    }

    /// Reads the pending connection at a place in the queue of a listening socket; it stays in the
    /// queue. `listener` is a descriptor of the socket. `None` if the queue is shorter.
    ///
    /// `None`, too, if it is accepted meanwhile.
    pub fn read(
        &mut self,
        listener: BorrowedFd<'_>,
        place: u32,
    ) -> Result<Option<Embryo>, CallError> {
        let key = 0u32.to_ne_bytes();
        let asked = Asked { fd: listener.as_raw_fd() as u32, place, ..Asked::zero() };
        self.asked.set(&key, &asked.to_bytes())?;
        run(&self.read, std::process::id())?;
        let found = Asked::from_bytes(&self.asked.get(&key)?.unwrap_or_default());
        if found.found == 0 {
            return Ok(None);
        }
        let messages = match found.whole {
            0 => None,
            _ => Some(self.messages(found.pieces)?),
        };
        Ok(Some(Embryo {
            client: found.client,
            named: found.named != 0,
            by: [found.pid, found.uid, found.gid],
            groups: found.group.get(..found.groups as usize).map(<[u32]>::to_vec),
            messages,
            urgent: found.urgent != 0,
        }))
    }

    fn messages(&self, pieces: u32) -> Result<Vec<Message>, CallError> {
        let mut all: Vec<Message> = Vec::new();
        for n in 0..pieces {
            let piece = Piece::from_bytes(&self.pieces.get(&n.to_ne_bytes())?.unwrap_or_default());
            let data = piece.data.get(..piece.bytes as usize).unwrap_or_default();
            if piece.message as usize >= all.len() {
                all.push(Message::default());
            }
            let Some(message) = all.last_mut() else { continue };
            if piece.files == 0 {
                message.data.extend_from_slice(data);
            } else {
                message.files.extend(data.chunks_exact(8).map(u64::get));
            }
            message.sender = (piece.known != 0).then_some([piece.pid, piece.uid, piece.gid]);
        }
        Ok(all)
    }

    /// Returns which of the open files at these addresses a process has: the address, and its
    /// descriptor.
    ///
    /// LIMIT: [`FILES_MAX`] of them.
    pub fn holders(&mut self, pid: u32, files: &[u64]) -> Result<Vec<(u64, u32)>, CallError> {
        for file in files {
            self.files.set(&file.to_ne_bytes(), &0u32.to_ne_bytes())?;
        }
        let found = run(&self.holders, pid);
        for file in files {
            self.files.remove(&file.to_ne_bytes())?;
        }
        let holders = found?;
        let holders = holders.chunks_exact(size_of::<Holder>()).map(Holder::from_bytes);
        Ok(holders.map(|holder| (holder.file, holder.fd)).collect())
    }
}

/// Finds the address and the description of one page.
fn find_page(map: &Map, program: &Program) -> Result<(), CallError> {
    let failed = |what: &'static str| {
        move |errno: rustix::io::Errno| CallError::new("mmap", what.into(), errno.raw_os_error())
    };
    let file = rustix::fs::memfd_create("dormouse-page", rustix::fs::MemfdFlags::CLOEXEC)
        .map_err(failed("a page"))?;
    let mut content = [0; size_of::<[u64; 4]>()];
    rustix::rand::getrandom(&mut content, rustix::rand::GetRandomFlags::empty())
        .map_err(failed("what a page begins with"))?;
    rustix::io::write(&file, &content).map_err(failed("what a page begins with"))?;
    let frame = frame_of(file.as_fd()).map_err(failed("where a page is"))?;
    let fd = file.as_raw_fd() as u32;
    let record = Page { frame, content: Field::get(&content), fd, ..Page::zero() };
    map.set(&0u32.to_ne_bytes(), &record.to_bytes())?;
    run(program, std::process::id()).map(drop)
}

/// The physical address of the first page of a file in memory, in pages (proc_pid_pagemap(5)).
fn frame_of(file: BorrowedFd<'_>) -> rustix::io::Result<u64> {
    use rustix::mm::{MapFlags, ProtFlags};
    const PRESENT: u64 = 1 << 63;
    const FRAME: u64 = (1 << 55) - 1;
    let (access, flags) = (ProtFlags::READ, MapFlags::SHARED | MapFlags::POPULATE);
    // SAFETY: the kernel chooses a place where nothing is; nothing is read from it here.
    let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), PAGE_BYTES, access, flags, file, 0) }?;
    let entry = std::fs::File::open("/proc/self/pagemap").and_then(|pages| {
        let mut entry = [0; 8];
        std::os::unix::fs::FileExt::read_exact_at(&pages, &mut entry, at as u64 / 4096 * 8)?;
        Ok(u64::from_ne_bytes(entry))
    });
    // SAFETY: it was mapped above, and nothing else refers to it.
    unsafe { rustix::mm::munmap(at, PAGE_BYTES) }?;
    let entry = entry.map_err(|_| rustix::io::Errno::IO)?;
    match entry & FRAME {
        frame if entry & PRESENT != 0 && frame != 0 => Ok(frame),
        _ => Err(rustix::io::Errno::NXIO),
    }
}

/// Returns the output of a program that is run over the open files of a process.
fn run(program: &Program, pid: u32) -> Result<Vec<u8>, CallError> {
    let mut file = std::fs::File::from(dormouse_kernel::iterate_task(program.as_fd(), pid)?);
    let mut output = Vec::new();
    file.read_to_end(&mut output).map_err(|e| {
        let errno = e.raw_os_error().unwrap_or(libc::EIO);
        CallError::new("read", format!("an iterator over the files of {pid}"), errno)
    })?;
    Ok(output)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::{UnixListener, UnixStream};

    use crate::group::tests::assert_full;
    use crate::record::tests::assert_same;

    use super::*;

    #[test]
    fn records_have_the_layout_of_the_header() {
        assert_same::<Asked>(GROUP.object);
        assert_same::<Piece>(GROUP.object);
        assert_same::<Page>(GROUP.object);
        assert_same::<Holder>(GROUP.object);
    }

    #[test]
    fn root_search_takes_as_many_files_as_its_limit() {
        let Ok(embryos) = Embryos::load().inspect_err(|e| eprintln!("SKIPPED: {e}")) else {
            return;
        };
        assert_full(&embryos.files, FILES_MAX as u32);
    }

    #[test]
    fn root_connection_with_as_many_pieces_as_the_limit_is_read_and_one_more_is_not() {
        let Ok(mut embryos) = Embryos::load().inspect_err(|e| eprintln!("SKIPPED: {e}")) else {
            return;
        };
        let pieces = embryos.pieces.capacity;
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let mut client = UnixStream::connect(&path).unwrap();
        // A packet of one byte costs as much of the send buffer as one of some hundred.
        rustix::net::sockopt::set_socket_send_buffer_size_force(&client, 64 << 20).unwrap();
        for _ in 0..pieces {
            client.write_all(b"x").unwrap();
        }
        let found = embryos.read(listener.as_fd(), 0).unwrap().unwrap();
        assert_eq!(found.messages.map(|messages| messages.len()), Some(pieces as usize));
        client.write_all(b"x").unwrap();
        let found = embryos.read(listener.as_fd(), 0).unwrap().unwrap();
        assert_eq!(found.messages, None);
    }

    #[test]
    fn root_pending_connections_are_read_in_place() {
        let mut embryos = match Embryos::load() {
            Ok(embryos) => embryos,
            Err(e) => {
                eprintln!("SKIPPED: {e}");
                return;
            }
        };
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let silent = UnixStream::connect(&path).unwrap();
        let mut small = UnixStream::connect(&path).unwrap();
        small.write_all(b"first").unwrap();
        small.write_all(b"second").unwrap();
        let mut large = UnixStream::connect(&path).unwrap();
        let text: Vec<u8> = (0..150_000u32).map(|n| (n * 7 + n / 251) as u8).collect();
        large.write_all(&text).unwrap();
        let mut read = |place| embryos.read(listener.as_fd(), place).unwrap();
        let inode = |socket: &UnixStream| rustix::fs::fstat(socket).unwrap().st_ino;
        let found = read(0).unwrap();
        assert_eq!((found.client, found.messages), (inode(&silent), Some(Vec::new())));
        let own = [std::process::id(), 0, 0];
        assert_eq!((found.by, found.named), (own, false));
        let groups = rustix::process::getgroups().unwrap();
        let groups: Vec<u32> = groups.into_iter().map(|group| group.as_raw()).collect();
        assert_eq!(found.groups, Some(groups));
        let found = read(1).unwrap();
        let output: Vec<Vec<u8>> = found.messages.unwrap().into_iter().map(|m| m.data).collect();
        assert_eq!(
            (found.client, output),
            (inode(&small), vec![b"first".to_vec(), b"second".to_vec()])
        );
        let found = read(2).unwrap();
        let output: Vec<u8> = found.messages.unwrap().into_iter().flat_map(|m| m.data).collect();
        assert!(found.client == inode(&large) && output == text);
        assert_eq!(read(3), None);
        // Reading removed nothing.
        drop(small);
        assert_eq!(read(1).unwrap().client, 0, "it was closed");
        let mut output = Vec::new();
        listener.accept().unwrap();
        listener.accept().unwrap().0.read_to_end(&mut output).unwrap();
        assert_eq!(output, b"firstsecond");
    }
}
