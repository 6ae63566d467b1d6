"""A Hugging Face folder as a checkpoint: config.json, one or many safetensors files, and whether they fit together."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from pyengine.checkpoint.config import ModelConfig, parse_config
from pyengine.checkpoint.errors import ModelError
from pyengine.checkpoint.files import file_digest
from pyengine.checkpoint.weights import DTYPES, Tensor, list_tensors
from pyengine.scheduler.types import KvGroup, KvSpec, Namespace

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
#: Ends of the names of tensors that repeat what the configuration says; older exports have them.
REDUNDANT = ("rotary_emb.inv_freq",)


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A model ready to be loaded. `folder` holds the tokenizer too; `weights` has each tensor's place."""

    name: str
    folder: Path
    config: ModelConfig
    weights: dict[str, Tensor]
    weights_digest: str
    eos_token_ids: frozenset[int]

    @property
    def files(self) -> list[Path]:
        """The safetensors files, each once, in a fixed order."""
        return sorted({tensor.path for tensor in self.weights.values()})

    @property
    def in_bfloat16(self) -> bool:
        """All its matrices are stored so."""
        return all(tensor.dtype == "BF16" for tensor in self.weights.values() if len(tensor.shape) > 1)

    def namespace(self, dtype: str, block_tokens: int) -> Namespace:
        """Of KV that is computed and kept in `dtype`: the same for every framework, so KV crosses between them."""
        config = self.config
        group = KvGroup(
            layers=config.layers, kv_heads=config.kv_heads, head_dim=config.head_dim, dtype=dtype, window=config.window
        )
        return Namespace(
            weights=self.weights_digest,
            config=config.digest(),
            compute_dtype=dtype,
            weight_quantization="none",
            kv=KvSpec(groups=(group,), block_tokens=block_tokens),
        )


def open_folder(folder: Path, name: str, cache: Path) -> Checkpoint:
    """Reads and checks all but the values of the weights. Raises ModelError with what to do."""
    config_json = _read_json(folder / "config.json")
    config = parse_config(config_json)
    config.check()
    weights = _fitting(_tensors_of(folder), config, folder)
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted({tensor.path for tensor in weights.values()}):
        digest.update(bytes.fromhex(file_digest(path, cache)))
    return Checkpoint(
        name=name,
        folder=folder,
        config=config,
        weights=weights,
        weights_digest=digest.hexdigest(),
        eos_token_ids=_eos_token_ids(folder, config_json),
    )


def _tensors_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor: of the files that the index names, else of model.safetensors, else of all that there are.

    Other files may lie beside them, such as the same weights by other names.
    """
    if (folder / INDEX).exists():
        return _indexed(folder)
    paths = [folder / WHOLE] if (folder / WHOLE).exists() else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{folder}: no *.safetensors; other weight formats are not read, convert them first")
    return {name: tensor for path in paths for name, tensor in list_tensors(path).items()}


def _indexed(folder: Path) -> dict[str, Tensor]:
    places = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ModelError(f"{folder / INDEX}: 'weight_map' is not a map of tensors to files; get the file again")
    files = sorted(set(places.values()))
    for file in files:
        if Path(file).name != file:
            raise ModelError(f"{folder / INDEX}: {file!r} is not the name of a file in this folder; get the file again")
        if not (folder / file).is_file():
            raise ModelError(
                f"{folder}: {INDEX} names {file!r}, which is not there; the download is incomplete, get that file"
            )
    found = {file: list_tensors(folder / file) for file in files}
    for name, file in places.items():
        if name not in found[file]:
            raise ModelError(
                f"{folder / file}: tensor {name!r}, which {INDEX} says is here, is missing; index and files are of "
                "different versions, get them again"
            )
    return {name: found[file][name] for name, file in places.items()}


def _fitting(tensors: dict[str, Tensor], config: ModelConfig, folder: Path) -> dict[str, Tensor]:
    """The tensors that the model needs. Raises ModelError for what is missing, of another shape or too much."""
    shapes = config.shapes()
    for name, shape in shapes.items():
        if name not in tensors:
            raise ModelError(f"{folder}: tensor {name!r} is missing; the checkpoint is incomplete, get it again")
        tensor = tensors[name]
        if tensor.shape != shape:
            raise ModelError(
                f"{folder}: tensor {name!r} has shape {list(tensor.shape)}, but config.json asks for {list(shape)}"
            )
        if tensor.dtype not in DTYPES:
            raise ModelError(
                f"{folder}: tensor {name!r} is of type {tensor.dtype}; supported: {', '.join(DTYPES)}. "
                "Quantized checkpoints are not read, use one that is not"
            )
    allowed = {"lm_head.weight"} if config.tied_head else set()
    extra = sorted(name for name in tensors.keys() - shapes.keys() - allowed if not name.endswith(REDUNDANT))
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise ModelError(
            f"{folder}: tensor {extra[0]!r}{more} is not part of a {config.architecture} model with this config.json; "
            "without it the model would compute something else. Use the config.json that belongs to these weights"
        )
    return {name: tensors[name] for name in shapes}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path.parent}: no {path.name}; a Hugging Face model folder has one") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: not valid JSON ({error}); get the file again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: a JSON object is expected")
    return value


def _eos_token_ids(folder: Path, config: dict[str, Any]) -> frozenset[int]:
    path = folder / "generation_config.json"
    value = (_read_json(path) if path.exists() else {}).get("eos_token_id", config.get("eos_token_id"))
    if value is None:
        return frozenset()
    return frozenset(int(token) for token in (value if isinstance(value, list) else [value]))
