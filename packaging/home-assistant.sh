#!/bin/bash
# Makes a Debian root folder with Home Assistant on the first call, keeps it between runs, and prints its path:
# Home Assistant needs a newer Python than that of Debian 12.
#
#   packaging/home-assistant.sh
#
# Promises: as packaging/debian-root.sh, which makes the root that this one is a copy of. It takes 1 GB, a third of
# it Home Assistant's own page, without which its core does not start. Only what the recipe of docs/clients.md needs is
# installed beside the core. A download that breaks off is tried again, and what has arrived is not fetched twice.
#   EDGEBUNDLE_CACHE    folder for roots; default ${XDG_CACHE_HOME:-~/.cache}/edgebundle
# pip's own variables, such as PIP_INDEX_URL, count inside the root, too. pip only fetches uv, which Home Assistant itself
# installs with: it takes a fraction of pip's time for the rest.
set -euo pipefail
cd "$(dirname "$0")/.."

VERSION=2026.2.3
PAGE=20260128.6
MQTT=2.1.0 # of paho, which Home Assistant's integration names
LRU=1.4.1  # Home Assistant names 1.3.0, of which there is no wheel for this Python
UV=0.9.26  # that of Home Assistant's own list

export PIP_RETRIES=${PIP_RETRIES:-10} PIP_DEFAULT_TIMEOUT=${PIP_DEFAULT_TIMEOUT:-60} PIP_DISABLE_PIP_VERSION_CHECK=1
cache=${EDGEBUNDLE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/edgebundle}
root=$cache/home-assistant
base=$(packaging/debian-root.sh amd64 trixie)
stamp="$VERSION $PAGE $MQTT $LRU $UV $(<"$base/.edgebundle-root")"
exec 9>"$cache/.home-assistant.lock"
flock 9
if [[ -e $root/.home-assistant && $(<"$root/.home-assistant") == "$stamp" ]]; then
  echo "$root"
  exit
fi

build=$cache/.building-home-assistant
rm -rf --one-file-system "$build"
echo "installing Home Assistant $VERSION in $root (minutes, once)" >&2
cp -a "$base" "$build"
cp -L /etc/resolv.conf "$build/etc/resolv.conf"
# Those that this machine trusts, such as a company's.
cp -L /etc/ssl/certs/ca-certificates.crt "$build/etc/ssl/certs/ca-certificates.crt"
export SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
export UV_DEFAULT_INDEX=${PIP_INDEX_URL:-https://pypi.org/simple} UV_HTTP_TIMEOUT=$PIP_DEFAULT_TIMEOUT
[[ -z ${PIP_EXTRA_INDEX_URL:-} ]] || export UV_INDEX=$PIP_EXTRA_INDEX_URL
# A folder of wheels on this machine does not exist in the root.
within() { env -u PIP_FIND_LINKS chroot "$build" "$@" >&2; }
download() {
  local attempt
  for attempt in 1 2 3; do
    if within "$@"; then return; fi
    echo "$0: attempt $attempt of 3 to download Home Assistant failed" >&2
    ((attempt == 3)) || sleep $((20 * attempt))
  done
  echo "$0: Home Assistant could not be downloaded: check whether pip and uv reach their index from this machine" >&2
  return 1
}
within python3 -m venv /ha
download /ha/bin/pip install -q --no-compile "uv==$UV"
echo "lru-dict==$LRU" >"$build/overrides"
download /ha/bin/uv pip install -q --python /ha/bin/python --overrides /overrides \
  "homeassistant==$VERSION" "home-assistant-frontend==$PAGE" "paho-mqtt==$MQTT"
within /ha/bin/hass --version
rm -rf "$build/root/.cache"
echo "$stamp" >"$build/.home-assistant"
rm -rf --one-file-system "$root"
mv -T "$build" "$root"
echo "$root"
