"""Finds a model by the name that a user gives: the bundled one, a local directory or GGUF file, or a hub id."""

from __future__ import annotations

import importlib.resources
import re
from pathlib import Path

from pagoda.settings.problems import ConfigError
from pagoda_proto.model_files.files import gguf_in, is_gguf

DEMO_NAME = "pagoda-demo"
TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
WEIGHT_FILES = ("*.safetensors",)  # never *.bin or *.pt: those are pickles
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def served_name(model: str) -> str:
    """The name that clients use for the model unless the operator gives one: a hub id as it is, otherwise the name of
    the directory, or of the file without its suffix."""
    if not model:
        return DEMO_NAME
    path = Path(model).expanduser()
    if path.is_file() and is_gguf(path):
        return path.stem
    return path.resolve().name if path.is_dir() else model


def locate(model: str, revision: str = "", *, weights: bool = True) -> Path:
    """The directory of a model's files, or its GGUF file. A hub id is downloaded first; "" is the bundled demo model.

    Args:
        weights: False leaves the weights out, for a process that needs only the text side.

    Raises:
        ConfigError: there is no such model, it cannot be fetched, or a revision is given for one not from the hub.
    """
    path = Path(model).expanduser()
    if revision and (not model or path.exists()):
        raise ConfigError([f"revision: {model or DEMO_NAME} is not a hub model, so it has no revisions"])
    if not model:
        return Path(str(importlib.resources.files("pagoda"))) / "demo_model"
    if path.is_dir():
        return _in_directory(model, path.resolve())
    if path.is_file() and is_gguf(path):
        return path.resolve()
    if path.exists():
        raise ConfigError([f"model {model}: is a file but not a GGUF file; give a GGUF file or a checkpoint directory"])
    if model.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(model):
        raise ConfigError([f"model {model}: no such directory, and not a hub id (org/name)"])
    return _in_directory(model, _download(model, revision, TEXT_FILES + (WEIGHT_FILES if weights else ())), hub=True)


def _in_directory(model: str, path: Path, hub: bool = False) -> Path:
    """Prefers safetensors files to a GGUF file of the same model; downloads from the `hub` have no GGUF files."""
    found = [] if hub or any(path.glob("*.safetensors")) else gguf_in(path)
    if len(found) == 1:
        return found[0]
    if found:
        named = ", ".join(one.name for one in found[:8])
        raise ConfigError([f"model {model}: {len(found)} GGUF models are in the directory ({named}); name one of them"])
    if not (path / "config.json").is_file():
        advice = (
            "to use a GGUF file of the hub, download it and give its path"
            if hub
            else "give the directory of a checkpoint"
        )
        raise ConfigError([f"model {model}: there is no config.json; {advice}"])
    return path


def _download(model: str, revision: str, patterns: tuple[str, ...]) -> Path:
    try:
        from huggingface_hub import errors as hub
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(
            [f"model {model}: is not a directory, and the package huggingface-hub is not installed"]
        ) from None
    try:
        return Path(snapshot_download(model, revision=revision or None, allow_patterns=list(patterns)))
    except hub.GatedRepoError:
        cause = "is gated: accept its terms on the hub, then set HF_TOKEN"
    except hub.RevisionNotFoundError:
        cause = f"has no revision {revision!r}"
    except hub.RepositoryNotFoundError:
        cause = "is neither a local directory nor a repository on the hub (a private one needs HF_TOKEN)"
    except (hub.OfflineModeIsEnabled, hub.LocalEntryNotFoundError, hub.HfHubHTTPError, OSError) as error:
        cause = (
            f"is not a local directory, and the hub cannot be reached ({_first_line(error)}). Give a local directory "
            "or check the network and HF_ENDPOINT; with HF_HUB_OFFLINE=1 the model must already be in HF_HOME"
        )
    raise ConfigError([f"model {model}: {cause}"])


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]:.160}" if text else type(error).__name__
