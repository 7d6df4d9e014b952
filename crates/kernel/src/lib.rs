//! The Linux interface of Dormouse: what the house asks of the kernel, and nothing else.
//!
//! **The idea.** A thing is named once and then held: processes by pidfd, files by descriptor and
//! `openat2`, mounts as detached trees, placement by descriptor. So nothing here takes a pid or a
//! path where a descriptor would do, and whoever holds one cannot be tricked by a pid that was
//! used again or a link that was swapped.
//!
//! **Two levels.** [`call`] is one thin layer: a function per system call that `rustix` lacks or
//! leaves unsafe, [`Errno`] as its only error, no allocation, no lock, so that it may be used
//! between clone and exec. The other modules speak for callers who can explain themselves: they
//! return [`CallError`], which remembers the call, its arguments and why it failed.
//!
//! **Kernel facts relied on** are tagged `KERNEL(version):` where they are used, with what happens
//! on older kernels. x86_64 only: the system call filter and the clone path know one machine.
//!
//! **Not here**: decisions. No module knows what a container is.

mod bpf;
mod btf;
pub mod call;
pub mod capability;
pub mod cgroup;
pub mod cpu;
pub mod error;
pub mod mount;
pub mod mqueue;
pub mod namespace;
pub mod nft;
pub mod pidfd;
pub mod probe;
pub mod proc;
pub mod process;
pub mod resolve;
pub mod rlimit;
pub mod scale;
pub mod seccomp;
pub mod swap;
pub mod sysctl;
pub mod system_v;
pub mod wait;
pub mod weaken;

pub use bpf::iterate_task;
pub use error::{CallError, ErrorKind};
pub use rustix::io::Errno;
pub use weaken::weakened;
