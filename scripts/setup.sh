#!/bin/sh
# Checks what only the machine can supply, picks a Python, and hands over to setup.py.
cd "$(dirname "$0")/.." || exit 2

missing() {
    printf '\ngoldsmith: %s\n\n' "$1" >&2
    exit 2
}

command -v git >/dev/null 2>&1 ||
    missing "git is missing. Install it (Debian, Ubuntu: apt-get install git; Fedora: dnf install git) and run make again."
command -v g++ >/dev/null 2>&1 ||
    missing "g++ is missing. torch.compile and the native kernels need a C++ compiler: install it (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++) and run make again."

wanted='import sys; sys.exit(0 if sys.version_info >= (3, 11) else 1)'
complete='import ensurepip, venv'
seen=
old=
bare=
for name in python3 python3.13 python3.12 python3.11 python; do
    found=$("$name" -c 'import platform; print(platform.python_version())' 2>/dev/null) || continue
    seen=yes
    if ! "$name" -c "$wanted" 2>/dev/null; then
        old="$old $name ($found)"
    elif ! "$name" -c "$complete" 2>/dev/null; then
        bare="$name ($found)"
    else
        exec "$name" scripts/setup.py
    fi
done

[ -n "$bare" ] &&
    missing "$bare has no working venv module. Install it (Debian, Ubuntu: apt-get install python3-venv) and run make again."
[ -n "$seen" ] &&
    missing "Python 3.11 or newer is needed; found only$old. Install python3.11 or newer (Debian, Ubuntu: apt-get install python3.11 python3.11-venv) and run make again."
missing "Python is missing. Install Python 3.11 or newer (Debian, Ubuntu: apt-get install python3 python3-venv) and run make again."
