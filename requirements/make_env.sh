#!/usr/bin/env bash
# Build the virtual environment that the Makefile works in: make_env.sh FOLDER [PYTHON]
#
# The folder is built from scratch; the Makefile calls this only when a stamp is missing or older than the
# pins, and writes the stamp after this has succeeded, so an interrupted run is simply started again.
set -euo pipefail

VENV=$1
PYTHON=${2:-}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
MARK=made-by-fairseq-ms
LOG=$VENV/setup.log

say() { printf '%s\n' "$*"; }
stop() { printf 'fairseq_ms: %s\n' "$*" >&2; exit 1; }

# A Python that fairseq and torch run on: 3.10-3.13, with venv and pip; not the one of FOLDER itself.
usable() {
    "$1" - "$VENV" >/dev/null 2>&1 <<'PROGRAM'
import ensurepip, os, sys, venv
outside = os.path.realpath(sys.prefix) != os.path.realpath(sys.argv[1])
sys.exit(not ((3, 10) <= sys.version_info[:2] <= (3, 13) and outside))
PROGRAM
}

find_python() {
    if [ -n "$PYTHON" ]; then
        usable "$PYTHON" || stop "PYTHON=$PYTHON must be a Python 3.10-3.13 with venv and pip, outside of $VENV."
        return
    fi
    # The Makefile and an activated environment put FOLDER/bin on PATH, where python3.11 is the one about to be removed.
    local entry others=
    while IFS= read -r -d : entry; do
        [ "$entry" -ef "$VENV/bin" ] || others=$others:$entry
    done <<<"$PATH:"
    local PATH=${others#:}
    for PYTHON in python3.11 python3.12 python3.10 python3.13 python3; do
        if usable "$PYTHON"; then
            PYTHON=$(command -v "$PYTHON")
            return
        fi
    done
    stop "no Python 3.10-3.13 with venv and pip was found (on Debian: apt install python3-venv);" \
        "name one with make PYTHON=/path/to/python3.11."
}

SECONDS=0
step() {
    local title=$1 began=$SECONDS
    shift
    printf '  %-58s ' "$title ..."
    if "$@" >>"$LOG" 2>&1; then
        say "$((SECONDS - began)) s"
    else
        say "failed"
        tail -n 25 "$LOG" >&2
        stop "the step above failed; its whole output is in $LOG."
    fi
}

pip() { "$VENV/bin/python" -m pip --quiet --disable-pip-version-check --no-input "$@"; }

if [ -n "$(ls -A "$VENV" 2>/dev/null)" ] && [ ! -e "$VENV/$MARK" ]; then
    stop "$VENV exists and was not made by this Makefile; move it away, or use make VENV=another-folder."
fi
find_python

say "fairseq_ms: setting up $VENV with $("$PYTHON" --version), once: about 2 minutes and a download"
rm -rf "$VENV"
mkdir -p "$VENV"
touch "$VENV/$MARK"
step "[1/4] the virtual environment" "$PYTHON" -m venv "$VENV"
# torch brings what its build for this machine needs; the other pins are complete.
step "[2/4] torch and numpy" pip install -r "$HERE/build.txt"
step "[3/4] libraries" pip install --no-deps --no-build-isolation -r "$HERE/libraries.txt"
# Its setup.py compiles nothing under READTHEDOCS; fairseq_ms/host/uncompiled.py does what language models need.
# A wheel from the index or from pip's cache may have been compiled against another torch or numpy.
step "[4/4] fairseq, as Python" env READTHEDOCS=1 "$VENV/bin/python" -m pip --quiet --disable-pip-version-check --no-input \
    install --no-deps --no-build-isolation --no-cache-dir --no-binary fairseq-fixed -r "$HERE/fairseq.txt"
say "fairseq_ms: ready after $SECONDS s"
