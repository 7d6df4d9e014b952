# Sourced by ./test, ./demo and ./bench: the packages that a bare Debian 12 needs before cargo can
# run.
#
# All packages come from Debian's own archive, for compiling and for the tests. A new enough cargo
# is used unchanged. Otherwise Debian's security archive has one, beside the ancient `cargo`, under
# the name `cargo-web` (for building web browsers). Besides system packages, all files are written
# to ./target.
#
# POSIX sh: on a bare machine /bin/sh is dash.

# The oldest cargo that builds the workspace, as in `rust-version` of Cargo.toml.
cargo_minor_min=89

# clang compiles BPF programs. libelf and zlib are linked into their loader, libssl into the image
# store's hashing. ca-certificates allows cargo to reach its registry.
packages_build="ca-certificates clang gcc libc6-dev libelf-dev libssl-dev make"
packages_build="$packages_build pkg-config zlib1g-dev"
# iproute2 and nftables are the host's side of networks. mmdebstrap makes images, docker-registry
# serves them. busybox-static is the smallest image and the client of most tests.
packages_run="busybox-static iproute2 mmdebstrap nftables docker-registry"
# e2fsprogs makes small and full disks, qemu runs the second kernel, strace kills commands at their
# steps, wrk loads web servers. g++ compiles the fuzzers' engine. containerd, dockerd and podman run
# containers with our shim and our runtime (podman's networks need netavark, the first process of
# its pods is catatonit; dockerd runs the host's ps).
packages_test="aardvark-dns catatonit containerd docker.io e2fsprogs g++ iptables netavark podman"
packages_test="$packages_test procps qemu-system-x86 strace wrk"
# Peers of the benchmarks.
packages_bench="bubblewrap crun e2fsprogs podman runc skopeo umoci"

say() { printf '\033[1m== %s\033[0m\n' "$*"; }
die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# Runs a command as a named stage and prints its duration, which it leaves in stage_seconds.
stage() {
    stage_name=$1
    shift
    say "$stage_name"
    stage_start=$(date +%s)
    stage_status=0
    "$@" || stage_status=$?
    stage_seconds=$(($(date +%s) - stage_start))
    say "$stage_name: $stage_seconds s, status $stage_status"
    return $stage_status
}

need_root() { [ "$(id -u)" = 0 ] || die "must be run as root: it makes namespaces and mounts"; }

# Installs the missing ones of the named packages.
install_packages() {
    missing=
    for package; do
        dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed ||
            missing="$missing $package"
    done
    [ -n "$missing" ] || return 0
    command -v apt-get >/dev/null || die "needs these packages, and there is no apt:$missing"
    echo "installing:$missing"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq || return
    # shellcheck disable=SC2086 # a list of words
    apt-get install -qq -y --no-install-recommends $missing >target/apt.log 2>&1 || {
        tail -n 20 target/apt.log
        die "apt-get install failed"
    }
}

# Succeeds if the cargo and rustc of PATH are new enough.
toolchain_is_new_enough() {
    minor=$(cargo --version 2>/dev/null | sed -n 's/^cargo 1\.\([0-9]*\)\..*/\1/p')
    [ -n "$minor" ] && [ "$minor" -ge "$cargo_minor_min" ] && command -v rustc >/dev/null
}

install_toolchain() {
    [ -x "$HOME/.cargo/bin/cargo" ] && PATH="$HOME/.cargo/bin:$PATH"
    if ! toolchain_is_new_enough; then
        install_packages cargo-web rustc-web rustfmt-web rust-web-clippy
        hash -r
        toolchain_is_new_enough ||
            die "needs cargo 1.$cargo_minor_min or newer: cargo-web of Debian's security archive"
    fi
    # A machine without a ~/.cargo stays without one.
    if [ -z "${CARGO_HOME:-}" ] && [ ! -d "$HOME/.cargo" ]; then
        CARGO_HOME=$PWD/target/cargo
        export CARGO_HOME
    fi
    cargo --version
}

# setup [PACKAGE...]: everything for building and running, and the packages named.
setup() {
    need_root
    mkdir -p target
    # shellcheck disable=SC2086 # lists of words
    install_packages $packages_build $packages_run "$@"
    install_toolchain
}
