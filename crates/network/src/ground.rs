//! Parts of the network that several verbs use: directories, tables, the lock of the domains, and the
//! BPF programs at the containers' parent cgroup.
//!
//! No function here creates or removes a domain.

use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use dormouse_bpf::abstract_unix;
use dormouse_bpf::address::{self, Constants, Programs};
use dormouse_bpf::identity::{Identities, Identity};
use dormouse_bpf::socket_count;
use dormouse_kernel::namespace;
use dormouse_model::Name;
use rustix::fs::FlockOperation;

use crate::error::{Error, Result};
use crate::publish::Table;
use crate::ready::{Ready, read_ready, write_ready};
use crate::settings::Settings;
use crate::store::{CHUNK, Plan, Store, lock_file};

const CGROUP2_MAGIC: u64 = 0x6367_7270;

/// A trust domain that is in use by the caller.
#[derive(Debug)]
pub struct Domain {
    /// Its name.
    pub name: Name,
    /// Its network namespace.
    pub netns: OwnedFd,
    /// The root of a sysfs mount that shows it (O_PATH).
    pub sys: OwnedFd,
    pub(crate) ready: Ready,
    pub(crate) dir: PathBuf,
    #[expect(dead_code, reason = "a shared lock for as long as this exists")]
    pub(crate) hold: File,
}

impl Domain {
    /// The identity of the container with this first address.
    pub(crate) fn identity(&self, address: u32) -> Identity {
        Identity { address, account: 0, netns: self.ready.netns_cookie }
    }

    /// The cookie of its stack.
    pub fn netns_cookie(&self) -> u64 {
        self.ready.netns_cookie
    }
}

/// Networking on one set of directories.
#[derive(Debug)]
pub struct Network {
    pub(crate) lib: PathBuf,
    pub(crate) run: PathBuf,
    parent: String,
    pub(crate) settings: Settings,
}

impl Network {
    /// Takes the directories, the path of the containers' parent cgroup below the root of the v2
    /// hierarchy, and the settings. Touches nothing.
    pub fn open(lib: &Path, run: &Path, parent_cgroup: &str, settings: Settings) -> Result<Self> {
        let parent = parent_cgroup.trim_matches('/').to_owned();
        Ok(Self { lib: lib.into(), run: run.into(), parent, settings })
    }

    pub(crate) fn store(&self) -> Result<Store> {
        Store::open(&self.lib, self.settings.pool)
    }

    /// Returns the table, unless no container ever had an address.
    pub(crate) fn existing_store(&self) -> Result<Option<Store>> {
        self.lib.join("addresses").exists().then(|| self.store()).transpose()
    }

    /// Returns a short hash that distinguishes instances on one host.
    pub(crate) fn hash(&self, more: &str) -> u32 {
        let mut hash = 0x811c_9dc5u32;
        for byte in self.run.as_os_str().as_encoded_bytes().iter().chain(more.as_bytes()) {
            hash = (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
        }
        hash
    }

    /// The host's end of a domain's uplink.
    pub(crate) fn uplink(&self, domain: &Name) -> String {
        format!("dm{:08x}", self.hash(domain.as_str()))
    }

    pub(crate) fn table(&self) -> Table {
        let name = if self.run == Path::new("/run/dormouse") {
            "dormouse".to_owned()
        } else {
            format!("dormouse_{:08x}", self.hash(""))
        };
        Table::new(name, &self.run)
    }

    /// Returns whether a BPF program is to be left out: a test's negative control.
    pub(crate) fn is_without(&self, program: &str) -> bool {
        self.settings.without.iter().any(|w| w == program) || dormouse_kernel::weakened(program)
    }

    /// The level of a container's cgroup below the root of the v2 hierarchy.
    pub(crate) fn level(&self) -> u32 {
        self.parent.split('/').count() as u32 + 1
    }

    pub(crate) fn constants(&self, plan: &Plan) -> Constants {
        Constants {
            level: self.level(),
            pool: plan.pool.first,
            pool_count: plan.pool.count(),
            chunk: CHUNK,
            prefix6: plan.prefix6,
            has_cookies: address::has_cookies(),
        }
    }

    /// The parent cgroup, if it is there.
    pub(crate) fn find_parent(&self) -> Result<Option<OwnedFd>> {
        use rustix::fs::{Mode, OFlags};
        let path = cgroup2()?.join(&self.parent);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match rustix::fs::open(&path, flags, Mode::empty()) {
            Ok(cgroup) => Ok(Some(cgroup)),
            Err(rustix::io::Errno::NOENT) => Ok(None),
            Err(e) => Err(Error::file("open", path)(e.into())),
        }
    }

    /// The parent cgroup, made if it is not there.
    pub(crate) fn parent_cgroup(&self) -> Result<OwnedFd> {
        loop {
            if let Some(cgroup) = self.find_parent()? {
                return Ok(cgroup);
            }
            let path = cgroup2()?.join(&self.parent);
            fs::create_dir_all(&path).map_err(Error::file("create", &path))?;
        }
    }

    /// The programs, if they are attached.
    pub(crate) fn find_programs(&self, plan: &Plan) -> Result<Option<Programs>> {
        match self.find_parent()? {
            Some(cgroup) => Ok(address::find(cgroup.as_fd(), self.constants(plan))?),
            None => Ok(None),
        }
    }

    /// Detaches the programs. The caller holds the lock of the domains.
    pub(crate) fn detach(&self) -> Result<()> {
        if let Some(cgroup) = self.find_parent()? {
            address::detach(cgroup.as_fd())?;
            abstract_unix::detach(cgroup.as_fd())?;
        }
        Ok(())
    }

    /// Attaches the programs to the parent cgroup, or completes and updates the attached ones;
    /// passes the domains to new ones. The caller holds the lock of the domains.
    pub(crate) fn attach(&self) -> Result<Programs> {
        let cgroup = self.parent_cgroup()?;
        let plan = self.store()?.plan;
        let constants = self.constants(&plan);
        let without: Vec<&str> = address::GROUP
            .programs
            .iter()
            .chain(abstract_unix::GROUP.programs)
            .map(|(name, _)| *name)
            .filter(|name| self.is_without(name))
            .collect();
        // In parallel: libbpf and the verifier take tens of milliseconds for each.
        let programs = std::thread::scope(|scope| {
            let names = scope.spawn(|| match without.contains(&abstract_unix::GROUP.anchor) {
                true => abstract_unix::detach(cgroup.as_fd()),
                false => abstract_unix::attach(cgroup.as_fd(), constants.level, &without),
            });
            let programs = address::attach(cgroup.as_fd(), constants, &without);
            names.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            programs
        })?;
        socket_count::move_last(cgroup.as_fd())?;
        for name in self.domain_names()? {
            let dir = self.domain_dir(&name);
            if let Some((mut ready, _)) = read_ready(&dir)? {
                programs.open_domain(ready.netns_cookie)?;
                if ready.note(programs.trace()?) {
                    write_ready(&dir, &ready)?;
                }
            }
        }
        Ok(programs)
    }

    /// Returns the identities, if the programs attached for this domain are still there.
    pub(crate) fn known_members(&self, ready: &Ready) -> Result<Option<Identities>> {
        match self.find_parent()? {
            Some(cgroup) => Ok(address::follow(cgroup.as_fd(), ready.trace())?),
            None => Ok(None),
        }
    }

    pub(crate) fn domain_names(&self) -> Result<Vec<Name>> {
        let dir = self.run.join("domains");
        let entries = match fs::read_dir(&dir) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.map_err(Error::file("read", &dir))?,
        };
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(Error::file("read", &dir))?;
            if entry.path().is_dir()
                && let Ok(name) = entry.file_name().to_string_lossy().parse()
            {
                names.push(name);
            }
        }
        Ok(names)
    }

    /// Returns the attached programs, after attaching them if necessary.
    pub(crate) fn programs(&self, plan: &Plan) -> Result<Programs> {
        match self.find_programs(plan)? {
            Some(programs) => Ok(programs),
            None => {
                let _lock = self.lock_domains()?;
                self.attach()
            }
        }
    }

    pub(crate) fn uplinks(&self) -> Result<Vec<String>> {
        let mut uplinks = Vec::new();
        for name in self.domain_names()? {
            if let Some((ready, _)) = read_ready(&self.domain_dir(&name))? {
                uplinks.push(ready.uplink);
            }
        }
        Ok(uplinks)
    }

    pub(crate) fn domain_dir(&self, name: &Name) -> PathBuf {
        self.run.join("domains").join(name.as_str())
    }

    /// Serializes creation and removal.
    pub(crate) fn lock_domains(&self) -> Result<File> {
        let dir = self.run.join("domains");
        fs::create_dir_all(&dir).map_err(Error::file("create", &dir))?;
        let path = dir.join("lock");
        let file = lock_file(&path)?;
        rustix::fs::flock(&file, FlockOperation::LockExclusive)
            .map_err(Error::errno("lock the domains", "flock"))?;
        Ok(file)
    }
}

/// A network namespace that belongs to no container: see the [crate].
pub(crate) fn new_stack() -> Result<OwnedFd> {
    namespace::new_network().map_err(|e| Error::Step("make a network namespace", e))
}

/// Returns the mount of the v2 hierarchy: one of the two usual places, or else from mountinfo.
fn cgroup2() -> Result<PathBuf> {
    for usual in ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"] {
        if rustix::fs::statfs(usual).is_ok_and(|s| s.f_type as u64 == CGROUP2_MAGIC) {
            return Ok(usual.into());
        }
    }
    let path = "/proc/self/mountinfo";
    let mounts = fs::read_to_string(path).map_err(Error::file("read", path))?;
    let found = mounts.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        right.starts_with("cgroup2 ").then(|| left.split(' ').nth(4).map(PathBuf::from))?
    });
    found.ok_or(Error::NoCgroup2)
}
