//! Network stacks of containers: their configuration, their sockets as the kernel lists them, and the
//! packets of saved connections.
//!
//! A *stack* is a network namespace, named by a descriptor. A function works on the stack of the
//! calling thread, or on the one that it takes, which the thread visits ([`stack::inside_of`]).
//!
//! ```text
//!   stack    which sockets and addresses the kernel lists      repair   options of TCP repair mode
//!   quiet    rules that drop packets of saved connections      net      devices, addresses, routes,
//!   packet   packets that sockets receive again                         rules, filters, settings
//!   accept   connections of an accept queue                    buffer   sizes of buffers for a while
//!   held     first packets of connections, until admitted
//! ```
//!
//! Modules form a line: `quiet` uses `stack`; `packet` and `net` use both; `buffer` uses `repair`; `accept`
//! uses `packet` and `buffer`; `held` uses `quiet`. Records (crate `record`) are taken as
//! checked. Not here: sockets as objects of processes, which are the work of `checkpoint`, and addresses and
//! bridges of the host, the work of `network`.
//!
//! Kernel facts: a stack is configured by rtnetlink(7), nft(8) and files of `/proc/sys/net`. Sockets are
//! listed by `/proc/net`. A connection that was taken from an accept queue is put back by a BPF program
//! (`dormouse_bpf::handshake`).
#![forbid(unsafe_code)]

pub mod accept;
pub mod buffer;
pub mod held;
pub mod net;
pub mod packet;
pub mod quiet;
pub mod repair;
pub mod stack;
