//! Accounts on disk: charges, balances, and the accounts that operators have made.
//!
//! ```text
//! LIB/accounts/charges                  readings of counters that no balance has yet, one line each
//! LIB/accounts/charges.taken            the same while they are added to balances
//! LIB/accounts/balances/root.json       what was charged to root
//! LIB/accounts/balances/own-ID.json     to the own account of a container
//! LIB/accounts/balances/made-NAME.json  to an account that an operator has made
//! LIB/accounts/balances/*.damaged       a record that could not be read, set aside
//! LIB/accounts/made/NAME.json           such an account; root once it was changed
//! LIB/accounts/given                    the largest number that was given to one
//! LIB/accounts/rules.toml               the rules that `rules apply` has installed
//! LIB/accounts/hosts.json               hosts with which accounts are shared
//! ```
//!
//! **A life is charged** between the death of its processes and the removal of its cgroup: one line is appended
//! to `charges`. The cgroup is removed only afterwards, so a killed command leaves it for the next one, which
//! appends the same reading again, and a balance counts it once (crate `account`).
//!
//! **Charges are added to balances** ([`fold`]) by the verbs that show accounts, which also read the counters of
//! running containers, and by the end of a life when the file is large. The file is renamed, and removed when all
//! balances are on the disk. A kill in between has them added again, without effect.
//!
//! ORDER: the engine looks which containers are gone, and then reads charges. Every charge of a container that was
//! gone is in the files that it reads, so the container's last readings can be forgotten, and its balance can move to
//! root.
//!
//! **Locks.** `made` (the directory) is shared by creates of containers with `--account`, until the container
//! is published, and held by changes of accounts. `lock`, below it, is held while charges are added. The file with
//! charges is locked for one line, and while it is read. A writer whose file was removed meanwhile opens the next.
//!
//! LIMIT: charges are not synchronized to the disk one by one. A power cut loses those of some seconds, and what
//! running containers have used since they were read last.
//!
//! Uses `ground`, `state` and `gates`.

mod hosts;
mod rules;
mod show;
mod store;
mod trace;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use dormouse_account::{
    Account, Balance, Book, BookError, Charge, Client, ConnectionLimit, DEPTH_MAX, Day, Held,
    Holder, Life, Number, OnLimit, ROOT, Usage, Work, fit,
};
use dormouse_bpf::gates::Party;
use dormouse_bpf::socket_count::Counts;
use dormouse_kernel::cgroup::{Cgroup, Counters};
use dormouse_kernel::proc;
use dormouse_model::{Config, ContainerId, IdSlot, Name, Spec};
use rustix::fs::{FlockOperation, flock};

pub use self::rules::{Answer as RuleAnswer, Question as RuleQuestion};
pub use self::show::AccountDetails;

use self::store::{Place, holder};
use crate::disk::{self, FILE_MODE, Lock};
use crate::error::{Error, Result};
use crate::event::now_unix_ms;
use crate::gates::{self, Works};
use crate::ground::Ground;
use crate::state::{self, InitRecord};
pub use hosts::Agreement;
pub(crate) use hosts::{add_hosts, agreement, hosts, record_change, remove_hosts, shared};
pub(crate) use rules::{
    apply, check, depends_on, explain, installed, is_shared, rules_text, table,
};
pub(crate) use show::all;
pub(crate) use trace::propose;

/// LIMIT: a file with more charges is added to the balances by the end of the next life: some 4,000.
const CHARGES_BYTES: u64 = 1 << 20;

/// LIMIT: a larger file with charges is damaged.
const CHARGES_BYTES_MAX: u64 = 1 << 30;

/// An account to be made.
#[derive(Debug, Clone)]
pub struct NewAccount {
    /// Its name.
    pub name: Name,
    /// The account above.
    pub parent: Name,
    /// A number that several machines share.
    pub number: Option<u32>,
    /// How many days the figures of a day are kept; the parent's number if `None`.
    pub keep_days: Option<u32>,
    /// Labels; the parent's if `None`.
    pub labels: Option<BTreeMap<String, String>>,
}

/// Changes to an account; `None` changes nothing.
#[derive(Debug, Clone, Default)]
pub struct AccountUpdate {
    /// Another parent.
    pub parent: Option<Name>,
    /// How many days the figures of a day are kept; `Some(None)` shares the parent's number again.
    pub keep_days: Option<Option<u32>>,
    /// Labels to be added. The account then has labels of its own, which begin as those of its parent.
    pub labels: BTreeMap<String, String>,
    /// The parent's labels are shared again.
    pub share_labels: bool,
    /// How many connections to shared services it may have at once; `Some(None)` for any number.
    pub connections: Option<Option<u32>>,
    /// What becomes of further ones.
    pub on_limit: Option<OnLimit>,
    /// How many sockets its containers may have at once; `Some(None)` for any number.
    pub sockets: Option<Option<u32>>,
    /// How many processes and threads, in the same way.
    pub pids: Option<Option<u32>>,
}

/// Returns the name of a container's account, as verbs accept it.
pub(crate) fn label(config: &Config) -> String {
    match holder(&config.spec, &config.id) {
        Holder::Root => ROOT.to_owned(),
        Holder::Own(_) => format!("@{}", config.name),
        Holder::Made(name) => name.to_string(),
    }
}

/// Returns a container's account as gates know it. Root stands for an account whose record is gone or damaged: that
/// stops no container.
pub(crate) fn party(ground: &Ground, config: &Config) -> Result<Party> {
    let (number, owner) = match holder(&config.spec, &config.id) {
        Holder::Root => (Number::ROOT, 0),
        Holder::Own(id) => (Number::own(config.ids), Client::owner(&id)),
        Holder::Made(name) => match store::made(ground, &name) {
            Ok(Some(made)) => (made.number, made.owner()),
            Ok(None) | Err(Error::AccountDamaged { .. }) => (Number::ROOT, 0),
            Err(e) => return Err(e),
        },
    };
    Ok(Party { account: number.0, owner })
}

/// Keeps the account of a new container from being removed; `None` where it is not an operator's.
///
/// Errors: there is no such account.
pub(crate) fn reserve(ground: &Ground, spec: &Spec) -> Result<Option<Lock>> {
    let Some(name) = spec.account.as_ref().filter(|name| name.as_str() != ROOT) else {
        return Ok(None);
    };
    let place = Place::of(ground);
    if !place.made().is_dir() {
        return Err(BookError::Missing(name.clone()).into());
    }
    let lock = Lock::share(&place.made())?;
    store::book(ground)?.open(name)?;
    Ok(Some(lock))
}

/// Charges a life whose processes have ended, before its cgroup is removed.
///
/// A charge that cannot be written does not stop the end of a container: an event has its figures.
pub(crate) fn charge_end(
    ground: &Ground,
    id: &ContainerId,
    config: Option<&Config>,
    cgroup: &Cgroup,
    init: Option<&InitRecord>,
) {
    // Without these figures the work is charged to the container's own account.
    let works = Works::read_of(ground, cgroup).unwrap_or_else(|e| {
        let name = config.map_or("", |config| config.name.as_str());
        ground.record("charge_lost", id.as_str(), name, &[("error", e.with_causes())]);
        Works::default()
    });
    charge_cgroup(ground, id, config, cgroup, &works, |counters| {
        let found = match init {
            Some(_) => None,
            None => state::read_init(ground, id)?,
        };
        // Without them they are not counted.
        let sockets = config.and_then(|config| sockets_peak(ground, config).ok()).unwrap_or(0);
        let usage = usage_of(counters, init.or(found.as_ref()));
        Ok(Usage { sockets_peak: sockets, ..usage })
    });
}

/// Returns the number by which the programs that count sockets know a container.
pub(crate) fn slot(config: &Config) -> u32 {
    config.ids.base / IdSlot::IDS
}

/// Returns whether the sockets of a container are or were counted: it has a limit, or its account may have one.
pub(crate) fn may_count_sockets(config: &Config) -> bool {
    config.spec.limits.sockets_max.is_some() || is_made(config)
}

/// The most sockets that a life has had at once; 0 where they are not counted.
fn sockets_peak(ground: &Ground, config: &Config) -> Result<u64> {
    if !may_count_sockets(config) {
        return Ok(0);
    }
    match ground.network()?.socket_counts()? {
        Some(counts) => Ok(counts.peak(slot(config))?.unwrap_or(0)),
        None => Ok(0),
    }
}

/// Charges a trial restore ([`crate::twin`]) whose processes have ended, before its cgroup is removed. The life of
/// a container goes on beside it, so it adds none.
pub(crate) fn charge_trial(ground: &Ground, id: &ContainerId, cgroup: &Cgroup) {
    let config = ground.config(id).ok(); // a damaged one: to root
    let usage = |counters: &Counters| Ok(usage_of(counters, None));
    charge_cgroup(ground, id, config.as_ref(), cgroup, &Works::default(), usage);
}

fn charge_cgroup(
    ground: &Ground,
    id: &ContainerId,
    config: Option<&Config>,
    cgroup: &Cgroup,
    works: &Works,
    usage: impl Fn(&Counters) -> Result<Usage>,
) {
    let read = || -> Result<Option<Charge>> {
        let Some(counters) = cgroup.counters()? else { return Ok(None) };
        let usage = usage(&counters)?;
        // Without its configuration: to its own account, which moves to root when it is removed.
        let own = || Holder::Own(id.clone());
        let to = config.map_or_else(own, |config| holder(&config.spec, id));
        Ok(Some(charge(id, to, &counters, usage, works)?))
    };
    let name = config.map_or("", |config| config.name.as_str());
    let lost = |e: &Error, charge: Option<&Charge>| {
        let mut more = vec![("error", e.with_causes())];
        more.extend(charge.map(|charge| ("charge", charge.line().trim().to_owned())));
        ground.record("charge_lost", id.as_str(), name, &more);
    };
    match read() {
        Ok(None) => {}
        Err(e) => lost(&e, None),
        Ok(Some(charge)) => match append(ground, &charge) {
            Err(e) => lost(&e, Some(&charge)),
            Ok(bytes) if bytes > CHARGES_BYTES => {
                // Another process may be at it, and the verbs that show accounts report errors.
                let _ = store::try_lock(ground).map(|lock| lock.map(|_alone| fold(ground, false)));
            }
            Ok(_) => {}
        },
    }
}

fn charge(
    id: &ContainerId,
    to: Holder,
    counters: &Counters,
    usage: Usage,
    works: &Works,
) -> Result<Charge> {
    let boot = proc::boot_id().map_err(Error::call("cannot read boot id"))?.to_owned();
    let life = Life { container: id.clone(), boot, cgroup: counters.cgroup };
    let mut work = works.of(counters.cgroup);
    fit(&mut work, usage.cpu_ns);
    let held = Held::default();
    Ok(Charge { to, life, unix_ms: now_unix_ms(), usage, work, held })
}

/// Returns the use of a life. A start that was interrupted, and has no record, is none.
fn usage_of(counters: &Counters, init: Option<&InitRecord>) -> Usage {
    Usage {
        cpu_ns: counters.cpu_ns,
        // These come with the work of the charge.
        cpu_given_ns: 0,
        cpu_taken_ns: 0,
        cpu_user_ns: counters.cpu_user_ns,
        page_faults: counters.page_faults,
        major_faults: counters.major_faults,
        read_bytes: counters.read_bytes,
        written_bytes: counters.written_bytes,
        memory_peak_bytes: counters.memory_peak_bytes,
        tasks_peak: counters.tasks_peak,
        // From other programs.
        sockets_peak: 0,
        wakes: init.filter(|init| !init.unready).map_or(0, |init| init.wakes.into()),
        lives: init.filter(|init| !init.unready).map_or(0, |_| 1),
    }
}

/// Appends a charge, and returns the size of the file.
fn append(ground: &Ground, charge: &Charge) -> Result<u64> {
    let place = Place::of(ground);
    let path = place.charges();
    let step = || -> std::io::Result<u64> {
        loop {
            let mut options = File::options();
            let opened = options.append(true).create(true).mode(FILE_MODE).open(&path);
            let mut file = match opened {
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                    place.make().map_err(std::io::Error::other)?;
                    continue;
                }
                other => other?,
            };
            lock_file(&file)?;
            let meta = file.metadata()?;
            // Its charges have been added to balances meanwhile.
            if std::os::unix::fs::MetadataExt::nlink(&meta) == 0 {
                continue;
            }
            let line = charge.line();
            file.write_all(line.as_bytes())?;
            return Ok(meta.len() + line.len() as u64);
        }
    };
    step().map_err(Error::file("cannot write", &path))
}

fn lock_file(file: &File) -> std::io::Result<()> {
    loop {
        match flock(file, FlockOperation::LockExclusive) {
            Err(rustix::io::Errno::INTR) => {}
            other => return Ok(other?),
        }
    }
}

/// Containers that were gone before charges were read.
struct Before {
    /// Containers with a life, or about to begin or end one.
    started: BTreeSet<ContainerId>,
    /// Balances of accounts that are gone: containers', and those that an operator has closed.
    left: Vec<Holder>,
    /// All balances.
    balances: BTreeSet<Holder>,
}

impl Before {
    fn look(ground: &Ground, book: &Book) -> Result<Self> {
        let started = ground.started()?.into_iter().collect();
        let balances: BTreeSet<Holder> = store::holders(ground)?.into_iter().collect();
        let is_left = |holder: &&Holder| match holder {
            Holder::Root => false,
            Holder::Own(id) => !ground.dir(id).exists(),
            Holder::Made(name) => book.find(name).map_or(true, |account| account.is_closing),
        };
        let left = balances.iter().filter(is_left).cloned().collect();
        Ok(Self { started, left, balances })
    }
}

/// Adds all charges to the balances, and with `running` the use of running containers up to now. The caller holds
/// the lock of the balances.
///
/// Returns whether a balance of a container was made that is gone by now, so that the next call moves it.
///
/// ORDER: first the balances on the disk, then the removal of the charges.
pub(crate) fn fold(ground: &Ground, running: bool) -> Result<bool> {
    let book = store::book(ground)?;
    let mut before = Before::look(ground, &book)?;
    let known = before.balances.clone();
    let taken = Place::of(ground).taken();
    // Of a fold that was killed. Newer charges are not read yet, so nothing is forgotten.
    if let Some((_file, lines)) = take_charges(ground, &taken)? {
        let changed = add(ground, &book, &before, (&lines, &[]), false)?;
        before.balances.extend(changed);
        disk::remove(&taken)?;
    }
    // ORDER: locked until it is removed: a writer that has it open waits, and then opens the next file.
    let read = take_charges(ground, &Place::of(ground).charges())?;
    let (_file, lines) = read.map_or((None, Vec::new()), |(file, lines)| (Some(file), lines));
    let running = if running { read_running(ground)? } else { Vec::new() };
    // ORDER: after the charges: an account exists before its containers do.
    let book = store::book(ground)?;
    let changed = add(ground, &book, &before, (&lines, &running), true)?;
    disk::remove(&taken)?;
    Ok(changed.iter().any(|holder| match holder {
        Holder::Own(id) => !known.contains(holder) && !ground.dir(id).exists(),
        Holder::Root | Holder::Made(_) => false,
    }))
}

/// Locks a file with charges, renames it to `charges.taken`, and reads it.
fn take_charges(ground: &Ground, path: &Path) -> Result<Option<(File, Vec<Charge>)>> {
    let mut file = match File::open(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(Error::file("cannot read", path))?,
    };
    lock_file(&file).map_err(Error::file("cannot lock", path))?;
    let taken = Place::of(ground).taken();
    fs::rename(path, &taken).map_err(Error::file("cannot rename", path))?;
    let mut bytes = Vec::new();
    let read = (&mut file).take(CHARGES_BYTES_MAX).read_to_end(&mut bytes);
    read.map_err(Error::file("cannot read", &taken))?;
    let (lines, damaged) = Charge::read_all(&bytes);
    if damaged > 0 {
        // A killed command leaves part of a line, and the next one repeats the charge.
        ground.record("charge_lost", "", "", &[("lines", damaged.to_string())]);
    }
    Ok(Some((file, lines)))
}

/// Reads the counters of running containers.
fn read_running(ground: &Ground) -> Result<Vec<Charge>> {
    let mut all = Vec::new();
    // ORDER: the parts before the whole: what was worked meanwhile is in the next reading.
    let works = Works::read(ground)?;
    // Without them, sockets are not counted, and all else is.
    let counts = ground.network().ok().and_then(|network| network.socket_counts().ok().flatten());
    // The end of a container with a damaged configuration is charged all the same.
    for config in ground.started_configs()? {
        let config = config?;
        if let Some(charge) = read_one(ground, &config, &works, counts.as_ref())? {
            all.push(charge);
        }
    }
    Ok(all)
}

/// Returns the processes and threads of the containers of each account, by its number.
pub(crate) fn tasks(ground: &Ground) -> Result<BTreeMap<u32, u64>> {
    let mut all = BTreeMap::new();
    for config in ground.started_configs()? {
        let config = config?;
        *all.entry(party(ground, &config)?.account).or_default() += tasks_of(ground, &config.id)?;
    }
    Ok(all)
}

/// Those of one container; 0 after its end.
fn tasks_of(ground: &Ground, id: &ContainerId) -> Result<u64> {
    match ground.cgroups()?.find(id.as_str())? {
        Some(cgroup) => Ok(cgroup.tasks()?.unwrap_or(0)),
        None => Ok(0),
    }
}

/// The counters of one life, beside the account that is charged for it.
#[derive(Debug, Clone)]
pub struct LifeReading {
    /// Name of the account.
    pub account: String,
    /// The life.
    pub life: Life,
    /// Its use up to now, or to its end.
    pub usage: Usage,
    /// Its work for other accounts, and their names.
    pub work: Vec<(String, Work)>,
    /// Whether it goes on.
    pub is_running: bool,
    /// Processes and threads that it has now.
    pub tasks: u64,
}

/// Returns readings of the lives that go on, and of ended ones that are in no balance yet. Nothing is charged.
///
/// A life that ends and is added to its balance meanwhile can be missing.
pub(crate) fn readings(ground: &Ground) -> Result<Vec<LifeReading>> {
    let place = Place::of(ground);
    // ORDER: before the charges: a life that ends meanwhile is read again there.
    let running = read_running(ground)?;
    let mut ended = Vec::new();
    // ORDER: this one first: it becomes the other.
    for path in [place.charges(), place.taken()] {
        let mut file = match File::open(&path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
            other => other.map_err(Error::file("cannot read", &path))?,
        };
        let mut bytes = Vec::new();
        let read = (&mut file).take(CHARGES_BYTES_MAX).read_to_end(&mut bytes);
        read.map_err(Error::file("cannot read", &path))?;
        ended.extend(Charge::read_all(&bytes).0);
    }
    let book = store::book(ground)?;
    let has_work = running.iter().chain(&ended).any(|charge| !charge.work.is_empty());
    let own: BTreeMap<u64, ContainerId> = match has_work {
        true => ground.ids()?.into_iter().map(|id| (Client::owner(&id), id)).collect(),
        false => BTreeMap::new(),
    };
    let own_name = |id: &ContainerId| match ground.config(id) {
        Ok(config) => format!("@{}", config.name),
        // Its balance moves to root.
        Err(_) => ROOT.to_owned(),
    };
    let name_of = |client: &Client| match (made(&book, client), own.get(&client.owner)) {
        (Some(account), _) => account.name.to_string(),
        (None, Some(id)) => own_name(id),
        (None, None) => ROOT.to_owned(),
    };
    let reading = |charge: Charge, tasks: Option<u64>| {
        let account = match &charge.to {
            Holder::Root => ROOT.to_owned(),
            Holder::Made(name) => name.to_string(),
            Holder::Own(id) => own_name(id),
        };
        let work = charge.work.iter().map(|work| (name_of(&work.client), *work)).collect();
        let (life, usage, is_running) = (charge.life, charge.usage, tasks.is_some());
        LifeReading { account, life, usage, work, is_running, tasks: tasks.unwrap_or(0) }
    };
    let mut all = Vec::new();
    for charge in running {
        let tasks = tasks_of(ground, &charge.life.container)?;
        all.push(reading(charge, Some(tasks)));
    }
    all.extend(ended.into_iter().map(|charge| reading(charge, None)));
    Ok(all)
}

/// Returns the account of a client, if it is made and exists. Its number may be that of a removed account.
fn made<'b>(book: &'b Book, client: &Client) -> Option<&'b Account> {
    book.iter().find(|one| one.number == client.number && one.owner() == client.owner)
}

/// Returns made accounts with the one above each.
pub(crate) fn parents(ground: &Ground) -> Result<BTreeMap<String, String>> {
    let book = store::book(ground)?;
    let parent =
        |account: &Account| Some((account.name.to_string(), account.parent.as_ref()?.to_string()));
    Ok(book.iter().filter_map(parent).collect())
}

/// Reads the counters of one container, which may end meanwhile; then `None`, and its end is charged.
fn read_one(
    ground: &Ground,
    config: &Config,
    works: &Works,
    counts: Option<&Counts>,
) -> Result<Option<Charge>> {
    let counters = || -> Result<Option<Counters>> {
        match ground.cgroups()?.find(config.id.as_str())? {
            Some(cgroup) => Ok(cgroup.counters()?),
            None => Ok(None),
        }
    };
    let Some(read) = counters()? else { return Ok(None) };
    let mut sockets = (0, 0);
    if let Some(counts) = counts.filter(|_| may_count_sockets(config)) {
        let now = counts.of(slot(config))?.map_or(0, |count| count.sockets);
        sockets = (now, counts.peak(slot(config))?.unwrap_or(0));
    }
    let init = state::read_init(ground, &config.id)?;
    // ORDER: the first of its cgroups is made first and removed first. If it is the same, so were all others and
    // the record.
    if counters()?.is_none_or(|again| again.cgroup != read.cgroup) {
        return Ok(None);
    }
    let to = holder(&config.spec, &config.id);
    let usage = Usage { sockets_peak: sockets.1, ..usage_of(&read, init.as_ref()) };
    let charge = charge(&config.id, to, &read, usage, works)?;
    Ok(Some(Charge { held: Held { tasks: read.tasks, sockets: sockets.0 }, ..charge }))
}

/// Adds charges of the file, and of running containers, to the balances, and then with `last` moves those of
/// accounts that are gone. Returns the accounts of the charges, and those that their lives have worked for.
fn add(
    ground: &Ground,
    book: &Book,
    before: &Before,
    (filed, running): (&[Charge], &[Charge]),
    last: bool,
) -> Result<BTreeSet<Holder>> {
    let now = now_unix_ms();
    let today = Day::of_unix_ms(now);
    let boot = proc::boot_id().map_err(Error::call("cannot read boot id"))?;
    let to = |charge: &Charge| match &charge.to {
        // A record that was removed by hand. Verbs remove one only after its last charge.
        Holder::Made(name) if book.find(name).is_err() => Holder::Root,
        to => to.clone(),
    };
    let mut changed = Changed { ground, balances: BTreeMap::new() };
    let mut clients = Clients { ground, book, balances: &before.balances, own: None };
    type OfHolder<'c> = (Vec<&'c Charge>, Vec<(&'c Charge, &'c Work)>);
    let mut by_holder: BTreeMap<Holder, OfHolder<'_>> = BTreeMap::new();
    for charge in filed.iter().chain(running) {
        by_holder.entry(to(charge)).or_default().0.push(charge);
        for work in &charge.work {
            let client = clients.find(&mut changed, charge, &work.client)?;
            by_holder.entry(client).or_default().1.push((charge, work));
        }
    }
    for (holder, (charges, works)) in &by_holder {
        let days = store::keep_days(book, holder);
        changed.change(holder, |balance| {
            charges.iter().for_each(|charge| balance.apply(charge));
            balance.note(now, held(charges));
            works.iter().for_each(|(charge, work)| balance.take(charge, work));
            if last {
                balance.forget_ended(boot, (filed, running), |id| before.started.contains(id));
            }
            balance.keep_from(today.earlier(days));
        })?;
    }
    let mut gone = Vec::new();
    if last {
        for holder in &before.left {
            let to = store::heir(book, holder);
            let balance = changed.read(holder)?.clone();
            let key = store::key(book, holder);
            changed.change(&to, |heir| heir.absorb(&key, &balance))?;
            gone.push(holder.clone());
        }
        // A key can be found again as long as its balance exists, or a charge for it may have made that again.
        let keys = before.balances.iter().chain(by_holder.keys()).map(|h| store::key(book, h));
        let keys: BTreeSet<String> = keys.collect();
        let heirs: Vec<Holder> = changed.balances.keys().cloned().collect();
        for heir in heirs {
            changed.change(&heir, |heir| heir.forget_absorbed(|key| !keys.contains(key)))?;
        }
    }
    changed.write(&gone)?;
    if last {
        store::remove_closed(ground, book)?;
    }
    Ok(by_holder.into_keys().collect())
}

/// What lives have together at these readings.
fn held(charges: &[&Charge]) -> Held {
    charges.iter().fold(Held::default(), |sum, charge| Held {
        tasks: sum.tasks.saturating_add(charge.held.tasks),
        sockets: sum.sockets.saturating_add(charge.held.sockets),
    })
}

/// The accounts behind the clients that gates know.
struct Clients<'f> {
    ground: &'f Ground,
    book: &'f Book,
    /// All balances.
    balances: &'f BTreeSet<Holder>,
    /// Containers by the owner of their own account, once one is looked for.
    own: Option<BTreeMap<u64, ContainerId>>,
}

impl Clients<'_> {
    /// Returns the account that work is charged to. Of an account that is gone it is the one that has its balance, and
    /// so continues it.
    ///
    /// ORDER: of a container that is gone, the balance that has taken this work before, and only then root. Its own
    /// balance may be made by its last charge after root has taken the work.
    fn find(
        &mut self,
        changed: &mut Changed<'_>,
        charge: &Charge,
        client: &Client,
    ) -> Result<Holder> {
        if client.number == Number::ROOT {
            return Ok(Holder::Root);
        }
        if let Some(made) = made(self.book, client) {
            return Ok(Holder::Made(made.name.clone()));
        }
        if client.owner != 0
            && let Some(id) = self.own()?.get(&client.owner)
        {
            return Ok(Holder::Own(id.clone()));
        }
        let may_have_taken = |holder: &&Holder| match holder {
            Holder::Own(id) => Client::owner(id) == client.owner,
            Holder::Root | Holder::Made(_) => true,
        };
        for holder in self.balances.iter().filter(may_have_taken) {
            if changed.read(holder)?.has_taken(&charge.life, client) {
                return Ok(holder.clone());
            }
        }
        Ok(Holder::Root)
    }

    /// Containers that exist.
    fn own(&mut self) -> Result<&BTreeMap<u64, ContainerId>> {
        if self.own.is_none() {
            let all = self.ground.ids()?.into_iter();
            self.own = Some(all.map(|id| (Client::owner(&id), id)).collect());
        }
        Ok(self.own.as_ref().expect("it was made above"))
    }
}

/// Balances that are being changed.
struct Changed<'g> {
    ground: &'g Ground,
    /// With the content on the disk.
    balances: BTreeMap<Holder, (Balance, Balance)>,
}

impl Changed<'_> {
    fn read(&mut self, holder: &Holder) -> Result<&mut Balance> {
        if !self.balances.contains_key(holder) {
            let read = store::read(self.ground, holder)?;
            self.balances.insert(holder.clone(), (read.clone(), read));
        }
        let found = self.balances.get_mut(holder).map(|(_, balance)| balance);
        Ok(found.expect("it was inserted above"))
    }

    fn change(&mut self, holder: &Holder, change: impl FnOnce(&mut Balance)) -> Result<()> {
        change(self.read(holder)?);
        Ok(())
    }

    /// Writes what has changed, and then removes the balances that have moved.
    fn write(self, gone: &[Holder]) -> Result<()> {
        let changed = self
            .balances
            .into_iter()
            .filter(|(holder, (was, is))| !gone.contains(holder) && was != is);
        let changed: Vec<(Holder, Balance)> = changed.map(|(h, (_, is))| (h, is)).collect();
        store::write(self.ground, &changed)?;
        gone.iter().try_for_each(|holder| store::remove(self.ground, holder))
    }
}

/// Makes an account.
pub(crate) fn create(ground: &Ground, new: NewAccount) -> Result<Number> {
    let place = Place::of(ground);
    place.make()?;
    let _alone = Lock::take(&place.made())?;
    let mut book = store::book(ground)?;
    let number = match new.number {
        Some(number) => Number::global(number)?,
        None => {
            let given = store::given(ground)?;
            let next = book.next_number(given);
            next.ok_or_else(|| Error::Invalid("all 65,535 account numbers were given".into()))?
        }
    };
    let name = new.name.clone();
    let (keep_days, labels) = (new.keep_days, new.labels);
    let mut account = Account::new(number, new.name, new.parent, now_unix_ms());
    (account.keep_days, account.labels) = (keep_days, labels);
    book.add(account)?;
    if new.number.is_none() {
        store::write_given(ground, number)?;
    }
    store::write_account(ground, book.find(&name)?)?;
    if new.number.is_some() {
        record_change(ground);
    }
    Ok(number)
}

/// Changes an account.
pub(crate) fn set(ground: &Ground, name: &Name, update: AccountUpdate) -> Result<()> {
    let place = Place::of(ground);
    place.make()?;
    let _alone = Lock::take(&place.made())?;
    let mut book = store::book(ground)?;
    let shared = book.labels(name);
    if let Some(parent) = &update.parent {
        book.move_below(name, parent)?;
        rules::check_move(ground, &book, name, parent)?;
    }
    let is_root = name.as_str() == ROOT;
    let account = book.find_mut(name)?;
    if is_root && (update.share_labels || update.keep_days == Some(None)) {
        return Err(Error::Invalid(
            "account 'root' has no parent to share with: give a value".into(),
        ));
    }
    if let Some(days) = update.keep_days {
        account.keep_days = days;
    }
    if is_root && (update.sockets.is_some() || update.pids.is_some()) {
        return Err(Error::Invalid(
            "account 'root' has no limit of sockets or processes: set one for an account below it"
                .into(),
        ));
    }
    account.sockets = update.sockets.unwrap_or(account.sockets);
    account.pids = update.pids.unwrap_or(account.pids);
    if update.share_labels {
        account.labels = None;
    }
    if !update.labels.is_empty() {
        account.labels.get_or_insert(shared).extend(update.labels);
    }
    let is_limited = update.connections.is_some() || update.on_limit.is_some();
    if is_limited {
        if is_root {
            return Err(Error::Invalid(
                "account 'root' has no limit of connections: set one for an account below it"
                    .into(),
            ));
        }
        let connections = match update.connections {
            Some(connections) => connections,
            None => account.limit.map(|limit| limit.connections),
        };
        let on_limit = update.on_limit.or(account.limit.map(|limit| limit.on_limit));
        account.limit = connections.map(|connections| ConnectionLimit {
            connections,
            on_limit: on_limit.unwrap_or_default(),
        });
        if account.limit.is_none() && update.on_limit.is_some() {
            return Err(Error::Invalid(format!(
                "account '{name}' has no limit of connections: give one with --connections"
            )));
        }
    }
    store::write_account(ground, account)?;
    if is_limited {
        // A daemon enforces it from now on.
        ground.record("account_limit", "", "", &[("account", name.to_string())]);
    }
    Ok(())
}

/// An account with a limit, of a container or above its account.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Above {
    pub(crate) number: u32,
    pub(crate) name: Name,
    pub(crate) most: u32,
}

/// Returns the accounts with a limit of sockets among that of a container and those above it.
pub(crate) fn socket_limits_above(ground: &Ground, config: &Config) -> Result<Vec<Above>> {
    limits_above(ground, config, |account| account.sockets)
}

/// The same for limits of tasks.
pub(crate) fn task_limits_above(ground: &Ground, config: &Config) -> Result<Vec<Above>> {
    limits_above(ground, config, |account| account.pids)
}

/// A record that is gone or damaged ends the line: that stops no container.
fn limits_above(
    ground: &Ground,
    config: &Config,
    limit: impl Fn(&Account) -> Option<u32>,
) -> Result<Vec<Above>> {
    let mut all = Vec::new();
    let mut next = match holder(&config.spec, &config.id) {
        Holder::Made(name) => Some(name),
        Holder::Root | Holder::Own(_) => None,
    };
    // The bound ends a circle that was made by hand.
    for _ in 0..DEPTH_MAX {
        let Some(name) = next.filter(|name| name.as_str() != ROOT) else { break };
        next = match store::made(ground, &name) {
            Ok(Some(account)) => {
                let above = |most| Above { number: account.number.0, name: name.clone(), most };
                all.extend(limit(&account).map(above));
                account.parent
            }
            Ok(None) | Err(Error::AccountDamaged { .. }) => None,
            Err(e) => return Err(e),
        };
    }
    Ok(all)
}

/// Returns whether an account has a limit of tasks.
pub(crate) fn has_task_limits(ground: &Ground) -> Result<bool> {
    Ok(store::book(ground)?.iter().any(|account| account.pids.is_some()))
}

/// Returns whether an account of the operator is charged for a container.
pub(crate) fn is_made(config: &Config) -> bool {
    matches!(holder(&config.spec, &config.id), Holder::Made(_))
}

/// Returns the limits of sockets by the numbers of the accounts.
pub(crate) fn socket_limits(ground: &Ground) -> Result<BTreeMap<u32, u32>> {
    let book = store::book(ground)?;
    let limits = book.iter().filter(|account| !account.is_closing);
    Ok(limits.filter_map(|account| Some((account.number.0, account.sockets?))).collect())
}

/// Limits of connections: for the number of each account the accounts with a limit among it and those above it.
pub type ConnectionLimits = BTreeMap<u32, Vec<(u32, ConnectionLimit)>>;

/// Returns the limits of all accounts that have one.
pub(crate) fn limits(ground: &Ground) -> Result<ConnectionLimits> {
    let book = store::book(ground)?;
    let of = |account: &Account| {
        let limits = book.limits(&account.name).into_iter();
        (account.number.0, limits.map(|(number, limit)| (number.0, limit)).collect::<Vec<_>>())
    };
    Ok(book.iter().map(of).filter(|(_, limits)| !limits.is_empty()).collect())
}

/// Removes an account without containers and accounts below it. With `merge` its balance moves to its parent.
pub(crate) fn remove(ground: &Ground, name: &Name, merge: bool) -> Result<()> {
    let place = Place::of(ground);
    place.make()?;
    let _alone = Lock::take(&place.made())?;
    let mut book = store::book(ground)?;
    let account = book.find(name)?;
    let Some(parent) = account.parent.clone() else {
        return Err(BookError::Root.into());
    };
    let refuse = |why: String| Err(Error::AccountInUse { name: name.to_string(), why });
    let below: Vec<_> = book.children(name).map(|child| child.name.to_string()).collect();
    if !below.is_empty() {
        let below = below.join(", ");
        return refuse(format!(
            "accounts are below it ({below}): remove them, or move them with `dormouse account set --parent`"
        ));
    }
    if let Some(rule) = rules::naming(ground, name)? {
        return refuse(format!(
            "{rule} of the installed rules names it: apply others first (`dormouse rules show`, `dormouse rules \
             apply`)"
        ));
    }
    let holder = Holder::Made(name.clone());
    let containers = show::containers(ground)?.remove(&holder).unwrap_or_default();
    if !containers.is_empty() {
        let names: Vec<_> = containers.iter().map(|name| name.to_string()).collect();
        return refuse(format!(
            "containers are charged to it ({}): remove these first",
            names.join(", ")
        ));
    }
    let _balances = store::lock(ground)?;
    // With the work of services for it, which may be in the kernel alone.
    fold(ground, true)?;
    if !merge && !store::read(ground, &holder)?.total.is_none() {
        return refuse(format!(
            "it has a balance: see `dormouse account report {name}`, and add it to account '{parent}' with \
             `dormouse account rm --merge {name}`"
        ));
    }
    book.find_mut(name)?.is_closing = true;
    store::write_account(ground, book.find(name)?)?;
    if Number::GLOBAL.contains(&book.find(name)?.number.0) {
        record_change(ground);
    }
    fold(ground, false).map(drop)
}

/// Adds all charges, and the use of running containers, to the balances.
pub(crate) fn update(ground: &Ground) -> Result<()> {
    Place::of(ground).make()?;
    let _alone = store::lock(ground)?;
    if fold(ground, true)? {
        fold(ground, false)?;
    }
    gates::forget_gone(ground)
}
