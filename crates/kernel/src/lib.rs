//! The Linux interface of Dormouse.
//!
//! **The idea.** An object is resolved once and then held: processes by pidfd, files by descriptor
//! and `openat2`, mounts as detached trees, placement by descriptor. No function here takes a pid
//! or a path if a descriptor would do. A held object cannot be replaced by reuse of a pid or by a
//! swapped link.
//!
//! **Two levels.** [`call`] is one thin layer: a function per system call that `rustix` lacks or
//! leaves unsafe, with [`Errno`] as its only error. These functions take no lock and, but for two
//! that return socket or seccomp filters, do not allocate, so they can be used between clone and
//! exec. The other modules return [`CallError`], which contains the call, its arguments and the
//! cause; `cgroup` returns `CgroupError`, which names the failed step.
//!
//! **Kernel facts relied on** are tagged `KERNEL(version):` where they are used, with the behaviour
//! on older kernels. x86_64 only: the system call filter and the clone path are written for one
//! machine.
//!
//! **Not here**: the state and the configuration of containers. Some modules do know that the host
//! runs containers: [`seccomp`] has the default policy, [`scale`] and [`probe`] check that a host
//! suffices, [`raise`] raises what does not, and [`cgroup`] places the keeper.

mod bpf;
mod btf;
pub mod call;
pub mod capability;
pub mod cgroup;
pub mod clock;
pub mod cpu;
pub mod error;
pub mod ext4;
pub mod handle;
pub mod landlock;
pub mod loop_device;
pub mod mount;
pub mod mqueue;
pub mod namespace;
pub mod netlink;
pub mod nft;
pub mod pidfd;
pub mod probe;
pub mod proc;
pub mod process;
pub mod raise;
pub mod reset;
pub mod resolve;
pub mod rlimit;
pub mod scale;
pub mod seccomp;
pub mod start;
pub mod swap;
pub mod sysctl;
pub mod system_v;
pub mod wait;
pub mod weaken;

pub use bpf::{iterate, iterate_task};
pub use error::{CallError, ErrorKind};
pub use rustix::io::Errno;
pub use weaken::weakened;
