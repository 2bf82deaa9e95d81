#!/bin/bash
# Downloads the mosquitto of a Debian release with its libraries, keeps it between runs, and prints the command
# that starts it on this machine, one word a line.
#
#   packaging/debian-mosquitto.sh [--kept] bookworm|trixie        --kept: fail instead of downloading it
#
# Promises: the files come from Debian's archive, whose signature apt checks; the folder is complete (built under
# another name, then renamed); nothing is installed, and nothing outside the cache folder changes. If two callers
# run at once, the second waits. It needs Debian's apt and dpkg, and no root.
#   EDGEBUNDLE_CACHE    folder to keep it in; default ${XDG_CACHE_HOME:-~/.cache}/edgebundle
#   EDGEBUNDLE_MIRROR   Debian mirror; default: http://deb.debian.org/debian
set -euo pipefail

only_kept=
[[ ${1:-} != --kept ]] || { only_kept=1; shift; }
[[ $# == 1 ]] || { echo "usage: $0 [--kept] bookworm|trixie" >&2; exit 2; }
suite=$1
arch=$(dpkg --print-architecture)
cache=${EDGEBUNDLE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/edgebundle}
kept=$cache/mosquitto-$suite-$arch
mkdir -p "$cache"

download() {
  local build=$cache/.building-mosquitto-$suite-$arch
  rm -rf "$build"
  mkdir -p "$build/apt/lists/partial" "$build/apt/archives/partial" "$build/root"
  # An empty list of installed packages: apt resolves all libraries, down to libc.
  : >"$build/apt/status"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]" \
    "${EDGEBUNDLE_MIRROR:-http://deb.debian.org/debian} $suite main" >"$build/apt/sources.list"
  local options=(
    -qq -o APT::Architecture="$arch" -o APT::Architectures="$arch" -o APT::Sandbox::User="$(id -un)"
    -o Dir::State="$build/apt" -o Dir::State::status="$build/apt/status"
    -o Dir::Cache="$build/apt" -o Dir::Cache::archives="$build/apt/archives"
    -o Dir::Etc::SourceList="$build/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null
    -o Dir::Etc::Preferences=/dev/null -o Dir::Etc::PreferencesParts=/dev/null
    -o Acquire::Languages=none
  )
  apt-get "${options[@]}" update
  apt-get "${options[@]}" --yes --no-install-recommends --download-only install mosquitto
  for deb in "$build"/apt/archives/*.deb; do
    dpkg-deb --extract "$deb" "$build/root"
  done
  rm -rf "$build/apt"
  rm -rf "$kept"
  mv -T "$build/root" "$kept"
}

exec 9>"$cache/.mosquitto-$suite-$arch.lock"
flock 9
if [[ ! -x $kept/usr/sbin/mosquitto ]]; then
  [[ -z $only_kept ]] || { echo "$0: there is no $kept" >&2; exit 1; }
  echo "downloading the mosquitto of Debian $suite (20 MB, once)" >&2
  download >&2 </dev/null
fi

# The release's own loader and libraries: the C library of this machine may be older.
loader=("$kept"/usr/lib/*/ld-linux-*.so.* "$kept"/lib/*/ld-linux-*.so.* "$kept"/lib/ld-linux*.so.*)
for candidate in "${loader[@]}"; do
  [[ -e $candidate ]] || continue
  libraries=$(dirname "$candidate")
  name=$(basename "$libraries")
  printf '%s\n' "$candidate" --library-path "$kept/usr/lib/$name:$kept/lib/$name" "$kept/usr/sbin/mosquitto"
  exit
done
echo "$0: expected a loader (ld-linux-*.so.*) in $kept, got none" >&2
exit 1
