#!/usr/bin/env bash
# What first.sh leaves, within BUDGET seconds: second.sh speed | settings8b | kernels | fix [--only REGEX] [--check]
#   settings8b: what one technique gains or costs at 8B, 45 s each (BUDGET=700)
#   speed: 8B as NVIDIA publishes it, compiled layers, fp8     kernels: the project's tests/gpu against fp64, and its plans
#   fix: the stages of first.sh that failed or were not reached (on a fresh machine: those of --only)
export BUDGET=${BUDGET:-200}
. "$(dirname "$0")/lib.sh"
stages "$@"
