//! Sockets whose group has a program that distributes connections or datagrams; see
//! `reuseport.bpf.c`.

use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use dormouse_kernel::CallError;

use crate::call::Program;
use crate::error::BpfError;
use crate::group::Description;
use crate::record::{Record, record};

static GROUP: Description = Description {
    name: "reuseport",
    object: include_bytes!(concat!(env!("OUT_DIR"), "/reuseport.o")),
    programs: &[],
    anchor: READ,
    maps: &[],
    about: "",
};

const READ: &str = "dm_reuseport_read";

record! {
    /// A socket with a program.
    struct Entry = "dm_reuseport" {
        fd: u32,
        reserved: u32,
    }
}

/// The program, loaded for as long as this is there.
#[derive(Debug)]
pub struct Groups(Program);

impl Groups {
    /// Loads the program.
    pub fn load() -> Result<Self, BpfError> {
        let missing = || BpfError::Missing { object: GROUP.name, name: READ.into() };
        let (_, programs) = GROUP.load_alone()?;
        Ok(Self(programs.into_iter().next().ok_or_else(missing)?))
    }

    /// Whether the group of a socket (SO_REUSEPORT) has a program that distributes what arrives.
    pub fn has_program(&self, socket: BorrowedFd<'_>) -> Result<bool, CallError> {
        let own = std::process::id();
        let mut file = std::fs::File::from(dormouse_kernel::iterate_task(self.0.as_fd(), own)?);
        let mut output = Vec::new();
        file.read_to_end(&mut output).map_err(|e| {
            let errno = e.raw_os_error().unwrap_or(libc::EIO);
            CallError::new("read", format!("an iterator over the files of {own}"), errno)
        })?;
        let mut all = output.chunks_exact(size_of::<Entry>()).map(Entry::from_bytes);
        Ok(all.any(|entry| entry.fd == socket.as_raw_fd() as u32))
    }
}

#[cfg(test)]
mod tests {
    use dormouse_kernel::call::{set_int_option, set_socket_option};

    use super::*;

    #[test]
    fn record_has_the_layout_of_the_header() {
        crate::record::tests::assert_same::<Entry>(GROUP.object);
    }

    #[test]
    fn root_program_of_a_group_is_found_at_each_of_its_sockets() {
        let Ok(groups) = Groups::load().inspect_err(|e| eprintln!("SKIPPED: {e}")) else {
            return;
        };
        let socket = |port: u16| {
            let socket = rustix::net::socket(
                rustix::net::AddressFamily::INET,
                rustix::net::SocketType::DGRAM,
                None,
            )
            .unwrap();
            set_int_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_REUSEPORT, 1).unwrap();
            let at = std::net::SocketAddr::from(([127, 0, 0, 1], port));
            rustix::net::bind(&socket, &at).unwrap();
            socket
        };
        let first = socket(0);
        let at = std::net::SocketAddr::try_from(rustix::net::getsockname(&first).unwrap()).unwrap();
        let (second, other) = (socket(at.port()), socket(0));
        let found = || [&first, &second, &other].map(|s| groups.has_program(s.as_fd()).unwrap());
        assert_eq!(found(), [false; 3]);
        // `return 0`, a packet filter of one instruction (struct sock_filter: code 6).
        let code = [6u64];
        let mut program = [0; 16];
        program[0] = 1;
        program[8..].copy_from_slice(&(code.as_ptr() as u64).to_ne_bytes());
        const ATTACH: i32 = 51; // SO_ATTACH_REUSEPORT_CBPF
        set_socket_option(first.as_fd(), libc::SOL_SOCKET, ATTACH, &program).unwrap();
        assert_eq!(found(), [true, true, false]);
    }
}
