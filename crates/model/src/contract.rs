//! The contract of a container for one resource: the part that is guaranteed, the share of the free part,
//! and the most that may be used.
//!
//! Limits are stored in [`Limits`], one number each. A contract is the same numbers together, with the
//! defaults filled in, and the checks of numbers that contradict each other, for CPU and for memory.
//!
//! ```text
//! reserve <= entitlement <= max
//! entitlement = reserve + (CPUs of the host - all reserves) x weight / all weights
//! ```
//!
//! The terms are those of Linux-VServer (Soltesz et al., EuroSys 2007, section 3.2): reservation, share and
//! hard limit of a token bucket.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::size::{Size, span_us};
use crate::{CpuBurst, Invalid, Limits, parse_cpus};

/// The period in which a quota of CPU time is counted by default: the kernel's own default.
pub const CPU_PERIOD_US: u32 = 100_000;
/// LIMIT: the bounds of the kernel for a period (sched/core.c, `min_cfs_quota_period`,
/// `max_cfs_quota_period`).
const CPU_PERIOD_RANGE_US: std::ops::RangeInclusive<u32> = 1_000..=1_000_000;
/// LIMIT: the kernel refuses a smaller quota (`min_cfs_quota_period`).
const CPU_QUOTA_LEAST_US: u64 = 1_000;
/// The default weight (cgroups(7)).
pub const CPU_WEIGHT: u32 = 100;

/// Parses a period of CPU quota: `10ms`, or a bare number of microseconds as podman takes it.
pub fn parse_cpu_period_us(text: &str) -> Result<u32, Invalid> {
    let period = span_us(text).filter(|us| CPU_PERIOD_RANGE_US.contains(us));
    period.ok_or_else(|| {
        let expected = "a time from 1ms to 1s, or 1000 to 1000000 microseconds";
        Invalid::new("CPU period", text, expected)
    })
}

/// Parses a reservation in thousandths of a CPU; `0` is none.
pub fn parse_cpu_reserve(text: &str) -> Result<u32, Invalid> {
    match text.trim() {
        "0" => Ok(0),
        text => parse_cpus(text).map_err(|_| {
            let expected = "a decimal number of at least 0.01, or 0 for none";
            Invalid::new("CPU reservation", text, expected)
        }),
    }
}

/// Parses a rate for idle hosts in thousandths of a CPU; `0` is none.
pub fn parse_cpu_idle_rate(text: &str) -> Result<u32, Invalid> {
    match text.trim() {
        "0" => Ok(0),
        text => parse_cpus(text).map_err(|_| {
            let expected = "a decimal number of at least 0.01, or 0 for none";
            Invalid::new("CPU idle rate", text, expected)
        }),
    }
}

/// The contract for CPU time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cpu {
    /// Guaranteed CPU time per time, in thousandths of one CPU; 0 is no guarantee.
    pub reserve_milli: u32,
    /// Share of the CPU time that no reservation takes, 1 to 10,000; 0 is none: the container runs while CPUs are idle.
    pub weight: u32,
    /// The most CPU time per time, in thousandths of one CPU.
    pub max_milli: Option<u32>,
    /// The most CPU time per time while the host has idle CPUs, in thousandths of one CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_rate_milli: Option<u32>,
    /// Period in which the most is counted.
    pub period_us: u32,
    /// The requested burst; `None` is the default, a whole quota.
    pub burst: Option<CpuBurst>,
}

impl Cpu {
    /// The contract in a container's limits.
    pub fn of(limits: &Limits) -> Self {
        Self {
            reserve_milli: limits.cpu_reserve_milli.unwrap_or(0),
            weight: limits.cpu_weight.unwrap_or(CPU_WEIGHT),
            max_milli: limits.cpu_max_milli,
            idle_rate_milli: limits.cpu_idle_rate_milli.filter(|milli| *milli > 0),
            period_us: limits.cpu_period_us.unwrap_or(CPU_PERIOD_US),
            burst: limits.cpu_burst,
        }
    }

    /// CPU time per period, in microseconds; `None` without a limit.
    pub fn quota_us(&self) -> Option<u64> {
        self.max_milli.map(|milli| u64::from(milli) * u64::from(self.period_us) / 1000)
    }

    /// CPU time that may be saved up, in microseconds; 0 without a limit. The default is one quota: a
    /// container that works in short bursts is then not throttled below its limit.
    pub fn burst_us(&self) -> u64 {
        let quota = self.quota_us().unwrap_or(0);
        match self.burst {
            None => quota,
            Some(CpuBurst::Us(us)) => us.into(),
            Some(CpuBurst::Percent(percent)) => quota * u64::from(percent) / 100,
        }
    }

    /// Refuses numbers that contradict each other. The message has the number that does not fit.
    pub fn check(&self) -> Result<(), Contradiction> {
        if !CPU_PERIOD_RANGE_US.contains(&self.period_us) {
            return Err(Contradiction::Period { period: Time(self.period_us.into()) });
        }
        if self.weight == 0 && self.reserve_milli > 0 {
            return Err(Contradiction::ReserveOfIdle { reserve: Cpus(self.reserve_milli) });
        }
        if let Some(rate) = self.idle_rate_milli {
            let rate = Cpus(rate);
            match self.max_milli {
                None => return Err(Contradiction::IdleRateAlone { rate }),
                Some(max) if rate.0 <= max => {
                    return Err(Contradiction::IdleRateBelowMax { rate, max: Cpus(max) });
                }
                Some(_) => {}
            }
        }
        let Some(quota) = self.quota_us() else {
            return match self.burst {
                Some(CpuBurst::Us(1..) | CpuBurst::Percent(1..)) => Err(Contradiction::Burst),
                _ => Ok(()),
            };
        };
        if quota < CPU_QUOTA_LEAST_US {
            let milli = self.max_milli.unwrap_or(0);
            return Err(Contradiction::Quota {
                max: Cpus(milli),
                period: Time(self.period_us.into()),
                quota: Time(quota),
                least: Time((1_000_000 / u64::from(milli.max(1))).max(CPU_QUOTA_LEAST_US)),
            });
        }
        let burst = self.burst_us();
        if burst > quota {
            return Err(Contradiction::BurstAboveQuota {
                burst: Time(burst),
                quota: Time(quota),
                period: Time(self.period_us.into()),
            });
        }
        match self.max_milli {
            Some(max) if self.reserve_milli > max => Err(Contradiction::ReserveAboveMax {
                reserve: Cpus(self.reserve_milli),
                max: Cpus(max),
            }),
            _ => Ok(()),
        }
    }

    /// Refuses a reservation or an idle rate that a host with so many CPUs, or a CPU set of so many, can never keep.
    /// `host_milli` is what the host can promise at all.
    pub fn check_on(&self, host_milli: u32, cpuset: Option<u32>) -> Result<(), Contradiction> {
        if let (Some(rate), Some(cpus)) = (self.idle_rate_milli, cpuset)
            && rate > cpus.saturating_mul(1000)
        {
            return Err(Contradiction::IdleRateAboveCpuset { rate: Cpus(rate), cpus });
        }
        let reserve = Cpus(self.reserve_milli);
        if let Some(cpus) = cpuset.filter(|cpus| self.reserve_milli > cpus.saturating_mul(1000)) {
            return Err(Contradiction::ReserveAboveCpuset { reserve, cpus });
        }
        match self.reserve_milli > 0 && self.reserve_milli > host_milli {
            true => Err(Contradiction::ReserveAboveHost { reserve, host: Cpus(host_milli) }),
            false => Ok(()),
        }
    }
}

impl fmt::Display for Cpu {
    /// `0.5 reserved, weight 100, at most 1 (burst 100ms per 100ms), 2 while CPUs are idle`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.reserve_milli > 0 {
            write!(f, "{} reserved, ", Cpus(self.reserve_milli))?;
        }
        match self.weight {
            0 => write!(f, "only while CPUs are idle")?,
            weight => write!(f, "weight {weight}")?,
        }
        if let Some(max) = self.max_milli {
            write!(f, ", at most {}", Cpus(max))?;
            if self.burst_us() > 0 {
                let (burst, period) = (Time(self.burst_us()), Time(self.period_us.into()));
                write!(f, " (burst {burst} per {period})")?;
            }
            if let Some(rate) = self.idle_rate_milli {
                write!(f, ", {} while CPUs are idle", Cpus(rate))?;
            }
        }
        Ok(())
    }
}

/// The contract for memory: `min <= high <= max`, and `low` is reclaimed last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Guaranteed memory; 0 is no guarantee.
    pub min_bytes: u64,
    /// Memory above which the container is slowed down.
    pub high_bytes: Option<u64>,
    /// The most memory.
    pub max_bytes: Option<u64>,
}

impl Memory {
    /// The contract in a container's limits.
    pub fn of(limits: &Limits) -> Self {
        Self {
            min_bytes: limits.memory_min_bytes.unwrap_or(0),
            high_bytes: limits.memory_high_bytes,
            max_bytes: limits.memory_max_bytes,
        }
    }

    /// Refuses numbers that contradict each other. The message has the number that does not fit.
    pub fn check(&self) -> Result<(), Contradiction> {
        let above = |option, smaller: u64, than: &'static str, larger: Option<u64>| match larger {
            Some(larger) if smaller > larger => Err(Contradiction::MemoryAbove {
                option,
                bytes: Size(smaller),
                than,
                limit: Size(larger),
            }),
            _ => Ok(()),
        };
        above("--memory-min", self.min_bytes, "--memory", self.max_bytes)?;
        above("--memory-min", self.min_bytes, "--memory-high", self.high_bytes)?;
        above("--memory-high", self.high_bytes.unwrap_or(0), "--memory", self.max_bytes)
    }
}

/// An amount of CPUs in thousandths, shown as `0.5`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cpus(pub u32);

impl fmt::Display for Cpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", f64::from(self.0) / 1000.0)
    }
}

/// A time in microseconds, shown as `20ms` or `1500us`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Time(pub u64);

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            us if us.is_multiple_of(1000) => write!(f, "{}ms", us / 1000),
            us => write!(f, "{us}us"),
        }
    }
}

/// Numbers of a contract that contradict each other or the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Contradiction {
    /// More is reserved than may be used.
    #[error(
        "a CPU reservation of {reserve} is more than the limit of {max}: lower --cpu-reserve or raise --cpus"
    )]
    ReserveAboveMax {
        /// The reservation.
        reserve: Cpus,
        /// The limit.
        max: Cpus,
    },
    /// A reservation of a container that runs only while CPUs are idle.
    #[error(
        "a CPU reservation of {reserve} contradicts --cpu-weight idle: give --cpu-weight 1 or more, or \
         --cpu-reserve 0"
    )]
    ReserveOfIdle {
        /// The reservation.
        reserve: Cpus,
    },
    /// A rate for idle hosts without a limit that it may exceed.
    #[error("a CPU idle rate of {rate} needs a limit that it may exceed: give --cpus")]
    IdleRateAlone {
        /// The rate.
        rate: Cpus,
    },
    /// A rate for idle hosts that is no more than the limit.
    #[error(
        "a CPU idle rate of {rate} is not more than the limit of {max}: raise --cpu-idle-rate, lower --cpus, or \
         give --cpu-idle-rate 0"
    )]
    IdleRateBelowMax {
        /// The rate.
        rate: Cpus,
        /// The limit.
        max: Cpus,
    },
    /// A rate for idle hosts above the CPU set.
    #[error(
        "a CPU idle rate of {rate} is more than the {cpus} CPUs of the CPU set: lower --cpu-idle-rate or add CPUs \
         to --cpuset-cpus"
    )]
    IdleRateAboveCpuset {
        /// The rate.
        rate: Cpus,
        /// Number of CPUs in the set.
        cpus: u32,
    },
    /// More is reserved than the CPU set has.
    #[error(
        "a CPU reservation of {reserve} is more than the {cpus} CPUs of the CPU set: lower --cpu-reserve or \
         add CPUs to --cpuset-cpus"
    )]
    ReserveAboveCpuset {
        /// The reservation.
        reserve: Cpus,
        /// Number of CPUs in the set.
        cpus: u32,
    },
    /// More is reserved than the host can promise.
    #[error(
        "a CPU reservation of {reserve} is more than the {host} CPUs that this host can promise: lower \
         --cpu-reserve (`[contract] host-cpu-reserve` in config.toml is the part of the host)"
    )]
    ReserveAboveHost {
        /// The reservation.
        reserve: Cpus,
        /// The CPUs without the part that is kept for the host.
        host: Cpus,
    },
    /// One limit of memory is above another.
    #[error("{option} {bytes} is more than {than} {limit}: lower {option} or raise {than}")]
    MemoryAbove {
        /// The option that is too large.
        option: &'static str,
        /// Its value.
        bytes: Size,
        /// The option that bounds it.
        than: &'static str,
        /// Its value.
        limit: Size,
    },
    /// More memory is guaranteed than the host can promise.
    #[error(
        "a guarantee of {min} of memory is more than the {host} that this host can promise: lower --memory-min \
         (`[contract] host-memory-reserve` in config.toml is the part of the host)"
    )]
    MinAboveHost {
        /// The guarantee.
        min: Size,
        /// The memory without the part that is kept for the host.
        host: Size,
    },
    /// A burst without a limit.
    #[error("a CPU burst needs a limit that it may exceed: give --cpus")]
    Burst,
    /// A burst above the quota, which the kernel refuses.
    #[error(
        "a CPU burst of {burst} is more than the quota of {quota} per {period}: lower --cpu-burst or raise --cpus"
    )]
    BurstAboveQuota {
        /// The burst.
        burst: Time,
        /// The quota.
        quota: Time,
        /// The period.
        period: Time,
    },
    /// A period that the kernel refuses.
    #[error("a CPU period of {period} is not within 1ms to 1s: change --cpu-period")]
    Period {
        /// The period.
        period: Time,
    },
    /// A quota that the kernel refuses.
    #[error(
        "{max} CPUs are {quota} per {period}, and the kernel counts at least 1ms: raise --cpus, or choose a \
         --cpu-period of at least {least}"
    )]
    Quota {
        /// The limit.
        max: Cpus,
        /// The period.
        period: Time,
        /// The quota.
        quota: Time,
        /// The shortest period for this limit.
        least: Time,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpu(reserve_milli: u32, max_milli: Option<u32>) -> Cpu {
        Cpu::of(&Limits {
            cpu_reserve_milli: Some(reserve_milli),
            cpu_max_milli: max_milli,
            ..Limits::default()
        })
    }

    #[test]
    fn container_without_cpu_options_has_default_contract() {
        let contract = Cpu::of(&Limits::default());
        assert_eq!(contract.to_string(), "weight 100");
        assert_eq!((contract.quota_us(), contract.burst_us()), (None, 0));
        contract.check().unwrap();
        contract.check_on(0, Some(0)).unwrap();
    }

    #[test]
    fn burst_is_one_quota_by_default_and_follows_the_limit() {
        let mut contract = cpu(500, Some(1000));
        assert_eq!((contract.quota_us(), contract.burst_us()), (Some(100_000), 100_000));
        assert_eq!(
            contract.to_string(),
            "0.5 reserved, weight 100, at most 1 (burst 100ms per 100ms)"
        );
        contract.burst = Some(CpuBurst::Percent(50));
        assert_eq!(contract.burst_us(), 50_000);
        contract.max_milli = Some(300);
        assert_eq!(contract.burst_us(), 15_000);
        contract.burst = Some(CpuBurst::Us(0));
        assert_eq!(contract.burst_us(), 0);
        assert_eq!(contract.to_string(), "0.5 reserved, weight 100, at most 0.3");
    }

    #[test]
    fn contradiction_is_refused_with_the_number_that_does_not_fit() {
        let said = |contract: Cpu| contract.check().unwrap_err().to_string();
        let text = said(cpu(2000, Some(1500)));
        assert!(text.contains("reservation of 2 ") && text.contains("limit of 1.5"), "{text}");
        cpu(1500, Some(1500)).check().unwrap();

        let text = said(Cpu { burst: Some(CpuBurst::Us(60_000)), ..cpu(0, Some(500)) });
        assert!(text.contains("burst of 60ms") && text.contains("50ms per 100ms"), "{text}");
        Cpu { burst: Some(CpuBurst::Us(50_000)), ..cpu(0, Some(500)) }.check().unwrap();
        let text = said(Cpu { burst: Some(CpuBurst::Percent(1)), ..cpu(0, None) });
        assert!(text.contains("give --cpus"), "{text}");
        Cpu { burst: Some(CpuBurst::Us(0)), ..cpu(0, None) }.check().unwrap();

        for period_us in [0, 999, 1_000_001, u32::MAX] {
            let text = said(Cpu { period_us, ..cpu(0, Some(1000)) });
            assert!(text.contains("1ms to 1s"), "{text}");
        }
        let text = said(Cpu { period_us: 10_000, ..cpu(0, Some(50)) });
        assert!(text.contains("500us per 10ms") && text.contains("at least 20ms"), "{text}");
        Cpu { period_us: 20_000, ..cpu(0, Some(50)) }.check().unwrap();
    }

    #[test]
    fn idle_rate_that_contradicts_the_limit_is_refused_with_both_numbers() {
        let with = |max, rate| Cpu { idle_rate_milli: Some(rate), ..cpu(0, max) };
        with(Some(500), 1500).check().unwrap();
        assert_eq!(
            with(Some(500), 1500).to_string(),
            "weight 100, at most 0.5 (burst 50ms per 100ms), 1.5 while CPUs are idle"
        );
        let said = |contract: Cpu| contract.check().unwrap_err().to_string();
        let text = said(with(None, 1500));
        assert!(text.contains("idle rate of 1.5 ") && text.contains("give --cpus"), "{text}");
        for rate in [499, 500] {
            let text = said(with(Some(500), rate));
            assert!(text.contains("limit of 0.5"), "{text}");
        }
        let text = with(Some(500), 1500).check_on(1900, Some(1)).unwrap_err().to_string();
        assert!(text.contains("1.5") && text.contains("the 1 CPUs"), "{text}");
        with(Some(500), 1500).check_on(0, Some(2)).unwrap();
        let none = Limits { cpu_idle_rate_milli: Some(0), ..Limits::default() };
        assert_eq!(Cpu::of(&none).idle_rate_milli, None);
        Cpu::of(&none).check().unwrap();
        assert_eq!([parse_cpu_idle_rate("0"), parse_cpu_idle_rate("1.5")], [Ok(0), Ok(1500)]);
        for bad in ["", "0.001", "-1", "x"] {
            assert!(parse_cpu_idle_rate(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn reservation_without_a_share_of_idle_container_is_refused() {
        let idle = Cpu { weight: 0, ..cpu(0, None) };
        idle.check().unwrap();
        assert_eq!(idle.to_string(), "only while CPUs are idle");
        let text = Cpu { weight: 0, ..cpu(500, None) }.check().unwrap_err().to_string();
        assert!(
            text.contains("reservation of 0.5") && text.contains("--cpu-weight idle"),
            "{text}"
        );
    }

    #[test]
    fn reservation_above_cpu_set_or_host_is_refused() {
        let text = cpu(1500, None).check_on(1900, Some(1)).unwrap_err().to_string();
        assert!(text.contains("1.5") && text.contains("the 1 CPUs of the CPU set"), "{text}");
        let text = cpu(1950, None).check_on(1900, None).unwrap_err().to_string();
        assert!(text.contains("1.95") && text.contains("the 1.9 CPUs"), "{text}");
        cpu(1900, None).check_on(1900, Some(2)).unwrap();
    }

    #[test]
    fn values_are_parsed_or_refused() {
        assert_eq!("20ms".parse(), Ok(CpuBurst::Us(20_000)));
        assert_eq!("1500".parse(), Ok(CpuBurst::Us(1500)));
        assert_eq!("1500us".parse(), Ok(CpuBurst::Us(1500)));
        assert_eq!("0".parse(), Ok(CpuBurst::Us(0)));
        assert_eq!("100%".parse(), Ok(CpuBurst::Percent(100)));
        for bad in ["", "%", "101%", "-1", "+5", "5%%", "1.5ms", "us", "99999999999"] {
            assert!(bad.parse::<CpuBurst>().is_err(), "{bad}");
        }
        assert_eq!(parse_cpu_period_us("10ms"), Ok(10_000));
        assert_eq!(parse_cpu_period_us("50000"), Ok(50_000));
        for bad in ["", "999", "1001ms", "2s", "1000001", "-1"] {
            assert!(parse_cpu_period_us(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_cpu_reserve("0"), Ok(0));
        assert_eq!(parse_cpu_reserve("0.25"), Ok(250));
        for bad in ["", "0.001", "-1", "x"] {
            assert!(parse_cpu_reserve(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn memory_limits_that_contradict_each_other_are_refused_with_both_numbers() {
        let of = |min, high, max| Memory { min_bytes: min, high_bytes: high, max_bytes: max };
        assert!(of(1 << 20, Some(1 << 20), Some(1 << 20)).check().is_ok());
        assert!(of(1 << 40, None, None).check().is_ok());
        let refused = |memory: Memory| memory.check().unwrap_err().to_string();
        let text = refused(of(300 << 20, None, Some(200 << 20)));
        assert!(text.contains("--memory-min 300m is more than --memory 200m"), "{text}");
        let text = refused(of(300 << 20, Some(200 << 20), None));
        assert!(text.contains("--memory-min 300m is more than --memory-high 200m"), "{text}");
        let text = refused(of(0, Some(1 << 30), Some(200 << 20)));
        assert!(text.contains("--memory-high 1g is more than --memory 200m"), "{text}");
    }

    #[test]
    fn sizes_are_shown_as_they_are_given() {
        let shown =
            [0, 1000, 1 << 10, 1 << 20, 3 << 30, (5 << 20) + 17].map(|n| Size(n).to_string());
        assert_eq!(shown, ["0", "1000", "1k", "1m", "3g", "5m"]);
    }
}
