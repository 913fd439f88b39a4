#!/usr/bin/env bash
# One of several nodes, started by hand: the same command on each node with a different --node_rank.
#
#   launchers/multinode.sh --nnodes 2 --node_rank 0 --master_addr host0 --gpus 8 recipes/sft.py --zero 3 ...    # on host0
#   launchers/multinode.sh --nnodes 2 --node_rank 1 --master_addr host0 --gpus 8 recipes/sft.py --zero 3 ...    # on host1
#
# --nnodes       nodes of the job; MIN:MAX (1:4) makes it elastic: the job continues when a node leaves or joins
# --node_rank    rank of this node, from 0; --master_addr names node 0
# --master_addr  name or address of node 0 for the other nodes
# --gpus         processes on this node
# --port         port on node 0; this port and the next must be reachable from the other nodes (default 29500)
# --interface    network interface between the nodes (default: the interface that leads to node 0)
# --join_timeout seconds that the nodes wait for each other (default 600)
#
# The ports are not protected: use a private network.
# It only places processes: ZeRO stage, precision and batch belong to the recipe.
# PYTHON: interpreter of the environment in which zerofit is installed.
exec "$(dirname "${BASH_SOURCE[0]}")/local.sh" "$@"
