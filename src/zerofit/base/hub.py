"""Download models from the Hugging Face Hub once per node, and check that it is reachable."""

import contextlib
import json
import os
import socket
from pathlib import Path
from urllib.parse import urlparse

from zerofit.base.errors import Unavailable, UserError, first_line
from zerofit.base.paths import locked, private_folder, sibling

# The files of a model except its weights: configuration, tokenizer, templates, code.
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
SUBFOLDER_COPIES = ("*/*.json", "*/*.txt", "*/*.model")  # copies for other programs

# Environment variable that a launcher's ranks inherit: {model and revision: patterns of the fetched files}.
FETCHED = "ZEROFIT_HUB_ASKED"


def model_folder(name: str) -> Path | None:
    """Return the folder that --model refers to; None for a Hub id.

    Raises: UserError for a local path without a model.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            adapter = (
                " (it is an adapter folder: set its base model)" if (path / "adapter_config.json").exists() else ""
            )
            raise UserError(f"--model {name}: config.json is missing in the folder{adapter}.")
        return path.resolve()
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or path.exists():
        raise UserError(f"--model {name}: no such model folder.")
    return None


def check_reachable(flag: str, seconds: float = 3.0) -> None:
    """Raise if the Hub is unreachable; not checked behind a proxy or in offline mode (local cache).

    Args: flag: flag and value that need the Hub, for the message; seconds: timeout.
    Raises: Unavailable if the Hub cannot be reached.
    """
    if not _is_offline() and (why := _why_unreachable(seconds)):
        raise Unavailable(
            f"{flag}: not a local file or folder, and {why}; use a local path, or set HF_HUB_OFFLINE=1 to use the "
            "local cache."
        )


def fetch(name: str, place: str, revision: str | None, patterns=SMALL_FILES) -> Path:
    """Return the folder in the Hub's cache with a model's files; download them if necessary.

    A launcher sends requests once, and its ranks read the cache. Ranks started by torchrun alone resolve the commit one
    after the other, and the first one downloads; set a commit if the model may change in that second. They wait for a
    file lock, since a collective could time out. The Hub's library retries after 429, 5xx and lost connections.
    Args: place: the source of the model's name, for messages; patterns: file name patterns.
    Raises: Unavailable if the Hub does not answer; UserError for a model that does not exist or is not accessible.
    """
    fetched_by_job = json.loads(os.environ.get(FETCHED, "{}"))
    fetched = fetched_by_job.get(f"{name} {revision}", [])
    if not _is_offline() and not set(patterns) <= set(fetched):
        folder = private_folder()
        with locked(sibling(folder / name.replace("/", "--"), ".lock")) if folder else contextlib.nullcontext():
            check_reachable(place)
            # Earlier downloads of the job fix the commit: all its files come from one commit.
            _download(name, place, revision, patterns, by_cache=bool(fetched))
        os.environ[FETCHED] = json.dumps(fetched_by_job | {f"{name} {revision}": sorted({*fetched, *patterns})})
    return _in_cache(name, place, revision)


def _in_cache(name: str, place: str, revision: str | None) -> Path:
    """Return the folder of a model in the Hub's cache. Raises: UserError if it is not in the cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    config = None
    with contextlib.suppress(HFValidationError):
        config = try_to_load_from_cache(name, "config.json", revision=revision)
    if not isinstance(config, str):
        offline = " (HF_HUB_OFFLINE is set)" if _is_offline() else ""
        raise UserError(f"{place}: its config.json is not in the Hub's cache{offline}; download the model first.")
    return Path(config).parent


def _download(name: str, place: str, revision: str | None, patterns, by_cache: bool) -> None:
    """Download files into the Hub's cache. by_cache: resolve the revision from the cache. Raises: as `fetch`."""
    from huggingface_hub import constants, resolve_revision, snapshot_download
    from huggingface_hub.errors import RevisionResolutionError

    revision = revision or constants.DEFAULT_REVISION
    try:
        if not by_cache:
            _wait_until_it_answers(name, revision)
        commit = resolve_revision(name, revision=revision, local_files_only=by_cache)
        snapshot_download(name, revision=commit, allow_patterns=list(patterns), ignore_patterns=list(SUBFOLDER_COPIES))
    except Exception as error:
        if status := _fault_of_the_hub(error):
            raise Unavailable(
                f"{place}: the Hub ({_host()}) failed to serve its files after several tries ({status}); retry the "
                "command later with HF_TOKEN set (users have higher rate limits), use a local folder, or set "
                "HF_HUB_OFFLINE=1 to use the local cache."
            ) from None
        if not isinstance(error, OSError | ValueError | RuntimeError | RevisionResolutionError):
            raise
        raise UserError(f"{place}: its files could not be loaded: {first_line(error)}.") from None


def _wait_until_it_answers(name: str, revision: str) -> None:
    """Request the model with retries after 429 and 5xx: resolve_revision and snapshot_download try only once."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, http_backoff

    url = f"{constants.ENDPOINT}/api/models/{name}/revision/{revision}"
    with contextlib.suppress(Exception):  # if all tries fail, the model may still be in the cache
        http_backoff("GET", url, headers=build_hf_headers(), timeout=constants.HF_HUB_ETAG_TIMEOUT)


def _fault_of_the_hub(error: BaseException) -> str:
    """Return the status of a failure of the Hub or the network, after which a retry may succeed; "" otherwise."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            return f"HTTP {status}" if status in (408, 429) or status >= 500 else ""
        if type(error).__module__.startswith("httpx"):  # lost connection or timeout
            return first_line(error)
        error = error.__cause__ or error.__context__
    return ""


def _host() -> str:
    return urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).netloc


def check_push(settings, seconds: float = 3.0) -> None:
    """Raise if --push_to_hub cannot work; called before anything is loaded.

    Raises: UserError in offline mode, without a token, or if the Hub cannot be reached.
    """
    from huggingface_hub import get_token

    if not settings.push_to_hub:
        return
    if _is_offline():
        raise UserError("--push_to_hub: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set; unset it, or remove the flag.")
    if not (settings.hub_token or get_token()):
        raise UserError("--push_to_hub: a token is missing; log in with `hf auth login`, or set HF_TOKEN.")
    if why := _why_unreachable(seconds):
        raise UserError(f"--push_to_hub: {why}; later run `make export RUN=...` and `hf upload USER/NAME FOLDER`.")


def _is_offline() -> bool:
    return bool(os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE"))


def _why_unreachable(seconds: float) -> str:
    """Return why the Hub cannot be reached; "" if it can, or behind a proxy (unchecked)."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return ""
    address = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname, port), timeout=seconds).close()
    except OSError as error:
        return f"{address.hostname} cannot be reached ({error})"
    return ""
