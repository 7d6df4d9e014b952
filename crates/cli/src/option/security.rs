//! `--cap-add`, `--cap-drop`, `--security-opt`, `--privileged`.

use dormouse_model::SeccompChoice;

use super::{Invalid, flag};

/// Computes a container's capabilities from the default set, the added and the dropped ones.
///
/// As in podman, `ALL` added starts from all, `ALL` dropped from none, and a name both added and
/// dropped is a mistake. `canonical` converts a given name to the kernel's (`CAP_CHOWN`).
pub(crate) fn capabilities(
    default: &[String],
    all: &[String],
    add: &[String],
    drop: &[String],
) -> Result<Vec<String>, Invalid> {
    let names = |list: &[String]| -> Result<Vec<String>, Invalid> {
        list.iter().flat_map(|l| l.split(',')).map(|n| canonical(n, all)).collect()
    };
    let (add, drop) = (names(add)?, names(drop)?);
    if let Some(both) = add.iter().find(|a| drop.contains(a)) {
        return Err(Invalid::new("capability", both, "added or dropped, not both"));
    }
    let has = |list: &[String]| list.iter().any(|n| n == "ALL");
    let base = match (has(&add), has(&drop)) {
        (true, _) => all,
        (_, true) => &[],
        _ => default,
    };
    let mut set: Vec<String> = base.iter().filter(|c| !drop.contains(c)).cloned().collect();
    for name in add {
        if name != "ALL" && !set.contains(&name) {
            set.push(name);
        }
    }
    Ok(set)
}

/// Converts `chown`, `CHOWN` or `cap_chown` to `CAP_CHOWN`; `all` to `ALL`.
fn canonical(text: &str, all: &[String]) -> Result<String, Invalid> {
    let upper = text.trim().to_ascii_uppercase();
    if upper == "ALL" {
        return Ok(upper);
    }
    let name = if upper.starts_with("CAP_") { upper } else { format!("CAP_{upper}") };
    if all.contains(&name) {
        Ok(name)
    } else {
        Err(Invalid::new("capability", text, "ALL or a name of capabilities(7) this kernel has"))
    }
}

/// The combined arguments of `--security-opt`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SecurityOptions {
    /// No process gains privileges by execve.
    pub(crate) no_new_privileges: bool,
    /// Which system calls are allowed.
    pub(crate) seccomp: SeccompChoice,
}

/// Reads `seccomp=unconfined`, `no-new-privileges[=true|false]`. `label=disable` and
/// `apparmor=unconfined` are accepted without effect, since neither module is used.
pub(crate) fn security_options(list: &[String]) -> Result<SecurityOptions, Invalid> {
    let mut options = SecurityOptions { no_new_privileges: false, seccomp: SeccompChoice::Default };
    for text in list {
        let (key, value) = match text.split_once(['=', ':']) {
            Some((key, value)) => (key, Some(value)),
            None => (text.as_str(), None),
        };
        match (key, value) {
            ("no-new-privileges", value) => {
                options.no_new_privileges = flag("no-new-privileges", value)?;
            }
            ("seccomp", Some("unconfined")) => options.seccomp = SeccompChoice::Unconfined,
            ("seccomp", Some("default")) => options.seccomp = SeccompChoice::Default,
            ("label", Some("disable")) | ("apparmor", Some("unconfined")) => {}
            _ => {
                let expected = "seccomp=unconfined or no-new-privileges";
                return Err(Invalid::new("security option", text, expected));
            }
        }
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(add: &[&str], drop: &[&str]) -> Result<Vec<String>, Invalid> {
        let own = |l: &[&str]| l.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
        let all = own(&["CAP_CHOWN", "CAP_KILL", "CAP_SYS_ADMIN"]);
        capabilities(&own(&["CAP_CHOWN", "CAP_KILL"]), &all, &own(add), &own(drop))
    }

    #[test]
    fn capabilities_are_added_and_dropped() {
        assert_eq!(of(&[], &[]).unwrap(), ["CAP_CHOWN", "CAP_KILL"]);
        assert_eq!(of(&["sys_admin"], &["cap_kill"]).unwrap(), ["CAP_CHOWN", "CAP_SYS_ADMIN"]);
        assert_eq!(of(&["ALL"], &["KILL"]).unwrap(), ["CAP_CHOWN", "CAP_SYS_ADMIN"]);
        assert_eq!(of(&["kill"], &["all"]).unwrap(), ["CAP_KILL"]);
        assert_eq!(of(&["chown,kill"], &["ALL"]).unwrap(), ["CAP_CHOWN", "CAP_KILL"]);
        assert_eq!(of(&[], &["ALL"]).unwrap(), Vec::<String>::new());
        for (add, drop) in [("KILL", "KILL"), ("bogus", "KILL"), ("ALL", "ALL"), ("", "KILL")] {
            assert!(of(&[add], &[drop]).is_err(), "{add} {drop}");
        }
    }

    #[test]
    fn security_options_are_parsed_or_refused() {
        let of = |t: &str| security_options(&[t.to_owned()]);
        assert!(of("no-new-privileges").unwrap().no_new_privileges);
        assert!(of("no-new-privileges:true").unwrap().no_new_privileges);
        assert!(!of("no-new-privileges=false").unwrap().no_new_privileges);
        assert_eq!(of("seccomp=unconfined").unwrap().seccomp, SeccompChoice::Unconfined);
        for bad in ["", "seccomp", "seccomp=/etc/x.json", "label=type:x", "no-new-privileges=x"] {
            assert!(of(bad).is_err(), "{bad}");
        }
    }
}
