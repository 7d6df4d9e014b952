//! Bytes as base64 texts.

use serde::{Deserialize, Serialize};

/// BLAKE3 of one chunk after the other, as one base64 text in records.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Checksums(pub Vec<[u8; 32]>);

impl Serialize for Checksums {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&to_base64(self.0.as_flattened()))
    }
}

impl<'de> Deserialize<'de> for Checksums {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bytes = from_base64(deserializer)?;
        match bytes.as_chunks() {
            (all, []) => Ok(Self(all.to_vec())),
            _ => Err(serde::de::Error::custom("the last checksum is cut")),
        }
    }
}

/// Bytes, as base64 in records.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Bytes(pub Vec<u8>);

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

impl Serialize for Bytes {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&to_base64(&self.0))
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        from_base64(deserializer).map(Self)
    }
}

fn to_base64(bytes: &[u8]) -> String {
    use base64::Engine;
    base64::engine::general_purpose::STANDARD.encode(bytes)
}

fn from_base64<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    use base64::Engine;
    let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
    let bytes = base64::engine::general_purpose::STANDARD.decode(text.as_bytes());
    bytes.map_err(serde::de::Error::custom)
}
