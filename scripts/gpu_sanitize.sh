#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# compute-sanitizer over a reduced suite: one test of each kernel and path. Prints the closing line of each tool.
# usage: gpu_sanitize.sh OUTDIR
set -uo pipefail
out=$1
mkdir -p "$out"
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export ATTNRT_CACHE_DIR=${ATTNRT_CACHE_DIR:-/tmp/attnrt-gpu-check-cache} PYTORCH_NO_CUDA_MEMORY_CACHING=1
tests=(
  "tests/backends/test_cuda_gpu.py::test_bitwise[nvrtc-all-sentinel]"
  "tests/backends/test_cuda_gpu.py::test_bitwise[nvrtc-sigmoid-sentinel]"
  "tests/backends/test_cuda_gpu.py::test_dtypes[nvrtc-72-dtypes1]"
  "tests/backends/test_cuda_gpu.py::test_pages[nvrtc-7-HND]"
  "tests/backends/test_cuda_gpu.py::test_latent[nvrtc]"
  "tests/backends/test_cuda_hopper_gpu.py::test_bitwise[sentinel-mixed-causal]"
  "tests/backends/test_cuda_hopper_gpu.py::test_history_changes_nothing[1]"
  "tests/backends/test_cuda_append_gpu.py::test_copy_pages[nvrtc-float8_e4m3fn-HND]"
  "tests/backends/test_cuda_append_gpu.py::test_rotation[nvrtc-float8_e4m3fn-half]"
)
# racecheck does not follow a warp's __syncwarp and one lane's arrival at an mbarrier, which orders the warp's accesses by
# causality. For it kernels are compiled in a form in which all lanes arrive (tests/backends/every_lane.py).
declare -A plugin=([memcheck]=no:cacheprovider [racecheck]=every_lane)
for tool in memcheck racecheck; do
  PYTHONPATH=.:tests/backends:${PYTHONPATH:-} timeout "${LIMIT:-120}" compute-sanitizer --tool "$tool" --log-file "$out/$tool.txt" \
    "$python" -m pytest -m gpu -q -p no:cacheprovider -p "${plugin[$tool]}" "${tests[@]}" >"$out/$tool.pytest.txt" 2>&1 &
done
wait
for tool in memcheck racecheck; do
  echo "$tool: $(tail -n 1 "$out/$tool.pytest.txt") | $(tail -n 1 "$out/$tool.txt")"
done
