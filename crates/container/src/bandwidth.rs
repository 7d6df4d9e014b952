//! Bandwidth of a container at the uplink of its domain.
//!
//! A class is made when a container enters its domain, and is removed when the container stops, before `RUN/c/ID`
//! is. An asleep container keeps its class, whose bandwidth others use meanwhile.
//!
//! Uses `ground`.

use std::net::IpAddr;

use dormouse_model::{Bandwidth, Config, Limits};
use dormouse_network::Domain;

use crate::error::{Error, Result};
use crate::ground::Ground;

/// Whether a change of limits is one of bandwidth.
pub(crate) fn is_in(changed: &Limits) -> bool {
    changed.net_rate_bps.or(changed.net_ceil_bps).is_some() || changed.net_weight.is_some()
}

/// The bandwidth that can be guaranteed.
pub(crate) fn uplink_bps(ground: &Ground) -> Result<u64> {
    ground.network()?.uplink_bps().ok_or_else(|| {
        let why = "--net-rate needs the bandwidth of the uplink: set 'uplink-rate' under [network] in config.toml, \
                   such as \"950mbit\" for a device of 1 Gbit/s";
        Error::Invalid(why.into())
    })
}

/// Refuses a contract that contradicts itself, or that this host can never keep.
pub(crate) fn check(ground: &Ground, limits: &Limits) -> Result<()> {
    let Some(bandwidth) = Bandwidth::of(limits) else { return Ok(()) };
    bandwidth.check().map_err(dormouse_kernel::cgroup::CgroupError::from)?;
    if bandwidth.rate_bps > 0 {
        uplink_bps(ground)?;
    }
    Ok(())
}

/// Gives a container that enters its domain its part of the uplink.
pub(crate) fn enter(ground: &Ground, config: &Config, domain: &Domain) -> Result<()> {
    let Some(bandwidth) = Bandwidth::of(&config.spec.limits) else { return Ok(()) };
    Ok(ground.network()?.shape(domain, &config.addresses, &bandwidth)?)
}

/// Sets the contract on record of a running container, or removes its class.
pub(crate) fn set(ground: &Ground, config: &Config) -> Result<()> {
    let Some(domain) = domain(ground, config)? else { return Ok(()) };
    match Bandwidth::of(&config.spec.limits) {
        Some(bandwidth) => Ok(ground.network()?.shape(&domain, &config.addresses, &bandwidth)?),
        None => Ok(ground.network()?.unshape(&domain, &config.addresses)?),
    }
}

/// Removes the class of a container that has stopped.
pub(crate) fn leave(ground: &Ground, config: Option<&Config>) -> Result<()> {
    let Some(config) = config else { return Ok(()) };
    if Bandwidth::of(&config.spec.limits).is_none() {
        return Ok(());
    }
    match domain(ground, config)? {
        Some(domain) => Ok(ground.network()?.unshape(&domain, &config.addresses)?),
        None => Ok(()), // the classes are gone with it
    }
}

/// Removes the class of a running container that is about to have no contract.
///
/// ORDER: before the record changes. A container that ends after a kill in between has a contract on record, by which
/// its end removes a class; a container that runs gets its class again.
pub(crate) fn give_up(ground: &Ground, before: &Config, after: &Config) -> Result<()> {
    match Bandwidth::of(&after.spec.limits) {
        None => leave(ground, Some(before)),
        Some(_) => Ok(()),
    }
}

/// Takes addresses that a container is to lose out of its class.
pub(crate) fn forget(ground: &Ground, config: &Config, addresses: &[IpAddr]) -> Result<()> {
    if addresses.is_empty() || Bandwidth::of(&config.spec.limits).is_none() {
        return Ok(());
    }
    let network = ground.network()?;
    let first = config.addresses.first().map(|it| network.indices(&[*it])).transpose()?;
    let mut own = Vec::new();
    for address in addresses.iter().filter(|it| config.addresses.contains(it)) {
        // Its first address stays: its removal is refused later.
        if Some(network.indices(&[*address])?) != first {
            own.push(*address);
        }
    }
    if own.is_empty() {
        return Ok(());
    }
    match domain(ground, config)? {
        Some(domain) => Ok(ground.network()?.unshape(&domain, &own)?),
        None => Ok(()),
    }
}

fn domain(ground: &Ground, config: &Config) -> Result<Option<Domain>> {
    match config.spec.net.domain() {
        Some(domain) => Ok(ground.network()?.find_domain(domain)?),
        None => Ok(None),
    }
}
