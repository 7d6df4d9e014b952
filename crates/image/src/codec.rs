//! The byte encoding of layer files: numbers as LEB128, byte strings with their length before them.

use crate::error::{Fault, Result};

/// Writes.
#[derive(Debug, Default)]
pub(crate) struct Encoder(pub Vec<u8>);

impl Encoder {
    pub(crate) fn number(&mut self, mut n: u64) {
        while n >= 0x80 {
            self.0.push(n as u8 | 0x80);
            n >>= 7;
        }
        self.0.push(n as u8);
    }

    /// Small for small numbers of either sign.
    pub(crate) fn signed(&mut self, n: i64) {
        self.number(((n << 1) ^ (n >> 63)) as u64);
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }
}

/// Reads, and trusts no length that it reads.
#[derive(Debug)]
pub(crate) struct Decoder<'a>(pub &'a [u8]);

impl<'a> Decoder<'a> {
    pub(crate) fn number(&mut self) -> Result<u64> {
        let mut n = 0u64;
        for shift in (0..64).step_by(7) {
            let (byte, rest) = self.0.split_first().ok_or_else(short)?;
            self.0 = rest;
            n |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(n);
            }
        }
        Err(short())
    }

    pub(crate) fn number32(&mut self) -> Result<u32> {
        self.number()?.try_into().map_err(|_| short())
    }

    pub(crate) fn signed(&mut self) -> Result<i64> {
        let n = self.number()?;
        Ok((n >> 1) as i64 ^ -((n & 1) as i64))
    }

    pub(crate) fn bytes(&mut self) -> Result<&'a [u8]> {
        let length = self.number()?;
        self.take(usize::try_from(length).map_err(|_| short())?)
    }

    pub(crate) fn take(&mut self, length: usize) -> Result<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(length).ok_or_else(short)?;
        self.0 = rest;
        Ok(bytes)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }
}

fn short() -> crate::ImageError {
    Fault::Damaged {
        what: "the layer file".into(),
        problem: "it ends early or holds a number that is too large".into(),
    }
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_values_round_trip() {
        let mut e = Encoder::default();
        let numbers = [0, 1, 127, 128, 300, u64::from(u32::MAX), u64::MAX];
        let signed = [0, 1, -1, i64::MAX, i64::MIN, 1_700_000_000];
        numbers.iter().for_each(|n| e.number(*n));
        signed.iter().for_each(|n| e.signed(*n));
        e.bytes(b"abc");
        let mut d = Decoder(&e.0);
        numbers.iter().for_each(|n| assert_eq!(d.number().unwrap(), *n));
        signed.iter().for_each(|n| assert_eq!(d.signed().unwrap(), *n));
        assert_eq!(d.bytes().unwrap(), b"abc");
        assert!(d.number().is_err());
    }

    #[test]
    fn lengths_beyond_the_end_are_refused() {
        let mut e = Encoder::default();
        e.number(u64::MAX);
        assert!(Decoder(&e.0).bytes().is_err());
        assert!(Decoder(&[0x80; 20]).number().is_err());
    }
}
