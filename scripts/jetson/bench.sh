#!/usr/bin/env bash
# Usage: bench.sh [--root DIR] [--model MODEL] [--draft NAMES] [--runs N] [--tokens N] [--out DIR] [--force]
#
# Times answers on this board, with drafts and without (plain), and writes bench.json with everything that a number
# depends on: board, JetPack, power mode, swap, free memory, fragmentation, tegrastats before and during the runs.
# The first run of each kind is a warm-up and is not counted. Changes no settings of the board.
#
# --model MODEL  as for edgespec (default: the default model)
# --draft NAMES  as for edgespec (default: auto)
# --runs N       counted runs of each kind (default 3)
# --tokens N     tokens of each answer (default 128)
# --out DIR      where bench.json and tegrastats.log go (default ./jetson-bench)
# --force        run although the preflight found something that spoils the numbers
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/jetson/lib.sh
source "$here/lib.sh"

model="" draft="auto" runs=3 tokens=128 out="jetson-bench" force=0
while (($#)); do
  case "$1" in
    --root)
      set_root "${2:-}"
      shift 2
      ;;
    --model | --draft | --runs | --tokens | --out)
      [[ -n "${2:-}" ]] || die "$1 wants a value"
      case "$1" in
        --model) model="$2" ;;
        --draft) draft="$2" ;;
        --runs) runs="$2" ;;
        --tokens) tokens="$2" ;;
        --out) out="$2" ;;
      esac
      shift 2
      ;;
    --force)
      force=1
      shift
      ;;
    -h | --help)
      usage "$0"
      exit 0
      ;;
    *) die "unknown argument '$1'; see --help" ;;
  esac
done
[[ "$runs" =~ ^[1-9][0-9]?$ ]] || die "--runs wants a number from 1 to 99, not '$runs'"
[[ "$tokens" =~ ^[1-9][0-9]{0,3}$ ]] || die "--tokens wants a number from 1 to 9999, not '$tokens'"
have edgespec || die "edgespec is not on PATH: activate its environment first (setup.sh makes one)"

prompts=(
  "Write a Python function that merges two sorted lists, with a docstring and three examples."
  "A train leaves at 9:40 and travels 210 km at 84 km/h. When does it arrive? Explain each step."
  "Summarise in three sentences why a computer slows down when its memory is full."
)

in_use() { # in_use: swap in use, in MB
  awk 'NR > 1 { used += $4 } END { print int(used / 1024) }' <<<"$(read_text /proc/swaps)"
}

preflight() { # a line for everything that spoils numbers
  [[ "$(l4t_version)" != 36.4.7 ]] || say "L4T 36.4.7 refuses large GPU allocations that other releases grant"
  local used blocks
  used="$(in_use)"
  ((used == 0)) || say "$used MB of swap are in use: a model that is swapped out decodes many times slower"
  blocks="$(largest_blocks)"
  if [[ -n "$blocks" ]] && ((blocks < 8)); then say "memory is fragmented ($blocks free blocks of 4 MB); a reboot mends it"; fi
  [[ "$(default_target)" != graphical.target ]] || say "a desktop is running, and takes memory and bandwidth"
  if is_jetson && [[ -z "$(power_mode_id)" ]]; then say "the power mode is not known, so the numbers cannot be compared"; fi
  return 0
}

tegrastats_pid=""
# Called by a trap.
# shellcheck disable=SC2317,SC2329
stop_tegrastats() {
  [[ -z "$tegrastats_pid" ]] || kill "$tegrastats_pid" 2>/dev/null || true
  tegrastats_pid=""
}
trap stop_tegrastats EXIT

start_tegrastats() {
  : >"$out/tegrastats.log"
  if have tegrastats; then
    tegrastats --interval 500 >"$out/tegrastats.log" 2>/dev/null &
    tegrastats_pid=$!
  else
    note "tegrastats is not here: no power and no temperatures in the result"
  fi
}

answer() { # answer KIND NUMBER DRAFTS
  local arguments=(generate "${prompts[$2 % ${#prompts[@]}]}" --json --quiet --max-new-tokens "$tokens" --ignore-eos --draft "$3")
  if [[ -n "$model" ]]; then arguments+=(--model "$model"); fi
  note "$1 run $2 of $runs"
  edgespec "${arguments[@]}" >"$out/$1-$2.json" || die "the $1 run $2 failed; its message is above"
}

mapfile -t findings < <(preflight)
for finding in ${findings[@]+"${findings[@]}"}; do note "preflight: $finding"; done
if ((${#findings[@]})) && ((!force)); then die "mend the above first, or give --force (it is written into the result)"; fi

mkdir -p "$out"
rm -f "$out"/plain-*.json "$out"/drafts-*.json
"$here/detect.sh" ${ROOT:+--root "$ROOT"} >"$out/board.json"
start_tegrastats
for ((number = 0; number <= runs; number++)); do # number 0 warms up
  answer plain "$number" off
  answer drafts "$number" "$draft"
done
stop_tegrastats

python3 "$here/bench_summary.py" "$out" --model "${model:-default}" --draft "$draft" --tokens "$tokens" \
  --edgespec "$(edgespec --version 2>/dev/null | head -n 1)" --finding ${findings[@]+"${findings[@]}"} >"$out/bench.json"
say "$out/bench.json"
