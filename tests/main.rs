//! Whole-system tests of Dormouse, through the command line alone.
//!
//! All of them are one program, since linking one takes less time than linking twenty-four. A module is one
//! promise. Every test starts the programs as a user would, on a host of its own
//! (`dormouse_testkit::Host`), and checks what is left when it is done. The prefix `vm_` of a name marks a
//! test that also runs under Debian's newer kernel (`cargo xtask guest`); `big_` marks a test that takes long
//! or much memory and runs in the nightly ring only.
#![forbid(unsafe_code)]

mod account_limits;
mod accounts;
mod across;
mod bandwidth;
mod barrier;
mod bound;
mod bundle;
mod bundles;
mod checkpoint;
mod compat;
mod containerd;
mod contracts;
mod daemon;
mod debts;
mod disk;
mod disk_rates;
mod drowsy;
mod errors;
mod evict;
mod fault;
mod gatekeeper;
mod gates;
mod guarantees;
mod hang;
mod host_users;
mod hostile;
mod image_memory;
mod images;
mod isolation;
mod leftovers;
mod lifecycle;
mod logs;
mod network;
mod objects;
mod oci;
mod oci_checkpoint;
mod oci_scripts;
mod order;
mod podman;
mod podman_user;
mod private;
mod programs;
mod rounds;
mod rules;
mod runner;
mod scheduler;
mod security_gates;
mod services;
mod shortage;
mod sleep;
mod soak;
mod software;
mod spares;
mod spectator;
mod swap;
mod terminal;
mod unwoken;
mod views;
mod volume;
mod warm;
