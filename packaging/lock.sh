#!/bin/bash
# Resolves the dependencies in pyproject.toml again, and writes packaging/locks: those of the agent for each release,
# and those of the workstation that compiles, signs, tests and builds, with its build system.
#
#   packaging/lock.sh [--upgrade]
#
# Without --upgrade, the workstation keeps each version that pyproject.toml still allows. uv resolves for every
# version of Python and every machine at once; it is fetched into a folder that is removed at the end.
set -euo pipefail

cd "$(dirname "$0")/.."
python=${EDGEBUNDLE_PYTHON:-.venv/bin/python}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"$python" -m pip install --quiet --disable-pip-version-check --target "$scratch/uv" uv==0.13.9
"$python" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' \
  >"$scratch/build-system.in"
lock=packaging/locks/workstation.txt
[[ ! -e $lock ]] || cp "$lock" "$scratch/workstation.txt"
# 3.11.2 is Debian 12's.
"$scratch/uv/bin/uv" pip compile --quiet --universal --python-version 3.11.2 --generate-hashes --no-annotate --no-header \
  --no-emit-index-url --extra builder --extra demo --extra dev "$@" -o "$scratch/workstation.txt" \
  pyproject.toml "$scratch/build-system.in" >/dev/null
{
  echo '# What make installs, and what builds the wheel. Made by packaging/lock.sh; edit pyproject.toml instead.'
  grep -v '^#' "$scratch/workstation.txt"
} >"$lock"
"$python" packaging/build_deb.py --lock
"$python" packaging/build_deb.py --lock --arch armhf
