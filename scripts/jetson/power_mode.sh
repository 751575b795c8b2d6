#!/usr/bin/env bash
# Usage: power_mode.sh [--root DIR] [--apply] [list | set NAME-OR-ID | clocks max | clocks restore | revert]
#
# list (the default)  the board's power modes, and which one is in force
# set NAME-OR-ID      change the mode; the old one is kept for `revert`. IDs differ between boards: names are safer
# clocks max          pin the clocks at the mode's maximum, after storing how they were
# clocks restore      bring back what `clocks max` stored
# revert              bring back the mode that was in force before the first `set`
#
# set, clocks and revert only say what they would do, until --apply is given.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/jetson/lib.sh
source "$here/lib.sh"

words=()
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
    -h | --help)
      usage "$0"
      exit 0
      ;;
    -*) die "unknown argument '$1'; see --help" ;;
    *)
      words+=("$1")
      shift
      ;;
  esac
done

previous="$STATE_DIR/power_mode"
clocks="$STATE_DIR/clocks"

remember_mode() { # only the first time: the mode before any of ours
  [[ -e "$ROOT$previous" ]] && return
  as_root mkdir -p "$ROOT$STATE_DIR"
  printf '%s\n' "$1" | as_root tee "$ROOT$previous" >/dev/null
}

switch_to() { # nvpmodel may ask whether to reboot; it gets no answer, which means no
  as_root nvpmodel -m "$1" </dev/null || die "nvpmodel -m $1 failed; some changes need a reboot first"
}

resolve() { # resolve NAME-OR-ID: its ID
  power_modes | awk -v word="$1" '$1 == word || tolower($2) == tolower(word) { print $1; exit }'
}

list() {
  local current id name mark
  current="$(power_mode_id)"
  while read -r id name; do
    mark=" "
    [[ "$id" != "$current" ]] || mark="*"
    say "$mark $id $name"
  done < <(power_modes)
  [[ -n "$current" ]] || note "The mode in force is not known (no /var/lib/nvpmodel/status)."
}

set_mode() {
  local id current
  id="$(resolve "$1")"
  [[ -n "$id" ]] || die "this board has no power mode '$1'; it has $(power_modes | awk '{ printf "%s%s", sep, $2; sep = ", " }')"
  current="$(power_mode_id)"
  if [[ "$id" == "$current" ]]; then
    say "$(power_mode_name "$id") is in force already."
    return
  fi
  have nvpmodel || die "nvpmodel is not here: change the mode outside of the container"
  if ((APPLY)) && [[ -n "$current" ]]; then remember_mode "$current"; fi
  change "power mode $(power_mode_name "$id") in place of $(power_mode_name "$current")" "power_mode.sh revert --apply" \
    "sudo nvpmodel -m $id" switch_to "$id"
  finish
}

revert() {
  local id
  [[ -r "$ROOT$previous" ]] || { say "No power mode was changed by this script." && return; }
  id="$(<"$ROOT$previous")"
  [[ "$id" =~ ^[0-9]+$ ]] || die "$previous is damaged; remove it, and choose a mode with: power_mode.sh set NAME --apply"
  change "power mode $(power_mode_name "$id"), as it was" "power_mode.sh set NAME --apply" \
    "sudo nvpmodel -m $id" switch_to "$id"
  if ((APPLY)); then as_root rm -f "$ROOT$previous"; fi
  finish
}

clocks_max() {
  have jetson_clocks || die "jetson_clocks is not here: run this on the board itself"
  if ((APPLY)); then as_root mkdir -p "$ROOT$STATE_DIR"; fi
  # Storing them twice would keep the pinned ones.
  if [[ ! -e "$ROOT$clocks" ]]; then
    change "keep how the clocks are" "remove $clocks" "" as_root jetson_clocks --store "$ROOT$clocks"
  fi
  change "clocks at their maximum" "power_mode.sh clocks restore --apply" "" as_root jetson_clocks
  finish
}

clocks_restore() {
  [[ -e "$ROOT$clocks" ]] || { say "No clocks were stored by this script." && return; }
  change "clocks as they were" "power_mode.sh clocks max --apply" "" as_root jetson_clocks --restore "$ROOT$clocks"
  if ((APPLY)); then as_root rm -f "$ROOT$clocks"; fi
  finish
}

case "${words[*]:-list}" in # before the board is asked
  list | "clocks max" | "clocks restore" | revert) ;;
  set) die "set wants the name or the ID of a mode" ;;
  "set "*) ((${#words[@]} == 2)) || die "set wants one name or ID, not '${words[*]:1}'" ;;
  *) die "unknown action '${words[*]}'; see --help" ;;
esac
[[ -n "$(power_modes)" ]] || die "no power modes are described in /etc/nvpmodel.conf: this is no Jetson, or a container without that file"
case "${words[*]:-list}" in
  list) list ;;
  "set "*) set_mode "${words[1]}" ;;
  "clocks max") clocks_max ;;
  "clocks restore") clocks_restore ;;
  revert) revert ;;
esac
