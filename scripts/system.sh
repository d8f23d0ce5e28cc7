#!/usr/bin/env bash
# Install what `make test-system` needs beside .venv: programs of Debian (as root), axe-core (npm), selenium. What is there is kept.
# To add a program: a line in `programs`.
set -euo pipefail
cd "$(dirname "$0")/.."

axe=axe-core@4.11.0
programs="chromium:chromium chromedriver:chromium-driver npm:npm prometheus:prometheus promtool:prometheus ip:iproute2 nsenter:util-linux nft:nftables" # command:package

say() { echo "test-system: $*" >&2; }

have() { command -v "$1" >/dev/null 2>&1; }

missing=()
for program in $programs; do
  have "${program%%:*}" || missing+=("${program##*:}")
done
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" != 0 ] || ! have apt-get; then
    say "this needs Debian's packages ${missing[*]}; install them, then run it again: sudo apt-get install ${missing[*]}"
    exit 1
  fi
  say "installing ${missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

if [ ! -f ".system/node_modules/axe-core/axe.min.js" ] || [ "$(cat .system/axe 2>/dev/null)" != "$axe" ]; then
  say "installing $axe"
  npm install --silent --prefix .system --no-save --ignore-scripts --no-audit --no-fund "$axe"
  echo "$axe" >.system/axe
fi

say "installing the versions of requirements-system.lock"
if have uv; then
  UV_FIND_LINKS=${UV_FIND_LINKS-${PIP_FIND_LINKS-}} UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX-${PIP_INDEX_URL-}} \
    uv pip install --quiet --python .venv/bin/python --no-deps -r requirements-system.lock
else
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-system.lock
fi
