#!/usr/bin/env bash
# Usage: memory_setup.sh [--root DIR] [--apply] [--steps LIST] [--swap-file PATH] [--swap-gb N] [plan | revert | drop-caches]
#
# plan (the default)  what would free memory for models, step by step; with --apply, do it
# revert              undo what this script did, and only that
# drop-caches         give the page cache back now (harmless: files are read again when they are needed)
#
# --steps LIST      of text-mode,zram,swap (default: all three)
#   text-mode       boot without the desktop (it takes about 800 MB); from the next boot on
#   zram            no compressed swap in memory: it takes memory and CPU while a model runs; from the next boot on
#   swap            a swap file, so that a full memory makes the board slow instead of killing programs. Models must still fit
#                   in memory: a model that is swapped out is unusably slow
# --swap-file PATH  where (default /var/lib/edgespec/swapfile); on NVMe, if there is one; SD cards and eMMC are refused
# --swap-gb N       how large (default 16)
#
# plan and revert only say what they would do, until --apply is given. No other service is touched: nvargus-daemon,
# nvgetty, nvpmodel and docker stay as they are.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/jetson/lib.sh
source "$here/lib.sh"

action=""
steps="text-mode,zram,swap"
swap_file="$STATE_DIR/swapfile"
swap_gb=16
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
    --steps)
      wants "$@"
      steps="$2"
      shift 2
      ;;
    --swap-file)
      wants "$@"
      swap_file="$2"
      shift 2
      ;;
    --swap-gb)
      wants "$@"
      swap_gb="$2"
      shift 2
      ;;
    -h | --help)
      usage "$0"
      exit 0
      ;;
    plan | revert | drop-caches)
      [[ -z "$action" ]] || die "only one action at a time: $action or $1"
      action="$1"
      shift
      ;;
    *) die "unknown argument '$1'; see --help" ;;
  esac
done
[[ "$swap_gb" =~ ^[1-9][0-9]?$ ]] || die "--swap-gb wants a number from 1 to 99, not '$swap_gb'"
[[ "$swap_file" =~ ^/[A-Za-z0-9_./-]+$ ]] || die "--swap-file wants a full path without spaces, not '$swap_file'"
IFS=',' read -r -a chosen <<<"$steps"
for step in "${chosen[@]}"; do
  case "$step" in
    text-mode | zram | swap) ;;
    *) die "unknown step '$step'; steps are text-mode, zram and swap" ;;
  esac
done

state="$STATE_DIR/memory_setup"
fstab_mark="# The next line is by edgespec's memory_setup.sh."

remember() { # remember KEY VALUE: how it was before the first change
  [[ -z "$(recall "$1")" ]] || return 0
  as_root mkdir -p "$ROOT$STATE_DIR"
  printf '%s=%s\n' "$1" "$2" | as_root tee -a "$ROOT$state" >/dev/null
}

recall() { read_text "$state" | sed -n "s/^$1=//p" | head -n 1; }

forget() { # forget KEY
  as_root sed -i "/^$1=/d" "$ROOT$state"
}

zram_enabled() { [[ -n "$(find "$ROOT/etc/systemd/system" -name nvzramconfig.service -path '*.wants/*' 2>/dev/null | head -n 1)" ]]; }

text_mode() {
  local target
  target="$(default_target)"
  if [[ "$target" != graphical.target ]]; then
    say "- text mode: nothing to do (the default target is ${target:-not known})"
    return
  fi
  if ((APPLY)); then remember target graphical.target; fi
  change "text mode from the next boot on (frees about 800 MB)" "systemctl set-default graphical.target" \
    "" as_root systemctl set-default multi-user.target
}

zram() {
  if ! zram_enabled; then
    say "- zram: nothing to do (nvzramconfig is not enabled)"
    return
  fi
  if ((APPLY)); then remember zram enabled; fi
  change "no zram swap from the next boot on" "systemctl enable nvzramconfig" "" as_root systemctl disable nvzramconfig
}

folder_device() { # the device under the nearest folder that exists
  local folder
  folder="$(dirname "$ROOT$swap_file")"
  while [[ ! -d "$folder" ]]; do folder="$(dirname "$folder")"; done
  df -P "$folder" | awk 'NR == 2 { print $1, int($4 / 1024 / 1024) }'
}

remove_swap() {
  as_root swapoff "$ROOT$1" || note "$1 was not in use"
  as_root rm -f "$ROOT$1"
  as_root sed -i "/^$fstab_mark\$/,+1d" "$ROOT/etc/fstab"
}

make_swap() {
  local path="$ROOT$swap_file"
  as_root mkdir -p "$(dirname "$path")"
  remember swap "$swap_file"
  if as_root fallocate -l "${swap_gb}G" "$path" && as_root chmod 600 "$path" && as_root mkswap "$path" \
    && as_root swapon "$path"; then
    printf '%s\n%s none swap sw 0 0\n' "$fstab_mark" "$swap_file" | as_root tee -a "$ROOT/etc/fstab" >/dev/null
    return
  fi
  remove_swap "$swap_file"
  forget swap
  die "the swap file could not be made; what was begun is removed"
}

swap() {
  local device free
  if [[ -e "$ROOT$swap_file" ]]; then
    say "- swap file: nothing to do ($swap_file is there)"
    return
  fi
  read -r device free <<<"$(folder_device)"
  if [[ "$device" == /dev/mmcblk* ]]; then
    say "- swap file: left out ($swap_file would be on an SD card or eMMC, which is slow and wears out; give --swap-file a path on NVMe)"
    return
  fi
  if ((free < swap_gb + 4)); then
    say "- swap file: left out (the disk has $free GB free, $((swap_gb + 4)) are wanted; give --swap-gb or --swap-file)"
    return
  fi
  change "a swap file of $swap_gb GB, kept across boots by a line in /etc/fstab" \
    "swapoff $swap_file, remove it and its line in /etc/fstab" \
    "sudo fallocate -l ${swap_gb}G $swap_file; mkswap and swapon; a line in /etc/fstab" make_swap
}

plan() {
  local step
  say "Free now: $(meminfo_mb MemAvailable) of $(meminfo_mb MemTotal) MB."
  for step in "${chosen[@]}"; do
    case "$step" in
      text-mode) text_mode ;;
      zram) zram ;;
      swap) swap ;;
    esac
  done
  if ((APPLY)); then say "Undo it with: memory_setup.sh revert --apply"; fi
  finish
}

revert() {
  local file
  if [[ -z "$(read_text "$state")" ]]; then
    say "Nothing was changed by this script."
    return
  fi
  if [[ -n "$(recall target)" ]]; then
    change "the desktop again, from the next boot on" "memory_setup.sh --steps text-mode --apply" \
      "" as_root systemctl set-default graphical.target
    if ((APPLY)); then forget target; fi
  fi
  if [[ -n "$(recall zram)" ]]; then
    change "zram swap again, from the next boot on" "memory_setup.sh --steps zram --apply" \
      "" as_root systemctl enable nvzramconfig
    if ((APPLY)); then forget zram; fi
  fi
  file="$(recall swap)"
  if [[ -n "$file" ]]; then
    change "no swap file $file" "memory_setup.sh --steps swap --apply" \
      "sudo swapoff $file; rm $file; its line out of /etc/fstab" remove_swap "$file"
    if ((APPLY)); then forget swap; fi
  fi
  finish
}

write_drop() {
  sync
  printf '3\n' | as_root tee "$ROOT/proc/sys/vm/drop_caches" >/dev/null
}

case "${action:-plan}" in
  plan) plan ;;
  revert) revert ;;
  drop-caches)
    change "give the page cache back" "none needed" "sync; echo 3 | sudo tee /proc/sys/vm/drop_caches" write_drop
    finish
    ;;
esac
