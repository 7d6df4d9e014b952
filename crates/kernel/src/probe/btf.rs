//! Programs that are attached to kernel functions, which are found in the kernel's BTF
//! (Documentation/bpf/btf.rst). Whether they may be loaded is known only by loading them.

use super::{Probed, Scratch, Why, lack};
use crate::bpf::{self, AttachType, Insn, Program, ProgramType};

const FUNC: u32 = 12;
const TYPEDEF: u32 = 8;

fn table(scratch: &Scratch) -> Result<&[u8], Why> {
    let read = || std::fs::read("/sys/kernel/btf/vmlinux").map_err(|e| e.to_string());
    let table = scratch.btf.get_or_init(read);
    table.as_deref().map_err(|why| Why(format!("/sys/kernel/btf/vmlinux: {why}")))
}

pub(super) fn present(scratch: &Scratch) -> Probed {
    match find(table(scratch)?, TYPEDEF, "btf_trace_sched_switch") {
        Some(_) => Ok(String::new()),
        None => lack("sched_switch is not in it"),
    }
}

/// The id of a named type of a kind; `None` where there is none, or where this is no BTF.
fn find(table: &[u8], kind: u32, name: &str) -> Option<u32> {
    let word = |at: usize| {
        let bytes = table.get(at..at + 4)?;
        Some(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    };
    // Header: magic and version, its length, then offset and length of types and of strings.
    if word(0)? & 0xffff != 0xeb9f {
        return None;
    }
    let base = word(4)? as usize;
    let mut at = base + word(8)? as usize;
    let end = at + word(12)? as usize;
    let strings = base + word(16)? as usize;
    let wanted = |offset: u32| {
        let text = table.get(strings + offset as usize..)?;
        Some(text.starts_with(name.as_bytes()) && text.get(name.len()) == Some(&0))
    };
    let mut id = 1;
    while at < end {
        let (text, info) = (word(at)?, word(at + 4)?);
        let (found, count) = (info >> 24 & 0x1f, (info & 0xffff) as usize);
        if found == kind && wanted(text)? {
            return Some(id);
        }
        at += 12
            + match found {
                1 | 14 | 17 => 4,              // int, var, decl_tag
                3 => 12,                       // array
                4 | 5 | 15 | 19 => 12 * count, // struct, union, datasec, enum64
                6 | 13 => 8 * count,           // enum, function prototype
                _ => 0,
            };
        id += 1;
    }
    None
}

fn load(scratch: &Scratch, kind: ProgramType, attach: AttachType, what: (u32, &str)) -> Probed {
    let id = find(table(scratch)?, what.0, what.1);
    let Some(id) = id else { return lack(format!("the kernel has no {}", what.1)) };
    let code = [Insn::set(0, 0), Insn::exit()];
    let program = Program { kind, attach, code: &code, name: "dormouse_probe", btf_id: Some(id) };
    bpf::load(&program)?;
    Ok(String::new())
}

pub(super) fn tp_btf(scratch: &Scratch) -> Probed {
    let what = (TYPEDEF, "btf_trace_sched_switch");
    load(scratch, ProgramType::Tracing, AttachType::RawTracepoint, what)
}

pub(super) fn fentry(scratch: &Scratch) -> Probed {
    load(scratch, ProgramType::Tracing, AttachType::Fentry, (FUNC, "do_exit"))
}

pub(super) fn lsm(scratch: &Scratch) -> Probed {
    let list = std::fs::read_to_string("/sys/kernel/security/lsm").unwrap_or_default();
    load(scratch, ProgramType::Lsm, AttachType::LsmMac, (FUNC, "bpf_lsm_file_open"))?;
    // It may be loaded and is then never called.
    if !list.is_empty() && !list.trim().split(',').any(|lsm| lsm == "bpf") {
        return lack("bpf is not among the active security modules (lsm= on the command line)");
    }
    Ok(String::new())
}
