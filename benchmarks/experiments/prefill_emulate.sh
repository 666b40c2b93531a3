#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds and runs the CPU emulation of the Hopper prefill kernel. usage: benchmarks/experiments/prefill_emulate.sh [seeds [part of a case's name]]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
cp "$root"/backends/cuda/kernels/*.cuh "$build"
# The one conversion in PTX that these kernels need on the host.
sed -i 's/asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));/r = emu::to_bf16(x);/' "$build/types.cuh"
for header in ptx hopper_ptx; do echo '#pragma once' >"$build/$header.cuh"; done
g++ -std=c++17 -O2 -w -I "$build" -I "$here" -I "$root/variants/include" -o "$build/emulate" "$here/prefill_emulate.cpp"
"$build/emulate" "${1:-1}" "${2:-}"
