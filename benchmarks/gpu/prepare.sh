#!/usr/bin/env bash
# Download the packages that the GPU machine lacks as wheels into .whl (27 MiB), and print the size of the transfer.
# Run it in the root of a checkout; a second call only downloads missing wheels.
#
#   PYTHON=.venv/bin/python bash benchmarks/gpu/prepare.sh         # WITHOUT="transformers peft" uses the machine's packages
#
# PYTHON needs torch, setuptools and wheel (from make install) to build deepspeed's sdist without compiling. The
# versions come from constraints.txt.
set -euo pipefail
[ -f recipes/sft.py ] || { echo "prepare.sh: run it from the checkout's root" >&2; exit 2; }
PYTHON=${PYTHON:-.venv/bin/python}
mkdir -p .whl

have() { compgen -G ".whl/${1//-/_}-*.whl" >/dev/null; }
for name in transformers datasets peft dill multiprocess hjson pydantic pydantic_core annotated-types typing-inspection \
  typing_extensions liger-kernel bitsandbytes torchao deepspeed; do
  case " ${WITHOUT:-} " in *" $name "*) rm -f .whl/"${name//-/_}"-*.whl; continue ;; esac
  have "$name" && continue
  pin=$(grep -i "^$name==" constraints.txt)
  if [ "$name" = deepspeed ]; then
    DS_BUILD_OPS=0 DS_ACCELERATOR=cpu DS_IGNORE_CUDA_DETECTION=1 "$PYTHON" -m pip wheel --quiet --disable-pip-version-check \
      --no-deps --no-build-isolation -w .whl "$pin"
  else
    "$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
      --implementation cp $(printf -- '--platform manylinux_2_%s_x86_64 ' 28 27 24 17) --platform manylinux2014_x86_64 \
      --platform manylinux1_x86_64 -d .whl "$pin"
  fi
done

"$PYTHON" - <<'PY'
# bitsandbytes contains kernels for nine CUDA releases and other vendors: 43 MB, of which CUDA 13.0 needs 4.
import zipfile
from pathlib import Path

for wheel in Path(".whl").glob("bitsandbytes-*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        kept = [n for n in archive.namelist() if not n.endswith(".so") or n.endswith(("_cuda130.so", "_cpu.so"))]
        if len(kept) < len(archive.namelist()):
            with zipfile.ZipFile(wheel.with_suffix(".tmp"), "w", zipfile.ZIP_DEFLATED) as out:
                for name in kept:
                    out.writestr(name, archive.read(name))
            wheel.with_suffix(".tmp").replace(wheel)
PY
ls -l .whl | awk 'NR > 1 {printf "%10d  %s\n", $5, $9}'
tree=$(git ls-files -z --cached --others --exclude-standard | xargs -0 du -ck 2>/dev/null | awk '$2 == "total" {s += $1} END {print int(s / 1024)}')
echo "wheels $(du -sm .whl | cut -f1) MiB + checkout $tree MiB"
