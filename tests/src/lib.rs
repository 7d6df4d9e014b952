//! Whole-system tests of Dormouse: what a person at the command line relies on.
//!
//! One promise per file, beside this folder. Every test starts the program as a user would, on a
//! host of its own (`dormouse_testkit::Host`), and looks at what is left when it is done. A name
//! that begins with `vm_` is also run under Debian's newer kernel (`cargo xtask guest`), one that
//! begins with `big_` takes long or much memory and is not.
#![forbid(unsafe_code)]
