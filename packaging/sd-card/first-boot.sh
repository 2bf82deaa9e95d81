#!/bin/sh
# Runs on the device, once, as root: installs the package that lies beside it, and lets the device enroll itself.
#
# Called by cloud-init (Raspberry Pi OS trixie) or by the imager's firstrun.sh (bookworm); docs/sd-card.md. Needs
# no network: what the package depends on is part of Raspberry Pi OS. Enrolling waits for the network by itself.
set -eu
cd "$(dirname "$0")"

set -- ./edge-agent_*.deb
if [ $# -ne 1 ] || [ ! -e "$1" ]; then
  echo "first-boot: expected one edge-agent_*.deb in $PWD, found $#" >&2
  exit 1
fi
dpkg --install "$1" || {
  # A system without one of the dependencies, and with a network.
  apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes "$1"
}
[ ! -d /run/systemd/system ] || systemctl start --no-block edge-agent-enroll.service
