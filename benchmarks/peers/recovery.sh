#!/usr/bin/env bash
# Make the environment of Ray Train for benchmarks/recovery.py, because Ray Train can't be installed beside Footplate. It links
# torch and its dependencies from Footplate's environment ($1, .venv by default), so that all run the same torch. torchrun and
# Lightning are already in Footplate's own environment.
set -euo pipefail
cd "$(dirname "$0")/../.."
main=$(realpath "${1:-.venv}")
target=benchmarks/peers/.venvs
site=$("$main/bin/python" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")

mkdir -p "$target/torch"
for name in torch torchgen functorch sympy mpmath networkx jinja2 markupsafe fsspec filelock typing_extensions.py isympy.py; do
  if [ -e "$site/$name" ]; then ln -sfn "$site/$name" "$target/torch/$name"; fi
done

"$main/bin/python" -m venv "$target/ray"
"$target/ray/bin/pip" install --quiet "ray[train]" "numpy>=2"
realpath "$target/torch" > "$("$target/ray/bin/python" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")/zz_torch.pth"
