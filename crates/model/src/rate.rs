//! The most that a container may read from and write to a disk, per second.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::{Invalid, Size, parse_bytes};

/// LIMIT: rates of one container, over all disks.
const MOST_RATES: usize = 64;
/// LIMIT: the smallest rate of bytes. A request has up to some MB, and a process that waits for one can be neither
/// frozen nor killed meanwhile.
const LEAST_BPS: u64 = 64 << 10;
/// LIMIT: the kernel counts requests in 32 bits, and takes the largest number for "no limit". v1 takes a larger one
/// modulo 2^32 (block/blk-throttle.c, `tg_set_conf_uint()`).
const MOST_IOPS: u64 = u32::MAX as u64 - 1;

/// What a [`DiskRate`] counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiskRateKind {
    /// Bytes read.
    ReadBps,
    /// Bytes written.
    WriteBps,
    /// Requests that read.
    ReadIops,
    /// Requests that write.
    WriteIops,
}

impl DiskRateKind {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::ReadBps, Self::WriteBps, Self::ReadIops, Self::WriteIops];

    /// The option of the command line.
    pub fn option(self) -> &'static str {
        match self {
            Self::ReadBps => "--io-read-bps",
            Self::WriteBps => "--io-write-bps",
            Self::ReadIops => "--io-read-iops",
            Self::WriteIops => "--io-write-iops",
        }
    }

    /// Whether writes are counted.
    pub fn is_write(self) -> bool {
        matches!(self, Self::WriteBps | Self::WriteIops)
    }

    fn is_bytes(self) -> bool {
        matches!(self, Self::ReadBps | Self::WriteBps)
    }
}

/// The most of one kind on one disk (`io.max`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskRate {
    /// What is counted.
    pub kind: DiskRateKind,
    /// A block device, or a part of one, whose whole disk is meant; `None` is the disk with the container's storage.
    pub device: Option<PathBuf>,
    /// Bytes or requests per second; 0 is no limit.
    pub most: u64,
}

impl DiskRate {
    /// Parses `[DEVICE:]RATE`: a size such as `10m`, or a number of requests.
    pub fn parse(kind: DiskRateKind, text: &str) -> Result<Self, Invalid> {
        let expected = match kind.is_bytes() {
            true => "[DEVICE:]RATE with at least 64k bytes per second, or 0 for no limit",
            false => "[DEVICE:]RATE with 1 to 4294967294 requests per second, or 0 for no limit",
        };
        let bad = || Invalid::new("disk rate", text, expected);
        let (device, rate) = match text.trim().rsplit_once(':') {
            Some((device, rate)) => (Some(PathBuf::from(device)), rate),
            None => (None, text.trim()),
        };
        let most = match kind.is_bytes() {
            true => parse_bytes(rate).map_err(|_| bad())?,
            // parse() would take a sign.
            false if rate.bytes().all(|b| b.is_ascii_digit()) => rate.parse().map_err(|_| bad())?,
            false => return Err(bad()),
        };
        let it = Self { kind, device, most };
        it.check().map_err(|_| bad())?;
        Ok(it)
    }

    /// Refuses a rate that no kernel takes, also one that was not parsed here.
    pub fn check(&self) -> Result<(), Invalid> {
        let bad = |expected| Err(Invalid::new("disk rate", self.to_string(), expected));
        let is_path = |device: &PathBuf| {
            let bytes = device.as_os_str().as_encoded_bytes();
            device.is_absolute() && bytes.len() < 4096 && !bytes.contains(&0)
        };
        if !self.device.as_ref().is_none_or(is_path) {
            return bad("a device by its absolute path");
        }
        let range = if self.kind.is_bytes() { LEAST_BPS..=u64::MAX >> 1 } else { 1..=MOST_IOPS };
        match self.most == 0 || range.contains(&self.most) {
            true => Ok(()),
            false => bad("0, or at least 64k bytes or 1 request per second"),
        }
    }

    /// Checks all rates of a container.
    pub fn check_all(rates: &[Self]) -> Result<(), Invalid> {
        if rates.len() > MOST_RATES {
            let number = rates.len().to_string();
            return Err(Invalid::new("number of disk rates", number, "at most 64"));
        }
        rates.iter().try_for_each(Self::check)
    }

    /// Replaces rates of the same kind on the same device. A rate of 0 removes one.
    pub fn replace(rates: &mut Vec<Self>, new: &[Self]) {
        for rate in new {
            rates.retain(|it| it.kind != rate.kind || it.device != rate.device);
            if rate.most > 0 {
                rates.push(rate.clone());
            }
        }
    }
}

impl fmt::Display for DiskRate {
    /// `write 10m/s on /dev/sda`, `read 100 requests/s`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.kind.is_write() { "write " } else { "read " })?;
        match self.kind.is_bytes() {
            true => write!(f, "{}/s", Size(self.most))?,
            false => write!(f, "{} requests/s", self.most)?,
        }
        self.device.as_ref().map_or(Ok(()), |device| write!(f, " on {}", device.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(kind: DiskRateKind, text: &str) -> Result<String, Invalid> {
        DiskRate::parse(kind, text).map(|rate| rate.to_string())
    }

    #[test]
    fn rates_are_read_with_and_without_a_device() {
        use DiskRateKind::{ReadIops, WriteBps};
        assert_eq!(parse(WriteBps, "10m").unwrap(), "write 10m/s");
        assert_eq!(parse(WriteBps, "/dev/sda:1mb").unwrap(), "write 1m/s on /dev/sda");
        let by_path = "/dev/disk/by-path/pci-0000:00:1f.2-ata-1:64k";
        assert_eq!(
            parse(WriteBps, by_path).unwrap(),
            "write 64k/s on /dev/disk/by-path/pci-0000:00:1f.2-ata-1"
        );
        assert_eq!(parse(ReadIops, "/dev/sda:100").unwrap(), "read 100 requests/s on /dev/sda");
        assert_eq!(parse(ReadIops, "0").unwrap(), "read 0 requests/s");
        for bad in ["", "x", "-1", "+1", ":1m", "sda:1m", "/dev/sda:", "63k", "1", "8388608t"] {
            assert!(parse(WriteBps, bad).is_err(), "{bad}");
        }
        for bad in ["", "1k", "-1", "+1", "4294967295", "18446744073709551617", "/dev/\0:1"] {
            assert!(parse(ReadIops, bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn rate_replaces_that_of_its_kind_and_device() {
        let rate = |kind, device: Option<&str>, most| DiskRate {
            kind,
            device: device.map(PathBuf::from),
            most,
        };
        let [read, write, ..] = DiskRateKind::ALL;
        let mut rates = vec![rate(read, None, 1 << 20), rate(write, None, 2 << 20)];
        let new =
            [rate(read, Some("/dev/sda"), 3 << 20), rate(write, None, 0), rate(read, None, 5)];
        DiskRate::replace(&mut rates, &new);
        assert_eq!(rates, [new[0].clone(), new[2].clone()]);
        assert!(DiskRate::check_all(&rates).is_err(), "5 bytes per second");
        assert!(DiskRate::check_all(&vec![new[0].clone(); 65]).is_err());
    }

    #[test]
    fn stored_rate_has_its_kind_by_name() {
        let rate = DiskRate::parse(DiskRateKind::WriteIops, "/dev/sda:7").unwrap();
        let json = serde_json::to_string(&rate).unwrap();
        assert_eq!(json, r#"{"kind":"write-iops","device":"/dev/sda","most":7}"#);
        assert_eq!(serde_json::from_str::<DiskRate>(&json).unwrap(), rate);
    }
}
