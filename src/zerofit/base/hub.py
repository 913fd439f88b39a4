"""Download models from the Hugging Face Hub, one process of a node for all; check that it is reachable."""

import contextlib
import json
import os
import socket
from pathlib import Path
from urllib.parse import urlparse

from zerofit.base.errors import Unavailable, UserError, first_line
from zerofit.base.paths import beside, locked, private_folder

# A model's files but its weights: configuration, tokenizer, templates, code.
SMALL = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
ELSEWHERE = ("*/*.json", "*/*.txt", "*/*.model")  # copies for other programs, in subfolders

# Environment variable, which a launcher's ranks inherit: {model and revision: patterns of the files that it fetched}.
ASKED = "ZEROFIT_HUB_ASKED"


def model_folder(name: str) -> Path | None:
    """Return the folder that --model names; None for a Hub id.

    Raises: UserError for a local path without a model in it.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            adapter = (
                " (it is an adapter folder: name its base model)" if (path / "adapter_config.json").exists() else ""
            )
            raise UserError(f"--model {name}: the folder has no config.json{adapter}.")
        return path.resolve()
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or path.exists():
        raise UserError(f"--model {name}: no such model folder.")
    return None


def check_reachable(asker: str, seconds: float = 3.0) -> None:
    """Raise if the Hub is unreachable; not checked behind a proxy or in offline mode (local cache).

    Args: asker: flag and value that need the Hub, for the message; seconds: timeout.
    Raises: Unavailable when the Hub cannot be reached.
    """
    if not _is_offline() and (why := _why_unreachable(seconds)):
        raise Unavailable(
            f"{asker}: not a local file or folder, and {why}; give a local path, or set HF_HUB_OFFLINE=1 to use the "
            "local cache."
        )


def fetch(name: str, place: str, revision: str | None, patterns=SMALL) -> Path:
    """Return the folder in the Hub's cache with a model's files, downloaded if need be.

    A launcher asks the Hub once, and its ranks read the cache. Ranks that torchrun alone has started ask one after the
    other which commit it is, and the first one downloads: name a commit where the model may change in that second. They
    wait on a file lock, not in a collective, which could time out. The Hub's library tries each request again after
    429, 5xx and lost connections.
    Args: place: what named the model, for messages; patterns: of the files' names.
    Raises: Unavailable when the Hub does not answer; UserError for a model that there is not, or without access.
    """
    of_job = json.loads(os.environ.get(ASKED, "{}"))
    asked = of_job.get(f"{name} {revision}", [])
    if not _is_offline() and not set(patterns) <= set(asked):
        of_user = private_folder()
        with locked(beside(of_user / name.replace("/", "--"), ".lock")) if of_user else contextlib.nullcontext():
            check_reachable(place)
            # What the job has asked before fixes the commit: all its files are of one.
            _download(name, place, revision, patterns, by_cache=bool(asked))
        os.environ[ASKED] = json.dumps(of_job | {f"{name} {revision}": sorted({*asked, *patterns})})
    return _in_cache(name, place, revision)


def _in_cache(name: str, place: str, revision: str | None) -> Path:
    """Return the folder of a model in the Hub's cache, whatever files it has. Raises: UserError without one."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    config = None
    with contextlib.suppress(HFValidationError):
        config = try_to_load_from_cache(name, "config.json", revision=revision)
    if not isinstance(config, str):
        offline = " (HF_HUB_OFFLINE is set)" if _is_offline() else ""
        raise UserError(f"{place}: the Hub's cache has no config.json of it{offline}; download it first.")
    return Path(config).parent


def _download(name: str, place: str, revision: str | None, patterns, by_cache: bool) -> None:
    """Download the files into the Hub's cache. by_cache: it says which commit the revision is. Raises: as `fetch`."""
    from huggingface_hub import constants, resolve_revision, snapshot_download
    from huggingface_hub.errors import RevisionResolutionError

    revision = revision or constants.DEFAULT_REVISION
    try:
        if not by_cache:
            _wait_until_it_answers(name, revision)
        commit = resolve_revision(name, revision=revision, local_files_only=by_cache)
        snapshot_download(name, revision=commit, allow_patterns=list(patterns), ignore_patterns=list(ELSEWHERE))
    except Exception as error:
        if status := _fault_of_the_hub(error):
            raise Unavailable(
                f"{place}: the Hub ({_host()}) does not give its files ({status}), after several tries; start the same "
                "command again later, with HF_TOKEN set (the limits of users are higher), name a local folder, or set "
                "HF_HUB_OFFLINE=1 to use what was downloaded before."
            ) from None
        if not isinstance(error, OSError | ValueError | RuntimeError | RevisionResolutionError):
            raise
        raise UserError(f"{place}: its files could not be loaded: {first_line(error)}.") from None


def _wait_until_it_answers(name: str, revision: str) -> None:
    """Ask for the model, again after 429 and 5xx: resolve_revision and snapshot_download ask for it once only."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, http_backoff

    url = f"{constants.ENDPOINT}/api/models/{name}/revision/{revision}"
    with contextlib.suppress(Exception):  # where all tries fail, the cache may still hold the model
        http_backoff("GET", url, headers=build_hf_headers(), timeout=constants.HF_HUB_ETAG_TIMEOUT)


def _fault_of_the_hub(error: BaseException) -> str:
    """Return what the Hub or the network answered, if the same request may work later; "" otherwise."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            return f"HTTP {status}" if status in (408, 429) or status >= 500 else ""
        if type(error).__module__.startswith("httpx"):  # no connection, or a timeout
            return first_line(error)
        error = error.__cause__ or error.__context__
    return ""


def _host() -> str:
    return urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).netloc


def check_push(settings, seconds: float = 3.0) -> None:
    """Raise if --push_to_hub cannot work; called before anything is loaded.

    Raises: UserError in offline mode, without a token, or when the Hub cannot be reached.
    """
    from huggingface_hub import get_token

    if not settings.push_to_hub:
        return
    if _is_offline():
        raise UserError(
            "--push_to_hub: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set; unset it, or leave the flag out."
        )
    if not (settings.hub_token or get_token()):
        raise UserError("--push_to_hub: there is no token; log in with `hf auth login`, or set HF_TOKEN.")
    if why := _why_unreachable(seconds):
        raise UserError(f"--push_to_hub: {why}; later: `make export RUN=...`, then `hf upload USER/NAME FOLDER`.")


def _is_offline() -> bool:
    return bool(os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE"))


def _why_unreachable(seconds: float) -> str:
    """Return why the Hub cannot be reached; "" if it can, or behind a proxy (not checked)."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return ""
    address = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname, port), timeout=seconds).close()
    except OSError as error:
        return f"{address.hostname} cannot be reached ({error})"
    return ""
