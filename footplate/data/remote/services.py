"""Object stores: their addresses, credentials and file systems.

    s3://bucket/flowers                                 S3 and compatible stores
    gs://bucket/flowers                                 Google Cloud Storage
    abfss://container@account.dfs.core.windows.net/flowers   Azure Blob Storage and Data Lake Storage
    abfss://container/flowers, az://container/flowers   the same, in the account of AZURE_STORAGE_ACCOUNT_NAME
    hf://datasets/owner/name@revision/flowers           a repository of the Hugging Face Hub, read only

Credentials come from the environment variables of these services' own tools (`_CREDENTIALS`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import urlparse

import pyarrow.fs as pafs

from footplate.core.errors import DataError

Service = Literal["s3", "gs", "azure", "hf"]

_SERVICES: dict[str, Service] = {
    "s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs",
    "abfss": "azure", "abfs": "azure", "az": "azure", "hf": "hf",
}  # fmt: skip
_CREDENTIALS: dict[Service, str] = {
    "s3": "s3:// uses AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL",
    "gs": "gs:// uses GOOGLE_APPLICATION_CREDENTIALS",
    "azure": "abfss:// uses AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN, or AZURE_TENANT_ID, AZURE_CLIENT_ID and "
    "AZURE_CLIENT_SECRET, or the identity of the machine or of `az login`",
    "hf": "hf:// uses HF_TOKEN, or what `hf auth login` has kept",
}
SETTINGS = ("AWS_", "GOOGLE_", "STORAGE_EMULATOR", "AZURE_", "HF_")
"""The beginnings of the names of all variables that a connection depends on."""

SCHEMES = "s3://, gs://, abfss:// or hf://"

# "container@account.dfs.core.windows.net": of a sovereign cloud, the end differs.
_AZURE_HOST = re.compile(r"(?P<container>[^@]+)@(?P<account>[^.@]+)\.(?:dfs|blob)(?P<domain>\.[^@]+)")
_AZURE_DOMAIN = ".core.windows.net"


@dataclass(frozen=True)
class Address:
    """An address in an object store.

    Attributes:
        service: the service.
        path: the bucket and the key, as pyarrow's file system has them. Nothing is unquoted.
        account: of Azure: the storage account; empty if AZURE_STORAGE_ACCOUNT_NAME has it.
        domain: of Azure: the end of the host names of the account's services.
    """

    service: Service
    path: str
    account: str = ""
    domain: str = ""


def parse(uri: str) -> Address | None:
    """Parse the address in an object store; None for a URI of another kind, or a path.

    Raises:
        DataError: an address of Azure that isn't complete.
    """
    scheme, _, rest = uri.partition("://")
    service = _SERVICES.get(scheme) if rest else None
    if service is None:
        return None
    bucket, slash, key = rest.rstrip("/").partition("/")
    if service != "azure" or "@" not in bucket:
        return Address(service, f"{bucket}{slash}{key}")

    host = _AZURE_HOST.fullmatch(bucket)
    if host is None:
        raise DataError(
            f"{uri}: expected abfss://CONTAINER@ACCOUNT.dfs{_AZURE_DOMAIN}/PATH, or abfss://CONTAINER/PATH with the "
            "variable AZURE_STORAGE_ACCOUNT_NAME."
        )
    return Address("azure", f"{host['container']}{slash}{key}", host["account"], host["domain"])


def connect(address: Address, environ: Mapping[str, str], attempts: int = 1) -> Any:
    """Connect to the service of an address, without our retries and cache.

    Args:
        address: the address.
        environ: environment variables with addresses and credentials.
        attempts: how often the library makes a request before it fails.

    Returns:
        A file system of pyarrow; or an `AzureFiles`, with its methods that tables and checkpoints need; or a `HubFiles`,
        with its methods that tables need.

    Raises:
        DataError: the account is missing, or the address names no repository.
        MissingExtra: the library of the service isn't installed.
    """
    if address.service == "s3":
        return _s3(environ, attempts)
    if address.service == "gs":
        return _gcs(environ.get("STORAGE_EMULATOR_HOST"), timedelta(seconds=2 * attempts))
    if address.service == "azure":
        from footplate.data.remote.azure import AzureFiles

        return AzureFiles(_azure_server(address, environ), address.path.partition("/")[0], environ, attempts)
    from footplate.data.remote.hub import HubFiles

    return HubFiles.of(address.path, environ.get("HF_ENDPOINT"))


def endpoint(address: Address, environ: Mapping[str, str]) -> str:
    """The server of an address, if it isn't the default. Two servers may have buckets of the same name."""
    if address.service == "s3":
        return _s3_endpoint(environ) or ""
    if address.service == "gs":
        return environ.get("STORAGE_EMULATOR_HOST", "")
    if address.service == "azure":
        return _azure_server(address, environ)
    return environ.get("HF_ENDPOINT", "")


def for_delta(address: Address, environ: Mapping[str, str]) -> tuple[str | None, dict[str, str]]:
    """The address for delta-rs, and its storage options; None if it doesn't know the service. It finds credentials itself.

    Args:
        address: the address.
        environ: environment variables with addresses and credentials.
    """
    if address.service == "azure":
        server = _azure_server(address, environ)
        options = {"azure_storage_account_name": _account(address, environ), "azure_storage_endpoint": server}
        return f"az://{address.path}", options | _allow_http(server, "allow_http")
    if address.service == "s3":
        server = _s3_endpoint(environ)
        options = {"AWS_ENDPOINT_URL": server} if server else {}
        return f"s3://{address.path}", options | _allow_http(server, "AWS_ALLOW_HTTP")
    return (None if address.service == "hf" else f"gs://{address.path}"), {}


def credentials_of(address: Address | None) -> str:
    """Name the variables with the credentials of a service, for messages; of all services without one."""
    return "; ".join(_CREDENTIALS.values()) if address is None else _CREDENTIALS[address.service]


def _allow_http(server: str | None, option: str) -> dict[str, str]:
    return {option: "true"} if server and server.startswith("http://") else {}


def _s3_endpoint(environ: Mapping[str, str]) -> str | None:
    return environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")


def _s3(environ: Mapping[str, str], attempts: int) -> pafs.FileSystem:
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    # Tables have retries of their own (`filesystem.py`), so pyarrow makes a single attempt for them.
    retries = pafs.AwsStandardS3RetryStrategy(max_attempts=attempts)
    server = _s3_endpoint(environ)
    if server:
        parsed = urlparse(server)
        return pafs.S3FileSystem(
            endpoint_override=parsed.netloc, scheme=parsed.scheme, region=region, retry_strategy=retries
        )
    return pafs.S3FileSystem(region=region, retry_strategy=retries)


def _gcs(emulator: str | None, patience: timedelta) -> pafs.FileSystem:
    if emulator:
        parsed = urlparse(emulator if "://" in emulator else f"http://{emulator}")
        return pafs.GcsFileSystem(
            anonymous=True, scheme=parsed.scheme, endpoint_override=parsed.netloc, retry_time_limit=patience
        )
    return pafs.GcsFileSystem(retry_time_limit=patience)


def _azure_server(address: Address, environ: Mapping[str, str]) -> str:
    server = environ.get("AZURE_STORAGE_ENDPOINT")
    return server or f"https://{_account(address, environ)}.blob{address.domain or _AZURE_DOMAIN}"


def _account(address: Address, environ: Mapping[str, str]) -> str:
    account = address.account or environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
    if not account:
        raise DataError(
            f"abfss://{address.path}: the storage account is missing. Write "
            f"abfss://CONTAINER@ACCOUNT.dfs{_AZURE_DOMAIN}/PATH, or set AZURE_STORAGE_ACCOUNT_NAME."
        )
    return account
