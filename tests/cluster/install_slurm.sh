#!/usr/bin/env bash
# What the SLURM tests need: Debian's slurm-wlm and munge. Installs what is missing, starts no service; needs root.
#
#   sudo tests/cluster/install_slurm.sh
set -euo pipefail

fail() { echo "zerofit: error: tests/cluster/install_slurm.sh: $1" >&2; exit 2; }

export PATH="$PATH:/usr/sbin:/sbin"
missing=no
for tool in munged slurmctld slurmd sbatch srun scontrol squeue scancel; do
  command -v "$tool" >/dev/null || missing=yes
done
[ "$(id -u)" = 0 ] || fail "packages and a private cluster need root; run it with sudo"
if [ "$missing" = yes ]; then
  command -v apt-get >/dev/null || fail "apt-get is not here; install SLURM and munge with this system's own package manager"
  # The tests start daemons of their own; the machine itself must not become a cluster by them.
  if [ ! -e /usr/sbin/policy-rc.d ]; then
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
    chmod +x /usr/sbin/policy-rc.d
  fi
  echo "installing slurm-wlm munge"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq || echo "zerofit: warning: apt-get update failed; trying with the package lists that are here" >&2
  apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null || fail "apt-get could not install slurm-wlm and munge"
  if command -v systemctl >/dev/null; then # Debian enables them for the next boot
    systemctl disable munge.service slurmctld.service slurmd.service >/dev/null 2>&1 || true
  fi
fi
echo "the SLURM tests' tools are here: $(sbatch --version)"
