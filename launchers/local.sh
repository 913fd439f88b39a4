#!/usr/bin/env bash
# One node, N GPUs (without a GPU: N CPU processes over gloo).
#
#   launchers/local.sh --gpus 4 recipes/sft.py --zero 3 --model Qwen/Qwen3-8B --data data.jsonl
#
# It only places processes: ZeRO stage, precision and batch belong to the recipe.
# PYTHON: interpreter of the environment in which zerofit is installed.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m zerofit launch "$@"
