//! The contexts of asynchronous I/O of a process (io_setup(2)), with their unfinished requests; see
//! `aio.bpf.c`.

use std::io::Read;
use std::os::fd::AsFd;

use dormouse_kernel::CallError;

use crate::call::{Map, Program};
use crate::error::BpfError;
use crate::group::Description;
use crate::record::{Record, record};

static GROUP: Description = Description {
    name: "aio",
    object: include_bytes!(concat!(env!("OUT_DIR"), "/aio.o")),
    programs: &[],
    anchor: "dm_aio_contexts",
    maps: &[CPU],
    about: CPU,
};

const CPU: &str = "dm_aio_cpu";

/// LIMIT: contexts of one process. The read of a process with more fails.
pub const CONTEXTS_MAX: usize = 512;

record! {
    /// A context, as the program writes it.
    struct Written = "dm_aio_context" {
        id: u64,
        unfinished: u64,
        slot: u32,
        requests: u32,
        events: u32,
        tail: u32,
        polls: u32,
        reserved: u32,
    }
}

/// A context of asynchronous I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Context {
    /// Its id, which is the address of its ring.
    pub id: u64,
    /// Requests without an event in the ring, and those that the kernel is about to free. A request that
    /// waits for an event of a file is one of them.
    pub unfinished: u64,
    /// Its place in the table of the address space, the id in the header of the ring.
    pub slot: u32,
    /// The number of requests that io_setup(2) was called with.
    pub requests: u32,
    /// Places of the ring.
    pub events: u32,
    /// The place of the next event.
    pub tail: u32,
    /// A request waits for an event of a file (IOCB_CMD_POLL), and may wait for ever.
    pub polls: bool,
}

/// The program, loaded for as long as this is there.
#[derive(Debug)]
pub struct Contexts {
    program: Program,
    /// As long as the program that reads it.
    _cpu: Vec<Map>,
}

/// Tests whether this kernel loads the program (Linux 6.1).
pub fn supported() -> Result<(), BpfError> {
    GROUP.supported(&[])
}

impl Contexts {
    /// Loads the program, which takes some 40 ms.
    pub fn load() -> Result<Self, BpfError> {
        let missing = || BpfError::Missing { object: GROUP.name, name: GROUP.anchor.into() };
        let (maps, programs) = GROUP.load_alone()?;
        let program = programs.into_iter().next().ok_or_else(missing)?;
        Ok(Self { program, _cpu: maps })
    }

    /// The contexts of a process, by their places in the table.
    ///
    /// Errors: E2BIG with more than [`CONTEXTS_MAX`].
    pub fn of(&self, pid: u32) -> Result<Vec<Context>, CallError> {
        let failed = |e: std::io::Error| {
            let errno = e.raw_os_error().unwrap_or(libc::EIO);
            CallError::new("read", format!("the contexts of asynchronous I/O of {pid}"), errno)
        };
        let iterator = dormouse_kernel::iterate_task(self.program.as_fd(), pid)?;
        let mut all = Vec::new();
        std::fs::File::from(iterator).read_to_end(&mut all).map_err(failed)?;
        let context = |bytes: &[u8]| {
            let Written { id, unfinished, slot, requests, events, tail, polls, .. } =
                Written::from_bytes(bytes);
            Context { id, unfinished, slot, requests, events, tail, polls: polls != 0 }
        };
        Ok(all.chunks_exact(size_of::<Written>()).map(context).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, OwnedFd};

    use crate::record::tests::assert_same;

    use super::*;

    /// `struct iocb` of io_submit(2).
    #[repr(C)]
    #[derive(Default)]
    struct Request {
        data: u64,
        key_and_flags: u64,
        operation: u16,
        priority: u16,
        file: u32,
        buffer: u64,
        bytes: u64,
        offset: u64,
        reserved: u64,
        flags: u64,
    }

    const READ: u16 = 0;
    const POLL: u16 = 5;

    /// A context of this process.
    struct Own(u64);

    impl Own {
        fn new(requests: u32) -> Self {
            let mut id = 0u64;
            // SAFETY: the call writes the number.
            let made = unsafe { libc::syscall(libc::SYS_io_setup, requests, &raw mut id) };
            assert_eq!(made, 0, "{}", std::io::Error::last_os_error());
            Self(id)
        }

        fn submit(&self, request: &mut Request, times: usize) {
            let all = vec![std::ptr::from_mut(request); times];
            // SAFETY: the request names no memory, and the kernel has read it when the call returns.
            let submitted =
                unsafe { libc::syscall(libc::SYS_io_submit, self.0, times, all.as_ptr()) };
            assert_eq!(submitted, times as i64, "{}", std::io::Error::last_os_error());
        }

        fn collect(&self, events: usize) {
            let mut all = vec![[0u64; 4]; events];
            let no_time = std::ptr::null::<libc::timespec>();
            let to = all.as_mut_ptr();
            // SAFETY: there is space for as many events.
            let got = unsafe {
                libc::syscall(libc::SYS_io_getevents, self.0, events, events, to, no_time)
            };
            assert_eq!(got, events as i64);
        }
    }

    impl Drop for Own {
        fn drop(&mut self) {
            // SAFETY: the ring is unmapped, to which nothing refers.
            unsafe { libc::syscall(libc::SYS_io_destroy, self.0) };
        }
    }

    #[test]
    fn record_has_the_layout_of_the_header() {
        assert_same::<Written>(GROUP.object);
    }

    #[test]
    fn root_requests_of_contexts_are_counted_until_they_are_finished() {
        let contexts = match Contexts::load() {
            Ok(contexts) => contexts,
            Err(e) => return eprintln!("SKIPPED: {e}"),
        };
        let file: OwnedFd =
            rustix::fs::memfd_create("aio", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        let (one, other) = (Own::new(8), Own::new(600));
        let of = |own: &Own| {
            let all = contexts.of(std::process::id()).unwrap();
            let context = all.into_iter().find(|context| context.id == own.0).unwrap();
            assert!(context.tail < context.events);
            (context.requests, context.tail, context.unfinished, context.polls)
        };
        assert_eq!((of(&one), of(&other)), ((8, 0, 0, false), (600, 0, 0, false)));
        let file = file.as_raw_fd() as u32;
        let mut read = Request { operation: READ, file, ..Request::default() };
        // Complete at once; collected or not.
        for round in 1..=6 {
            other.submit(&mut read, 550);
            assert_eq!(of(&other).2, 0);
            other.collect(if round == 6 { 400 } else { 550 });
        }
        assert_eq!(of(&other).2, 0);
        let file = event.as_raw_fd() as u32;
        let mut poll = Request { operation: POLL, file, buffer: 1, ..Request::default() };
        one.submit(&mut poll, 3);
        assert_eq!(of(&one), (8, 0, 3, true));
        rustix::io::write(&event, &1u64.to_ne_bytes()).unwrap();
        one.collect(3);
        assert_eq!((of(&one).1, of(&one).3), (3, false));
        // The kernel frees each at its leisure.
        while of(&one).2 != 0 {
            std::thread::yield_now();
        }
        drop(one);
        assert!(contexts.of(std::process::id()).unwrap().iter().any(|c| c.id == other.0));
    }

    #[test]
    fn root_process_with_as_many_contexts_as_the_limit_is_read_and_one_with_more_is_not() {
        let contexts = match Contexts::load() {
            Ok(contexts) => contexts,
            Err(e) => return eprintln!("SKIPPED: {e}"),
        };
        let count = || contexts.of(std::process::id()).map(|all| all.len());
        let mut own: Vec<Own> = (0..CONTEXTS_MAX).map(|_| Own::new(1)).collect();
        assert_eq!(count().unwrap(), CONTEXTS_MAX);
        own.extend((0..CONTEXTS_MAX).map(|_| Own::new(1)));
        assert_eq!(count().unwrap_err().errno(), libc::E2BIG);
        // io_destroy(2) waits for a grace period, once for each; the end of the process once for all.
        let _kept: Vec<_> = own.into_iter().map(std::mem::ManuallyDrop::new).collect();
    }
}
