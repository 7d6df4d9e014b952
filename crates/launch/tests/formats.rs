//! Data from outside is read or refused, never worse.

use std::ffi::CString;

use dormouse_launch::flat::{Code, Flat, HEADER_BYTES, MAGIC, VERSION};
use dormouse_launch::protocol::{
    Ended, FromNewborn, Id, Kind, Reply, Request, SpawnRequest, Status, ToNewborn, with,
};
use dormouse_launch::{ExitStatus, LaunchError, Plan};
use proptest::prelude::*;

fn id() -> impl Strategy<Value = Id> {
    "[a-zA-Z0-9_-]{1,64}".prop_map(|text| Id::new(text.as_bytes()).unwrap())
}

fn request() -> impl Strategy<Value = Request> {
    let template = proptest::option::of(id());
    let spawn = (id(), any::<[bool; 2]>(), 0..16u8, any::<u64>(), "[0-9 \n]{0,200}", template)
        .prop_map(|(id, [exec, settle], with, flags, map, template)| {
            let kind = if exec { Kind::Exec } else { Kind::Init };
            let (uid_map, gid_map) = (map.clone(), map);
            Request::Spawn(SpawnRequest {
                id,
                kind,
                settle,
                with,
                flags,
                uid_map,
                gid_map,
                template,
            })
        });
    let logs = (id(), any::<u64>(), proptest::collection::vec("/[a-z/]{0,80}", 0..3));
    prop_oneof![
        Just(Request::Status),
        Just(Request::Hello),
        Just(Request::End),
        spawn,
        any::<u32>().prop_map(|pid| Request::Wait { pid }),
        any::<u32>().prop_map(|pid| Request::Settled { pid }),
        id().prop_map(|id| Request::KeepConsole { id }),
        id().prop_map(|id| Request::KeepStdin { id }),
        id().prop_map(|id| Request::KeepNewborn { id }),
        id().prop_map(|id| Request::TakeNewborn { id }),
        id().prop_map(|id| Request::AttachConsole { id }),
        id().prop_map(|id| Request::AttachStdin { id }),
        id().prop_map(|id| Request::Forget { id }),
        id().prop_map(|id| Request::Park { id }),
        (id(), 1..9u8).prop_map(|(key, parts)| Request::Template { key, parts }),
        (id(), 1..4u8, any::<u64>(), "/[a-z/]{0,80}").prop_map(
            |(id, streams, bound_bytes, path)| {
                Request::KeepOutput { id, streams, bound_bytes, path }
            }
        ),
        id().prop_map(|id| Request::FlushOutput { id }),
        id().prop_map(|id| Request::HoldsOutput { id }),
        (id(), any::<u32>()).prop_map(|(id, pid)| Request::Adopt { id, pid }),
        id().prop_map(|id| Request::HasAdopted { id }),
        (id(), any::<u32>()).prop_map(|(id, key)| Request::Ready { id, key }),
        (id(), any::<u32>()).prop_map(|(id, key)| Request::Take { id, key }),
        (id(), any::<u32>(), any::<u8>()).prop_map(|(id, key, watch)| Request::Hold {
            id,
            key,
            watch
        }),
        (id(), any::<u64>()).prop_map(|(id, after_ms)| Request::Alarm { id, after_ms }),
        id().prop_map(|id| Request::Holds { id }),
        id().prop_map(|id| Request::LetGo { id }),
        Just(Request::LetGoUnasked),
        (id(), 1..5u8, 1..5u8).prop_map(|(id, parts, sources)| Request::Fill {
            id,
            parts,
            sources
        }),
        id().prop_map(|id| Request::Settle { id }),
        logs.prop_map(|(id, bound_bytes, paths)| Request::KeepLogs { id, bound_bytes, paths }),
    ]
}

proptest! {
    #[test]
    fn requests_round_trip(request in request()) {
        prop_assert_eq!(Request::decode(&request.encode()), Ok(request));
    }

    #[test]
    fn damaged_requests_are_refused_or_read(
        request in request(),
        at in any::<proptest::sample::Index>(),
        bit in 0..8,
        cut in any::<bool>(),
    ) {
        let mut bytes = request.encode();
        let at = at.index(bytes.len());
        if cut {
            bytes.truncate(at);
            prop_assert!(Request::decode(&bytes).is_err());
        } else {
            bytes[at] ^= 1u8 << bit;
            // The decoded request is a request like any other, and has an end. A damaged length may
            // demand exactly one byte more: only a request that was read refuses it.
            if let Ok(read) = Request::decode(&bytes) {
                prop_assert_eq!(Request::decode(&read.encode()), Ok(read));
                bytes.push(0);
                prop_assert!(Request::decode(&bytes).is_err());
            }
        }
    }

    #[test]
    fn garbage_is_no_message(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let mut as_message = b"DMK1\x01\0".to_vec();
        as_message.extend_from_slice(&bytes);
        let _ = (Request::decode(&as_message), Reply::decode(&as_message));
        if !bytes.starts_with(b"DMK1") {
            prop_assert!(Request::decode(&bytes).is_err() && Reply::decode(&bytes).is_err());
            prop_assert_eq!(ToNewborn::from_bytes(&bytes), None);
            prop_assert_eq!(FromNewborn::from_bytes(&bytes), None);
        }
    }

    #[test]
    fn damaged_plans_are_errors(
        flips in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..8),
        length in any::<proptest::sample::Index>(),
    ) {
        let mut bytes = plan();
        for (at, value) in flips {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        let length = length.index(bytes.len() + 1);
        for end in [bytes.len(), length] {
            let mut bytes = bytes[..end].to_vec();
            let Ok(mut flat) = Flat::new(&mut bytes) else { continue };
            for index in 0..flat.count().min(64) {
                let Ok(record) = flat.record(index) else { continue };
                let _ = (flat.text(&record).is_ok(), flat.data(&record).is_ok());
                let _ = (flat.text_at(record.a).is_ok(), flat.text_at(record.b).is_ok());
                let _ = (flat.relocate(record.a).is_ok(), flat.relocate(record.b).is_ok());
            }
        }
    }
}

/// A plan as the builder lays it out, without the private way there: header, two operations, texts.
fn plan() -> Vec<u8> {
    let strings: &[u8] = b"/bin/sh\0/sh\0-c\0true\0A=b\0";
    let area = HEADER_BYTES as u32 + 64;
    let mut tables = Vec::new();
    for offset in [8u64, 12, 15, 0, 20, 0] {
        let value = if offset == 0 { 0 } else { u64::from(area) + offset };
        tables.extend_from_slice(&value.to_ne_bytes());
    }
    let padded = strings.len().next_multiple_of(8);
    let total = area + padded as u32 + tables.len() as u32;
    let mut out = MAGIC.to_vec();
    for field in [VERSION, total, HEADER_BYTES as u32, 2, 0] {
        out.extend_from_slice(&field.to_ne_bytes());
    }
    out.resize(HEADER_BYTES, 0);
    let argv = u64::from(area) + padded as u64;
    for (code, a, b, len) in [(Code::Exec, argv, argv + 32, 7), (Code::Hostname, 0, 0, 7)] {
        let record = dormouse_launch::flat::Record {
            code: code as u16,
            flags: 0,
            fd: u32::MAX,
            a,
            b,
            text: area,
            text_len: len,
        };
        out.extend_from_slice(&record.to_bytes());
    }
    out.extend_from_slice(strings);
    out.resize((area as usize) + padded, 0);
    out.extend_from_slice(&tables);
    out
}

#[test]
fn tables_become_pointers() {
    let mut bytes = plan();
    let base = bytes.as_ptr() as u64;
    let mut flat = Flat::new(&mut bytes).unwrap();
    let record = flat.record(0).unwrap();
    assert_eq!(flat.text(&record).unwrap(), CString::new("/bin/sh").unwrap().as_c_str());
    let (argv, envp) = (flat.relocate(record.a).unwrap(), flat.relocate(record.b).unwrap());
    // A second time its entries are pointers, not offsets.
    assert!(flat.relocate(record.a).is_err());
    let word = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
    let text = |pointer: u64| {
        let rest = &bytes[(pointer - base) as usize..];
        std::ffi::CStr::from_bytes_until_nul(rest).unwrap().to_str().unwrap().to_owned()
    };
    assert_eq!([0, 8, 16].map(|n| text(word(argv + n))), ["/sh", "-c", "true"]);
    assert_eq!(word(argv + 24), 0);
    assert_eq!((text(word(envp)).as_str(), word(envp + 8)), ("A=b", 0));
}

#[test]
fn replies_round_trip() {
    let ended = Ended { code: 137, signal: 9, finished_unix_ms: 1_763_700_000_000 };
    for reply in [
        Reply::Status(Status { children: 3, connections: 2, consoles: 1, settling: 0, pid: 77 }),
        Reply::Spawned { pid: 4711, start_time: u64::MAX - 5 },
        Reply::Exited { pid: 1, ended },
        Reply::Done,
        Reply::Hello { pid: 4711, features: 1 },
        Reply::Attached,
        Reply::Refused { errno: 16, step: "do that".into() },
    ] {
        assert_eq!(Reply::decode(&reply.encode()), Ok(reply));
    }
}

#[test]
fn descriptors_are_counted() {
    let mut bytes = Request::Status.encode();
    assert_eq!(Request::decode(&bytes).unwrap().descriptors(), 0);
    let spawn = SpawnRequest {
        id: Id::new(b"a").unwrap(),
        kind: Kind::Init,
        settle: true,
        with: with::NETNS | with::CGROUP | with::PROC,
        flags: 0,
        uid_map: String::new(),
        gid_map: String::new(),
        template: None,
    };
    assert_eq!(Request::Spawn(spawn).descriptors(), 3);
    // Another version is refused.
    bytes[4] = 2;
    assert!(Request::decode(&bytes).is_err());
}

#[test]
fn ids_are_single_path_components() {
    for bad in ["", ".", "..", "a/b", "../a", "a b", "a\0", &"x".repeat(65)] {
        assert!(Id::new(bad.as_bytes()).is_err(), "{bad:?}");
    }
}

#[test]
fn sysctls_are_those_of_namespaces() {
    let mut plan = Plan::new();
    for good in ["kernel.shmmax", "net.ipv4.ip_forward", "net/ipv4/conf/eth0.1/forwarding"] {
        plan.sysctl(good, "1").unwrap();
    }
    plan.sysctl("fs.mqueue.msg_max", "10\t20").unwrap();
    for bad in [
        "kernel.core_pattern",
        "vm.swappiness",
        "kernel.shmmax+kernel.core_pattern",
        "net.../kernel/core_pattern",
        "net/../kernel/core_pattern",
        "net.ipv4.a\nb",
        "",
        "net.",
    ] {
        assert!(matches!(plan.sysctl(bad, "1"), Err(LaunchError::Sysctl { .. })), "{bad:?}");
    }
    let smuggled = plan.sysctl("net.ipv4.ip_forward", "1\nkernel.core_pattern=|/x");
    assert!(matches!(smuggled, Err(LaunchError::SysctlValue { .. })));
}

#[test]
fn exit_file_is_read_or_reported_damaged() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(ExitStatus::read(dir.path(), 4711).unwrap(), None);
    let path = dir.path().join("exit");
    let text = r#"{"version":1,"pid":4711,"code":137,"signal":9,"later":[1],"finished_unix_ms":5}"#;
    std::fs::write(&path, text).unwrap();
    assert_eq!(ExitStatus::read(dir.path(), 4712).unwrap(), None);
    let status = ExitStatus::read(dir.path(), 4711).unwrap().unwrap();
    assert_eq!((status.code, status.signal, status.finished_unix_ms), (137, Some(9), 5));
    std::fs::write(&path, &text[..20]).unwrap();
    assert!(matches!(ExitStatus::read(dir.path(), 4711), Err(LaunchError::ExitFile { .. })));
}
