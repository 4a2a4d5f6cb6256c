#!/usr/bin/env bash
# Build llama.cpp's programs from the sources that the package llama-cpp-python carries (no other download).
# The binaries land in CACHE/llama.cpp/bin; the first run takes about ten minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
VERSION=${LLAMA_CPP_PYTHON_VERSION:-0.3.36}
TARGETS=(llama-server llama-perplexity llama-quantize)
cache=$("$PYTHON" -c 'from assay.runs import cache_dir; print(cache_dir("llama.cpp"))')

if [[ ! -x $cache/bin/llama-server ]]; then
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  "$PYTHON" -m venv "$work/tools"
  "$work/tools/bin/python" -m pip install -qq cmake ninja
  # pip download would build the package to learn its dependencies; --no-deps and --no-build-isolation keep that small.
  "$work/tools/bin/python" -m pip install -qq scikit-build-core
  "$work/tools/bin/python" -m pip download -qq --no-deps --no-binary=:all: --no-build-isolation \
    --dest "$work" "llama-cpp-python==$VERSION"
  tar -xzf "$work"/llama_cpp_python-*.tar.gz -C "$work"
  source=$(echo "$work"/llama_cpp_python-*/vendor/llama.cpp)
  # Not -march=native: a virtual machine may announce AMX and then stop a program that uses it.
  PATH="$work/tools/bin:$PATH" cmake -S "$source" -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=OFF
  PATH="$work/tools/bin:$PATH" cmake --build "$work/build" --target "${TARGETS[@]}"
  mkdir -p "$cache/bin.part"
  for target in "${TARGETS[@]}"; do cp "$work/build/bin/$target" "$cache/bin.part/"; done
  mv "$cache/bin.part" "$cache/bin"
fi
echo "$cache/bin"
