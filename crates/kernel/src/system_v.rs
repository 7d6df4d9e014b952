//! System V IPC objects (sysvipc(7)), for saving and restoring them.
//!
//! Every call is about the ipc namespace of the thread that makes it.

use std::ffi::c_long;
use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags};

use crate::Errno;
use crate::call::check;

/// Kinds of objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SystemV {
    /// Shared memory.
    Memory,
    /// A set of semaphores.
    Semaphores,
    /// A queue of messages.
    Queue,
}

/// An owner and permissions (IPC_SET).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// The user, by the id that the caller's user namespace has for it.
    pub uid: u32,
    /// The group, the same way.
    pub gid: u32,
    /// Permission bits.
    pub mode: u32,
}

/// Makes an object that is not there yet: of `size` bytes of memory or semaphores.
pub fn make_system_v(kind: SystemV, key: i32, size: usize, mode: u32) -> Result<i32, Errno> {
    let flags = (libc::IPC_CREAT | libc::IPC_EXCL) as u32 | mode & 0o777;
    // SAFETY: numbers only.
    let id = check(unsafe {
        match kind {
            SystemV::Memory => libc::syscall(libc::SYS_shmget, key, size, flags),
            SystemV::Semaphores => libc::syscall(libc::SYS_semget, key, size, flags),
            SystemV::Queue => libc::syscall(libc::SYS_msgget, key, flags),
        }
    })?;
    Ok(id as i32)
}

/// Sets the owner of an object.
pub fn set_owner(kind: SystemV, id: i32, owner: Owner) -> Result<(), Errno> {
    macro_rules! change {
        ($ds:ty, $perm:ident, |$command:ident, $at:ident| $call:expr) => {{
            // SAFETY: plain numbers, of which zero is one.
            let mut ds: $ds = unsafe { std::mem::zeroed() };
            for $command in [libc::IPC_STAT, libc::IPC_SET] {
                let $at = &raw mut ds;
                // SAFETY: both commands take this structure, which outlives the call.
                check(unsafe { $call })?;
                ds.$perm.uid = owner.uid;
                ds.$perm.gid = owner.gid;
                ds.$perm.mode = owner.mode as _;
            }
        }};
    }
    match kind {
        SystemV::Memory => change!(libc::shmid_ds, shm_perm, |command, at| {
            libc::syscall(libc::SYS_shmctl, id, command, at)
        }),
        SystemV::Semaphores => change!(libc::semid_ds, sem_perm, |command, at| {
            libc::syscall(libc::SYS_semctl, id, 0, command, at)
        }),
        SystemV::Queue => change!(libc::msqid_ds, msg_perm, |command, at| {
            libc::syscall(libc::SYS_msgctl, id, command, at)
        }),
    }
    Ok(())
}

/// Removes shared memory when the last has detached it (IPC_RMID).
pub fn remove_segment(id: i32) -> Result<(), Errno> {
    // SAFETY: the command takes no structure.
    check(unsafe { libc::syscall(libc::SYS_shmctl, id, libc::IPC_RMID, 0) }).map(drop)
}

/// The file that the kernel keeps shared memory in, for reading and writing; attached meanwhile.
pub fn segment_file(id: i32, bytes: u64) -> Result<OwnedFd, Errno> {
    // SAFETY: the kernel chooses where; nothing is there yet, and nothing refers to it.
    let at = check(unsafe { libc::syscall(libc::SYS_shmat, id, 0, 0) })? as u64;
    let end = at + bytes.next_multiple_of(4096);
    let path = format!("/proc/self/map_files/{at:x}-{end:x}");
    let opened = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
    // SAFETY: it was attached above, and no reference to it was made.
    check(unsafe { libc::syscall(libc::SYS_shmdt, at) })?;
    opened
}

/// The values of a set of semaphores (GETALL).
pub fn semaphore_values(id: i32, count: usize) -> Result<Vec<u16>, Errno> {
    const GET_ALL: i32 = 13;
    let mut values = vec![0u16; count];
    // SAFETY: the kernel writes as many values as the set has, which is `count`; the number is
    // fixed when the set is made.
    check(unsafe { libc::syscall(libc::SYS_semctl, id, 0, GET_ALL, values.as_mut_ptr()) })?;
    Ok(values)
}

/// Sets all values of a set that was made with so many (SETALL).
pub fn set_semaphore_values(id: i32, values: &[u16]) -> Result<(), Errno> {
    const SET_ALL: i32 = 17;
    // SAFETY: the kernel reads as many values as the set has, which was made with so many.
    check(unsafe { libc::syscall(libc::SYS_semctl, id, 0, SET_ALL, values.as_ptr()) }).map(drop)
}

/// A message's type and text, left in its queue (MSG_COPY); `None` behind the last. At most 64 KiB.
pub fn queued_message(id: i32, nth: usize) -> Result<Option<(i64, Vec<u8>)>, Errno> {
    const COPY: i32 = 0o40_000;
    const BYTES_MAX: usize = 64 << 10;
    let mut buffer = vec![0u8; 8 + BYTES_MAX];
    // SAFETY: the buffer holds a long and as many bytes as the length gives.
    let read = check(unsafe {
        libc::syscall(
            libc::SYS_msgrcv,
            id,
            buffer.as_mut_ptr(),
            BYTES_MAX,
            nth as c_long,
            COPY | libc::IPC_NOWAIT,
        )
    });
    match read {
        Err(Errno::NOMSG) => Ok(None),
        Err(e) => Err(e),
        Ok(bytes) => {
            let text = buffer[8..8 + bytes].to_vec();
            let kind = buffer.first_chunk::<8>().map_or(0, |b| i64::from_ne_bytes(*b));
            Ok(Some((kind, text)))
        }
    }
}

/// Puts a message into a queue that has room for it.
pub fn queue_message(id: i32, kind: i64, text: &[u8]) -> Result<(), Errno> {
    let mut buffer = kind.to_ne_bytes().to_vec();
    buffer.extend_from_slice(text);
    // SAFETY: the buffer holds a long and as many bytes as the length gives.
    check(unsafe {
        let at = buffer.as_ptr();
        libc::syscall(libc::SYS_msgsnd, id, at, text.len(), libc::IPC_NOWAIT)
    })
    .map(drop)
}

/// Runs a function as another, possibly unprivileged, user and group (effective ids of this thread
/// alone); afterwards the thread is root again.
pub fn as_user<T>(uid: u32, gid: u32, act: impl FnOnce() -> T) -> Result<T, Errno> {
    const SAME: i64 = -1;
    let set = |call, id: u32| {
        // SAFETY: numbers only; the raw call changes this thread and no other.
        check(unsafe { libc::syscall(call, SAME, i64::from(id), SAME) })
    };
    // ORDER: the group while it may be chosen; back the other way round.
    set(libc::SYS_setresgid, gid)?;
    let done = set(libc::SYS_setresuid, uid).map(|_| act());
    set(libc::SYS_setresuid, 0)?;
    set(libc::SYS_setresgid, 0)?;
    done
}
