//! Numbers of accounts.

use std::fmt;
use std::ops::RangeInclusive;

use dormouse_model::{IdMap, IdSlot, Invalid};
use serde::{Deserialize, Serialize};

/// The number of an account, by which kernel objects refer to it.
///
/// | numbers | accounts |
/// |---|---|
/// | 0 | root, and what has no account |
/// | 1 to 65,535 | made by an operator; given in order, and never again |
/// | 65,536 to 196,607 | own ones: 65,536 and the container's slot of host ids, which it alone has on the machine |
/// | 1,073,741,824 to 2,147,483,647 | made by an operator, with a number that several machines share |
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Number(pub u32);

impl Number {
    /// The root account.
    pub const ROOT: Self = Self(0);
    /// Numbers of accounts made on this machine.
    pub const MADE: RangeInclusive<u32> = 1..=65_535;
    /// The first number of containers' own accounts.
    const OWN_FIRST: u32 = 65_536;
    /// Numbers of accounts that several machines share.
    pub const GLOBAL: RangeInclusive<u32> = 1 << 30..=(1 << 31) - 1;

    /// Returns the number of a container's own account.
    pub fn own(ids: IdMap) -> Self {
        Self(Self::OWN_FIRST + ids.base / IdSlot::IDS)
    }

    /// Returns a number for an account that several machines share.
    pub fn global(number: u32) -> Result<Self, Invalid> {
        match Self::GLOBAL.contains(&number) {
            true => Ok(Self(number)),
            false => {
                let form = "1073741824 to 2147483647, the range for accounts of several machines";
                Err(Invalid::new("account number", number.to_string(), form))
            }
        }
    }
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_do_not_overlap() {
        let own = |slot: u32| Number::own(IdMap { base: slot * IdSlot::IDS, wide: false }).0;
        let (first, last) = (own(0), own(IdSlot::COUNT - 1));
        assert!(Number::ROOT.0 < *Number::MADE.start());
        assert_eq!(first, *Number::MADE.end() + 1);
        assert_eq!(last, 196_607);
        assert!(last < *Number::GLOBAL.start());
    }

    #[test]
    fn global_number_is_in_its_range() {
        for number in [1 << 30, (1 << 31) - 1] {
            assert_eq!(Number::global(number), Ok(Number(number)));
        }
        for number in [0, 1, 65_536, (1 << 30) - 1, 1 << 31, u32::MAX] {
            assert!(Number::global(number).is_err(), "{number}");
        }
    }
}
