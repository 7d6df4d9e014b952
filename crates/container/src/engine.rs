//! The engine itself: finding, creating and removing containers.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use dormouse_api::{Event, EventKind};
use dormouse_image::{Image, Store};
use dormouse_kernel::cgroup::Hierarchy;
use dormouse_launch::{Calling, Keeper, KeeperStart};
use dormouse_model::{Config, ContainerId, MountKind, Name, NetMode, RootSource, State};
use dormouse_network::Network;

use crate::disk::{self, Durable, Lock};
use crate::error::{Error, Result};
use crate::event::{self, Follow, now_unix_ms};
use crate::life::{InitRecord, exit_from};
use crate::name::Names;
use crate::pending::{Intent, New};
use crate::place::Places;
use crate::slot::Slots;
use crate::spec::Create;

/// Name of a container's configuration file.
pub(crate) const CONFIG: &str = "config.json";

/// A container that was just created and is still locked: no other command starts, changes or
/// removes it while this exists.
#[derive(Debug)]
pub struct Created {
    /// Its configuration.
    pub config: Config,
    #[expect(dead_code, reason = "held, not read")]
    lock: Lock,
}

/// The engine on one set of directories. Opening it costs a few system calls; images, network and
/// control groups are opened when a verb first needs them.
#[derive(Debug)]
pub struct Engine {
    places: Places,
    pub(crate) names: Names,
    pub(crate) slots: Slots,
    store: OnceLock<Store>,
    network: OnceLock<Network>,
    cgroups: OnceLock<Hierarchy>,
}

impl Engine {
    /// Opens the directories, makes missing ones, and after a reboot clears away the last boot's
    /// leftovers.
    pub fn open(places: Places) -> Result<Self> {
        let names = Names::new(places.names());
        let slots = Slots::new(&places.lib.join("ids"));
        let engine = Self {
            places,
            names,
            slots,
            store: OnceLock::new(),
            network: OnceLock::new(),
            cgroups: OnceLock::new(),
        };
        engine.close_to_others()?;
        engine.recover_after_boot()?;
        let _ = engine.finish_interrupted(); // every command tries again; `prune` reports errors
        Ok(engine)
    }

    /// The directories.
    pub fn places(&self) -> &Places {
        &self.places
    }

    /// The image store.
    pub fn images(&self) -> Result<&Store> {
        if self.store.get().is_none() {
            let (lib, run) = (self.places.lib.join("images"), self.places.run.join("images"));
            let store = Store::open(&lib, &run)?;
            let _ = self.store.set(store); // a second one is equivalent
        }
        Ok(self.store.get().expect("set above"))
    }

    pub(crate) fn network(&self) -> Result<&Network> {
        if self.network.get().is_none() {
            let config = dormouse_network::Settings::read(&self.places.etc.join("config.toml"))?;
            let p = &self.places;
            let _ = self.network.set(Network::open(&p.lib, &p.run, &p.cgroup, config)?);
        }
        Ok(self.network.get().expect("set above"))
    }

    pub(crate) fn cgroups(&self) -> Result<&Hierarchy> {
        if self.cgroups.get().is_none() {
            let _ = self.cgroups.set(Hierarchy::open(&self.places.cgroup)?);
        }
        Ok(self.cgroups.get().expect("set above"))
    }

    /// Returns a connection to the keeper, which is started if there is none.
    pub(crate) fn keeper(&self) -> Result<Keeper> {
        self.keeper_called(Keeper::call(&self.places.run)?)
    }

    /// Completes a connection to the keeper that was begun by [`Keeper::call`].
    pub(crate) fn keeper_called(&self, calling: Option<Calling>) -> Result<Keeper> {
        if let Some(keeper) = calling.map_or(Ok(None), Calling::answer)? {
            return Ok(keeper);
        }
        let mut keeper = Keeper::connect_or_start(&KeeperStart {
            run_dir: self.places.run.clone(),
            program: keeper_program(&own_program()?),
            cgroups: self.cgroups()?.keeper_dirs()?,
            settle: self.internal("settle")?,
            wake: self.internal("wake")?,
            tidy: self.internal("tidy")?,
        })?;
        self.note_custody(&mut keeper)?;
        Ok(keeper)
    }

    /// Returns the command line of this program's internal verb for these places; a container's id
    /// is appended by the caller.
    pub fn internal(&self, verb: &str) -> Result<Vec<OsString>> {
        let mut words = vec![own_program()?.into_os_string()];
        words.extend(self.places.arguments());
        words.extend(["internal".into(), verb.into()]);
        Ok(words)
    }

    /// Returns the events from now on.
    pub fn follow(&self) -> Result<Follow> {
        Follow::from_end(self.events())
    }

    /// Returns how many slots of host ids and how many addresses are in use.
    pub fn taken(&self) -> Result<(u32, u32)> {
        Ok((self.slots.count()?, self.network()?.addresses_in_use()?))
    }

    /// Returns how many slots of host ids and how many addresses there are.
    pub fn room(places: &Places) -> Result<(u32, u32)> {
        let config = places.etc.join("config.toml");
        let settings = dormouse_network::Settings::read(&config)?;
        Ok((crate::slot::ROOM, settings.pool.count()))
    }

    /// The operator's options for every mount of a host directory: `default-volume` under `[run]` in
    /// `config.toml`.
    pub fn default_volume(&self) -> Result<String> {
        crate::settings::default_volume(&self.places.etc.join("config.toml"))
    }

    /// The file that events are appended to, one JSON line each.
    pub fn events(&self) -> PathBuf {
        self.places.lib.join("events")
    }

    /// Records an event; an error in recording is ignored.
    pub fn record(
        &self,
        kind: impl Into<EventKind>,
        id: &str,
        name: &str,
        attributes: &[(&str, String)],
    ) {
        let attributes = attributes.iter().map(|(k, v)| ((*k).to_owned(), v.clone())).collect();
        let event = Event {
            unix_ms: now_unix_ms(),
            kind: kind.into(),
            id: id.to_owned(),
            name: name.to_owned(),
            attributes,
        };
        let _ = event::append(&self.events(), &event); // a full disk must not stop a stop
    }

    pub(crate) fn dir(&self, id: &ContainerId) -> PathBuf {
        self.places.containers().join(id.as_str())
    }

    pub(crate) fn run_dir(&self, id: &ContainerId) -> PathBuf {
        self.places.running().join(id.as_str())
    }

    pub(crate) fn lock(&self, id: &ContainerId) -> Result<Lock> {
        match Lock::take(&self.dir(id)) {
            Err(Error::File { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                Err(Error::NoContainer(id.short().to_owned()))
            }
            other => other,
        }
    }

    /// Returns the configuration of a container.
    pub fn config(&self, id: &ContainerId) -> Result<Config> {
        let path = self.dir(id).join(CONFIG);
        disk::read_json(&path)?.ok_or_else(|| Error::NoContainer(id.short().to_owned()))
    }

    pub(crate) fn write_config(&self, dir: &Path, config: &Config) -> Result<()> {
        // A container that is removed when it stops does not outlive a boot either way.
        let durable = if config.auto_remove { Durable::No } else { Durable::Yes };
        write_config_as(dir, config, durable)
    }

    /// Finds a container by its name, its id, or the start of its id.
    pub fn find(&self, text: &str) -> Result<ContainerId> {
        let missing = || Error::NoContainer(text.to_owned());
        if let Ok(name) = text.parse::<Name>()
            && let Some(id) = self.names.holder(&name)?
            && self.dir(&id).exists()
        {
            return Ok(id);
        }
        if let Ok(id) = text.parse::<ContainerId>() {
            return if self.dir(&id).exists() { Ok(id) } else { Err(missing()) };
        }
        let is_hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        if text.is_empty() || !text.bytes().all(is_hex) {
            return Err(missing());
        }
        let mut found = self.ids()?.into_iter().filter(|id| id.as_str().starts_with(text));
        match (found.next(), found.next()) {
            (Some(id), None) => Ok(id),
            (Some(_), Some(_)) => Err(Error::Ambiguous(text.to_owned())),
            (None, _) => Err(missing()),
        }
    }

    /// The ids of all containers, in no order.
    pub fn ids(&self) -> Result<Vec<ContainerId>> {
        ids_in(&self.places.containers())
    }

    /// Returns the ids of containers with processes, or about to have some, in no order.
    pub fn started(&self) -> Result<Vec<ContainerId>> {
        ids_in(&self.places.running())
    }

    /// Returns the size of an asleep container's checkpoint in bytes; 0 if it is awake.
    pub fn asleep_bytes(&self, id: &ContainerId) -> u64 {
        let files = fs::read_dir(self.asleep_dir(id)).into_iter().flatten().flatten();
        files.filter_map(|file| file.metadata().ok()).map(|meta| meta.len()).sum()
    }

    /// Creates a container: its name, ids, addresses and empty writable layer. No process runs.
    ///
    /// ORDER: everything is made inside a directory that is not visible yet; its lock shows that
    /// this create is in progress, and one rename publishes it. A failure releases what was taken.
    /// For a killed create the next command does that ([`crate::pending`]).
    pub fn create(&self, create: Create) -> Result<Created> {
        self.create_with(create, |_, _| Ok(()))
    }

    /// Creates a container with further content: `fill` puts it into the container's directory.
    pub(crate) fn create_with(
        &self,
        create: Create,
        fill: impl FnOnce(&Config, &Path) -> Result<()>,
    ) -> Result<Created> {
        let (config, new) = self.draft(create, |config, dir| {
            fill(config, dir)?;
            self.write_config(dir, config)
        })?;
        match self.publish(&config, &new) {
            Ok(()) => Ok(Created { config, lock: new.lock }),
            Err(e) => {
                let _ = self.abandon(&config.id, &config.name, &new); // the first error is returned
                Err(e)
            }
        }
    }

    /// Makes a container up to its publication: `fill` puts the rest into its directory, the record
    /// last.
    pub(crate) fn draft(
        &self,
        create: Create,
        fill: impl FnOnce(&Config, &Path) -> Result<()>,
    ) -> Result<(Config, New)> {
        let id = new_id()?;
        crate::spec::validate(&create)?;
        let new = self.begin(&id)?;
        let name = create.name.clone();
        match self.create_in(&new.dir, &id, create, fill) {
            Ok(config) => Ok((config, new)),
            Err(e) => {
                let _ = self.abandon(&id, &name, &new); // the first error is returned
                Err(e)
            }
        }
    }

    /// Publishes a container: from now on all commands find it.
    pub(crate) fn publish(&self, config: &Config, new: &New) -> Result<()> {
        let dir = self.dir(&config.id);
        fs::rename(&new.dir, &dir).map_err(Error::file("cannot publish", &dir))?;
        self.record("create", config.id.as_str(), config.name.as_str(), &[]);
        Ok(())
    }

    fn create_in(
        &self,
        new: &Path,
        id: &ContainerId,
        create: Create,
        fill: impl FnOnce(&Config, &Path) -> Result<()>,
    ) -> Result<Config> {
        self.take_name(&create.name, id)?;
        let ids = self.slots.take(create.wide_ids, id)?;
        if let RootSource::Image { id: image, .. } = &create.root
            && create.image.is_none()
        {
            self.images()?.find(image)?;
        }
        let addresses = match &create.net {
            NetMode::Address { domain } => {
                self.network()?.allocate(domain, id, &create.addresses)?
            }
            NetMode::Host | NetMode::None => Vec::new(),
        };
        let hostname = create.hostname.unwrap_or_else(|| id.short().to_owned());
        let config = Config {
            version: 1,
            id: id.clone(),
            name: create.name,
            created_unix_s: now_unix_ms() / 1000,
            root: create.root,
            ids,
            process: create.process,
            security: create.security,
            hostname,
            domainname: create.domainname,
            extra_hosts: create.extra_hosts,
            dns: create.dns,
            anonymous_volumes: create.anonymous_volumes,
            mounts: create.mounts,
            net: create.net,
            addresses,
            publish: create.publish,
            limits: create.limits,
            restart: create.restart,
            sleep: create.sleep,
            drowsy: create.drowsy,
            wake_on: create.wake_on,
            auto_remove: create.auto_remove,
            read_only: create.read_only,
            init: create.init,
            systemd: create.systemd,
            log_max_bytes: create.log_max_bytes,
            stop_signal: create.stop_signal,
            stop_timeout_s: create.stop_timeout_s,
            labels: create.labels,
            sysctls: create.sysctls,
        };
        Store::create_upper(new, &ids, &self.lower(&config.root)?)?;
        fill(&config, new)?;
        Ok(config)
    }

    /// Takes a name, also from a holder that no longer exists: a create or a removal that was
    /// killed between its two steps.
    fn take_name(&self, name: &Name, id: &ContainerId) -> Result<()> {
        let taken = self.names.take(name, id);
        let Err(Error::NameTaken { .. }) = &taken else { return taken };
        if let Some(holder) = self.names.holder(name)?
            && !self.dir(&holder).exists()
            && !self.is_being_created(&holder)?
        {
            self.names.release(name, &holder)?;
            return self.names.take(name, id);
        }
        taken
    }

    /// Renames a container.
    pub fn rename(&self, id: &ContainerId, name: &Name) -> Result<()> {
        let _lock = self.lock(id)?;
        let mut config = self.config(id)?;
        let old = std::mem::replace(&mut config.name, name.clone());
        if old == *name {
            return Ok(());
        }
        // ORDER: new name, configuration, old name: a kill leaves one name too many, never none,
        // and the next command releases that.
        let _intent = self.intend(id, &Intent::Rename { names: [old.clone(), name.clone()] })?;
        self.take_name(name, id)?;
        self.write_config(&self.dir(id), &config).inspect_err(|_| {
            let _ = self.names.release(name, id); // the first error is returned
        })?;
        self.names.release(&old, id)?;
        self.rename_in_network(&config)?;
        self.record("rename", id.as_str(), name.as_str(), &[("old_name", old.to_string())]);
        Ok(())
    }

    /// Removes a stopped container and everything that it owns. `volumes` also removes the volumes
    /// that were made for it alone. With `force` a running container is killed first.
    pub fn remove(&self, id: &ContainerId, force: bool, volumes: bool) -> Result<()> {
        let _lock = self.lock(id)?;
        let config = match self.config(id) {
            Ok(config) => Some(config),
            Err(Error::Corrupt { .. }) if force => None,
            Err(e) => return Err(e),
        };
        if let Some(config) = &config {
            let look = self.look_locked(config)?;
            if look.is_alive() {
                if !force {
                    return Err(Error::State {
                        name: config.name.to_string(),
                        state: look.state,
                        hint: "stop it first, or remove it with --force",
                    });
                }
                self.kill_locked(config, &look)?;
            } else if look.state == State::Asleep {
                if !force {
                    return Err(self.not(
                        config,
                        look.state,
                        "stop it first, or remove it with --force",
                    ));
                }
                self.forget_sleep(config)?;
            } else {
                self.settle_found(config, look, false)?;
            }
        }
        if let Some(config) = &config {
            self.end_silence(config)?;
        }
        self.remove_locked(id, config.as_ref(), volumes)
    }

    /// ORDER: kernel objects, then the container's visible directory, then its resources. A kill in
    /// between leaves a container that can be removed again, or the rest to the next command.
    pub(crate) fn remove_locked(
        &self,
        id: &ContainerId,
        config: Option<&Config>,
        volumes: bool,
    ) -> Result<()> {
        self.tear_down(id, config)?;
        self.remove_files(id, config, volumes)
    }

    /// Removes the files of a container after its kernel objects.
    pub(crate) fn remove_files(
        &self,
        id: &ContainerId,
        config: Option<&Config>,
        volumes: bool,
    ) -> Result<()> {
        let dead = self.withdraw(id)?;
        self.give_back(id, &dead, config, volumes)?;
        if let Some(config) = config {
            self.record("remove", id.as_str(), config.name.as_str(), &[]);
        }
        Ok(())
    }

    /// Returns the image of a container, if it has one.
    pub fn image_of(&self, config: &Config) -> Result<Option<Image>> {
        match &config.root {
            RootSource::Image { id, .. } => Ok(Some(self.images()?.find(id)?)),
            RootSource::Directory(_) => Ok(None),
        }
    }

    /// Returns the ids of images that containers are made from: `prune` must keep them.
    pub fn images_in_use(&self) -> Result<Vec<String>> {
        let mut used = Vec::new();
        for id in self.ids()? {
            match self.config(&id) {
                Ok(Config { root: RootSource::Image { id, .. }, .. }) => used.push(id),
                Ok(_) | Err(Error::NoContainer(_)) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(used)
    }

    /// Returns the named volumes that no container mounts.
    pub fn unused_volumes(&self) -> Result<Vec<Name>> {
        let mut used = std::collections::HashSet::new();
        for id in self.ids()? {
            for mount in self.config(&id)?.mounts {
                if let MountKind::Volume { name } = mount.kind {
                    used.insert(name);
                }
            }
        }
        let dir = self.places.volumes();
        let mut unused = Vec::new();
        for entry in fs::read_dir(&dir).map_err(Error::file("cannot list", &dir))? {
            let entry = entry.map_err(Error::file("cannot list", &dir))?;
            let name = entry.file_name().to_str().and_then(|n| n.parse::<Name>().ok());
            unused.extend(name.filter(|n| !used.contains(n)));
        }
        Ok(unused)
    }

    /// Removes a volume, which no container may be using.
    pub fn remove_volume(&self, name: &Name) -> Result<()> {
        let path = self.places.volumes().join(name.as_str());
        fs::remove_dir_all(&path).map_err(Error::file("cannot remove volume", path))
    }

    /// Closes LIB and RUN to the host's other users. Both hold locks, secrets of environments, and
    /// files of containers, some of them set-user-id. Directories of an earlier version were open.
    fn close_to_others(&self) -> Result<()> {
        let own = rustix::process::geteuid();
        if !own.is_root() {
            return Ok(()); // the modes of the files refuse other users
        }
        // A file that every LIB, and every RUN, of this engine has.
        for (dir, mark) in [(&self.places.lib, "containers"), (&self.places.run, "boot")] {
            let meta = match fs::metadata(dir) {
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
                other => other.map_err(Error::file("cannot look at", dir))?,
            };
            if meta.uid() != own.as_raw() {
                return Err(Error::Invalid(format!(
                    "'{}' belongs to uid {}, which could replace anything in it: give it to \
                     root (chown), or choose another --root",
                    dir.display(),
                    meta.uid()
                )));
            }
            if meta.mode() & 0o077 != 0 {
                let is_other = |entry: std::io::Result<fs::DirEntry>| {
                    entry.map_or(true, |entry| entry.file_name() != "lost+found")
                };
                let mut entries = fs::read_dir(dir).map_err(Error::file("cannot read", dir))?;
                if !dir.join(mark).exists() && entries.any(is_other) {
                    return Err(Error::Invalid(format!(
                        "'{}' has files that are not Dormouse's: choose another --root",
                        dir.display()
                    )));
                }
                disk::close(dir, &["containers", "pending", "names", "ids", "quiet", "c"])?;
            }
        }
        Ok(())
    }

    /// At the first call after a boot: makes the directories, forgets the processes of the last
    /// boot and releases the leftovers of interrupted verbs.
    fn recover_after_boot(&self) -> Result<()> {
        let marker = self.places.run.join("boot");
        let boot = dormouse_kernel::proc::boot_id().map_err(Error::call("cannot read boot id"))?;
        if fs::read_to_string(&marker).is_ok_and(|b| b == boot) {
            return Ok(());
        }
        let p = &self.places;
        for dir in [&p.lib, &p.run] {
            if let Some(above) = dir.parent() {
                disk::make_dir(above, 0o755)?;
            }
            disk::make_dir(dir, 0o700)?;
        }
        for dir in
            [p.containers(), p.pending(), p.names(), p.volumes(), p.lib.join("ids"), p.running()]
        {
            disk::make_dir(&dir, 0o700)?;
        }
        let _lock = Lock::take(&p.run)?;
        if fs::read_to_string(&marker).is_ok_and(|b| b == boot) {
            return Ok(());
        }
        self.forget_last_boot()?;
        self.sweep()?;
        self.recover_slots()?;
        disk::write(&marker, boot.as_bytes(), Durable::No)
    }

    /// Settles containers that ran when the host went down, with unknown exits. A pid of the last
    /// boot means nothing in this one, so no process is looked up.
    fn forget_last_boot(&self) -> Result<()> {
        for id in self.ids()? {
            let config = match self.config(&id) {
                Err(Error::Corrupt { .. } | Error::NoContainer(_)) => continue,
                other => other?,
            };
            let record = self.run_dir(&id).join("init.json");
            if let Some(init) = disk::read_json::<InitRecord>(&record)? {
                if !init.sleeping {
                    self.forget_sleep(&config)?; // an old checkpoint: the container ran on
                }
                self.write_exit(&id, &exit_from(&init, None))?;
                self.tear_down(&id, Some(&config))?;
            }
            if config.auto_remove {
                self.remove_locked(&id, Some(&config), true)?;
            }
        }
        Ok(())
    }

    /// Releases id slots of containers that were never published. Runs only after a boot, when no
    /// create can be under way. Does nothing if a record is damaged, for its slot is not known
    /// then.
    fn recover_slots(&self) -> Result<()> {
        let owners = || self.ids()?.into_iter().map(|id| Ok((self.config(&id)?.ids, id))).collect();
        match self.slots.reset(owners) {
            Err(Error::Corrupt { .. }) => Ok(()),
            other => other,
        }
    }

    /// Releases names, addresses and process records without a container. Every command finishes
    /// interrupted creates and removals ([`crate::pending`]); this is a full search, after a boot
    /// and for `prune`. Returns how many things were released.
    pub fn sweep(&self) -> Result<usize> {
        let mut swept = self.finish_interrupted()?;
        for (name, holder) in self.names.all()? {
            let alive = self.dir(&holder).exists() || self.is_being_created(&holder)?;
            if !alive {
                self.names.release(&name, &holder)?;
                swept += 1;
            }
        }
        let is_someone =
            |id: &ContainerId| self.dir(id).exists() || self.is_being_created(id).unwrap_or(true);
        swept += self.network()?.sweep(&is_someone)? as usize;
        for entry in fs::read_dir(self.places.running()).into_iter().flatten().flatten() {
            let id = entry.file_name().to_str().and_then(|n| n.parse::<ContainerId>().ok());
            if let Some(id) = id
                && !self.dir(&id).exists()
            {
                self.tear_down(&id, None)?;
                swept += 1;
            }
        }
        Ok(swept)
    }
}

/// Parses the names in a directory as ids.
fn ids_in(dir: &Path) -> Result<Vec<ContainerId>> {
    let mut ids = Vec::new();
    for entry in fs::read_dir(dir).map_err(Error::file("cannot list", dir))? {
        let entry = entry.map_err(Error::file("cannot list", dir))?;
        ids.extend(entry.file_name().to_str().and_then(|n| n.parse().ok()));
    }
    Ok(ids)
}

/// Writes the configuration of a container with this durability.
pub(crate) fn write_config_as(dir: &Path, config: &Config, durable: Durable) -> Result<()> {
    disk::write_json(&dir.join(CONFIG), config, durable)
}

/// Returns a new random id.
pub(crate) fn new_id() -> Result<ContainerId> {
    let mut bytes = [0; 16];
    let mut filled = 0;
    while filled < bytes.len() {
        let n =
            rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())
                .map_err(|e| Error::Call {
                    step: "cannot get random bytes for an id",
                    source: dormouse_kernel::CallError::new(
                        "getrandom",
                        "16".into(),
                        e.raw_os_error(),
                    ),
                })?;
        filled += n;
    }
    Ok(ContainerId::from_bytes(bytes))
}

/// Returns the path of this program, or of its replacement after an upgrade.
pub(crate) fn own_program() -> Result<PathBuf> {
    let read = fs::read_link("/proc/self/exe");
    let own = read.map_err(Error::file("cannot read", "/proc/self/exe"))?;
    // Suffix of a removed file (proc_pid_exe(5)).
    let before = own.as_os_str().as_bytes().strip_suffix(b" (deleted)");
    Ok(before.map_or_else(|| own.clone(), |before| OsStr::from_bytes(before).into()))
}

/// Returns the path of the keeper's program: beside this one, or where packages install it.
fn keeper_program(own: &Path) -> PathBuf {
    const NAME: &str = "dormouse-keeper";
    let beside = own.with_file_name(NAME);
    if beside.exists() { beside } else { Path::new("/usr/libexec/dormouse").join(NAME) }
}
