#!/usr/bin/env bash
# Usage: report.sh [--root DIR] [--out FILE]
#
# Collects into one archive what a bug report needs: the board, `edgespec doctor`, package versions, memory, swap, disks,
# tegrastats, the power mode, and kernel messages about memory and the GPU. Sends nothing anywhere.
#
# Only what is on that list is collected; never the environment, shell histories, ssh keys, chats or prompts. What is
# collected goes through redact.py, which takes out names of host and users, serial numbers, addresses and tokens. Look
# into the archive before you send it.
#
# --out FILE  the archive (default ./edgespec-report.tar.gz)
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/jetson/lib.sh
source "$here/lib.sh"

out="edgespec-report.tar.gz"
while (($#)); do
  case "$1" in
    --root)
      set_root "${2:-}"
      shift 2
      ;;
    --out)
      [[ -n "${2:-}" ]] || die "--out wants a file"
      out="$2"
      shift 2
      ;;
    -h | --help)
      usage "$0"
      exit 0
      ;;
    *) die "unknown argument '$1'; see --help" ;;
  esac
done

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
folder="$work/edgespec-report"
mkdir "$folder"

keep() { # keep NAME: what comes on stdin, redacted; nothing is written before that
  python3 "$here/redact.py" "${ROOT:-/}" >"$folder/$1"
}

command_output() { # command_output NAME COMMAND...: its output, or why there is none; never waits long
  local name="$1"
  shift
  if ! have "$1"; then
    printf '%s is not here\n' "$1" | keep "$name"
    return
  fi
  { timeout 120 "$@" 2>&1 || printf '(ended with %s)\n' "$?"; } | keep "$name"
}

file_content() { # file_content NAME PATH
  { if [[ -r "$ROOT$2" ]]; then read_text "$2"; else printf '%s cannot be read\n' "$2"; fi; } | keep "$1"
}

kernel_messages() { # about memory, the GPU and throttling only: the rest of the log is nobody's business
  if ! have dmesg; then
    printf 'dmesg is not here\n'
    return
  fi
  { dmesg 2>&1 || true; } | { grep -iE 'nvmap|nvgpu|out of memory|oom|killed process|throttl|over-?current|not permitted' || true; } | tail -n 200
}

"$here/detect.sh" ${ROOT:+--root "$ROOT"} | keep board.json
file_content nv_tegra_release.txt /etc/nv_tegra_release
file_content meminfo.txt /proc/meminfo
file_content buddyinfo.txt /proc/buddyinfo
file_content swaps.txt /proc/swaps
file_content power_modes.txt /etc/nvpmodel.conf
kernel_messages | keep kernel.txt
command_output doctor.json edgespec doctor --json
command_output config.txt edgespec config
command_output packages.txt python3 -m pip list --disable-pip-version-check
command_output disks.txt df -h /
command_output nvpmodel.txt nvpmodel -q
command_output tegrastats.txt timeout 3 tegrastats --interval 1000
{
  printf 'made by report.sh; edgespec %s\n' "$(edgespec --version 2>/dev/null | head -n 1 || printf 'is not here')"
} | keep README.txt

tar -C "$work" --owner=0 --group=0 --numeric-owner --mtime=@0 -czf "$out" edgespec-report
say "$out"
note "Look into it before you send it: tar -xzf $out"
