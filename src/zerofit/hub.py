"""The Hugging Face hub: asked once, briefly, before a library retries for a minute."""

import os
import socket
from urllib.parse import urlparse

from .errors import UserError


def check(asker: str, seconds: float = 3.0) -> None:
    """Nothing when the hub answers, when a proxy is set, or in offline mode (the local cache is used then).

    Args: asker: the flag and value that need the hub, for the message.
    Raises: UserError when the hub cannot be reached.
    """
    proxy = any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    if proxy or os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE"):
        return
    address = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname, port), timeout=seconds).close()
    except OSError as error:
        raise UserError(
            f"{asker}: is no folder or file here, and {address.hostname} cannot be reached ({error}); give a local "
            "path, or set HF_HUB_OFFLINE=1 to use what was downloaded before."
        ) from None
