//! The options of `run` and `create`, merged with the configuration of an image into the request to
//! the engine.
//!
//! The rules are podman's. Command: `--entrypoint` replaces the image's entrypoint and then the
//! image's command is not used; otherwise the entrypoint stays in front and a given command
//! replaces the image's. Environment, each over the ones before: `PATH`, `TERM` and `container`,
//! the image's, `--env-file`, `-e`; the engine, which can read the container's users, adds `HOME`
//! and `HOSTNAME`. Labels and volumes of the image are kept unless the same key or path is given.
//!
//! [`CreateArgs::merge`] does no I/O: it receives the caller's surroundings in [`Here`].

mod saved;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::ArgAction;
use dormouse_container::Create;
use dormouse_image::Image;
use dormouse_kernel::capability::{self, Capability};
use dormouse_model::{
    Limits, LogDriver, Mount, MountKind, Name, NetMode, Process, Publish, Restart, RootSource,
    Security, Spec, User, Views, parse_bytes,
};

use crate::option::env::{Environment, Host};
use crate::option::keys::DetachKeys;
use crate::option::limit::{self, LimitArgs};
use crate::option::mount::{self, Asked};
use crate::option::process::ProcessArgs;
use crate::option::sleep::SleepArgs;
use crate::option::stop::stop_timeout;
use crate::option::{Invalid, extra_host, hostname, label, security, signal};
use crate::{fail, name};

/// Options of `run` and `create`.
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct CreateArgs {
    /// Name of the container
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Remove it when it stops
    #[arg(long)]
    pub(crate) rm: bool,
    #[command(flatten)]
    pub(crate) process: ProcessArgs,
    /// Program in front of the command; "" for none, ["a","b"] with arguments
    #[arg(long, value_name = "COMMAND")]
    entrypoint: Option<String>,
    /// Add a label
    #[arg(long, short, value_name = "KEY=VALUE")]
    label: Vec<String>,
    /// Host name inside
    #[arg(long, short = 'h', value_name = "NAME")]
    hostname: Option<String>,
    /// Run a tiny init that reaps and forwards signals
    #[arg(long)]
    init: bool,
    /// Mount a devpts, so that programs such as sshd, tmux and script can open terminals
    ///
    /// 'no' saves memory of the kernel where thousands of containers run. A container with -t, --init or a
    /// systemd has one in any case.
    #[arg(long, value_name = "yes|no", default_value = "yes", value_parser = ["yes", "no"])]
    devpts: String,
    /// Show its own memory and CPUs in /proc and /sys: auto (what is limited), yes, no (the host's)
    ///
    /// A process in a user namespace inside cannot mount a procfs beside these views: containers in a container need
    /// 'no'.
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    views: Views,
    /// Choose this number of CPUs for it, and no other
    #[arg(long, value_name = "NUMBER", conflicts_with = "cpuset_cpus")]
    nproc: Option<u32>,
    /// Treat the command as a systemd: true (if it looks like one), always, false
    #[arg(long, value_name = "MODE", default_value = "true", value_parser = ["true", "always", "false"])]
    systemd: String,
    /// Start it again when it ends: no, always, unless-stopped, on-failure[:TIMES]
    #[arg(long, value_name = "POLICY")]
    restart: Option<String>,
    #[command(flatten)]
    sleep: SleepArgs,
    /// Signal that stops it
    #[arg(long, value_name = "SIGNAL")]
    stop_signal: Option<String>,
    /// Seconds until a stop becomes a kill, -1 for never
    #[arg(long, value_name = "SECONDS", allow_hyphen_values = true)]
    stop_timeout: Option<String>,
    /// Bytes kept of its output (default 16m)
    #[arg(long, value_name = "SIZE")]
    log_max_size: Option<String>,
    /// Where its output goes: k8s-file (with times), file (plain, no reader), none
    #[arg(long, value_name = "DRIVER")]
    log_driver: Option<LogDriver>,
    /// The account that its use is charged to, made by `dormouse account create`; by default its own, with --rm
    /// root
    #[arg(long, value_name = "ACCOUNT")]
    account: Option<Name>,
    /// Serve other containers: its work for a client is charged to the client's account
    ///
    /// As a rule: whenever it receives from a container, it works for that container's account. Rules of 'dormouse
    /// rules' rank before it. While gates are loaded, 'dormouse daemon' admits its TCP connections in turn: next is the
    /// account with the least service by its weight.
    #[arg(long)]
    shared: bool,
    /// Write its id to a file, which must not exist
    #[arg(long, value_name = "FILE")]
    pub(crate) cidfile: Option<PathBuf>,

    /// Use a directory of the host as a read-only root; there is no IMAGE then
    #[arg(long, value_name = "DIR", help_heading = "Files")]
    rootfs: Option<PathBuf>,
    /// Pull the image: missing, always, never
    #[arg(long, value_name = "WHEN", default_value = "missing", help_heading = "Files", value_parser = ["missing", "always", "newer", "never"])]
    pub(crate) pull: String,
    /// Show no progress
    #[arg(long, short, help_heading = "Files")]
    pub(crate) quiet: bool,
    /// Mount a directory, file or volume (options: ro, noexec, noidmap, nocopy, rslave, ...)
    ///
    /// Root inside is the host's root in a directory of the host. A set-user-id file created there
    /// belongs to the host's root. If other users of the host can enter the directory, use
    /// SOURCE:TARGET:noidmap. Files are then created with the container's own ids, and root inside
    /// has no rights over other files. 'default-volume = "noidmap"' under [run] in config.toml makes
    /// noidmap the default.
    ///
    /// The first use of a volume copies the files, owner and mode of the image's directory at TARGET into
    /// it; nocopy leaves it empty.
    #[arg(long, short, value_name = "[SOURCE:]TARGET[:OPTIONS]", help_heading = "Files")]
    pub(crate) volume: Vec<String>,
    /// Mount, spelled out
    #[arg(long, value_name = "type=TYPE,...", help_heading = "Files")]
    mount: Vec<String>,
    /// Mount memory (options: size=, mode=, exec, ro)
    #[arg(long, value_name = "TARGET[:OPTIONS]", help_heading = "Files")]
    tmpfs: Vec<String>,
    /// Size of /dev/shm, the same as --tmpfs /dev/shm:size=SIZE
    #[arg(long, value_name = "SIZE", help_heading = "Files", value_parser = mount::shm)]
    shm_size: Option<Mount>,
    /// Make the root read-only
    #[arg(long, help_heading = "Files")]
    pub(crate) read_only: bool,

    /// Network: address (own addresses in a shared stack), private (a stack and a device of its own),
    /// host, none
    #[arg(
        long,
        alias = "network",
        value_name = "MODE",
        default_value = "address",
        help_heading = "Network"
    )]
    net: String,
    /// Trust domain: containers of one domain share the stack
    #[arg(long, value_name = "NAME", default_value = "default", help_heading = "Network")]
    domain: String,
    /// Address to have, IPv4 or IPv6
    #[arg(long, alias = "ip6", value_name = "ADDRESS", help_heading = "Network")]
    ip: Vec<IpAddr>,
    /// Publish a port: connections to a port of the host go to it
    #[arg(long, short, value_name = "[[IP:]HOST:]PORT[/udp]", help_heading = "Network")]
    publish: Vec<String>,
    /// Name server instead of the host's
    #[arg(long, value_name = "ADDRESS", help_heading = "Network")]
    dns: Vec<IpAddr>,
    /// Line for its /etc/hosts
    #[arg(long, value_name = "NAME:ADDRESS", help_heading = "Network")]
    add_host: Vec<String>,

    /// Print help
    #[arg(long, action = ArgAction::HelpLong)]
    help: Option<bool>,
    /// Image, then the command instead of the image's
    #[arg(trailing_var_arg = true, value_name = "IMAGE [COMMAND]")]
    pub(crate) words: Vec<String>,

    #[command(flatten)]
    limits: LimitArgs,
    /// Resource limit of its processes
    #[arg(long, value_name = "NAME=SOFT[:HARD]", help_heading = "Limits")]
    ulimit: Vec<String>,
    /// Preference of the OOM killer, -1000 to 1000
    #[arg(long, value_name = "NUMBER", allow_hyphen_values = true, help_heading = "Limits")]
    oom_score_adj: Option<String>,

    /// Add a capability, ALL for all
    #[arg(long, value_name = "CAPABILITY", help_heading = "Security")]
    cap_add: Vec<String>,
    /// Drop a capability, ALL for all
    #[arg(long, value_name = "CAPABILITY", help_heading = "Security")]
    cap_drop: Vec<String>,
    /// seccomp=unconfined, no-new-privileges
    #[arg(long, value_name = "OPTION", help_heading = "Security")]
    security_opt: Vec<String>,
    /// Refuse asynchronous I/O (io_setup, ENOSYS), of which the host has one number for all (fs.aio-max-nr)
    ///
    /// Databases that use it fall back to threads, or need an option for that (innodb_use_native_aio=0). io_uring is
    /// refused in any case.
    #[arg(long, help_heading = "Security")]
    no_aio: bool,
    /// All capabilities of its own namespace, no seccomp filter, nothing masked
    #[arg(long, help_heading = "Security")]
    privileged: bool,
    /// Host ids it gets: 32768 or 65536 (for systemd)
    #[arg(long, value_name = "COUNT", help_heading = "Security", value_parser = ["32768", "65536"])]
    ids: Option<String>,
    /// Set a sysctl of its own namespaces
    #[arg(long, value_name = "NAME=VALUE", help_heading = "Security")]
    sysctl: Vec<String>,
    /// Permissions taken from new files, octal
    #[arg(long, value_name = "MASK", help_heading = "Security")]
    umask: Option<String>,
}

/// Detaching from a terminal, and forwarding of signals.
#[derive(Debug, clap::Args)]
pub(crate) struct AttachArgs {
    /// Keys that leave the terminal, "" for none
    #[arg(long, value_name = "KEYS", default_value = "ctrl-p,ctrl-q", allow_hyphen_values = true)]
    pub(crate) detach_keys: DetachKeys,
    /// Pass signals on to it
    #[arg(long, value_name = "BOOL", default_value = "true", default_missing_value = "true", num_args = 0..=1, require_equals = true, action = ArgAction::Set)]
    pub(crate) sig_proxy: bool,
}

impl AttachArgs {
    /// The arguments without any option, with the defaults of clap's attributes.
    pub(crate) fn plain() -> Self {
        Self { detach_keys: DetachKeys::default(), sig_proxy: true }
    }
}

/// Defaults of an image's configuration for its containers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Defaults {
    pub(crate) entrypoint: Vec<String>,
    pub(crate) cmd: Vec<String>,
    pub(crate) env: Vec<String>,
    pub(crate) working_dir: String,
    pub(crate) user: String,
    pub(crate) stop_signal: Option<String>,
    pub(crate) volumes: Vec<String>,
    pub(crate) labels: BTreeMap<String, String>,
}

impl Defaults {
    /// Reads the defaults of an image.
    pub(crate) fn of(image: &Image) -> Self {
        let Some(c) = image.config.config() else { return Self::default() };
        Self {
            entrypoint: c.entrypoint().clone().unwrap_or_default(),
            cmd: c.cmd().clone().unwrap_or_default(),
            env: c.env().clone().unwrap_or_default(),
            working_dir: c.working_dir().clone().unwrap_or_default(),
            user: c.user().clone().unwrap_or_default(),
            stop_signal: c.stop_signal().clone().filter(|s| !s.is_empty()),
            volumes: c.volumes().clone().unwrap_or_default(),
            labels: c.labels().clone().unwrap_or_default().into_iter().collect(),
        }
    }
}

/// The caller's surroundings.
pub(crate) struct Here<'a> {
    /// The working directory.
    pub(crate) cwd: &'a Path,
    /// The environment.
    pub(crate) env: Host<'a>,
    /// The texts of the `--env-file`s.
    pub(crate) env_files: Vec<String>,
    /// Returns the options before those of every mount of a host directory.
    pub(crate) default_volume: &'a dyn Fn() -> Result<String>,
    /// Returns the log driver of containers without an option for it.
    pub(crate) log_driver: &'a dyn Fn() -> Result<LogDriver>,
    /// Returns the most tasks of containers without an option for it.
    pub(crate) pids: &'a dyn Fn() -> Result<Option<u32>>,
}

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// SIGRTMIN+3, which makes a systemd halt.
const SIGRTMIN_3: i32 = 37;

impl CreateArgs {
    /// The arguments without any option and word, with the defaults of clap's attributes.
    pub(crate) fn plain() -> Self {
        Self {
            name: None,
            rm: false,
            process: ProcessArgs::default(),
            entrypoint: None,
            label: Vec::new(),
            hostname: None,
            init: false,
            devpts: "yes".to_owned(),
            systemd: "true".to_owned(),
            restart: None,
            sleep: SleepArgs::default(),
            stop_signal: None,
            stop_timeout: None,
            log_max_size: None,
            log_driver: None,
            account: None,
            shared: false,
            cidfile: None,
            rootfs: None,
            pull: "missing".to_owned(),
            quiet: false,
            volume: Vec::new(),
            mount: Vec::new(),
            tmpfs: Vec::new(),
            shm_size: None,
            read_only: false,
            net: "address".to_owned(),
            domain: "default".to_owned(),
            ip: Vec::new(),
            publish: Vec::new(),
            dns: Vec::new(),
            add_host: Vec::new(),
            help: None,
            words: Vec::new(),
            limits: LimitArgs::default(),
            views: Views::default(),
            nproc: None,
            ulimit: Vec::new(),
            oom_score_adj: None,
            cap_add: Vec::new(),
            cap_drop: Vec::new(),
            security_opt: Vec::new(),
            no_aio: false,
            privileged: false,
            ids: None,
            sysctl: Vec::new(),
            umask: None,
        }
    }

    /// The image's name as given; `None` with `--rootfs`.
    pub(crate) fn image(&self) -> Result<Option<&str>> {
        match (&self.rootfs, self.words.first()) {
            (Some(_), _) => Ok(None),
            (None, Some(image)) => Ok(Some(image)),
            (None, None) => bail!("no image was given: name one or use --rootfs DIR"),
        }
    }

    /// Merges the options with the image.
    pub(crate) fn merge(&self, image: Option<Image>, here: &Here) -> Result<Create> {
        let defaults = image.as_ref().map(Defaults::of).unwrap_or_default();
        let root = match (&self.rootfs, &image) {
            (Some(dir), _) => RootSource::Directory(here.cwd.join(dir)),
            (None, Some(image)) => {
                RootSource::Image { reference: self.reference(image)?, id: image.id.clone() }
            }
            (None, None) => bail!("no image was given"),
        };
        Ok(Create { image, ..self.merge_defaults(root, &defaults, here)? })
    }

    /// Returns the recorded name of an image: as given, or one of its names if it was given by id.
    fn reference(&self, image: &Image) -> Result<dormouse_model::Reference> {
        let given = self.image()?.unwrap_or_default();
        match given.parse() {
            Ok(r) if image.names.contains(&r) => Ok(r),
            parsed => match image.names.first() {
                Some(name) => Ok(name.clone()),
                None => parsed.or_else(|_| image.id[..12].parse()).map_err(Into::into),
            },
        }
    }

    fn merge_defaults(&self, root: RootSource, image: &Defaults, here: &Here) -> Result<Create> {
        let (args, entrypoint) = self.command(image)?;
        let systemd = self.is_systemd(&args);
        let net = self.net_mode()?;
        let restart = self.restart.as_deref().map_or(Ok(Restart::No), str::parse)?;
        if self.rm && restart != Restart::No {
            bail!("--rm and --restart exclude each other: a removed container cannot start again");
        }
        let (mounts, anonymous_volumes) = self.mounts(image, here)?;
        let text = |o: &Option<String>, d: &str| o.clone().unwrap_or_else(|| d.to_owned());
        let cwd = match text(&self.process.workdir, &image.working_dir) {
            cwd if cwd.is_empty() => "/".to_owned(),
            cwd => cwd,
        };
        if !cwd.starts_with('/') || cwd.contains('\0') {
            return Err(Invalid::new("working directory", cwd, "an absolute path").into());
        }
        let stop_signal = match (&self.stop_signal, &image.stop_signal) {
            (Some(s), _) => signal::signal(s)?,
            (None, _) if systemd => SIGRTMIN_3,
            (None, Some(s)) => signal::signal(s).context("the image's stop signal")?,
            (None, None) => crate::signal::SIGTERM,
        };
        let mut labels = image.labels.clone();
        for text in &self.label {
            let (key, value) = label(text)?;
            labels.insert(key, value);
        }
        let own_network = net.is_own();
        let sysctl = |text: &String| limit::sysctl(text, own_network);
        let sysctls = self.sysctl.iter().map(sysctl).collect::<Result<_, _>>()?;
        let name = match &self.name {
            Some(name) => name.parse()?,
            None => name::generate(0)?,
        };
        let spec = Spec {
            root,
            process: Process {
                args,
                entrypoint,
                env: self.environment(image, here)?,
                cwd,
                user: User(text(&self.process.user, &image.user)),
                umask: self.umask.as_deref().map(limit::umask).transpose()?,
                terminal: self.process.tty,
                stdin: self.process.interactive,
            },
            security: self.security(systemd)?,
            hostname: self.hostname.as_deref().map_or(Ok(String::new()), hostname)?,
            domainname: None,
            mounts,
            anonymous_volumes,
            net,
            publish: self.publish.iter().map(|p| p.parse::<Publish>()).collect::<Result<_, _>>()?,
            extra_hosts: self.add_host.iter().map(|h| extra_host(h)).collect::<Result<_, _>>()?,
            dns: self.dns.clone(),
            limits: self.limits(here)?,
            restart,
            sleep: self.sleep.read()?.unwrap_or_default(),
            drowsy: self.sleep.read_drowsy()?.unwrap_or_default(),
            wake_on: self.sleep.read_wake_on()?.unwrap_or_default(),
            oom: self.sleep.read_oom().unwrap_or_default(),
            evict: self.sleep.read_evict().unwrap_or_default(),
            auto_remove: self.rm,
            read_only: self.read_only,
            init: self.init,
            devpts: self.devpts == "yes",
            systemd,
            stop_signal,
            stop_timeout_s: self.stop_timeout.as_deref().map_or(Ok(10), stop_timeout)?,
            labels,
            sysctls,
            log_max_bytes: self.log_max_size.as_deref().map_or(Ok(16 << 20), parse_bytes)?,
            log_driver: self.log_driver.map_or_else(here.log_driver, Ok)?,
            account: self.account.clone(),
            shared: self.shared,
            views: self.views,
            nproc: self.nproc,
        };
        let wide_ids = self.ids.as_deref().map_or(systemd, |ids| ids == "65536");
        Ok(Create { name, image: None, spec, addresses: self.ip.clone(), wide_ids })
    }

    /// The limits, with the operator's default of tasks.
    fn limits(&self, here: &Here) -> Result<Limits> {
        let mut limits = self.limits.read_new()?;
        if limits.pids_max.is_none() {
            limits.pids_max = (here.pids)()?;
        }
        Ok(limits)
    }

    /// Entrypoint and command, and the length of the entrypoint.
    fn command(&self, image: &Defaults) -> Result<(Vec<String>, usize)> {
        let given = match self.rootfs {
            Some(_) => &self.words[..],
            None => self.words.get(1..).unwrap_or_default(),
        };
        let entrypoint = match self.entrypoint.as_deref() {
            None => image.entrypoint.clone(),
            Some("") => Vec::new(),
            Some(text) if text.starts_with('[') => serde_json::from_str(text)
                .map_err(|_| Invalid::new("entrypoint", text, "a JSON array of strings"))?,
            Some(text) => vec![text.to_owned()],
        };
        let default: &[String] = if self.entrypoint.is_some() { &[] } else { &image.cmd };
        let rest = if given.is_empty() { default } else { given };
        let args: Vec<String> = entrypoint.iter().chain(rest).cloned().collect();
        if args.first().is_none_or(String::is_empty) {
            bail!("there is no command to run: the image names none, give one after it");
        }
        Ok((args, entrypoint.len()))
    }

    fn is_systemd(&self, args: &[String]) -> bool {
        let program = args.first().map_or("", String::as_str);
        let looks = matches!(program, "/sbin/init" | "/usr/sbin/init" | "/usr/local/sbin/init")
            || program.rsplit('/').next() == Some("systemd");
        match self.systemd.as_str() {
            "always" => true,
            "false" => false,
            _ => looks && !self.init,
        }
    }

    fn environment(&self, image: &Defaults, here: &Here) -> Result<Vec<String>> {
        let mut env = Environment::default();
        for (name, value) in [("PATH", PATH), ("TERM", "xterm"), ("container", "dormouse")] {
            env.set(name, value);
        }
        for entry in &image.env {
            // As in the image: a name without a value takes nothing from the host.
            let (name, value) = crate::option::key_value(entry);
            if !name.is_empty() && !entry.contains('\0') {
                env.set(name, value);
            }
        }
        self.process.set(&mut env, &here.env_files, here.env)?;
        Ok(env.into_entries())
    }

    fn net_mode(&self) -> Result<NetMode> {
        let net = match self.net.as_str() {
            "address" => NetMode::Address { domain: self.domain.parse::<Name>()? },
            "host" => NetMode::Host,
            "none" => NetMode::None,
            "private" => NetMode::Private { domain: self.domain.parse::<Name>()? },
            other => {
                return Err(Invalid::new("network", other, "address, private, host or none").into());
            }
        };
        if net.domain().is_none() {
            for (given, option) in
                [(!self.publish.is_empty(), "--publish"), (!self.ip.is_empty(), "--ip")]
            {
                if given {
                    bail!("{option} needs --net address or --net private, not {}", self.net);
                }
            }
        }
        Ok(net)
    }

    fn mounts(
        &self,
        image: &Defaults,
        here: &Here,
    ) -> Result<(Vec<dormouse_model::Mount>, Vec<Name>)> {
        let mut asked = Vec::new();
        let defaults = match self.volume.is_empty() && self.mount.is_empty() {
            true => String::new(),
            false => (here.default_volume)()?,
        };
        for text in &self.volume {
            asked.push(mount::volume(text, here.cwd, &defaults)?);
        }
        for text in &self.mount {
            asked.push(mount::mount(text, here.cwd, &defaults)?);
        }
        for text in &self.tmpfs {
            asked.push(Asked::Mount(mount::tmpfs(text)?));
        }
        asked.extend(self.shm_size.clone().map(Asked::Mount));
        let target = |a: &Asked| match a {
            Asked::Mount(m) | Asked::Anonymous(m) => m.target.clone(),
        };
        let targets: Vec<String> = asked.iter().map(target).collect();
        for (i, t) in targets.iter().enumerate() {
            if targets[..i].contains(t) {
                bail!("two mounts were given for '{t}'");
            }
        }
        for path in &image.volumes {
            let volume = mount::image_volume(path).context("a volume of the image")?;
            if !targets.contains(&target(&volume)) {
                asked.push(volume);
            }
        }
        let (mut mounts, mut anonymous) = (Vec::new(), Vec::new());
        for a in asked {
            match a {
                Asked::Mount(m) => mounts.push(m),
                Asked::Anonymous(mut m) => {
                    let name = name::volume()?;
                    anonymous.push(name.clone());
                    let MountKind::Volume { name: place, .. } = &mut m.kind else { continue };
                    *place = name;
                    mounts.push(m);
                }
            }
        }
        // A mount hides everything below it, so outer ones come first, in any order given.
        mounts.sort_by_key(|m| m.target.matches('/').count());
        Ok((mounts, anonymous))
    }

    fn security(&self, systemd: bool) -> Result<Security> {
        let options = security::security_options(&self.security_opt)?;
        let name = |c: &Capability| format!("CAP_{}", c.name());
        let all: Vec<String> = Capability::ALL.iter().map(name).collect();
        let mut default: Vec<String> = capability::default_set().iter().map(|c| name(&c)).collect();
        if systemd {
            // systemd puts its units into private namespaces. With ProtectProc=invisible a unit's
            // /proc shows only processes that the reader may trace. systemd writes the id maps of
            // PrivateUsers= from a child, and no longer finds its own process there once a change
            // of the group has made that undumpable. Both capabilities are valid in the container's
            // own user namespace, which does not contain the host's.
            default.extend([Capability::SysAdmin, Capability::SysPtrace].iter().map(name));
        }
        let capabilities = security::capabilities(&default, &all, &self.cap_add, &self.cap_drop)?;
        let oom_score_adj = match self.oom_score_adj.as_deref() {
            None => None,
            Some(t) => {
                let adj = t.parse().ok().filter(|n| (-1000..=1000).contains(n));
                Some(adj.ok_or_else(|| Invalid::new("OOM score", t, "-1000 to 1000"))?)
            }
        };
        Ok(Security {
            capabilities,
            no_new_privileges: options.no_new_privileges,
            seccomp: options.seccomp,
            no_aio: self.no_aio,
            privileged: self.privileged,
            rlimits: self.ulimit.iter().map(|u| limit::ulimit(u)).collect::<Result<_, _>>()?,
            oom_score_adj,
        })
    }
}

/// Creates with `make`; an unnamed container gets another name as long as its name is taken.
pub(crate) fn with_name<T>(
    args: &CreateArgs,
    mut merge: impl FnMut() -> Result<Create>,
    mut make: impl FnMut(Create) -> dormouse_container::Result<T>,
) -> Result<T> {
    for attempt in 0.. {
        let mut create = merge()?;
        if args.name.is_none() {
            create.name = name::generate(attempt)?;
        }
        match make(create) {
            Err(dormouse_container::Error::NameTaken { .. })
                if args.name.is_none() && attempt < 8 => {}
            other => return Ok(other?),
        }
    }
    Err(fail::quiet(fail::FAILED)) // the loop has no end but its returns
}

#[cfg(test)]
mod tests {
    use clap::{Command, FromArgMatches};
    use proptest::strategy::Strategy as _;

    use super::*;

    fn parse(args: &[&str]) -> Result<CreateArgs, clap::Error> {
        let command = <CreateArgs as clap::Args>::augment_args(Command::new("run"));
        let args = std::iter::once("run").chain(args.iter().copied());
        CreateArgs::from_arg_matches(&command.try_get_matches_from(args)?)
    }

    fn image() -> Defaults {
        let own = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
        Defaults {
            entrypoint: own(&["/entry"]),
            cmd: own(&["a", "b"]),
            env: own(&["PATH=/image/bin", "LANG=C", "BARE"]),
            working_dir: "/srv".into(),
            user: "www".into(),
            stop_signal: Some("SIGQUIT".into()),
            volumes: own(&["/data"]),
            labels: BTreeMap::from([("k".into(), "image".into()), ("l".into(), "image".into())]),
        }
    }

    fn merge_with(args: &[&str], image: &Defaults) -> Result<Create> {
        let host = || vec![("HOSTVAR".to_owned(), "1".to_owned())];
        let env_files = vec!["FILE=1\nLANG=file".to_owned()];
        let here = Here {
            cwd: Path::new("/cwd"),
            env: &host,
            env_files,
            default_volume: &|| Ok(String::new()),
            log_driver: &|| Ok(LogDriver::K8sFile),
            pids: &|| Ok(Some(2048)),
        };
        parse(args)?.merge_defaults(RootSource::Directory("/r".into()), image, &here)
    }

    fn merge(args: &[&str]) -> Create {
        merge_with(args, &image()).unwrap()
    }

    #[test]
    fn entrypoint_and_command_are_joined_as_in_podman() {
        for (args, joined) in [
            (&["img"][..], "/entry a b"),
            (&["img", "x", "--rm", "-it"], "/entry x --rm -it"),
            (&["--entrypoint", "/e", "img"], "/e"),
            (&["--entrypoint", "/e", "img", "x"], "/e x"),
            (&["--entrypoint", "", "img", "x"], "x"),
            (&["--entrypoint", r#"["/e","-v"]"#, "img", "x"], "/e -v x"),
            (&["--rootfs", "/r", "x", "y"], "/entry x y"),
        ] {
            assert_eq!(merge(args).spec.process.args.join(" "), joined, "{args:?}");
        }
        for args in [&["--entrypoint", "", "img"][..], &["--entrypoint", "[1]", "img"]] {
            assert!(merge_with(args, &image()).is_err(), "{args:?}");
        }
        assert!(merge_with(&["img"], &Defaults::default()).is_err());
    }

    #[test]
    fn option_overrides_image_default() {
        let c = merge(&["img"]);
        assert_eq!((c.spec.process.cwd.as_str(), c.spec.process.user.0.as_str()), ("/srv", "www"));
        assert_eq!((c.spec.stop_signal, c.spec.stop_timeout_s, c.wide_ids), (3, 10, false));
        assert_eq!(
            c.spec.process.env,
            ["PATH=/image/bin", "TERM=xterm", "container=dormouse", "LANG=file", "BARE=", "FILE=1"]
        );
        assert_eq!((c.spec.mounts.len(), c.spec.anonymous_volumes.len()), (1, 1));
        let c = merge(&[
            "-w",
            "/w",
            "-u",
            "0:0",
            "--stop-signal",
            "9",
            "--stop-timeout",
            "-1",
            "-e",
            "LANG=x",
            "-e",
            "HOSTVAR",
            "-l",
            "k=mine",
            "-v",
            "/h:/data",
            "--net",
            "none",
            "--sysctl",
            "net.ipv4.ip_forward=1",
            "-h",
            "box",
            "img",
        ]);
        assert_eq!((c.spec.process.cwd.as_str(), c.spec.process.user.0.as_str()), ("/w", "0:0"));
        assert_eq!((c.spec.stop_signal, c.spec.stop_timeout_s), (9, u32::MAX));
        assert!(c.spec.process.env.contains(&"LANG=x".to_owned()));
        assert!(c.spec.process.env.contains(&"HOSTVAR=1".to_owned()));
        assert_eq!((c.spec.labels["k"].as_str(), c.spec.labels["l"].as_str()), ("mine", "image"));
        assert_eq!((c.spec.mounts.len(), c.spec.anonymous_volumes.len()), (1, 0));
        assert_eq!((c.spec.hostname.as_str(), c.spec.sysctls.len()), ("box", 1));
    }

    #[test]
    fn systemd_is_detected_by_program_name() {
        for (args, systemd) in [
            (&["--entrypoint", "/sbin/init", "img"][..], true),
            (&["--entrypoint", "/lib/systemd/systemd", "img"], true),
            (&["--entrypoint", "/sbin/init", "--systemd", "false", "img"], false),
            (&["--systemd", "always", "img"], true),
            (&["img"], false),
        ] {
            let c = merge(args);
            assert_eq!((c.spec.systemd, c.wide_ids), (systemd, systemd), "{args:?}");
        }
        let c =
            merge_with(&["--systemd", "always", "--ids", "32768", "x", "y"], &Defaults::default());
        let c = c.unwrap();
        assert_eq!((c.spec.stop_signal, c.wide_ids), (SIGRTMIN_3, false));
    }

    #[test]
    fn outer_mounts_come_first() {
        let c = merge(&["--tmpfs", "/data/x/y", "-v", "v:/data", "--tmpfs", "/a", "img"]);
        let targets: Vec<_> = c.spec.mounts.iter().map(|m| m.target.as_str()).collect();
        assert_eq!(targets, ["/data", "/a", "/data/x/y"]);
    }

    #[test]
    fn contradictory_options_are_refused() {
        for args in [
            &["--rm", "--restart", "always", "img"][..],
            &["--net", "host", "-p", "80", "img"],
            &["--net", "none", "--ip", "10.0.0.1", "img"],
            &["--net", "bridge", "img"],
            &["-w", "relative", "img"],
            &["-v", "/a:/x", "--tmpfs", "/x", "img"],
            &["--name", "../x", "img"],
            &["--cap-add", "EVERYTHING", "img"],
            &["--memory", "1", "img"],
            &["--oom-score-adj", "-1001", "img"],
            &["--stop-timeout", "-2", "img"],
            &["--domain", "a/b", "img"],
            &["--sysctl", "net.ipv4.ip_forward=1", "img"],
            &["-e", "=x", "img"],
            &["-h", "a b", "img"],
        ] {
            assert!(merge_with(args, &image()).is_err(), "{args:?}");
        }
        for args in [&["--ids", "1", "img"][..], &["--ip", "x", "img"], &["--bogus", "img"]] {
            assert!(parse(args).is_err(), "{args:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn merge_of_any_command_line_does_not_panic(
            args in proptest::collection::vec(
                proptest::prop_oneof![
                    proptest::sample::select(vec![
                        "--memory", "-v", "--mount", "-e", "--net", "--ulimit", "-p", "--rm", "-it",
                        "--entrypoint", "img", "--", "-w", "--sysctl", "--tmpfs", "--cap-add",
                    ]).prop_map(str::to_owned),
                    "[-a-z0-9=:/,.]{0,12}",
                ],
                0..8,
            )
        ) {
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            if let Ok(create) = merge_with(&args, &image()) {
                proptest::prop_assert!(!create.spec.process.args.is_empty());
                proptest::prop_assert!(create.spec.process.cwd.starts_with('/'));
            }
        }
    }
}
