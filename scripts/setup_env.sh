#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes (once) a virtual environment with attnrt installed in place, from a machine that has Python and a C++ compiler.
# usage: setup_env.sh VENV_DIR EXTRAS [more pip requirements ...]      for example: setup_env.sh .venv test
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
command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || need g++ "a C++17 compiler is missing"
"$python" -c 'import ensurepip, venv' 2>/dev/null || need python3-venv "Python's venv module is missing"
"$python" -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' \
    || need python3-dev "Python's headers are missing"

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
# The stamp holds what the environment was made from, so that a second call costs nothing.
stamp="$venv/.attnrt-$(echo "$extras $*" | cksum | cut -d' ' -f1)"
want=$(cat pyproject.toml setup.py $(git ls-files '*.cpp' '*.h' '*build*.py' 2>/dev/null) 2>/dev/null | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
    "$venv/bin/python" -m pip install -q --upgrade pip
    [ $# = 0 ] || "$venv/bin/python" -m pip install -q "$@"
    "$venv/bin/python" -m pip install -q -e ".[$extras]"
    echo "$want" >"$stamp"
fi
