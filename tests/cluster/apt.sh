# Sourced by the install scripts: packages for the tests, without a new service on the machine. Debian and Ubuntu; needs root.

fail() { echo "zerofit: error: tests/cluster/$(basename "$0"): $1" >&2; exit 2; }

# install_packages PACKAGE...: fails with a sentence that names them
install_packages() {
  command -v apt-get >/dev/null || fail "apt-get is not here; install $* with this system's own package manager"
  # The tests start daemons of their own; the machine itself must not get a listening service or become a cluster by them.
  if [ ! -e /usr/sbin/policy-rc.d ]; then
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
    chmod +x /usr/sbin/policy-rc.d
  fi
  echo "installing $*"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq || echo "zerofit: warning: apt-get update failed; trying with the package lists that are here" >&2
  apt-get install -y -qq --no-install-recommends "$@" >/dev/null || fail "apt-get could not install $*"
}

# not_at_boot SERVICE...: Debian enables what it installs for the next boot
not_at_boot() {
  if command -v systemctl >/dev/null; then
    systemctl disable "$@" >/dev/null 2>&1 || true
  fi
}
