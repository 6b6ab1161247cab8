#!/bin/sh
# Makes sure that the named tools are there: installs what Debian packages, says what to do about the rest.
set -eu

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        echo "neither root nor sudo" >&2
        return 1
    fi
}

install() {
    echo "installing $1"
    as_root apt-get install -y -q "$1" >/dev/null 2>&1 && return
    as_root apt-get update -q >/dev/null && as_root apt-get install -y -q "$1" >/dev/null && return
    echo "$1 is missing and could not be installed: install it by hand, then run the same command again" >&2
    exit 1
}

for tool in "$@"; do
    case "$tool" in
    cargo)
        command -v cargo >/dev/null || {
            echo "cargo is missing: install the Rust toolchain (1.95 or newer) from https://rustup.rs" >&2
            exit 1
        }
        # Some dependencies compile C.
        command -v cc >/dev/null || install build-essential
        ;;
    python3) command -v python3 >/dev/null || install python3 ;;
    pip) python3 -m pip --version >/dev/null 2>&1 || install python3-pip ;;
    *) command -v "$tool" >/dev/null || install "$tool" ;;
    esac
done
