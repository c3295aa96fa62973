"""Weights from a hub into the cache of huggingface_hub, from where an earlier process stopped.

huggingface_hub goes on by itself if a connection breaks off, but throws away what it has if its process ends. So the
large files are brought here, into the cache's place for them, and it finds them there.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)

_SHA256_DIGITS = 64  # so many has the ETag of a large file, which is its SHA-256


def download_weights(name: str, endpoint: str, files: Sequence[str], not_files: Sequence[str]) -> None:
    """Brings the safetensors files of `name` that match `files` and not `not_files`, one after the other.

    Files that the hub keeps in chunks (Xet) are left to huggingface_hub if it can read those. Raises the errors of
    huggingface_hub and of its HTTP library.
    """
    from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils._paths import filter_repo_objects
    from huggingface_hub.utils._runtime import is_xet_available

    info = HfApi(endpoint=endpoint).model_info(name)
    wanted = filter_repo_objects(
        [sibling.rfilename for sibling in info.siblings or ()],
        allow_patterns=list(files),
        ignore_patterns=list(not_files),
    )
    repo = repo_folder_name(repo_id=name, repo_type="model")
    for file in sorted(each for each in wanted if each.endswith(".safetensors")):
        url = hf_hub_url(name, file, revision=info.sha, endpoint=endpoint)
        found = get_hf_file_metadata(url, endpoint=endpoint)
        in_chunks = found.xet_file_data is not None and is_xet_available()
        if found.etag and found.size and not in_chunks:
            _download(url, Path(constants.HF_HUB_CACHE), repo, found.etag, found.size, file)


def _download(url: str, cache: Path, repo: str, etag: str, size: int, file: str) -> None:
    """Brings a file into `blobs/ETAG`, under the lock that huggingface_hub takes for it."""
    from huggingface_hub.utils._fixes import WeakFileLock

    blob = cache / repo / "blobs" / etag
    part = blob.with_name(f"{etag}.part")
    lock = cache / ".locks" / repo / f"{etag}.lock"
    for folder in (blob.parent, lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(str(lock)):
        if blob.exists():
            return
        was_begun = part.exists()
        _bring_rest(url, part, size, file)
        if was_begun and not _is_whole(part, etag):
            log.warning("an earlier download of a file was damaged, it begins again", extra={"file": file})
            part.unlink()
            _bring_rest(url, part, size, file)
        part.rename(blob)


def _bring_rest(url: str, part: Path, size: int, file: str) -> None:
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils._headers import build_hf_headers

    with part.open("ab") as stream:
        if stream.tell() > size:
            stream.truncate(0)
        http_get(
            url,
            stream,
            resume_size=stream.tell(),
            headers=build_hf_headers(),
            expected_size=size,
            displayed_filename=file,
        )


def _is_whole(part: Path, etag: str) -> bool:
    """Whether a file that was begun by an earlier process is right: after a power cut it may have pages of zeros."""
    if len(etag) != _SHA256_DIGITS:
        return True  # the hub does not tell
    with part.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == etag
