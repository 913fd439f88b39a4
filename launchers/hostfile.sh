#!/usr/bin/env bash
# Several nodes from one terminal: start the job on every host of a DeepSpeed hostfile over ssh.
#
#   launchers/hostfile.sh --hosts hostfile recipes/sft.py --zero 3 --model Qwen/Qwen3-8B --data data.jsonl
#
# --hosts             one line per host: host1 slots=8
# --include --exclude host1@host2:0,2: hosts and GPUs to use or exclude
# --master_addr       address of the first host for the others, if it differs from the hostfile
# --ssh               ssh command: "ssh -p 2222" (it must not need a password)
#
# Every host needs this folder and this environment at the same path. Tokens are sent through the connection, not files.
# It only places processes: ZeRO stage, precision and batch belong to the recipe.
# PYTHON: interpreter of the environment in which zerofit is installed.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m zerofit hosts "$@"
