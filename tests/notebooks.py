"""Notebooks of `examples/notebooks`, run from top to bottom and written back with their outputs.

    make notebooks                           all of them
    make notebooks NAMES=1_first_training    some of them

A notebook runs in an empty folder, with jobs of its own (`FOOTPLATE_HOME`), on one thread. Then its outputs are cleaned:
paths of this machine are left out, the lines of a stream are joined, and cells have no times and no random ids.

A test runs each notebook too. It compares the standard output of each cell with what is committed, unless the cell has the
tag `varies`, which means that its output has times or process ids.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
VARIES = "varies"
TIMEOUT_S = 300
# Declares the operators that torchvision misses on CPU torch, as `tests/conftest.py` does. timm imports torchvision.
_STARTUP = f"""
import sys
sys.path.append({str(ROOT / "tests")!r})
import models
sys.path.pop()
del sys, models
"""
# Escape sequences of terminals, and addresses in memory.
_NOISE = re.compile(r"\x1b\[[\d;?]*[A-Za-z]| at 0x[0-9a-f]+")


def execute(path: Path, directory: Path) -> Any:
    """Run a notebook in a directory, and return it with its new outputs.

    Raises:
        CellExecutionError: a cell fails.
    """
    book = nbformat.read(path, as_version=4)
    startup = directory / ".ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "operators.py").write_text(_STARTUP)
    environ = {
        **os.environ,
        "FOOTPLATE_HOME": str(directory / ".footplate"),
        "IPYTHONDIR": str(directory / ".ipython"),
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore:IProgress not found",  # tqdm, without ipywidgets
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    resources = {"metadata": {"path": str(directory)}}
    client = NotebookClient(book, timeout=TIMEOUT_S, kernel_name="python3", resources=resources)
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as place:  # short: sockets are in it
        client.execute(env={**environ, "RAY_TMPDIR": place})
    for number, cell in enumerate(book.cells):
        cell.id = f"cell-{number}"
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            # The magic doesn't see what Java writes.
            outputs = [] if cell.source.startswith("%%capture") else cell.outputs
            cell.outputs = list(_cleaned(outputs, directory))
    book.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return book


def printed(cell: Any) -> str:
    """Return the standard output of a cell."""
    return "".join(output.text for output in cell.get("outputs", []) if output.get("name") == "stdout")


def texts(cell: Any) -> Iterator[str]:
    """Yield the outputs of a cell that are text."""
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            yield output.text
        for kind, value in output.get("data", {}).items():
            if kind.startswith("text/"):
                yield value


def _cleaned(outputs: list[Any], directory: Path) -> Iterator[Any]:
    last: Any = None
    for output in outputs:
        output.get("metadata", {}).clear()
        if output.output_type == "execute_result" and "text/html" in output.data:
            # Front ends show the table. The other form of a job has folders of this machine.
            output.data.pop("text/plain")
        if output.output_type == "stream":
            output.text = _without_noise(output.text, directory)
            if last is not None and last.get("name") == output.name:
                last.text += output.text
                continue
        for kind, value in output.get("data", {}).items():
            if kind.startswith("text/"):
                output.data[kind] = _without_noise(value, directory)
        last = output
        yield output


def _without_noise(text: str, directory: Path) -> str:
    text = _NOISE.sub("", text)
    for path in (directory.resolve(), directory):
        text = text.replace(f"{path}/", "")
    return text.replace(f"{ROOT}/", "")


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the notebooks, and write their outputs into them.")
    parser.add_argument("names", nargs="*", help="names of notebooks, such as 1_first_training; all by default")
    names = parser.parse_args().names
    for path in NOTEBOOKS:
        if not names or path.stem in names:
            with tempfile.TemporaryDirectory() as directory:
                nbformat.write(execute(path, Path(directory)), path)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
