"""Models by their name on a hub, `org/name`: from the local cache of huggingface_hub, else downloaded into it.

huggingface_hub does what is hard: locks between processes, retries, checks of sizes, progress bars. What an earlier
process left of the weights is not brought again (engine/loading/hub_download.py). Variables of huggingface_hub say
where: HF_HOME or HF_HUB_CACHE the cache, HF_ENDPOINT the hub, HF_TOKEN who asks, HF_HUB_OFFLINE=1 never to ask.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from common.errors import StartupError
from common.model_files import open_model
from engine.loading.hub_download import download_weights

_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
_NOT_FILES = ("original/*", "consolidated*", "*/*")  # the same weights again, in other layouts
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_name(model: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    if _NAME.fullmatch(model) is None:
        return False
    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return True


def cached_model(name: str) -> Path | None:
    """The directory of `name` in the cache; None if it is not there, or not whole."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        path = snapshot_download(
            name, local_files_only=True, allow_patterns=list(_FILES), ignore_patterns=list(_NOT_FILES)
        )
        return open_model(path).path
    except (LocalEntryNotFoundError, StartupError):
        return None


def hub_model(name: str, report: Callable[[str], None]) -> Path:
    """The directory of `name` in the cache, whole. `report` gets a line if there is something to download.

    Raises `StartupError` with one line that says what is missing and what to do.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    cache = constants.HF_HUB_CACHE
    files, not_files = list(_FILES), list(_NOT_FILES)
    try:
        path = snapshot_download(name, local_files_only=True, allow_patterns=files, ignore_patterns=not_files)
        return open_model(path).path
    except LocalEntryNotFoundError:
        lacks = f"it is not in the cache {cache}"
    except StartupError as error:
        lacks = f"the cache has a part of it ({error.message})"
    endpoint = os.environ.get("HF_ENDPOINT", constants.ENDPOINT)
    if constants.is_offline_mode():
        raise StartupError(
            f"model {name}: {lacks}, and HF_HUB_OFFLINE forbids to download it; unset that, or give --model a directory"
        )
    report(f"downloading {name} from {endpoint} into {cache}")
    try:
        download_weights(name, endpoint, files, not_files)
        path = snapshot_download(name, endpoint=endpoint, allow_patterns=files, ignore_patterns=not_files)
    except HfHubHTTPError as error:
        raise StartupError(f"model {name}: {endpoint} answers: {_line(error)}") from error
    except Exception as error:  # of huggingface_hub, or of whichever HTTP library it uses
        raise StartupError(
            f"model {name}: {lacks}, and {endpoint} cannot be reached ({_line(error.__cause__ or error)}); offline, "
            "copy a directory of the model here and give --model its path, or name another hub with HF_ENDPOINT"
        ) from error
    return open_model(path).path


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
