"""Check that the Hugging Face Hub is reachable, before a library retries for a minute."""

import os
import socket
from pathlib import Path
from urllib.parse import urlparse

from zerofit.errors import UserError


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
    Raises: UserError when the Hub cannot be reached.
    """
    if not _is_offline() and (why := _why_unreachable(seconds)):
        raise UserError(
            f"{asker}: is no folder or file here, and {why}; give a local path, or set HF_HUB_OFFLINE=1 to use what "
            "was downloaded before."
        )


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
        raise UserError(f"--push_to_hub: {why}; push later with `make export RUN=... PUSH=user/name`.")


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
