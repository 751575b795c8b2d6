#!/usr/bin/env bash
# Usage: gpu_check.sh [--parts LIST] [--seconds N] [--json FILE] [--device cpu --tiny]
#
# Proves the CUDA engine on this machine's first GPU, in under 6 minutes and without downloads: parity with the float32
# reference, texts with drafts against texts without (and the law of sampled ones, and the looks of a round), how fast
# kernels read weights against a copy on the device, steps as graphs and kernel by kernel, the speed-up of speculation,
# rounds beside a load, five drafts in two slots, memory against its plan, and the tests that need a GPU. Prints one
# table and writes a JSON. Models have real shapes and random weights.
#
# --parts LIST   some of parity,rounds,bandwidth,steps,loading,memory,tests
# --seconds N    begin no part after so many seconds (default 330)
# --json FILE    where the JSON goes (default ./gpu_check.json)
# --device cpu --tiny   only see whether it runs
#
# Python is the one of EDGESPEC_PYTHON, else .venv/bin/python beside this script's folder, else python3.
# Exits with 0 if all goals were met, 1 if not, 3 where there is no CUDA device ("nothing was measured").
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

if [[ "${1:-}" == "-h" || "${1:-}" == "--help" ]]; then
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
  exit 0
fi

python="${EDGESPEC_PYTHON:-}"
if [[ -z "$python" ]]; then
  python="python3"
  [[ -x "$root/.venv/bin/python" ]] && python="$root/.venv/bin/python"
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m edgespec.bench.gpu_check "$@"
