//! Network of a container: its stack, its addresses, names and ports, and drop rules in force.
//!
//! Uses `ground`, `state`, `gating`, `silence` and `bandwidth`.

use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use dormouse_kernel::call::Namespace;
use dormouse_kernel::cgroup::Cgroup;
use dormouse_kernel::{Errno, namespace, sysctl};
use dormouse_model::{Config, ContainerId, Name, NetMode, State};
use dormouse_network::Domain;
use dormouse_stacks::stack;
use rustix::fs::{Mode, OFlags};

use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::spec::Update;
use crate::{bandwidth, gating, silence, state};

/// The network stack a container starts in.
pub(crate) enum Net {
    Host {
        netns: OwnedFd,
        sys: OwnedFd,
    },
    /// The newborn makes its own stack.
    None {
        sys: OwnedFd,
    },
    Domain(Domain),
    /// A stack of its own, connected to a domain. The newborn makes it, unless sockets of the sleeping container have
    /// kept it.
    Private {
        domain: Domain,
        kept: Option<OwnedFd>,
    },
}

impl Net {
    /// Its namespace, if it exists already.
    pub(crate) fn netns(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Host { netns, .. } => Some(netns.as_fd()),
            Self::None { .. } => None,
            Self::Private { kept, .. } => kept.as_ref().map(AsFd::as_fd),
            Self::Domain(domain) => Some(domain.netns.as_fd()),
        }
    }

    /// The cookie of the domain's stack.
    pub(crate) fn netns_cookie(&self) -> Option<u64> {
        match self {
            Self::Domain(domain) => Some(domain.netns_cookie()),
            Self::Host { .. } | Self::None { .. } | Self::Private { .. } => None,
        }
    }

    /// Whether the newborn makes its stack.
    pub(crate) fn is_new(&self) -> bool {
        matches!(self, Self::None { .. } | Self::Private { kept: None, .. })
    }

    /// The sysfs of this stack, if the stack exists already.
    pub(crate) fn sys(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Host { sys, .. } | Self::None { sys } => Some(sys.as_fd()),
            Self::Domain(domain) => Some(domain.sys.as_fd()),
            Self::Private { .. } => None,
        }
    }
}

/// Returns the trust domain, made if missing.
pub(crate) fn make_domain(ground: &Ground, name: &Name) -> Result<Domain> {
    Ok(ground.network()?.domain(name, || silence::rules_of(ground, name))?)
}

/// Returns the network stack a container starts in; made if missing.
pub(crate) fn open(ground: &Ground, config: &Config) -> Result<Net> {
    Ok(match &config.spec.net {
        NetMode::Host => {
            let open = |path: &str, flags| {
                rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())
                    .map_err(|e| Error::file("cannot open", path)(e.into()))
            };
            let netns = open("/proc/thread-self/ns/net", OFlags::RDONLY)?;
            Net::Host { netns, sys: open("/sys", OFlags::PATH | OFlags::DIRECTORY)? }
        }
        NetMode::None => Net::None { sys: ground.network()?.empty_sys()? },
        NetMode::Address { domain } => Net::Domain(make_domain(ground, domain)?),
        NetMode::Private { domain } => {
            Net::Private { domain: make_domain(ground, domain)?, kept: None }
        }
    })
}

/// Connects a container's own stack to its domain, and registers its names. Returns the sysfs of its stack.
/// `again`: it may be connected already.
pub(crate) fn connect(
    ground: &Ground,
    config: &Config,
    domain: &Domain,
    netns: BorrowedFd<'_>,
    again: bool,
) -> Result<OwnedFd> {
    let sys = ground.network()?.connect(domain, &config.id, netns, &config.addresses, again)?;
    if again {
        // The pair may be new, after an interrupted wake.
        set_sysctls(config, netns)?;
    }
    bandwidth::enter(ground, config, domain)?;
    add_names(ground, config, domain)?;
    Ok(sys)
}

/// Sets the sysctls of a container's configuration that are settings of a stack, in a stack that no newborn makes.
pub(crate) fn set_sysctls(config: &Config, netns: BorrowedFd<'_>) -> Result<()> {
    let of_stack = |name: &str| {
        (sysctl::owner(name) == Some(Namespace::Net)).then(|| sysctl::path(name)).flatten()
    };
    let all = config.spec.sysctls.iter();
    let own: Vec<_> = all
        .filter_map(|(name, value)| Some((Path::new("/proc/sys").join(of_stack(name)?), value)))
        .collect();
    if own.is_empty() {
        return Ok(());
    }
    let set = || {
        own.iter().try_for_each(|(path, value)| {
            fs::write(path, value).map_err(Error::file("cannot set", path))
        })
    };
    namespace::visit(netns, Namespace::Net, set)
        .map_err(|e| Error::file("cannot enter", "a network namespace")(e.into()))?
}

/// Registers the container in its domain, by its addresses and its names.
pub(crate) fn enter(
    ground: &Ground,
    config: &Config,
    cgroup: &Cgroup,
    domain: &Domain,
) -> Result<()> {
    enter_unnamed(ground, config, cgroup, domain)?;
    name(ground, config, domain)
}

/// Registers a container that has no name yet in its domain, by its addresses.
pub(crate) fn enter_unnamed(
    ground: &Ground,
    config: &Config,
    cgroup: &Cgroup,
    domain: &Domain,
) -> Result<()> {
    let v2 = cgroup.v2_id().ok_or_else(|| {
        Error::Invalid(
            "address networking needs a cgroup v2 hierarchy to be mounted: use --net none or \
             --net host"
                .into(),
        )
    })?;
    Ok(ground.network()?.enter(domain, &config.id, v2, &config.addresses)?)
}

/// Gives a registered container its names in its domain, and its part of the uplink.
pub(crate) fn name(ground: &Ground, config: &Config, domain: &Domain) -> Result<()> {
    bandwidth::enter(ground, config, domain)?;
    add_names(ground, config, domain)
}

fn add_names(ground: &Ground, config: &Config, domain: &Domain) -> Result<()> {
    // The first name is the canonical one: `hostname -f` prints it.
    let names = [config.spec.hostname.as_str(), config.name.as_str(), config.id.short()];
    Ok(ground.network()?.hosts_add(domain, &config.id, &names, &config.addresses)?)
}

/// Brings the domain's resolv.conf up to date with the host's. A failure leaves it as it was.
pub(crate) fn refresh(ground: &Ground, config: &Config) {
    if let NetMode::Address { domain } = &config.spec.net
        && let Ok(domain) = make_domain(ground, domain)
        && let Ok(network) = ground.network()
    {
        network.resolv_conf(&domain);
    }
}

/// Announces a container without processes to its domain, if it is in one: routes its addresses
/// there and adds its names.
pub(crate) fn announce(ground: &Ground, config: &Config) -> Result<()> {
    let Some(domain) = config.spec.net.domain() else { return Ok(()) };
    let network = ground.network()?;
    let domain = make_domain(ground, domain)?;
    network.announce(&domain, &config.id, &config.addresses)?;
    gating::announce(ground, config)?;
    add_names(ground, config, &domain)
}

/// Leads ports of the host to a container.
pub(crate) fn publish_ports(ground: &Ground, config: &Config) -> Result<()> {
    if config.spec.publish.is_empty() {
        return Ok(());
    }
    Ok(ground.network()?.publish(&config.id, &config.spec.publish, &config.addresses)?)
}

/// Releases the registrations of `enter` and `publish_ports`.
pub(crate) fn leave(ground: &Ground, id: &ContainerId, config: Option<&Config>) -> Result<()> {
    let network = ground.network()?;
    // Each step is taken, also after an error of the one before: a pair that is left would have its address led to it.
    let mut done: Result<()> = Ok(());
    if config.is_none_or(|c| !c.spec.publish.is_empty()) {
        done = network.unpublish(id).map_err(Error::from);
    }
    done = done.and(bandwidth::leave(ground, config));
    if config.is_none_or(|c| matches!(c.spec.net, NetMode::Private { .. })) {
        done = done.and(network.disconnect(id).map_err(Error::from));
    }
    done?;
    Ok(network.leave(id)?)
}

/// Adds the new name of a container to its domain, if it runs.
pub(crate) fn rename(ground: &Ground, config: &Config) -> Result<()> {
    let Some(domain) = config.spec.net.domain() else { return Ok(()) };
    if !state::observe(ground, config)?.is_alive() {
        return Ok(());
    }
    add_names(ground, config, &make_domain(ground, domain)?)
}

/// Adds and releases addresses; those of a running container at once.
pub(crate) fn update_addresses(
    ground: &Ground,
    config: &mut Config,
    update: &Update,
    state: State,
) -> Result<()> {
    let has_processes = state.is_alive() && state != State::Asleep;
    let domain = match config.spec.net.clone() {
        NetMode::Address { domain } => domain,
        // LIMIT: the addresses inside are set at its start. The stack of a sleeping container keeps them, and its pair
        // the routes to them.
        NetMode::Private { .. } if state.is_alive() => {
            let why = format!(
                "the addresses of a container with --net private cannot change while it is {state}: stop it first"
            );
            return Err(Error::Invalid(why));
        }
        NetMode::Private { domain } => domain,
        NetMode::Host | NetMode::None => {
            let why = "only a container with --net address or --net private has addresses";
            return Err(Error::Invalid(why.into()));
        }
    };
    let network = ground.network()?;
    bandwidth::forget(ground, config, &update.ip_rm)?;
    config.addresses = network.update(&config.id, &update.ip_add, &update.ip_rm)?;
    if has_processes && let Some(cgroup) = ground.cgroups()?.find(config.id.as_str())? {
        // ORDER: before the container can use them: a connection keeps the account that it found.
        gating::announce(ground, config)?;
        enter(ground, config, &cgroup, &make_domain(ground, &domain)?)?;
    }
    Ok(())
}

/// Ends the mapping of the keeper's cgroup to a container.
pub(crate) fn end_lending(ground: &Ground) -> Result<()> {
    match ground.cgroups()?.keeper_v2()? {
        Some((_, id)) => Ok(ground.network()?.end_lending(id)?),
        None => Ok(()),
    }
}

/// Applies the recorded rules in a stack, which may not have them.
pub(crate) fn keep_quiet(ground: &Ground, config: &Config, net: &Net) -> Result<()> {
    let path = silence::path(ground, &config.id);
    let rules = fs::read_to_string(&path).map_err(Error::file("cannot read", &path))?;
    match net {
        Net::None { .. } => Ok(()),
        Net::Host { netns, .. } => Ok(dormouse_checkpoint::keep_quiet(netns, &rules)?),
        Net::Domain(domain) | Net::Private { domain, .. } => {
            Ok(dormouse_checkpoint::keep_quiet(&domain.netns, &rules)?)
        }
    }
}

/// Removes ended connections (TIME_WAIT) of a container without processes, which would keep its sockets from their
/// addresses ([`stack::forget_ended_here`]). `ports` are those of the sockets of a checkpoint; all, if `None`.
///
/// ORDER: after [`enter`], which makes sure that the addresses are the container's. All others in the stack of a
/// domain belong to other containers, and all in a stack of its own to it. The host's stack has no address of a
/// container, and a new stack no connection.
pub(crate) fn forget_ended(
    ground: &Ground,
    config: &Config,
    net: &Net,
    ports: Option<&[u16]>,
) -> Result<()> {
    let Some(netns) = net.netns() else { return Ok(()) };
    let is_first_start = || ports.is_none() && !ground.dir(&config.id).join("exit.json").exists();
    if ports.is_some_and(<[u16]>::is_empty) || is_first_start() {
        return Ok(()); // most starts and wakes
    }
    let enter = |e: Errno| Error::file("cannot enter", "a network namespace")(e.into());
    let netns = netns.try_clone_to_owned().map_err(Error::file("cannot copy", "a descriptor"))?;
    if !stack::inside_of(&netns, || Ok(stack::has_ended_here())).map_err(enter)? {
        return Ok(()); // most starts
    }
    let own = ground.network()?.own(&config.addresses)?;
    let is_private = matches!(net, Net::Private { .. });
    let forget = || Ok(stack::forget_ended_here(|address| is_private || own.has(address), ports));
    stack::inside_of(&netns, forget).map(drop).map_err(enter)
}

/// Ends the drop rules of connections that will not be restored, so that their peers are reset.
pub(crate) fn end_quiet(ground: &Ground, config: &Config) -> Result<()> {
    if !silence::is_quiet(ground, &config.id) {
        return Ok(());
    }
    if let Some(domain) = config.spec.net.domain()
        && ground.network()?.find_domain(domain)?.is_none()
    {
        return silence::forget(ground, &config.id); // the stack is gone, too
    }
    end_quiet_in(ground, config, &open(ground, config)?)
}

/// Ends the drop rules in a given stack.
pub(crate) fn end_quiet_in(ground: &Ground, config: &Config, net: &Net) -> Result<()> {
    if !silence::is_quiet(ground, &config.id) {
        return Ok(());
    }
    let id = config.id.as_str();
    match net {
        Net::None { .. } => {}
        Net::Host { netns, .. } => dormouse_checkpoint::end_quiet(netns, id)?,
        Net::Domain(domain) | Net::Private { domain, .. } => {
            dormouse_checkpoint::end_quiet(&domain.netns, id)?;
        }
    }
    silence::forget(ground, &config.id)
}
