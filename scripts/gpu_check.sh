#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the shims in place, then runs the GPU tests on the current device; results go to OUTDIR.
# usage: gpu_check.sh OUTDIR [pytest arguments ...]       for example: gpu_check.sh results -n 18
set -uo pipefail
out=$1
shift
mkdir -p "$out"
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export XLA_PYTHON_CLIENT_PREALLOCATE=false  # JAX would take three quarters of the memory from the other processes
export OPENBLAS_NUM_THREADS=1               # a worker a core: threads of each for the float64 references would only spin
export ATTNRT_CACHE_DIR=${ATTNRT_CACHE_DIR:-/tmp/attnrt-gpu-check-cache}
nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem --format=csv,noheader | tee "$out/device.txt"
"$python" setup.py -q build_ext --inplace >"$out/build.txt" 2>&1 || { tail -20 "$out/build.txt"; exit 1; }
PYTHONPATH=.:${PYTHONPATH:-} "$python" -m pytest -m gpu -q -p no:cacheprovider --tb=short --maxfail=80 --maxschedchunk=1 \
  -o faulthandler_timeout=150 -o faulthandler_exit_on_timeout=true "$@" 2>&1 | tee "$out/pytest.txt" | tail -60
