#!/bin/bash
# Runs the tests that need root: the agent in arm64 and armhf roots under qemu, and under a booted systemd.
#
#   packaging/test-arm.sh [PYTEST ARGUMENT ...]
#
# Roots are made once and kept (see packaging/debian-root.sh). Tests mount file systems only in a mount namespace
# that ends with the run. EDGEBUNDLE_PYTHON selects the Python; the default is the one in .venv.
set -euo pipefail

cd "$(dirname "$0")/.."
python=${EDGEBUNDLE_PYTHON:-.venv/bin/python}
[[ $EUID == 0 ]] || { echo "$0: must be run as root: it makes roots, mounts them and boots one" >&2; exit 1; }
packaging/install-needs.sh arm

# Two at a time: making a root seldom keeps more than one core busy.
(
  packaging/debian-root.sh arm64 bookworm
  packaging/debian-root.sh amd64 bookworm
  packaging/debian-root.sh armhf trixie
) &
first=$!
(
  packaging/debian-root.sh arm64 trixie
  packaging/debian-root.sh armhf bookworm
) &
second=$!
wait "$first"
wait "$second"

# Two files at a time: an emulated system keeps one core busy.
exec unshare --mount --propagation private "$python" -m pytest --needs-root -n 2 --dist loadfile "$@"
