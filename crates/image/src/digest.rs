//! The two kinds of hash: SHA-256 as OCI requires it, BLAKE3 for the store's object names.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::Digest as _;

use crate::error::{Fault, ImageError};

/// A SHA-256 digest as OCI writes it: `sha256:` and 64 lower-case hex digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(sha2::Sha256::digest(bytes).into())
    }

    /// A digest that was computed elsewhere.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The 64 hex digits without the algorithm.
    pub fn hex(&self) -> String {
        hex::encode(self.0)
    }
}

impl FromStr for Digest {
    type Err = ImageError;

    fn from_str(s: &str) -> Result<Self, ImageError> {
        let mut bytes = [0; 32];
        let upper = |s: &str| s.bytes().any(|b| b.is_ascii_uppercase());
        match s.strip_prefix("sha256:") {
            Some(digits) if !upper(digits) && hex::decode_to_slice(digits, &mut bytes).is_ok() => {
                Ok(Self(bytes))
            }
            _ => Err(Fault::Invalid {
                what: format!("'{s:.80}' is not a digest: expected sha256: and 64 hex digits"),
            }
            .into()),
        }
    }
}

impl TryFrom<String> for Digest {
    type Error = ImageError;
    fn try_from(s: String) -> Result<Self, ImageError> {
        s.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> String {
        digest.to_string()
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The name of an object: the BLAKE3 hash of its content.
///
/// A sparse file's object is named by its map and its data instead (see [`crate::object`]), so that
/// a hole of terabytes is not read to compute the name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectId(pub(crate) [u8; 32]);

impl ObjectId {
    /// The path below `objects/`: `ab/cdef…`.
    pub fn path(&self) -> String {
        format!("{:02x}/{}", self.0[0], hex::encode(&self.0[1..]))
    }
}

impl fmt::Debug for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_read_strictly() {
        let empty = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(Digest::of(b"").to_string(), empty);
        assert_eq!(empty.parse::<Digest>().unwrap(), Digest::of(b""));
        for bad in ["", "sha256:", "sha512:00", &empty[7..], &empty.to_uppercase(), &empty[..70]] {
            assert!(bad.parse::<Digest>().is_err(), "{bad}");
        }
    }
}
