#!/usr/bin/env bash
# Usage: install.sh [--root DIR] [--apply] [--user NAME] [--venv DIR] [install | remove]
#
# Installs (or removes) a systemd service that keeps a model in memory and answers over the socket
# /run/edgespec/edgespec.sock: a line of JSON in, a line of JSON out (see answer_server.py). Settings of edgespec go into
# /etc/edgespec/service.env as EDGESPEC_* variables, with MIN_FREE_MB for the memory check.
#
# --user NAME  who runs it (default: you); its cache holds the models
# --venv DIR   where setup.sh put edgespec (default ~/edgespec-venv)
#
# It only says what it would do, until --apply is given.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/jetson/lib.sh
source "$here/../lib.sh"

user="${SUDO_USER:-$(id -un)}" venv="$HOME/edgespec-venv" action="install"
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
    --user)
      user="${2:-}"
      shift 2
      ;;
    --venv)
      venv="${2:-}"
      shift 2
      ;;
    install | remove)
      action="$1"
      shift
      ;;
    -h | --help)
      usage "$0"
      exit 0
      ;;
    *) die "unknown argument '$1'; see --help" ;;
  esac
done
[[ "$user" =~ ^[a-z_][a-z0-9_-]*$ ]] || die "'$user' is no user name"
[[ "$venv" =~ ^/[A-Za-z0-9_./-]+$ ]] || die "--venv wants a full path without spaces, not '$venv'"
[[ "$here" =~ ^/[A-Za-z0-9_./-]+$ ]] || die "systemd wants a path without spaces, not '$here': move the checkout"

unit="/etc/systemd/system/edgespec.service"

text() { sed -e "s|@USER@|$user|g" -e "s|@VENV@|$venv|g" -e "s|@HERE@|$here|g" "$here/edgespec.service"; }

write_unit() {
  as_root mkdir -p "$(dirname "$ROOT$unit")"
  text | as_root tee "$ROOT$unit" >/dev/null
  as_root systemctl daemon-reload
}

remove_unit() {
  as_root systemctl disable --now edgespec.service
  as_root rm -f "$ROOT$unit"
  as_root systemctl daemon-reload
}

install_unit() {
  [[ -x "$venv/bin/python" ]] || die "there is no edgespec in $venv: run setup.sh first, or give --venv"
  if [[ "$(read_text "$unit")" == "$(text)" ]]; then
    say "- $unit: nothing to do"
  else
    change "the service edgespec, for user $user" "install.sh remove --apply" "$unit, and systemctl daemon-reload" write_unit
  fi
  change "start it now and at every boot" "sudo systemctl disable --now edgespec.service" "" \
    as_root systemctl enable --now edgespec.service
  finish
}

if [[ "$action" == install ]]; then
  install_unit
elif [[ ! -e "$ROOT$unit" ]]; then
  say "The service is not installed."
else
  change "no service edgespec" "install.sh --apply" "sudo systemctl disable --now edgespec.service; rm $unit" remove_unit
  finish
fi
