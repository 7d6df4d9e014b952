# Sourced by ./test, ./demo and ./bench: what a bare Debian 12 needs before Rust can speak.
#
# Everything comes from Debian's own archive: what to compile with, and what the tests start. A
# cargo that is new enough is used as it is; otherwise Debian's security archive has one, beside
# the ancient `cargo`, under the name `cargo-web` (it exists to build web browsers). Beyond system
# packages all that is written lies in ./target.
#
# POSIX sh: on a bare machine /bin/sh is dash.

# The oldest cargo that builds the workspace, as in `rust-version` of Cargo.toml.
cargo_minor_min=89

# clang compiles BPF programs; libelf and zlib are linked into their loader, libssl into the image
# store's hashing; ca-certificates lets cargo speak to its registry.
packages_build="ca-certificates clang gcc libc6-dev libelf-dev libssl-dev make"
packages_build="$packages_build pkg-config zlib1g-dev"
# iproute2, nftables: the host's side of networks. mmdebstrap makes images. docker-registry serves
# them. busybox-static is the smallest image and the client of most tests.
packages_run="busybox-static iproute2 mmdebstrap nftables docker-registry"
# e2fsprogs makes small and full disks, qemu runs the second kernel, strace kills commands at their
# steps, wrk asks web servers; g++ compiles the fuzzers' engine; containerd, dockerd and podman run
# containers by our shim and our runtime (podman's networks are netavark's, the first process of its
# pods is catatonit; dockerd asks the host's ps).
packages_test="aardvark-dns catatonit containerd docker.io e2fsprogs g++ iptables netavark podman"
packages_test="$packages_test procps qemu-system-x86 strace wrk"
# Who stands beside us in a benchmark.
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

# Installs those of the named packages that are missing.
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

# Whether the cargo and rustc of PATH are new enough.
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
    # A machine whose user never ran cargo stays that way.
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
