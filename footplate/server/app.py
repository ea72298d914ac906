"""The application: routes, the page's files, and errors in one form.

    {"error": {"code": "conflict", "message": "flowers_1 is RUNNING. Cancel it first: …", "problems": []}}

The text of a `FootplateError` tells the user what to do, so it is the message. `problems` lists all problems of a spec,
with their keys. Any other exception is a defect of Footplate: the server logs it, and its answer has no details.
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
from footplate.server.dependencies import ServerContext
from footplate.server.guard import API, Guard, Refusal
from footplate.server.routes import catalog, jobs, logs, packages

log = logging.getLogger(__name__)
ABOUT = """The actions of `footplate jobs`: submit, check, list, describe, wait, logs, cancel, resubmit, delete.

If the server has a token, each request must carry it: `Authorization: Bearer TOKEN`. If it has none, each request other
than GET must carry the header `X-Footplate: 1`.
"""
STATIC = Path(__file__).parent / "static"
_ROUTERS = (jobs.router, logs.router, packages.router, catalog.router)
_CODES = {404: "not_found", 405: "bad_request", 400: "bad_request", 413: "too_large", 422: "invalid"}


def make_app(context: ServerContext, token: Token | None = None) -> Guard:
    """Make the application, within its guard.

    Args:
        context: the jobs and settings of the server.
        token: the token that requests must carry; None if everybody on this machine may send requests.
    """
    app = FastAPI(
        title="Footplate jobs",
        version=__version__,
        description=ABOUT,
        # Only for the description of the API: the guard checks the token.
        dependencies=[Security(HTTPBearer(auto_error=False))] if token else [],
        openapi_url=f"{API}/openapi.json",
        # These two pages would load scripts from other sites.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.context = context
    for router in _ROUTERS:
        app.include_router(router)

    @app.exception_handler(FootplateError)
    def footplate_error(request: Request, error: Exception) -> Response:
        status, code = _status(error)
        return _answer(context, status, code, str(error), error.problems if isinstance(error, SpecError) else None)

    @app.exception_handler(Refusal)
    def refused(request: Request, error: Refusal) -> Response:
        return _answer(context, error.status, error.code, str(error))

    @app.exception_handler(RequestValidationError)
    def invalid_request(request: Request, error: RequestValidationError) -> Response:
        problems = [Problem(tuple(entry["loc"][1:]), entry["msg"], str(entry["loc"][0])) for entry in error.errors()]
        text = "; ".join(f"{dotted(problem.path) or problem.place}: {problem.text}" for problem in problems)
        return _answer(context, 422, "invalid", f"{text}. See {API}/openapi.json", problems)

    @app.exception_handler(HTTPException)
    def http_error(request: Request, error: HTTPException) -> Response:
        status, detail, headers = error.status_code, error.detail, dict(error.headers or {})

        # The mount of the page's files answers 404 for paths of the API that have other methods.
        if status in (404, 405) and request.method not in (allowed := _methods(app, request)):
            status, detail, headers = 405, "Method Not Allowed", {"Allow": ", ".join(sorted(allowed))}
        text = f"{request.method} {request.url.path}: {detail}. See {API}/openapi.json"
        return _answer(context, status, _CODES.get(status, "bad_request"), text, headers=headers)

    @app.exception_handler(ClientDisconnect)
    def disconnected(request: Request, error: Exception) -> Response:
        # The client has closed the connection, so it never reads this answer.
        return Response(status_code=400)

    @app.exception_handler(Exception)
    def defect(request: Request, error: Exception) -> Response:
        # uvicorn logs the traceback after this line.
        log.error("%s %s failed:", request.method, request.url.path)
        return _answer(context, 500, "unavailable", "a defect of the server: see its log.")

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> Response:
        return FileResponse(STATIC / "index.html")

    app.mount("/", StaticFiles(directory=STATIC))
    return Guard(app, token)


def _methods(app: FastAPI, request: Request) -> set[str]:
    """Collect the methods of all routes with this path. Starlette knows only those of one route, and none of the mount."""
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
    context: ServerContext,
    status: int,
    code: str,
    message: str,
    problems: list[Problem] | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    body = context.mask.all(views.error(code, message, problems).model_dump(mode="json", by_alias=True))
    return JSONResponse(body, status, headers)
