#!/usr/bin/env bash
# What the cluster tests' hosts need: network namespaces (iproute2), sshd, pdsh. Installs what is missing; needs root.
#
#   sudo tests/cluster/install.sh
set -euo pipefail

fail() { echo "zerofit: error: tests/cluster/install.sh: $1" >&2; exit 2; }

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
  command -v apt-get >/dev/null || fail "apt-get is not here; install ${missing[*]} with this system's own package manager"
  # The tests start private sshds; the machine itself must not get a new listening service by them.
  if [ ! -e /usr/sbin/policy-rc.d ]; then
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
    chmod +x /usr/sbin/policy-rc.d
  fi
  echo "installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq || echo "zerofit: warning: apt-get update failed; trying with the package lists that are here" >&2
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null || fail "apt-get could not install ${missing[*]}"
  if [[ " ${missing[*]} " == *" openssh-server "* ]] && command -v systemctl >/dev/null; then
    systemctl disable ssh.service >/dev/null 2>&1 || true # Debian enables it for the next boot
  fi
fi
mkdir -p /run/sshd # sshd's privilege separation folder; the distribution's own service makes it at boot
echo "the cluster tests' tools are here: ip tc ssh sshd pdsh"
