//! The `options` of a mount, sorted by their effect.

use dormouse_kernel::mount::{MountAttr, Propagation};
use dormouse_launch::Spread;

/// The options of a mount, sorted by their effect.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Options {
    pub(super) set: MountAttr,
    pub(super) clear: MountAttr,
    pub(super) set_all: MountAttr,
    pub(super) clear_all: MountAttr,
    /// In order; true also applies to all mounts below.
    pub(super) propagation: Vec<(Propagation, bool)>,
    pub(super) bind: bool,
    pub(super) recursive: bool,
    pub(super) idmap: Option<bool>,
    pub(super) copy_up: bool,
    /// Some option about an attribute of this mount alone was given.
    pub(super) named: bool,
    /// Options of the filesystem itself.
    pub(super) data: Vec<String>,
}

/// Options that set attributes, and those that clear them.
const ATTRIBUTES: [(&str, &str, MountAttr); 7] = [
    ("ro", "rw", MountAttr::RDONLY),
    ("nosuid", "suid", MountAttr::NOSUID),
    ("nodev", "dev", MountAttr::NODEV),
    ("noexec", "exec", MountAttr::NOEXEC),
    ("nodiratime", "diratime", MountAttr::NODIRATIME),
    ("nosymfollow", "symfollow", MountAttr::NOSYMFOLLOW),
    ("noatime", "atime", MountAttr::NOATIME),
];

/// Propagation options; an `r` in front also applies to all mounts below.
const PROPAGATION: [(&str, Propagation); 4] = [
    ("private", Propagation::Private),
    ("slave", Propagation::Slave),
    ("shared", Propagation::Shared),
    ("unbindable", Propagation::Unbindable),
];

/// Options without effect: defaults, or ignored by the kernel for a new mount.
const NOTHING: [&str; 7] =
    ["defaults", "async", "loud", "remount", "nolazytime", "nomand", "noiversion"];

/// Returns all options, for `features`.
pub(crate) fn known_options() -> Vec<String> {
    let attributes = ATTRIBUTES.iter().flat_map(|(on, off, _)| [*on, *off]);
    let plain: Vec<String> = attributes
        .chain(["strictatime", "nostrictatime", "relatime", "norelatime"])
        .chain(["bind", "rbind", "idmap", "ridmap", "tmpcopyup"])
        .chain(NOTHING)
        .chain(["dirsync", "iversion", "lazytime", "mand", "silent", "sync"])
        .map(str::to_owned)
        .collect();
    let recursive =
        ATTRIBUTES.iter().flat_map(|(on, off, _)| [format!("r{on}"), format!("r{off}")]);
    let spread = PROPAGATION.iter().flat_map(|(word, _)| [(*word).to_owned(), format!("r{word}")]);
    let access = ["rstrictatime", "rnostrictatime", "rrelatime", "rnorelatime"].map(str::to_owned);
    let mut all: Vec<String> =
        plain.into_iter().chain(recursive).chain(spread).chain(access).collect();
    all.sort_unstable();
    all
}

/// Returns the propagation of an option.
pub(crate) fn propagation(word: &str) -> Option<(Propagation, bool)> {
    let known = |word: &str| PROPAGATION.iter().find(|(w, _)| *w == word).map(|(_, p)| *p);
    known(word).map(|p| (p, false)).or_else(|| Some((known(word.strip_prefix('r')?)?, true)))
}

/// Converts a propagation for a plan.
pub(crate) fn spread((propagation, recursive): (Propagation, bool)) -> (Spread, bool) {
    let spread = match propagation {
        Propagation::Private => Spread::Private,
        Propagation::Slave => Spread::Slave,
        Propagation::Shared => Spread::Shared,
        Propagation::Unbindable => Spread::Unbindable,
    };
    (spread, recursive)
}

impl Options {
    pub(crate) fn parse(words: &[String]) -> Self {
        let mut all = Self::default();
        words.iter().for_each(|word| all.take(word));
        all
    }

    fn take(&mut self, word: &str) {
        match word {
            "bind" => self.bind = true,
            "rbind" => (self.bind, self.recursive) = (true, true),
            "idmap" => self.idmap = Some(false),
            "ridmap" => self.idmap = Some(true),
            "tmpcopyup" => self.copy_up = true,
            "strictatime" => self.name(true, MountAttr::STRICTATIME),
            "nostrictatime" => self.name(false, MountAttr::STRICTATIME),
            // The kernel's word for it is that none of the other kinds is set.
            "relatime" => self.name(false, MountAttr::ATIME),
            "norelatime" => self.named = true,
            "rstrictatime" => {
                set_bits(&mut self.set_all, &mut self.clear_all, MountAttr::STRICTATIME);
            }
            "rnostrictatime" | "rrelatime" | "rnorelatime" => {
                set_bits(&mut self.clear_all, &mut self.set_all, MountAttr::ATIME);
            }
            word if NOTHING.contains(&word) => {}
            word => self.take_of_tables(word),
        }
    }

    fn take_of_tables(&mut self, word: &str) {
        if let Some(spread) = propagation(word) {
            self.propagation.push(spread);
            return;
        }
        for (on, off, bit) in ATTRIBUTES {
            match word {
                _ if word == on => return self.name(true, bit),
                _ if word == off => return self.name(false, bit),
                _ => {}
            }
            let (set, clear) = (&mut self.set_all, &mut self.clear_all);
            match word.strip_prefix('r') {
                Some(rest) if rest == on => return set_bits(set, clear, bit),
                Some(rest) if rest == off => return set_bits(clear, set, bit),
                _ => {}
            }
        }
        self.data.push(word.to_owned());
    }

    /// Sets or clears an attribute of this mount alone.
    fn name(&mut self, on: bool, bits: MountAttr) {
        self.named = true;
        match on {
            true => set_bits(&mut self.set, &mut self.clear, bits),
            false => set_bits(&mut self.clear, &mut self.set, bits),
        }
    }

    /// Returns what a bind mount sets and clears. With any option about its own attributes it has those
    /// that are named and no others, as with runc and crun; without one it has its source's. With a
    /// user namespace (`is_confined`) it keeps what root in there could not clear (mount_setattr(2),
    /// locked mounts). Access times are its source's unless an option names a kind of them.
    pub(super) fn of_bind(&self, is_confined: bool) -> (MountAttr, MountAttr) {
        let (set, mut clear) = (self.set, self.clear);
        if !self.named {
            return (set, clear);
        }
        clear |= MountAttr::NOSYMFOLLOW;
        if !is_confined {
            clear |= MountAttr::RDONLY | MountAttr::NOSUID | MountAttr::NODEV | MountAttr::NOEXEC;
        }
        if set.contains(MountAttr::NODIRATIME) && !set.intersects(MountAttr::ATIME) {
            clear |= MountAttr::ATIME;
        }
        if (set | clear).intersects(MountAttr::ATIME) && !is_confined {
            clear |= MountAttr::NODIRATIME;
        }
        (set, clear - set)
    }

    /// Returns the value of a `key=value` option of the filesystem.
    pub(super) fn value(&self, key: &str) -> Option<&str> {
        self.data.iter().rev().find_map(|d| d.strip_prefix(key)?.strip_prefix('='))
    }
}

fn set_bits(to: &mut MountAttr, from: &mut MountAttr, bits: MountAttr) {
    if bits.intersects(MountAttr::ATIME) {
        to.remove(MountAttr::ATIME); // one field: of two words about it the last counts
    }
    to.insert(bits);
    from.remove(bits);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Options {
        Options::parse(&words.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn last_option_of_an_attribute_wins() {
        let options = parse(&["ro", "nosuid", "rw", "rnoexec", "rbind", "size=1k", "rslave"]);
        assert_eq!((options.set, options.clear), (MountAttr::NOSUID, MountAttr::RDONLY));
        assert_eq!(options.set_all, MountAttr::NOEXEC);
        assert!(options.bind && options.recursive);
        assert_eq!(options.data, ["size=1k"]);
        assert_eq!(options.propagation, [(Propagation::Slave, true)]);
        assert_eq!(parse(&["rro"]).set_all, MountAttr::RDONLY);
        assert_eq!(parse(&["noatime", "strictatime"]).set, MountAttr::STRICTATIME);
        assert_eq!(parse(&["rrw"]).clear_all, MountAttr::RDONLY);
    }

    #[test]
    fn bind_mount_has_exactly_the_named_attributes() {
        let lockable = MountAttr::RDONLY | MountAttr::NOSUID | MountAttr::NODEV | MountAttr::NOEXEC;
        assert_eq!(parse(&["rbind", "rprivate"]).of_bind(false), Default::default());
        let (set, clear) = parse(&["bind", "ro"]).of_bind(false);
        assert_eq!(set, MountAttr::RDONLY);
        assert_eq!(clear, (lockable | MountAttr::NOSYMFOLLOW) - MountAttr::RDONLY);
        assert_eq!(parse(&["bind", "dev"]).of_bind(false).1, lockable | MountAttr::NOSYMFOLLOW);
        // Root of a user namespace could not clear them either.
        let (set, clear) = parse(&["bind", "ro"]).of_bind(true);
        assert_eq!((set, clear), (MountAttr::RDONLY, MountAttr::NOSYMFOLLOW));
        let times = MountAttr::ATIME | MountAttr::NODIRATIME;
        for (word, set, clear) in [
            ("ro", MountAttr::empty(), MountAttr::empty()),
            ("relatime", MountAttr::empty(), times),
            ("norelatime", MountAttr::empty(), MountAttr::empty()),
            ("nodiratime", MountAttr::NODIRATIME, MountAttr::ATIME),
            ("strictatime", MountAttr::STRICTATIME, MountAttr::NODIRATIME),
        ] {
            let found = parse(&["bind", word]).of_bind(false);
            assert_eq!((found.0 & times, found.1 & times), (set, clear), "{word}");
        }
    }

    #[test]
    fn known_option_is_not_passed_to_filesystem() {
        for word in known_options() {
            let of_fs = ["dirsync", "iversion", "lazytime", "mand", "silent", "sync"];
            let is_data = !parse(&[&word]).data.is_empty();
            assert_eq!(is_data, of_fs.contains(&word.as_str()), "{word}");
        }
    }
}
