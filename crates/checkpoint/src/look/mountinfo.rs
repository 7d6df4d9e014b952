//! The mounts of a namespace, as `/proc/PID/mountinfo` lists them (proc_pid_mountinfo(5)).

use dormouse_kernel::proc;

/// A mount, as mountinfo describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) id: u64,
    pub(crate) parent: u64,
    pub(crate) device: String,
    /// The root of the mount within the file system.
    pub(crate) root: String,
    pub(crate) place: String,
    /// `MOUNT_ATTR_*`; `None` if there is an unknown one.
    pub(crate) attributes: Option<u64>,
    /// Its peer group.
    pub(crate) shared: Option<u64>,
    /// The mount is a slave of a peer group, or unbindable.
    pub(crate) is_special: bool,
    pub(crate) kind: String,
    /// What was mounted, by the name that mount(2) was given.
    pub(crate) name: String,
    pub(crate) options: String,
}

impl Row {
    fn read(line: &str) -> Option<Self> {
        let (before, after) = line.split_once(" - ")?;
        let mut words = before.split_ascii_whitespace();
        let (id, parent) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        let device = words.next()?.to_owned();
        let (root, place) = (unescaped(words.next()?)?, unescaped(words.next()?)?);
        let attributes = attributes(words.next()?);
        let (mut shared, mut is_special) = (None, false);
        for word in words {
            match word.split_once(':') {
                Some(("shared", group)) => shared = Some(group.parse().ok()?),
                _ => is_special = true,
            }
        }
        let mut words = after.splitn(3, ' ');
        let (kind, name, options) = (words.next()?, words.next()?, words.next()?);
        let (kind, name, options) = (kind.to_owned(), unescaped(name)?, options.to_owned());
        Some(Self {
            id,
            parent,
            device,
            root,
            place,
            attributes,
            shared,
            is_special,
            kind,
            name,
            options,
        })
    }

    /// The path of this mount's root below the root of another mount of the same file system, if it
    /// is there.
    pub(crate) fn part_of<'r>(&'r self, other: &Self) -> Option<&'r str> {
        if (&self.device, &self.kind) != (&other.device, &other.kind) {
            return None;
        }
        below(&self.root, &other.root)
    }
}

/// Parses the options of a mount; `None` for an unknown one.
fn attributes(words: &str) -> Option<u64> {
    let mut all = 0x20; // strictatime
    for word in words.split(',') {
        match word {
            "ro" => all |= 0x1,
            "nosuid" => all |= 0x2,
            "nodev" => all |= 0x4,
            "noexec" => all |= 0x8,
            "noatime" => all = all & !0x20 | 0x10,
            "relatime" => all &= !0x20,
            "nodiratime" => all |= 0x80,
            "nosymfollow" => all |= 0x20_0000,
            // An idmapped mount stays so in a copy.
            "rw" | "idmapped" => {}
            _ => return None,
        }
    }
    Some(all)
}

/// Decodes octal escapes in a path.
fn unescaped(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((byte, after)) = rest.split_first() {
        let digits = after.get(..3).filter(|_| *byte == b'\\');
        let number = digits.and_then(|d| u8::from_str_radix(std::str::from_utf8(d).ok()?, 8).ok());
        bytes.push(number.unwrap_or(*byte));
        rest = if number.is_some() { &after[3..] } else { after };
    }
    String::from_utf8(bytes).ok()
}

/// The part of a path below another; empty if they are equal.
pub(crate) fn below<'p>(path: &'p str, above: &str) -> Option<&'p str> {
    let rest = path.strip_prefix(above.trim_end_matches('/'))?;
    match rest.strip_prefix('/') {
        Some(rest) => Some(rest),
        None => rest.is_empty().then_some(rest),
    }
}

/// All mounts that a process can reach; `None` if the table has an unknown form.
pub(crate) fn rows(pid: u32) -> Option<Vec<Row>> {
    let table = proc::whole_text(format!("/proc/{pid}/mountinfo")).ok()?;
    table.lines().map(Row::read).collect()
}

/// Device and mount point of a line of mountinfo (proc_pid_mountinfo(5)); `None` for pseudo file
/// systems, where inode numbers are not stable.
pub(crate) fn device_and_place(line: &str) -> Option<(u64, String)> {
    let (before, after) = line.split_once(" - ")?;
    let kind = after.split_ascii_whitespace().next()?;
    if ["proc", "sysfs", "cgroup", "mqueue"].contains(&kind) {
        return None;
    }
    let mut words = before.split_ascii_whitespace().skip(2);
    let (major, minor) = words.next()?.split_once(':')?;
    let place = words.nth(1)?.replace("\\040", " ");
    Some((rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?), place))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_and_place_are_read_from_a_line() {
        let line = "36 35 98:0 /x /mnt\\0402 rw,noatime master:1 - ext3 /dev/root rw";
        assert_eq!(device_and_place(line), Some((rustix::fs::makedev(98, 0), "/mnt 2".into())));
        assert_eq!(device_and_place("36 35 0:5 / /proc rw - proc proc rw"), None);
    }
}
