#!/bin/bash
# Installs the Debian packages that `make test`, `make test-arm` and `make deb` need in addition to Python's own.
# Returns at once if all are installed; otherwise it needs root and apt-get.
set -euo pipefail

needs=(
  make git ca-certificates python3 python3-venv
  mosquitto                                      # a real broker
  mosquitto-clients libmosquitto-dev             # foreign clients
  chromium                                       # the JavaScript client in a browser
  debootstrap debian-archive-keyring             # roots of other releases
  qemu-user qemu-user-static                     # run programs of other architectures, count their instructions
  gcc llvm llvm-19                               # the counting; llvm-mca: estimates the cycles of a loop
  systemd-container                              # a booted system
  util-linux                                     # unshare, nsenter
  openssh-client openssh-server                  # a board behind ssh
  buildah podman crun                            # the container recipe
  lintian                                        # checks the package against Debian policy
  mandoc man-db                                  # check the manual pages
  binutils                                       # readelf
  g++-arm-linux-gnueabihf                        # compiles tvm-ffi for armhf, which has no wheel
)

# The JavaScript client and Node-RED. Node from elsewhere brings its own npm, with which Debian's conflicts.
command -v npm >/dev/null || needs+=(nodejs npm)

missing=()
for package in "${needs[@]}"; do
  [[ $(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
done
[[ ${#missing[@]} -gt 0 ]] || exit 0
[[ $EUID == 0 ]] || { echo "$0: must be run as root to install ${missing[*]}" >&2; exit 1; }

echo "installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
# Another package manager may be running, for example just after boot.
wait_for_lock=(-o DPkg::Lock::Timeout=300)
apt-get "${wait_for_lock[@]}" update -qq </dev/null
apt-get "${wait_for_lock[@]}" install -qq -y --no-install-recommends "${missing[@]}" </dev/null >/dev/null
