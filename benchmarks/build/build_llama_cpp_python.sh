#!/usr/bin/env bash
# Build the package llama-cpp-python into CACHE/llama-cpp-python, for the tests and benchmarks of gguf: engines.
# There is no ready-made wheel: it compiles for about ten minutes on two cores, once. The folder goes on PYTHONPATH.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
VERSION=${LLAMA_CPP_PYTHON_VERSION:-0.3.36}
cache=$("$PYTHON" -c 'from assay.runs import cache_dir; print(cache_dir("llama-cpp-python"))')

if [[ ! -d $cache/llama_cpp ]]; then
  part=$cache.part
  rm -rf "$part"
  # Images and the command-line tools are left out: nothing here uses them, and they double the time.
  # Not -march=native: a virtual machine may announce AMX and then stop a program that uses it.
  CMAKE_ARGS="-DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_CURL=OFF" \
    "$PYTHON" -m pip install -qq --no-deps --target "$part" "llama-cpp-python==$VERSION" "diskcache>=5.6.1"
  rmdir "$cache"
  mv "$part" "$cache"
fi
echo "$cache"
