//! Programs that are attached to kernel functions, which are found in the kernel's BTF
//! (Documentation/bpf/btf.rst). Whether they may be loaded is known only by loading them.

use super::scratch::{Probed, Reason, Scratch, lack};
use crate::bpf::{self, AttachType, Insn, Program, ProgramType};
use crate::btf::{Btf, FUNC, TYPEDEF};
use crate::wait::Waits;

fn table(scratch: &Scratch) -> Result<&Btf, Reason> {
    let read = || Btf::read().map_err(|e| e.to_string());
    let table = scratch.btf.get_or_init(read);
    table.as_ref().map_err(|why| Reason(format!("/sys/kernel/btf/vmlinux: {why}")))
}

pub(super) fn present(scratch: &Scratch) -> Probed {
    match table(scratch)?.find(TYPEDEF, "btf_trace_sched_switch") {
        Some(_) => Ok(String::new()),
        None => lack("sched_switch is not in it"),
    }
}

pub(super) fn request_socket(scratch: &Scratch) -> Probed {
    match table(scratch)?.find(FUNC, "bpf_sk_assign_tcp_reqsk") {
        Some(_) => Ok(String::new()),
        None => lack("the kernel has no bpf_sk_assign_tcp_reqsk"),
    }
}

/// A kernel without sched_ext has none of its functions.
pub(super) fn scheduler(scratch: &Scratch) -> Probed {
    for name in ["scx_bpf_dsq_peek", "scx_bpf_dsq_insert_vtime"] {
        if table(scratch)?.find(FUNC, name).is_none() {
            return lack(format!("the kernel has no {name}"));
        }
    }
    match std::fs::read_to_string("/sys/kernel/sched_ext/state") {
        Ok(state) => Ok(state.trim().to_owned()),
        Err(e) => lack(format!("/sys/kernel/sched_ext/state: {e}")),
    }
}

fn load(scratch: &Scratch, kind: ProgramType, attach: AttachType, what: (u32, &str)) -> Probed {
    load_code(scratch, kind, attach, what, &[Insn::set(0, 0), Insn::exit()])
}

fn load_code(
    scratch: &Scratch,
    kind: ProgramType,
    attach: AttachType,
    what: (u32, &str),
    code: &[Insn],
) -> Probed {
    let id = table(scratch)?.find(what.0, what.1);
    let Some(id) = id else { return lack(format!("the kernel has no {}", what.1)) };
    let program = Program { kind, attach, code, name: "dormouse_probe", btf_id: Some(id) };
    bpf::load(&program)?;
    Ok(String::new())
}

pub(super) fn tp_btf(scratch: &Scratch) -> Probed {
    let what = (TYPEDEF, "btf_trace_sched_switch");
    load(scratch, ProgramType::Tracing, AttachType::RawTracepoint, what)
}

pub(super) fn receive(scratch: &Scratch) -> Probed {
    let what = (TYPEDEF, "btf_trace_sock_recv_length");
    load(scratch, ProgramType::Tracing, AttachType::RawTracepoint, what)
}

pub(super) fn fentry(scratch: &Scratch) -> Probed {
    load(scratch, ProgramType::Tracing, AttachType::Fentry, (FUNC, "do_exit"))
}

/// A program that runs when sysinfo(2) returns, and writes to the memory of its caller. It is loaded and not attached.
pub(super) fn sysinfo(scratch: &Scratch) -> Probed {
    const PROBE_WRITE_USER: i32 = 36;
    let function = match cfg!(target_arch = "aarch64") {
        true => "__arm64_sys_sysinfo",
        false => "__x64_sys_sysinfo",
    };
    let code = [
        Insn::set(0, 0),
        Insn::store_wide(10, -8, 0),
        Insn::set(1, 0),
        Insn::copy(2, 10),
        Insn::add(2, -8),
        Insn::set(3, 8),
        Insn::call(PROBE_WRITE_USER),
        Insn::set(0, 0),
        Insn::exit(),
    ];
    load_code(scratch, ProgramType::Tracing, AttachType::Fexit, (FUNC, function), &code)
}

pub(super) fn lsm(scratch: &Scratch) -> Probed {
    let list = std::fs::read_to_string("/sys/kernel/security/lsm").unwrap_or_default();
    load(scratch, ProgramType::Lsm, AttachType::LsmMac, (FUNC, "bpf_lsm_file_open"))?;
    // A program may be loaded and then never be called.
    if !list.is_empty() && !list.trim().split(',').any(|lsm| lsm == "bpf") {
        return lack("bpf is not among the active security modules (lsm= on the command line)");
    }
    Ok(String::new())
}

pub(super) fn task_iterator(_: &Scratch) -> Probed {
    let waits = Waits::load()?;
    waits.of(rustix::process::getpid().as_raw_nonzero().get() as u32)?;
    Ok(String::new())
}
