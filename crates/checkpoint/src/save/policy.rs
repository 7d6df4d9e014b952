//! Memory policies (set_mempolicy(2), mbind(2)), read by calls in the process itself. A kernel without NUMA has
//! none.
//!
//! LIMIT: the home node of a policy (set_mempolicy_home_node(2)) is not reported by the kernel, nor is a policy of
//! shared memory whose process has unmapped it.

use dormouse_kernel::Errno;
use dormouse_record::{Area, MemoryPolicy, RangePolicy};

use crate::inject::script::{Answers, Made, Room, Script};

/// MPOL_F_ADDR: of the memory at an address.
const OF_ADDRESS: i32 = 2;
const WORDS: usize = MemoryPolicy::WORDS_MAX;

/// Queries a policy with its nodes: that of the thread, or that of the memory at an address.
fn query(script: &mut Script, address: Option<u64>) -> (Made, Room, Room) {
    let (mode, nodes) = (script.room(8), script.room(WORDS as u64 * 8));
    let flags = if address.is_some() { OF_ADDRESS } else { 0 };
    let bits = WORDS as u64 * 64;
    let args = [mode.into(), nodes.into(), bits.into(), address.unwrap_or(0).into(), flags.into()];
    (script.call(libc::SYS_get_mempolicy, args), mode, nodes)
}

fn answer(answers: &Answers, (made, mode, nodes): (Made, Room, Room)) -> Option<MemoryPolicy> {
    answers.returned(made).ok()?;
    let [mode] = answers.numbers(mode);
    let mode = mode as u32;
    let words: [u64; WORDS] = answers.numbers(nodes);
    let used = words.iter().rposition(|word| *word != 0).map_or(0, |last| last + 1);
    (mode != 0).then(|| MemoryPolicy { mode, nodes: words[..used].to_vec() })
}

/// Queries the policy of a thread.
pub(super) fn of_thread(
    script: &mut Script,
) -> impl FnOnce(&Answers) -> Option<MemoryPolicy> + use<> {
    let queried = query(script, None);
    move |answers| answer(answers, queried)
}

/// Queries which areas have a policy of their own; returns their ranges.
pub(super) fn find(
    script: &mut Script,
    areas: &[Area],
) -> impl FnOnce(&Answers) -> Vec<(u64, u64)> + use<> {
    let queried: Vec<_> = areas
        .iter()
        .map(|area| {
            let mode = script.room(8);
            let args = [mode.into(), 0.into(), 0.into(), area.start.into(), OF_ADDRESS.into()];
            (script.call(libc::SYS_get_mempolicy, args), mode, (area.start, area.end))
        })
        .collect();
    move |answers| {
        let has_one = |(made, mode, range): (Made, Room, (u64, u64))| {
            let [mode] = answers.numbers(mode);
            (answers.returned(made).is_ok() && mode as u32 != 0).then_some(range)
        };
        queried.into_iter().filter_map(has_one).collect()
    }
}

/// Queries the policies of ranges. `run` makes the calls.
pub(super) fn of_ranges(
    ranges: Vec<(u64, u64)>,
    run: impl FnOnce(&Script) -> Result<Answers, Errno>,
) -> Result<Vec<RangePolicy>, Errno> {
    if ranges.is_empty() {
        return Ok(Vec::new());
    }
    let mut script = Script::default();
    let queried: Vec<_> =
        ranges.iter().map(|(start, _)| query(&mut script, Some(*start))).collect();
    let answers = run(&script)?;
    let of_range = |((start, end), queried)| {
        Some(RangePolicy { start, end, policy: answer(&answers, queried)? })
    };
    Ok(ranges.into_iter().zip(queried).filter_map(of_range).collect())
}
