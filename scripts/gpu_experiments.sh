#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds, runs and checks the CUDA experiments of docs/performance.md on one sm_90 GPU.
# usage: scripts/gpu_experiments.sh OUTDIR     (writes OUTDIR/experiments.jsonl, OUTDIR/experiments.txt)
# BUILD: folder for the programs (default: a fresh temporary one); programs already there are not built again.
set -uo pipefail
out=${1:?usage: scripts/gpu_experiments.sh OUTDIR}
here=$(cd "$(dirname "$0")/.." && pwd)
build=${BUILD:-$(mktemp -d)}
mkdir -p "$out" "$build"
names=(e1_bits e2_decode)

for n in "${names[@]}"; do
  [ -x "$build/$n" ] && continue
  nvcc -std=c++17 -gencode=arch=compute_90a,code=sm_90a -O3 -Xptxas -v -o "$build/$n" \
    "$here/benchmarks/experiments/$n.cu" >"$build/$n.log" 2>&1 || { cat "$build/$n.log"; exit 1; } &
done
wait
[ "${BUILD_ONLY:-0}" = 1 ] && exit 0

rc=0
: >"$out/experiments.jsonl"
for n in "${names[@]}"; do
  timeout 240 "$build/$n" >>"$out/experiments.jsonl" || { echo "FAILED: $n"; rc=1; }
done
python3 "$here/benchmarks/experiments/table.py" "$out/experiments.jsonl" | tee "$out/experiments.txt"
exit $rc
