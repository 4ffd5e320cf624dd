#!/usr/bin/env bash
# On a host with a GPU and no network: install wheels, run the GPU tests, tune one shape, compare with libraries.
#
#   bench/device_run.sh WHEELS OUT [tests] [tune] [bench] [dispatch] [rehearse]        (no step named: the first three)
#
# WHEELS is a folder that `make wheelhouse` filled; torch, nvcc and cuda-bindings are the host's. Logs, the database
# and JSON go to OUT. STUDY, SECONDS_TO_TUNE, TESTS, SHAPES, LAYOUTS and ROUNDS in the environment choose less or more.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

wheels=${1:?a folder of wheels} out=${2:?a folder for results}
shift 2
steps=" ${*:-tests tune bench} "
study=${STUDY:-studies/h200/2048x768-t2048.toml}
seconds=${SECONDS_TO_TUNE:-60}
site=$(mktemp -d)
mkdir -p "$out"

python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$wheels"/*.whl || exit 1
export PYTHONPATH="$PWD:$site" PYTHONUNBUFFERED=1
export TKTUNE_DB="$out/tktune.db" TKTUNE_CACHE_DIR=${TKTUNE_CACHE_DIR:-$site/cache}
failed=0

if [[ $steps == *" tests "* ]]; then
    python3 -m pytest tests/gpu -m gpu -rP -p no:cacheprovider -p no:logging --durations=6 ${TESTS:-} 2>&1 | tee "$out/tests.log" || failed=1
fi
if [[ $steps == *" tune "* ]]; then
    python3 -m tktune run "$study" --seconds "$seconds" --report-dir "$out/reports" 2>&1 | tee "$out/tune.log" || failed=1
fi
if [[ $steps == *" bench "* ]]; then
    name=$(basename "$study" .toml)
    python3 bench/gpu_host_time.py --out "$out/gpu_host_time.json" 2>&1 | tee "$out/host.log" || failed=1
    python3 bench/gpu_grouped_gemm.py --shapes "${SHAPES-$name}" --rounds "${ROUNDS:-8}" --layouts "${LAYOUTS:-enk}" --out "$out/gpu_grouped_gemm.json" \
        2>&1 | tee "$out/bench.log" || failed=1
fi
if [[ $steps == *" dispatch "* ]]; then
    python3 -m tktune run studies/h200/dispatch_gemm.toml --report-dir "$out/reports" 2>&1 | tee "$out/dispatch_tune.log" || failed=1
    python3 bench/gpu_dispatch_gemm.py --out "$out/gpu_dispatch_gemm.json" 2>&1 | tee "$out/dispatch_bench.log" || failed=1
fi
if [[ $steps == *" rehearse "* ]]; then
    python3 -m tktune run studies/h200/sm_120a-rehearsed.toml --report-dir "$out/reports" 2>&1 | tee "$out/rehearse.log" || failed=1
fi
exit $failed
