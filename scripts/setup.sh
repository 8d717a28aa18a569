#!/bin/sh
# Make .venv and install the project into it, unless the files that decide its content are unchanged.
set -eu
cd "$(dirname "$0")/.."

stamp=.venv/setup-stamp
wanted=$(cat pyproject.toml constraints.txt scripts/setup.sh | cksum)
if [ -x .venv/bin/python ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
  exit 0
fi

if [ ! -x .venv/bin/python ]; then
  python=${PYTHON:-python3}
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "grpo-node needs Python 3.11 or later; name one with PYTHON=/path/to/python just setup" >&2
    exit 1
  }
  "$python" -m venv .venv
fi

# Editable installs from pyproject.toml alone, and constraints on build steps, need a recent pip.
.venv/bin/python -c 'import pip, sys; sys.exit(int(pip.__version__.split(".")[0]) < 23)' ||
  .venv/bin/python -m pip install --quiet --upgrade pip

echo "installing grpo-node into .venv (minutes the first time) …" >&2
.venv/bin/python -m pip install -qq --disable-pip-version-check --no-compile \
  --constraint constraints.txt --editable '.[dev]'
# On all cores, where pip would use one; what does not compile (some packages hold Python 2) is not imported.
.venv/bin/python -W ignore -m compileall -qq -j 0 -x '/tests?/' .venv/lib || true
printf '%s' "$wanted" >"$stamp"
