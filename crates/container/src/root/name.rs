//! Mounts for `/etc/hosts`, `/etc/hostname` and `/etc/resolv.conf`.
//!
//! Uses `ground`, `net` and `root::dir`.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};

use dormouse_kernel::mount;
use dormouse_kernel::mount::MountAttr;
use dormouse_model::Config;
use rustix::fs::CWD;

use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::net::Net;
use crate::root::dir;

/// Makes the mounts for `/etc/hosts`, `/etc/hostname` and `/etc/resolv.conf`, with their
/// targets.
pub(crate) fn mounts(
    ground: &Ground,
    config: &Config,
    net: &Net,
    shared: &Path,
) -> Result<Vec<(OwnedFd, &'static str)>> {
    let mut all = Vec::with_capacity(3);
    let taken = |path: &str| config.spec.mounts.iter().any(|m| m.target == path);
    let mut bind = |from: &Path, to: &'static str| -> Result<()> {
        if taken(to) {
            return Ok(());
        }
        let attr = MountAttr::NOSUID | MountAttr::NODEV | MountAttr::NOEXEC;
        let tree =
            mount::clone_with(CWD, from, attr).map_err(|e| Error::Rootfs(from.to_path_buf(), e))?;
        all.push((tree, to));
        Ok(())
    };
    let own = |name: &str, text: String| -> Result<PathBuf> {
        let path = shared.join(name);
        fs::write(&path, text).map_err(Error::file("cannot write", &path))?;
        chown(&path, Some(config.ids.base), Some(config.ids.base))
            .map_err(Error::file("cannot own", &path))?;
        dir::set_mode(&path, 0o644)?;
        Ok(path)
    };
    // The first name of a line is the canonical one: `hostname -f` prints the host name.
    let own_names = || {
        let (host, name) = (&config.spec.hostname, &config.name);
        let names = if host == name.as_str() { host.clone() } else { format!("{host} {name}") };
        format!("127.0.0.1\tlocalhost\n::1\tlocalhost\n127.0.0.1\t{names}\n")
    };
    let extra = || -> String {
        config.spec.extra_hosts.iter().map(|(name, ip)| format!("{ip}\t{name}\n")).collect()
    };
    bind(&own("hostname", format!("{}\n", config.spec.hostname))?, "/etc/hostname")?;
    match net {
        Net::Domain(domain) | Net::Private { domain, .. } => {
            let hosts = ground.network()?.hosts_file(domain);
            if config.spec.extra_hosts.is_empty() {
                bind(&hosts, "/etc/hosts")?;
            } else {
                // With lines of its own a container does not see later changes of names.
                let mut text =
                    fs::read_to_string(&hosts).map_err(Error::file("cannot read", &hosts))?;
                text += &extra();
                bind(&own("hosts", text)?, "/etc/hosts")?;
            }
            let resolv = ground.network()?.resolv_conf(domain);
            if config.spec.dns.is_empty() {
                bind(&resolv, "/etc/resolv.conf")?;
            }
        }
        Net::Host { .. } => {
            // A host installed by hand or by a bootstrap tool may have none.
            let hosts = Path::new("/etc/hosts");
            match (hosts.exists(), config.spec.extra_hosts.is_empty()) {
                (true, true) => bind(hosts, "/etc/hosts")?,
                (true, false) => {
                    let mut text =
                        fs::read_to_string(hosts).map_err(Error::file("cannot read", hosts))?;
                    if !text.is_empty() && !text.ends_with('\n') {
                        text.push('\n');
                    }
                    bind(&own("hosts", text + &extra())?, "/etc/hosts")?;
                }
                (false, _) => bind(&own("hosts", own_names() + &extra())?, "/etc/hosts")?,
            }
            if config.spec.dns.is_empty() && Path::new("/etc/resolv.conf").exists() {
                let text = fs::read_to_string("/etc/resolv.conf")
                    .map_err(Error::file("cannot read", "/etc/resolv.conf"))?;
                bind(&own("resolv.conf", text)?, "/etc/resolv.conf")?;
            }
        }
        Net::None { .. } => bind(&own("hosts", own_names() + &extra())?, "/etc/hosts")?,
    }
    if !config.spec.dns.is_empty() {
        let text = config.spec.dns.iter().map(|ip| format!("nameserver {ip}\n")).collect();
        bind(&own("resolv.conf", text)?, "/etc/resolv.conf")?;
    }
    Ok(all)
}
