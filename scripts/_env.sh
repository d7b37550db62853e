# Sourced by the scripts next to it: makes .venv, or reuses it, and installs what the caller asks for.
#
#   ensure GROUP     the packages of this workspace in editable form, and a dependency group of pyproject.toml,
#                    at the versions of constraints.txt; for the tests DeepSpeed too. Costs milliseconds when nothing has changed
#                    since the last time. accel-megatron, which requires Megatron-core, is installed with the group megatron only:
#                    its tests that need no Megatron-core import it from its sources.
#
# Needs bash, Python >= 3.10 and pip. ACCEL_PYTHON names the Python to make .venv with; ACCEL_VENV another place for it, and
# ACCEL_CONSTRAINTS another file of versions.

set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${ACCEL_VENV:-$ROOT/.venv}"
CONSTRAINTS="${ACCEL_CONSTRAINTS:-constraints.txt}"
STAMPS="$VENV/.stamps"
cd "$ROOT"

# A package index that does not answer for a minute is no reason to give up; the tests install packages too.
export PIP_RETRIES="${PIP_RETRIES:-10}" PIP_DEFAULT_TIMEOUT="${PIP_DEFAULT_TIMEOUT:-60}"
# Each environment keeps the operators that it compiles: those of another are compiled again, because their paths differ.
export TORCH_EXTENSIONS_DIR="$VENV/torch_extensions"

# Images for containers often set it. The tests start thousands of processes, which would compile all sources again, each of them.
unset PYTHONDONTWRITEBYTECODE

say() { printf '==> %s\n' "$*"; }

die() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${ACCEL_PYTHON:+"$ACCEL_PYTHON"} python3 python python3.14 python3.13 python3.12 python3.11 python3.10; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python >= 3.10 found. Install one, or name it: ACCEL_PYTHON=/path/to/python $0"
}

pip_install() {
    # -qq: errors only. The index and its options are pip's own configuration.
    "$VENV/bin/python" -m pip install -qq --disable-pip-version-check --constraint "$CONSTRAINTS" "$@"
}

pinned() { grep -hE "^$1==" "$CONSTRAINTS" constraints.txt | head -1; }

make_venv() {
    [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1 && return
    local python
    python="$(find_python)"
    say "making $VENV with $("$python" --version 2>&1)"
    # Debian's Python comes without ensurepip; its pip can still install another pip into a bare environment.
    "$python" -m venv "$VENV" >/dev/null 2>&1 || {
        rm -rf "$VENV"
        "$python" -m venv --without-pip "$VENV"
        "$python" -m pip -q --python "$VENV/bin/python" install "$(pinned pip)"
    }
}

# What an installed set depends on, as one number.
fingerprint() { cat "$CONSTRAINTS" "$VENV/pyvenv.cfg" "$@" | cksum; }

is_current() { [ "$(cat "$STAMPS/$1" 2>/dev/null)" = "$(fingerprint "${@:2}")" ]; }

mark_current() {
    mkdir -p "$STAMPS"
    fingerprint "${@:2}" >"$STAMPS/$1"
}

# Without a package whose requirements are not installed: pip would report a conflict with each later installation.
install_packages() {
    local group="${1:-}"
    is_current packages packages/*/pyproject.toml && return
    # By name and first: pip then takes a CPU build that it has been told of, where a range would get the newest build of the index.
    say "installing $(pinned torch)"
    pip_install "$(pinned pip)"
    pip_install "$(pinned torch)" "$(pinned hatchling)"
    local project projects=()
    [ "$group" = megatron ] || "$VENV/bin/python" -m pip uninstall -qq -y accel-megatron # of an older set-up
    for project in packages/*/pyproject.toml; do
        [ "$group" = megatron ] || [ "$project" != packages/accel-megatron/pyproject.toml ] || continue
        projects+=(--editable "$(dirname "$project")")
    done
    say "installing the packages: ${projects[*]}"
    pip_install --no-build-isolation "${projects[@]}"
    mark_current packages packages/*/pyproject.toml
}

install_group() {
    is_current "group-$1" pyproject.toml && return
    say "installing the dependency group '$1'"
    pip_install --group "pyproject.toml:$1"
    mark_current "group-$1" pyproject.toml
}

# DeepSpeed is built from its sources, with the torch that is there and for what it is to run on.
install_deepspeed() {
    is_current deepspeed && return
    say "installing $(pinned deepspeed)"
    if pip_install "$(pinned setuptools)" "$(pinned ninja)" && DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}" pip_install --no-build-isolation "$(pinned deepspeed)"; then
        mark_current deepspeed
    else
        say "$(pinned deepspeed) could not be built here: the tests that train with it are skipped"
    fi
}

# DeepSpeed's operators are compiled where they are first used. That of the tests takes two cores a minute and a C++ compiler: not in a test.
compile_deepspeed() {
    if ! is_current deepspeed || is_current deepspeed-adam; then return 0; fi
    say "compiling DeepSpeed's optimizer for host memory"
    # Left by a compilation that was killed: torch waits for it forever. The caller holds the environment's lock.
    rm -f "$TORCH_EXTENSIONS_DIR/cpu_adam/lock"
    if PATH="$VENV/bin:$PATH" "$VENV/bin/python" -c 'from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()' \
        >"$VENV/deepspeed-adam.log" 2>&1; then
        mark_current deepspeed-adam
    else
        say "it cannot be compiled here: see $VENV/deepspeed-adam.log"
    fi
}

# torchft requires a newer torch than the oldest that is tested, and has no wheels for some systems.
install_torchft() {
    is_current torchft && return
    say "installing $(pinned torchft)"
    if pip_install "$(pinned torchft)"; then
        mark_current torchft
    else
        say "$(pinned torchft) cannot be installed here: the tests of replicas are skipped"
    fi
}

# The simulated GPU of tests/device is C++, compiled once for each torch and each version of its sources: a minute of one core.
build_simulated_gpu() {
    "$VENV/bin/python" tests/device/build_simgpu.py >/dev/null || say "the tests of the simulated GPU are skipped"
}

ensure() {
    # Two scripts at once must not install into one environment; the lock goes with the shell that holds it.
    exec 9>"$VENV.lock"
    if command -v flock >/dev/null; then flock 9; fi
    make_venv
    install_packages "$1"
    install_group "$1"
    if [ "$1" = test ]; then install_deepspeed; compile_deepspeed; install_torchft; build_simulated_gpu; fi
    exec 9>&-
    export PATH="$VENV/bin:$PATH"
}
