//! Records that the programs and their loaders share.
//!
//! A record is defined twice: in `record.h` for C, and with [`record!`] for Rust. The layout of the
//! Rust struct is that of C (`repr(C)`), and its bytes are written field by field, so padding is
//! zero. A test of each group compares names, offsets and sizes with the types in the compiled
//! object (BTF).

/// A number, or an array of numbers, in native byte order.
pub(crate) trait Field: Sized {
    /// Writes the value to as many bytes as it has.
    fn put(&self, bytes: &mut [u8]);
    /// Reads the value from as many bytes as it has.
    fn get(bytes: &[u8]) -> Self;
}

macro_rules! numbers {
    ($($number:ty)*) => {
        $(impl Field for $number {
            fn put(&self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&self.to_ne_bytes());
            }

            fn get(bytes: &[u8]) -> Self {
                bytes.first_chunk().map_or(0, |bytes| Self::from_ne_bytes(*bytes))
            }
        })*
    };
}

numbers! { u8 u16 u32 u64 }

impl<T: Field, const N: usize> Field for [T; N] {
    fn put(&self, bytes: &mut [u8]) {
        let parts = bytes.chunks_exact_mut(size_of::<T>());
        self.iter().zip(parts).for_each(|(value, part)| value.put(part));
    }

    fn get(bytes: &[u8]) -> Self {
        let at = |n| n * size_of::<T>();
        std::array::from_fn(|n| T::get(bytes.get(at(n)..at(n + 1)).unwrap_or_default()))
    }
}

/// A struct of a `record.h`.
pub(crate) trait Record: Sized {
    /// Its name in C.
    #[cfg(test)]
    const NAME: &'static str;
    /// Name, offset and size of each field.
    #[cfg(test)]
    const LAYOUT: &'static [(&'static str, usize, usize)];

    /// Returns the bytes of the record.
    fn to_bytes(&self) -> Vec<u8>;

    /// Reads the record. Missing bytes count as zero.
    fn from_bytes(bytes: &[u8]) -> Self;

    /// Returns the record with all fields zero.
    fn zero() -> Self {
        Self::from_bytes(&[])
    }
}

/// Defines a [`Record`]: `struct Rust = "struct_in_c" { field: type, }`.
macro_rules! record {
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident = $c:literal {
            $($(#[$field_meta:meta])* $field_vis:vis $field:ident: $kind:ty,)*
        }
    ) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Debug, Clone, PartialEq, Eq)]
        $vis struct $name {
            $($(#[$field_meta])* $field_vis $field: $kind,)*
        }

        impl $crate::record::Record for $name {
            #[cfg(test)]
            const NAME: &'static str = $c;
            #[cfg(test)]
            const LAYOUT: &'static [(&'static str, usize, usize)] = &[
                $((stringify!($field), ::std::mem::offset_of!(Self, $field), size_of::<$kind>()),)*
            ];

            fn to_bytes(&self) -> Vec<u8> {
                let mut bytes = vec![0; size_of::<Self>()];
                $({
                    let at = ::std::mem::offset_of!(Self, $field);
                    let part = &mut bytes[at..at + size_of::<$kind>()];
                    $crate::record::Field::put(&self.$field, part);
                })*
                bytes
            }

            fn from_bytes(bytes: &[u8]) -> Self {
                Self {
                    $($field: {
                        let at = ::std::mem::offset_of!(Self, $field);
                        let part = bytes.get(at..at + size_of::<$kind>()).unwrap_or_default();
                        $crate::record::Field::get(part)
                    },)*
                }
            }
        }
    };
}

pub(crate) use record;

/// Comparison of the records of a group with its compiled object.
#[cfg(test)]
pub(crate) mod tests {
    use libbpf_rs::btf::types::{MemberAttr, Struct};
    use libbpf_rs::btf::{Btf, HasSize};

    use super::*;

    /// Asserts that the object has this record with the same fields, offsets and size.
    #[track_caller]
    pub(crate) fn assert_same<R: Record>(object: &[u8]) {
        let btf = Btf::from_raw("object", object).unwrap().expect("the object has BTF");
        let found: Struct<'_> = btf.type_by_name(R::NAME).expect(R::NAME);
        let field = |n: u32| {
            let member = found.get(n as usize).unwrap();
            let MemberAttr::Normal { offset } = member.attr else { panic!("a bit field") };
            (member.name.unwrap().to_str().unwrap(), offset as usize / 8)
        };
        let fields: Vec<_> = (0..found.len() as u32).map(field).collect();
        let ours: Vec<_> = R::LAYOUT.iter().map(|(name, at, _)| (*name, *at)).collect();
        assert_eq!(ours, fields, "{}", R::NAME);
        assert_eq!(size_of::<R>(), found.size(), "{}", R::NAME);
        let ends = R::LAYOUT.iter().map(|(_, at, bytes)| at + bytes);
        let begins = R::LAYOUT.iter().map(|(_, at, _)| *at).skip(1).chain([size_of::<R>()]);
        assert!(ends.zip(begins).all(|(end, begin)| end <= begin && begin - end < 8));
    }

    record! {
        struct Mixed = "none" {
            small: u8,
            large: u64,
            list: [u16; 3],
        }
    }

    #[test]
    fn bytes_of_a_record_have_its_layout_and_zero_padding() {
        let mixed = Mixed { small: 1, large: u64::MAX, list: [2, 3, 4] };
        let bytes = mixed.to_bytes();
        assert_eq!(bytes.len(), 24);
        assert_eq!(bytes[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[8..16], [255; 8]);
        assert_eq!((bytes[16..22].len(), &bytes[22..]), (6, &[0, 0][..]));
        assert_eq!(Mixed::from_bytes(&bytes), mixed);
        assert_eq!(Mixed::from_bytes(&bytes[..9]), Mixed { small: 1, ..Mixed::zero() });
    }
}
