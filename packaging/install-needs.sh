#!/bin/bash
# Installs the Debian packages that a target of the Makefile needs in addition to Python's own, as root; without root,
# says in a few lines what is missing, what cannot run without it, and how to install it.
#
#   packaging/install-needs.sh [--required | --list] [LANE ...]     test, arm, count, broker (needs.txt); none: all
#
#   --required   fail if something is missing and cannot be installed
#   --list       only say what is missing
#
# Promises: it installs nothing if nothing is missing; all packages are installed in one go, with progress.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
PATH=$PATH:/usr/sbin:/sbin

mode=${1:-}
case $mode in
  --required | --list) shift ;;
  *) mode= ;;
esac

present() {
  local shows
  for shows in $1; do
    if command -v "$shows" >/dev/null || [[ -e $shows ]]; then return 0; fi
  done
  return 1
}

packages=() lines=()
missing() {
  packages=() lines=()
  local lanes package shows purpose lane wanted
  while IFS='|' read -r lanes package shows purpose; do
    [[ -n $package && $lanes != \#* ]] || continue
    wanted=
    for lane in "$@"; do [[ " $lanes " != *" $lane "* ]] || wanted=1; done
    [[ $# == 0 || -n $wanted ]] || continue
    if ! present "$shows"; then
      # shellcheck disable=SC2206 # one package a word
      packages+=($package)
      lines+=("$(echo $package): $(echo $purpose)")
    fi
  done <"$here/needs.txt"
  [[ ${#packages[@]} == 0 ]] || mapfile -t packages < <(printf '%s\n' "${packages[@]}" | sort -u)
}

if [[ $EUID != 0 && " $* " == *" test "* ]]; then
  echo 'make: left out, because it needs root: boards behind ssh, disks that lose their power'
fi
missing "$@"
[[ ${#packages[@]} -gt 0 ]] || exit 0
if [[ $mode == --list || $EUID != 0 ]] || ! command -v apt-get >/dev/null; then
  echo 'make: not installed, and what is left out without it:'
  printf '  %s\n' "${lines[@]}"
  echo "to install it: sudo apt-get install --no-install-recommends ${packages[*]}"
  [[ $mode != --required ]] || exit 1
  exit 0
fi

# Prints each tenth of apt's work.
progress() {
  local kind what percent text last=-1
  while IFS=: read -r kind what percent text; do
    case $kind in
      dlstatus | pmstatus) ;;
      *) continue ;;
    esac
    percent=${percent%%.*}
    if [[ $percent =~ ^[0-9]+$ && $((percent / 10)) != "$last" ]]; then
      last=$((percent / 10))
      printf '  %3d %% %s\n' "$percent" "$([[ $kind == dlstatus ]] && echo downloaded || echo installed)"
    fi
  done
}

echo "make: installing ${packages[*]}"
export DEBIAN_FRONTEND=noninteractive
# Another package manager may be running, for example just after boot.
wait_for_lock=(-o DPkg::Lock::Timeout=300)
apt-get "${wait_for_lock[@]}" update -qq </dev/null
apt-get "${wait_for_lock[@]}" install -qq -y --no-install-recommends -o APT::Status-Fd=3 "${packages[@]}" \
  3> >(progress) </dev/null >/dev/null
missing "$@"
[[ ${#packages[@]} == 0 ]] || {
  echo "$0: installed, but not found afterwards:" >&2
  printf '  %s\n' "${lines[@]}" >&2
  exit 1
}
