"""The metadata server of a Compute Engine machine: its attributes about a TPU.

    GET http://metadata.google.internal/computeMetadata/v1/instance/attributes/accelerator-type
    Metadata-Flavor: Google                                                                  → v5litepod-16

Footplate asks the server only if a TPU is attached and the environment lacks values, because a name that can't be resolved
costs seconds. `GCE_METADATA_HOST` sets another host and port, as for Google's own tools. `TPU_SKIP_MDS_QUERY` disables the
queries, as for libtpu. Another source of the same attributes is a function of type `Attribute`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

TIMEOUT_S = 2.0
Attribute = Callable[[str], str | None]


def no_server(name: str) -> None:
    """Return None for every attribute: a machine without a metadata server."""


def server(environ: Mapping[str, str]) -> Attribute:
    """Make a function from an attribute's name to its value, or to None if there is no such attribute or no answer.

    A server that can't be reached isn't asked again.

    Args:
        environ: the environment variables, for `GCE_METADATA_HOST` and `TPU_SKIP_MDS_QUERY`.
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
    """Parse the attribute `tpu-env`, which has a line for each value: `RUNTIME_VERSION: 'v2-alpha-tpuv6e'`."""
    return dict(re.findall(r"^(\w+):\s*'?(.*?)'?\s*$", text, re.MULTILINE))


def _ask(host: str, name: str) -> str | None:
    """Raises: OSError: the server doesn't answer, or not in time."""
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
        # There is no such attribute.
        return None
    except HTTPException as error:
        raise OSError(str(error)) from error
