"""Goal: what the interpreter runs can also be compiled for a GPU, and fits into its registers and shared memory.

Method: Triton compiles every kernel for an H100 (compute capability 9.0), as a model of Llama 3's shape would have it;
that needs no GPU. What it does there, nobody has seen yet.
"""

# mypy: disable-error-code="import-untyped, no-any-return"

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="needs the torch extra")

CAPABILITY = 90
SHARED_BYTES = 227 * 1024  # of an H100, for one program

MODEL = {"GROUP": 4, "HEAD_DIM": 128, "PADDED_DIM": 128, "PAGE_TOKENS": 16, "WINDOWED": True, "PRECISION": "tf32"}
BF16, F32, F64, I32, I64 = "*bf16", "*fp32", "*fp64", "*i32", "*i64"

#: Module and kernel: pointers by name, the constants, and whether tensor cores must do the work.
KERNELS: dict[str, tuple[dict[str, str], dict[str, Any], bool]] = {
    "prefill._prefill": (
        {"query": BF16, "keys": BF16, "values": BF16, "out": BF16, "rows": I32, "lengths": I32, "tables": I32},
        {**MODEL, "BLOCK_M": 64, "BLOCK_N": 64},
        True,
    ),
    "decode._decode": (
        {"query": BF16, "keys": BF16, "values": BF16, "out": BF16, "parts": F32, "weights": F32}
        | {"rows": I32, "lengths": I32, "tables": I32},
        {**MODEL, "BLOCK_M": 16, "BLOCK_N": 64, "SPLITS": 8},
        True,
    ),
    "decode._combine": (
        {"parts": F32, "weights": F32, "out": BF16},
        {"SPLITS": 12, "PADDED_SPLITS": 16, "HEAD_DIM": 128, "PADDED_DIM": 128},
        False,
    ),
    "rows._rms_norm": (
        {"x": BF16, "stream": BF16, "weight": BF16, "normed": BF16},
        {"ADDED": True, "BLOCK": 4096},
        False,
    ),
    "rows._rope_write": (
        {"qkv": BF16, "queries": BF16, "kv": BF16, "cosines": F32, "sines": F32, "slots": I64}
        | {"query_weight": BF16, "key_weight": BF16},
        {"HEADS": 32, "KV_HEADS": 8, "PAGE_TOKENS": 16, "HALF": 64, "PADDED_HALF": 64, "NORMED": True, "BLOCK": 16},
        False,
    ),
    "rows._swiglu": ({"gate_up": BF16, "out": BF16}, {"BLOCK": 1024}, False),
    "strips._copy": (
        {"cache": "*i16", "strips": "*i16", "pages": I64},
        {"LAYERS": 32, "HEADS": 8, "ELEMENTS": 2048, "TO_STRIPS": True, "BLOCK": 1024},
        False,
    ),
    "sampling._sample": ({"logits": F32, "settings": F64, "tokens": I64}, {"BLOCK": 4096}, False),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_compiles_for_an_h100(kernel: str, tmp_path: Path) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers, constants, tensor_cores = KERNELS[kernel]
    module, name = kernel.split(".")
    function = getattr(importlib.import_module(f"pyengine.kernels.torch.triton.{module}"), name)
    function = getattr(function, "fn", function) if hasattr(function, "configs") else function  # without its tuner
    floats = ("scale", "eps")
    signature = {
        argument: "constexpr"
        if argument in constants
        else pointers.get(argument, "fp32" if argument in floats else "i32")
        for argument in function.arg_names
    }
    places = {argument: (place,) for place, argument in enumerate(function.arg_names)}
    aligned = [argument for argument in signature if argument in pointers or argument.endswith("_stride")]
    source = ASTSource(
        function,
        signature,
        {places[argument]: value for argument, value in constants.items()},
        {places[argument]: [["tt.divisibility", 16]] for argument in aligned},
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", CAPABILITY, 32), options={"num_warps": 4, "enable_fp_fusion": True}
    )
    assert compiled.metadata.shared <= SHARED_BYTES
    assert not tensor_cores or "mma" in compiled.asm["ptx"]
    binary = tmp_path / "cubin"
    binary.write_bytes(compiled.asm["cubin"])
    program = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([program, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    assert "STACK:0 " in usage, f"registers are spilled: {usage}"
