"""The application: routes, the page's files, and errors in one form.

    {"error": {"code": "conflict", "message": "flowers_1 is RUNNING. Cancel it first: …", "problems": []}}

A `FootplateError` is written for whoever can mend it, so its text is the message. `problems` names each thing that is
wrong with a spec, with its key. Anything else that escapes is a defect of ours: it is logged, and answered without
details.
"""

from __future__ import annotations

import logging
from pathlib import Path

from fastapi import FastAPI, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.staticfiles import StaticFiles

from footplate.core.errors import FootplateError, Unavailable
from footplate.core.version import __version__
from footplate.jobs.spec.problems import Problem, SpecError, dotted
from footplate.jobs.store.jobs import UnknownJob, WrongState
from footplate.server import views
from footplate.server.auth import Token
from footplate.server.dependencies import Desk
from footplate.server.guard import API, Guard, Refusal
from footplate.server.routes import catalog, jobs, logs, packages

log = logging.getLogger(__name__)
ABOUT = """The verbs of `footplate jobs`: submit, check, list, describe, wait, logs, cancel, resubmit, delete.

Where the server has a token, each request brings it: `Authorization: Bearer TOKEN`. Where it has none, a request that is
no GET brings the header `X-Footplate: 1`.
"""
STATIC = Path(__file__).parent / "static"
_ROUTERS = (jobs.router, logs.router, packages.router, catalog.router)
_CODES = {404: "not_found", 405: "bad_request", 400: "bad_request", 413: "too_large", 422: "invalid"}


def make_app(desk: Desk, token: Token | None = None) -> Guard:
    """The application, within its guard.

    Args:
        desk: whose jobs it is about.
        token: what requests must bring; None if everybody on this machine may ask.
    """
    app = FastAPI(
        title="Footplate jobs",
        version=__version__,
        description=ABOUT,
        dependencies=[Security(HTTPBearer(auto_error=False))] if token else [],  # for the description: the guard looks
        openapi_url=f"{API}/openapi.json",
        docs_url=None,  # these two pages load their scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.desk = desk
    for router in _ROUTERS:
        app.include_router(router)

    @app.exception_handler(FootplateError)
    def mendable(request: Request, error: Exception) -> Response:
        status, code = _status(error)
        return _answer(desk, status, code, str(error), error.problems if isinstance(error, SpecError) else None)

    @app.exception_handler(Refusal)
    def refused(request: Request, error: Refusal) -> Response:
        return _answer(desk, error.status, error.code, str(error))

    @app.exception_handler(RequestValidationError)
    def not_as_described(request: Request, error: RequestValidationError) -> Response:
        found = [Problem(tuple(one["loc"][1:]), one["msg"], str(one["loc"][0])) for one in error.errors()]
        said = "; ".join(f"{dotted(one.path) or one.place}: {one.text}" for one in found)
        return _answer(desk, 422, "invalid", f"{said}. See {API}/openapi.json", found)

    @app.exception_handler(HTTPException)
    def not_there(request: Request, error: HTTPException) -> Response:
        status, detail, headers = error.status_code, error.detail, dict(error.headers or {})
        if status in (404, 405) and request.method not in (allowed := _methods(app, request)):
            status, detail, headers = 405, "Method Not Allowed", {"Allow": ", ".join(sorted(allowed))}
        said = f"{request.method} {request.url.path}: {detail}. See {API}/openapi.json"
        return _answer(desk, status, _CODES.get(status, "bad_request"), said, headers=headers)

    @app.exception_handler(ClientDisconnect)
    def hung_up(request: Request, error: Exception) -> Response:
        return Response(status_code=400)  # which nobody hears

    @app.exception_handler(Exception)
    def defect(request: Request, error: Exception) -> Response:
        log.error("%s %s has failed:", request.method, request.url.path)  # uvicorn shows the traceback
        return _answer(desk, 500, "unavailable", "a defect of the server: its log says more.")

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> Response:
        return FileResponse(STATIC / "index.html")

    app.mount("/", StaticFiles(directory=STATIC))
    return Guard(app, token)


def _methods(app: FastAPI, request: Request) -> set[str]:
    """The methods of all routes with this path. Starlette names those of one route, and none where the mount answers."""
    routes = [*app.routes, *(route for router in _ROUTERS for route in router.routes)]
    matching = [route for route in routes if isinstance(route, Route) and route.matches(request.scope)[0] != Match.NONE]
    return {method for route in matching for method in route.methods or ()} or {"GET", "HEAD"}


def _status(error: Exception) -> tuple[int, str]:
    if isinstance(error, UnknownJob):
        return 404, "not_found"
    if isinstance(error, WrongState):
        return 409, "conflict"
    if isinstance(error, Unavailable):
        return 503, "unavailable"
    return 422, "invalid"


def _answer(
    desk: Desk,
    status: int,
    code: str,
    message: str,
    problems: list[Problem] | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    body = desk.mask.all(views.error(code, message, problems).model_dump(mode="json", by_alias=True))
    return JSONResponse(body, status, headers)
