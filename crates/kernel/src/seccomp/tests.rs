//! The compiler against the policy, by running what it made.

use proptest::prelude::*;

use super::policy::X32;
use super::*;
use crate::call::Instruction;
use crate::capability::{Capability, Set, default_set};

/// The input of a filter: the kernel's `struct seccomp_data` without the instruction pointer.
#[derive(Debug, Clone, Copy)]
struct Call {
    number: u32,
    machine: u32,
    arguments: [u64; 6],
}

const X86_64: u32 = 0xc000_003e;
const I386: u32 = 0x4000_0003;

/// Runs a program as the kernel would: the value it returns, and whether it read an argument.
fn run(program: &[Instruction], call: Call) -> (u32, bool) {
    let (mut at, mut accumulator, mut read_argument) = (0usize, 0u32, false);
    loop {
        let instruction = program[at];
        at += 1;
        match instruction.code {
            0x20 => {
                let word = |index: u32| {
                    let argument = call.arguments[index as usize / 2];
                    (argument >> (32 * (index % 2))) as u32
                };
                accumulator = match instruction.k {
                    0 => call.number,
                    4 => call.machine,
                    place if place >= 16 && place % 4 == 0 && place < 64 => {
                        read_argument = true;
                        word((place - 16) / 4)
                    }
                    place => panic!("load from {place}"),
                };
            }
            0x54 => accumulator &= instruction.k,
            0x05 => at += instruction.k as usize,
            0x15 | 0x25 | 0x35 => {
                let holds = match instruction.code {
                    0x15 => accumulator == instruction.k,
                    0x25 => accumulator > instruction.k,
                    _ => accumulator >= instruction.k,
                };
                at +=
                    usize::from(if holds { instruction.jump_true } else { instruction.jump_false });
            }
            0x06 => return (instruction.k, read_argument),
            code => panic!("instruction {code:#x}"),
        }
    }
}

/// The result of the policy, evaluated without the compiler.
fn expected(policy: &Policy, call: Call) -> u32 {
    let value = |action| match action {
        Action::Allow => 0x7fff_0000,
        Action::Errno(errno) => 0x0005_0000 | u32::from(errno),
        Action::Kill => 0x8000_0000,
        Action::KillThread => 0,
        Action::Trap => 0x0003_0000,
        Action::Trace(number) => 0x7ff0_0000 | u32::from(number),
        Action::Log => 0x7ffc_0000,
        Action::Notify => 0x7fc0_0000,
    };
    let policy = match (call.machine, &policy.i386) {
        (X86_64, _) => policy,
        (I386, Some(i386)) => i386,
        _ => return value(Action::Kill),
    };
    value(policy.answer(call.number, &call.arguments))
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        3 => Just(Action::Allow),
        3 => (1u16..4096).prop_map(Action::Errno),
        1 => Just(Action::Kill),
        1 => prop_oneof![
            Just(Action::KillThread), Just(Action::Trap), Just(Action::Log), Just(Action::Notify),
            (1u16..4096).prop_map(Action::Trace),
        ],
    ]
}

/// Numbers that meet each other often, in both halves.
fn word() -> impl Strategy<Value = u64> {
    let half = || {
        prop_oneof![
            Just(0u64),
            Just(1),
            Just(0xffff_ffff),
            0u64..8,
            any::<u32>().prop_map(u64::from)
        ]
    };
    (half(), prop_oneof![3 => Just(0u64), 1 => half()]).prop_map(|(low, high)| high << 32 | low)
}

fn condition() -> impl Strategy<Value = Condition> {
    let argument = (0u8..6, any::<bool>())
        .prop_map(|(index, long)| if long { Argument::Long(index) } else { Argument::Int(index) });
    let test = prop_oneof![
        word().prop_map(Test::Equal),
        word().prop_map(Test::NotEqual),
        word().prop_map(Test::Greater),
        word().prop_map(Test::AtLeast),
        word().prop_map(Test::Less),
        word().prop_map(Test::AtMost),
        prop::collection::vec(word(), 0..6).prop_map(Test::OneOf),
        (word(), word()).prop_map(|(mask, value)| Test::Masked { mask, value }),
        (word(), word()).prop_map(|(mask, value)| Test::Masked { mask, value: value & mask }),
    ];
    (argument, test).prop_map(|(argument, test)| Condition { argument, test })
}

fn decision() -> impl Strategy<Value = Decision> {
    let rule = (prop::collection::vec(condition(), 0..4), action())
        .prop_map(|(when, then)| Rule { when, then });
    let rules =
        prop_oneof![3 => Just(Vec::new()).boxed(), 1 => prop::collection::vec(rule, 0..5).boxed()];
    (rules, action()).prop_map(|(rules, otherwise)| Decision { rules, otherwise })
}

fn policy() -> impl Strategy<Value = Policy> {
    let number = prop_oneof![4 => 0u32..500, 1 => any::<u32>()];
    (action(), prop::collection::vec((number, decision()), 0..80)).prop_map(|(otherwise, list)| {
        let mut policy = Policy::new(otherwise);
        for (number, decision) in list {
            policy.set(number, decision);
        }
        policy
    })
}

/// Test calls for a policy: its own numbers and their neighbours, and values from its own
/// conditions, also with bits set in the ignored half.
fn calls(policy: &Policy, arguments: &[[u64; 6]]) -> Vec<Call> {
    let mut numbers: Vec<u32> = policy
        .decisions
        .iter()
        .flat_map(|(number, _)| [number.saturating_sub(1), number, number + 1])
        .chain([0, X32 - 1, X32, X32 + 1, u32::MAX])
        .collect();
    numbers.sort_unstable();
    numbers.dedup();
    let mut found = Vec::new();
    for number in numbers {
        let mut tried = arguments.to_vec();
        for rule in &policy.decision(number).rules {
            let mut arguments = [0u64; 6];
            for Condition { argument, test } in &rule.when {
                let (Argument::Int(index) | Argument::Long(index)) = *argument;
                let value = match test {
                    Test::Equal(value)
                    | Test::Masked { value, .. }
                    | Test::NotEqual(value)
                    | Test::Greater(value)
                    | Test::AtLeast(value)
                    | Test::Less(value)
                    | Test::AtMost(value) => Some(*value),
                    Test::OneOf(values) => values.last().copied(),
                };
                arguments[usize::from(index)] = value.unwrap_or(0);
            }
            tried.push(arguments);
            tried.push(arguments.map(|argument| argument ^ 1 << 33));
            tried.push(arguments.map(|argument| argument ^ 1));
        }
        for arguments in tried {
            found.push(Call { number, machine: X86_64, arguments });
        }
    }
    found
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 300,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn compiled_program_matches_its_policy(
        policy in policy(),
        rest in action(),
        i386 in prop_oneof![Just(None), policy().prop_map(Some)],
        arguments in prop::collection::vec(prop::array::uniform6(word()), 1..6),
    ) {
        let mut policy = policy;
        policy.set_rest(rest);
        if let Some(i386) = i386 {
            policy.set_i386(i386);
        }
        // Too many rules for one program are no error of the compiler.
        let Some(filter) = policy.compile() else { return Ok(()) };
        for call in calls(&policy, &arguments) {
            for machine in [X86_64, I386, 7] {
                let call = Call { machine, ..call };
                let (found, _) = run(filter.instructions(), call);
                prop_assert_eq!(found, expected(&policy, call), "{:?}", call);
            }
        }
    }
}

/// Each capability alone, none, podman's, and all, in every network.
fn all_houses() -> impl Iterator<Item = Policy> {
    let sets = Capability::ALL.iter().map(|&capability| std::iter::once(capability).collect());
    let sets = sets.chain([Set::empty(), default_set(), Set::from_bits(u64::MAX)]);
    sets.flat_map(|set: Set| {
        [Network::Host, Network::Shared, Network::Own].map(|network| default_policy(set, network))
    })
}

#[test]
fn default_filter_matches_its_policy() {
    let some =
        [[0; 6], [u64::MAX; 6], [1, 2, 3, 4, 5, 6], [2, 10, 0, 0, 0, 0], [16, 3, 0, 0, 0, 0]];
    for policy in all_houses() {
        let filter = policy.compile().unwrap();
        for number in (0..600).chain([X32, X32 + 1, u32::MAX]) {
            for arguments in some {
                let call = Call { number, machine: X86_64, arguments };
                assert_eq!(run(filter.instructions(), call).0, expected(&policy, call), "{call:?}");
            }
        }
        for call in calls(&policy, &some) {
            assert_eq!(run(filter.instructions(), call).0, expected(&policy, call), "{call:?}");
        }
    }
}

/// A newborn calls them after it has loaded the filter (`keeper/newborn.rs`).
#[test]
fn newborn_waits_for_go_under_every_filter() {
    for policy in all_houses() {
        let filter = policy.compile().unwrap();
        for number in [libc::SYS_recvmsg, libc::SYS_sendmsg, libc::SYS_exit_group] {
            let call =
                Call { number: number as u32, machine: X86_64, arguments: [3, 0, 0, 0, 0, 0] };
            assert_eq!(run(filter.instructions(), call).0, ALLOW, "{call:?}");
        }
    }
}

#[test]
fn rule_without_arguments_reads_none() {
    // Else the kernel would run the filter for each of these calls.
    let policy = default_policy(default_set(), Network::Shared);
    let filter = policy.compile().unwrap();
    for number in 0..500 {
        let call = Call { number, machine: X86_64, arguments: [0; 6] };
        let (_, read_argument) = run(filter.instructions(), call);
        assert_eq!(read_argument, !policy.decision(number).rules.is_empty(), "{number}");
    }
}

#[test]
fn program_over_the_kernel_limit_is_refused() {
    let mut policy = Policy::new(Action::Allow);
    for number in 0..3000 {
        policy.set(number * 2, Action::Kill);
    }
    assert_eq!(policy.compile(), None);
    let mut policy = Policy::new(Action::Allow);
    let seventh = Condition::new(Argument::Int(6), Test::Equal(0));
    let rules = vec![Rule { when: vec![seventh], then: Action::Kill }];
    policy.set(1, Decision { rules, otherwise: Action::Allow });
    assert_eq!(policy.compile(), None);
}

#[test]
fn long_jumps_reach_their_target() {
    let mut policy = Policy::new(Action::Errno(1));
    for number in 0..900 {
        policy.set(number * 2, Action::Allow);
    }
    let filter = policy.compile().unwrap();
    for number in 0..1800 {
        let call = Call { number, machine: X86_64, arguments: [0; 6] };
        assert_eq!(run(filter.instructions(), call).0, expected(&policy, call));
    }
}

#[test]
fn long_rules_are_skipped_as_a_whole() {
    // Each value beyond 32 bits brings a copy of what follows it.
    let values = |salt: u64| Test::OneOf((0..20).map(|value| value << 33 | salt).collect());
    let when = vec![
        Condition::new(Argument::Long(0), Test::Equal(7)),
        Condition::new(Argument::Long(1), values(1)),
        Condition::new(Argument::Long(2), values(2)),
    ];
    let rules = vec![Rule { when, then: Action::Kill }];
    let mut policy = Policy::new(Action::Errno(1));
    policy.set(9, Decision { rules, otherwise: Action::Allow });
    let filter = policy.compile().unwrap();
    for arguments in [[7, 1, 2], [7, 19 << 33 | 1, 19 << 33 | 2], [6, 1, 2], [7, 2, 2], [7, 1, 1]] {
        let [a, b, c] = arguments;
        let call = Call { number: 9, machine: X86_64, arguments: [a, b, c, 0, 0, 0] };
        assert_eq!(run(filter.instructions(), call).0, expected(&policy, call), "{arguments:?}");
    }
}

fn answer(policy: &Policy, number: libc::c_long, arguments: &[u64]) -> u32 {
    let mut all = [0u64; 6];
    all[..arguments.len()].copy_from_slice(arguments);
    let call = Call { number: number as u32, machine: X86_64, arguments: all };
    run(policy.compile().unwrap().instructions(), call).0
}

const ALLOW: u32 = 0x7fff_0000;
const fn errno(number: i32) -> u32 {
    0x0005_0000 | number as u32
}

#[test]
fn capability_opens_its_calls_and_no_others() {
    let none = default_policy(Set::empty(), Network::Shared);
    let one = |capability| default_policy(std::iter::once(capability).collect(), Network::Shared);
    for (number, capability) in [
        (libc::SYS_mount, Capability::SysAdmin),
        (libc::SYS_fsopen, Capability::SysAdmin),
        (467, Capability::SysAdmin),
        (libc::SYS_setns, Capability::SysAdmin),
        (libc::SYS_bpf, Capability::Bpf),
        (libc::SYS_perf_event_open, Capability::Perfmon),
        (libc::SYS_chroot, Capability::SysChroot),
        (libc::SYS_open_by_handle_at, Capability::DacReadSearch),
        (libc::SYS_finit_module, Capability::SysModule),
        (libc::SYS_clock_settime, Capability::SysTime),
        (libc::SYS_syslog, Capability::Syslog),
    ] {
        assert_eq!(answer(&none, number, &[]), errno(libc::EPERM), "{number}");
        assert_eq!(answer(&one(capability), number, &[]), ALLOW, "{number}");
        assert_eq!(answer(&one(Capability::Chown), number, &[]), errno(libc::EPERM), "{number}");
    }
    let everything = default_policy(Set::from_bits(u64::MAX), Network::Own);
    for number in [libc::SYS_io_uring_setup, libc::SYS_keyctl, libc::SYS_add_key, 451] {
        assert_eq!(answer(&everything, number, &[]), errno(libc::ENOSYS), "{number}");
    }
    let length_of_turns = libc::SYS_sched_setattr;
    assert_eq!(answer(&none, length_of_turns, &[]), errno(libc::ENOSYS));
    assert_eq!(answer(&one(Capability::Chown), length_of_turns, &[]), errno(libc::ENOSYS));
    assert_eq!(answer(&one(Capability::SysNice), length_of_turns, &[]), ALLOW);
    for number in [libc::SYS_kexec_load, libc::SYS_swapon, libc::SYS_userfaultfd] {
        assert_eq!(answer(&everything, number, &[]), errno(libc::EPERM), "{number}");
    }
}

#[test]
fn kept_back_namespaces_are_found_among_other_flags() {
    let policy = default_policy(default_set(), Network::Shared);
    let user = libc::CLONE_NEWUSER as u64;
    let net = libc::CLONE_NEWNET as u64;
    for number in [libc::SYS_clone, libc::SYS_unshare] {
        assert_eq!(answer(&policy, number, &[user]), ALLOW);
        assert_eq!(answer(&policy, number, &[user | net]), errno(libc::EPERM));
        assert_eq!(answer(&policy, number, &[1 << 40 | net]), errno(libc::EPERM));
        assert_eq!(answer(&policy, number, &[libc::CLONE_NEWIPC as u64]), errno(libc::EPERM));
    }
    assert_eq!(answer(&policy, libc::SYS_clone3, &[]), errno(libc::ENOSYS));
    let admin = default_policy(std::iter::once(Capability::SysAdmin).collect(), Network::Shared);
    assert_eq!(answer(&admin, libc::SYS_unshare, &[net]), ALLOW);
    assert_eq!(answer(&admin, libc::SYS_clone3, &[]), ALLOW);
}

#[test]
fn upper_half_of_an_int_is_ignored() {
    let policy = default_policy(default_set(), Network::Shared);
    let high = 1u64 << 32;
    let eperm = errno(libc::EPERM);
    assert_eq!(answer(&policy, libc::SYS_ioctl, &[0, 0x5412]), eperm);
    assert_eq!(answer(&policy, libc::SYS_ioctl, &[0, high | 0x5412]), eperm);
    assert_eq!(answer(&policy, libc::SYS_ioctl, &[0, 0x541c]), eperm);
    assert_eq!(answer(&policy, libc::SYS_ioctl, &[0, 0x5413]), ALLOW);
    let packet = libc::AF_PACKET as u64;
    let refused = errno(libc::EAFNOSUPPORT);
    assert_eq!(answer(&policy, libc::SYS_socket, &[packet, 3, 0]), refused);
    assert_eq!(answer(&policy, libc::SYS_socket, &[high | packet, 3, 0]), refused);
    assert_eq!(answer(&policy, libc::SYS_personality, &[0x4_0000]), eperm);
    assert_eq!(answer(&policy, libc::SYS_personality, &[0xffff_ffff]), ALLOW);
    assert_eq!(answer(&policy, libc::SYS_personality, &[u64::MAX]), ALLOW);
}

#[test]
fn sockets_of_a_shared_stack_are_the_ordinary_ones() {
    for network in [Network::Host, Network::Shared] {
        let policy = default_policy(Set::from_bits(u64::MAX), network);
        sockets_are_ordinary(|family, kind, protocol| {
            answer(&policy, libc::SYS_socket, &[family as u64, kind as u64, protocol as u64])
        });
        let events = [libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_KOBJECT_UEVENT];
        let expected = if network == Network::Host { errno(libc::EPROTONOSUPPORT) } else { ALLOW };
        let arguments = events.map(|argument| argument as u64);
        assert_eq!(answer(&policy, libc::SYS_socket, &arguments), expected);
    }
}

fn sockets_are_ordinary(ask: impl Fn(i32, i32, i32) -> u32) {
    use libc::*;
    let flags = SOCK_CLOEXEC | SOCK_NONBLOCK;
    for family in [AF_INET, AF_INET6] {
        for protocol in [0, IPPROTO_TCP, IPPROTO_UDP, IPPROTO_ICMP, IPPROTO_ICMPV6] {
            assert_eq!(ask(family, SOCK_STREAM | flags, protocol), ALLOW);
        }
        for protocol in [IPPROTO_SCTP, 262, IPPROTO_RAW] {
            assert_eq!(ask(family, SOCK_STREAM, protocol), errno(EPROTONOSUPPORT));
        }
    }
    assert_eq!(ask(AF_INET, 10 /* SOCK_PACKET */ | flags, 0), errno(ESOCKTNOSUPPORT));
    assert_eq!(ask(AF_UNIX, SOCK_SEQPACKET | flags, 0), ALLOW);
    assert_eq!(ask(AF_NETLINK, SOCK_RAW | flags, NETLINK_ROUTE), ALLOW);
    for protocol in [NETLINK_SOCK_DIAG, NETLINK_AUDIT, NETLINK_NETFILTER] {
        assert_eq!(ask(AF_NETLINK, SOCK_RAW, protocol), errno(EPROTONOSUPPORT));
    }
    for family in
        [AF_PACKET, AF_ALG, AF_VSOCK, AF_CAN, AF_BLUETOOTH, AF_KEY, 44 /* XDP */, 0, -1]
    {
        assert_eq!(ask(family, SOCK_RAW, 0), errno(EAFNOSUPPORT), "{family}");
    }
}

#[test]
fn own_stack_allows_what_its_capabilities_are_for() {
    use libc::*;
    let of = |set: Set| {
        let policy = default_policy(set, Network::Own);
        move |family: i32, protocol: i32| {
            answer(&policy, SYS_socket, &[family as u64, SOCK_RAW as u64, protocol as u64])
        }
    };
    let plain = of(default_set());
    assert_eq!(plain(AF_NETLINK, NETLINK_SOCK_DIAG), ALLOW);
    assert_eq!(plain(AF_INET, IPPROTO_SCTP), ALLOW);
    assert_eq!(plain(AF_NETLINK, NETLINK_NETFILTER), errno(EPROTONOSUPPORT));
    assert_eq!(plain(AF_NETLINK, NETLINK_AUDIT), errno(EPROTONOSUPPORT));
    assert_eq!(plain(AF_PACKET, 0), errno(EAFNOSUPPORT));
    let strong = of([Capability::NetAdmin, Capability::NetRaw].into_iter().collect());
    assert_eq!(strong(AF_NETLINK, NETLINK_NETFILTER), ALLOW);
    assert_eq!(strong(AF_PACKET, 0), ALLOW);
    assert_eq!(strong(AF_VSOCK, 0), errno(EAFNOSUPPORT));
}

#[test]
fn program_bytes_match_the_kernel_layout() {
    let filter = default_filter(default_set());
    let bytes = filter.to_bytes();
    assert_eq!(bytes.len(), filter.instructions().len() * 8);
    assert_eq!(bytes[..8], [0x20, 0, 0, 0, 4, 0, 0, 0]);
}

#[test]
fn filter_without_aio_differs_in_one_call() {
    let with = default_filter_for(default_set(), Network::Shared);
    let without = default_filter_without_aio(default_set(), Network::Shared);
    for machine in [X86_64, I386] {
        for number in 0..600 {
            let call = Call { number, machine, arguments: [0; 6] };
            let (before, after) =
                (run(with.instructions(), call).0, run(without.instructions(), call).0);
            match i64::from(number) == libc::SYS_io_setup && machine == X86_64 {
                true => assert_eq!((before, after), (ALLOW, errno(libc::ENOSYS))),
                false => assert_eq!(before, after, "{machine:#x} {number}"),
            }
        }
    }
    let i386 = Call { number: 245, machine: I386, arguments: [0; 6] }; // io_setup there
    assert_ne!(run(without.instructions(), i386).0, ALLOW);
}
