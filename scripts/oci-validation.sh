#!/bin/sh
# Runs the validation programs of opencontainers/runtime-tools against one or more OCI runtimes:
#
#   scripts/oci-validation.sh [-s DIR] [RUNTIME...]    dormouse-oci and, where it is installed, runc
#
# Prints a table, a line per program. Fails if a program passes with some other runtime, but not
# with the first. Fetches the programs as a Go module (v0.9.0, with dependencies pinned to its
# time), which needs the network once. With -s, the programs of a checkout with its `vendor` are
# used.
set -u
here=$PWD
cd "$(dirname "$0")/.." || exit 1

if ! command -v go >/dev/null; then
    echo "NOT RUN: the validation programs are written in Go, and there is no 'go' here" >&2
    exit 77
fi
top=$PWD
place=$top/target/testkit/oci-validation
module=github.com/opencontainers/runtime-tools
checkout=
if [ "${1:-}" = -s ] && [ $# -ge 2 ]; then
    checkout=$(cd "$here" && cd "$2" && pwd) || exit 1
    place=$place-$(printf %s "$checkout" | cksum | cut -d' ' -f1)
    shift 2
fi
mkdir -p "$place/bin" "$place/run"

# Built once.
if [ ! -e "$place/complete" ]; then
    if [ -n "$checkout" ]; then
        cd "$checkout" || exit 1
        source=$checkout
    else
        cd "$place" || exit 1
        [ -f go.mod ] || go mod init validation || exit 1
        go get $module/validation/util@v0.9.0 $module/cmd/runtimetest@v0.9.0 &&
            go get github.com/opencontainers/runtime-spec@v1.0.2 \
                github.com/opencontainers/selinux@v1.2.2 || exit 1
        source=$(go list -m -f '{{.Dir}}' $module)
    fi
    CGO_ENABLED=0 go build -o "$place/run/runtimetest" $module/cmd/runtimetest || exit 1
    cp "$source/rootfs-amd64.tar.gz" "$place/run/"
    for dir in "$source"/validation/*/; do
        name=$(basename "$dir")
        [ "$name" = util ] || go build -o "$place/bin/$name" "$module/validation/$name" || exit 1
    done
    touch "$place/complete"
    cd "$top" || exit 1
fi

if [ $# -eq 0 ]; then
    set -- "$top/target/x86_64-unknown-linux-gnu/release/dormouse-oci"
    ! command -v runc >/dev/null || set -- "$@" "$(command -v runc)"
fi

# PASS, FAIL, or NONE for a program without results, which is a fault of the program with any
# runtime.
verdict() {
    output=$(cd "$place/run" && RUNTIME=$1 timeout 120 "$place/bin/$2" 2>/dev/null)
    code=$?
    if [ $code -ne 0 ] || echo "$output" | grep -q '^not ok'; then
        echo FAIL
    elif echo "$output" | grep -q '^ok'; then
        echo PASS
    else
        echo NONE
    fi
}

# The programs run in another directory.
for runtime; do
    shift
    case $runtime in
    /*) ;;
    */*) runtime=$here/$runtime ;;
    esac
    set -- "$@" "$runtime"
done

worse=
for program in "$place"/bin/*; do
    name=$(basename "$program")
    line=$name
    first=
    best=
    for runtime; do
        one=$(verdict "$runtime" "$name")
        line="$line $one"
        [ -n "$first" ] || first=$one
        [ "$one" != PASS ] || best=PASS
    done
    # Some programs send their signals before the container listens, which depends on the load of
    # the host.
    for try in again once-more; do
        [ "$best" = PASS ] && [ "$first" != PASS ] || break
        first=$(verdict "$1" "$name")
        line="$line $try:$first"
    done
    echo "$line"
    [ "$best" != PASS ] || [ "$first" = PASS ] || worse="$worse $name"
done
[ -z "$worse" ] || {
    echo "another runtime passes, the first does not:$worse" >&2
    exit 1
}
