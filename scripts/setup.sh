#!/bin/sh
# Makes $VENV (.venv) ready to run Rooftile from this folder. Called by make; safe to run again.
#
#   PY                     the base Python (python3)
#   VENV                   the virtual environment to create (.venv)
#   EXTRAS                 the extras of pyproject.toml to install (test dev)
#   NEWEST                 1: PyTorch, Triton and Transformers are the newest that the index has, and looked up each time
#   ROOFTILE_TORCH_INDEX   the index from which pip installs PyTorch: on a machine without a GPU, the index of
#                          PyTorch's CPU builds saves some gigabytes
#
# If PY already has torch, it is used in place, but not for NEWEST. Otherwise pip installs torch: for CUDA if nvidia-smi lists a GPU, else
# for the CPU. Installed packages are never looked up again, so a machine that has all of them needs no network.
set -eu

PY="${PY:-python3}"
VENV="${VENV:-.venv}"
CPU_TORCH="torch==2.13.0"
NEWEST="${NEWEST:-}"

say() { printf '>> %s\n' "$*"; }
stop() { printf '>> setup stopped: %s\n' "$*" >&2; exit 1; }

command -v "$PY" >/dev/null 2>&1 ||
    stop "there is no '$PY'; install Python 3.11 or newer, or name one: make PY=/path/to/python3 ..."
"$PY" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    stop "'$PY' is $("$PY" --version 2>&1); Rooftile needs Python 3.11 or newer: make PY=/path/to/python3 ..."
"$PY" -c 'import ensurepip, venv' 2>/dev/null ||
    stop "'$PY' has no venv module; on Debian and Ubuntu: apt install python3-venv"

BIN="$VENV/bin/python"
if ! "$BIN" -m pip --version >/dev/null 2>&1; then
    say "making $VENV with $("$PY" --version)"
    "$PY" -m venv --clear "$VENV" || stop "'$PY' could not make a virtual environment in $VENV"
fi
SITE=$("$BIN" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

pip_install() { "$BIN" -m pip install --quiet --disable-pip-version-check --retries 2 "$@"; }
has_torch() { "$1" -c 'import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)' >/dev/null 2>&1; }
# prints the missing requirements of pyproject.toml (or of the named extras): only these are looked up
missing() {
    "$BIN" - "$@" <<'PYTHON'
import sys, tomllib
from importlib import metadata
from pip._vendor.packaging.requirements import Requirement

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = [line for extra in sys.argv[1:] for line in project["optional-dependencies"][extra]]
here = {d.name.lower().replace("_", "-"): d.version for d in metadata.distributions()}
for need in map(Requirement, extras or project["dependencies"]):
    if need.marker is None or need.marker.evaluate():
        if not need.specifier.contains(here.get(need.name.lower(), "0"), prereleases=True) or need.name.lower() not in here:
            print(f"{need.name}{need.specifier}")
PYTHON
}
add() { # arguments: the missing packages
    [ $# = 0 ] || { say "installing $*"; pip_install -c "$pins" "$@"; }
}
pins=constraints.txt
if [ -n "$NEWEST" ]; then
    # the other packages stay those that the suite is known to pass with
    pins="$VENV/constraints.txt"
    grep -v -e '^transformers==' -e '^triton==' constraints.txt >"$pins"
    say "looking up the newest PyTorch, Triton and Transformers"
    { pip_install --upgrade ${ROOFTILE_TORCH_INDEX:+--index-url "$ROOFTILE_TORCH_INDEX"} torch &&
        # torch.__version__ names the build too (2.15.0+cu132), which the index has no version of
        pip_install --upgrade -c "$pins" "torch==$("$BIN" -c 'from importlib.metadata import version; print(version("torch"))')" \
            triton transformers; } ||
        say "carrying on with the versions that are here (is there a network?)"
fi

# --system-site-packages would not do: if PY is itself a virtual environment, it exposes the parent of that
if [ -z "$NEWEST" ] && ! has_torch "$BIN" && has_torch "$PY"; then
    say "using the torch of $(command -v "$PY")"
    "$PY" - >"$SITE/_rooftile_parent.pth" <<'PYTHON'
import sys
for path in sys.path:
    if path.endswith(("site-packages", "dist-packages")):
        # addsitedir also processes the .pth files there, which editable installs need
        print(f"import site; site.addsitedir({path!r})")
PYTHON
fi

if ! has_torch "$BIN"; then
    if nvidia-smi -L >/dev/null 2>&1; then
        what="torch>=2.11"
        say "installing PyTorch for the GPU that nvidia-smi lists"
    else
        what="$CPU_TORCH"
        say "installing PyTorch for the CPU (nvidia-smi lists no GPU)"
    fi
    pip_install ${ROOFTILE_TORCH_INDEX:+--index-url "$ROOFTILE_TORCH_INDEX"} "$what" ||
        stop "pip could not install $what; is there a network? A Python that has torch needs none: make PY=/path/to/python3 ..."
fi

add $(missing) || stop "pip could not install $(missing | tr '\n' ' '); is there a network?"
EXTRAS="${EXTRAS:-test dev}"
add $(missing $EXTRAS) ||
    say "carrying on without $(missing $EXTRAS | tr '\n' ' ')(is there a network?): what needs them fails and names them"

# a second Triton, the newest known to compile the Hopper kernels; only a test uses it
other="$VENV/triton-3.9"
if [ -z "$NEWEST" ] && [ "$(uname -sm)" = "Linux x86_64" ] && [ ! -d "$other" ]; then
    say "installing Triton 3.9 beside the other, for a test"
    pip_install --no-deps --target "$other.part" triton==3.9.0 && mv "$other.part" "$other" ||
        say "carrying on without Triton 3.9 (is there a network?): the test that needs it is skipped"
fi

# put this folder on the path and install the command: like an editable install, but without a build tool
pwd >"$SITE/_rooftile.pth"
# write the entry points, by which `rooftile` finds the commands of the lab
"$BIN" - "$SITE" <<'PYTHON'
import sys, tomllib
from pathlib import Path

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
folder = Path(sys.argv[1]) / f"rooftile-{project['version']}.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rooftile\nVersion: {project['version']}\n")
lines = [f"[{group}]\n{name} = {value}\n" for group, named in project["entry-points"].items() for name, value in named.items()]
(folder / "entry_points.txt").write_text("".join(lines))
PYTHON
printf '#!/bin/sh\nexec "%s" -m rooftile "$@"\n' "$(cd "$VENV/bin" && pwd)/python" >"$VENV/bin/rooftile"
chmod +x "$VENV/bin/rooftile"
say "ready: $("$BIN" -c 'import platform, torch; print("Python", platform.python_version(), "torch", torch.__version__)')${NEWEST:+$("$BIN" -c '
from importlib.metadata import version
print("", "triton", version("triton"), "transformers", version("transformers"))')}"
