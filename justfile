# The verbs of the house. `just` is a convenience: every recipe is one line that works without it.

# The list of verbs.
default:
    @just --list --unsorted

# Installs packages and the toolchain (Debian 12, as root).
setup:
    ./test setup

# Makes a Debian image with nginx, serves it, and shows its page.
demo:
    ./demo

# An answer within five minutes on a warm tree.
quick:
    ./test quick

# Exactly what CI runs; ./test alone is the same ring.
prepush:
    bash .ci/run

# Everything: long tests, control arms, fuzzers, soak, all guest tests, relay.
nightly:
    ./test nightly

# Some tests, by parts of their full names: just test system::sleep:: kernel::
test *FILTERS:
    cargo xtask test {{FILTERS}}

# The whole-system tests under Debian's newer kernel (cgroup v2, systemd), in QEMU.
test-vm:
    ./test build guest

# Every number of SPECIFICATION.md, peers in the same run; or some: just bench start.
bench *NAMES:
    ./bench {{NAMES}}

# The fuzzers over every reader of outside data; or some: just fuzz tar manifest.
fuzz *TARGETS:
    cargo xtask fuzz {{TARGETS}}

# Real programs of Debian in twenty rounds of sleep and checkpoint: docs/programs.md; or some: just programs nginx.
programs *NAMES:
    cargo xtask programs {{NAMES}}

# Formats, then checks the rules of the house.
tidy:
    cargo fmt --all
    cargo xtask tidy
