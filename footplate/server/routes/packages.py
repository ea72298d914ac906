"""Packages: a client uploads a program once, and jobs name it by its digest."""

from __future__ import annotations

import tempfile

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool

from footplate.jobs.package.receiving import receive
from footplate.jobs.package.snapshots import MAX_BYTES
from footplate.server.dependencies import Context
from footplate.server.guard import Refusal
from footplate.server.models import FileView, PackageView, error_responses

router = APIRouter(prefix="/api", tags=["packages"])
_BODY = {"required": True, "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}


@router.post("/packages", status_code=201, responses=error_responses(413), openapi_extra={"requestBody": _BODY})
async def send_package(context: Context, request: Request) -> PackageView:
    """Upload a package: the tar, or tar.gz, of its directory. The same content has the same digest."""
    with tempfile.TemporaryFile() as upload:
        size = 0
        async for piece in request.stream():
            size += len(piece)
            if size > MAX_BYTES:
                raise Refusal(413, "too_large", f"a package may have {MAX_BYTES // 2**20} MiB. Keep data elsewhere.")
            await run_in_threadpool(upload.write, piece)
        upload.seek(0)
        package = await run_in_threadpool(receive, upload, context.home.root)
    files = [FileView(name=name.removeprefix("source/"), bytes=size) for name, size in package.files]
    return PackageView(digest=package.digest, files=files, warnings=list(package.warnings))
