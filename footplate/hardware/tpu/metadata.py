"""The metadata server of a Compute Engine machine, as far as it speaks of a TPU.

    GET http://metadata.google.internal/computeMetadata/v1/instance/attributes/accelerator-type
    Metadata-Flavor: Google                                                                  → v5litepod-16

It is asked where a TPU is attached and the environment doesn't say all, never anywhere else: a name that can't be resolved
costs seconds. `GCE_METADATA_HOST` names another host and port, as for Google's own tools; `TPU_SKIP_MDS_QUERY` forbids to
ask, as for libtpu. Whoever has another source of the same words gives a function like `attribute`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

TIMEOUT_S = 2.0
Attribute = Callable[[str], str | None]


def no_server(name: str) -> None:
    """An attribute of a machine that has no metadata server: None."""


def server(environ: Mapping[str, str]) -> Attribute:
    """A function from an attribute's name to its value, or to None where there is none or nobody answers.

    A server that can't be reached isn't asked again.

    Args:
        environ: the environment, for `GCE_METADATA_HOST` and `TPU_SKIP_MDS_QUERY`.
    """
    if environ.get("TPU_SKIP_MDS_QUERY"):
        return no_server
    host = environ.get("GCE_METADATA_HOST") or "metadata.google.internal"
    silent = False

    def attribute(name: str) -> str | None:
        nonlocal silent
        if silent:
            return None
        try:
            return _ask(host, name)
        except OSError:
            silent = True
            return None

    return attribute


def tpu_env(text: str) -> dict[str, str]:
    """The attribute `tpu-env`, a line for each value: `RUNTIME_VERSION: 'v2-alpha-tpuv6e'`."""
    return dict(re.findall(r"^(\w+):\s*'?(.*?)'?\s*$", text, re.MULTILINE))


def _ask(host: str, name: str) -> str | None:
    """Raises: OSError: nobody answers, or not in time."""
    import urllib.request
    from http.client import HTTPException
    from urllib.error import HTTPError

    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/instance/attributes/{name}", headers={"Metadata-Flavor": "Google"}
    )
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=TIMEOUT_S) as answer:
            return answer.read().decode(errors="replace").strip() or None
    except HTTPError:
        return None  # there is no such attribute
    except HTTPException as error:
        raise OSError(str(error)) from error
