#!/bin/bash
# `make test-arm`: the tests that need root, in a mount namespace of their own, so that no mount outlives them.
#
#   packaging/test-arm.sh [PYTEST_ARGUMENT ...]
#
# Installs from Debian what they need and is not there: emulators, debootstrap, a container of systemd's, lintian.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ $EUID == 0 ]] || { echo "make test-arm: needs root: Debian roots, mounts and a booted systemd" >&2; exit 1; }

needs=(mosquitto qemu-user qemu-user-static debootstrap systemd-container lintian binutils)
missing=()
for package in "${needs[@]}"; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q '^install ok installed' || missing+=("$package")
done
if ((${#missing[@]})); then
  echo "make test-arm: installing ${missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null
fi

exec unshare --mount --propagation private .venv/bin/pytest -m 'arm or systemd' "$@"
