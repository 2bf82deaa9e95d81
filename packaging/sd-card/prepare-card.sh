#!/bin/sh
# Prepares the card of a device, after the imager has written it and while its boot partition is mounted here:
#
#   packaging/sd-card/prepare-card.sh /media/me/bootfs edge-agent_0.1.0+deb13_arm64.deb enroll.toml
#
# Puts the package and what to enroll with onto the boot partition, and one line into what runs at the first boot:
# user-data (cloud-init: trixie) or firstrun.sh (bookworm), whichever the imager has written. Running it twice
# is running it once.
set -eu

die() { printf 'error: %s\nhint: %s\n' "$1" "$2" >&2; exit 4; }

[ $# -eq 3 ] || { echo "usage: $0 BOOT_PARTITION PACKAGE.deb ENROLL.toml" >&2; exit 2; }
boot=$1 package=$2 enroll=$3 here=$(dirname "$0")
[ -e "$boot/cmdline.txt" ] || die "$boot is no boot partition of a Raspberry Pi: expected cmdline.txt in it, found none" \
  "write the card with Raspberry Pi Imager and mount its first partition"
case $(basename "$package") in
  edge-agent_*.deb) [ -e "$package" ] || die "$package is not there" "make deb builds it into dist/" ;;
  *) die "expected a package edge-agent_*.deb, got $package" "make deb builds it into dist/" ;;
esac
[ -e "$enroll" ] || die "$enroll is not there" "docs/sd-card.md shows one"

mkdir -p "$boot/edge-agent"
rm -f "$boot"/edge-agent/edge-agent_*.deb
cp "$package" "$here/first-boot.sh" "$boot/edge-agent/"
cp "$enroll" "$boot/edge-agent/enroll.toml"

call='sh /boot/firmware/edge-agent/first-boot.sh'
if grep -qs "/boot/firmware/edge-agent/first-boot.sh" "$boot/user-data" "$boot/firstrun.sh"; then
  echo "already in what runs at the first boot"
elif [ -e "$boot/firstrun.sh" ]; then
  # Before the line with which the imager's script removes itself; on bookworm the partition is at /boot/firmware.
  sed -i "/^rm -f .*firstrun.sh/i $call || true" "$boot/firstrun.sh"
  grep -q "$call" "$boot/firstrun.sh" || die "$boot/firstrun.sh is not as the imager writes it" "add the line: $call || true"
elif [ -e "$boot/user-data" ] && grep -q '^runcmd:' "$boot/user-data"; then
  sed -i "/^runcmd:/a \\  - [sh, /boot/firmware/edge-agent/first-boot.sh]" "$boot/user-data"
elif [ -e "$boot/user-data" ]; then
  printf '\nruncmd:\n  - [sh, /boot/firmware/edge-agent/first-boot.sh]\n' >>"$boot/user-data"
else
  die "neither user-data nor firstrun.sh is in $boot" "set a host name or a user in the imager's settings: it then writes one"
fi
sync
echo "prepared: the device installs $(basename "$package") and enrolls itself when it first boots"
