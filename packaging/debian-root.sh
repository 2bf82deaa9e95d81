#!/bin/bash
# Makes a Debian root folder on the first call, keeps it between runs, and prints its path.
#
#   packaging/debian-root.sh ARCH SUITE        arm64|armhf|amd64  bookworm|trixie
#
# Promises: the printed root is complete (built under another name, stamped, then renamed), was made by this
# version of the recipe (a stale root is made again), and runs here (binfmt_misc knows the architecture). If two
# callers run at once, the second waits. It writes only to the cache folder:
#   EDGEBUNDLE_CACHE    folder for roots; default ${XDG_CACHE_HOME:-~/.cache}/edgebundle
#   EDGEBUNDLE_MIRROR   Debian mirror; default: the one that this machine's apt uses
# Needs root and debootstrap, and qemu-user-static for a foreign architecture.
set -euo pipefail

RECIPE=3 # raise it when the contents of a root change

[[ $# == 2 ]] || { echo "usage: $0 arm64|armhf|amd64 bookworm|trixie" >&2; exit 2; }
arch=$1 suite=$2
[[ $EUID == 0 ]] || { echo "$0: must be run as root: debootstrap makes device nodes and sets owners" >&2; exit 1; }

# The emulator's default processor is several times slower, because it computes pointer authentication.
case $arch in
  arm64) export QEMU_CPU=cortex-a72 ;;
  armhf) export QEMU_CPU=cortex-a7 ;;
esac
include=python3,python3-venv,adduser,ca-certificates
case $arch in
  arm64) ;;
  # Python packages without 32-bit wheels, and the headers that tvm-ffi is built against
  armhf) include+=,python3-cffi-backend,python3-cryptography,python3-numpy,python3-pil,libpython3-dev ;;
  # the root that is booted
  amd64) include+=,systemd,systemd-sysv,dbus ;;
  *) echo "$0: no recipe for architecture $arch" >&2; exit 2 ;;
esac

cache=${EDGEBUNDLE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/edgebundle}
root=$cache/$arch-$suite
stamp="recipe $RECIPE $arch $suite $include"
mkdir -p "$cache"

# Prints the Debian mirror that this machine's apt uses, whatever the format of its sources.
mirror() {
  apt-get indextargets --format '$(SITE) $(ORIGIN) $(LABEL)' 2>/dev/null \
    | awk '$2 == "Debian" && $3 == "Debian" { print $1; found = 1; exit } END { exit !found }' \
    || echo http://deb.debian.org/debian
}

# Makes the kernel run foreign programs with the static qemu. Flag F opens qemu now, so that it is also found
# from inside a root that does not contain it.
register() {
  local name=$1 magic=$2 mask=$3 interpreter=/usr/bin/$1-static dir=/proc/sys/fs/binfmt_misc
  [[ -e $dir/register ]] || mount -t binfmt_misc binfmt_misc "$dir"
  if [[ -e $dir/$name ]] && grep -q '^enabled' "$dir/$name" && grep -q '^flags:.*F' "$dir/$name"; then return; fi
  [[ -x $interpreter ]] || { echo "$0: $interpreter is missing (apt-get install qemu-user-static)" >&2; exit 1; }
  [[ ! -e $dir/$name ]] || echo -1 >"$dir/$name"
  echo ":$name:M::$magic:$mask:$interpreter:F" >"$dir/register"
}

elf_mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
exec 9>"$cache/.$arch-$suite.lock"
exec 8>"$cache/.binfmt.lock"
flock 8
case $arch in
  arm64) register qemu-aarch64 '\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00' "$elf_mask" ;;
  armhf) register qemu-arm '\x7fELF\x01\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\x28\x00' "$elf_mask" ;;
esac
exec 8>&-
flock 9

if [[ -e $root/.edgebundle-root && $(<"$root/.edgebundle-root") == "$stamp" ]]; then
  echo "$root"
  exit
fi

build=$cache/.building-$arch-$suite
rm -rf --one-file-system "$build"
echo "making the $arch root of Debian $suite in $root (minutes, once)" >&2
mkdir -p "$cache/debs-$suite-$arch"
options=()
[[ $(stat -f -c %T "$cache") == overlayfs ]] || options=(--cache-dir="$cache/debs-$suite-$arch")
if ! debootstrap "${options[@]}" --arch="$arch" --variant=minbase --include="$include" \
    "$suite" "$build" "${EDGEBUNDLE_MIRROR:-$(mirror)}" >"$cache/$arch-$suite.log" 2>&1 </dev/null; then
  tail -n 25 "$cache/$arch-$suite.log" "$build/debootstrap/debootstrap.log" >&2 || true
  echo "$0: debootstrap failed; the full log is $cache/$arch-$suite.log" >&2
  if grep -q corrupt "$cache/$arch-$suite.log"; then
    echo "$0: a mirror that is being updated has files that do not match its signature: wait, or set" \
      "EDGEBUNDLE_MIRROR to another one" >&2
  fi
  exit 1
fi
rm -rf "$build"/var/cache/apt/archives/*.deb "$build"/var/lib/apt/lists/*
rm -f "$build"/etc/machine-id && : >"$build/etc/machine-id"
echo edgebundle >"$build/etc/hostname"
echo "127.0.0.1 localhost" >"$build/etc/hosts"
# Check that programs run in it before it gets its final name.
chroot "$build" /usr/bin/python3 -c 'import ssl, ctypes, venv' >&2
echo "$stamp" >"$build/.edgebundle-root"
sync -f "$build/.edgebundle-root"
rm -rf --one-file-system "$root"
mv -T "$build" "$root"
echo "$root"
