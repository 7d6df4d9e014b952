#!/bin/sh
# Runs the validation programs of opencontainers/runtime-tools against one or more OCI runtimes:
#
#   scripts/oci-validation.sh [RUNTIME...]      dormouse-oci and, where it is installed, runc
#
# Prints a table, a line per program; fails where a program that passes with some other runtime does
# not with the first, but for those that are listed below as declined. Fetches the programs as a Go
# module (v0.9.0, whose own dependencies are pinned to its time), and needs the network once.
set -u
cd "$(dirname "$0")/.." || exit 1

# Not passed yet, and why.
#   mounts           `unbindable` and `runbindable`: mounts are cloned into the container, and what is
#                    unbindable cannot be
declined="mounts"

if ! command -v go >/dev/null; then
    echo "NOT RUN: the validation programs are written in Go, and there is no 'go' here" >&2
    exit 77
fi
top=$PWD
place=$top/target/testkit/oci-validation
module=github.com/opencontainers/runtime-tools
mkdir -p "$place/bin" "$place/run"
if [ ! -x "$place/bin/state" ]; then
    cd "$place" || exit 1
    [ -f go.mod ] || go mod init validation || exit 1
    go get $module/validation/util@v0.9.0 $module/cmd/runtimetest@v0.9.0 &&
        go get github.com/opencontainers/runtime-spec@v1.0.2 \
            github.com/opencontainers/selinux@v1.2.2 || exit 1
    CGO_ENABLED=0 go build -o run/runtimetest $module/cmd/runtimetest || exit 1
    source=$(go list -m -f '{{.Dir}}' $module)
    cp "$source/rootfs-amd64.tar.gz" run/
    for dir in "$source"/validation/*/; do
        name=$(basename "$dir")
        [ "$name" = util ] || go build -o "bin/$name" "$module/validation/$name" || exit 1
    done
    cd "$top" || exit 1
fi

if [ $# -eq 0 ]; then
    set -- "$top/target/x86_64-unknown-linux-gnu/release/dormouse-oci"
    ! command -v runc >/dev/null || set -- "$@" "$(command -v runc)"
fi

# PASS, FAIL, or NONE for a program that tells nothing, which with any runtime is a fault of its own.
verdict() {
    said=$(cd "$place/run" && RUNTIME=$1 timeout 120 "$place/bin/$2" 2>/dev/null)
    code=$?
    if [ $code -ne 0 ] || echo "$said" | grep -q '^not ok'; then
        echo FAIL
    elif echo "$said" | grep -q '^ok'; then
        echo PASS
    else
        echo NONE
    fi
}

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
    echo "$line"
    case " $declined " in *" $name "*) continue ;; esac
    [ "$best" != PASS ] || [ "$first" = PASS ] || worse="$worse $name"
done
[ -z "$worse" ] || {
    echo "another runtime passes, the first does not:$worse" >&2
    exit 1
}
