//! Differences between the records of a container before and after a restore that are no fault. The page
//! `docs/checkpoint.md` has the same rows.

use dormouse_record::EpollItem;
use dormouse_record::fact::{Expected, Rule};

/// LIMIT: the time between two looks at a container, in nanoseconds.
pub const LOOKS_APART_NS: i128 = 300_000_000_000;
const LOOKS_APART_US: i128 = LOOKS_APART_NS / 1000;

/// Differences between records of a container before and after a restore that are no fault.
pub const OF_RECORDS: &[Expected] = &[
    Expected::row("about/created_unix_ms", Rule::Rises, "the time of the checkpoint"),
    Expected::row("about/monotonic_ns", Rule::Rises, "clocks go on while processes run"),
    Expected::row("about/boottime_ns", Rule::Rises, "clocks go on while processes run"),
    Expected::row(
        "about/monotonic_offset_ns",
        Rule::Any,
        "clocks stand still between checkpoint and restore",
    ),
    Expected::row(
        "about/boottime_offset_ns",
        Rule::Any,
        "clocks stand still between checkpoint and restore",
    ),
    Expected::row("process/*/timers/*/left_ns", Rule::Falls(LOOKS_APART_NS), "time passes"),
    Expected::row(
        "process/*/interval_timers/*/left_us",
        Rule::Falls(LOOKS_APART_US),
        "time passes",
    ),
    Expected::row(
        "process/*/threads/*/registers/orig_rax",
        Rule::To("219"),
        "an interrupted wait is restart_syscall(2)",
    ),
    Expected::row("object/*/left_ns", Rule::Falls(LOOKS_APART_NS), "time passes"),
    Expected::row("object/*/state", Rule::Begins, "a timer with little time left has expired"),
    Expected::row("object/*/ticks", Rule::Rises, "time passes"),
    Expected::row(
        "object/*/items/*/events",
        Rule::Gains {
            bits: (libc::EPOLLERR | libc::EPOLLHUP) as i128,
            beside: EpollItem::FLAGS as i128,
        },
        "a spent item of EPOLLONESHOT whose file is not ready is armed for errors",
    ),
    Expected::row("object/*/connection/timestamp", Rule::Any, "the clock of TCP time stamps"),
    Expected::row(
        "object/*/waiting/*/connection/timestamp",
        Rule::Any,
        "the clock of TCP time stamps",
    ),
    Expected::row("object/*/connection/window/*", Rule::Any, "the kernel adapts windows"),
    Expected::row("object/*/connection/buffers_bytes/*", Rule::Any, "the kernel adapts buffers"),
    Expected::row("object/*/waiting/*/connection/window/*", Rule::Any, "the kernel adapts windows"),
    Expected::row(
        "object/*/waiting/*/connection/buffers_bytes/*",
        Rule::Any,
        "the kernel adapts buffers",
    ),
    Expected::row(
        "object/*/waiting/*/connection/window_bytes_max",
        Rule::Any,
        "the kernel adapts windows",
    ),
    Expected::row(
        "process/*/threads/*/registers/r10",
        Rule::Falls(LOOKS_APART_NS / 1_000_000),
        "the remaining time of epoll_wait(2), in milliseconds",
    ),
    Expected::row(
        "process/*/interval_timers/*/left_us",
        Rule::Near(10_000),
        "CPU timers are rounded up",
    ),
    Expected::row(
        "object/*/received/*/credentials/pid",
        Rule::Ends,
        "the id of a process that had ended",
    ),
    Expected::row(
        "object/*/peer/**",
        Rule::Ends,
        "the id of a process that had ended (docs/state.md)",
    ),
    Expected::row(
        "object/*/left/**",
        Rule::Ends,
        "the id of a process that had ended (docs/state.md)",
    ),
    Expected::row(
        "object/*/cancelled_at_set_ns",
        Rule::Near(1_000_000_000),
        "read from two clocks",
    ),
    Expected::row(
        "process/*/threads/*/restart/remaining_ns",
        Rule::Falls(LOOKS_APART_NS),
        "time passes",
    ),
    Expected::row(
        "process/*/threads/*/time_limit/left_ns",
        Rule::Falls(LOOKS_APART_NS),
        "time passes",
    ),
];

/// Further differences between the records of a container and those of its twin.
pub(super) const OF_TWINS: &[Expected] = &[
    Expected::row(
        "process/*/threads/*/time_limit/left_ns",
        Rule::Near(1_000_000),
        "a timeout in milliseconds is rounded up",
    ),
    Expected::row(
        "process/*/threads/*/restart/remaining_ns",
        Rule::Any,
        "put off; without BPF the whole time is read from the memory of the program",
    ),
];
