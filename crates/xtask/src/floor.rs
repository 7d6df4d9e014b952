//! Which crate may use which: the floors of the house.
//!
//! A crate uses only floors beneath its own, and crates on one floor do not know each other, so
//! the direction of every dependency can be read off a crate's place in [`FLOORS`]. The plain
//! types of `model` are words that every floor speaks, the kernel's included.

/// The floors, lowest first.
pub const FLOORS: &[&[&str]] = &[
    &["model", "entry"],
    &["kernel"],
    &["bpf", "api", "launch", "record"],
    &["image", "network", "governor", "account", "parcel", "stacks"],
    &["checkpoint"],
    &["container", "keeper"],
    &["daemon"],
    &["cli", "oci", "shim"],
];

/// Crates beside the house: they may use any floor, and no floor may be built on them.
pub const BESIDE: &[&str] = &["testkit", "xtask", "tests", "benches", "fuzz"];

/// Whether a dependency is compiled into the crate or only into its tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// `[dependencies]` and `[build-dependencies]`.
    Normal,
    /// `[dev-dependencies]`.
    Test,
}

fn floor(name: &str) -> Option<usize> {
    FLOORS.iter().position(|floor| floor.contains(&name))
}

/// Why `user` must not use `used`; `None` where it may. Names are those of the folders.
pub fn complaint(user: &str, used: &str, how: Use) -> Option<String> {
    let unknown = |name: &str| {
        let known = floor(name).is_some() || BESIDE.contains(&name);
        (!known).then(|| format!("crate '{name}' has no floor: give it one in xtask/src/floor.rs"))
    };
    if let Some(text) = unknown(user).or_else(|| unknown(used)) {
        return Some(text);
    }
    if BESIDE.contains(&used) {
        let allowed = used == "testkit" && (BESIDE.contains(&user) || how == Use::Test);
        return (!allowed).then(|| format!("'{user}' uses '{used}', which no floor is built on"));
    }
    match (floor(user), floor(used)) {
        (Some(upper), Some(lower)) if upper == lower => {
            Some(format!("'{user}' uses '{used}': crates on one floor do not know each other"))
        }
        (Some(upper), Some(lower)) if upper < lower => {
            Some(format!("'{user}' uses '{used}', which is on a higher floor"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crate_uses_only_floors_beneath_its_own() {
        for (user, used) in [
            ("kernel", "model"),
            ("network", "bpf"),
            ("parcel", "record"),
            ("stacks", "record"),
            ("checkpoint", "parcel"),
            ("container", "image"),
            ("cli", "container"),
            ("cli", "keeper"),
            ("cli", "daemon"),
            ("tests", "cli"),
            ("tests", "testkit"),
        ] {
            assert_eq!(complaint(user, used, Use::Normal), None, "{user} -> {used}");
        }
        for (user, used) in [
            ("model", "kernel"),
            ("record", "parcel"),
            ("parcel", "stacks"),
            ("image", "network"),
            ("keeper", "container"),
            ("kernel", "launch"),
            ("bpf", "launch"),
            ("image", "testkit"),
            ("cli", "xtask"),
            ("cli", "surprise"),
            ("surprise", "model"),
        ] {
            assert!(complaint(user, used, Use::Normal).is_some(), "{user} -> {used}");
        }
    }

    #[test]
    fn only_tests_use_the_testkit() {
        assert_eq!(complaint("image", "testkit", Use::Test), None);
        assert!(complaint("image", "network", Use::Test).is_some());
    }
}
