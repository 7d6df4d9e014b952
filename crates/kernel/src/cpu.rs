//! CPU features that a program may use: instructions by name, and the register state it may have.
//!
//! The source is CPUID and XCR0, the same that a program reads. `/proc/cpuinfo` also lists features
//! that only the kernel uses, with names that change between kernel versions.

use std::arch::x86_64::{__cpuid_count, __get_cpuid_max, _xgetbv, CpuidResult};
use std::sync::OnceLock;

/// Position of a bit of CPUID: leaf, subleaf, and the word.
type Word = (u32, u32, Register);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Register {
    A,
    B,
    C,
    D,
}
use Register::{A, B, C, D};

/// Bits of XCR0 that the kernel must have enabled: none, or the state that the instructions use.
const NONE: u64 = 0;
const AVX: u64 = 0b110;
const AVX512: u64 = 0b1110_0110;
const AMX: u64 = 0b11 << 17;
const APX: u64 = 1 << 19;

/// A feature by its name in `/proc/cpuinfo`, its bit, and what of XCR0 it needs.
type Feature = (&'static str, u32, u64);

/// Every feature that adds instructions for programs.
const FEATURES: [(Word, &[Feature]); 12] = [
    (
        (1, 0, D),
        &[
            ("fpu", 0, NONE),
            ("tsc", 4, NONE),
            ("cx8", 8, NONE),
            ("cmov", 15, NONE),
            ("clflush", 19, NONE),
            ("mmx", 23, NONE),
            ("fxsr", 24, NONE),
            ("sse", 25, NONE),
            ("sse2", 26, NONE),
        ],
    ),
    (
        (1, 0, C),
        &[
            ("pni", 0, NONE),
            ("pclmulqdq", 1, NONE),
            ("ssse3", 9, NONE),
            ("fma", 12, AVX),
            ("cx16", 13, NONE),
            ("sse4_1", 19, NONE),
            ("sse4_2", 20, NONE),
            ("movbe", 22, NONE),
            ("popcnt", 23, NONE),
            ("aes", 25, NONE),
            ("xsave", 27, NONE), // as the kernel has switched it on
            ("avx", 28, AVX),
            ("f16c", 29, AVX),
            ("rdrand", 30, NONE),
        ],
    ),
    (
        (7, 0, B),
        &[
            ("fsgsbase", 0, NONE),
            ("bmi1", 3, NONE),
            ("hle", 4, NONE),
            ("avx2", 5, AVX),
            ("bmi2", 8, NONE),
            ("erms", 9, NONE),
            ("rtm", 11, NONE),
            ("avx512f", 16, AVX512),
            ("avx512dq", 17, AVX512),
            ("rdseed", 18, NONE),
            ("adx", 19, NONE),
            ("avx512ifma", 21, AVX512),
            ("clflushopt", 23, NONE),
            ("clwb", 24, NONE),
            ("avx512pf", 26, AVX512),
            ("avx512er", 27, AVX512),
            ("avx512cd", 28, AVX512),
            ("sha_ni", 29, NONE),
            ("avx512bw", 30, AVX512),
            ("avx512vl", 31, AVX512),
        ],
    ),
    (
        (7, 0, C),
        &[
            ("avx512vbmi", 1, AVX512),
            ("ospke", 4, NONE),
            ("waitpkg", 5, NONE),
            ("avx512_vbmi2", 6, AVX512),
            ("gfni", 8, NONE),
            ("vaes", 9, AVX),
            ("vpclmulqdq", 10, AVX),
            ("avx512_vnni", 11, AVX512),
            ("avx512_bitalg", 12, AVX512),
            ("avx512_vpopcntdq", 14, AVX512),
            ("rdpid", 22, NONE),
            ("cldemote", 25, NONE),
            ("movdiri", 27, NONE),
            ("movdir64b", 28, NONE),
        ],
    ),
    (
        (7, 0, D),
        &[
            ("avx512_4vnniw", 2, AVX512),
            ("avx512_4fmaps", 3, AVX512),
            ("fsrm", 4, NONE),
            ("avx512_vp2intersect", 8, AVX512),
            ("serialize", 14, NONE),
            ("tsxldtrk", 16, NONE),
            ("amx_bf16", 22, AMX),
            ("avx512_fp16", 23, AVX512),
            ("amx_tile", 24, AMX),
            ("amx_int8", 25, AMX),
        ],
    ),
    (
        (7, 1, A),
        &[
            ("sha512", 0, AVX),
            ("sm3", 1, AVX),
            ("sm4", 2, AVX),
            ("rao_int", 3, NONE),
            ("avx_vnni", 4, AVX),
            ("avx512_bf16", 5, AVX512),
            ("cmpccxadd", 7, NONE),
            ("fzrm", 10, NONE),
            ("fsrs", 11, NONE),
            ("fsrc", 12, NONE),
            ("amx_fp16", 21, AMX),
            ("avx_ifma", 23, AVX),
        ],
    ),
    (
        (7, 1, D),
        &[
            ("avx_vnni_int8", 4, AVX),
            ("avx_ne_convert", 5, AVX),
            ("amx_complex", 8, AMX),
            ("avx_vnni_int16", 10, AVX),
            ("prefetchi", 14, NONE),
            ("avx10", 19, AVX512),
            ("apx_f", 21, APX),
        ],
    ),
    ((0xd, 1, A), &[("xsaveopt", 0, NONE), ("xsavec", 1, NONE), ("xgetbv1", 2, NONE)]),
    ((0x8000_0001, 0, D), &[("mmxext", 22, NONE), ("rdtscp", 27, NONE), ("3dnow", 31, NONE)]),
    (
        (0x8000_0001, 0, C),
        &[
            ("lahf_lm", 0, NONE),
            ("abm", 5, NONE),
            ("sse4a", 6, NONE),
            ("misalignsse", 7, NONE),
            ("3dnowprefetch", 8, NONE),
            ("xop", 11, AVX),
            ("fma4", 16, AVX),
            ("tbm", 21, NONE),
            ("mwaitx", 29, NONE),
        ],
    ),
    ((0x8000_0008, 0, B), &[("clzero", 0, NONE), ("rdpru", 4, NONE)]),
    ((0x14, 0, B), &[("ptwrite", 4, NONE)]),
];

/// A part of the extended state that a program may keep: `XSAVE` writes it at this place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateComponent {
    /// Its bit in XCR0.
    pub number: u32,
    /// Offset in an area that is not compacted.
    pub offset: u32,
    /// Its length.
    pub bytes: u32,
}

/// Words of CPUID; 0 if the CPU has no such leaf. In a virtual machine each read is an exit to the
/// hypervisor, of 11 to 32 us as measured: no leaf is read without need.
#[allow(unused_unsafe, reason = "newer compilers call it safe")]
fn cpuid() -> impl Fn(u32, u32) -> CpuidResult {
    const EXTENDED: u32 = 0x8000_0000;
    // SAFETY: every CPU of x86_64 has CPUID.
    let [basic, extended] = [0, EXTENDED].map(|range| unsafe { __get_cpuid_max(range) }.0);
    move |leaf, subleaf| {
        if leaf > if leaf < EXTENDED { basic } else { extended } {
            return CpuidResult { eax: 0, ebx: 0, ecx: 0, edx: 0 };
        }
        // SAFETY: as above.
        unsafe { __cpuid_count(leaf, subleaf) }
    }
}

/// The state that the kernel lets programs have, as a mask.
fn xcr0(cpuid: impl Fn(u32, u32) -> CpuidResult) -> u64 {
    const OSXSAVE: u32 = 1 << 27;
    if cpuid(1, 0).ecx & OSXSAVE == 0 {
        return 0;
    }
    #[target_feature(enable = "xsave")]
    fn read() -> u64 {
        // SAFETY: register 0 is there wherever XGETBV is.
        unsafe { _xgetbv(0) }
    }
    // SAFETY: the kernel has switched XSAVE on.
    unsafe { read() }
}

/// Features by the names of `/proc/cpuinfo`, sorted.
pub fn features() -> &'static [&'static str] {
    static ALL: OnceLock<Vec<&'static str>> = OnceLock::new();
    ALL.get_or_init(|| {
        let cpuid = cpuid();
        let mut all = named(&cpuid, xcr0(&cpuid));
        all.sort_unstable();
        all
    })
}

fn named(cpuid: impl Fn(u32, u32) -> CpuidResult, xcr0: u64) -> Vec<&'static str> {
    let mut all = Vec::new();
    for ((leaf, subleaf, register), features) in FEATURES {
        let found = cpuid(leaf, subleaf);
        let word = match register {
            A => found.eax,
            B => found.ebx,
            C => found.ecx,
            D => found.edx,
        };
        let has = |(_, bit, needs): &&Feature| word & 1 << bit != 0 && xcr0 & needs == *needs;
        all.extend(features.iter().filter(has).map(|(name, ..)| *name));
    }
    all
}

/// The parts of the extended state, beyond what every CPU has at the same place (x87 and SSE).
pub fn state_components() -> &'static [StateComponent] {
    static ALL: OnceLock<Vec<StateComponent>> = OnceLock::new();
    ALL.get_or_init(|| {
        let cpuid = cpuid();
        let enabled = xcr0(&cpuid);
        let of = |number| {
            let found = cpuid(0xd, number);
            StateComponent { number, offset: found.ebx, bytes: found.eax }
        };
        (2..63).filter(|number| enabled & 1 << number != 0).map(of).collect()
    })
}

/// The file with the CPUs that this kernel may ever have.
pub const POSSIBLE: &str = "/sys/devices/system/cpu/possible";

/// How many CPUs this kernel may ever have, as `num_possible_cpus()` in the kernel.
pub fn possible() -> std::io::Result<u32> {
    let text = std::fs::read_to_string(POSSIBLE)?;
    count(text.trim()).ok_or_else(|| std::io::Error::from(std::io::ErrorKind::InvalidData))
}

/// Counts a list such as `0-3,8`.
fn count(list: &str) -> Option<u32> {
    Some(crate::proc::cpu_runs(list)?.iter().map(|(first, last)| last - first + 1).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn possible_cpus_are_counted() {
        assert_eq!(count("0"), Some(1));
        assert_eq!(count("0-1"), Some(2));
        assert_eq!(count("0-3,8,10-11"), Some(7));
        assert!(["", "a", "3-1", "0-", "0-4294967295"].iter().all(|list| count(list).is_none()));
        assert!(possible().unwrap() >= 1);
    }

    #[test]
    fn features_are_those_of_the_kernel_that_a_program_may_use() {
        let text = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        let line = text.lines().find_map(|l| l.strip_prefix("flags")?.split_once(':')).unwrap();
        let kernel: Vec<&str> = line.1.split_ascii_whitespace().collect();
        // Every kernel has these names.
        let old = ["sse2", "pni", "sse4_2", "popcnt", "avx", "avx2", "bmi1", "avx512f", "rdrand"];
        for name in old {
            assert_eq!(features().contains(&name), kernel.contains(&name), "{name}");
        }
        assert!(features().contains(&"sse2") && features().is_sorted());
    }

    #[test]
    fn feature_without_enabled_xcr0_state_is_absent() {
        let all = |_, _| CpuidResult { eax: !0, ebx: !0, ecx: !0, edx: !0 };
        let with = |xcr0| named(all, xcr0);
        assert!(with(0).contains(&"sse4_2") && !with(0).contains(&"avx"));
        assert!(with(0b111).contains(&"avx2") && !with(0b111).contains(&"avx512f"));
        assert!(with(0b1110_0111).contains(&"avx512f"));
        assert!(!with(0b1110_0111).contains(&"amx_tile"));
    }

    #[test]
    fn state_components_do_not_overlap() {
        let mut all = state_components().to_vec();
        all.sort_unstable_by_key(|part| part.offset);
        let is_behind = |pair: &[StateComponent]| pair[1].offset >= pair[0].offset + pair[0].bytes;
        assert!(all.windows(2).all(is_behind), "{all:?}");
        assert!(all.iter().all(|part| part.bytes > 0 && part.offset >= 576));
    }
}
