//! The ground of the engine: its directories, the tables of names and ids, and the mechanisms below it.
//!
//! Every other module takes a [`Ground`]. Images, network and control groups are opened when a verb
//! first needs them, so that opening a ground costs a few system calls. The module finds containers,
//! locks them, and reads and writes their configuration. The state of a container is the subject of
//! [`crate::state`].

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};

use dormouse_api::{Event, EventKind};
use dormouse_image::{Charge, Store};
use dormouse_kernel::cgroup::{ChargingImages, Hierarchy};
use dormouse_model::{Config, ContainerId, Name};
use dormouse_network::Network;

use crate::disk::{self, Durable, Lock};
use crate::error::{Error, Result};
use crate::event;
use crate::name::Names;
use crate::place::Places;
use crate::slot::Slots;

/// Name of a container's configuration file.
pub(crate) const CONFIG: &str = "config.json";

/// Name of the checkpoint's directory while the container is asleep.
pub(crate) const ASLEEP: &str = "asleep";

/// Name of the same directory while the container is awake again: unchanged memory need not be
/// written at the next sleep.
const WOKEN: &str = "woken";

/// What every verb stands on: directories, tables of names and ids, and mechanisms.
#[derive(Debug)]
pub(crate) struct Ground {
    pub(crate) places: Places,
    pub(crate) names: Names,
    pub(crate) slots: Slots,
    store: OnceLock<Store>,
    network: OnceLock<Network>,
    cgroups: OnceLock<Hierarchy>,
    /// The configuration that was read or written last, and its text. A verb reads it again after every wait.
    last: Mutex<Option<(Vec<u8>, Config)>>,
    /// Connections that show another process that this command has not ended.
    open: Mutex<Vec<OwnedFd>>,
    /// How page cache of images is charged to them.
    charge: OnceLock<ChargeImages>,
}

/// Charges page cache to images until the result is dropped.
pub(crate) type ChargeImages = fn(&Ground) -> Option<ChargingImages>;

/// The charge for page cache of images, as the store calls it. The control groups are opened anew each time: those
/// above all containers are removed while none runs.
#[derive(Debug)]
struct ToImages {
    places: Places,
    charge: ChargeImages,
}

impl Charge for ToImages {
    fn begin(&self) -> Option<ChargingImages> {
        (self.charge)(&Ground::new(self.places.clone()))
    }
}

impl Ground {
    /// Makes nothing and opens nothing.
    pub(crate) fn new(places: Places) -> Self {
        Self {
            names: Names::new(places.names()),
            slots: Slots::new(&places.lib.join("ids")),
            store: OnceLock::new(),
            network: OnceLock::new(),
            cgroups: OnceLock::new(),
            last: Mutex::new(None),
            open: Mutex::new(Vec::new()),
            charge: OnceLock::new(),
            places,
        }
    }

    /// Sets how page cache of images is charged to them. Without, it is charged to the command that imports them.
    pub(crate) fn charge_images_by(&self, charge: ChargeImages) {
        let _ = self.charge.set(charge); // set once, before the store is opened
    }

    /// Keeps a connection open until this command ends.
    pub(crate) fn keep_open(&self, connection: OwnedFd) {
        if let Ok(mut open) = self.open.lock() {
            open.push(connection);
        }
    }

    /// The image store.
    pub(crate) fn images(&self) -> Result<&Store> {
        let (lib, run) = (&self.places.lib, &self.places.run);
        get_or_open(&self.store, || {
            let store = Store::open(&lib.join("images"), &run.join("images"))?;
            Ok(match self.charge.get() {
                None => store,
                Some(charge) => {
                    store.charged_by(ToImages { places: self.places.clone(), charge: *charge })
                }
            })
        })
    }

    /// The networks of this instance.
    pub(crate) fn network(&self) -> Result<&Network> {
        get_or_open(&self.network, || {
            let config = dormouse_network::Settings::read(&self.settings())?;
            let p = &self.places;
            Ok(Network::open(&p.lib, &p.run, &p.cgroup, config)?)
        })
    }

    /// The control groups of this instance.
    pub(crate) fn cgroups(&self) -> Result<&Hierarchy> {
        let open = || {
            let kept = self.places.run.join("mounts");
            Ok(Hierarchy::open_kept(&self.places.cgroup, Some(&kept))?)
        };
        get_or_open(&self.cgroups, open)
    }

    /// The file with the operator's settings.
    pub(crate) fn settings(&self) -> PathBuf {
        settings(&self.places)
    }

    /// Returns the command line of this program's internal verb for these places; a container's id
    /// is appended by the caller.
    pub(crate) fn internal(&self, verb: &str) -> Result<Vec<OsString>> {
        let mut words = vec![own_program()?.into_os_string()];
        words.extend(self.places.arguments());
        words.extend(["internal".into(), verb.into()]);
        Ok(words)
    }

    /// The file that events are appended to, one JSON line each.
    pub(crate) fn events(&self) -> PathBuf {
        self.places.lib.join("events")
    }

    /// Records an event; an error in recording is ignored.
    pub(crate) fn record(
        &self,
        kind: impl Into<EventKind>,
        id: &str,
        name: &str,
        attributes: &[(&str, String)],
    ) {
        // A full disk must not stop a stop.
        let _ = self.record_at(event::now_unix_ms(), kind, id, name, attributes);
    }

    /// Records an event of this time.
    pub(crate) fn record_at(
        &self,
        unix_ms: i64,
        kind: impl Into<EventKind>,
        id: &str,
        name: &str,
        attributes: &[(&str, String)],
    ) -> Result<()> {
        let attributes = attributes.iter().map(|(k, v)| ((*k).to_owned(), v.clone())).collect();
        let (id, name) = (id.to_owned(), name.to_owned());
        event::append(&self.events(), &Event { unix_ms, kind: kind.into(), id, name, attributes })
    }

    /// Directory of a container, kept over boots.
    pub(crate) fn dir(&self, id: &ContainerId) -> PathBuf {
        self.places.containers().join(id.as_str())
    }

    /// Runtime directory of a container, made first by a start and removed last.
    pub(crate) fn run_dir(&self, id: &ContainerId) -> PathBuf {
        self.places.running().join(id.as_str())
    }

    /// Directory of an asleep container's checkpoint: the container is asleep if this exists and no
    /// process.
    pub(crate) fn asleep_dir(&self, id: &ContainerId) -> PathBuf {
        self.dir(id).join(ASLEEP)
    }

    /// Directory of the checkpoint from which a container was woken.
    pub(crate) fn woken_dir(&self, id: &ContainerId) -> PathBuf {
        self.dir(id).join(WOKEN)
    }

    /// The record of a warm sleeper ([`crate::warm`]).
    pub(crate) fn warm_record(&self, id: &ContainerId) -> PathBuf {
        self.places.warm().join(id.as_str())
    }

    /// Waits for the lock of a container, which every verb that changes it holds.
    pub(crate) fn lock(&self, id: &ContainerId) -> Result<Lock> {
        match Lock::take(&self.dir(id)) {
            Err(Error::File { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                Err(Error::NoContainer(id.short().to_owned()))
            }
            other => other,
        }
    }

    /// Takes a share of the lock that keeps shared objects (see [`crate::tidy`]) while a container
    /// starts.
    pub(crate) fn in_use(&self) -> Result<disk::Lock> {
        disk::Lock::take_shared(&self.places.run.join("use.lock"))
    }

    /// Returns the configuration of a container.
    pub(crate) fn config(&self, id: &ContainerId) -> Result<Config> {
        let path = self.dir(id).join(CONFIG);
        let text = disk::read(&path)?.ok_or_else(|| Error::NoContainer(id.short().to_owned()))?;
        if let Ok(last) = self.last.lock()
            && let Some((known, config)) = &*last
            && *known == text
        {
            return Ok(config.clone());
        }
        let config: Config = disk::parse_json(&text, &path)?;
        self.remember(text, &config);
        Ok(config)
    }

    /// Writes the configuration of a container into its directory.
    pub(crate) fn write_config(&self, dir: &Path, config: &Config) -> Result<()> {
        // A container that is removed when it stops does not outlive a boot either way.
        let durable = if config.spec.auto_remove { Durable::No } else { Durable::Yes };
        let path = dir.join(CONFIG);
        let text = disk::to_json(config, &path)?;
        disk::write(&path, &text, durable)?;
        self.remember(text, config);
        Ok(())
    }

    fn remember(&self, text: Vec<u8>, config: &Config) {
        if let Ok(mut last) = self.last.lock() {
            *last = Some((text, config.clone()));
        }
    }

    /// Finds a container by its name, its id, or the start of its id.
    pub(crate) fn find(&self, text: &str) -> Result<ContainerId> {
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
    pub(crate) fn ids(&self) -> Result<Vec<ContainerId>> {
        ids_in(&self.places.containers())
    }

    /// Returns the ids of containers with processes, or about to have some, in no order.
    pub(crate) fn started(&self) -> Result<Vec<ContainerId>> {
        ids_in(&self.places.running())
    }

    /// Returns their configurations, without containers that were removed meanwhile, and damaged configurations.
    pub(crate) fn started_configs(&self) -> Result<impl Iterator<Item = Result<Config>> + '_> {
        let configs = self.started()?.into_iter().map(|id| self.config(&id));
        let is_left_out = |config: &Result<Config>| {
            matches!(config, Err(Error::NoContainer(_) | Error::Corrupt { .. }))
        };
        Ok(configs.filter(move |config| !is_left_out(config)))
    }
}

/// The file with the operator's settings, of an instance with these places.
pub(crate) fn settings(places: &Places) -> PathBuf {
    places.etc.join("config.toml")
}

/// Returns a mechanism, opened if it is not open yet.
fn get_or_open<T>(cell: &OnceLock<T>, open: impl FnOnce() -> Result<T>) -> Result<&T> {
    match cell.get() {
        Some(opened) => Ok(opened),
        None => {
            let opened = open()?;
            Ok(cell.get_or_init(|| opened)) // one opened meanwhile is equivalent
        }
    }
}

/// Returns how many slots of host ids and how many addresses there are.
pub(crate) fn room(places: &Places) -> Result<(u32, u32)> {
    let settings = dormouse_network::Settings::read(&settings(places))?;
    Ok((crate::slot::ROOM, settings.pool.count()))
}

/// Parses the names in a directory as ids.
pub(crate) fn ids_in(dir: &Path) -> Result<Vec<ContainerId>> {
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
