"""Uploading an output to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from mxquant.errors import MXQuantError


def check_can_push(repo: str) -> None:
    """Raise ``MXQuantError`` if nothing could be pushed to ``repo``: before the work, not after it."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise MXQuantError(f"--push-to-hub {repo}: not a name that the hub allows, such as me/my-model") from error
    if constants.HF_HUB_OFFLINE:
        raise MXQuantError(f"--push-to-hub {repo}: the hub is turned off by HF_HUB_OFFLINE=1")
    try:
        HfApi().whoami()
    except Exception as error:  # offline, proxies, no token, a wrong one: the library raises many kinds
        raise MXQuantError(
            f"--push-to-hub {repo}: cannot reach the hub, or not logged in ({_line(error)}); "
            "log in with `hf auth login`"
        ) from error


def push_folder(folder: Path, repo: str) -> str:
    """Upload a folder to the repository ``repo``, which is made, private, if it does not exist; returns its address."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(repo, private=True, exist_ok=True)
        api.upload_folder(repo_id=address.repo_id, folder_path=folder, commit_message="Quantized by mxquant")
    except Exception as error:  # as above
        raise MXQuantError(f"cannot push {folder} to {repo}: {_line(error)}; the local copy is complete") from error
    return str(address)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
