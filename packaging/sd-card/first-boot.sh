#!/bin/sh
# Runs on the device as root, once: installs the package beside this script, and starts the enrollment.
#
# Called by cloud-init (Raspberry Pi OS trixie) or by Imager's firstrun.sh (bookworm); see docs/sd-card.md. Needs
# no network: Raspberry Pi OS has all dependencies of the package. The enrollment service waits for the network.
set -eu
cd "$(dirname "$0")"

set -- ./edge-agent_*.deb
if [ $# -ne 1 ] || [ ! -e "$1" ]; then
  echo "first-boot: expected one edge-agent_*.deb in $PWD, found $#" >&2
  exit 1
fi
dpkg --install "$1" || {
  # A dependency is missing: install it from the network.
  apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes "$1"
}
# Before the network is up: every user can read the boot partition. If it fails, the service tries again and says why.
[ ! -e enroll.toml ] || edge-agent enroll --take enroll.toml || true
[ ! -d /run/systemd/system ] || systemctl start --no-block edge-agent-enroll.service
