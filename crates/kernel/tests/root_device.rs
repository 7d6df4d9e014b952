//! A number of a file system is found again below others, as in a host with other mounts.

use std::os::fd::OwnedFd;

use dormouse_kernel::device::Reserved;
use dormouse_kernel::mount::{FsContext, MountAttr};

fn new() -> OwnedFd {
    FsContext::open("tmpfs").unwrap().create(MountAttr::empty()).unwrap()
}

fn number(mount: &OwnedFd) -> u64 {
    rustix::fs::fstat(mount).unwrap().st_dev
}

/// Frees three numbers, of which the last is wanted. Returns whether a later file system has it.
fn is_found_again() -> bool {
    let (lower, wanted) = ([new(), new()], new());
    let device = number(&wanted);
    drop((lower, wanted));
    let Some(mut reserved) = Reserved::new(device).unwrap() else { return false };
    let _other = new(); // does not take the number
    assert!(reserved.release());
    let found = new();
    assert_eq!(reserved.is_of(&found).unwrap(), number(&found) == device);
    reserved.is_of(&found).unwrap()
}

/// Mounts of other tests take numbers meanwhile: one success is enough.
#[test]
fn reserved_number_is_that_of_the_next_file_system() {
    assert!((0..100).any(|_| is_found_again()));
}

#[test]
fn number_in_use_is_not_reserved() {
    let mount = new();
    assert!(Reserved::new(number(&mount)).unwrap().is_none());
    assert!(Reserved::new(0x801).unwrap().is_none(), "the number of a disk");
}
