//! Debian's archive, as this machine's own apt knows it.
//!
//! No mirror is named here: mirror, proxy and keys are those of apt's configuration.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::process::run;

/// The time limit of a download from a mirror.
const DOWNLOAD: Duration = Duration::from_secs(600);

/// The archives that apt knows: `(URI, suite)`, such as `bookworm`, `bookworm-security`.
fn archives() -> Vec<(String, String)> {
    let mut command = Command::new("apt-get");
    command.args(["indextargets", "--format", "$(REPO_URI) $(CODENAME)"]);
    command.arg("Created-By: Packages");
    let text = run(command, b"", Duration::from_secs(20)).ok();
    let mut found: Vec<(String, String)> = Vec::new();
    for line in text.lines() {
        let Some((uri, suite)) = line.split_once(' ') else { continue };
        let entry = (uri.to_owned(), suite.to_owned());
        if !found.contains(&entry) {
            found.push(entry);
        }
    }
    found
}

/// The code name of the running Debian, `bookworm`.
pub fn suite() -> String {
    let text = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    name.map(str::to_owned).expect("/etc/os-release of Debian names its release")
}

/// Lines of a sources.list for the running release and its security updates, and the URI of the
/// archive itself.
pub fn sources() -> (Vec<String>, String) {
    let suite = suite();
    let archives = archives();
    let base = archives.iter().find(|(_, s)| *s == suite).map(|(uri, _)| uri.clone());
    let base = base.expect("apt knows the archive of the running release: apt-get update first");
    let wanted = [suite.clone(), format!("{suite}-updates"), format!("{suite}-security")];
    let lines = archives
        .iter()
        .filter(|(_, suite)| wanted.contains(suite))
        .map(|(uri, suite)| format!("deb {uri} {suite} main"))
        .collect();
    (lines, base)
}

/// Makes a root filesystem of the running release with these packages, with Debian's own
/// bootstrap. `target` may be a directory or end in `.tar`; `hooks` are further arguments of
/// mmdebstrap(1).
pub fn bootstrap(packages: &[&str], target: &Path, hooks: &[String]) {
    let mut command = Command::new("mmdebstrap");
    command.args(["--quiet", "--variant=minbase", "--components=main"]);
    // The result is made again after a crash, so no package is synced.
    command.arg("--dpkgopt=force-unsafe-io");
    command.arg(format!("--include={}", packages.join(",")));
    for excluded in ["/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*"] {
        command.arg(format!("--dpkgopt=path-exclude={excluded}"));
    }
    command.args(hooks);
    command.arg(suite()).arg(target).args(sources().0);
    run(command, b"", DOWNLOAD).ok();
}
