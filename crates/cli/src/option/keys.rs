//! `--detach-keys`: the keys that leave a container's terminal without ending anything.

use super::Invalid;

/// A sequence of keys; empty where nothing detaches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DetachKeys(Vec<u8>);

impl Default for DetachKeys {
    /// ctrl-p, ctrl-q.
    fn default() -> Self {
        Self(vec![0x10, 0x11])
    }
}

impl std::str::FromStr for DetachKeys {
    type Err = Invalid;

    /// Reads keys separated by commas: one letter each, or `ctrl-` and a letter or one of `@[\]^_`.
    /// Empty text means that nothing detaches.
    fn from_str(text: &str) -> Result<Self, Invalid> {
        let bad = || Invalid::new("detach keys", text, "keys such as ctrl-p,ctrl-q or a,b");
        if text.is_empty() {
            return Ok(Self(Vec::new()));
        }
        let key = |part: &str| match part.as_bytes() {
            [b] if b.is_ascii_graphic() => Ok(*b),
            [b'c', b't', b'r', b'l', b'-', b] => match b.to_ascii_uppercase() {
                b @ b'@'..=b'_' => Ok(b & 0x1f),
                _ => Err(bad()),
            },
            _ => Err(bad()),
        };
        let keys: Vec<u8> = text.split(',').map(key).collect::<Result<_, _>>()?;
        if keys.len() > 16 { Err(bad()) } else { Ok(Self(keys)) }
    }
}

/// Looks for the keys in what is typed, piece by piece.
///
/// Bytes that may be the beginning of the sequence are held back until the next ones tell; so a
/// key that starts the sequence reaches the program one key late, as with podman.
#[derive(Debug)]
pub(crate) struct Matcher {
    keys: Vec<u8>,
    held: usize,
}

impl Matcher {
    /// A matcher at the beginning.
    pub(crate) fn new(keys: DetachKeys) -> Self {
        Self { keys: keys.0, held: 0 }
    }

    /// Appends to `out` what the program is to receive of `typed`; true when the sequence is
    /// complete, and then the rest of `typed` is dropped.
    pub(crate) fn feed(&mut self, typed: &[u8], out: &mut Vec<u8>) -> bool {
        if self.keys.is_empty() {
            out.extend_from_slice(typed);
            return false;
        }
        for &b in typed {
            while self.held > 0 && self.keys[self.held] != b {
                // What is held no longer fits: the longest of its ends that is a beginning stays.
                let keep = (0..self.held)
                    .rev()
                    .find(|n| self.keys[..*n] == self.keys[self.held - n..self.held]);
                let keep = keep.unwrap_or(0);
                out.extend_from_slice(&self.keys[..self.held - keep]);
                self.held = keep;
            }
            if self.keys[self.held] == b {
                self.held += 1;
                if self.held == self.keys.len() {
                    return true;
                }
            } else {
                out.push(b);
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences() {
        assert_eq!("ctrl-p,ctrl-q".parse(), Ok(DetachKeys::default()));
        assert_eq!("ctrl-@,x,ctrl-]".parse(), Ok(DetachKeys(vec![0, b'x', 0x1d])));
        assert_eq!("".parse(), Ok(DetachKeys(vec![])));
        for bad in [",", "ctrl-", "ctrl-1", "ab", "ctrl-pp", "ä", "a,,b", "\n", &"a,".repeat(20)] {
            assert!(bad.parse::<DetachKeys>().is_err(), "{bad:?}");
        }
    }

    /// What passes and whether it ended, for pieces of typed text.
    fn typed(keys: &[u8], pieces: &[&[u8]]) -> (Vec<u8>, bool) {
        let mut m = Matcher::new(DetachKeys(keys.to_vec()));
        let mut out = Vec::new();
        let done = pieces.iter().any(|p| m.feed(p, &mut out));
        (out, done)
    }

    #[test]
    fn nothing_but_the_sequence_is_swallowed() {
        let b = |s: &[u8]| s.to_vec();
        assert_eq!(typed(b"pq", &[b"xpq", b"y"]), (b(b"x"), true));
        assert_eq!(typed(b"pq", &[b"p", b"q"]), (b(b""), true));
        assert_eq!(typed(b"pq", &[b"p", b"x"]), (b(b"px"), false));
        assert_eq!(typed(b"pq", &[b"pp", b"q"]), (b(b"p"), true));
        assert_eq!(typed(b"aab", &[b"aaab"]), (b(b"a"), true));
        assert_eq!(typed(b"abac", &[b"ababac"]), (b(b"ab"), true));
        assert_eq!(typed(b"", &[b"abc"]), (b(b"abc"), false));
    }

    proptest::proptest! {
        #[test]
        fn text_without_the_sequence_passes_but_for_a_beginning(
            keys in proptest::collection::vec(b'a'..b'd', 1..5),
            text in proptest::collection::vec(b'a'..b'd', 0..60),
        ) {
            let (out, done) = typed(&keys, &text.chunks(3).collect::<Vec<_>>());
            let at = text.windows(keys.len()).position(|w| w == keys);
            proptest::prop_assert_eq!(done, at.is_some());
            match at {
                Some(at) => proptest::prop_assert_eq!(&out[..], &text[..at]),
                None => {
                    proptest::prop_assert!(text.starts_with(&out));
                    proptest::prop_assert!(keys.starts_with(&text[out.len()..]));
                }
            }
        }

        #[test]
        fn any_text_is_read_or_refused(text in ".*") {
            let _ = text.parse::<DetachKeys>();
        }
    }
}
