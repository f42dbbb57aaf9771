"""Whether the Hugging Face hub can be reached, asked once and briefly.

The hub's client retries every request five times, half a minute in all, before it looks into its
cache. Without a network that is what each model, text and task would cost.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.error
import urllib.request
from functools import cache

_TIMEOUT_SECONDS = 5


@cache
def ensure_quick_failure() -> bool:
    """Put the hub's client into offline mode if the hub does not answer; returns whether it did.

    In offline mode what is in the local cache is still found, and what is not fails at once.
    ``HF_HUB_OFFLINE=1`` skips the question, ``HF_ENDPOINT`` names the hub, and the usual proxy
    variables are respected.
    """
    if _is_true(os.environ.get("HF_HUB_OFFLINE")) or _is_true(os.environ.get("TRANSFORMERS_OFFLINE")):
        return False
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if _answers(endpoint):
        return True
    _go_offline()
    return False


def _answers(url: str) -> bool:
    request = urllib.request.Request(url, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS).close()
    except urllib.error.HTTPError:
        return True  # a refusal is an answer
    except urllib.error.URLError as error:
        # Certificates that only the client knows about are its business, not a missing network.
        return isinstance(error.reason, ssl.SSLError)
    except (OSError, ValueError):
        return False
    return True


def _go_offline() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Both libraries read the variable when they are imported, which may have happened already.
    for module in ("huggingface_hub.constants", "datasets.config"):
        if module in sys.modules:
            sys.modules[module].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]


def _is_true(value: str | None) -> bool:
    return (value or "").strip().lower() in ("1", "true", "yes", "on")
