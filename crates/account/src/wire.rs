//! The number of an account in the first packet (SYN) of a connection from another host.
//!
//! The format is that of the programs in the kernel, which write and read it (`wire.h` of the crate `bpf`).

use crate::number::Number;

/// Kinds of options (RFC 9293): the end of all, a pad, and one for experiments (RFC 4727).
const END: u8 = 0;
const PAD: u8 = 1;
const KIND: u8 = 254;
/// Bytes of the option, with kind and length.
const BYTES: usize = 10;
/// The number of the experiment (RFC 6994).
const EXPERIMENT: &[u8] = b"dmac";

/// Returns the number in the options of a TCP header; `None` without one, with one that is not shared by several
/// machines, and where an option before it is damaged. The sender controls all bytes.
pub fn sent_along(mut options: &[u8]) -> Option<Number> {
    loop {
        let (kind, behind) = options.split_first()?;
        options = match *kind {
            END => return None,
            PAD => behind,
            kind => {
                let bytes = usize::from(*behind.first()?);
                if bytes < 2 {
                    return None;
                }
                let whole = options.get(..bytes);
                if let Some(option) = whole.filter(|_| kind == KIND && bytes == BYTES)
                    && let Some(number) = option[2..].strip_prefix(EXPERIMENT)
                {
                    let number = u32::from_be_bytes(*number.first_chunk()?);
                    return Number::global(number).ok();
                }
                options.get(bytes..)?
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SMITH: u32 = 1 << 30;

    fn option(number: u32) -> Vec<u8> {
        [&[KIND, BYTES as u8], EXPERIMENT, &number.to_be_bytes()].concat()
    }

    #[test]
    fn number_is_found_among_other_options() {
        let own = option(SMITH);
        let other = [KIND, BYTES as u8, b'd', b'm', b'a', b'b', 0x40, 0, 0, 1];
        let long = [KIND, 12, b'd', b'm', b'a', b'c', 0x40, 0, 0, 1, 0, 0];
        for before in [&[][..], &[PAD; 30], &[2, 4, 5, 0xb4, PAD, PAD], &other, &long, &[3, 2]] {
            for behind in [&[][..], &[END], &[PAD, PAD], &option(SMITH + 1)] {
                let options = [before, &own, behind].concat();
                assert_eq!(sent_along(&options), Some(Number(SMITH)), "{options:?}");
            }
        }
    }

    #[test]
    fn damaged_options_and_local_numbers_are_none() {
        let own = option(SMITH);
        for length in 0..own.len() {
            assert_eq!(sent_along(&own[..length]), None, "{length}");
        }
        for before in [&[END][..], &[2, 0], &[2, 1], &[2, 255], &[2]] {
            assert_eq!(sent_along(&[before, &own].concat()), None, "{before:?}");
        }
        for number in [0, 1, 65_536, SMITH - 1, 1 << 31, u32::MAX] {
            assert_eq!(sent_along(&option(number)), None, "{number}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_to_their_end(options in proptest::collection::vec(any::<u8>(), 0..41)) {
            let found = sent_along(&options);
            prop_assert!(found.is_none_or(|number| Number::GLOBAL.contains(&number.0)));
        }
    }
}
