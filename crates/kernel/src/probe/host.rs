//! Cgroups, programs attached to them, and figures of the host.

use std::os::fd::AsFd;

use dormouse_model::{DiskRate, DiskRateKind};

use super::scratch::{Probed, Reason, Scratch, lack};
use super::task::{child, forever};
use crate::bpf::{self, AttachType, Insn, Program, ProgramType};
use crate::cgroup::{Controllers, DevicePolicy};
use crate::process::CloneArgs;
use crate::{pidfd, proc};

pub(super) fn cgroups(scratch: &Scratch) -> Probed {
    let (hierarchy, _) = scratch.cgroup()?;
    Ok(hierarchy.layout().as_str().into())
}

pub(super) fn v2(scratch: &Scratch) -> Probed {
    match scratch.cgroup()?.1.v2_id() {
        Some(_) => Ok(String::new()),
        None => lack("it is not mounted"),
    }
}

/// A child in the scratch cgroup.
fn inhabitant(scratch: &Scratch) -> Result<super::task::Child, Reason> {
    let Some(dir) = scratch.cgroup()?.1.placement()?.v2 else { return lack("no cgroup v2") };
    Ok(child(&CloneArgs { into_cgroup: Some(dir.as_fd()), ..CloneArgs::default() }, forever)?)
}

pub(super) fn clone_into(scratch: &Scratch) -> Probed {
    let born = inhabitant(scratch)?;
    if scratch.cgroup()?.1.pids()? == [born.pid] {
        return Ok(String::new());
    }
    lack("the child was born elsewhere")
}

pub(super) fn freeze(scratch: &Scratch) -> Probed {
    let _frozen = inhabitant(scratch)?;
    let (_, cgroup) = scratch.cgroup()?;
    let frozen = cgroup.freeze();
    cgroup.thaw()?;
    frozen?;
    Ok(String::new())
}

pub(super) fn kill(scratch: &Scratch) -> Probed {
    let killed = inhabitant(scratch)?;
    let (_, cgroup) = scratch.cgroup()?;
    if !cgroup.kills_at_once() {
        return lack("there is no cgroup.kill");
    }
    cgroup.kill()?;
    pidfd::wait(&killed.pidfd, None)?;
    Ok(String::new())
}

/// A controller that the scratch cgroup has, and where.
fn controller(scratch: &Scratch, controller: Controllers) -> Probed {
    let (hierarchy, _) = scratch.cgroup()?;
    hierarchy.home(controller).map(String::from).map_err(Reason)
}

pub(super) fn cpu(scratch: &Scratch) -> Probed {
    controller(scratch, Controllers::CPU)?;
    let limits = dormouse_model::Limits {
        cpu_max_milli: Some(500),
        cpu_weight: Some(50),
        ..Default::default()
    };
    scratch.cgroup()?.1.set(&limits)?;
    controller(scratch, Controllers::CPU)
}

pub(super) fn memory(scratch: &Scratch) -> Probed {
    let limits = dormouse_model::Limits { memory_max_bytes: Some(64 << 20), ..Default::default() };
    scratch.cgroup()?.1.set(&limits)?;
    controller(scratch, Controllers::MEMORY)
}

pub(super) fn swap(scratch: &Scratch) -> Probed {
    let limits = dormouse_model::Limits {
        memory_max_bytes: Some(64 << 20),
        swap_max_bytes: Some(1 << 20),
        ..Default::default()
    };
    scratch.cgroup()?.1.set(&limits)?;
    Ok(String::new())
}

pub(super) fn pressure(_: &Scratch) -> Probed {
    // A kernel with `psi=0` has the file, and refuses its read.
    let text = proc::read_text("/proc/pressure/memory", 4096)?;
    match text.lines().any(|line| line.starts_with("full ")) {
        true => Ok(String::new()),
        false => lack("full stalls are not counted"),
    }
}

pub(super) fn pids(scratch: &Scratch) -> Probed {
    let limits = dormouse_model::Limits { pids_max: Some(50), ..Default::default() };
    scratch.cgroup()?.1.set(&limits)?;
    controller(scratch, Controllers::PIDS)
}

pub(super) fn io(scratch: &Scratch) -> Probed {
    scratch.cgroup()?.1.stats()?;
    controller(scratch, Controllers::IO)
}

pub(super) fn io_weight(scratch: &Scratch) -> Probed {
    let limits = dormouse_model::Limits { io_weight: Some(100), ..Default::default() };
    let (hierarchy, cgroup) = scratch.cgroup()?;
    cgroup.set(&limits)?;
    Ok(hierarchy.not_enforced(&limits, &scratch.storage()).join("; "))
}

pub(super) fn disk_rates(scratch: &Scratch) -> Probed {
    let storage = scratch.storage();
    let rate = |kind| DiskRate { kind, device: None, most: u64::from(u32::MAX - 1) };
    let disk_rates = DiskRateKind::ALL.map(rate).to_vec();
    let limits = dormouse_model::Limits { disk_rates, ..Default::default() };
    let (hierarchy, cgroup) = scratch.cgroup()?;
    cgroup.set_disk_rates(&limits.disk_rates, &storage)?;
    cgroup.lift_disk_rates()?;
    let mut seen = controller(scratch, Controllers::IO)?;
    for text in hierarchy.not_enforced(&limits, &storage) {
        seen = format!("{seen}; {text}");
    }
    Ok(seen)
}

pub(super) fn disk_write_rates(scratch: &Scratch) -> Probed {
    let rate = DiskRate { kind: DiskRateKind::WriteBps, device: None, most: u64::from(u32::MAX) };
    let limits = dormouse_model::Limits {
        disk_rates: vec![rate],
        disk_bytes: Some(16 << 20),
        ..Default::default()
    };
    let seen = controller(scratch, Controllers::IO)?;
    let texts = scratch.cgroup()?.0.not_enforced(&limits, &scratch.storage());
    Ok([vec![seen], texts].concat().join("; "))
}

pub(super) fn cpuset(scratch: &Scratch) -> Probed {
    let (hierarchy, _) = scratch.cgroup()?;
    let limits = dormouse_model::Limits { cpuset_cpus: Some("0".into()), ..Default::default() };
    let cgroup = hierarchy.create("probe-cpuset", &limits)?;
    cgroup.remove()?;
    controller(scratch, Controllers::CPUSET)
}

pub(super) fn devices(scratch: &Scratch) -> Probed {
    match scratch.cgroup()?.0.device_policy() {
        DevicePolicy::Controller => Ok("v1 controller".into()),
        DevicePolicy::Program => Ok("BPF program".into()),
        DevicePolicy::None(why) => lack(why),
    }
}

/// Loads a program that allows everything and attaches it to the scratch cgroup.
fn hooks(scratch: &Scratch, kind: ProgramType, hooks: &[AttachType]) -> Probed {
    let Some(cgroup) = scratch.cgroup()?.1.v2_dir()? else { return lack("no cgroup v2") };
    for &attach in hooks {
        let code = [Insn::set(0, 1), Insn::exit()];
        let program = Program { kind, attach, code: &code, name: "dormouse_probe", btf_id: None };
        let loaded = bpf::load(&program)?;
        bpf::attach(&cgroup, loaded.as_fd(), attach)?;
    }
    Ok(String::new())
}

pub(super) fn bpf_bind(scratch: &Scratch) -> Probed {
    hooks(scratch, ProgramType::CgroupSockAddr, &[AttachType::Bind4, AttachType::Bind6])?;
    hooks(scratch, ProgramType::CgroupSock, &[AttachType::PostBind4])
}

pub(super) fn bpf_connect(scratch: &Scratch) -> Probed {
    hooks(scratch, ProgramType::CgroupSockAddr, &[AttachType::Connect4, AttachType::Connect6])
}

pub(super) fn bpf_sendmsg(scratch: &Scratch) -> Probed {
    hooks(scratch, ProgramType::CgroupSockAddr, &[AttachType::Sendmsg4, AttachType::Sendmsg6])
}

pub(super) fn bpf_sock(scratch: &Scratch) -> Probed {
    hooks(scratch, ProgramType::CgroupSock, &[AttachType::SockCreate])
}

pub(super) fn bpf_sock_release(scratch: &Scratch) -> Probed {
    hooks(scratch, ProgramType::CgroupSock, &[AttachType::SockRelease])
}

/// A program that calls the helper without a map. The kernel refuses the argument (EACCES) if such programs may call
/// the helper, and else the call (EINVAL).
pub(super) fn bpf_task_storage(_: &Scratch) -> Probed {
    const TASK_STORAGE_GET: i32 = 156;
    let code = [Insn::call(TASK_STORAGE_GET), Insn::set(0, 1), Insn::exit()];
    let (kind, attach) = (ProgramType::CgroupSockopt, AttachType::Setsockopt);
    match bpf::load(&Program { kind, attach, code: &code, name: "dormouse_probe", btf_id: None }) {
        Err(e) if e.errno() == libc::EACCES => Ok(String::new()),
        Err(e) => Err(e.into()),
        Ok(_) => lack("a program without a map was taken"),
    }
}

pub(super) fn bpf_skb(scratch: &Scratch) -> Probed {
    hooks(scratch, ProgramType::CgroupSkb, &[AttachType::SkbIngress])
}

pub(super) fn bpf_name(scratch: &Scratch) -> Probed {
    hooks(scratch, ProgramType::CgroupSockAddr, &[AttachType::Getsockname4])
}

pub(super) fn bpf_sockops(scratch: &Scratch) -> Probed {
    hooks(scratch, ProgramType::SockOps, &[AttachType::SockOps])
}

pub(super) fn bpf_unix(scratch: &Scratch) -> Probed {
    hooks(scratch, ProgramType::CgroupSockAddr, &[AttachType::UnixConnect])
}

/// A figure, and from which on it is enough for many containers.
fn figure(path: &str, enough: u64) -> Probed {
    let text = proc::read_text(path, 64)?;
    let value = text.trim();
    match value.parse::<u64>() {
        Ok(n) if n < enough => Ok(format!("{value} (raise it for thousands of containers)")),
        _ => Ok(value.into()),
    }
}

pub(super) fn pid_max(_: &Scratch) -> Probed {
    figure("/proc/sys/kernel/pid_max", 1 << 20)
}

pub(super) fn max_namespaces(_: &Scratch) -> Probed {
    figure("/proc/sys/user/max_user_namespaces", 20_000)
}

pub(super) fn inotify(_: &Scratch) -> Probed {
    figure("/proc/sys/fs/inotify/max_user_instances", 1024)
}
