#!/usr/bin/env bash
# On a machine with a GPU, torch 2.11 or newer and triton 3.6 or newer: check the kernels on the device, then
# measure them. Needs no installation and no network; under 6 minutes. Options are those of gpu_check.py.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3}"
"$PYTHON" -c 'import torch, sys; sys.exit(None if torch.cuda.is_available() else "no GPU that PyTorch can use")'
if ! "$PYTHON" -c 'import mxquant.kernels.triton.backend' 2>/dev/null; then
  # Not installed here: give Python the folders under the names that they have when installed.
  package="$(mktemp -d)"
  trap 'rm -rf "$package"' EXIT
  cp -r mxquant "$package/mxquant"
  for part in cli evals kernels; do cp -r "$part" "$package/mxquant/$part"; done
  export PYTHONPATH="$package${PYTHONPATH:+:$PYTHONPATH}"
fi
"$PYTHON" benchmarks/gpu_check.py "$@"
