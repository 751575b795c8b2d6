#!/usr/bin/env bash
# Usage: detect.sh [--root DIR]
#
# Prints one JSON object about this board: model, L4T and JetPack, CUDA, GPU generation, Python, power mode, memory,
# swap, storage, and warnings, each with what follows from it. Changes nothing and needs no root.
# On a machine that is no Jetson, "jetson" is false and what is unknown is null.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/jetson/lib.sh
source "$here/lib.sh"

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

cuda_version() {
  local found
  found="$(read_text /usr/local/cuda/version.json | awk -F'"' '/"cuda" *:/ { inside = 1 } inside && /"version"/ { print $4; exit }')"
  if [[ -z "$found" && -z "$ROOT" ]] && have nvcc; then
    found="$(nvcc --version | sed -nE 's/.*release ([0-9.]+).*/\1/p')"
  fi
  printf '%s' "$found"
}

root_device() { # what the system itself is on: nvme, sd (mmcblk), or another name
  awk '$2 == "/" { device = $1 } END { print device }' <<<"$(read_text /proc/mounts)"
}

storage_kind() {
  case "$1" in
    /dev/nvme*) printf 'nvme' ;;
    /dev/mmcblk*) printf 'sd-or-emmc' ;;
    '') ;;
    *) printf 'other' ;;
  esac
}

swap_rows() { awk 'NR > 1 { print $1, int($3 / 1024) }' <<<"$(read_text /proc/swaps)"; }

module_part() { # such as p3767-0005
  read_text /proc/device-tree/compatible | grep -oE 'p[0-9]{4}-[0-9]{4}' | head -n 1 || true
}

desktop() { # true, false, or null where systemd does not say
  case "$(default_target)" in
    graphical.target) printf 'true' ;;
    multi-user.target) printf 'false' ;;
    *) printf 'null' ;;
  esac
}

model="$(board_model)"
l4t="$(l4t_version)"
soc="$(soc_name)"
total="$(meminfo_mb MemTotal)"
available="$(meminfo_mb MemAvailable)"
blocks="$(largest_blocks)"
mode_id="$(power_mode_id)"
mode="$(power_mode_name "$mode_id")"
storage="$(storage_kind "$(root_device)")"
graphical="$(desktop)"
zram_mb="$(swap_rows | awk '$1 ~ /zram/ { sum += $2 } END { print sum + 0 }')"
swap_mb="$(swap_rows | awk '{ sum += $2 } END { print sum + 0 }')"
container=false
if [[ -e "$ROOT/.dockerenv" || -e "$ROOT/run/.containerenv" ]]; then container=true; fi

warnings=()
if is_jetson; then
  jetson=true
  [[ "$l4t" != 36.4.7 ]] || warnings+=("L4T 36.4.7 refuses large GPU allocations that other releases grant; update to 36.5 (JetPack 6.2.2)")
  [[ -n "$l4t" ]] || warnings+=("the L4T release is not known; in a container, mount /etc/nv_tegra_release")
  [[ "$l4t" != 35.* ]] || warnings+=("JetPack 5 comes with Python 3.8, and edgespec needs 3.10 or later; update to JetPack 6")
  [[ "$storage" != sd-or-emmc ]] || warnings+=("the system is on SD card or eMMC: drafts load many times slower than from NVMe")
  [[ "$graphical" != true ]] || warnings+=("a desktop is running and takes about 800 MB; memory_setup.sh turns it off")
  ((zram_mb == 0)) || warnings+=("zram swap is on: it takes memory and CPU from the model; memory_setup.sh turns it off")
  if [[ -n "$blocks" ]] && ((blocks < 8)); then
    warnings+=("memory is fragmented ($blocks free blocks of 4 MB): large GPU allocations may fail until a reboot")
  fi
else
  jetson=false
fi
if [[ -n "$available" ]] && ((available < 1024)); then
  warnings+=("only $available MB are free: close other programs, or see memory_setup.sh drop-caches")
fi

mode_names=()
while read -r _ name; do [[ -z "${name:-}" ]] || mode_names+=("$name"); done < <(power_modes)

cat <<JSON
{
  "jetson": $jetson,
  "model": $(json_or_null "$model"),
  "module": $(json_or_null "$(module_part)"),
  "soc": $(json_or_null "$soc"),
  "sm": $(json_number "$(sm_of "$soc")"),
  "l4t": $(json_or_null "$l4t"),
  "jetpack": $(json_or_null "$(jetpack_of "$l4t")"),
  "cuda": $(json_or_null "$(cuda_version)"),
  "wheel_index": $(json_or_null "$(wheel_index "$l4t")"),
  "kernel": $(json_or_null "$(read_text /proc/sys/kernel/osrelease | head -n 1)"),
  "machine": $(json_or_null "$(uname -m)"),
  "python": $(json_or_null "$(python3 -c 'import platform; print(platform.python_version())' 2>/dev/null || true)"),
  "container": $container,
  "desktop": $graphical,
  "power_mode": {"id": $(json_number "$mode_id"), "name": $(json_or_null "$mode"), "known": $(json_list ${mode_names[@]+"${mode_names[@]}"})},
  "memory_mb": {"total": $(json_number "$total"), "available": $(json_number "$available"), "free_4mb_blocks": $(json_number "$blocks")},
  "swap_mb": {"total": $swap_mb, "zram": $zram_mb},
  "storage": $(json_or_null "$storage"),
  "warnings": $(json_list ${warnings[@]+"${warnings[@]}"})
}
JSON
