//! Containers, images and volumes as objects with podman's names.
//!
//! Uses `create` and `view`.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use dormouse_api::compatible::{
    Checkpoint, Container, ContainerConfig, DeviceRate, Dormouse, GraphDriver, Health, HostConfig,
    Image, ImageConfig, ListedContainer, ListedImage, ListedPort, LogConfig, Mount, NEVER, Network,
    NetworkSettings, PortBinding, RestartPolicy, RootFs, State, Ulimit, Volume,
};
use dormouse_api::rfc3339;
use dormouse_container::{Details, Engine, Listed, Result};
use dormouse_kernel::capability;
use dormouse_model::{
    Config, Cpu, DiskRateKind, Drive, Limits, MountKind, Propagation, Publish, Restart, RootSource,
    SeccompChoice, Size, State as Phase,
};

use crate::create::Defaults;
use crate::{option::signal, view};

/// podman's word for a state. An asleep or drowsy container answers like a running one.
pub(crate) fn status(state: Phase) -> &'static str {
    match state {
        Phase::Created => "created",
        Phase::Running | Phase::Drowsy | Phase::Asleep => "running",
        Phase::Paused => "paused",
        Phase::Stopped => "exited",
    }
}

/// A container.
pub(crate) fn container(engine: &Engine, details: &Details) -> Result<Container> {
    let config = &details.config;
    let spec = &config.spec;
    let (image, image_digest, image_name, rootfs) = match &spec.root {
        RootSource::Image { reference, id } => {
            let digest = engine.images()?.find(id).ok().and_then(|image| image.digest);
            let digest = digest.map(|digest| digest.to_string()).unwrap_or_default();
            (id.clone(), digest, reference.to_string(), String::new())
        }
        RootSource::Directory(dir) => {
            (String::new(), String::new(), String::new(), dir.display().to_string())
        }
    };
    let (path, args) = match spec.process.args.split_first() {
        Some((path, args)) => (path.clone(), args.to_vec()),
        None => (String::new(), Vec::new()),
    };
    let upper = engine.upper(&config.id);
    let data = match engine.drive_file(config) {
        Some(file) => BTreeMap::from([("DiskFile", file.display().to_string())]),
        None => BTreeMap::from([
            ("UpperDir", upper.display().to_string()),
            ("WorkDir", upper.with_file_name("work").display().to_string()),
        ]),
    };
    let log_path = engine.logs(&config.id)?.stdout.display().to_string();
    Ok(Container {
        id: config.id.to_string(),
        created: rfc3339(config.created_unix_s.saturating_mul(1000)),
        path,
        args,
        state: state(details),
        image,
        image_digest,
        image_name: image_name.clone(),
        rootfs,
        name: config.name.to_string(),
        restart_count: details.restarts,
        driver: "overlay",
        effective_caps: spec.security.capabilities.clone(),
        bounding_caps: spec.security.capabilities.clone(),
        graph_driver: GraphDriver { name: "overlay", data },
        mounts: spec.mounts.iter().map(|mount| one_mount(engine, mount)).collect(),
        network_settings: network(config),
        config: process(config, image_name),
        host_config: host(config, log_path.clone()),
        log_path,
        dormouse: own(engine, details)?,
    })
}

fn state(details: &Details) -> State {
    let ended = details.exit.as_ref().filter(|_| !details.state.is_alive());
    State {
        status: status(details.state),
        running: details.state.is_alive(),
        paused: details.state == Phase::Paused,
        restarting: false,
        oom_killed: details.exit.as_ref().is_some_and(|exit| exit.oom_killed),
        dead: false,
        pid: details.pid.unwrap_or(0),
        exit_code: ended.and_then(|exit| exit.code).unwrap_or(0),
        error: "",
        started_at: details.started_unix_ms.map_or_else(|| NEVER.to_owned(), rfc3339),
        finished_at: ended.map_or_else(|| NEVER.to_owned(), |e| rfc3339(e.finished_unix_ms)),
        health: Health::default(),
    }
}

fn one_mount(engine: &Engine, mount: &dormouse_model::Mount) -> Mount {
    let (mut name, mut driver, mut propagation) = (String::new(), "", "");
    let mut options = vec!["nosuid", "nodev"];
    let (kind, source) = match &mount.kind {
        MountKind::Bind { source, recursive, propagation: given, .. } => {
            options.push(if *recursive { "rbind" } else { "bind" });
            propagation = match given {
                Propagation::Private => "rprivate",
                Propagation::Slave => "rslave",
                Propagation::Shared => "rshared",
            };
            ("bind", source.display().to_string())
        }
        MountKind::Volume { name: volume, .. } => {
            (name, driver, propagation) = (volume.to_string(), "local", "rprivate");
            ("volume", engine.volume_path(volume).display().to_string())
        }
        MountKind::Tmpfs { .. } => ("tmpfs", "tmpfs".to_owned()),
        MountKind::Devpts => ("devpts", "devpts".to_owned()),
    };
    if mount.no_exec {
        options.push("noexec");
    }
    Mount {
        r#type: kind,
        name,
        source,
        destination: mount.target.clone(),
        driver,
        mode: "",
        options,
        rw: !mount.read_only,
        propagation,
    }
}

fn ports(publish: &[Publish]) -> BTreeMap<String, Vec<PortBinding>> {
    let mut all: BTreeMap<String, Vec<PortBinding>> = BTreeMap::new();
    for one in publish {
        let host_ip = one.host_ip.map(|ip| ip.to_string()).unwrap_or_default();
        let binding = PortBinding { host_ip, host_port: one.host_port.to_string() };
        all.entry(view::Port::from(one).container()).or_default().push(binding);
    }
    all
}

fn network(config: &Config) -> NetworkSettings {
    let first = |is: fn(&IpAddr) -> bool| config.addresses.iter().find(|ip| is(ip));
    let (ip4, ip6) = (first(IpAddr::is_ipv4), first(IpAddr::is_ipv6));
    let text = |ip: Option<&IpAddr>| ip.map(ToString::to_string).unwrap_or_default();
    let bits = |ip: Option<&IpAddr>, bits| if ip.is_some() { bits } else { 0 };
    let mut networks = BTreeMap::new();
    if let Some(domain) = config.spec.net.domain() {
        let aliases = [config.name.as_str(), config.id.short(), &config.spec.hostname];
        let network = Network {
            network_id: domain.to_string(),
            ip_address: text(ip4),
            ip_prefix_len: bits(ip4, 32),
            global_ipv6_address: text(ip6),
            aliases: aliases.map(str::to_owned).into(),
        };
        networks.insert(domain.to_string(), network);
    }
    NetworkSettings {
        ip_address: text(ip4),
        ip_prefix_len: bits(ip4, 32),
        global_ipv6_address: text(ip6),
        global_ipv6_prefix_len: bits(ip6, 128),
        ports: ports(&config.spec.publish),
        networks,
        ..NetworkSettings::default()
    }
}

fn process(config: &Config, image: String) -> ContainerConfig {
    let spec = &config.spec;
    let process = &spec.process;
    let (entrypoint, cmd) = process.args.split_at(process.entrypoint.min(process.args.len()));
    ContainerConfig {
        hostname: spec.hostname.clone(),
        domainname: spec.domainname.clone().unwrap_or_default(),
        user: process.user.0.clone(),
        tty: process.terminal,
        open_stdin: process.stdin,
        env: process.env.clone(),
        cmd: cmd.to_vec(),
        image,
        working_dir: process.cwd.clone(),
        entrypoint: entrypoint.to_vec(),
        labels: spec.labels.clone(),
        annotations: BTreeMap::new(),
        stop_signal: signal::name(spec.stop_signal),
        stop_timeout: spec.stop_timeout_s,
        umask: format!("{:04o}", process.umask.unwrap_or(0o022)),
    }
}

/// The options of podman's `--storage-opt`.
fn storage_options(limits: &Limits) -> BTreeMap<&'static str, String> {
    let Some(drive) = Drive::of(limits) else { return BTreeMap::new() };
    let inodes = drive.inodes.map(|inodes| ("inodes", inodes.to_string()));
    [("size", Size(drive.bytes).to_string())].into_iter().chain(inodes).collect()
}

fn host(config: &Config, log_path: String) -> HostConfig {
    let spec = &config.spec;
    let default: Vec<String> =
        capability::default_set().iter().map(|c| format!("CAP_{}", c.name())).collect();
    let granted = &spec.security.capabilities;
    let without = |all: &[String], some: &[String]| -> Vec<String> {
        all.iter().filter(|c| !some.contains(c)).cloned().collect()
    };
    let (restart, retries) = match spec.restart {
        Restart::No => ("no", 0),
        Restart::Always => ("always", 0),
        Restart::UnlessStopped => ("unless-stopped", 0),
        Restart::OnFailure { retries } => ("on-failure", retries.unwrap_or(0)),
    };
    let Limits { cpu_max_milli, cpu_weight, memory_max_bytes, swap_max_bytes, .. } = spec.limits;
    let memory = memory_max_bytes.unwrap_or(0);
    let cpu = Cpu::of(&spec.limits);
    let quota = |us: u64| i64::try_from(us).unwrap_or(i64::MAX);
    let security = [
        (spec.security.seccomp == SeccompChoice::Unconfined, "seccomp=unconfined"),
        (spec.security.no_new_privileges, "no-new-privileges"),
    ];
    let rates = |kind: DiskRateKind| -> Vec<DeviceRate> {
        let of = spec.limits.disk_rates.iter().filter(|rate| rate.kind == kind);
        let path = |device: &Option<PathBuf>| device.as_ref().map(|it| it.display().to_string());
        of.map(|it| DeviceRate { path: path(&it.device).unwrap_or_default(), rate: it.most })
            .collect()
    };
    HostConfig {
        binds: spec.mounts.iter().filter_map(bind).collect(),
        log_config: LogConfig {
            r#type: spec.log_driver.to_string(),
            config: BTreeMap::new(),
            path: log_path,
            size: format!("{}B", spec.log_max_bytes),
        },
        network_mode: spec.net.as_str(),
        port_bindings: ports(&spec.publish),
        restart_policy: RestartPolicy { name: restart, maximum_retry_count: retries },
        auto_remove: spec.auto_remove,
        cap_add: without(granted, &default),
        cap_drop: without(&default, granted),
        dns: spec.dns.iter().map(ToString::to_string).collect(),
        extra_hosts: spec.extra_hosts.iter().map(|(name, ip)| format!("{name}:{ip}")).collect(),
        ipc_mode: "private",
        pid_mode: "private",
        uts_mode: "private",
        userns_mode: "private",
        oom_score_adj: spec.security.oom_score_adj.unwrap_or(0),
        privileged: spec.security.privileged,
        readonly_rootfs: spec.read_only,
        security_opt: security.iter().filter(|(is, _)| *is).map(|(_, name)| *name).collect(),
        tmpfs: spec.mounts.iter().filter_map(tmpfs).collect(),
        init: spec.init,
        sysctls: spec.sysctls.clone(),
        cpu_shares: 0,
        cpu_weight: cpu_weight.unwrap_or(0),
        nano_cpus: cpu_max_milli.map_or(0, |milli| u64::from(milli) * 1_000_000),
        cpu_period: cpu_max_milli.map_or(0, |_| cpu.period_us.into()),
        cpu_quota: cpu.quota_us().map_or(0, quota),
        cpuset_cpus: spec.limits.cpuset_cpus.clone().unwrap_or_default(),
        memory,
        memory_swap: swap_max_bytes.map_or(0, |swap| memory.saturating_add(swap)),
        pids_limit: spec.limits.tasks_max().unwrap_or(0),
        blkio_weight: spec.limits.io_weight.unwrap_or(0),
        blkio_device_read_bps: rates(DiskRateKind::ReadBps),
        blkio_device_write_bps: rates(DiskRateKind::WriteBps),
        blkio_device_read_i_ops: rates(DiskRateKind::ReadIops),
        blkio_device_write_i_ops: rates(DiskRateKind::WriteIops),
        storage_opt: storage_options(&spec.limits),
        ulimits: spec.security.rlimits.iter().map(ulimit).collect(),
    }
}

/// `SOURCE:TARGET:OPTIONS` of a bind mount or a volume.
fn bind(mount: &dormouse_model::Mount) -> Option<String> {
    let source = match &mount.kind {
        MountKind::Bind { source, .. } => source.display().to_string(),
        MountKind::Volume { name, .. } => name.to_string(),
        MountKind::Tmpfs { .. } | MountKind::Devpts => return None,
    };
    let mode = if mount.read_only { "ro" } else { "rw" };
    Some(format!("{source}:{}:{mode}", mount.target))
}

fn tmpfs(mount: &dormouse_model::Mount) -> Option<(String, String)> {
    let MountKind::Tmpfs { size_bytes, mode } = &mount.kind else { return None };
    let mut options = format!("mode={mode:o}");
    if let Some(size) = size_bytes {
        options.push_str(&format!(",size={size}"));
    }
    Some((mount.target.clone(), options))
}

fn ulimit(limit: &dormouse_model::Rlimit) -> Ulimit {
    let number = |value: u64| i64::try_from(value).unwrap_or(-1);
    let name = format!("RLIMIT_{}", limit.name.to_uppercase());
    Ulimit { name, soft: number(limit.soft), hard: number(limit.hard) }
}

fn own(engine: &Engine, details: &Details) -> Result<Dormouse> {
    let config = &details.config;
    let ms = |sleep: dormouse_model::Sleep| {
        sleep.after().map_or(0, |after| u64::try_from(after.as_millis()).unwrap_or(u64::MAX))
    };
    let checkpoints = engine.checkpoints(&config.id)?.into_iter().map(|c| Checkpoint {
        number: c.number,
        created: c.created_unix_ms.map(rfc3339).unwrap_or_default(),
        processes: c.processes,
        size: c.bytes,
    });
    let domain = config.spec.net.domain().map(ToString::to_string).unwrap_or_default();
    Ok(Dormouse {
        state: details.state.as_str(),
        asleep_since: details.asleep_unix_ms.map(rfc3339).unwrap_or_default(),
        sleep_after_ms: ms(config.spec.sleep),
        drowsy_after_ms: ms(config.spec.drowsy),
        wake_on: config.spec.wake_on.to_string(),
        out_of_memory: config.spec.oom.as_str(),
        evict: config.spec.evict.as_str(),
        checkpoints: checkpoints.collect(),
        domain,
        addresses: config.addresses.iter().map(ToString::to_string).collect(),
        host_ids: config.ids.to_proc_text().trim().lines().map(str::to_owned).collect(),
        systemd: config.spec.systemd,
        sockets_limit: config.spec.limits.most_sockets().unwrap_or(0),
        sockets: engine.sockets(config)?.map_or(0, |count| count.sockets),
    })
}

/// An image.
pub(crate) fn image(image: &dormouse_image::Image) -> Image {
    let defaults = Defaults::of(image);
    let empty = |names: &[String]| names.iter().map(|n| (n.clone(), BTreeMap::new())).collect();
    let exposed = image.config.config().as_ref().and_then(|c| c.exposed_ports().clone());
    let digest = image.digest.as_ref().map(ToString::to_string).unwrap_or_default();
    let with_digest = |name: &dormouse_model::Reference| {
        let name = dormouse_model::Reference { tag: None, digest: None, ..name.clone() };
        format!("{name}@{digest}")
    };
    let names: Vec<String> = image.names.iter().map(ToString::to_string).collect();
    let history = image.config.history();
    let comment = history.iter().flatten().last().and_then(|step| step.comment().clone());
    Image {
        id: image.id.clone(),
        repo_digests: match digest.is_empty() {
            true => Vec::new(),
            false => image.names.iter().map(with_digest).collect(),
        },
        digest,
        repo_tags: names,
        parent: "",
        comment: comment.unwrap_or_default(),
        created: image.created.clone().unwrap_or_else(|| NEVER.to_owned()),
        author: image.config.author().clone().unwrap_or_default(),
        architecture: image.config.architecture().to_string(),
        os: image.config.os().to_string(),
        size: image.size_bytes,
        virtual_size: image.size_bytes,
        root_fs: RootFs {
            r#type: "layers",
            layers: image.layers.iter().map(|layer| layer.diff_id.to_string()).collect(),
        },
        labels: defaults.labels.clone(),
        user: defaults.user.clone(),
        history: serde_json::to_value(history).unwrap_or_default(),
        config: ImageConfig {
            volumes: empty(&defaults.volumes),
            exposed_ports: empty(&exposed.unwrap_or_default()),
            user: defaults.user,
            env: defaults.env,
            entrypoint: defaults.entrypoint,
            cmd: defaults.cmd,
            working_dir: defaults.working_dir,
            labels: defaults.labels,
            stop_signal: defaults.stop_signal.unwrap_or_default(),
        },
    }
}

/// A volume.
pub(crate) fn volume(volume: &dormouse_container::Volume) -> Volume {
    Volume {
        name: volume.name.to_string(),
        driver: "local",
        mountpoint: volume.path.display().to_string(),
        created_at: rfc3339(volume.created_unix_ms),
        labels: volume.labels.clone(),
        scope: "local",
        options: BTreeMap::new(),
        used_by: volume.used_by.iter().map(ToString::to_string).collect(),
        needs_copy_up: volume.is_new,
    }
}

/// A container in a list.
pub(crate) fn listed(c: &Listed) -> ListedContainer {
    let ended = c.exit.as_ref().filter(|_| !c.state.is_alive());
    let image_id = match &c.root {
        RootSource::Image { id, .. } => id.clone(),
        RootSource::Directory(_) => String::new(),
    };
    let port = |p: &Publish| ListedPort {
        host_ip: p.host_ip.map(|ip| ip.to_string()).unwrap_or_default(),
        container_port: p.container_port,
        host_port: p.host_port,
        range: 1,
        protocol: p.protocol.as_str(),
    };
    ListedContainer {
        command: c.args.clone(),
        created: c.created_unix_s,
        created_at: rfc3339(c.created_unix_s.saturating_mul(1000)),
        exited: c.state == Phase::Stopped,
        exited_at: ended.map_or(0, |exit| exit.finished_unix_ms / 1000),
        exit_code: ended.and_then(|exit| exit.code).unwrap_or(0),
        id: c.id.to_string(),
        image: view::image(&c.root),
        image_id,
        labels: c.labels.clone(),
        names: vec![c.name.to_string()],
        networks: networks(c),
        pid: c.pid.unwrap_or(0),
        ports: c.publish.iter().map(port).collect(),
        started_at: c.started_unix_ms.map_or(0, |ms| ms / 1000),
        state: status(c.state),
        status: view::status(c),
    }
}

/// The trust domain of a container in a list.
pub(crate) fn networks(c: &Listed) -> Vec<String> {
    c.net.domain().map(ToString::to_string).into_iter().collect()
}

/// An image in a list, with the number of its containers.
pub(crate) fn listed_image(image: &dormouse_image::Image, containers: usize) -> ListedImage {
    ListedImage {
        id: image.id.clone(),
        names: image.names.iter().map(ToString::to_string).collect(),
        digest: image.digest.as_ref().map(ToString::to_string).unwrap_or_default(),
        size: image.size_bytes,
        containers,
        labels: Defaults::of(image).labels,
        created_at: image.created.clone().unwrap_or_default(),
    }
}
