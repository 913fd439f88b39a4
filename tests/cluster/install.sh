#!/usr/bin/env bash
# What the cluster tests' hosts need: network namespaces (iproute2), sshd, pdsh. Installs what is missing; needs root.
#
#   sudo tests/cluster/install.sh
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/apt.sh"

declare -A package=([ip]=iproute2 [tc]=iproute2 [sshd]=openssh-server [ssh]=openssh-client [ssh-keygen]=openssh-client
                    [pdsh]=pdsh [nsenter]=util-linux [unshare]=util-linux [mount]=mount [hostname]=hostname)
export PATH="$PATH:/usr/sbin:/sbin"
missing=()
for tool in "${!package[@]}"; do
  command -v "$tool" >/dev/null || missing+=("${package[$tool]}")
done

[ "$(id -u)" = 0 ] || fail "network namespaces and packages need root; run it with sudo"
if [ "${#missing[@]}" != 0 ]; then
  readarray -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)
  install_packages "${missing[@]}"
  if [[ " ${missing[*]} " == *" openssh-server "* ]]; then not_at_boot ssh.service; fi
fi
mkdir -p /run/sshd # sshd's privilege separation folder; the distribution's own service makes it at boot
echo "the cluster tests' tools are here: ip tc ssh sshd pdsh"
