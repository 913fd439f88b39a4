#!/usr/bin/env bash
# What the SLURM tests need: Debian's slurm-wlm and munge. Installs what is missing, starts no service; needs root.
#
#   sudo tests/cluster/install_slurm.sh
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/apt.sh"

export PATH="$PATH:/usr/sbin:/sbin"
missing=no
for tool in munged slurmctld slurmd sbatch srun scontrol squeue scancel; do
  command -v "$tool" >/dev/null || missing=yes
done
[ "$(id -u)" = 0 ] || fail "packages and a private cluster need root; run it with sudo"
if [ "$missing" = yes ]; then
  install_packages slurm-wlm munge
  not_at_boot munge.service slurmctld.service slurmd.service
fi
echo "the SLURM tests' tools are here: $(sbatch --version)"
