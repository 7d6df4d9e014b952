//! Checks of the settings of a stack, below `/proc/sys/net`.

/// Directories, in the order in which they are written: settings for all devices before those for
/// one.
pub const DIRS: [&str; 10] = [
    "core",
    "unix",
    "ipv4",
    "ipv6",
    "ipv4/conf/all",
    "ipv4/conf/default",
    "ipv4/conf/lo",
    "ipv6/conf/all",
    "ipv6/conf/default",
    "ipv6/conf/lo",
];
/// Directories with one subdirectory for each device.
pub const OF_LINKS: [&str; 4] = ["ipv4/conf", "ipv6/conf", "ipv4/neigh", "ipv6/neigh"];

/// Checks a device name, so that it cannot lead to another path: stricter than the kernel.
pub fn is_link_name(name: &str) -> bool {
    let known = |b: u8| b.is_ascii_alphanumeric() || b"_.-".contains(&b);
    (1..16).contains(&name.len()) && name.bytes().all(known) && !name.starts_with('.')
}

/// The name of the device of a setting, unless it is the loopback device or none.
pub fn link_of(path: &str) -> Option<&str> {
    let (dir, _) = path.rsplit_once('/')?;
    let (group, link) = dir.rsplit_once('/')?;
    (OF_LINKS.contains(&group) && !DIRS.contains(&dir)).then_some(link)
}

/// Whether a setting is in a known directory.
pub fn is_setting(path: &str) -> bool {
    let is_name = |name: &str| {
        let known = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
        !name.is_empty() && name.bytes().all(known)
    };
    path.rsplit_once('/').is_some_and(|(dir, name)| {
        (DIRS.contains(&dir) || link_of(path).is_some_and(is_link_name)) && is_name(name)
    })
}

/// Whether a new stack has a setting from its host, or from the kernel's defaults for devices: those of all
/// devices, of new ones and of the loopback device, of neighbours, and three of TCP (ip-sysctl,
/// `devconf_inherit_init_net`).
pub fn is_inherited(path: &str) -> bool {
    const ALONE: [&str; 4] =
        ["ipv4/ip_forward", "ipv4/tcp_rmem", "ipv4/tcp_wmem", "ipv4/tcp_congestion_control"];
    let is_of_devices = |dir: &str| {
        let is_of_all = DIRS.contains(&dir) && dir.contains("/conf/");
        let neighbours = ["ipv4/neigh", "ipv6/neigh"];
        is_of_all || dir.rsplit_once('/').is_some_and(|(group, _)| neighbours.contains(&group))
    };
    let dir = path.rsplit_once('/').map(|(dir, _)| dir);
    is_setting(path) && (ALONE.contains(&path) || dir.is_some_and(is_of_devices))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_is_below_the_directories_of_a_stack() {
        assert!(is_setting("ipv4/ip_forward") && is_setting("ipv6/conf/lo/disable_ipv6"));
        assert!(is_setting("ipv4/conf/eth0.7/forwarding"));
        assert_eq!(link_of("ipv4/conf/eth0.7/forwarding"), Some("eth0.7"));
        assert_eq!((link_of("ipv4/conf/lo/forwarding"), link_of("ipv4/ip_forward")), (None, None));
        for path in ["ipv4/ip_forward", "ipv6/conf/all/mtu", "ipv4/neigh/eth0/app_solicit"] {
            assert!(is_inherited(path), "{path}");
        }
        for path in ["ipv4/tcp_sack", "ipv4/conf/eth0/forwarding", "core/somaxconn", "ipv4"] {
            assert!(!is_inherited(path), "{path}");
        }
        for bad in [
            "",
            "ipv4",
            "ipv4/../../kernel/core_pattern",
            "ipv4/conf/../ip_forward",
            "ipv4/conf/a b/forwarding",
            "/ipv4/a",
            "ipv4/other/eth0/a",
            "kernel/a",
        ] {
            assert!(!is_setting(bad), "{bad}");
        }
    }
}
