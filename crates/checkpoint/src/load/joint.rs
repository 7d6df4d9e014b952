//! Resources that several processes have together: the table of descriptors (CLONE_FILES), working directory, root
//! and umask (CLONE_FS), the undo values of semaphores (CLONE_SYSVSEM), and the I/O context (CLONE_IO).
//!
//! The kernel gives a task the table of another at its creation alone. A process of a restore is therefore created
//! with the table of its creator if both belong to one *group*, or if the group has members among its descendants
//! and elsewhere. A creator outside of the group passes the group's table on, and leaves it by unshare(2) before it
//! creates the children of another group. Where the children cannot be created in their order, they are created group
//! by group: those of the group that the creator was born into first, and those of its own group last. No call leaves
//! an I/O context: a creator that passes one on has it.
//!
//! Threads share both with their process, but for those that have either apart, each alone or with other threads.
//! A thread is created by one that has what the two share, and has a copy of the rest.
//!
//! Every order of creation that exists is not searched: a group that this one does not make is refused, with the name
//! of the process.
//!
//! This module decides, and uses no other.

use std::collections::{BTreeMap, HashMap};

/// The kinds of resources, in the order of [`Branch::groups`].
const KINDS: usize = 4;

/// The flags of clone(2) and unshare(2), in that order.
const FLAGS: [u64; KINDS] =
    [libc::CLONE_FILES as u64, libc::CLONE_FS as u64, libc::CLONE_SYSVSEM as u64, CLONE_IO];

/// The flag of an I/O context, which no call leaves.
pub(super) const CLONE_IO: u64 = 0x8000_0000;

/// A process to be created, with the processes that it creates.
#[derive(Debug, Default)]
pub(super) struct Branch {
    /// Children that it creates first.
    pub(super) before: Vec<usize>,
    /// Children that it creates afterwards.
    pub(super) after: Vec<usize>,
    /// Its groups, if it shares with others: the ids of their first processes.
    pub(super) groups: [Option<u32>; KINDS],
    /// The process has descriptors and a directory afterwards: it is neither a zombie nor a helper.
    pub(super) is_alive: bool,
}

impl Branch {
    fn children(&self) -> impl Iterator<Item = usize> {
        self.before.iter().chain(&self.after).copied()
    }
}

/// The creation of one process.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Birth {
    /// Flags of clone(2): what it shares with its creator at that moment.
    pub(super) flags: u64,
    /// What its creator leaves before (unshare(2)).
    pub(super) creator_leaves: u64,
    /// What it leaves itself once its children exist.
    pub(super) leaves: u64,
}

/// Decides how each process is created, and puts the children of each into their order.
///
/// Errors: a process whose group cannot be made.
pub(super) fn arrange(branches: &mut [Branch]) -> Result<Vec<Birth>, usize> {
    let mut births = vec![Birth::default(); branches.len()];
    if branches.iter().all(|branch| branch.groups == [None; KINDS]) {
        return Ok(births);
    }
    let mut entered = Vec::with_capacity(KINDS);
    for which in 0..KINDS {
        entered.push(self::entered(branches, which)?);
    }
    let kinds: [usize; KINDS] = std::array::from_fn(|which| which);
    for node in 0..branches.len() {
        // wait(2) returns the oldest child first, so their order is kept where it can be.
        if create_children(&branches[node], node, &entered, &mut births).is_err() {
            let ranks = kinds.map(|which| Ranks::of(branches, &entered[which], which, node));
            let rank =
                |child: &usize| kinds.map(|which| ranks[which].of_child(entered[which][*child]));
            let branch = &mut branches[node];
            branch.before.sort_by_key(rank);
            branch.after.sort_by_key(rank);
            create_children(&branches[node], node, &entered, &mut births)?;
        }
    }
    Ok(births)
}

/// The group that each process is born into: one with members below the process and elsewhere.
fn entered(branches: &[Branch], which: usize) -> Result<Vec<Option<u32>>, usize> {
    let mut sizes: HashMap<u32, usize> = HashMap::new();
    for group in branches.iter().filter_map(|branch| branch.groups[which]) {
        *sizes.entry(group).or_default() += 1;
    }
    let mut order = vec![0];
    let mut next = 0;
    while let Some(node) = order.get(next).copied() {
        order.extend(branches[node].children());
        next += 1;
    }
    // Members of the group at and below each process.
    let mut below: Vec<Option<(u32, usize)>> = vec![None; branches.len()];
    for node in order.into_iter().rev() {
        let own = branches[node].groups[which].map(|group| (group, 1));
        let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
        for (group, count) in
            own.into_iter().chain(branches[node].children().filter_map(|n| below[n]))
        {
            *counts.entry(group).or_default() += count;
        }
        let mut open = counts.into_iter().filter(|(group, count)| *count < sizes[group]);
        below[node] = open.next();
        if open.next().is_some() {
            return Err(node);
        }
    }
    Ok(below.into_iter().map(|group| group.map(|(group, _)| group)).collect())
}

/// The order of the groups of one process's children.
struct Ranks(HashMap<u32, (u8, bool, usize)>);

impl Ranks {
    fn of(branches: &[Branch], entered: &[Option<u32>], which: usize, node: usize) -> Self {
        let branch = &branches[node];
        let mut ranks = HashMap::new();
        let groups = |children: &[usize]| -> Vec<u32> {
            children.iter().filter_map(|child| entered[*child]).collect()
        };
        let after = groups(&branch.after);
        for (place, group) in groups(&branch.before).into_iter().chain(after.clone()).enumerate() {
            let kind = match Some(group) {
                of if of == entered[node] => 0,
                of if of == branch.groups[which] => 2,
                _ => 1,
            };
            ranks.entry(group).or_insert((kind, after.contains(&group), place));
        }
        Self(ranks)
    }

    /// Children without a group come first.
    fn of_child(&self, group: Option<u32>) -> Option<(u8, bool, usize)> {
        group.and_then(|group| self.0.get(&group).copied())
    }
}

/// Decides how one process creates its children in their present order.
fn create_children(
    branch: &Branch,
    node: usize,
    entered: &[Vec<Option<u32>>],
    births: &mut [Birth],
) -> Result<(), usize> {
    births[node].leaves = 0;
    for child in branch.children() {
        (births[child].flags, births[child].creator_leaves) = (0, 0);
    }
    for (which, entered) in entered.iter().enumerate() {
        pass_on(branch, which, node, entered, births)?;
    }
    Ok(())
}

/// Passes the tables of one process on to its children.
fn pass_on(
    branch: &Branch,
    which: usize,
    node: usize,
    entered: &[Option<u32>],
    births: &mut [Birth],
) -> Result<(), usize> {
    let own = branch.groups[which];
    let mut has = entered[node];
    let mut left = Vec::new();
    for child in branch.children() {
        let Some(group) = entered[child] else { continue };
        if has != Some(group) {
            if left.contains(&group) {
                return Err(child);
            }
            if let Some(had) = has {
                if own == has || FLAGS[which] == CLONE_IO {
                    return Err(child);
                }
                left.push(had);
                births[child].creator_leaves |= FLAGS[which];
            }
            has = Some(group);
        }
        births[child].flags |= FLAGS[which];
    }
    if has != own {
        if own.is_some() || branch.is_alive && FLAGS[which] == CLONE_IO {
            return Err(node);
        }
        if branch.is_alive {
            births[node].leaves |= FLAGS[which];
        }
    }
    Ok(())
}

/// The creation of a thread: its number in its process, that of its creator, and what they share.
pub(super) type ThreadBirth = (usize, usize, u64);

/// LIMIT: how often the threads that have something apart are gone through: each time, one more of those that depend
/// on each other is made.
const TURNS_MAX: usize = 64;

/// Decides which thread creates each other thread of a process, in their order. The groups of each thread are the ids
/// of the first threads that have a table, or a place, apart from the process; the first thread is the process.
///
/// Errors: a thread that no other can create.
pub(super) fn arrange_threads(threads: &[[Option<u32>; 2]]) -> Result<Vec<ThreadBirth>, usize> {
    let mut births = Vec::with_capacity(threads.len());
    // The first thread that has each pair of groups, and the first of each group.
    let mut pairs = HashMap::from([([None; 2], 0)]);
    let mut firsts = [HashMap::from([(None, 0)]), HashMap::from([(None, 0)])];
    let mut left: Vec<usize> = (1..threads.len()).collect();
    for _ in 0..TURNS_MAX {
        left.retain(|thread| {
            let of = threads[*thread];
            let known = [0, 1].map(|which| firsts[which].get(&of[which]).copied());
            let (creator, flags) = match (pairs.get(&of), known) {
                (Some(creator), _) => (*creator, FLAGS[0] | FLAGS[1]),
                (None, [None, None]) => (0, 0),
                (None, [Some(creator), None]) => (creator, FLAGS[0]),
                (None, [None, Some(creator)]) => (creator, FLAGS[1]),
                // Both exist, and no thread has the two.
                (None, [Some(_), Some(_)]) => return true,
            };
            births.push((*thread, creator, flags));
            pairs.entry(of).or_insert(*thread);
            for which in [0, 1] {
                firsts[which].entry(of[which]).or_insert(*thread);
            }
            false
        });
        if left.is_empty() {
            return Ok(births);
        }
    }
    Err(left[0])
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const FILES: u64 = FLAGS[0];
    const FS: u64 = FLAGS[1];

    /// Processes with the tables and the places of these groups, by the number of their creator.
    fn branches(all: &[(usize, Option<u32>, Option<u32>)]) -> Vec<Branch> {
        let mut branches: Vec<Branch> = Vec::new();
        for (node, (maker, table, place)) in all.iter().enumerate() {
            let groups = [*table, *place, None, None];
            branches.push(Branch { groups, is_alive: true, ..Branch::default() });
            if node != 0 {
                branches[*maker].after.push(node);
            }
        }
        branches
    }

    /// The groups of all processes, as the kernel would have them: by the task that has each table first.
    fn follow(branches: &[Branch], births: &[Birth]) -> [Vec<u32>; 2] {
        let mut tables = [vec![0; branches.len()], vec![0; branches.len()]];
        let mut fresh = 0;
        let mut next = vec![0];
        while let Some(node) = next.pop() {
            for child in branches[node].children() {
                for which in [0, 1] {
                    if births[child].creator_leaves & FLAGS[which] != 0 {
                        fresh += 1;
                        tables[which][node] = fresh;
                    }
                    fresh += 1;
                    let is_shared = births[child].flags & FLAGS[which] != 0;
                    tables[which][child] = if is_shared { tables[which][node] } else { fresh };
                }
            }
            for which in [0, 1] {
                if births[node].leaves & FLAGS[which] != 0 {
                    fresh += 1;
                    tables[which][node] = fresh;
                }
            }
            next.extend(branches[node].children());
        }
        tables
    }

    /// Processes are in one group exactly if they have one table at the end.
    fn holds(all: &[(usize, Option<u32>, Option<u32>)]) -> bool {
        let mut branches = branches(all);
        let Ok(births) = arrange(&mut branches) else { return false };
        let tables = follow(&branches, &births);
        for which in [0, 1] {
            for one in 0..all.len() {
                for other in 0..one {
                    let group = branches[one].groups[which];
                    let is_one = group.is_some() && group == branches[other].groups[which];
                    let is_shared = tables[which][one] == tables[which][other];
                    assert_eq!(is_one, is_shared, "{one} and {other} of {all:?}: {births:?}");
                }
            }
        }
        true
    }

    #[test]
    fn children_share_with_their_parent() {
        let mut all = branches(&[(0, Some(1), None), (0, Some(1), Some(2)), (1, None, Some(2))]);
        let births = arrange(&mut all).unwrap();
        let flags: Vec<u64> = births.iter().map(|birth| birth.flags).collect();
        assert_eq!(flags, [0, FILES, FS]);
        assert!(births.iter().all(|birth| birth.leaves == 0 && birth.creator_leaves == 0));
    }

    #[test]
    fn groups_beside_their_creator_are_made() {
        // Two pairs of siblings, and a process beside them.
        let pairs =
            [(0, Some(2), None), (0, Some(3), None), (0, Some(2), None), (0, Some(3), None)];
        let mut all = vec![(0, None, None), (0, None, None)];
        all.extend(pairs);
        assert!(holds(&all));
        // Cousins, through parents with descriptors of their own, and a group of the parents.
        let cousins = [
            (0, None, None),
            (0, None, Some(9)),
            (0, None, Some(9)),
            (1, Some(3), None),
            (2, Some(3), None),
        ];
        assert!(holds(&cousins));
        // A grandchild, whose parent executed a program since.
        assert!(holds(&[(0, Some(1), None), (0, None, None), (1, Some(1), None)]));
    }

    #[test]
    fn groups_that_cross_each_other_are_refused() {
        // Both lead through one process, which has one table at a time.
        let crossed = [
            (0, Some(1), None),
            (0, None, None),
            (0, Some(3), None),
            (1, Some(1), None),
            (1, Some(3), None),
        ];
        assert!(!holds(&crossed));
        // The child has the table of its creator for good.
        let stuck =
            [(0, Some(1), None), (0, Some(1), None), (1, Some(3), None), (1, Some(3), None)];
        assert!(!holds(&stuck));
    }

    #[test]
    fn no_process_leaves_an_io_context() {
        let with = |groups: &[Option<u32>]| {
            let all: Vec<_> =
                groups.iter().enumerate().map(|(n, _)| (n.saturating_sub(1), None, None)).collect();
            let mut branches = branches(&all);
            branches.iter_mut().zip(groups).for_each(|(branch, group)| branch.groups[3] = *group);
            arrange(&mut branches).map(|births| births.iter().map(|birth| birth.flags).collect())
        };
        let line = [None, Some(1), Some(1), None];
        assert_eq!(with(&line), Ok::<Vec<u64>, usize>(vec![0, 0, CLONE_IO, 0]));
        assert_eq!(with(&[Some(1), None, Some(1)]), Err(1));
    }

    #[test]
    fn threads_are_created_by_one_that_has_what_they_share() {
        let made = |threads: &[[Option<u32>; 2]]| {
            let births = arrange_threads(threads)?;
            let mut made = HashSet::from([0]);
            for (thread, creator, flags) in &births {
                assert!(made.contains(creator) && made.insert(*thread));
                for which in [0, 1] {
                    let (of, by) = (threads[*thread][which], threads[*creator][which]);
                    let is_first = !births
                        .iter()
                        .take_while(|birth| birth.0 != *thread)
                        .any(|birth| threads[birth.0][which] == of);
                    match flags & FLAGS[which] {
                        0 => assert!(is_first && of.is_some()),
                        _ => assert_eq!(of, by),
                    }
                }
            }
            assert_eq!(made.len(), threads.len());
            Ok::<_, usize>(births.len())
        };
        let (own, other) = (Some(2), Some(3));
        assert_eq!(made(&[[None; 2], [None; 2], [None; 2]]), Ok(2));
        assert_eq!(
            made(&[[None; 2], [own, None], [None, other], [own, None], [None, other]]),
            Ok(4)
        );
        assert_eq!(made(&[[None; 2], [own, other], [own, None], [own, other]]), Err(2));
        assert_eq!(made(&[[None; 2], [own, None], [own, other], [own, None], [own, other]]), Ok(4));
        assert_eq!(made(&[[None; 2], [own, None], [None, other], [own, other]]), Err(3));
    }

    #[test]
    fn groups_of_any_small_tree_are_made_or_refused() {
        let mut made = 0;
        for number in 0..4u32.pow(8) {
            let digit = |place: u32| number / 4u32.pow(place) % 4;
            let group = |of: u32| Some(of).filter(|of| *of != 0);
            let all: Vec<_> = (0..5)
                .map(|node| {
                    let maker =
                        if node == 0 { 0 } else { digit(node + 3) as usize % node as usize };
                    let table = if node == 0 { 1 } else { digit(node - 1) };
                    (maker, group(table), group(number >> node & 1))
                })
                .collect();
            made += u32::from(holds(&all));
        }
        assert!(made > 6_000, "{made}");
    }
}
