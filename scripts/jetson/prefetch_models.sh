#!/usr/bin/env bash
# Usage: prefetch_models.sh [--apply] [--set NAME] [--draft NAME]... [--build NAME] [--no-target] [--convert DTYPE --out DIR]
#        prefetch_models.sh --check
#
# Fetches a target and its drafts while there is a network, so that the board works without one, and writes down the
# sha256 of every file. Without --set it lists the sets and which of them fit this board.
#
# --set NAME       as in `edgespec drafts pull`
# --draft NAME     only these drafts of the set; may be repeated
# --build NAME     q4_0 (the default where there is one) or bf16
# --no-target      the drafts only
# --convert DTYPE  int4 or int8: also convert the target (use it with --build bf16), into --out DIR
# --check          compare the files with the sha256 that was written down
#
# It only says what it would fetch, until --apply is given. The hub's variables hold: HF_HOME (put it on NVMe), HF_TOKEN.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/jetson/lib.sh
source "$here/lib.sh"

set_name="" build="" convert="" out="" check=0 target=1
drafts=()
while (($#)); do
  case "$1" in
    --root)
      set_root "${2:-}"
      shift 2
      ;;
    --apply)
      APPLY=1
      shift
      ;;
    --set | --build | --draft | --convert | --out)
      [[ -n "${2:-}" ]] || die "$1 wants a value"
      case "$1" in
        --set) set_name="$2" ;;
        --build) build="$2" ;;
        --draft) drafts+=("$2") ;;
        --convert) convert="$2" ;;
        --out) out="$2" ;;
      esac
      shift 2
      ;;
    --no-target)
      target=0
      shift
      ;;
    --check)
      check=1
      shift
      ;;
    -h | --help)
      usage "$0"
      exit 0
      ;;
    *) die "unknown argument '$1'; see --help" ;;
  esac
done
have edgespec || die "edgespec is not on PATH: activate its environment first (setup.sh makes one)"
[[ -z "$convert" || "$convert" =~ ^int[48]$ ]] || die "--convert wants int4 or int8, not '$convert'"
[[ -z "$convert" || -n "$out" ]] || die "--convert wants --out DIR too"
[[ -z "$convert" || "$target" == 1 ]] || die "--convert converts the target, which --no-target leaves out"

sums="${EDGESPEC_HOME:-$HOME/.cache/edgespec}/prefetch.sha256"

paths_of() { # the paths in the JSON that `edgespec drafts pull --json` printed
  python3 -c 'import json, sys; print(*[m["path"] for m in json.load(sys.stdin)["models"] if m["path"]], sep="\n")'
}

write_sums() { # a line a file, each file once; files of the hub's cache are links, whose content counts
  local path new
  new="$(mktemp)"
  if [[ -r "$sums" ]]; then cat "$sums" >"$new"; fi
  while read -r path; do
    [[ -n "$path" ]] || continue
    find -L "$path" -type f -exec sha256sum {} + >>"$new"
  done
  mkdir -p "$(dirname "$sums")"
  sort -u -k 2 "$new" >"$sums"
  rm -f "$new"
  say "Written down: $(wc -l <"$sums") files in $sums"
}

fetch() {
  local arguments=(drafts pull "$set_name" ${drafts[@]+"${drafts[@]}"}) printed
  if ((target)); then arguments+=(--target); fi
  if [[ -n "$build" ]]; then arguments+=(--build "$build"); fi
  if ((!APPLY)); then
    edgespec "${arguments[@]}" --dry-run
    [[ -z "$convert" ]] || say "then: edgespec convert (the target) --dtype $convert --out $out"
    finish
    return
  fi
  printed="$(edgespec "${arguments[@]}" --json)" || die "not everything was fetched; what came is kept, run it again"
  paths_of <<<"$printed" | write_sums
  if [[ -n "$convert" && -e "$out/config.json" ]]; then # written last and whole: an interrupted one is not there
    say "$out is there already and is kept; remove it to convert anew."
  elif [[ -n "$convert" ]]; then
    edgespec convert "$(paths_of <<<"$printed" | head -n 1)" --dtype "$convert" --out "$out" || die "the target was not converted"
  fi
}

if ((check)); then
  [[ -r "$sums" ]] || die "nothing was fetched by this script yet (no $sums)"
  sha256sum --quiet --check "$sums" || die "files differ from what was fetched: remove them and fetch them again"
  say "All files are as they were fetched."
elif [[ -z "$set_name" ]]; then
  edgespec drafts pull
else
  fetch
fi
