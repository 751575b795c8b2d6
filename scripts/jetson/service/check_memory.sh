#!/usr/bin/env bash
# Usage: check_memory.sh [--root DIR]
#
# Ends with 1, and a line for the journal, if less memory is free than the model wants: better no service than a board that
# hangs. MIN_FREE_MB (in /etc/edgespec/service.env) says how much; the default, 1500, suits the default model.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/jetson/lib.sh
source "$here/../lib.sh"

while (($#)); do
  case "$1" in
    --root)
      set_root "${2:-}"
      shift 2
      ;;
    -h | --help)
      usage "$0"
      exit 0
      ;;
    *) die "unknown argument '$1'; see --help" ;;
  esac
done
wanted="${MIN_FREE_MB:-1500}"
[[ "$wanted" =~ ^[0-9]+$ ]] || die "MIN_FREE_MB is '$wanted', and must be a number"
free="$(meminfo_mb MemAvailable)"
[[ -n "$free" ]] || die "/proc/meminfo does not say how much memory is free"
((free >= wanted)) || die "$free MB are free and $wanted are wanted: close other programs, see memory_setup.sh, or lower MIN_FREE_MB"
say "$free MB are free."
