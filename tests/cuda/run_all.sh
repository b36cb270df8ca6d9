#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, in one go: tests/cuda/run_all.sh OUT_DIR COMMIT [SECONDS] [STAGE...]
#
# Builds this tree without a network or build isolation (Python needs pybind11, scikit-build-core, cmake, ninja; the
# tests pytest, pytest-xdist, hypothesis, gguf, torch), then tests, measures and sanitizes. Every stage has its own time
# limit, all together SECONDS (default 470); one that fails or runs out of time leaves the others alone. OUT_DIR gets
# summary.txt, log.txt and the results as JSON, which carry COMMIT. Exit status 1 where a stage did not pass.
set -uo pipefail

cd "$(dirname "$0")/../.."
out=${1:?OUT_DIR} commit=${2:?COMMIT} seconds=${3:-470}
shift $(($# < 3 ? $# : 3))
stages=("$@")
if [ ${#stages[@]} -eq 0 ]; then
  stages=(build caller isolate plan epilogue layer tests memcheck racecheck gather)
fi
mkdir -p "$out"
site=/tmp/expertile_site
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 XDG_CACHE_HOME=/tmp/expertile_cache
failed=0
began=$(date +%s)

test_files=(tests/cuda tests/test_single_kernels.py tests/test_decoders.py tests/test_parity.py tests/test_plan.py
  tests/test_window.py tests/test_device_array.py)

build() {
  python3 -m pip install -q --no-build-isolation --no-deps --no-index --upgrade --target "$site" \
    -C cmake.define.EXPERTILE_COMMIT="$commit" -C build-dir=/tmp/expertile_build . &&
    python3 -c "import expertile; print(expertile.__commit__, [d.detail for d in expertile.list_devices()])"
}
run_pytest() { python3 -m pytest -q -p no:cacheprovider -n 12 --device cuda -rs --durations 5 -W ignore "$@"; }
caller() { run_pytest tests/cuda/test_torch.py tests/cuda/test_device.py tests/test_device_array.py; }
tests() { run_pytest "${test_files[@]}"; }
isolate() { python3 tests/cuda/isolate.py "$out/isolate.json"; }
measure() { python3 tests/cuda/measure.py "$out" "$1"; }
sanitize() { tests/cuda/sanitize.sh "$1"; }

limit_of() {
  case $1 in
    build) echo 200 ;;
    caller | layer | epilogue) echo 60 ;;
    isolate | gather) echo 50 ;;
    plan) echo 100 ;;
    *) echo 120 ;;
  esac
}

command_of() {
  case $1 in
    plan | gather | epilogue | layer) echo measure "$1" ;;
    memcheck | racecheck) echo sanitize "$1" ;;
    *) echo "$1" ;;
  esac
}

export -f build run_pytest caller tests isolate measure sanitize
export out commit site
export test_files_text="${test_files[*]}"

for stage in "${stages[@]}"; do
  left=$((seconds - ($(date +%s) - began)))
  limit=$(limit_of "$stage")
  if [ "$left" -lt "$limit" ]; then limit=$left; fi
  if [ "$limit" -lt 5 ]; then
    echo "$stage: no time left" | tee -a "$out/summary.txt"
    failed=1
    continue
  fi
  from=$(date +%s)
  # A new process group for what timeout has to end; arrays do not pass through the environment.
  timeout -k 5 "$limit" bash -c "test_files=(\$test_files_text); $(command_of "$stage")" >"$out/stage.txt" 2>&1
  status=$?
  if [ $status -ne 0 ]; then failed=1; fi
  echo "$stage: status $status, $(($(date +%s) - from)) s: $(grep -v '^$' "$out/stage.txt" | tail -1)" |
    tee -a "$out/summary.txt"
  { echo "===== $stage"; tail -c 400000 "$out/stage.txt"; } >>"$out/log.txt"
  if [ $status -ne 0 ]; then tail -n 25 "$out/stage.txt"; fi
  rm -f "$out/stage.txt"
done
exit $failed
