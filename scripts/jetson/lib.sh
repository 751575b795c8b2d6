# shellcheck shell=bash
# What the scripts of this folder share. Sourced, never run.
#
# Every path of the system is read below $ROOT, which is empty on a real machine; tests give another one with --root or
# EDGESPEC_ROOT. Every command that changes something goes through `change`, which only prints it without --apply.

ROOT="${EDGESPEC_ROOT:-}"
unset EDGESPEC_ROOT # edgespec itself refuses variables of its prefix that it does not know
# Used by the scripts that source this file.
# shellcheck disable=SC2034
STATE_DIR="/var/lib/edgespec"
APPLY=0
# jetson-ai-lab's wheels are built against a newer libstdc++ than Ubuntu 22.04 has.
# shellcheck disable=SC2034
GLIBCXX_NEEDED="GLIBCXX_3.4.32"

say() { printf '%s\n' "$*"; }
note() { printf '%s\n' "$*" >&2; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

usage() { # usage FILE: the comment at the head of the script
  awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$1"
}

wants() { # wants FLAG [VALUE]: refuse a flag whose value was forgotten; shift would end the script without a word
  [[ -n "${2:-}" ]] || die "$1 wants a value"
}

have() { command -v "$1" >/dev/null 2>&1; }

read_text() { # read_text PATH: its text without NUL bytes, or nothing
  if [[ -r "$ROOT$1" ]]; then
    tr -d '\000' <"$ROOT$1" 2>/dev/null || true
  fi
}

set_root() {
  [[ -n "${1:-}" && -d "$1" ]] || die "--root wants a folder, not '${1:-}'"
  ROOT="$(cd "$1" && pwd)"
}

as_root() { # run a command as root; a fake root belongs to whoever made it
  if [[ -n "$ROOT" || "$(id -u)" == 0 ]]; then
    "$@"
  else
    have sudo || die "this needs root, and sudo is not here: run the script as root"
    sudo "$@"
  fi
}

change() { # change WHAT REVERT SHOWN COMMAND...: say it, and do it with --apply. SHOWN "" = the command itself
  local what="$1" revert="$2" shown="$3"
  shift 3
  if [[ -z "$shown" ]]; then
    shown="$*"
    shown="${shown/#as_root/sudo}"
  fi
  say "- $what"
  say "    command: $shown"
  say "    revert:  $revert"
  if ((APPLY)); then
    "$@"
  fi
}

finish() { # the last line of a script that may change something
  if ((!APPLY)); then
    say "Nothing was changed. Run it again with --apply to do the above."
  fi
}

json_text() { # json_text TEXT: as a JSON string
  local text="$1"
  text="${text//\\/\\\\}"
  text="${text//\"/\\\"}"
  text="${text//$'\n'/\\n}"
  text="${text//$'\r'/\\r}"
  text="${text//$'\t'/\\t}"
  printf '"%s"' "$(printf '%s' "$text" | LC_ALL=C tr -d '\000-\037\177-\377')"
}

json_or_null() { # json_or_null TEXT: null for nothing
  if [[ -n "$1" ]]; then json_text "$1"; else printf 'null'; fi
}

json_number() { # json_number TEXT: null for what is no number
  if [[ "$1" =~ ^-?[0-9]+(\.[0-9]+)?$ ]]; then printf '%s' "$1"; else printf 'null'; fi
}

json_list() { # json_list TEXT...: a list of strings
  local first=1 text
  printf '['
  for text in "$@"; do
    ((first)) || printf ', '
    first=0
    json_text "$text"
  done
  printf ']'
}

# --- the board ---

board_model() {
  local model
  model="$(read_text /proc/device-tree/model)"
  # Containers made for Jetson get a copy of it here.
  [[ -n "$model" ]] || model="$(read_text /tmp/nv_jetson_model)"
  printf '%s' "$model"
}

l4t_version() { # such as 36.4.3, or nothing
  read_text /etc/nv_tegra_release | sed -nE 's/.*R([0-9]+).*REVISION: *([0-9.]+).*/\1.\2/p' | head -n 1
}

soc_name() { # tegra234 = Orin, tegra264 = Thor
  read_text /proc/device-tree/compatible | grep -oE 'tegra[0-9]+' | head -n 1 || true
}

is_jetson() { [[ -n "$(l4t_version)" || -n "$(soc_name)" || "$(board_model)" == *Jetson* ]]; }

jetpack_of() { # jetpack_of L4T; the major alone for a release that is not listed, as in edgespec/telemetry/board.py
  case "$1" in
    34.* | 35.*) printf '5' ;;
    36.3 | 36.3.*) printf '6.0' ;;
    36.4 | 36.4.0) printf '6.1' ;;
    36.4.3) printf '6.2' ;;
    36.4.4 | 36.4.7) printf '6.2.1' ;;
    36.5 | 36.5.*) printf '6.2.2' ;;
    36.*) printf '6' ;;
    38.2 | 38.2.*) printf '7.0' ;;
    38.4 | 38.4.*) printf '7.1' ;;
    39.2 | 39.2.*) printf '7.2' ;;
    38.* | 39.*) printf '7' ;;
  esac
}

sm_of() { # sm_of SOC: the compute capability without its dot
  case "$1" in
    tegra210) printf '53' ;;
    tegra186) printf '62' ;;
    tegra194) printf '72' ;;
    tegra234) printf '87' ;;
    tegra264) printf '110' ;;
  esac
}

wheel_index() { # wheel_index L4T: where torch comes from; "pypi", or nothing where there is none
  case "$1" in
    36.*) printf 'https://pypi.jetson-ai-lab.io/jp6/cu126' ;;
    38.* | 39.*) printf 'pypi' ;;
    '') printf 'pypi' ;;
  esac
}

default_target() { # what systemd boots into, or nothing
  local folder
  for folder in /etc/systemd/system /lib/systemd/system /usr/lib/systemd/system; do
    if [[ -L "$ROOT$folder/default.target" ]]; then
      basename "$(readlink "$ROOT$folder/default.target")"
      return
    fi
  done
}

meminfo_mb() { # meminfo_mb KEY
  read_text /proc/meminfo | awk -v key="$1:" '$1 == key { print int($2 / 1024); exit }'
}

largest_blocks() { # how many free blocks of 4 MB there are: what big allocations of the GPU are made of
  read_text /proc/buddyinfo | awk '{ sum += $NF } END { if (NR) print sum }'
}

power_modes() { # a line "ID NAME" a mode; the order of the attributes differs between releases
  read_text /etc/nvpmodel.conf | awk '
    /<[ ]*POWER_MODEL / {
      id = ""; name = ""
      if (match($0, /ID=[0-9]+/)) id = substr($0, RSTART + 3, RLENGTH - 3)
      if (match($0, /NAME=[A-Za-z0-9_]+/)) name = substr($0, RSTART + 5, RLENGTH - 5)
      if (id != "" && name != "") print id, name
    }'
}

power_mode_id() { # of the mode in force, without asking anyone
  read_text /var/lib/nvpmodel/status | sed -nE 's/.*pmode:0*([0-9]+).*/\1/p' | head -n 1
}

power_mode_name() { # power_mode_name ID
  power_modes | awk -v id="$1" '$1 == id { print $2; exit }'
}
