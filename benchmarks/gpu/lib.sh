# Sourced by first.sh and second.sh, from the root of a checkout: one environment, then the stages of stages.py.
#
# On the GPU machine it creates .venv like `make install`: the packages in .whl, then the machine's packages, and this
# checkout, so that all commands are the user's. --check: PYTHON's environment, no GPU.
set -uo pipefail
[ -f recipes/sft.py ] || { echo "run this from the checkout's root" >&2; exit 2; }
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export BEGAN=$(date +%s.%N) OUT=${OUT:-$PWD/.runs/out} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export ZEROFIT_CACHE=$PWD/.runs/cache PYTHONWARNINGS=ignore::SyntaxWarning
unset PYTHONDONTWRITEBYTECODE
mkdir -p "$OUT" .runs
case " $* " in
*" --check "*) BUDGET=$((BUDGET * 5)) PY=${PYTHON:-.venv/bin/python}; export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" DS_IGNORE_CUDA_DETECTION=1 CUDA_VISIBLE_DEVICES= ;;
*)
  PY=$PWD/.venv/bin/python
  export HF_HOME=$PWD/.runs/hf TRITON_CACHE_DIR=$PWD/.runs/triton TORCHINDUCTOR_CACHE_DIR=$PWD/.runs/inductor TORCH_EXTENSIONS_DIR=$PWD/.runs/extensions
  if [ ! -e .venv/.on-gpu-machine ]; then
    compgen -G '.whl/*.whl' >/dev/null || { echo "no .whl: run prepare.sh where pip works, and name .whl in carry" >&2; exit 2; }
    rm -rf .venv && python3 -m venv --without-pip .venv || exit 2
    site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    python3 -c 'import site; print(*site.getsitepackages(), sep="\n")' > "$site/zz-machine.pth" # after the packages of .whl
    echo "$PWD/src" > "$site/zerofit.pth"
    ls .whl/*.whl | xargs -P 8 -I{} python3 -m zipfile -e {} "$site" || { echo "the wheels cannot be unpacked" >&2; exit 2; }
    .venv/bin/python -W ignore -m compileall -q -j 0 "$site" src >/dev/null # so that the first processes do not compile transformers
    for pair in accelerate:accelerate.commands.accelerate_cli torchrun:torch.distributed.run zerofit:zerofit; do
      printf '#!/bin/sh\nexec "%s" -m %s "$@"\n' "$PY" "${pair#*:}" > ".venv/bin/${pair%%:*}"
      chmod +x ".venv/bin/${pair%%:*}"
    done
    # the benchmarks read the commit from git, which may be missing
    command -v git >/dev/null || { printf '#!/bin/sh\nexit 1\n' > .venv/bin/git; chmod +x .venv/bin/git; }
    touch .venv/.on-gpu-machine
  fi
  touch .venv/.zerofit-installed .venv/.zerofit-dev-installed # newer than the copied files, so that make installs nothing
  ;;
esac
export PATH="$(dirname "$(realpath -s "$PY")"):$PATH" # before the machine's `python` and `accelerate`
# A safety net: stages.py ends itself at BUDGET.
stages() { timeout -k 5 "$((BUDGET + 15))" "$PY" "$HERE/stages.py" "$@"; }
