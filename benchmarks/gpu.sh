#!/usr/bin/env bash
# What agentrl does on a CUDA device: tests of vLLM, training against TRL, rollouts. Makes two environments beside the checkout, and
# writes what it shows to $OUT (default: benchmarks/results), to be committed with the machine that it names.
#   benchmarks/gpu.sh
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-benchmarks/results}
VENV=${VENV:-.venv} VLLM_VENV=${VLLM_VENV:-.venv-vllm-cuda}
command -v nvidia-smi >/dev/null || { echo "no nvidia-smi: this machine has no CUDA device"; exit 1; }
make VENV="$VENV" "$VENV/.bench"
if [ ! -e "$VLLM_VENV/.ready" ]; then
  python3.11 -m venv "$VLLM_VENV"
  "$VLLM_VENV/bin/python" -m pip install -q vllm==0.32.0
  "$VLLM_VENV/bin/python" -m pip install -q -e . pytest hypothesis
  touch "$VLLM_VENV/.ready"
fi
export VLLM_PYTHON=$PWD/$VLLM_VENV/bin/python
mkdir -p "$OUT"
{
  nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
  "$VENV/bin/python" -m pytest -q -m vllm
  "$VENV/bin/python" benchmarks/training.py
  "$VENV/bin/python" benchmarks/gpu.py
} 2>&1 | tee "$OUT/gpu.txt"
