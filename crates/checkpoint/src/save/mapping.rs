//! The memory areas of a process, as `/proc/PID/smaps` and `/proc/PID/maps` list them.

use dormouse_record::PAGE_BYTES;

/// One entry of smaps, or of maps, which has no flags.
pub(super) struct Mapping<'t> {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) access: &'t str,
    pub(super) offset: u64,
    pub(super) device: &'t str,
    pub(super) inode: u64,
    pub(super) name: &'t str,
    pub(super) page_bytes: u64,
    pub(super) flags: Vec<&'t str>,
}

impl Mapping<'_> {
    /// Whether this may be the ring of a context of asynchronous I/O, by its name.
    pub(super) fn may_be_ring(&self) -> bool {
        self.name == "/[aio] (deleted)" && self.access.ends_with('s')
    }

    /// Whether this is private memory, of pages of the usual size.
    pub(super) fn is_anonymous(&self) -> bool {
        let is_plain =
            ["", "[heap]", "[stack]"].contains(&self.name) || self.name.starts_with("[anon:");
        self.inode == 0 && is_plain && !self.access.ends_with('s')
    }
}

/// Parses the text of smaps or maps.
pub(super) fn mappings(text: &str) -> Vec<Mapping<'_>> {
    let mut all: Vec<Mapping<'_>> = Vec::new();
    for line in text.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            if let Some(last) = all.last_mut() {
                last.flags = flags.split_ascii_whitespace().collect();
            }
        } else if let Some(size) = line.strip_prefix("KernelPageSize:") {
            let kb = size.trim().trim_end_matches(" kB").parse::<u64>().ok();
            if let (Some(last), Some(kb)) = (all.last_mut(), kb) {
                last.page_bytes = kb << 10;
            }
        } else if let Some(mapping) = head(line) {
            all.push(mapping);
        }
    }
    all
}

/// Reads `START-END ACCESS OFFSET DEVICE INODE   NAME`.
fn head(line: &str) -> Option<Mapping<'_>> {
    let (range, rest) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let mut rest = rest.splitn(4, ' ');
    let (access, offset, device) = (rest.next()?, rest.next()?, rest.next()?);
    let (inode, name) = match rest.next()?.split_once(' ') {
        Some((inode, name)) => (inode, name.trim_start()),
        None => return None,
    };
    Some(Mapping {
        start: u64::from_str_radix(start, 16).ok()?,
        end: u64::from_str_radix(end, 16).ok()?,
        access,
        offset: u64::from_str_radix(offset, 16).ok()?,
        device,
        inode: inode.parse().ok()?,
        name,
        page_bytes: PAGE_BYTES,
        flags: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_of_smaps_are_read() {
        let text = "00400000-00452000 r-xp 00001000 08:02 173521      /usr/bin/a b\n\
                    Size:     328 kB\nVmFlags: rd ex mr mw me\n\
                    7ffd0000-7ffd2000 rw-p 00000000 00:00 0                          [stack]\n\
                    KernelPageSize:     2048 kB\nVmFlags: rd wr gd\n\
                    10000-11000 rw-p 00000000 00:00 0 \nVmFlags: rd wr\n";
        let all = mappings(text);
        assert_eq!(all.len(), 3);
        assert_eq!((all[0].start, all[0].offset, all[0].inode), (0x40_0000, 0x1000, 173_521));
        assert_eq!(all[0].name, "/usr/bin/a b");
        assert_eq!((all[1].name, all[1].flags.as_slice()), ("[stack]", &["rd", "wr", "gd"][..]));
        assert_eq!((all[2].name, all[2].page_bytes), ("", PAGE_BYTES));
        assert_eq!(all[1].page_bytes, 2 << 20);
    }
}
