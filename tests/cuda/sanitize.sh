#!/usr/bin/env bash
# Every kernel under compute-sanitizer: tests/cuda/sanitize.sh [TOOL...]   (default: memcheck racecheck)
# Needs an NVIDIA GPU, compute-sanitizer on the PATH, and an installed expertile.
set -euo pipefail

cd "$(dirname "$0")/../.."
tools=("$@")
if [ ${#tools[@]} -eq 0 ]; then
  tools=(memcheck racecheck)
fi
for tool in "${tools[@]}"; do
  echo "== $tool"
  compute-sanitizer --tool "$tool" --error-exitcode 1 --launch-timeout 60 --target-processes all \
    python3 tests/cuda/every_kernel.py
done
