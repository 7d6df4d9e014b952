//! Compiles the programs. Needs clang with the BPF target and linux-libc-dev; the helper headers
//! come with libbpf-cargo.

use std::env;
use std::path::PathBuf;

use libbpf_cargo::SkeletonBuilder;

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let arch = env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets the target");
    for name in [
        "address",
        "abstract_unix",
        "handshake",
        "embryo",
        "aio",
        "request",
        "reuseport",
        "scheduler",
        "gates",
        "pass",
        "rate",
        "socket_count",
        "sysinfo",
        "barrier",
    ] {
        let source = format!("src/{name}/{name}.bpf.c");
        println!("cargo:rerun-if-changed={source}");
        println!("cargo:rerun-if-changed=src/{name}/record.h");
        println!("cargo:rerun-if-changed=src/gates/security.h");
        println!("cargo:rerun-if-changed=src/gates/bind.h");
        println!("cargo:rerun-if-changed=src/gates/pipe.h");
        println!("cargo:rerun-if-changed=src/gates/semaphore.h");
        println!("cargo:rerun-if-changed=src/identity/identity.h");
        println!("cargo:rerun-if-changed=src/identity/wire.h");
        let include = format!("-I/usr/include/{arch}-linux-gnu");
        SkeletonBuilder::new()
            .source(&source)
            .obj(out.join(format!("{name}.o")))
            .clang_args(["-Wall", "-Werror", "-mcpu=v3", include.as_str()])
            .build()
            .unwrap_or_else(|e| panic!("{source}: {e:?}"));
    }
}
