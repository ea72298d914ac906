"""Packages: a program is sent once, and jobs name it by its digest."""

from __future__ import annotations

import tempfile

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool

from footplate.jobs.package.receiving import receive
from footplate.jobs.package.snapshots import MAX_BYTES
from footplate.server.dependencies import TheDesk
from footplate.server.guard import Refusal
from footplate.server.models import FileView, PackageView
from footplate.server.routes.answers import answers

router = APIRouter(prefix="/api", tags=["packages"])
_BODY = {"required": True, "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}


@router.post("/packages", status_code=201, responses=answers(413), openapi_extra={"requestBody": _BODY})
async def send_package(desk: TheDesk, request: Request) -> PackageView:
    """Send a package: the tar, or tar.gz, of its directory. Sent again, unchanged, it is the same."""
    with tempfile.TemporaryFile() as sent:
        size = 0
        async for piece in request.stream():
            size += len(piece)
            if size > MAX_BYTES:
                raise Refusal(413, "too_large", f"a package may have {MAX_BYTES // 2**20} MiB: keep data elsewhere.")
            await run_in_threadpool(sent.write, piece)
        sent.seek(0)
        taken = await run_in_threadpool(receive, sent, desk.home.root)
    files = [FileView(name=name.removeprefix("source/"), bytes=size) for name, size in taken.files]
    return PackageView(digest=taken.digest, files=files, warnings=list(taken.warnings))
