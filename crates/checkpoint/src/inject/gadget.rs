//! The `syscall` instruction through which calls are injected: searched in the memory of a process.

use dormouse_kernel::call;

/// Searches for `syscall` (0f 05), a page at a time from the end: data comes before code.
pub(crate) fn find(pid: u32, start: u64, bytes: u64) -> Option<u64> {
    let mut page = [0; 4096];
    for at in (0..bytes / 4096).rev().map(|page| start + page * 4096) {
        // Data pages of the vDSO (vvar) cannot be read this way.
        if call::read_memory(pid, &mut page, &[(at, 4096)]).is_ok_and(|n| n == 4096)
            && let Some(offset) = page.windows(2).position(|w| w == [0x0f, 0x05])
        {
            return Some(at + offset as u64);
        }
    }
    None
}
