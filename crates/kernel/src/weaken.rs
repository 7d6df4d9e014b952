//! Protections that a test build can leave out, so that the isolation tests can show that each of
//! their attacks is stopped by the protection it is aimed at and by nothing else.
//!
//! A program built without the feature `weaken` contains none of this: [`weakened`] is a constant.

/// Returns whether the protection is to be left out: only in a build with the feature `weaken`, and
/// only if `DORMOUSE_WEAKEN` lists its name, separated by commas.
///
/// Called at the one place that applies a protection.
#[cfg(feature = "weaken")]
pub fn weakened(protection: &str) -> bool {
    std::env::var("DORMOUSE_WEAKEN")
        .is_ok_and(|list| list.split(',').any(|listed| listed.trim() == protection))
}

/// Never: this build has all its protections.
#[cfg(not(feature = "weaken"))]
pub const fn weakened(_protection: &str) -> bool {
    false
}

#[cfg(all(test, not(feature = "weaken")))]
mod tests {
    #[test]
    fn shipped_build_cannot_be_weakened() {
        const { assert!(!super::weakened("seccomp")) };
    }
}
