//! A sample of records, for tests of the crates that use them.

use crate::{
    About, Area, Backing, Checksums, File, Memory, Pages, Process, Records, Run, Thing, Thread,
};

/// The smallest valid records: one process with one page of memory.
pub fn small() -> Records {
    let area = Area {
        start: 0x10_0000,
        end: 0x10_1000,
        access: 3,
        backing: Backing::Anonymous,
        flags: Vec::new(),
        runs: vec![Run { address: 0x10_0000, pages: 1, first: 0 }],
    };
    let file = File {
        path: "/".into(),
        flags: 0,
        offset: 0,
        file_type: libc::S_IFDIR,
        bytes: 0,
        modified_ns: 0,
        unchanged: false,
        deleted: None,
        namespace: None,
        locks: Vec::new(),
        write_hint: 0,
    };
    let process = Process {
        pid: 1,
        session: 1,
        group: 1,
        name: "a".into(),
        memory: Some(0),
        directory: Some(0),
        threads: vec![Thread { tid: 1, ..Thread::default() }],
        ..Process::default()
    };
    Records {
        about: About::default(),
        processes: vec![process],
        memories: vec![Memory { areas: vec![area], program: Some(0), ..Memory::default() }],
        objects: vec![Thing::File(file).into()],
        pages: Pages { bytes: 4096, chunks: Checksums(vec![[0; 32]]), parts: Vec::new() },
    }
}
