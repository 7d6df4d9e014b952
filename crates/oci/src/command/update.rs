//! `update`: flags and a file of resources.

use dormouse_model::parse_bytes;

use super::context::Context;
use super::flag::{Flag, Given, Takes};
use crate::error::{Error, Result};
use crate::spec::{self, BlockIo, Cpu, Memory, Pids, Resources};

use Takes::{Nothing, One};

pub(super) const FLAGS: &[Flag] = &[
    ("resources", "r", One, "file of linux.resources, - for standard input"),
    ("blkio-weight", "", One, "weight of disk time, 10 to 1000"),
    ("cpu-period", "", One, "microseconds"),
    ("cpu-quota", "", One, "microseconds in a period"),
    ("cpu-burst", "", One, "microseconds"),
    ("cpu-share", "", One, "weight of CPU time"),
    ("cpu-rt-period", "", One, "microseconds"),
    ("cpu-rt-runtime", "", One, "microseconds"),
    ("cpuset-cpus", "", One, "list of CPUs"),
    ("cpuset-mems", "", One, "list of memory nodes"),
    ("cpu-idle", "", One, "0 or 1"),
    ("memory", "", One, "bytes, or with k, m, g, t"),
    ("memory-reservation", "", One, "bytes"),
    ("memory-swap", "", One, "bytes of memory and swap; -1 for no limit"),
    ("kernel-memory", "", One, "accepted without effect: removed from the kernel"),
    ("kernel-memory-tcp", "", One, "bytes"),
    ("pids-limit", "", One, "number of tasks"),
    ("l3-cache-schema", "", One, "refused: resctrl is not used"),
    ("mem-bw-schema", "", One, "refused: resctrl is not used"),
    ("help", "h", Nothing, "show this"),
];

/// Parses bytes as runc does.
fn bytes(name: &str, text: &str) -> Result<i64> {
    let bad = || Error::Usage(format!("--{name}: {text:?} is no number of bytes"));
    if text == "-1" {
        return Ok(-1);
    }
    let number = parse_bytes(text).map_err(|_| bad())?;
    i64::try_from(number).map_err(|_| bad())
}

pub(super) fn update(context: Context<'_>) -> Result<u8> {
    let given = context.given;
    let resources = match given.one("resources") {
        Some("-") => {
            let mut text = Vec::new();
            std::io::Read::read_to_end(&mut std::io::stdin(), &mut text)
                .map_err(Error::file("read", "standard input"))?;
            let parsed = spec::parse(&text);
            parsed.map_err(|why| Error::Config { path: "standard input".into(), why })?
        }
        Some(path) => spec::read(std::path::Path::new(path))?,
        None => from_flags(given)?,
    };
    context.runtime.update(given.id()?, &resources)?;
    Ok(0)
}

fn from_flags(given: &Given) -> Result<Resources> {
    for name in ["l3-cache-schema", "mem-bw-schema"] {
        if given.one(name).is_some_and(|value| !value.is_empty()) {
            return Err(Error::Usage(format!("--{name}: this runtime does not use resctrl")));
        }
    }
    let size = |name: &str| given.one(name).map(|text| bytes(name, text)).transpose();
    let text = |name: &str| given.one(name).map(str::to_owned);
    let cpu = Cpu {
        shares: given.number("cpu-share")?,
        quota: given.number("cpu-quota")?,
        burst: given.number("cpu-burst")?,
        period: given.number("cpu-period")?,
        realtime_runtime: given.number("cpu-rt-runtime")?,
        realtime_period: given.number("cpu-rt-period")?,
        cpus: text("cpuset-cpus"),
        mems: text("cpuset-mems"),
        idle: given.number("cpu-idle")?,
    };
    let memory = Memory {
        limit: size("memory")?,
        reservation: size("memory-reservation")?,
        swap: size("memory-swap")?,
        kernel_tcp: size("kernel-memory-tcp")?,
        ..Memory::default()
    };
    let weight = given.number("blkio-weight")?;
    Ok(Resources {
        cpu: Some(cpu),
        memory: Some(memory),
        pids: given.number("pids-limit")?.map(|limit| Pids { limit: Some(limit) }),
        block_io: weight.map(|weight| BlockIo { weight: Some(weight), ..BlockIo::default() }),
        ..Resources::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_suffixes_are_powers_of_two() {
        assert_eq!(bytes("m", "10").expect("good"), 10);
        assert_eq!(bytes("m", "64M").expect("good"), 64 << 20);
        assert_eq!(bytes("m", "1GiB").expect("good"), 1 << 30);
        assert_eq!(bytes("m", "2kb").expect("good"), 2048);
        assert_eq!(bytes("m", "-1").expect("good"), -1);
        for bad in ["", "-2", "k", "1x", "9999999999g"] {
            assert!(bytes("m", bad).is_err(), "{bad}");
        }
    }
}
