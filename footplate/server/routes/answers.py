"""The answers that aren't successes, as the description of the API has them."""

from __future__ import annotations

from typing import Any

from footplate.server.models import ErrorView

_ABOUT = {
    400: "not what the API takes",
    401: "no token, or another",
    403: "from another site's page, or without the header X-Footplate",
    404: "there is no such thing",
    409: "not in the state for this",
    413: "too large",
    422: "something is wrong with what was given",
    503: "the store can't be used now",
}


def answers(*more: int) -> dict[int | str, dict[str, Any]]:
    """Those that each route may give, and these."""
    return {code: {"model": ErrorView, "description": _ABOUT[code]} for code in sorted({401, 403, 422, 503, *more})}
