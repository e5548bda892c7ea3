"""From "model" as the user wrote it to a folder, and to the files in it that hold its tensors.

In: a folder, a GGUF file or a hub id. Out: the folder; its safetensors files, opened.

Invariants: only files that the index names are read; a missing shard, a truncated file or an LFS
pointer is an error that names it. Nothing is unpickled, nothing reaches the network unless the user
gave a hub id.
"""

import json
import os
import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
_HUB_FILES = ["*.json", "*.jinja", "*.txt", "tokenizer.model"]


def find_checkpoint(model: str | Path, with_weights: bool = True) -> Path:
    """Folder of a model: the folder itself, a converted GGUF file, or a hub id's snapshot.

    `with_weights=False` downloads no weights from the hub: a tokenizer needs none.
    Raises ValueError when there is none.
    """
    path = Path(model).expanduser()
    name = str(model)
    if name and os.path.isdir(path):
        return path
    if path.suffix == ".gguf" and os.path.isfile(path):
        from nanoinfer.gguf import convert_gguf

        return convert_gguf(path)
    if not _HUB_ID.match(name) or path.suffix == ".gguf" or os.path.isfile(path):
        what = "is a file" if os.path.isfile(path) else "is not there"
        need = "need a folder, a .gguf file or a hub id (owner/name)"
        raise ValueError(f"model: {name!r:.200} {what}; {need}")
    from huggingface_hub import snapshot_download

    try:
        files = _HUB_FILES + ["*.safetensors"] * with_weights
        return Path(snapshot_download(name, allow_patterns=files))
    except Exception as error:
        raise ValueError(
            f"model: {name!r} is no local folder, and could not be had from the hub "
            f"({type(error).__name__}); check the id and the network, or pass a local folder"
        ) from error


def find_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, all of them present."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{index}: not an index of tensors; download it again") from error
        for name in names:
            if not (folder / name).is_file():
                raise ValueError(
                    f"{folder / name}: missing, but {index.name} names it; download it"
                )
        return [folder / name for name in names]
    found = sorted(folder.glob("*.safetensors"))
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if len(found) == 1:
        return found
    problem = f"{len(found)} safetensors files but no {index.name}" if found else "no safetensors"
    raise ValueError(f"{folder}: {problem}; pickled .bin files are not read, convert them first")


def open_safetensors(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        with path.open("rb") as file:
            is_pointer = file.read(11) == b"version htt"
        problem = "a Git LFS pointer, not the weights; run `git lfs pull`"
        if not is_pointer:
            problem = f"not a whole safetensors file ({error}); download it again"
        raise ValueError(f"{path}: {problem}") from error
