"""What makes a function return other results for the same arguments: chance, time, files, the network, the environment.

The names are those that usual code has. So a function that passes isn't proven to repeat its results.
"""

from __future__ import annotations

_BUILTINS = {
    "open": "reads files",
    "input": "reads the terminal",
    "eval": "runs code from a text",
    "exec": "runs code from a text",
    "globals": "reads globals by names that aren't in its code",
    "__import__": "imports modules by names that aren't in its code",
    "hash": "hashes texts, which differs from process to process",
    "id": "reads addresses of objects, which differ from process to process",
}
_MODULES = {
    "random": "draws random numbers",
    "_random": "draws random numbers",
    "secrets": "draws random numbers",
    "uuid": "draws random numbers",
    "numpy.random": "draws random numbers",
    "time": "reads the time",
    "socket": "uses the network",
    "http.client": "uses the network",
    "urllib.request": "uses the network",
    "requests": "uses the network",
    "httpx": "uses the network",
    "subprocess": "runs programs",
    "tempfile": "uses files",
}
_ATTRIBUTES = {
    "random": "draws random numbers",
    "rand": "draws random numbers",
    "randn": "draws random numbers",
    "randint": "draws random numbers",
    "randperm": "draws random numbers",
    "urandom": "draws random numbers",
    "now": "reads the time",
    "today": "reads the time",
    "utcnow": "reads the time",
    "environ": "reads environment variables",
    "getenv": "reads environment variables",
    "from_pretrained": "loads from files",
    "from_file": "loads from files",
    "load": "loads from files",
    "load_dataset": "loads from files",
    "load_from_disk": "loads from files",
    "open": "reads files",
    "imread": "reads files",
    "listdir": "reads files",
    "read_text": "reads files",
    "read_bytes": "reads files",
    "read_csv": "reads files",
    "read_json": "reads files",
    "read_parquet": "reads files",
    "read_pickle": "reads files",
    "read_table": "reads files",
    "fromfile": "reads files",
    "genfromtxt": "reads files",
    "loadtxt": "reads files",
    "urlopen": "uses the network",
    "import_module": "imports modules by names that aren't in its code",
}
_OF_BUILTINS = {"builtins", "io", "_io"}
_GENERATORS = {"torch._C.Generator", "torch.Generator"}


def builtin_effect(name: str) -> str | None:
    """Return what a function does that calls this builtin, such as "reads files"; None if it is harmless."""
    return _BUILTINS.get(name)


def attribute_effect(name: str) -> str | None:
    """Return what a function does that uses an attribute of this name; None if it is harmless."""
    return _ATTRIBUTES.get(name)


def library_effect(module: str, qualname: str) -> str | None:
    """Return what a function does that uses this function or class, or this module; None if it is harmless."""
    if f"{module}.{qualname}" in _GENERATORS:
        return "draws random numbers"
    parts = module.split(".")
    prefixes = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    effect = next((_MODULES[prefix] for prefix in prefixes if prefix in _MODULES), None)
    # The user's name for it may be another one: `from os import getenv as env`.
    name = qualname.rpartition(".")[2]
    return effect or (_BUILTINS.get(name) if module in _OF_BUILTINS else _ATTRIBUTES.get(name))
