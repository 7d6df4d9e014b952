//! Generated names for unnamed containers.

use anyhow::{Context, Result};
use dormouse_model::Name;

const ADJECTIVES: [&str; 64] = [
    "agile", "amber", "ample", "apt", "azure", "bold", "brave", "brief", "bright", "brisk", "calm",
    "candid", "clear", "clever", "cosy", "crisp", "curly", "dapper", "deft", "drowsy", "eager",
    "early", "even", "fair", "fleet", "fond", "frank", "fresh", "gentle", "glad", "golden",
    "hardy", "hazel", "honest", "keen", "kind", "light", "lively", "lucid", "mellow", "merry",
    "mild", "modest", "neat", "nimble", "noble", "patient", "plain", "quick", "quiet", "rapid",
    "ready", "shy", "silent", "sleepy", "snug", "sober", "spry", "steady", "sunny", "swift",
    "tidy", "warm", "witty",
];

const NOUNS: [&str; 64] = [
    "acorn", "alder", "apple", "ash", "aspen", "badger", "barley", "beech", "berry", "birch",
    "bramble", "briar", "burrow", "catkin", "cedar", "cherry", "clover", "copse", "cricket",
    "dale", "elder", "elm", "fern", "finch", "glade", "grove", "hare", "hawthorn", "hazelnut",
    "heath", "hedge", "holly", "ivy", "jay", "lark", "larch", "linden", "maple", "marten",
    "meadow", "moss", "moth", "nest", "newt", "oak", "orchard", "otter", "owl", "pine", "poplar",
    "reed", "robin", "rowan", "shrew", "spruce", "squirrel", "stoat", "thicket", "thrush", "vole",
    "willow", "wren", "yarrow", "yew",
];

/// Random bytes (getrandom(2)).
pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let flags = rustix::rand::GetRandomFlags::empty();
    let n = rustix::rand::getrandom(&mut bytes, flags).context("cannot get random bytes")?;
    anyhow::ensure!(n == N, "the kernel gave too few random bytes"); // whole up to 256 bytes
    Ok(bytes)
}

/// Generates a name such as `nimble_hazelnut`; from the third attempt on with digits, for hosts on
/// which those 4,096 are taken.
pub(crate) fn generate(attempt: u32) -> Result<Name> {
    let bytes = random::<4>()?;
    let word = |words: &[&'static str; 64], b: u8| words[usize::from(b) % 64];
    let mut name = format!("{}_{}", word(&ADJECTIVES, bytes[0]), word(&NOUNS, bytes[1]));
    if attempt >= 2 {
        name.push_str(&format!("_{}", u16::from_le_bytes([bytes[2], bytes[3]])));
    }
    Ok(name.parse()?)
}

/// Generates a name for an anonymous volume: 64 hex digits.
pub(crate) fn volume() -> Result<Name> {
    let text: String = random::<32>()?.iter().map(|b| format!("{b:02x}")).collect();
    Ok(text.parse()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_names_are_valid_and_words_distinct() {
        for list in [ADJECTIVES, NOUNS] {
            let set: std::collections::BTreeSet<_> = list.iter().collect();
            assert_eq!(set.len(), 64);
        }
        for attempt in 0..4 {
            assert_eq!(
                generate(attempt).unwrap().as_str().split('_').count(),
                2 + (attempt as usize / 2)
            );
        }
        assert_eq!(volume().unwrap().as_str().len(), 64);
    }
}
