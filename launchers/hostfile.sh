#!/usr/bin/env bash
# Several machines from one: on every host of a DeepSpeed hostfile, over ssh.
#
#   launchers/hostfile.sh --hosts hostfile recipes/sft.py --zero 3 --model Qwen/Qwen3-8B --data data.jsonl
#
# --hosts             a line for each machine: host1 slots=8
# --include --exclude host1@host2:0,2: only these, or not these (slots are GPUs)
# --master_addr       the first host's name or address, where the others reach it by another one than the hostfile's
# --ssh               how to reach a host: "ssh -p 2222" (ssh without a password is checked first)
#
# Every host needs this folder and this environment at the same place. Tokens and the job's
# secret go through the connection, not into files.
# Places processes and nothing else: stage, precision and batch belong to the recipe.
# PYTHON: the interpreter of the environment that zerofit is installed in.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m zerofit hosts "$@"
