//! Facts that several readers of a container share: files of procfs, control groups, paths inside.
//!
//! `save` and `load` use these modules. Here are only pids, descriptors and records: neither the survey of a
//! save nor the plan of a restore. `cgroup` uses `file`; the other modules do not use each other.

pub(crate) mod aio;
pub(crate) mod cgroup;
pub(crate) mod descriptor;
pub(crate) mod file;
pub(crate) mod ids;
pub(crate) mod in_call;
pub(crate) mod ipc;
pub(crate) mod mountinfo;
pub(crate) mod task;
