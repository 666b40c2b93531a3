#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes (once) a virtual environment with attnrt installed in place, from a machine that has Python and a C++ compiler.
# usage: setup_env.sh VENV_DIR EXTRAS [more pip requirements ...]      for example: setup_env.sh .venv test
# The C++ parts are built again only when their sources have changed, extras are added without building.
set -euo pipefail
venv=$1 extras=$2
shift 2
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

# Debian splits venv and the headers off from Python; as root we can fetch them, else we say what to do.
need() { # need PACKAGE WHY
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get install -y -q "$1" >/dev/null 2>&1 || { apt-get update -q >/dev/null && apt-get install -y -q "$1" >/dev/null; }
    else
        echo "setup: $2: install the package $1 first" >&2
        exit 1
    fi
}
quietly() { # quietly COMMAND ...: its output only if it fails
    "$@" >"$venv/setup.log" 2>&1 || {
        cat "$venv/setup.log" >&2
        exit 1
    }
}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup: Python 3.11 or later is needed, $python is $("$python" -V); name another one with PYTHON=..." >&2
    exit 1
}
command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || need g++ "a C++17 compiler is missing"
"$python" -c 'import ensurepip, venv' 2>/dev/null || need python3-venv "Python's venv module is missing"
"$python" -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' \
    || need python3-dev "Python's headers are missing"

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
built="$venv/.attnrt-built"
want=$(cat pyproject.toml setup.py $(git ls-files '*.cpp' '*.h' '*/native/*.py' 2>/dev/null) 2>/dev/null | cksum)
if [ "$(cat "$built" 2>/dev/null)" != "$want" ]; then
    echo "setup: building the C++ parts in $venv (a minute or two)" >&2
    quietly "$venv/bin/python" -m pip install --upgrade pip
    quietly "$venv/bin/python" -m pip install -e .
    echo "$want" >"$built"
fi
stamp="$venv/.attnrt-$(echo "$extras $*" | cksum | cut -d' ' -f1)"
if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
    echo "setup: installing what $extras needs" >&2
    requirements=$("$venv/bin/python" - "$extras" <<'PY'
import re, sys, tomllib
from pathlib import Path

extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]

def expand(names):
    for name in names:
        for requirement in extras[name]:
            inner = re.fullmatch(r"attnrt\[(.*)\]", requirement)
            yield from expand(inner.group(1).split(",")) if inner else [requirement]

print("\n".join(dict.fromkeys(expand(sys.argv[1].split(",")))))
PY
)
    mapfile -t list <<<"$requirements"
    quietly "$venv/bin/python" -m pip install "${list[@]}" "$@"
    echo "$want" >"$stamp"
fi
