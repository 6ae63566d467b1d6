"""The PyTorch backend on a GPU beside what the GPU can do: a random model of an 8B Llama's shape, in bf16.

Prints one JSON object a line. Limits are measured in the same run: memory bandwidth by a copy within the device, the
rate of products by one of 8192 x 8192 bf16 matrices. A decode step is bound by its bytes (weights, and the KV that its
sequences attend to), a prefill by its products (2 per weight and token, and attention's). Triton's attentions stand
beside `scaled_dot_product_attention` over contiguous keys and values, which pages are not. Decode steps replay CUDA
graphs; beside them stand the same steps launched kernel by kernel.

--dry-run: the same steps on the CPU with a tiny model, to see that the script runs. It gives no figures: all values are
null.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from bench.common import line, note
from pyengine.backend import Slice
from pyengine.backends.torch import TorchBackend
from pyengine.checkpoint import ModelConfig, resolve
from pyengine.checkpoint.config import parse_config
from pyengine.kernels.inputs import Sequences
from pyengine.kernels.torch.choice import choose
from pyengine.scheduler.types import BLOCK_TOKENS, SamplingParams
from tests.model.graph_twin import with_graphs

LARGE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
}
TINY = LARGE | {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
NOISE = 1 << 20  # random numbers that the weights repeat: products take as long, and 16 GB are made in seconds
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Sizes:
    """What is run: (sequences, tokens before) of a decode step, prompt lengths, the side of the measured product."""

    decodes: tuple[tuple[int, int], ...]
    prefills: tuple[int, ...]
    side: int
    copied: int  # bytes
    rounds: int


FULL = Sizes(((1, 1024), (16, 1024), (64, 1024), (64, 4096)), (512, 2048, 8192), 8192, 4 << 30, 20)
DRY = Sizes(((1, 40), (3, 40)), (48,), 64, 1 << 16, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, tiny: shows that it runs, gives no figures")
    arguments = parser.parse_args()
    if not arguments.dry_run and not torch.cuda.is_available():
        parser.error(
            "there is no CUDA device here, so there is no figure to be had; --dry-run shows that the script runs"
        )
    if arguments.dry_run:
        note("dry run on the CPU: no figure exists, all values are null")
    device = torch.device("cpu" if arguments.dry_run else "cuda")
    bench = Bench(device, DRY if arguments.dry_run else FULL, dry=arguments.dry_run)
    with torch.inference_mode():
        bench.limits()
        bench.attention(parse_config(TINY if arguments.dry_run else LARGE))
    dtype = "float32" if arguments.dry_run else "bfloat16"
    with tempfile.TemporaryDirectory(prefix="pyengine-bench-gpu-") as folder:
        config = write_random(Path(folder) / "model", TINY if arguments.dry_run else LARGE)
        backend = TorchBackend(resolve(str(Path(folder) / "model"), Path(folder) / "cache"), dtype=dtype)
    bench.steps(backend, config)
    backend.close()


def write_random(folder: Path, config: dict[str, Any]) -> ModelConfig:
    """A checkpoint in bf16, one file, its numbers a repeated run of NOISE small ones."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    parsed = parse_config(config)
    noise = torch.from_numpy(np.random.default_rng(0).standard_normal(NOISE, dtype=np.float32) * 0.02)
    tile = noise.to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    header: dict[str, Any] = {}
    end = 0
    for name, shape in parsed.shapes().items():
        size = math.prod(shape) * 2
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (end, end + size)}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for left in range(end, 0, -len(tile)):
            file.write(tile[:left])
    return parsed


class Bench:
    """Measures on one device. Lines of a dry run carry no values."""

    def __init__(self, device: torch.device, sizes: Sizes, *, dry: bool) -> None:
        self.device = device
        self.sizes = sizes
        self.dry = dry
        self.bytes_per_second = math.nan
        self.flops_per_second = math.nan
        self.name = "no GPU" if dry else torch.cuda.get_device_name(device)

    def report(
        self, case: str, value: float, unit: str, against: str | None = None, ratio: float | None = None
    ) -> None:
        if self.dry:
            value, ratio = math.nan, None
        line("gpu", case, value, unit, against=against, ratio=ratio, device=self.name)

    def seconds(self, work: Callable[[], object]) -> float:
        """Median of some rounds, each from an idle device until it is idle again; the first ones compile and tune."""
        times = []
        for index in range(self.sizes.rounds + 2):
            self._wait()
            began = time.perf_counter()
            work()
            self._wait()
            if index > 1:
                times.append(time.perf_counter() - began)
        return statistics.median(times)

    def free(self) -> int:
        """Bytes of the device's memory, 0 of a dry run."""
        return 0 if self.dry else torch.cuda.mem_get_info(self.device)[0]

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def limits(self) -> None:
        """Memory bandwidth (bytes read and written by a copy) and the rate of bf16 products."""
        source = torch.zeros(self.sizes.copied, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        self.bytes_per_second = 2 * self.sizes.copied / self.seconds(lambda: target.copy_(source))
        self.report("memory copy", self.bytes_per_second / 1e9, "GB/s")
        side = self.sizes.side
        left, right = (torch.randn(side, side, device=self.device).to(torch.bfloat16) for _ in range(2))
        self.flops_per_second = 2 * side**3 / self.seconds(lambda: torch.mm(left, right))
        self.report(f"product {side}", self.flops_per_second / 1e12, "TFLOP/s")

    def steps(self, backend: TorchBackend, config: ModelConfig) -> None:
        """Whole steps, as a worker has them computed: decode beside its bytes, prefill beside its products."""
        longest = max(*(before for _, before in self.sizes.decodes), *self.sizes.prefills) + 1
        each = -(-longest // BLOCK_TOKENS)
        backend.allocate(each * max(sequences for sequences, _ in self.sizes.decodes))
        embedding = config.vocab_size * config.hidden_size
        weights = sum(math.prod(shape) for shape in config.shapes().values()) - embedding * (not config.tied_head)
        kv_per_token = 2 * config.layers * config.kv_heads * config.head_dim * 2

        def slice_of(row: int, tokens: int, start: int) -> Slice:
            pages = np.arange(row * each, (row + 1) * each, dtype=np.int32)
            ids = (np.arange(start, start + tokens) % config.vocab_size).astype(np.uint32)
            return Slice(ids, start, pages, GREEDY)

        for length in self.sizes.prefills:
            prompt = [slice_of(0, length, 0)]
            seconds = self.seconds(partial(backend.execute, prompt))
            # Each token meets each weight but the head's, and half of the others' keys and values.
            products = 2 * (weights - embedding) * length + 2 * embedding
            products += 2 * config.layers * config.heads * config.head_dim * length * length
            used = products / seconds / self.flops_per_second
            self.report(f"prefill {length}", length / seconds, "tokens/s", "limit", used)
        eager = {}
        for sequences, before in self.sizes.decodes:
            batch = [slice_of(row, 1, before) for row in range(sequences)]
            eager[sequences, before] = self.seconds(partial(backend.execute, batch))
        free = self.free()
        most = max(sequences for sequences, _ in self.sizes.decodes)
        began = time.perf_counter()
        if self.dry:
            with_graphs(backend, most)
        else:
            backend.warm_up(max(self.sizes.prefills), most)
        self.report("capture of decode graphs", time.perf_counter() - began, "s")
        self.report("memory of decode graphs", (free - self.free()) / 2**20, "MiB")
        for (sequences, before), without in eager.items():
            batch = [slice_of(row, 1, before) for row in range(sequences)]
            seconds = self.seconds(partial(backend.execute, batch))
            bound = (2 * weights + sequences * before * kv_per_token) / self.bytes_per_second
            case = f"decode batch {sequences} context {before}"
            self.report(case, sequences / seconds, "tokens/s", "limit", bound / seconds)
            self.report(case, sequences / seconds, "tokens/s", "without graphs", without / seconds)

    def attention(self, config: ModelConfig) -> None:
        """One layer's attention by the chosen kernels, over pages, beside SDPA over contiguous memory."""
        kernels = choose(self.device, torch.bfloat16, config.head_dim)
        heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
        shapes = [(sequences, 1, before + 1) for sequences, before in self.sizes.decodes]
        shapes += [(1, length, length) for length in self.sizes.prefills]
        for sequences, new, length in shapes:
            pages = -(-length // BLOCK_TOKENS)
            kv = torch.randn(2, kv_heads, sequences * pages, BLOCK_TOKENS, head_dim, device=self.device)
            kv = kv.to(torch.bfloat16)
            query = torch.randn(sequences * new, heads, head_dim, device=self.device).to(torch.bfloat16)
            order = np.random.default_rng(0).permutation(sequences * pages).astype(np.int32)
            tables = list(order.reshape(sequences, pages))
            planned = Sequences.of([new] * sequences, [length] * sequences, tables)
            plan = kernels.decode_attention if new == 1 else kernels.prefill_attention
            attend = plan(planned, kv)
            ours = self.seconds(partial(attend, query, kv))
            keys, values = kv.view(2, kv_heads, sequences, -1, head_dim)[:, :, :, :length].transpose(1, 2).contiguous()
            queries = query.view(sequences, new, heads, head_dim).transpose(1, 2).contiguous()
            sdpa = partial(F.scaled_dot_product_attention, is_causal=new > 1, enable_gqa=True)
            theirs = self.seconds(partial(sdpa, queries, keys, values))
            what = f"decode attention {sequences} x {length}" if new == 1 else f"prefill attention {length}"
            self.report(what, ours * 1e6, "us", "sdpa", theirs / ours)


if __name__ == "__main__":
    main()
