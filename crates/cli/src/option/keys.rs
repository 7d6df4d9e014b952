//! `--detach-keys`: the keys that detach from a container's terminal without ending the process.

use super::Invalid;

/// A sequence of keys; empty if no keys detach.
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
    /// An empty text means that no keys detach.
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

/// Searches the typed input for the keys, piece by piece.
///
/// Bytes that may be the beginning of the sequence are held back until the next ones decide. A key
/// that starts the sequence therefore reaches the program one key late, as with podman.
#[derive(Debug)]
pub(crate) struct Matcher {
    keys: Vec<u8>,
    held: usize,
}

impl Matcher {
    /// Makes a matcher at its initial state.
    pub(crate) fn new(keys: DetachKeys) -> Self {
        Self { keys: keys.0, held: 0 }
    }

    /// Appends the program's part of `typed` to `out`. Returns true when the sequence is complete,
    /// and drops the rest of `typed`.
    pub(crate) fn feed(&mut self, typed: &[u8], out: &mut Vec<u8>) -> bool {
        if self.keys.is_empty() {
            out.extend_from_slice(typed);
            return false;
        }
        for &b in typed {
            while self.held > 0 && self.keys[self.held] != b {
                // The held bytes no longer match: the longest suffix that is a beginning stays.
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
    fn detach_keys_are_parsed_or_refused() {
        assert_eq!("ctrl-p,ctrl-q".parse(), Ok(DetachKeys::default()));
        assert_eq!("ctrl-@,x,ctrl-]".parse(), Ok(DetachKeys(vec![0, b'x', 0x1d])));
        assert_eq!("".parse(), Ok(DetachKeys(vec![])));
        for bad in [",", "ctrl-", "ctrl-1", "ab", "ctrl-pp", "ä", "a,,b", "\n", &"a,".repeat(20)] {
            assert!(bad.parse::<DetachKeys>().is_err(), "{bad:?}");
        }
    }

    /// Returns the bytes that pass and whether the sequence was found, for pieces of typed text.
    fn typed(keys: &[u8], pieces: &[&[u8]]) -> (Vec<u8>, bool) {
        let mut m = Matcher::new(DetachKeys(keys.to_vec()));
        let mut out = Vec::new();
        let done = pieces.iter().any(|p| m.feed(p, &mut out));
        (out, done)
    }

    #[test]
    fn matcher_drops_only_the_detach_sequence() {
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
        fn matcher_passes_text_except_trailing_partial_sequence(
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
        fn parser_accepts_or_refuses_any_text(text in ".*") {
            let _ = text.parse::<DetachKeys>();
        }
    }
}
