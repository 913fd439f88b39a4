#!/usr/bin/env bash
# Follow-ups of first.sh, within BUDGET seconds: second.sh speed | settings8b | kernels | fix [--only REGEX] [--check]
#   settings8b: the effect of single techniques at 8B, 45 s each (BUDGET=700)
#   speed: 8B like NVIDIA's benchmark, compiled layers, fp8     kernels: tests/gpu against fp64, and the plans
#   fix: the stages of first.sh that failed or did not run (on a fresh machine: the stages in --only)
export BUDGET=${BUDGET:-200}
. "$(dirname "$0")/lib.sh"
stages "$@"
