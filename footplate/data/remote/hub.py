"""Repositories of the Hugging Face Hub as a file system, read only.

    hf://datasets/owner/name/data                      a dataset, its branch `main`
    hf://datasets/owner/name@refs/convert/parquet/…    a branch, tag or commit. The Hub keeps most datasets as Parquet there
    hf://owner/name                                    a model

A branch is looked up once, and its commit is pinned. So all processes of a training read the same files, and an open file
can't be replaced.

The Hub redirects a request for a large file to its storage, with an address that is signed for a while. The address is
kept, and the next ranges are asked for there: the Hub counts the requests that it redirects, and makes a client that asks
too often wait for minutes. It says for how long (status 429), and that time is waited.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.fs as pafs

from footplate.core.errors import DataError
from footplate.core.optional import require

_TYPES = {"datasets": "dataset", "spaces": "space", "models": "model"}
_REFERENCE = re.compile(
    r"(?:(?P<kind>datasets|spaces|models)/)?(?P<id>[^/@]+/[^/@]+)"
    # A slash is part of these names of branches alone.
    r"(?:@(?P<revision>refs/convert/[^/]+|refs/pr/[^/]+|[^/]+))?(?:/.*)?"
)
# The seconds that a request may be silent.
_TIMEOUT_S = 30
# What storage answers to an address whose signature is too old.
_EXPIRED = (400, 401, 403, 404, 410)


@dataclass(frozen=True)
class _Entry:
    """A file or directory of a commit."""

    is_file: bool
    size: int = 0
    tag: str = ""


class HubFiles:
    """A repository at one commit, with what `RemoteFiles` needs of a file system.

    Args:
        root: the beginning of all paths, such as `datasets/owner/name@main`.
        kind: dataset, model or space.
        repository: owner and name.
        revision: a branch, a tag or a commit; None for the default branch.
        endpoint: the address of the Hub; None for the usual one.
    """

    type_name = "hf"

    def __init__(self, root: str, kind: str, repository: str, revision: str | None, endpoint: str | None) -> None:
        self._root, self._kind, self._repository, self._revision = root, kind, repository, revision
        self._endpoint = endpoint
        self._commit = ""
        # Of the pinned commit, so they don't change. Without an entry, a path doesn't exist.
        self._entries: dict[str, _Entry | None] = {"": _Entry(is_file=False)}

    @classmethod
    def of(cls, path: str, endpoint: str | None) -> HubFiles:
        """The repository of a path.

        Args:
            path: such as `datasets/owner/name@main/data`.
            endpoint: the address of the Hub; None for the usual one.

        Raises:
            DataError: the path names no repository.
            MissingExtra: huggingface_hub isn't installed.
        """
        require("huggingface_hub", "hf", "Reading hf://")
        reference = _REFERENCE.fullmatch(path)
        if reference is None or path.startswith("buckets/"):
            raise DataError(
                f"hf://{path}: expected hf://datasets/OWNER/NAME/PATH, or hf://datasets/OWNER/NAME@REVISION/PATH."
            )
        root = path[: reference.end("revision") if reference["revision"] else reference.end("id")]
        return cls(root, _TYPES[reference["kind"] or "models"], reference["id"], reference["revision"], endpoint)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HubFiles) and (self._root, self._endpoint) == (other._root, other._endpoint)

    def __hash__(self) -> int:
        return hash((self._root, self._endpoint))

    def normalize_path(self, path: str) -> str:
        """Return a path as it is."""
        return path

    def get_file_info(self, paths: Sequence[str] | pafs.FileSelector) -> list[pafs.FileInfo]:
        """Look up paths, or list a directory.

        Raises:
            OSError: the Hub can't be reached, or refuses access.
        """
        if isinstance(paths, pafs.FileSelector):
            return self._list(paths)
        inner = [self._inside(path) for path in paths]
        self._look_up([path for path in inner if path is not None])
        return [
            _info(path, self._entries[key] if key is not None else None) for path, key in zip(paths, inner, strict=True)
        ]

    def open_input_file(self, path: str) -> HubFile:
        """Open a file.

        Raises:
            FileNotFoundError: there is no such file.
            OSError: the Hub can't be reached, or refuses access.
        """
        key = self._inside(path)
        if key is not None:
            self._look_up([key])
        entry = self._entries[key] if key is not None else None
        if key is None or entry is None or not entry.is_file:
            raise FileNotFoundError(f"{path}: there is no such file")
        return HubFile(self._url(key), entry)

    def _list(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        directory = self._inside(selector.base_dir)
        if directory is None:
            return []
        self._look_up([directory])
        entry = self._entries[directory]
        if entry is None and selector.allow_not_found:
            return []
        if entry is None or entry.is_file:
            raise FileNotFoundError(f"{selector.base_dir}: there is no such directory")
        commit = self._pin()
        tree = _asking(
            lambda: list(
                self._api().list_repo_tree(
                    self._repository, directory or None, recursive=selector.recursive, revision=commit,
                    repo_type=self._kind,
                )
            )
        )  # fmt: skip
        entries = {item.path: _entry(item) for item in tree}
        self._entries |= entries
        return [_info(f"{self._root}/{key}", entry) for key, entry in entries.items()]

    def _look_up(self, keys: Sequence[str]) -> None:
        """Ask for the entries that aren't known yet, with one request."""
        missing = sorted(set(keys) - set(self._entries))
        commit = self._pin()
        if missing:
            items = _asking(
                lambda: self._api().get_paths_info(self._repository, missing, revision=commit, repo_type=self._kind)
            )
            self._entries |= dict.fromkeys(missing) | {item.path: _entry(item) for item in items}

    def _pin(self) -> str:
        """The commit of the revision, looked up once."""
        if not self._commit:
            about = _asking(
                lambda: self._api().repo_info(
                    self._repository, revision=self._revision, repo_type=self._kind, timeout=_TIMEOUT_S
                )
            )
            self._commit = about.sha
        return self._commit

    def _url(self, key: str) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self._repository, key, repo_type=self._kind, revision=self._pin(), endpoint=self._endpoint)

    def _inside(self, path: str) -> str | None:
        """The path inside the repository; None if it is outside."""
        path = path.rstrip("/")
        return path.removeprefix(self._root).lstrip("/") if f"{path}/".startswith(f"{self._root}/") else None

    def _api(self) -> Any:
        from huggingface_hub import HfApi

        return HfApi(endpoint=self._endpoint)


class HubFile:
    """A file of a commit, which is read by ranges.

    Args:
        url: its address.
        entry: its size and its tag.
    """

    def __init__(self, url: str, entry: _Entry) -> None:
        self._url, self._entry = url, entry
        # The signed address in the Hub's storage, once it is known.
        self._signed = ""

    def size(self) -> int:
        """The size in bytes."""
        return self._entry.size

    def metadata(self) -> dict[str, str]:
        """The tag of the content."""
        return {"etag": self._entry.tag}

    def read_at(self, nbytes: int, offset: int) -> bytes:
        """Read some bytes.

        Raises:
            OSError: the Hub can't be reached, or refuses access.
        """
        return _asking(lambda: self._get(offset, offset + nbytes - 1))

    def close(self) -> None:
        """Do nothing: the file keeps no connection."""

    def _get(self, first: int, last: int) -> bytes:
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

        wanted = {"Range": f"bytes={first}-{last}"}
        patience: dict[str, Any] = {
            "retry_on_status_codes": 429, "retry_on_exceptions": (), "timeout": _TIMEOUT_S,
        }  # fmt: skip
        response = None
        if self._signed:
            response = http_backoff("GET", self._signed, headers=wanted, **patience)
            if response.status_code in _EXPIRED:
                response = None
        if response is None:
            self._signed = ""
            response = http_backoff("GET", self._url, headers={**build_hf_headers(), **wanted}, **patience)
            if response.history and response.url.host != response.history[0].url.host:
                self._signed = str(response.url)
        hf_raise_for_status(response)
        content = response.content
        # A proxy that ignores the range sends the whole file.
        return content[first : last + 1] if response.status_code == 200 else content


def _asking(request: Any) -> Any:
    """Make a request, with the errors of a file system.

    Raises:
        FileNotFoundError: there is no such repository, revision or file.
        PermissionError: the repository needs a token, or the owner's permission.
        OSError: any other failure.
    """
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

    try:
        return request()
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        why = str(error).strip().replace("\n", " ")
        if isinstance(error, GatedRepoError):
            raise PermissionError(f"its owner must grant access on its page: {why}") from error
        if status in (401, 403):
            raise PermissionError(why) from error
        if status == 404:
            raise FileNotFoundError(why) from error
        raise OSError(why) from error
    except OSError:
        raise
    except Exception as error:
        # The errors of connections are those of an HTTP library, which differs between versions.
        raise OSError(f"{type(error).__name__}: {error}") from error


def _entry(item: Any) -> _Entry:
    """The entry of what the Hub says of a path."""
    if not hasattr(item, "blob_id"):
        return _Entry(is_file=False)
    return _Entry(is_file=True, size=item.size, tag=item.lfs.sha256 if item.lfs else item.blob_id)


def _info(path: str, entry: _Entry | None) -> pafs.FileInfo:
    if entry is None:
        return pafs.FileInfo(path, pafs.FileType.NotFound)
    kind = pafs.FileType.File if entry.is_file else pafs.FileType.Directory
    return pafs.FileInfo(path, kind, size=entry.size if entry.is_file else None)
