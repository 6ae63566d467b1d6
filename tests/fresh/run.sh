#!/bin/bash
# Builds the wheel and installs it into environments made for it: one with PyTorch and without JAX, one with JAX and
# without PyTorch. Each serves a request, and the two answers are one. Needs a package index; takes some minutes.
#
# The test suite has the same with an import hook instead (tests/system/test_frameworks.py): that finds what imports a
# framework which it should not; this finds what a wheel or its extras lack.
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=$PWD/.venv/bin
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$bin/maturin" build --quiet --release --out "$work/wheels"
wheel=$(echo "$work"/wheels/*.whl)
"$bin/python" -c "import pathlib; from tests.crossing import write_model; write_model(pathlib.Path('$work/tiny'))"
# Only this of the repository is seen there: pyengine itself comes from the wheel.
mkdir -p "$work/lib/bench"
cp bench/server.py "$work/lib/bench/"
cp tests/fresh/ask.py constraints.txt "$work/lib/"
cd "$work/lib"
for framework in torch jax; do
  "$bin/uv" venv --quiet --python "$bin/python" "$work/$framework"
  "$bin/uv" pip install --quiet --python "$work/$framework/bin/python" --constraint constraints.txt \
    "$wheel[$framework]"
  PYTHONPATH=$work/lib "$work/$framework/bin/python" -P ask.py "$framework" "$work/tiny" "$work/state" "$work/$framework.ids"
done
cmp "$work/torch.ids" "$work/jax.ids"
echo "both environments answered alike: $(cat "$work/torch.ids")"
