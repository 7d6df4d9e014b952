//! Capabilities: root's power in pieces (capabilities(7)).

use std::fmt;
use std::sync::OnceLock;

use dormouse_model::Invalid;

use crate::call;
use crate::error::{Explain, Result};

macro_rules! capabilities {
    ($($name:ident = $number:literal, $text:literal;)*) => {
        /// One capability, with the kernel's number.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum Capability {
            $(#[doc = concat!("CAP_", $text)] $name = $number,)*
        }

        impl Capability {
            /// All capabilities with a name here, by number.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The name without `CAP_`.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }
        }
    };
}

capabilities! {
    Chown = 0, "CHOWN";
    DacOverride = 1, "DAC_OVERRIDE";
    DacReadSearch = 2, "DAC_READ_SEARCH";
    Fowner = 3, "FOWNER";
    Fsetid = 4, "FSETID";
    Kill = 5, "KILL";
    Setgid = 6, "SETGID";
    Setuid = 7, "SETUID";
    Setpcap = 8, "SETPCAP";
    LinuxImmutable = 9, "LINUX_IMMUTABLE";
    NetBindService = 10, "NET_BIND_SERVICE";
    NetBroadcast = 11, "NET_BROADCAST";
    NetAdmin = 12, "NET_ADMIN";
    NetRaw = 13, "NET_RAW";
    IpcLock = 14, "IPC_LOCK";
    IpcOwner = 15, "IPC_OWNER";
    SysModule = 16, "SYS_MODULE";
    SysRawio = 17, "SYS_RAWIO";
    SysChroot = 18, "SYS_CHROOT";
    SysPtrace = 19, "SYS_PTRACE";
    SysPacct = 20, "SYS_PACCT";
    SysAdmin = 21, "SYS_ADMIN";
    SysBoot = 22, "SYS_BOOT";
    SysNice = 23, "SYS_NICE";
    SysResource = 24, "SYS_RESOURCE";
    SysTime = 25, "SYS_TIME";
    SysTtyConfig = 26, "SYS_TTY_CONFIG";
    Mknod = 27, "MKNOD";
    Lease = 28, "LEASE";
    AuditWrite = 29, "AUDIT_WRITE";
    AuditControl = 30, "AUDIT_CONTROL";
    Setfcap = 31, "SETFCAP";
    MacOverride = 32, "MAC_OVERRIDE";
    MacAdmin = 33, "MAC_ADMIN";
    Syslog = 34, "SYSLOG";
    WakeAlarm = 35, "WAKE_ALARM";
    BlockSuspend = 36, "BLOCK_SUSPEND";
    AuditRead = 37, "AUDIT_READ";
    Perfmon = 38, "PERFMON";
    Bpf = 39, "BPF";
    CheckpointRestore = 40, "CHECKPOINT_RESTORE";
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CAP_{}", self.name())
    }
}

/// A set of capabilities: bit N of the mask is capability N.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Set(u64);

impl Set {
    /// No capability.
    pub const fn empty() -> Self {
        Self(0)
    }

    /// The set of a mask. Bits that name no capability of this program are kept.
    pub const fn from_bits(mask: u64) -> Self {
        Self(mask)
    }

    /// The mask as capset(2) and `/proc/PID/status` have it.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Returns whether it is in the set.
    pub const fn contains(self, capability: Capability) -> bool {
        self.0 & (1 << capability as u8) != 0
    }

    /// Returns the capabilities in either set.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns the capabilities in both sets.
    #[must_use]
    pub const fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Returns the capabilities in this set alone.
    #[must_use]
    pub const fn difference(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// The known members, by number.
    pub fn iter(self) -> impl Iterator<Item = Capability> {
        Capability::ALL.iter().copied().filter(move |capability| self.contains(*capability))
    }
}

impl FromIterator<Capability> for Set {
    fn from_iter<I: IntoIterator<Item = Capability>>(capabilities: I) -> Self {
        Self(capabilities.into_iter().fold(0, |mask, capability| mask | 1 << capability as u8))
    }
}

/// The mask of a list.
pub fn to_mask(capabilities: &[Capability]) -> u64 {
    capabilities.iter().copied().collect::<Set>().bits()
}

/// A capability by name in any case, with or without `CAP_`.
pub fn parse_one(text: &str) -> Result<Capability, Invalid> {
    let upper = text.to_ascii_uppercase();
    let name = upper.strip_prefix("CAP_").unwrap_or(&upper);
    Capability::ALL.iter().copied().find(|capability| capability.name() == name).ok_or_else(|| {
        Invalid::new("capability", text, "a name of capabilities(7) such as CAP_NET_RAW, or ALL")
    })
}

/// The set of a list of names as [`parse_one`] takes them, among which `ALL` means [`all`].
pub fn parse<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<Set, Invalid> {
    names.into_iter().try_fold(Set::empty(), |set, name| {
        if name.eq_ignore_ascii_case("all") || name.eq_ignore_ascii_case("cap_all") {
            return Ok(set.union(all()));
        }
        Ok(set.union(std::iter::once(parse_one(name)?).collect()))
    })
}

/// The default set of a container's root: podman's list, eleven capabilities that change nothing
/// outside their own user namespace.
pub fn default_set() -> Set {
    use Capability::*;
    [
        Chown,
        DacOverride,
        Fowner,
        Fsetid,
        Kill,
        NetBindService,
        Setfcap,
        Setgid,
        Setpcap,
        Setuid,
        SysChroot,
    ]
    .into_iter()
    .collect()
}

/// Returns all capabilities of this kernel, also those without a name here.
///
/// A capability that is newer than the kernel cannot be granted.
pub fn all() -> Set {
    static ALL: OnceLock<Set> = OnceLock::new();
    *ALL.get_or_init(|| {
        let last = crate::proc::read_text("/proc/sys/kernel/cap_last_cap", 16).ok();
        let last = last.and_then(|text| text.trim().parse().ok());
        // Without procfs: what every supported kernel has.
        let last = last.unwrap_or(Capability::CheckpointRestore as u32);
        Set(u64::MAX >> (63 - last.min(63)))
    })
}

/// The effective capabilities of the calling thread.
pub fn effective() -> Result<Set> {
    let masks = call::capget().explain("capget", String::new)?;
    Ok(Set::from_bits(masks.effective))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capability_names_parse_in_any_usual_form() {
        assert_eq!(parse(["CAP_NET_RAW"]).unwrap().bits(), 1 << 13);
        assert_eq!(parse(["net_raw", "Chown"]).unwrap().bits(), 1 << 13 | 1);
        assert_eq!(parse(["all"]).unwrap(), all());
        assert_eq!(parse([]).unwrap(), Set::empty());
        assert!(parse(["CHOWN", "CAP_EVERYTHING"]).is_err());
    }

    #[test]
    fn capability_numbers_match_the_kernel() {
        assert_eq!(Capability::SysAdmin as u8, 21);
        assert_eq!(Capability::CheckpointRestore as u8, 40);
        assert!(all().contains(Capability::Chown));
        let fields = crate::proc::fields(std::process::id()).unwrap();
        assert_eq!(effective().unwrap().bits(), fields.mask("CapEff").unwrap());
    }

    #[test]
    fn default_set_has_no_capability_over_the_host() {
        let set = default_set();
        assert_eq!(set.iter().count(), 11);
        for capability in [Capability::SysAdmin, Capability::NetRaw, Capability::Mknod] {
            assert!(!set.contains(capability), "{capability}");
        }
    }
}
