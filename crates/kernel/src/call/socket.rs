//! Options of sockets by number (getsockopt(2), setsockopt(2)), for saving sockets.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::check;
use crate::Errno;

/// getsockopt(2) into a buffer; gives how much of it was filled.
pub fn socket_option(
    socket: BorrowedFd<'_>,
    level: i32,
    name: i32,
    buffer: &mut [u8],
) -> Result<usize, Errno> {
    let mut length = buffer.len() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes, the size of the buffer.
    check(unsafe {
        libc::syscall(
            libc::SYS_getsockopt,
            socket.as_raw_fd(),
            level,
            name,
            buffer.as_mut_ptr(),
            &raw mut length,
        )
    })?;
    Ok(length as usize)
}

/// getsockopt(2) of an option that is an int.
pub fn int_option(socket: BorrowedFd<'_>, level: i32, name: i32) -> Result<i32, Errno> {
    let mut bytes = [0; 4];
    socket_option(socket, level, name, &mut bytes)?;
    Ok(i32::from_ne_bytes(bytes))
}

/// The network namespace of a socket (SIOCGSKNS, Linux 4.10). The caller needs CAP_NET_ADMIN over
/// it.
pub fn network_of(socket: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    const GET_NAMESPACE: u64 = 0x894c;
    // SAFETY: the request takes nothing, and gives a new descriptor.
    let fd = check(unsafe {
        libc::syscall(libc::SYS_ioctl, socket.as_raw_fd(), GET_NAMESPACE, 0usize)
    })?;
    // SAFETY: the kernel has just made it for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// The file that a unix socket is bound to, with O_PATH, whatever its name is now (SIOCUNIXFILE, Linux 4.20); ENOENT
/// for one without. The caller needs CAP_NET_ADMIN over its network namespace.
pub fn bound_file(socket: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    const OPEN_FILE: u64 = 0x89e0;
    // SAFETY: the request takes nothing, and gives a new descriptor.
    let fd =
        check(unsafe { libc::syscall(libc::SYS_ioctl, socket.as_raw_fd(), OPEN_FILE, 0usize) })?;
    // SAFETY: the kernel has just made it for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// setsockopt(2) of an option of any length.
pub fn set_socket_option(
    socket: BorrowedFd<'_>,
    level: i32,
    name: i32,
    value: &[u8],
) -> Result<(), Errno> {
    // SAFETY: pointer and length describe the value, which the kernel only reads.
    check(unsafe {
        libc::syscall(
            libc::SYS_setsockopt,
            socket.as_raw_fd(),
            level,
            name,
            value.as_ptr(),
            value.len(),
        )
    })
    .map(drop)
}

/// Bytes of packets that a socket has not finished sending (SIOCOUTQ of udp(7)).
pub fn unsent_bytes(socket: BorrowedFd<'_>) -> Result<u32, Errno> {
    const WAITING: u64 = 0x5411;
    let mut found = 0i32;
    // SAFETY: the request writes one int.
    check(unsafe { libc::syscall(libc::SYS_ioctl, socket.as_raw_fd(), WAITING, &raw mut found) })?;
    Ok(found as u32)
}

/// Bytes that a TCP socket has not had acknowledged, and how many of them it has not sent (tcp(7):
/// SIOCOUTQ, and SIOCOUTQNSD since 2.6.36).
pub fn send_queue(socket: BorrowedFd<'_>) -> Result<(u32, u32), Errno> {
    const WAITING: u64 = 0x5411;
    const UNSENT: u64 = 0x894b;
    let mut found = [0i32; 2];
    for (value, request) in found.iter_mut().zip([WAITING, UNSENT]) {
        // SAFETY: both requests write one int.
        check(unsafe {
            libc::syscall(libc::SYS_ioctl, socket.as_raw_fd(), request, &raw mut *value)
        })?;
    }
    Ok((found[0] as u32, found[1] as u32))
}

/// setsockopt(2) of an option that is an int.
pub fn set_int_option(
    socket: BorrowedFd<'_>,
    level: i32,
    name: i32,
    value: i32,
) -> Result<(), Errno> {
    set_socket_option(socket, level, name, &value.to_ne_bytes())
}

/// The packet filter of a socket (SO_GET_FILTER, Linux 3.8), 8 bytes an instruction; empty where it
/// has none. EACCES: it has a program of another kind.
pub fn packet_filter(socket: BorrowedFd<'_>) -> Result<Vec<u8>, Errno> {
    /// BPF_MAXINSNS.
    const INSTRUCTIONS_MAX: usize = 4096;
    let mut buffer = vec![0; INSTRUCTIONS_MAX * 8];
    // Both lengths are in instructions; no filter is longer than the buffer.
    let instructions = socket_option(socket, libc::SOL_SOCKET, libc::SO_GET_FILTER, &mut buffer)?;
    buffer.truncate(instructions * 8);
    Ok(buffer)
}

/// Gives a socket a packet filter (SO_ATTACH_FILTER), of 8 bytes an instruction.
pub fn attach_filter(socket: BorrowedFd<'_>, code: &[u8]) -> Result<(), Errno> {
    #[repr(C)]
    struct Program {
        instructions: u16,
        code: *const u8,
    }
    let instructions = u16::try_from(code.len() / 8).map_err(|_| Errno::INVAL)?;
    let program = Program { instructions, code: code.as_ptr() };
    // SAFETY: the kernel reads one struct sock_fprog, and `instructions` instructions from `code`,
    // which contains as many.
    check(unsafe {
        libc::syscall(
            libc::SYS_setsockopt,
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            &raw const program,
            size_of::<Program>(),
        )
    })
    .map(drop)
}

/// bind(2) of a packet socket (packet(7)) to a protocol and a device, of which 0 is every one.
pub fn bind_packet(socket: BorrowedFd<'_>, protocol: u16, device: u32) -> Result<(), Errno> {
    // struct sockaddr_ll: family, protocol in network order, device; the rest is not read.
    let mut address = [0u8; size_of::<libc::sockaddr_ll>()];
    address[..2].copy_from_slice(&(libc::AF_PACKET as u16).to_ne_bytes());
    address[2..4].copy_from_slice(&protocol.to_be_bytes());
    address[4..8].copy_from_slice(&device.to_ne_bytes());
    let (fd, at) = (socket.as_raw_fd(), address.as_ptr());
    // SAFETY: pointer and length describe the address, which the kernel only reads.
    check(unsafe { libc::syscall(libc::SYS_bind, fd, at, address.len()) }).map(drop)
}
