#!/bin/sh
# Prepares a card after Raspberry Pi Imager has written it, with its boot partition mounted:
#
#   packaging/sd-card/prepare-card.sh /media/me/bootfs edge-agent_0.1.0+deb13_arm64.deb enroll.toml
#
# Copies the package and the enrollment settings to the boot partition, and adds one line to the script of the first
# boot: user-data (cloud-init: trixie) or firstrun.sh (bookworm), whichever Imager has written. It is safe to run
# this script twice.
set -eu

die() { printf 'error: %s\nhint: %s\n' "$1" "$2" >&2; exit 4; }

[ $# -eq 3 ] || { echo "usage: $0 BOOT_PARTITION PACKAGE.deb ENROLL.toml" >&2; exit 2; }
boot=$1 package=$2 enroll=$3 here=$(dirname "$0")
[ -e "$boot/cmdline.txt" ] || die "$boot: expected the boot partition of a Raspberry Pi, got a folder without cmdline.txt" \
  "write the card with Raspberry Pi Imager and mount its first partition"
case $(basename "$package") in
  edge-agent_*.deb) [ -e "$package" ] || die "$package does not exist" "build it with make deb, which writes to dist/" ;;
  *) die "expected a package edge-agent_*.deb, got $package" "build it with make deb, which writes to dist/" ;;
esac
[ -e "$enroll" ] || die "$enroll does not exist" "docs/sd-card.md has an example"

mkdir -p "$boot/edge-agent"
rm -f "$boot"/edge-agent/edge-agent_*.deb
cp "$package" "$here/first-boot.sh" "$boot/edge-agent/"
cp "$enroll" "$boot/edge-agent/enroll.toml"

call='sh /boot/firmware/edge-agent/first-boot.sh'
if grep -qs "/boot/firmware/edge-agent/first-boot.sh" "$boot/user-data" "$boot/firstrun.sh"; then
  echo "the first-boot script has the line already"
elif [ -e "$boot/firstrun.sh" ]; then
  # Before the line with which Imager's script deletes itself; on bookworm the partition is at /boot/firmware.
  sed -i "/^rm -f .*firstrun.sh/i $call || true" "$boot/firstrun.sh"
  grep -q "$call" "$boot/firstrun.sh" || die "$boot/firstrun.sh: expected the script that Imager writes" "add this line: $call || true"
elif [ -e "$boot/user-data" ] && grep -q '^runcmd:' "$boot/user-data"; then
  sed -i "/^runcmd:/a \\  - [sh, /boot/firmware/edge-agent/first-boot.sh]" "$boot/user-data"
elif [ -e "$boot/user-data" ]; then
  printf '\nruncmd:\n  - [sh, /boot/firmware/edge-agent/first-boot.sh]\n' >>"$boot/user-data"
else
  die "$boot has neither user-data nor firstrun.sh" "set a host name or a user in Imager's settings, so that it writes one"
fi
sync
echo "prepared: the device installs $(basename "$package") and enrolls at its first boot"
