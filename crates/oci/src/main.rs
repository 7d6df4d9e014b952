//! `dormouse-oci`: see the library.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(dormouse_oci::command::main())
}
