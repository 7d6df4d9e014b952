//! The creator of each process: every process is created by its parent, in its recorded session.
//!
//! A session is inherited at fork and only left by setsid(2), so the order matters: a child in the
//! session in which its parent was created is created before the parent leaves that session. A
//! process in neither session (a daemon: its creator led the session, forked and exited) is created
//! by a *helper*, which exits; the first process then adopts it, as originally. Helpers also
//! replace leaders of process groups that have exited. A helper has the pid of the process that it
//! replaces, or an unused one.
//!
//! This module is the top of the program's half: each sequence begins here.

use std::collections::{HashMap, HashSet};

use dormouse_record::{Error, Process, Result};

use super::inherit::Inheritance;
use super::joint::{self, Birth, Branch};
use super::plan::Plan;
use super::{
    cgroup, helper, ipc, memory, numberer, object, process, schedule, stage, terminal, thread,
    time, userfault,
};
use crate::inject::program::{Arg, Call, Sequence};

/// A process to be made.
struct Node {
    pid: u32,
    /// Index of the record; `None` for a helper.
    record: Option<usize>,
    leads_session: bool,
    /// Its process group; 0 for that of its creator.
    group: u32,
    /// Children that it creates in the session of its birth, before it leads one.
    before: Vec<usize>,
    /// Children that it creates in its own session.
    after: Vec<usize>,
    /// The session in which it is created.
    born_in: u32,
    session: u32,
}

/// The session and process group of an init, which has no record.
const OF_INIT: u32 = 1;

/// The sequences of all processes and threads, the first process's first.
pub(super) fn sequences(plan: &mut Plan<'_>) -> Result<Vec<Sequence>> {
    let mut nodes = nodes(plan)?;
    let births = births(plan, &mut nodes)?;
    let inheritance = inheritance(plan, &nodes)?;
    // Threads follow the processes, and helper processes of other modules follow the threads.
    let mut next_thread = nodes.len();
    let alive = plan.records.processes.iter().filter(|p| p.ended.is_none());
    plan.helpers_from = nodes.len() + alive.map(|p| p.threads.len() - 1).sum::<usize>();
    let mut threads = Vec::new();
    let mut all = Vec::new();
    for (n, node) in nodes.iter().enumerate() {
        let mut sequence = Sequence::default();
        if n == 0 {
            process::begin(plan, &mut sequence)?;
            cgroup::make_all(plan, &mut sequence)?;
            object::make_all(plan, &mut sequence)?;
        }
        inheritance.fill_in(plan, &mut sequence, n)?;
        born(plan, &mut sequence, &nodes, (n, &births))?;
        let record = node.record.map(|r| &plan.records.processes[r]);
        match record {
            Some(record) if record.ended.is_none() => {
                reap_helpers(&mut sequence, &nodes, node);
                if n == 0 {
                    numberer::begin(plan, &mut sequence)?;
                }
                time::enter(plan, &mut sequence, record)?;
                ipc::enter(plan, &mut sequence, record)?;
                memory::restore(plan, &mut sequence, record, inheritance.of(n))?;
                userfault::create(plan, &mut sequence, record);
                let mut made = process::restore(plan, &mut sequence, record, next_thread)?;
                sequence.stage(stage::WHOLE);
                made.extend(process::enter_user(plan, &mut sequence, record, next_thread)?);
                next_thread += made.len();
                threads.extend(made);
                numberer::end(plan, &mut sequence, n == 0);
                process::last(plan, &mut sequence, record)?;
                thread::last(plan, &mut sequence, &record.threads[0])?;
                sequence.stage(stage::DONE);
            }
            other => end(plan, &mut sequence, other),
        }
        all.push(sequence);
    }
    all.extend(threads);
    all.append(&mut plan.helpers);
    Ok(all)
}

/// Checks that there is a creator for each process.
pub(super) fn check(plan: &mut Plan<'_>) -> Result<()> {
    let mut nodes = nodes(plan)?;
    births(plan, &mut nodes).map(drop)
}

/// The memory that processes inherit from their creators.
fn inheritance(plan: &Plan<'_>, nodes: &[Node]) -> Result<Inheritance> {
    if let Some(shared) = plan.born_with {
        // Helpers, which exit before the process gets its memory, need none.
        return Ok(Inheritance::of_one(shared.mapped()));
    }
    if nodes.len() == 1 {
        return Ok(Inheritance::default());
    }
    let mut makers = vec![None; nodes.len()];
    makers[0] = Some(0);
    let mut next = vec![0];
    while let Some(maker) = next.pop() {
        for child in nodes[maker].before.iter().chain(&nodes[maker].after) {
            if makers[*child].is_none() {
                makers[*child] = Some(maker);
                next.push(*child);
            }
        }
    }
    let makers: Option<Vec<usize>> = makers.into_iter().collect();
    let makers = makers.ok_or_else(|| {
        let text = "it has processes that descend from each other, or from no process";
        Error::damaged("section 'process'", text)
    })?;
    let records: Vec<Option<usize>> = nodes.iter().map(|node| node.record).collect();
    Ok(Inheritance::find(plan.records, &makers, &records))
}

/// The subreapers that adopt a process of the records. A subreaper that does not may have become one when orphans below
/// it had gone to another parent already.
fn adopters(processes: &[Process]) -> HashSet<u32> {
    let by_pid: HashMap<u32, &Process> = processes.iter().map(|it| (it.pid, it)).collect();
    let is_adopted = |process: &&Process| {
        let Some(parent) = by_pid.get(&process.parent) else { return false };
        let above = by_pid.get(&parent.parent).map_or(0, |above| above.session);
        let own = [process.pid, parent.session, above];
        parent.subreaper && !own.contains(&process.session)
    };
    processes.iter().filter(is_adopted).map(|process| process.parent).collect()
}

fn nodes(plan: &mut Plan<'_>) -> Result<Vec<Node>> {
    plan.adopters = adopters(&plan.records.processes);
    let mut nodes: Vec<Node> = Vec::new();
    let mut by_pid: HashMap<u32, usize> = HashMap::new();
    let processes = &plan.records.processes;
    for (n, record) in processes.iter().enumerate() {
        by_pid.insert(record.pid, n);
        nodes.push(Node {
            pid: record.pid,
            record: Some(n),
            leads_session: record.session == record.pid && record.pid != 1,
            group: record.group,
            before: Vec::new(),
            after: Vec::new(),
            // A program is created in the session of its init.
            born_in: if plan.records.has_init() { OF_INIT } else { 0 },
            session: record.session,
        });
    }
    // Finds the creator of each process, for those that their parent can create.
    let mut helpers = Helpers::new();
    for n in 1..processes.len() {
        let record = &processes[n];
        let Some(parent) = by_pid.get(&record.parent).copied() else {
            // A child of an init. A session leader may have been created in any session.
            let session = if nodes[n].leads_session { OF_INIT } else { record.session };
            let orphan = (record, None, session);
            let helper = adopted(plan, &mut nodes, &by_pid, &mut helpers, orphan)?;
            nodes[n].born_in = session;
            nodes[helper].after.push(n);
            continue;
        };
        nodes[n].born_in = nodes[parent].session;
        if nodes[n].leads_session || record.session == nodes[parent].session {
            nodes[parent].after.push(n);
        } else if record.session == nodes[parent].born_in {
            nodes[n].born_in = record.session;
            nodes[parent].before.push(n);
        } else if parent == 0 && !plan.records.has_init() || processes[parent].subreaper {
            let orphan = (record, Some(parent), record.session);
            let helper = adopted(plan, &mut nodes, &by_pid, &mut helpers, orphan)?;
            nodes[n].born_in = record.session;
            nodes[helper].after.push(n);
        } else {
            return Err(Error::Elsewhere(format!(
                "process {} ({}) is in a session that neither it nor its parent can have come \
                 from",
                record.pid, record.name
            )));
        }
    }
    let is_alive = |node: &Node| node.record.is_some_and(|r| processes[r].ended.is_none());
    for n in 0..nodes.len() {
        let (group, pid) = (nodes[n].group, nodes[n].pid);
        if is_alive(&nodes[n]) || nodes[n].record.is_none() || by_pid.contains_key(&group) {
            continue;
        }
        // The leader of its group has exited, and a helper replaces it. A zombie cannot wait for one.
        let is_maker = |node: &Node| node.before.contains(&n) || node.after.contains(&n);
        let maker = nodes.iter().position(is_maker).filter(|maker| is_alive(&nodes[*maker]));
        // The helper of a session, or the init, leads the group already: a second one would need the
        // same pid. LIMIT: the zombie is in the group of its parent then.
        let is_led = plan.records.has_init() && group == OF_INIT
            || helpers.keys().any(|(session, _)| *session == group);
        match maker {
            Some(maker) if group != pid && group != 0 && !is_led => {
                if !nodes.iter().any(|node| leads_as_helper(node, group)) {
                    let is_before = nodes[maker].before.contains(&n);
                    led_by_helper(&mut nodes, group, maker, is_before);
                }
            }
            _ => nodes[n].group = 0,
        }
    }
    lead_groups(plan, &mut nodes, &by_pid, &helpers);
    Ok(nodes)
}

/// Helpers by the session in which they create children, and the process that adopts these.
type Helpers = HashMap<(u32, Option<usize>), usize>;

/// The creator of a process that the first process, a subreaper or an init (`None`) is to adopt: a
/// zombie that led the session, a helper in its place, or a helper below the leader if that is
/// alive.
fn adopted(
    plan: &mut Plan<'_>,
    nodes: &mut Vec<Node>,
    by_pid: &HashMap<u32, usize>,
    helpers: &mut Helpers,
    (record, parent, session): (&Process, Option<usize>, u32),
) -> Result<usize> {
    if let Some(helper) = helpers.get(&(session, parent)) {
        return Ok(*helper);
    }
    let leader = by_pid.get(&session).copied();
    let is_of_init = plan.records.has_init() && session == OF_INIT;
    if is_of_init && parent.is_some()
        || parent.is_none() && plan.adopters.contains(&plan.records.processes[0].pid)
        || leader.is_some_and(|leader| adopter(plan, by_pid, leader) != parent)
    {
        return Err(Error::Elsewhere(format!(
            "process {} ({}) has a parent that would not adopt it again",
            record.pid, record.name
        )));
    }
    let is_zombie = |n: usize| plan.records.processes[n].ended.is_some();
    let helper = match leader {
        Some(leader) if is_zombie(leader) => leader,
        _ => {
            let maker = leader.or(parent).unwrap_or(0);
            let leads_session = leader.is_none() && !is_of_init;
            let pid = if leads_session { session } else { plan.fresh_pid() };
            nodes.push(Node {
                pid,
                record: None,
                leads_session,
                group: 0,
                before: Vec::new(),
                after: Vec::new(),
                born_in: if is_of_init { OF_INIT } else { nodes[maker].session },
                session,
            });
            let helper = nodes.len() - 1;
            // In the session of the init only before the program creates its own.
            match is_of_init && nodes[maker].leads_session {
                true => nodes[maker].before.push(helper),
                false => nodes[maker].after.push(helper),
            }
            helper
        }
    };
    helpers.insert((session, parent), helper);
    Ok(helper)
}

/// The process that adopts the children of a process which exits, or of a helper below a living one; `None` is an init.
fn adopter(plan: &Plan<'_>, by_pid: &HashMap<u32, usize>, of: usize) -> Option<usize> {
    let processes = &plan.records.processes;
    let mut at = of;
    if processes[of].ended.is_none() && plan.adopters.contains(&processes[of].pid) {
        return Some(of);
    }
    // Parents come before their children, so this loop ends.
    while at != 0 {
        at = by_pid.get(&processes[at].parent).copied()?;
        if plan.adopters.contains(&processes[at].pid) {
            return Some(at);
        }
    }
    (!plan.records.has_init()).then_some(0)
}

/// Adds helpers for process groups whose leader has exited.
fn lead_groups(
    plan: &Plan<'_>,
    nodes: &mut Vec<Node>,
    by_pid: &HashMap<u32, usize>,
    helpers: &Helpers,
) {
    let mut led: Vec<u32> =
        nodes.iter().filter(|node| leads_as_helper(node, node.pid)).map(|node| node.pid).collect();
    for n in 0..nodes.len() {
        let group = nodes[n].group;
        let is_of_init = plan.records.has_init() && group == OF_INIT;
        let is_led =
            group == 0 || is_of_init || by_pid.contains_key(&group) || led.contains(&group);
        // A helper that replaces a session leader leads its group, too.
        if is_led || helpers.keys().any(|(session, _)| *session == group) {
            continue;
        }
        led.push(group);
        led_by_helper(nodes, group, n, false);
    }
}

/// Whether a node is a helper that leads a process group.
fn leads_as_helper(node: &Node, group: u32) -> bool {
    node.record.is_none() && node.pid == group && node.group == group
}

/// Adds a helper that leads a process group, created by `maker`.
fn led_by_helper(nodes: &mut Vec<Node>, group: u32, maker: usize, is_before: bool) {
    let made = &nodes[maker];
    let session = if is_before { made.born_in } else { made.session };
    let helper = Node {
        pid: group,
        record: None,
        leads_session: false,
        group,
        before: Vec::new(),
        after: Vec::new(),
        born_in: session,
        session,
    };
    nodes.push(helper);
    let index = nodes.len() - 1;
    let of = &mut nodes[maker];
    if is_before { of.before.push(index) } else { of.after.push(index) }
}

/// How each process is created, so that processes share what they shared.
fn births(plan: &Plan<'_>, nodes: &mut [Node]) -> Result<Vec<Birth>> {
    let processes = &plan.records.processes;
    let owners = |of: fn(&Process) -> Option<u32>| -> HashSet<u32> {
        processes.iter().filter_map(of).collect()
    };
    let owners = [
        owners(|process| process.table_of),
        owners(|process| process.place_of),
        owners(|process| process.undo_of),
        owners(|process| process.io_of),
    ];
    let group = |process: &Process, which: usize| {
        let of = [process.table_of, process.place_of, process.undo_of, process.io_of][which];
        of.or(Some(process.pid).filter(|pid| owners[which].contains(pid)))
    };
    let branch = |node: &mut Node| {
        let record = node.record.map(|r| &processes[r]).filter(|process| process.ended.is_none());
        Branch {
            before: std::mem::take(&mut node.before),
            after: std::mem::take(&mut node.after),
            groups: [0, 1, 2, 3].map(|which| record.and_then(|process| group(process, which))),
            is_alive: record.is_some(),
        }
    };
    let mut branches: Vec<Branch> = nodes.iter_mut().map(branch).collect();
    let births = joint::arrange(&mut branches).map_err(|node| {
        let process = nodes[node].record.map(|r| &processes[r]);
        let (pid, name) = process.map_or((nodes[node].pid, ""), |it| (it.pid, it.name.as_str()));
        Error::Elsewhere(format!(
            "process {pid} ({name}) and its descendants share descriptors (CLONE_FILES), working \
             directories (CLONE_FS), undo values (CLONE_SYSVSEM) or I/O contexts (CLONE_IO) with \
             processes that cannot create them"
        ))
    });
    for (node, branch) in nodes.iter_mut().zip(branches) {
        (node.before, node.after) = (branch.before, branch.after);
    }
    births
}

/// Makes a process leave what it shares.
fn leave(sequence: &mut Sequence, pid: u32, flags: u64) {
    if flags != 0 {
        let what = format!("what process {pid} no longer shares");
        sequence.call(what, Call::new(libc::SYS_unshare, [flags.into()]));
    }
}

/// Sessions, children and groups.
fn born(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    nodes: &[Node],
    (n, births): (usize, &[Birth]),
) -> Result<()> {
    let node = &nodes[n];
    let fork = |plan: &mut Plan<'_>, sequence: &mut Sequence, child: usize| {
        let pid = nodes[child].pid;
        leave(sequence, node.pid, births[child].creator_leaves);
        if births[child].flags & joint::CLONE_IO != 0 {
            schedule::begin_io(sequence, node.pid);
        }
        let record = nodes[child].record.map(|r| &plan.records.processes[r]);
        let cgroup = record.and_then(|r| r.cgroup.as_ref()).and_then(|path| plan.cgroups.get(path));
        let call =
            helper::clone_with_pid(plan, sequence, births[child].flags, (pid, cgroup.copied()));
        sequence.fork(format!("process {pid}"), child, call);
    };
    let record = node.record.map(|r| &plan.records.processes[r]);
    if record.is_some_and(|r| r.ended.is_none()) && plan.adopters.contains(&node.pid) {
        // ORDER: before the first orphan, which it adopts.
        process::become_subreaper(sequence, node.pid);
    }
    for child in &node.before {
        fork(plan, sequence, *child);
    }
    if node.leads_session {
        sequence.call(format!("the session {}", node.pid), Call::new(libc::SYS_setsid, []));
    }
    let leads = node.session == node.pid && node.record.is_some();
    if leads {
        terminal::take(plan, sequence, node.session);
    }
    for child in &node.after {
        fork(plan, sequence, *child);
    }
    leave(sequence, node.pid, births[n].leaves);
    sequence.stage(stage::BORN);
    let set_group = |group: u32| Call::new(libc::SYS_setpgid, [Arg::Number(0), group.into()]);
    let leads_group = node.group == node.pid && node.session != node.pid;
    if leads_group {
        sequence.call(format!("the process group {}", node.pid), set_group(0));
    }
    sequence.stage(stage::LED);
    // The leader of a session cannot leave its group, and need not; helpers stay in their
    // creator's.
    if !leads_group && node.session != node.pid && node.group != 0 {
        let what = format!("process {}'s place in group {}", node.pid, node.group);
        sequence.call(what, set_group(node.group));
    }
    sequence.stage(stage::JOINED);
    let is_first = node.pid == plan.records.processes[0].pid;
    // An init sets no foreground group; its program does.
    if leads || is_first && node.session == OF_INIT {
        terminal::foreground(plan, sequence, node.session);
    }
    if is_first {
        terminal::settle(plan, sequence)?;
    }
    Ok(())
}

/// Waits for the helpers that a process has created.
fn reap_helpers(sequence: &mut Sequence, nodes: &[Node], node: &Node) {
    for child in node.before.iter().chain(&node.after) {
        if nodes[*child].record.is_none() {
            let pid = nodes[*child].pid;
            helper::wait(sequence, &format!("helper {pid}"), pid);
        }
    }
}

/// The exit of a helper or a zombie.
fn end(plan: &mut Plan<'_>, sequence: &mut Sequence, record: Option<&Process>) {
    let status = record.and_then(|r| r.ended).unwrap_or(0);
    if let Some(record) = record {
        thread::name(plan, sequence, &record.name);
        let (uid, gid) = record.ended_ids.unwrap_or_default();
        let what = format!("the ids of process {}", record.pid);
        for (call, id) in [(libc::SYS_setresgid, gid), (libc::SYS_setresuid, uid)] {
            if id != 0 {
                sequence.call(what.clone(), Call::new(call, [id.into(), id.into(), id.into()]));
            }
        }
    }
    let signal = status & 0x7f;
    if signal != 0 && (1..=64).contains(&signal) {
        let no_signal = plan.builder.numbers(&[0]);
        let unblock =
            [Arg::from(libc::SIG_SETMASK), no_signal.into(), Arg::Number(0), Arg::Number(8)];
        let pid = record.map_or(0, |r| r.pid);
        let what = format!("the end of process {pid} by signal {signal}");
        sequence.call(what.clone(), Call::new(libc::SYS_rt_sigprocmask, unblock));
        sequence.call(what, Call::new(libc::SYS_kill, [pid.into(), Arg::from(signal)]));
    }
    let code = (status >> 8) & 0xff;
    sequence.call("the end of a process", Call::new(libc::SYS_exit_group, [Arg::from(code)]));
}
