//! `/etc/hosts` and `/etc/resolv.conf` of a domain, bind-mounted into its containers.
//!
//! Both files keep their inode for as long as the domain exists. The hosts file is a header of 512
//! bytes and a record of 256 bytes per container: one line of 128 for IPv4, one for IPv6, blanks
//! when free. A container is added and removed by writing its record in place, independent of the
//! number of the others. Free records are a stack in `hosts.free`, which the lock of the file
//! protects.
//!
//! LIMIT: names that do not fit in a line together with the address (about 80 bytes) are left out.
//! With many thousands of containers every look-up reads megabytes; then a name server is due.

use std::fs::{self, File, OpenOptions};
use std::net::IpAddr;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

use crate::error::{Error, Result};

const HEADER_BYTES: usize = 512;
const LINE_BYTES: usize = 128;
const RECORD_BYTES: usize = 2 * LINE_BYTES;

/// A hosts file.
pub(crate) struct Hosts {
    path: PathBuf,
}

/// The address with its names, in their order. The name `key`, by which records are known, always fits.
fn line(address: Option<&IpAddr>, names: &[&str], key: &str) -> Vec<u8> {
    let mut text = String::new();
    if let Some(address) = address {
        text = address.to_string();
        let mut reserved = key.len() + 1;
        for name in names {
            // A name with white space or a line break would be another record.
            let plain = !name.is_empty() && name.bytes().all(|b| b.is_ascii_graphic() && b != b'#');
            if *name == key {
                reserved = 0;
            }
            if plain && text.len() + name.len() + 1 + reserved < LINE_BYTES {
                text.push(' ');
                text.push_str(name);
            }
        }
    }
    let mut bytes = text.into_bytes();
    bytes.resize(LINE_BYTES - 1, b' ');
    bytes.push(b'\n');
    bytes
}

impl Hosts {
    pub fn new(dir: &Path) -> Self {
        Self { path: dir.join("hosts") }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the file with nothing but its header.
    pub fn create(&self, host: &[IpAddr]) -> Result<()> {
        let mut text =
            String::from("127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n");
        for address in host {
            text += &format!("{address} host.containers.internal host.docker.internal\n");
        }
        let mut bytes = text.into_bytes();
        bytes.resize(HEADER_BYTES - 1, b' ');
        bytes.push(b'\n');
        let _ = fs::remove_file(self.free_path()); // an older boot's
        fs::write(&self.path, bytes).map_err(Error::file("write", &self.path))?;
        make_readable(&self.path)
    }

    fn free_path(&self) -> PathBuf {
        self.path.with_extension("free")
    }

    fn lock(&self) -> Result<File> {
        let path = self.free_path();
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(Error::file("open", &path))?;
        rustix::fs::flock(&file, FlockOperation::LockExclusive)
            .map_err(Error::errno("lock the hosts file", "flock"))?;
        Ok(file)
    }

    /// Writes a container's record: record `old` again, or a free one for 0. Returns its number,
    /// counted from 1. The record is known by the last of its names.
    pub fn set(&self, old: u32, names: &[&str], addresses: &[IpAddr]) -> Result<u32> {
        let key = names.last().copied().unwrap_or_default();
        let mut names = names.to_vec();
        let mut seen = Vec::new();
        names.retain(|n| {
            !seen.contains(n) && {
                seen.push(*n);
                true
            }
        });
        let mut record = line(addresses.iter().find(|a| a.is_ipv4()), &names, key);
        record.extend(line(addresses.iter().find(|a| a.is_ipv6()), &names, key));
        let free = self.lock()?;
        let file = OpenOptions::new()
            .write(true)
            .open(&self.path)
            .map_err(Error::file("open", &self.path))?;
        let number = if old != 0 {
            old
        } else {
            let length = free.metadata().map_err(Error::file("look at", self.free_path()))?.len();
            let mut word = [0; 4];
            match length.checked_sub(4) {
                Some(last) => {
                    free.read_exact_at(&mut word, last)
                        .map_err(Error::file("read", self.free_path()))?;
                    free.set_len(last).map_err(Error::file("cut", self.free_path()))?;
                    u32::from_le_bytes(word)
                }
                None => {
                    let length = file.metadata().map_err(Error::file("look at", &self.path))?.len();
                    (length.saturating_sub(HEADER_BYTES as u64) / RECORD_BYTES as u64) as u32 + 1
                }
            }
        };
        file.write_all_at(&record, position(number)).map_err(Error::file("write", &self.path))?;
        Ok(number)
    }

    /// Returns whether a record exists and has this name.
    pub fn is_of(&self, number: u32, name: &str) -> Result<bool> {
        if number == 0 {
            return Ok(false);
        }
        let file = match File::open(&self.path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(false),
            other => other.map_err(Error::file("open", &self.path))?,
        };
        let mut bytes = [0; LINE_BYTES];
        if file.read_exact_at(&mut bytes, position(number)).is_err() {
            return Ok(false); // behind the end
        }
        Ok(String::from_utf8_lossy(&bytes).split_whitespace().skip(1).any(|n| n == name))
    }

    /// Makes a record free.
    pub fn clear(&self, number: u32) -> Result<()> {
        let free = self.lock()?;
        let file = match OpenOptions::new().write(true).open(&self.path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            other => other.map_err(Error::file("open", &self.path))?,
        };
        let mut blank = line(None, &[], "");
        blank.extend(line(None, &[], ""));
        file.write_all_at(&blank, position(number)).map_err(Error::file("write", &self.path))?;
        let length = free.metadata().map_err(Error::file("look at", self.free_path()))?.len();
        // ORDER: free only once it is blank.
        free.write_all_at(&number.to_le_bytes(), length - length % 4)
            .map_err(Error::file("write", self.free_path()))
    }
}

fn position(number: u32) -> u64 {
    HEADER_BYTES as u64 + u64::from(number - 1) * RECORD_BYTES as u64
}

/// The file with the host's name servers when `/etc/resolv.conf` contains only the host itself.
const RESOLVED: &str = "/run/systemd/resolve/resolv.conf";

/// The host's resolv.conf(5) for a container: name servers on the host's loopback do not exist
/// there. Options and search domains stay.
pub(crate) fn resolv_conf(etc: &str, resolved: Option<&str>) -> String {
    let usable =
        |text: &str| text.lines().filter_map(name_server).any(|server| !is_loopback(server));
    let text = match resolved {
        Some(resolved) if !usable(etc) && usable(resolved) => resolved,
        _ => etc,
    };
    let mut out = String::new();
    for line in text.lines() {
        let keep = match name_server(line) {
            Some(server) => !is_loopback(server),
            None => ["search", "domain", "options"]
                .iter()
                .any(|word| line.split_whitespace().next() == Some(word)),
        };
        if keep {
            out.push_str(line.trim_end());
            out.push('\n');
        }
    }
    if !usable(&out) {
        out.push_str("# the host has no name server that can be reached from here\n");
    }
    out
}

fn name_server(line: &str) -> Option<&str> {
    let mut words = line.split_whitespace();
    (words.next() == Some("nameserver")).then(|| words.next()).flatten()
}

fn is_loopback(server: &str) -> bool {
    let plain = server.split('%').next().unwrap_or(server);
    plain.parse::<IpAddr>().is_ok_and(|a| a.to_canonical().is_loopback())
}

/// Brings the domain's resolv.conf up to date, in place.
pub(crate) fn write_resolv_conf(path: &Path) -> Result<()> {
    let etc = fs::read_to_string("/etc/resolv.conf").unwrap_or_default(); // none: no name server
    let text = resolv_conf(&etc, fs::read_to_string(RESOLVED).ok().as_deref());
    if fs::read_to_string(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    fs::write(path, text).map_err(Error::file("write", path))?;
    make_readable(path)
}

/// Makes a file readable for every user inside, for the resolver. The umask may have removed bits.
fn make_readable(path: &Path) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(0o644))
        .map_err(Error::file("set the permissions of", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_records_are_written_in_place_and_used_again() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let hosts = Hosts::new(dir.path());
        hosts.create(&["10.136.0.1".parse().unwrap(), "fd00::1".parse().unwrap()]).unwrap();
        let inode = fs::metadata(hosts.path()).unwrap().ino();
        let address = |n: u8| -> Vec<IpAddr> {
            vec![[10, 136, 0, n].into(), format!("fd00::{n:x}").parse().unwrap()]
        };
        let one = hosts.set(0, &["one", "one", "0123"], &address(5)).unwrap();
        let two = hosts.set(0, &["two", "bad name", "x\ny", "2"], &address(6)).unwrap();
        let long = "n".repeat(200);
        let three = hosts.set(0, &["three", &long, "3"], &address(7)).unwrap();
        assert_eq!((one, two, three), (1, 2, 3));
        let lines = || -> Vec<String> {
            let text = fs::read_to_string(hosts.path()).unwrap();
            text.lines().map(|l| l.trim_end().to_owned()).filter(|l| !l.is_empty()).collect()
        };
        assert_eq!(
            lines()[4..],
            [
                "10.136.0.5 one 0123",
                "fd00::5 one 0123",
                "10.136.0.6 two 2",
                "fd00::6 two 2",
                "10.136.0.7 three 3",
                "fd00::7 three 3"
            ]
        );
        // The key stands first if it is the host name as well, and is not left out for a long name.
        let four = hosts.set(0, &["4", &"n".repeat(105), "4"], &address(8)).unwrap();
        assert!(lines().contains(&format!("10.136.0.8 4 {}", "n".repeat(105))));
        hosts.set(four, &[&"n".repeat(115), "4"], &address(8)).unwrap();
        assert!(lines().contains(&"10.136.0.8 4".into()), "{:?}", lines());
        hosts.clear(four).unwrap();
        hosts.clear(two).unwrap();
        assert!(!lines().iter().any(|l| l.contains("two")));
        assert_eq!(hosts.set(one, &["renamed"], &address(5)).unwrap(), one);
        assert_eq!(hosts.set(0, &["four"], &address(8)).unwrap(), two);
        let lines = lines();
        assert!(lines.contains(&"10.136.0.5 renamed".into()), "{lines:?}");
        assert!(lines.contains(&"10.136.0.8 four".into()), "{lines:?}");
        assert_eq!(fs::metadata(hosts.path()).unwrap().ino(), inode);
    }

    #[test]
    fn name_servers_of_the_hosts_own_loopback_are_skipped() {
        let etc = "# c\nnameserver 127.0.0.53\noptions edns0\nsearch lan\n";
        let resolved = "nameserver 192.0.2.1\nnameserver fe80::1%2\nsearch lan\n";
        assert_eq!(resolv_conf(etc, Some(resolved)), resolved);
        let none = resolv_conf(etc, None);
        assert!(none.starts_with("options edns0\nsearch lan\n#"), "{none}");
        let mixed = "nameserver ::1\nnameserver 198.51.100.1\noptions ndots:2\n";
        assert_eq!(
            resolv_conf(mixed, Some(resolved)),
            "nameserver 198.51.100.1\noptions ndots:2\n"
        );
    }
}
