#!/usr/bin/env bash
# Usage: setup.sh [--root DIR] [--apply] [--venv DIR] [--source DIR] [--index URL]
#
# Installs edgespec for this board into a virtual environment, with the torch and ONNX Runtime that were built for its
# release of L4T, and proves it with an operation on the GPU. What is there already is left as it is.
#
# --venv DIR    where (default ~/edgespec-venv)
# --source DIR  the edgespec checkout (default: the one this script is in)
# --index URL   where torch comes from, if not the index for this L4T; "pypi" for PyPI
#
# It only says what it would do, until --apply is given.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/jetson/lib.sh
source "$here/lib.sh"

venv="$HOME/edgespec-venv"
source_dir="$(cd "$here/../.." && pwd)"
index=""
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
    --venv)
      wants "$@"
      venv="$2"
      shift 2
      ;;
    --source)
      wants "$@"
      source_dir="$2"
      shift 2
      ;;
    --index)
      wants "$@"
      index="$2"
      shift 2
      ;;
    -h | --help)
      usage "$0"
      exit 0
      ;;
    *) die "unknown argument '$1'; see --help" ;;
  esac
done
[[ -f "$source_dir/pyproject.toml" ]] || die "$source_dir is no edgespec checkout (no pyproject.toml): give --source"

l4t="$(l4t_version)"

choose_index() {
  [[ -z "$index" ]] || return 0
  if is_jetson && [[ -z "$l4t" ]]; then
    die "the L4T release is not known, so no index can be chosen: mount /etc/nv_tegra_release into the container, or give --index"
  fi
  index="$(wheel_index "$l4t")"
  [[ -n "$index" ]] || die "there are no wheels for L4T $l4t (JetPack $(jetpack_of "$l4t")): update to JetPack 6 or later, or give --index"
}

check_python() {
  python3 -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
    || die "edgespec needs Python 3.10 to 3.13, and python3 is $(python3 --version 2>/dev/null || echo not here)"
}

apt_packages() { # a compiler and Python's headers are for Triton, which builds a small launcher when it first runs
  local missing=() name
  have dpkg-query || return 0
  for name in python3-venv python3-dev gcc libopenblas0; do
    dpkg-query -W -f '${Status}' "$name" 2>/dev/null | grep -q 'install ok installed' || missing+=("$name")
  done
  if ((!${#missing[@]})); then
    say "- system packages: nothing to do"
    return
  fi
  change "system packages ${missing[*]}" "apt-get remove ${missing[*]}" "" as_root apt-get install -y "${missing[@]}"
}

newer_libstdcxx() {
  as_root add-apt-repository -y ppa:ubuntu-toolchain-r/test
  as_root apt-get update
  as_root apt-get install -y libstdc++6
}

check_libstdcxx() { # the wheels of jetson-ai-lab want a newer one than Ubuntu 22.04 has
  local library="$ROOT/usr/lib/aarch64-linux-gnu/libstdc++.so.6"
  [[ "$l4t" == 36.* && -e "$library" ]] || return 0
  if grep -aq "$GLIBCXX_NEEDED" "$library"; then
    say "- libstdc++: nothing to do (it has $GLIBCXX_NEEDED)"
    return
  fi
  change "a libstdc++ with $GLIBCXX_NEEDED, from ppa:ubuntu-toolchain-r/test" "ppa-purge ppa:ubuntu-toolchain-r/test" \
    "sudo add-apt-repository -y ppa:ubuntu-toolchain-r/test; apt-get update; apt-get install -y libstdc++6" newer_libstdcxx
}

make_venv() {
  if [[ -x "$venv/bin/python" ]]; then
    say "- virtual environment: nothing to do ($venv is there)"
    return
  fi
  change "a virtual environment in $venv" "rm -r $venv" "" python3 -m venv "$venv"
}

keep_versions() { # torch of PyPI over that of the board does not run; numpy 2 under wheels that want 1 breaks them
  "$venv/bin/pip" freeze | grep -iE '^(torch|triton|numpy|onnxruntime-gpu)( @|==)' >"$venv/constraints.txt" || true
}

packages() {
  local revert="remove $venv"
  if ! is_jetson; then
    change "edgespec with the CPU engine (this is no Jetson)" "$revert" "" "$venv/bin/pip" install "${source_dir}[cpu]"
    return
  fi
  if [[ "$index" == pypi ]]; then
    change "torch and ONNX Runtime from PyPI, built for CUDA 13" "$revert" "" "$venv/bin/pip" install torch onnxruntime-gpu
  else
    change "torch, Triton and ONNX Runtime for L4T $l4t" "$revert" "" \
      "$venv/bin/pip" install --index-url "$index" torch triton onnxruntime-gpu
  fi
  change "the versions of what is built for this board, which nothing may replace, in $venv/constraints.txt" \
    "rm $venv/constraints.txt" "$venv/bin/pip freeze, of torch, triton, numpy and onnxruntime-gpu" keep_versions
  # Without extras: [cpu] would put another onnxruntime over the one with CUDA.
  change "edgespec from $source_dir" "$venv/bin/pip uninstall edgespec" "" \
    "$venv/bin/pip" install --constraint "$venv/constraints.txt" "$source_dir"
}

write_environment() {
  printf 'CUDA_MODULE_LOADING=LAZY\nTRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas\n' >"$venv/edgespec.env"
}

environment() { # Triton's own ptxas may be of another CUDA than the board's
  is_jetson || return 0
  change "$venv/edgespec.env: variables for the service and for your shell" "rm $venv/edgespec.env" \
    "CUDA_MODULE_LOADING=LAZY and TRITON_PTXAS_PATH, into that file" write_environment
}

verify() {
  if ((!APPLY)); then
    if is_jetson; then say "- then: an operation on the GPU, and edgespec doctor"; else say "- then: edgespec doctor"; fi
    return
  fi
  if is_jetson; then "$venv/bin/python" "$here/verify_gpu.py" || die "the installation does not work on the GPU; the lines above say why"; fi
  "$venv/bin/edgespec" doctor || die "edgespec doctor found something; its lines say what mends it"
  say "Ready: $venv/bin/edgespec chat"
}

choose_index
check_python
say "Board: $(board_model) L4T ${l4t:-none}, wheels from $index"
apt_packages
check_libstdcxx
make_venv
packages
environment
verify
finish
