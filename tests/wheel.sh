#!/usr/bin/env bash
# The wheel as a user gets it: built, installed into an environment of its own, and used from a folder that is not the repository.
set -euo pipefail
python=${1:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" wheel --quiet --no-deps --wheel-dir "$work" "$root"
test "$(stat -c %s "$work"/attnflow-*.whl)" -lt 15000000
"$work/venv/bin/pip" install --quiet "$(ls "$work"/attnflow-*.whl)[models]"
cd "$work"
"$work/venv/bin/attnflow" --version
"$work/venv/bin/attnflow" explain "the keys to the cabinet" | tee shown
grep -q "^plural 0[.][0-9]*[.] It read mostly keys" shown
"$work/venv/bin/python" - <<'PYTHON'
import time
from pathlib import Path

import torch

import attnflow as af

assert "site-packages" in af.__file__, af.__file__
start = time.perf_counter()
model = af.load("verb-number")
print(f"loaded in {time.perf_counter() - start:.2f} s")
assert [label for label, _ in model.predict(["the key to the cabinets", "they"])] == ["singular", "plural"]
folder = Path(af.__file__).parent
assert (folder / "py.typed").exists() and (folder / "models" / "bundled" / "weights" / "README.md").exists()
assert af.evaluate(model, [("the key to the cabinets", "singular")]).examples
assert af.load("verb-number-plain").predict(["they"])[0][0] == "plural"
PYTHON
echo "the wheel works"
