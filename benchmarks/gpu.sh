#!/usr/bin/env bash
# What agentrl does on a CUDA device: tests of vLLM, memory, training against TRL, rollouts. Makes two environments beside the checkout, and
# writes what it shows to $OUT (default: benchmarks/results), to be committed with the machine that it names.
#   benchmarks/gpu.sh
#   benchmarks/gpu.sh --dry-run    # each part at a tiny size, without CUDA and vLLM, in the environment of the tests: CI does it
# All parts run, and those that failed are named at the end, with exit code 1.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
VENV=${VENV:-.venv} VLLM_VENV=${VLLM_VENV:-.venv-vllm-cuda}
PYTHON=$VENV/bin/python
failed=()

part() {
  local name=$1
  shift
  echo "== $name"
  "$@" || failed+=("$name")
}

prepare() {
  command -v nvidia-smi >/dev/null || { echo "no nvidia-smi: this machine has no CUDA device"; exit 1; }
  make VENV="$VENV" "$VENV/.bench" || exit 1
  if [ ! -e "$VLLM_VENV/.ready" ]; then
    { python3.11 -m venv "$VLLM_VENV" &&
      "$VLLM_VENV/bin/python" -m pip install -q vllm==0.32.0 &&
      "$VLLM_VENV/bin/python" -m pip install -q -e . pytest hypothesis &&
      touch "$VLLM_VENV/.ready"; } || exit 1
  fi
  OUT=${OUT:-benchmarks/results}
  export VLLM_PYTHON=$PWD/$VLLM_VENV/bin/python
}

# a stand-in for vLLM's servers, by tests/agentrl/vllm_stand_in.py
prepare_dry() {
  OUT=$(mktemp -d)
  trap 'rm -rf "$OUT"' EXIT
  export SCALE=small VLLM_PYTHON=$OUT/python
  printf '#!/bin/sh\nPYTHONPATH="%s" exec "%s" "%s" "$@"\n' "$PWD:$PWD/tests:$PWD/tests/agentrl" "$(realpath -s "$PYTHON")" \
    "$PWD/tests/agentrl/vllm_stand_in.py" >"$VLLM_PYTHON"
  chmod +x "$VLLM_PYTHON"
}

parts() {
  mapfile -t tests < <(grep -rl "mark\.vllm" tests --include="test_*.py")
  if [ -n "$dry" ]; then
    part "tests of vLLM" "$PYTHON" -m pytest -q --collect-only -m vllm "${tests[@]}"
  else
    part machine nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
    part "tests of vLLM" "$PYTHON" -m pytest -q -m vllm "${tests[@]}"
  fi
  part memory "$PYTHON" benchmarks/gpu_memory.py
  part training "$PYTHON" benchmarks/training.py
  part rollouts "$PYTHON" benchmarks/gpu.py
  [ ${#failed[@]} = 0 ] || { printf 'failed: %s\n' "${failed[@]}"; return 1; }
}

case "${1:-}" in
  --dry-run) dry=1; prepare_dry ;;
  "") dry=; prepare ;;
  *) echo "benchmarks/gpu.sh: no option $1; it takes --dry-run, or nothing"; exit 2 ;;
esac
mkdir -p "$OUT"
parts 2>&1 | tee "$OUT/gpu.txt"
