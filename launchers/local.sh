#!/usr/bin/env bash
# One machine, N GPUs (without a GPU: N CPU processes over gloo).
#
#   launchers/local.sh --gpus 4 recipes/sft.py --zero 3 --model Qwen/Qwen3-8B --data data.jsonl
#
# Places processes and nothing else: stage, precision and batch belong to the recipe.
# PYTHON: the interpreter of the environment that zerofit is installed in.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m zerofit launch "$@"
