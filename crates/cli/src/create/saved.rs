//! The options of `create`, merged with an archive's configuration of a container instead of an
//! image's.
//!
//! Values that stay inside and do not confine are taken from the archive: command, environment,
//! labels, host name, tmpfs mounts. Options alone give the container a part of this host:
//! capabilities, files, volumes, the network, more ids. If the old container had such a part and
//! the options do not give it, the error names all missing options at once. The archive is not
//! trusted to be well-formed.

use anyhow::{Result, bail};
use dormouse_container::Create;
use dormouse_kernel::call::Namespace;
use dormouse_kernel::capability::Capability;
use dormouse_kernel::sysctl;
use dormouse_model::{Config, MountKind, NetMode, SeccompChoice, Security};

use super::{CreateArgs, Defaults, Here};
use crate::option::{Invalid, hostname, limit};
use crate::output::printable;

impl CreateArgs {
    /// Merges the options with the container of an archive.
    pub(crate) fn merge_saved(&self, saved: &Config, here: &Here) -> Result<Create> {
        self.refuse_what_is_decided()?;
        let inside = Defaults {
            cmd: saved.spec.process.args.clone(),
            env: saved.spec.process.env.clone(),
            working_dir: saved.spec.process.cwd.clone(),
            user: saved.spec.process.user.0.clone(),
            labels: saved.spec.labels.clone(),
            ..Defaults::default()
        };
        let mut create = self.merge_defaults(saved.spec.root.clone(), &inside, here)?;
        if self.name.is_none() {
            create.name = saved.name.clone();
        }
        create.spec.process.terminal = saved.spec.process.terminal;
        create.spec.process.stdin = saved.spec.process.stdin;
        create.spec.process.umask =
            create.spec.process.umask.or(saved.spec.process.umask.map(|m| m & 0o777));
        create.spec.init = saved.spec.init;
        create.spec.read_only |= saved.spec.read_only;
        create.spec.security.no_new_privileges |= saved.spec.security.no_new_privileges;
        if is_filtered(&create.spec.security) {
            create.spec.security.no_aio |= saved.spec.security.no_aio;
        }
        self.names(&mut create, saved)?;
        if self.stop_signal.is_none() {
            let known = (1..=64).contains(&saved.spec.stop_signal);
            let bad = || {
                Invalid::new("signal of the archive", saved.spec.stop_signal.to_string(), "1 to 64")
            };
            create.spec.stop_signal =
                if known { saved.spec.stop_signal } else { return Err(bad().into()) };
        }
        if self.stop_timeout.is_none() {
            create.spec.stop_timeout_s = saved.spec.stop_timeout_s;
        }
        let mut missing = Vec::new();
        self.network(&mut create, saved, &mut missing);
        for (key, value) in &saved.spec.sysctls {
            let (key, value) = limit::sysctl(&format!("{key}={value}"), create.spec.net.is_own())?;
            // Only the operator may lift a bound on kernel objects, not an archive.
            if sysctl::owner(&key) == Some(Namespace::User)
                && !create.spec.sysctls.contains_key(&key)
            {
                missing.push(format!("--sysctl {key}={value}"));
            }
            create.spec.sysctls.entry(key).or_insert(value);
        }
        mounts(&mut create, saved, &mut missing);
        self.powers(&create, saved, &mut missing)?;
        if missing.is_empty() {
            return Ok(create);
        }
        let missing: Vec<_> = missing.iter().map(|m| printable(m)).collect();
        bail!(
            "the old container had more than these options give; add the missing ones: {}",
            missing.join(", ")
        )
    }

    /// Refuses options that existing processes have decided already.
    fn refuse_what_is_decided(&self) -> Result<()> {
        if self.words.len() > 1 || self.entrypoint.is_some() {
            bail!("the command comes from the archive: give none after its name");
        }
        let decided = [
            (self.rootfs.is_some(), "--rootfs"),
            (self.init, "--init"),
            (self.rm, "--rm"),
            (self.process.tty, "--tty"),
            (self.process.interactive, "--interactive"),
            (self.process.user.is_some(), "--user"),
            (self.process.workdir.is_some(), "--workdir"),
        ];
        match decided.iter().find(|(given, _)| *given) {
            Some((_, option)) => bail!("{option} cannot be given: the archive decides it"),
            None => Ok(()),
        }
    }

    fn names(&self, create: &mut Create, saved: &Config) -> Result<()> {
        if self.hostname.is_none() && saved.spec.hostname != saved.id.short() {
            create.spec.hostname = hostname(&saved.spec.hostname)?;
        }
        create.spec.domainname = saved.spec.domainname.as_deref().map(hostname).transpose()?;
        if self.add_host.is_empty() {
            for (name, address) in &saved.spec.extra_hosts {
                create.spec.extra_hosts.push((hostname(name)?, *address));
            }
        }
        if self.dns.is_empty() {
            create.spec.dns.clone_from(&saved.spec.dns);
        }
        Ok(())
    }

    /// Takes over a private stack; a shared stack is that of the given domain.
    fn network(&self, create: &mut Create, saved: &Config, missing: &mut Vec<String>) {
        match saved.spec.net {
            NetMode::None if self.ip.is_empty() && self.publish.is_empty() => {
                create.spec.net = NetMode::None;
            }
            NetMode::Private { .. } => {
                if let NetMode::Address { domain } = &create.spec.net {
                    create.spec.net = NetMode::Private { domain: domain.clone() };
                }
            }
            NetMode::Host if create.spec.net != NetMode::Host => missing.push("--net host".into()),
            _ => {}
        }
    }

    fn powers(&self, create: &Create, saved: &Config, missing: &mut Vec<String>) -> Result<()> {
        let (had, has) = (&saved.spec.security, &create.spec.security);
        if had.privileged {
            if !has.privileged {
                missing.push("--privileged".into());
            }
        } else if !has.privileged {
            for name in had.capabilities.iter().filter(|name| !has.capabilities.contains(name)) {
                let known =
                    Capability::ALL.iter().any(|c| name.strip_prefix("CAP_") == Some(c.name()));
                if !known {
                    bail!(Invalid::new("capability of the archive", name, "one this kernel has"));
                }
                missing.push(format!("--cap-add {}", name.trim_start_matches("CAP_")));
            }
        }
        let free = had.seccomp == SeccompChoice::Unconfined && !had.privileged;
        if free && has.seccomp != SeccompChoice::Unconfined && self.security_opt.is_empty() {
            missing.push("--security-opt seccomp=unconfined (or =default)".into());
        }
        if saved.ids.wide && !create.wide_ids {
            missing.push("--ids 65536".into());
        }
        Ok(())
    }
}

/// Returns whether the options leave the system calls to the default filter.
fn is_filtered(security: &Security) -> bool {
    security.seccomp == SeccompChoice::Default && !security.privileged
}

/// Takes over tmpfs mounts; mounts of host files must be given as options, or are missing.
fn mounts(create: &mut Create, saved: &Config, missing: &mut Vec<String>) {
    for mount in &saved.spec.mounts {
        if create.spec.mounts.iter().any(|given| given.target == mount.target) {
            continue;
        }
        let target = &mount.target;
        match &mount.kind {
            MountKind::Tmpfs { size_bytes, mode } => {
                let mut mount = mount.clone();
                mount.kind = MountKind::Tmpfs { size_bytes: *size_bytes, mode: mode & 0o7777 };
                create.spec.mounts.push(mount);
            }
            MountKind::Devpts => create.spec.mounts.push(mount.clone()),
            MountKind::Bind { source, .. } => {
                missing.push(format!("--volume {}:{target}", source.display()));
            }
            MountKind::Volume { name, .. } => missing.push(format!("--volume {name}:{target}")),
        }
    }
    create.spec.mounts.sort_by_key(|m| m.target.matches('/').count());
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use clap::{Args, Command, FromArgMatches};

    use super::*;

    fn saved() -> Config {
        let config = serde_json::json!({
            "version": 1, "id": "0123456789abcdef0123456789abcdef", "name": "web",
            "created_unix_s": 0, "root": { "image": { "reference": "web", "id": "0" } },
            "ids": { "base": 1 << 20, "wide": false },
            "process": { "args": ["/bin/server", "-x"], "env": ["KEY=value"], "cwd": "/srv",
                "user": "www", "umask": null },
            "security": { "capabilities": ["CAP_CHOWN"], "no_new_privileges": false,
                "seccomp": "default", "privileged": false, "rlimits": [], "oom_score_adj": null },
            "hostname": "web.example.org", "net": { "address": { "domain": "other" } },
            "mounts": [{ "target": "/scratch",
                "kind": { "tmpfs": { "size_bytes": 4096, "mode": 511 } } }],
            "publish": [{ "host_ip": null, "host_port": 80, "container_port": 80,
                "protocol": "tcp" }],
            "limits": { "memory_max_bytes": 1 << 20 }, "stop_signal": 3, "stop_timeout_s": 7,
        });
        serde_json::from_value(config).unwrap()
    }

    fn merge(args: &[&str], change: impl FnOnce(&mut Config)) -> Result<Create> {
        let command = CreateArgs::augment_args(Command::new("import"));
        let words = ["import"].into_iter().chain(args.iter().copied());
        let args = CreateArgs::from_arg_matches(&command.try_get_matches_from(words)?)?;
        let host = || Vec::new();
        let here = Here {
            cwd: Path::new("/"),
            env: &host,
            env_files: Vec::new(),
            default_volume: &|| Ok(String::new()),
            log_driver: &|| Ok(dormouse_model::LogDriver::File),
            pids: &|| Ok(Some(2048)),
        };
        let mut saved = saved();
        change(&mut saved);
        args.merge_saved(&saved, &here)
    }

    #[test]
    fn archive_gives_values_that_stay_inside() {
        let made = merge(&["a"], |_| {}).unwrap();
        assert_eq!(made.spec.process.args, ["/bin/server", "-x"]);
        assert_eq!((made.name.as_str(), made.spec.process.user.0.as_str()), ("web", "www"));
        assert!(made.spec.process.env.contains(&"KEY=value".to_owned()));
        assert_eq!(made.spec.hostname, "web.example.org");
        assert_eq!(made.spec.mounts[0].target, "/scratch");
        assert_eq!((made.spec.stop_signal, made.spec.stop_timeout_s), (3, 7));
        assert_eq!(made.spec.net, NetMode::Address { domain: "default".parse().unwrap() });
        assert!(made.spec.publish.is_empty(), "ports of the host are not the archive's to give");
        let tasks = Some(dormouse_model::TASKS_DEFAULT);
        let limits = dormouse_model::Limits { pids_max: tasks, ..Default::default() };
        assert_eq!(made.spec.limits, limits);
        let named =
            merge(&["--name", "b", "--domain", "d", "--memory", "1g", "a"], |_| {}).unwrap();
        assert_eq!(named.name.as_str(), "b");
        assert_eq!(named.spec.limits.memory_max_bytes, Some(1 << 30));
        assert_eq!(merge(&["a"], |c| c.spec.net = NetMode::None).unwrap().spec.net, NetMode::None);
        let charged = |args: &[&str]| {
            let theirs = |c: &mut Config| c.spec.account = Some("theirs".parse().unwrap());
            merge(args, theirs).unwrap().spec.account.map(|name| name.to_string())
        };
        assert_eq!(charged(&["a"]), None, "an archive charges no account of this host");
        assert_eq!(charged(&["--account", "ours", "a"]).as_deref(), Some("ours"));
        let is_shared = |args: &[&str]| merge(args, |c| c.spec.shared = true).unwrap().spec.shared;
        assert!(!is_shared(&["a"]), "an archive charges no clients of this host");
        assert!(is_shared(&["--shared", "a"]));
    }

    #[test]
    fn settings_of_a_stack_of_its_own_come_back_with_the_mode() {
        let forward = |c: &mut Config| {
            c.spec.net = NetMode::Private { domain: "default".parse().unwrap() };
            c.spec.sysctls.insert("net.ipv4.conf.eth0.forwarding".into(), "1".into());
        };
        let made = merge(&["a"], forward).unwrap();
        assert!(matches!(made.spec.net, NetMode::Private { .. }));
        assert_eq!(made.spec.sysctls["net.ipv4.conf.eth0.forwarding"], "1");
        let shared = |c: &mut Config| {
            drop(c.spec.sysctls.insert("net.ipv4.conf.all.forwarding".into(), "1".into()));
        };
        assert!(merge(&["a"], shared).is_err());
    }

    #[test]
    fn host_resources_need_options_or_are_named_as_missing() {
        let bind = |c: &mut Config| {
            c.spec.mounts[0].kind = MountKind::Bind {
                source: "/etc".into(),
                recursive: true,
                idmap: false,
                propagation: Default::default(),
            };
        };
        type Case = (fn(&mut Config), &'static str, &'static [&'static str]);
        let cases: [Case; 6] = [
            (|c| c.spec.security.privileged = true, "--privileged", &["--privileged"]),
            (
                |c| c.spec.security.capabilities.push("CAP_SYS_ADMIN".into()),
                "--cap-add SYS_ADMIN",
                &["--cap-add", "SYS_ADMIN"],
            ),
            (
                |c| c.spec.security.seccomp = SeccompChoice::Unconfined,
                "seccomp=unconfined",
                &["--security-opt", "seccomp=unconfined"],
            ),
            (|c| c.spec.net = NetMode::Host, "--net host", &["--net", "host"]),
            (|c| c.ids.wide = true, "--ids 65536", &["--ids", "65536"]),
            (
                |c| {
                    c.spec.mounts[0].kind =
                        MountKind::Volume { name: "data".parse().unwrap(), no_copy: false }
                },
                "--volume data:/scratch",
                &["--volume", "data:/scratch"],
            ),
        ];
        for (change, text, options) in cases {
            let said = merge(&["a"], change).unwrap_err().to_string();
            assert!(said.contains(text), "{text}: {said}");
            merge(&[options, &["a"]].concat(), change).unwrap();
        }
        let said = merge(&["a"], bind).unwrap_err().to_string();
        assert!(said.contains("--volume /etc:/scratch"), "{said}");
        let own = merge(&["--tmpfs", "/scratch:size=1m", "a"], bind).unwrap();
        assert!(matches!(own.spec.mounts[0].kind, MountKind::Tmpfs { size_bytes: Some(_), .. }));
    }

    #[test]
    fn invalid_archive_values_and_decided_options_are_refused() {
        let cases: [fn(&mut Config); 5] = [
            |c| c.spec.hostname = "a b".into(),
            |c| c.spec.stop_signal = 900,
            |c| c.spec.security.capabilities = vec!["CAP_\u{1b}".into()],
            |c| drop(c.spec.sysctls.insert("kernel.core_pattern".into(), "|/x".into())),
            |c| c.spec.process.args.clear(),
        ];
        for (n, change) in cases.into_iter().enumerate() {
            assert!(merge(&["a"], change).is_err(), "case {n}");
        }
        for decided in [&["--rm", "a"][..], &["-t", "a"], &["a", "sh"], &["--user", "x", "a"]] {
            assert!(merge(decided, |_| {}).is_err(), "{decided:?}");
        }
    }
}
