#!/usr/bin/env bash
# One node of several, started by hand: the same command on each, with its own --node_rank.
#
#   launchers/multinode.sh --nnodes 2 --node_rank 0 --master_addr host0 --gpus 8 recipes/sft.py --zero 3 ...    # on host0
#   launchers/multinode.sh --nnodes 2 --node_rank 1 --master_addr host0 --gpus 8 recipes/sft.py --zero 3 ...    # on host1
#
# --nnodes       nodes of the job; MIN:MAX (1:4) makes it elastic: the job continues when a node leaves or joins
# --node_rank    rank of this node, from 0; node 0 is the one that --master_addr names
# --master_addr  name or address by which the others reach node 0
# --gpus         processes on this node
# --port         port on node 0; this one and the next must be reachable from the others (default 29500)
# --interface    network interface between the nodes (default: the one that leads to node 0)
# --join_timeout seconds that the nodes wait for each other (default 600)
#
# The ports have no password: only on a private network.
# It only places processes: ZeRO stage, precision and batch belong to the recipe.
# PYTHON: interpreter of the environment in which zerofit is installed.
exec "$(dirname "${BASH_SOURCE[0]}")/local.sh" "$@"
