//! `/etc/hosts` and `/etc/resolv.conf` of a domain, bind-mounted into its containers.
//!
//! Both files keep their inode for as long as the domain exists, and are read at any time. The hosts file is a
//! header and a *record* for each container: one line for IPv4, one for IPv6. A record stays at its place, and
//! its number is its offset. A container is added and removed by writing its record alone, independent of the
//! number of the others. No record crosses a multiple of 1,024 bytes, where C libraries divide their reads. A
//! reader therefore never has the address of one record with the name of another.
//!
//! The place of a removed record is a blank line, until other records use it, or it is cut off with the end of
//! the file. `hosts.free` lists these places, and its lock protects both files.
//!
//! A domain of an older program has records of 256 bytes, padded by blanks, and keeps them ([`Form`]).
//!
//! LIMIT: names that do not fit in a line together with the address (about 80 bytes) are left out.
//! With many thousands of containers every look-up reads megabytes; then a name server is due.

use std::fs::{self, File, OpenOptions};
use std::net::IpAddr;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

use crate::error::{Error, Result};

/// LIMIT: bytes of a line.
const LINE_BYTES: usize = 128;
/// A record crosses no multiple of this.
const BLOCK_BYTES: u64 = 1024;
/// The begin of `hosts.free`, if records are not padded.
const MARK: [u8; 8] = *b"places 2";
/// Bytes of an entry of `hosts.free` behind the mark: offset and size. A free entry has the size 0.
const ENTRY_BYTES: usize = 8;

/// The header and the records of a padded file.
const OLD_HEADER_BYTES: usize = 512;
const OLD_RECORD_BYTES: usize = 2 * LINE_BYTES;

/// A hosts file.
pub(crate) struct Hosts {
    path: PathBuf,
}

/// A place in the file without a record: one blank line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    at: u64,
    size: u64,
}

impl Place {
    fn end(self) -> u64 {
        self.at + self.size
    }

    fn blank(self) -> Vec<u8> {
        blank(self.size)
    }
}

fn blank(size: u64) -> Vec<u8> {
    let mut text = vec![b' '; size as usize];
    if let Some(last) = text.last_mut() {
        *last = b'\n';
    }
    text
}

/// The two forms of `hosts.free`, and of the hosts file with it.
#[derive(Debug, PartialEq, Eq)]
enum Form {
    /// The free places, by the numbers of their entries.
    Places(Vec<Place>),
    /// Of an older program: numbers of free records, four bytes each.
    Padded,
}

/// Both files, under the lock.
struct Open<'h> {
    hosts: &'h Hosts,
    free: File,
    form: Form,
    file: File,
}

/// The address with its names, in their order, without a line break. The name `key`, by which records are
/// known, always fits.
fn line(address: &IpAddr, names: &[&str], key: &str) -> String {
    let mut text = address.to_string();
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
    text
}

/// The addresses of a record, in the order of its lines.
fn both(addresses: &[IpAddr]) -> [Option<&IpAddr>; 2] {
    [addresses.iter().find(|a| a.is_ipv4()), addresses.iter().find(|a| a.is_ipv6())]
}

/// Returns the address of a line, if the line has this name.
fn address_in(line: &[u8], name: &str) -> Option<IpAddr> {
    let mut words = std::str::from_utf8(line).ok()?.split_whitespace();
    let address = words.next()?.parse().ok()?;
    words.any(|word| word == name).then_some(address)
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
        let _ = fs::remove_file(self.free_path()); // an older boot's
        let free = self.lock()?;
        free.write_all_at(&MARK, 0).map_err(Error::file("write", self.free_path()))?;
        fs::write(&self.path, text).map_err(Error::file("write", &self.path))?;
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

    /// Opens both files; `None` if there is no hosts file.
    fn open(&self) -> Result<Option<Open<'_>>> {
        let file = match OpenOptions::new().read(true).write(true).open(&self.path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            other => other.map_err(Error::file("open", &self.path))?,
        };
        let free = self.lock()?;
        let bytes = read_all(&free).map_err(Error::file("read", self.free_path()))?;
        let form = match bytes.strip_prefix(&MARK) {
            None => Form::Padded,
            Some(entries) => Form::Places(entries.as_chunks().0.iter().map(place).collect()),
        };
        Ok(Some(Open { hosts: self, free, form, file }))
    }

    /// Writes a container's record: record `old` again, or a new one for 0. Returns its number. The record is
    /// known by the last of its names.
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
        let missing = || std::io::Error::from(std::io::ErrorKind::NotFound);
        let mut open = self.open()?.ok_or_else(|| Error::file("open", &self.path)(missing()))?;
        let lines = both(addresses).map(|address| address.map(|a| line(a, &names, key)));
        if open.form == Form::Padded {
            return open.set_padded(old, lines);
        }
        let text: String = lines.into_iter().flatten().map(|line| line + "\n").collect();
        let size = text.len() as u64;
        let before = open.extent(old, key)?.filter(|_| old != 0);
        if let Some(before) = before.filter(|before| before.size >= size) {
            open.write(before, text.as_bytes())?;
            return Ok(old);
        }
        let place = open.allocate(size)?;
        open.write(place, text.as_bytes())?;
        // ORDER: a container always has a record.
        if let Some(before) = before {
            open.release(before)?;
        }
        Ok(place.at as u32)
    }

    /// Returns whether a record exists and has this name.
    pub fn is_of(&self, number: u32, name: &str) -> Result<bool> {
        if number == 0 {
            return Ok(false); // the first start
        }
        match self.open()? {
            None => Ok(false),
            Some(open) => Ok(open.extent(number, name)?.is_some()),
        }
    }

    /// Removes a record with this name, if it exists.
    pub fn clear(&self, number: u32, key: &str) -> Result<()> {
        let Some(mut open) = self.open()?.filter(|_| number != 0) else { return Ok(()) };
        match (open.extent(number, key)?, &open.form) {
            (None, _) => Ok(()),
            (Some(place), Form::Places(_)) => open.release(place),
            (Some(place), Form::Padded) => {
                open.write_at(
                    &[blank(LINE_BYTES as u64), blank(LINE_BYTES as u64)].concat(),
                    place.at,
                )?;
                // ORDER: free only once it is blank.
                let length = open.length_of_free()?;
                open.write_free(&number.to_le_bytes(), length - length % 4)
            }
        }
    }
}

impl Open<'_> {
    fn write_at(&self, bytes: &[u8], at: u64) -> Result<()> {
        self.file.write_all_at(bytes, at).map_err(Error::file("write", &self.hosts.path))
    }

    fn write_free(&self, bytes: &[u8], at: u64) -> Result<()> {
        self.free.write_all_at(bytes, at).map_err(Error::file("write", self.hosts.free_path()))
    }

    fn length_of_free(&self) -> Result<u64> {
        let path = self.hosts.free_path();
        Ok(self.free.metadata().map_err(Error::file("look at", path))?.len())
    }

    fn length(&self) -> Result<u64> {
        Ok(self.file.metadata().map_err(Error::file("look at", &self.hosts.path))?.len())
    }

    /// Returns the place of a record with this name.
    fn extent(&self, number: u32, name: &str) -> Result<Option<Place>> {
        let at = match self.form {
            Form::Padded if number == 0 => return Ok(None),
            Form::Padded => old_position(number),
            Form::Places(_) => u64::from(number),
        };
        // With the end of the line before.
        let Some(before) = at.checked_sub(1) else { return Ok(None) };
        let mut bytes = vec![0; 1 + 2 * LINE_BYTES];
        let read = read_at_most(&self.file, &mut bytes, before);
        bytes.truncate(read.map_err(Error::file("read", &self.hosts.path))?);
        let Some((b'\n', text)) = bytes.split_first() else { return Ok(None) };
        let mut lines = text.split_inclusive(|b| *b == b'\n').filter(|line| line.ends_with(b"\n"));
        let Some(first) = lines.next() else { return Ok(None) };
        let Some(address) = address_in(first, name) else { return Ok(None) };
        if self.form == Form::Padded {
            return Ok(Some(Place { at, size: OLD_RECORD_BYTES as u64 }));
        }
        // A record starts with IPv4 if it has two lines.
        let second = lines.next().filter(|line| {
            address.is_ipv4() && address_in(line, name).is_some_and(|second| second.is_ipv6())
        });
        let size = first.len() + second.map_or(0, <[u8]>::len);
        Ok(Some(Place { at, size: size as u64 }))
    }

    /// Writes a record to the begin of a place. The rest of the place is free then.
    fn write(&mut self, place: Place, text: &[u8]) -> Result<()> {
        let size = text.len() as u64;
        let rest = Place { at: place.at + size, size: place.size - size };
        self.write_at(&[text, &rest.blank()].concat(), place.at)?;
        match rest.size {
            0 => Ok(()),
            _ => self.release(rest),
        }
    }

    /// Takes a place of at least this size: the smallest free one, or a new one at the end of the file.
    fn allocate(&mut self, size: u64) -> Result<Place> {
        let fits = |place: &Place| place.size > 0 && place.size >= size;
        let all = self.places().iter().enumerate().filter(|(_, place)| fits(place));
        if let Some((entry, place)) = all.min_by_key(|(_, place)| place.size) {
            let place = *place;
            self.set_entry(entry, None)?;
            return Ok(place);
        }
        let end = self.length()?;
        if end / BLOCK_BYTES == (end + size - 1) / BLOCK_BYTES {
            return Ok(Place { at: end, size });
        }
        let gap = Place { at: end, size: BLOCK_BYTES - end % BLOCK_BYTES };
        self.write_at(&gap.blank(), gap.at)?;
        self.add(gap)?;
        Ok(Place { at: gap.end(), size })
    }

    /// Makes a place free, together with free ones beside it in the same block.
    ///
    /// ORDER: blank, then free. A kill in between leaves a blank line that is never used.
    fn release(&mut self, mut place: Place) -> Result<()> {
        self.write_at(&place.blank(), place.at)?;
        let block = place.at / BLOCK_BYTES;
        while let Some(entry) = self.places().iter().position(|other| {
            let touches = other.end() == place.at || place.end() == other.at;
            other.size > 0 && touches && other.at / BLOCK_BYTES == block
        }) {
            let other = self.places()[entry];
            self.set_entry(entry, None)?;
            place = Place { at: place.at.min(other.at), size: place.size + other.size };
            self.write_at(&place.blank(), place.at)?;
        }
        if place.end() != self.length()? {
            return self.add(place);
        }
        // With the gap at the end of the block before.
        let mut length = place.at;
        self.cut(length)?;
        while let Some(entry) =
            self.places().iter().position(|it| it.size > 0 && it.end() == length)
        {
            length = self.places()[entry].at;
            self.set_entry(entry, None)?;
            self.cut(length)?;
        }
        Ok(())
    }

    fn cut(&self, length: u64) -> Result<()> {
        self.file.set_len(length).map_err(Error::file("cut", &self.hosts.path))
    }

    fn places(&self) -> &[Place] {
        match &self.form {
            Form::Places(places) => places,
            Form::Padded => &[],
        }
    }

    /// Adds a free place to the list.
    fn add(&mut self, place: Place) -> Result<()> {
        let places = self.places();
        let entry = places.iter().position(|other| other.size == 0).unwrap_or(places.len());
        self.set_entry(entry, Some(place))
    }

    /// Changes an entry of the list; `None` makes it a free one.
    fn set_entry(&mut self, entry: usize, place: Option<Place>) -> Result<()> {
        let place = place.unwrap_or(Place { at: 0, size: 0 });
        let bytes = [(place.at as u32).to_le_bytes(), (place.size as u32).to_le_bytes()].concat();
        self.write_free(&bytes, (MARK.len() + entry * ENTRY_BYTES) as u64)?;
        if let Form::Places(places) = &mut self.form {
            match places.get_mut(entry) {
                Some(known) => *known = place,
                None => places.push(place),
            }
        }
        Ok(())
    }

    /// Writes a record of a padded file.
    fn set_padded(&self, old: u32, lines: [Option<String>; 2]) -> Result<u32> {
        let number = match (old, self.length_of_free()?.checked_sub(4)) {
            (1.., _) => old,
            (0, Some(last)) => {
                let (mut word, path) = ([0; 4], self.hosts.free_path());
                self.free.read_exact_at(&mut word, last).map_err(Error::file("read", &path))?;
                self.free.set_len(last).map_err(Error::file("cut", &path))?;
                u32::from_le_bytes(word)
            }
            (0, None) => {
                let length = self.length()?;
                (length.saturating_sub(OLD_HEADER_BYTES as u64) / OLD_RECORD_BYTES as u64) as u32
                    + 1
            }
        };
        let padded = lines.map(|line| {
            let mut bytes = line.unwrap_or_default().into_bytes();
            bytes.resize(LINE_BYTES - 1, b' ');
            bytes.push(b'\n');
            bytes
        });
        self.write_at(&padded.concat(), old_position(number))?;
        Ok(number)
    }
}

fn place(entry: &[u8; ENTRY_BYTES]) -> Place {
    let [a, b, c, d, e, f, g, h] = *entry;
    let number = |bytes| u64::from(u32::from_le_bytes(bytes));
    Place { at: number([a, b, c, d]), size: number([e, f, g, h]) }
}

fn read_all(file: &File) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; file.metadata()?.len() as usize];
    let read = read_at_most(file, &mut bytes, 0)?;
    bytes.truncate(read);
    Ok(bytes)
}

/// Reads until the buffer is full or the file ends.
fn read_at_most(file: &File, bytes: &mut [u8], at: u64) -> std::io::Result<usize> {
    let mut all = 0;
    while all < bytes.len() {
        match file.read_at(&mut bytes[all..], at + all as u64)? {
            0 => break,
            read => all += read,
        }
    }
    Ok(all)
}

/// The offset of a padded record, counted from 1.
fn old_position(number: u32) -> u64 {
    OLD_HEADER_BYTES as u64 + u64::from(number - 1) * OLD_RECORD_BYTES as u64
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

    fn address(n: u8) -> Vec<IpAddr> {
        vec![[10, 136, 0, n].into(), format!("fd00::{n:x}").parse().unwrap()]
    }

    fn text(hosts: &Hosts) -> String {
        fs::read_to_string(hosts.path()).unwrap()
    }

    /// The lines that are not blank.
    fn lines(hosts: &Hosts) -> Vec<String> {
        let text = text(hosts);
        text.lines().map(|l| l.trim_end().to_owned()).filter(|l| !l.is_empty()).collect()
    }

    fn is_padded(hosts: &Hosts) -> bool {
        text(hosts).lines().any(|line| line.is_empty() || line.ends_with(' '))
    }

    #[test]
    fn hosts_records_are_written_in_place_and_used_again() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let hosts = Hosts::new(dir.path());
        hosts.create(&["10.136.0.1".parse().unwrap(), "fd00::1".parse().unwrap()]).unwrap();
        let inode = fs::metadata(hosts.path()).unwrap().ino();
        let header = text(&hosts);
        let one = hosts.set(0, &["one", "one", "0123"], &address(5)).unwrap();
        let two = hosts.set(0, &["two", "bad name", "x\ny", "2"], &address(6)).unwrap();
        let long = "n".repeat(200);
        let three = hosts.set(0, &["three", &long, "3"], &address(7)).unwrap();
        assert_eq!(
            text(&hosts).strip_prefix(&header),
            Some(
                "10.136.0.5 one 0123\nfd00::5 one 0123\n10.136.0.6 two 2\nfd00::6 two 2\n\
                 10.136.0.7 three 3\nfd00::7 three 3\n"
            )
        );
        for (number, name) in [(one, "0123"), (two, "2"), (three, "3")] {
            assert!(hosts.is_of(number, name).unwrap(), "{name}");
            assert!(!hosts.is_of(number + 1, name).unwrap() && !hosts.is_of(number, "x").unwrap());
        }
        assert!(!hosts.is_of(0, "localhost").unwrap() && !hosts.is_of(9999, "3").unwrap());
        // The key stands first if it is the host name as well, and is not left out for a long name.
        let four = hosts.set(0, &["4", &"n".repeat(105), "4"], &address(8)).unwrap();
        assert!(lines(&hosts).contains(&format!("10.136.0.8 4 {}", "n".repeat(105))));
        assert_eq!(hosts.set(four, &[&"n".repeat(115), "4"], &address(8)).unwrap(), four);
        assert!(lines(&hosts).contains(&"10.136.0.8 4".into()), "{:?}", lines(&hosts));
        assert!(!is_padded(&hosts), "{}", text(&hosts));
        // The place of a removed record is a blank line, until a record fits there.
        hosts.clear(two, "x").unwrap();
        assert!(hosts.is_of(two, "2").unwrap(), "another name");
        hosts.clear(two, "2").unwrap();
        assert!(!lines(&hosts).iter().any(|l| l.contains("two")) && is_padded(&hosts));
        assert_eq!(hosts.set(0, &["six", "6"], &address(6)).unwrap(), two);
        assert!(!is_padded(&hosts), "{}", text(&hosts));
        // A longer name needs another place.
        let renamed = hosts.set(one, &["renamed", "0123"], &address(5)).unwrap();
        assert!(renamed > four && !hosts.is_of(one, "0123").unwrap());
        assert!(lines(&hosts).contains(&"10.136.0.5 renamed 0123".into()), "{:?}", lines(&hosts));
        for (number, name) in [(three, "3"), (renamed, "0123"), (two, "6"), (four, "4")] {
            hosts.clear(number, name).unwrap();
        }
        assert_eq!(text(&hosts), header, "places at the end are cut off");
        assert_eq!(fs::metadata(hosts.path()).unwrap().ino(), inode);
    }

    #[test]
    fn records_of_many_containers_cross_no_block_and_leave_little_room() {
        let dir = tempfile::tempdir().unwrap();
        let hosts = Hosts::new(dir.path());
        hosts.create(&[]).unwrap();
        let header = text(&hosts);
        let mut seed = 7_u32;
        let mut random = |below: usize| {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) as usize % below
        };
        let mut known: Vec<(u32, String, String)> = Vec::new();
        for n in 0..2000_u32 {
            if known.len() > 40 || n > 1500 && !known.is_empty() {
                let (number, _, key) = known.swap_remove(random(known.len()));
                hosts.clear(number, &key).unwrap();
            } else if n <= 1500 {
                let (name, key) = ("n".repeat(1 + random(90)), format!("key{n}"));
                let number = hosts.set(0, &[&name, &key], &address(n as u8)[random(2)..]).unwrap();
                known.push((number, name, key));
            }
            for (number, _, key) in &known {
                assert!(hosts.is_of(*number, key).unwrap(), "{n}: {key}\n{}", text(&hosts));
            }
            let text = text(&hosts);
            assert_eq!(
                lines(&hosts).len(),
                header.lines().count() + {
                    known
                        .iter()
                        .map(|(_, _, key)| text.matches(&format!(" {key}\n")).count())
                        .sum::<usize>()
                }
            );
            let mut at = 0;
            for line in text.split_inclusive('\n').skip(header.lines().count()) {
                let begin = header.len() + at;
                assert_eq!(begin / 1024, (begin + line.len() - 1) / 1024, "{n}: {line}");
                at += line.len();
            }
            assert!(text.len() < 40 * 256 + 4096, "{n}: {} bytes", text.len());
        }
        assert_eq!(text(&hosts), header);
    }

    /// A domain keeps its file while programs are replaced by newer ones.
    #[test]
    fn padded_file_of_an_older_program_keeps_its_form() {
        let dir = tempfile::tempdir().unwrap();
        let hosts = Hosts::new(dir.path());
        let padded = |text: &str, size: usize| format!("{text:<0$}\n", size - 1);
        let header = padded("127.0.0.1 localhost", 512);
        let old = header.clone() + &padded("10.136.0.5 one 1", 128) + &padded("fd00::5 one 1", 128);
        fs::write(hosts.path(), &old).unwrap();
        assert!(hosts.is_of(1, "1").unwrap() && !hosts.is_of(2, "1").unwrap());
        assert_eq!(hosts.set(0, &["two", "2"], &address(6)).unwrap(), 2);
        let new = old.clone() + &padded("10.136.0.6 two 2", 128) + &padded("fd00::6 two 2", 128);
        assert_eq!(text(&hosts), new);
        hosts.clear(1, "1").unwrap();
        assert_eq!(text(&hosts), new.replace(&old[512..], &padded("", 128).repeat(2)));
        assert_eq!(hosts.set(0, &["three", "3"], &address(7)[..1]).unwrap(), 1);
        assert!(lines(&hosts).contains(&"10.136.0.7 three 3".into()));
        assert_eq!(hosts.set(1, &["a", "3"], &address(7)).unwrap(), 1);
        assert_eq!(text(&hosts).len(), new.len());
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
