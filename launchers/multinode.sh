#!/usr/bin/env bash
# One machine of several, started by hand: the same line on each, with its own --node_rank.
#
#   launchers/multinode.sh --nnodes 2 --node_rank 0 --master_addr host0 --gpus 8 recipes/sft.py --zero 3 ...    # on host0
#   launchers/multinode.sh --nnodes 2 --node_rank 1 --master_addr host0 --gpus 8 recipes/sft.py --zero 3 ...    # on host1
#
# --nnodes       machines of the job; MIN:MAX (1:4) makes it elastic: one may leave or come, and the job goes on with the rest
# --node_rank    which one this is, from 0; 0 is the machine that --master_addr names
# --master_addr  name or address of machine 0, as the others reach it
# --gpus         processes on this machine
# --port         two ports on machine 0 that the others reach: this one and the next (default 29500)
# --interface    network between the machines (default: the one that leads to machine 0)
# --join_timeout seconds that they wait for each other (default 45)
#
# ZEROFIT_JOB_SECRET: the same random text on all machines (openssl rand -hex 16); needed only where --output_dir is not given
# or not on a disk that all of them share.
# Places processes and nothing else: stage, precision and batch belong to the recipe.
# PYTHON: the interpreter of the environment that zerofit is installed in.
exec "$(dirname "${BASH_SOURCE[0]}")/local.sh" "$@"
