//! The check of all records, above all others.

use super::{Found, aio, cgroup_namespace, ensure, memory, mount, net, process, thing, time, user};
use crate::{
    About, CLOCK_MAX_NS, Error, IPC_LIMITS, PAGE_BYTES, Records, Result, VDSO_BYTES_MAX, vdso_hash,
};

/// Checks all records.
pub fn records(records: &Records) -> Result<()> {
    let part = |section: &str| format!("section '{section}'");
    let pages = &records.pages;
    if !pages.is_whole() {
        return Err(Error::damaged(part("page"), "checksums for another number of pages"));
    }
    mount::number(records).map_err(|what| Error::damaged(part("object"), what))?;
    net::number(records).map_err(|what| Error::damaged(part("object"), what))?;
    net::pairs(records).map_err(|what| Error::damaged(part("object"), what))?;
    cgroup_namespace::number(records).map_err(|what| Error::damaged(part("object"), what))?;
    time::all(records).map_err(|what| Error::damaged(part("object"), what))?;
    aio::all(records).map_err(|what| Error::damaged(part("object"), what))?;
    user::number(records).map_err(|what| Error::damaged(part("object"), what))?;
    about(&records.about).map_err(|what| Error::damaged(part("about"), what))?;
    for (n, memory) in records.memories.iter().enumerate() {
        memory::memory(memory, records)
            .map_err(|what| Error::damaged(part("memory"), format!("number {n}: {what}")))?;
    }
    process::all(records).map_err(|what| Error::damaged(part("process"), what))?;
    for (n, object) in records.objects.iter().enumerate() {
        let sound = thing::common(object).and_then(|()| thing::thing(n, &object.thing, records));
        let sound = sound.and_then(|()| net::place(object, records));
        sound.and_then(|()| user::owner(object, records)).map_err(|what| {
            let name = object.thing.name();
            Error::damaged(part("object"), format!("number {n} ({name}): {what}"))
        })?;
    }
    Ok(())
}

fn about(about: &About) -> Found {
    let clock = |ns: i64| (0..=CLOCK_MAX_NS).contains(&ns);
    ensure(clock(about.monotonic_ns) && clock(about.boottime_ns), || "its clocks".into())?;
    let image = &about.vdso_image.0;
    let is_whole = image.is_empty() || vdso_hash(image) == about.vdso;
    let bytes = image.len() as u64;
    let fits = bytes.is_multiple_of(PAGE_BYTES) && bytes <= VDSO_BYTES_MAX;
    ensure(is_whole && fits, || "the kernel's object".into())?;
    let offset = |ns: i64| (-CLOCK_MAX_NS..=CLOCK_MAX_NS).contains(&ns);
    let offsets = offset(about.monotonic_offset_ns) && offset(about.boottime_offset_ns);
    ensure(offsets, || "the offsets of its clocks".into())?;
    // LIMIT: bytes of a name (__NEW_UTS_LEN).
    const NAME_MAX: usize = 64;
    let mut names = about.hostname.iter().chain(&about.domainname);
    ensure(names.all(|name| name.len() <= NAME_MAX && !name.contains('\0')), || {
        "its host name".into()
    })?;
    let is_value = |text: &str| {
        let is_number = |byte: u8| byte.is_ascii_digit() || byte.is_ascii_whitespace();
        text.len() <= 128 && text.bytes().all(is_number)
    };
    let is_limit = |(name, text): &(String, String)| {
        IPC_LIMITS.iter().any(|(known, _)| *known == &**name) && is_value(text)
    };
    let limits = &about.ipc_limits;
    ensure(limits.len() <= IPC_LIMITS.len() && limits.iter().all(is_limit), || {
        "the limits of its IPC namespace".into()
    })?;
    about
        .network
        .as_ref()
        .map_or(Ok(()), |network| net::net(network).map_err(|what| format!("its network: {what}")))
}

#[cfg(test)]
mod tests {
    use dormouse_kernel::call::TERMIOS_BYTES;

    use super::super::file;
    use super::*;
    use crate::sample::small;
    use crate::{
        Backing, Bytes, Checksums, Deleted, File, Filter, Inotify, Lock, LockKind, MemoryFile,
        MemoryPolicy, Object, Pages, PidFd, Pipe, ProcessFile, RangePolicy, Run, Signal, Terminal,
        TerminalSide, Thing, Uts, Watch,
    };

    /// A range with the policy of a mode.
    fn range(start: u64, end: u64, mode: u32) -> RangePolicy {
        RangePolicy { start, end, policy: MemoryPolicy { mode, nodes: vec![1] } }
    }

    fn stop() -> Signal {
        let mut info = vec![0; 128];
        info[..4].copy_from_slice(&libc::SIGSTOP.to_ne_bytes());
        Signal { info: Bytes(info) }
    }

    #[test]
    fn references_without_a_target_are_refused() {
        assert!(records(&small()).is_ok());
        let mut sound = small();
        sound.memories[0].policies = vec![range(0x10_0000, 0x10_1000, MemoryPolicy::FLAGS | 2)];
        sound.processes[0].stopped = Some(libc::SIGSTOP);
        sound.processes[0].pending = vec![stop()];
        sound.processes[0].threads[0].login_uid = Some(0);
        assert!(records(&sound).is_ok());
        let bad = |change: fn(&mut Records)| {
            let mut all = small();
            change(&mut all);
            records(&all).unwrap_err().to_string()
        };
        type Case = (fn(&mut Records), &'static str);
        let cases: [Case; 26] = [
            (|r| r.processes[0].memory = Some(1), "no memory"),
            (
                |r| r.memories[0].areas[0].backing = Backing::Huge { page_bytes: 2 << 20 },
                "not of whole pages",
            ),
            (
                |r| r.memories[0].areas[0].backing = Backing::Huge { page_bytes: 0 },
                "the size of its pages",
            ),
            (|r| r.processes[0].directory = Some(7), "object 7"),
            (|r| r.processes[0].uts = Some(0), "no UTS namespace"),
            (|r| r.processes[0].threads[0].tid = 2, "first thread"),
            (|r| r.memories[0].areas[0].runs[0].pages = 2, "pages at 100000"),
            (|r| r.memories[0].areas[0].runs[0].first = 1, "not there"),
            (|r| r.memories[0].areas[0].end = u64::MAX - 4095, "overlaps"),
            (
                |r| r.memories[0].areas[0].backing = Backing::Shared { object: 0, offset: 0 },
                "its own",
            ),
            (|r| r.pages.bytes = 8192 << 20, "another number"),
            (|r| r.pages.parts = vec![4096, 4096], "another number"),
            (|r| r.pages.parts = vec![0, u64::MAX - 4095], "another number"),
            (
                // Between the end of one file and the start of the next.
                |r| {
                    let chunks = Checksums(vec![[0; 32]; 2]);
                    let bytes = crate::CHUNK_BYTES + 4096;
                    r.pages = Pages { bytes, chunks, parts: vec![4096; 2] };
                    r.memories[0].areas[0].runs[0].first = 1;
                },
                "not there",
            ),
            (|r| r.processes[0].pid = 3, "not the first"),
            (|r| r.memories[0].policies = vec![range(0x10_0000, 0x10_2000, 1)], "the policy at"),
            (|r| r.memories[0].policies = vec![range(0x10_0000, 0x10_0800, 1)], "the policy at"),
            (|r| r.memories[0].policies = vec![range(0x10_0000, 0x10_1000, 1); 2], "the policy at"),
            (|r| r.memories[0].policies = vec![range(0x10_0000, 0x10_1000, 0)], "a memory policy"),
            (|r| r.memories[0].policies = vec![range(0x10_0000, 0x10_1000, 9)], "a memory policy"),
            (
                |r| {
                    let nodes = vec![1; MemoryPolicy::WORDS_MAX + 1];
                    let policy = MemoryPolicy { mode: 2, nodes };
                    r.processes[0].threads[0].memory_policy = Some(policy);
                },
                "a memory policy",
            ),
            (|r| r.processes[0].threads[0].login_uid = Some(u32::MAX), "a login"),
            (|r| r.processes[0].autogroup_nice = 20, "the nice value 20"),
            (|r| r.processes[0].pending = vec![stop()], "a pending SIGSTOP"),
            (
                |r| {
                    r.processes[0].stopped = Some(libc::SIGSTOP);
                    r.processes[0].threads[0].pending = vec![stop()];
                },
                "a pending SIGSTOP",
            ),
            (
                |r| {
                    let Thing::File(file) = &mut r.objects[0].thing else { return };
                    file.write_hint = File::WRITE_HINT_MAX + 1;
                },
                "its hint",
            ),
        ];
        for (change, text) in cases {
            let said = bad(change);
            assert!(said.contains(text), "{said}");
        }
    }

    /// A checkpoint must not exceed the container's rights: every case would.
    #[test]
    fn records_beyond_the_containers_rights_are_refused() {
        let deleted = |change: fn(&mut Deleted)| {
            let mut it = Deleted {
                place: "/".into(),
                mode: libc::S_IFREG | 0o644,
                uid: 0,
                gid: 0,
                bytes: 5,
                modified_ns: 0,
                runs: vec![Run { address: 0, pages: 1, first: 0 }],
                attributes: Vec::new(),
            };
            change(&mut it);
            let mut all = small();
            all.objects.push(Thing::Deleted(it).into());
            records(&all).err().map(|e| e.to_string()).unwrap_or_default()
        };
        type Case = (fn(&mut Deleted), &'static str);
        let cases: [Case; 7] = [
            (|_| {}, ""),
            (|d| d.mode |= libc::S_ISUID, "its mode"),
            (|d| d.mode = libc::S_IFCHR | 0o666, "no file"),
            (|d| d.place = "../x".into(), "its place"),
            (|d| d.bytes = u64::MAX, "its length"),
            (|d| d.runs[0].first = 9, "not there"),
            (|d| d.attributes.push(("security.capability".into(), Bytes::default())), "attributes"),
        ];
        for (change, text) in cases {
            let said = deleted(change);
            assert!(said.contains(text) && said.is_empty() == text.is_empty(), "{text}: {said}");
        }
        let bad = |change: fn(&mut Records)| {
            let mut all = small();
            change(&mut all);
            records(&all).unwrap_err().to_string()
        };
        let lock = Lock { kind: LockKind::Whole, writes: true, start: 9, end: Some(3) };
        assert!(file::lock(&lock).is_err());
        assert!(bad(|r| r.processes[0].threads[0].schedule.policy = 6).contains("policy"));
        assert!(bad(|r| r.processes[0].threads[0].schedule.cpus = vec![1 << 20]).contains("CPUs"));
        assert!(bad(|r| r.processes[0].threads[0].personality = 3).contains("personality"));
        assert!(bad(|r| r.processes[0].oom_score_adj = 1001).contains("oom_score_adj"));
        let filter = |flags: u32, bytes: usize| {
            let mut all = small();
            let filter = Filter { flags, code: Bytes(vec![0; bytes]) };
            all.processes[0].threads[0].filters.push(filter);
            records(&all).is_ok()
        };
        assert!(filter(0, 8) && !filter(0, 0) && !filter(0, 12) && !filter(0, 1 << 20));
        assert!(!filter(8, 8), "a filter with a listener");
    }

    #[test]
    fn invalid_objects_are_refused() {
        let said = |things: &[Thing]| {
            let mut all = small();
            all.objects.extend(things.iter().cloned().map(Object::from));
            records(&all).err().map(|e| e.to_string()).unwrap_or_default()
        };
        let terminal = |change: fn(&mut Terminal)| {
            let mut it = Terminal {
                number: 3,
                is_console: false,
                termios: Bytes(vec![0; TERMIOS_BYTES]),
                size: [0; 4],
                owner: (0, 5, 0o620),
                locked: false,
                packet: false,
                exclusive: false,
                typed: Bytes::default(),
                written: Bytes::default(),
                foreground: 0,
                session: 0,
            };
            change(&mut it);
            Thing::Terminal(it)
        };
        let good = terminal(|_| {});
        assert_eq!(said(std::slice::from_ref(&good)), "");
        assert!(said(&[good.clone(), good]).contains("twice"));
        assert!(said(&[terminal(|t| t.number = 5000)]).contains("its number"));
        assert!(said(&[terminal(|t| t.termios.0.truncate(9))]).contains("its modes"));
        assert!(said(&[terminal(|t| t.owner.2 = 0o4777)]).contains("its mode"));
        assert!(said(&[terminal(|t| t.typed.0 = vec![0; 1 << 20])]).contains("in flight"));
        let side = TerminalSide { terminal: 0, is_master: true, as_console: false, flags: 0 };
        assert!(said(&[Thing::TerminalSide(side)]).contains("of no terminal"));
        let memory = |mode: u32, seals: u32, name: &str| {
            let (name, runs) = (name.to_owned(), Vec::new());
            let (uid, gid, bytes) = (0, 0, 0);
            let huge_page_bytes = None;
            said(&[Thing::MemoryFile(MemoryFile {
                name,
                mode,
                uid,
                gid,
                bytes,
                huge_page_bytes,
                seals,
                runs,
            })])
        };
        assert_eq!(memory(libc::S_IFREG | 0o777, 0x3f, "a"), "");
        assert!(memory(libc::S_IFREG | 0o4777, 0, "a").contains("its mode"));
        assert!(memory(libc::S_IFREG, 0x40, "a").contains("seals"));
        assert!(memory(libc::S_IFREG, 0, "a\0b").contains("its name"));
        let pipe = |packets: &[u32], path: Option<&str>| {
            said(&[Thing::Pipe(Pipe {
                capacity_bytes: 4096,
                content: Bytes(vec![0; 5]),
                packets: packets.to_vec(),
                path: path.map(str::to_owned),
                deleted: None,
            })])
        };
        assert_eq!(pipe(&[2, 3], Some("/fifo")), "");
        assert!(pipe(&[2, 4], None).contains("packets"));
        assert!(pipe(&[5, 0], None).contains("packets"));
        assert!(pipe(&[], Some("../fifo")).contains("its path"));
        let uts =
            |name: &str| said(&[Thing::Uts(Uts { hostname: Some(name.into()), domainname: None })]);
        assert_eq!(uts(&"a".repeat(64)), "");
        assert!(uts(&"a".repeat(65)).contains("a name") && uts("a\0b").contains("a name"));
        let pidfd = |pid, flags| said(&[Thing::PidFd(PidFd { pid, flags })]);
        assert_eq!(pidfd(1, libc::O_NONBLOCK as u32), "");
        assert!(pidfd(77, 0).contains("not there") && pidfd(1, 1).contains("flags"));
        let of_process = |pid, path: &str, file_type| {
            let path = path.to_owned();
            said(&[Thing::ProcessFile(ProcessFile { pid, path, flags: 0, offset: 0, file_type })])
        };
        for sound in ["maps", "attr/current", "fd"] {
            assert_eq!(of_process(1, sound, libc::S_IFREG), "", "{sound}");
        }
        assert_eq!(of_process(1, "", libc::S_IFDIR), "");
        for wrong in ["..", "../2/maps", "task/1/maps", "fd/", "/maps", ".", "fd/3", "a\0b"] {
            assert!(of_process(1, wrong, libc::S_IFREG).contains("its path"), "{wrong}");
        }
        assert!(of_process(1, "root/x", libc::S_IFREG).contains("link of procfs"));
        assert!(of_process(77, "maps", libc::S_IFREG).contains("not there"));
        assert!(of_process(1, "maps", libc::S_IFIFO).contains("its kind"));
        let watch = |number, path: &str| {
            let watches = vec![Watch { number, path: path.into(), mask: 2 }];
            said(&[Thing::Inotify(Inotify { flags: 0, watches, held: false })])
        };
        assert_eq!(watch(1, "/etc"), "");
        assert!(watch(0, "/etc").contains("a watch") && watch(1, "etc").contains("a watch"));
    }
}
