//! The kernel's own description of its types (Documentation/bpf/btf.rst): where a program finds a
//! function's id, and where in a structure of this very kernel a field is.

/// The kinds of types that are used here.
pub(crate) const STRUCT: u32 = 4;
const UNION: u32 = 5;
pub(crate) const TYPEDEF: u32 = 8;
pub(crate) const FUNC: u32 = 12;

/// The table, as the kernel gives it.
#[derive(Debug)]
pub(crate) struct Btf {
    bytes: Vec<u8>,
    types: usize,
    types_end: usize,
    strings: usize,
}

/// One type.
#[derive(Clone, Copy)]
struct Type {
    at: usize,
    id: u32,
    kind: u32,
    name: u32,
    count: usize,
}

impl Btf {
    /// Reads the table of the running kernel.
    pub(crate) fn read() -> std::io::Result<Self> {
        let bytes = std::fs::read("/sys/kernel/btf/vmlinux")?;
        Self::parse(bytes).ok_or_else(|| std::io::Error::from(std::io::ErrorKind::InvalidData))
    }

    fn parse(bytes: Vec<u8>) -> Option<Self> {
        // Header: magic and version, its length, then offset and length of types and of strings.
        let word = |at| word(&bytes, at);
        if word(0)? & 0xffff != 0xeb9f {
            return None;
        }
        let base = word(4)? as usize;
        let types = base + word(8)? as usize;
        let (types_end, strings) = (types + word(12)? as usize, base + word(16)? as usize);
        Some(Self { bytes, types, types_end, strings })
    }

    /// The id of a named type of a kind.
    pub(crate) fn find(&self, kind: u32, name: &str) -> Option<u32> {
        self.types().find(|t| t.kind == kind && self.is_named(t.name, name)).map(|t| t.id)
    }

    /// Returns the offset of a field in bytes: each name is that of a structure inside the last
    /// one. Anonymous structures are searched, as in C.
    pub(crate) fn offset(&self, structure: &str, path: &[&str]) -> Option<u32> {
        let mut found =
            self.types().find(|t| t.kind == STRUCT && self.is_named(t.name, structure))?;
        let mut sum = 0;
        for name in path {
            let (bits, id) = self.member(found, name)?;
            sum += bits;
            // The type of the last field does not matter.
            found = self.types().find(|t| t.id == id)?;
        }
        Some(sum / 8)
    }

    /// Offset in bits and type of a member.
    fn member(&self, of: Type, name: &str) -> Option<(u32, u32)> {
        const MEMBER_BYTES: usize = 12;
        for n in 0..of.count {
            let at = of.at + 12 + n * MEMBER_BYTES;
            let (text, id) = (word(&self.bytes, at)?, word(&self.bytes, at + 4)?);
            // The upper bits are the width of a bit field, where the structure has any.
            let bits = word(&self.bytes, at + 8)? & 0xff_ffff;
            if self.is_named(text, name) {
                return Some((bits, id));
            }
            if self.is_named(text, "")
                && let Some(inner) = self.types().find(|t| t.id == id)
                && [STRUCT, UNION].contains(&inner.kind)
                && let Some((more, id)) = self.member(inner, name)
            {
                return Some((bits + more, id));
            }
        }
        None
    }

    fn is_named(&self, offset: u32, name: &str) -> bool {
        let text = self.bytes.get(self.strings + offset as usize..).unwrap_or_default();
        text.starts_with(name.as_bytes()) && text.get(name.len()) == Some(&0)
    }

    fn types(&self) -> impl Iterator<Item = Type> {
        let (mut at, mut id) = (self.types, 0);
        std::iter::from_fn(move || {
            if at >= self.types_end {
                return None;
            }
            let (name, info) = (word(&self.bytes, at)?, word(&self.bytes, at + 4)?);
            id += 1;
            let (kind, count) = (info >> 24 & 0x1f, (info & 0xffff) as usize);
            let found = Type { at, id, kind, name, count };
            at += 12
                + match kind {
                    1 | 14 | 17 => 4,                       // int, var, decl_tag
                    3 => 12,                                // array
                    STRUCT | UNION | 15 | 19 => 12 * count, // and datasec, enum64
                    6 | 13 => 8 * count,                    // enum, function prototype
                    _ => 0,
                };
            Some(found)
        })
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_this_kernel_are_found() {
        let Ok(btf) = Btf::read() else { return eprintln!("SKIPPED: this kernel has no BTF") };
        assert!(btf.find(FUNC, "do_exit").is_some());
        assert_eq!(btf.find(FUNC, "no_such_function_of_linux"), None);
        // Since the first version, and in an anonymous union.
        assert_eq!(btf.offset("list_head", &["prev"]), Some(8));
        let (block, end) = (["restart_block"], ["restart_block", "poll"]);
        assert!(btf.offset("task_struct", &end) >= btf.offset("task_struct", &block));
        assert_eq!(btf.offset("task_struct", &["restart_block", "no_such"]), None);
    }

    #[test]
    fn malformed_table_parses_to_none() {
        assert!(Btf::parse(Vec::new()).is_none());
        let cut = [0x9f, 0xeb, 1, 0, 24, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        let cut = Btf::parse(cut.to_vec()).unwrap();
        assert_eq!(cut.find(FUNC, "x"), None);
    }
}
