#!/usr/bin/env bash
# Make the environments of the peers in the data benchmarks. They link torch and its dependencies from Footplate's environment
# ($1, .venv by default), so that all run the same torch. All other packages are their own.
set -euo pipefail
cd "$(dirname "$0")/../.."
main=$(realpath "${1:-.venv}")
target=benchmarks/peers/.venvs
site=$("$main/bin/python" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")

mkdir -p "$target/torch"
for name in torch torchgen functorch sympy mpmath networkx jinja2 markupsafe fsspec filelock typing_extensions.py isympy.py; do
  if [ -e "$site/$name" ]; then ln -sfn "$site/$name" "$target/torch/$name"; fi
done
# transformers reads torch's version from there.
ln -sfn "$site"/torch-*.dist-info "$target/torch/"

make_env() { # name, packages…
  local name=$1; shift
  "$main/bin/python" -m venv "$target/$name"
  "$target/$name/bin/pip" install --quiet "$@"
  realpath "$target/torch" > "$("$target/$name/bin/python" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")/zz_torch.pth"
}

# --no-deps for packages that would install a torch of their own.
make_env data "numpy>=2" psutil pyarrow "opencv-python-headless>=4.10" datasets webdataset lightning-utilities boto3 \
  filelock obstore scikit-image scikit-learn tifffile brotli lz4 zstd xxhash python-snappy pydantic cachetools catalogue transformers requests pillow
"$target/data/bin/pip" install --quiet --no-deps litdata mosaicml-streaming
# scikit-image and scikit-learn provide the photographs.
# mosaicml-streaming imports torchvision for data sets that aren't used here, and torchvision needs a torch of its own.
stub=$("$target/data/bin/python" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")/torchvision
mkdir -p "$stub/transforms"
echo "class VisionDataset: pass" > "$stub/datasets.py"
touch "$stub/__init__.py" "$stub/transforms/__init__.py"
echo "def to_tensor(image): raise NotImplementedError" > "$stub/transforms/functional.py"
# transformers would take the stub for torchvision, so TRL has an environment of its own.
make_env trl "numpy>=2" psutil pyarrow datasets transformers
"$target/trl/bin/pip" install --quiet --no-deps trl accelerate
make_env petastorm "numpy==1.26.4" psutil "pyarrow==14.0.2" "pandas==2.1.4" "opencv-python-headless==4.10.0.84" \
  "setuptools<70" pillow dill diskcache packaging pyzmq fsspec "pyspark==3.5.1" six future
"$target/petastorm/bin/pip" install --quiet --no-deps petastorm==0.13.1
make_env lake "numpy>=2" psutil pyarrow "opencv-python-headless>=4.10" pylance daft deltalake "ray[data]" aiohttp  # Ray's fsspec needs it
