"""How long a step takes on hardware that is not here: cost models, each a small file of coefficients with its source.

    seconds = step + [any prefill] (prefill + token·P + pair·Q) + [any decode] (decode + sequence·S + context·C)

with P computed prompt tokens, Q the pairs of tokens that they add to attention (end² - start² for each slice), S
decoding sequences and C the tokens in their pages. `step` is paid by every step, `prefill` and `decode` by those that
do such work; a mixed step pays both. To bring cached KV into pages is not in it: that is `NodeSpec.device_rate`.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

MODELS = Path(__file__).parent / "models"

Coefficient: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0)]


class ModelError(ValueError):
    """A cost model that cannot be had; the text says what to do."""


class Coefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds for each unit of the module's formula."""

    step: Coefficient = 0.0
    prefill: Coefficient = 0.0
    token: Coefficient
    pair: Coefficient
    decode: Coefficient = 0.0
    sequence: Coefficient
    context: Coefficient


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    about: str
    source: str
    seconds: Coefficients


class StepTime:
    """A cost model: pure arithmetic. about: model and hardware; source: where the coefficients are from."""

    def __init__(self, name: str, about: str, source: str, coefficients: Coefficients) -> None:
        wrong = [field for field, value in msgspec.structs.asdict(coefficients).items() if not 0.0 <= value < math.inf]
        if wrong:
            raise ModelError(f"cost model {name}: {', '.join(wrong)} must be numbers of seconds, 0 or more")
        if coefficients.token + coefficients.pair == 0 or coefficients.step + coefficients.decode == 0:
            raise ModelError(f"cost model {name}: its steps would take no time: give token, and step or decode")
        self.name = name
        self.about = about
        self.source = source
        self.coefficients = coefficients
        #: Of a step that only decodes: seconds, whatever is in it; for a sequence; for a token in its pages.
        self.decode_coefficients = (
            coefficients.step + coefficients.decode,
            coefficients.sequence,
            coefficients.context,
        )
        self._prefill = coefficients.step + coefficients.prefill
        self._mixed = self._prefill + coefficients.decode

    @classmethod
    def load(cls, name: str | Path) -> StepTime:
        """The model of a name that `names` has, or in a TOML file (with a suffix or a folder in its path).

        Raises ModelError.
        """
        text = str(name)
        path = Path(name)
        if "/" not in text and path.suffix != ".toml":
            path = MODELS / f"{text}.toml"
            if text not in names():
                near = difflib.get_close_matches(text, names(), 1, 0.4)
                guess = f"; did you mean {near[0]!r}?" if near else ""
                raise ModelError(f"there is no cost model {text!r}: known are {', '.join(names())}{guess}")
        try:
            file = msgspec.toml.decode(path.read_bytes(), type=_File)
        except OSError as error:
            raise ModelError(f"cannot read the cost model {text}: {error.strerror or error}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ModelError(f"the cost model {text} is not what it should be: {error}") from None
        return cls(path.stem, file.about, file.source, file.seconds)

    @classmethod
    def from_fit(cls, name: str, coefficients: Sequence[float], *, about: str, source: str) -> StepTime:
        """From a worker's own fit of measured steps, in the order of `scheduler.cost`: step, token, context, sequence,
        history. Raises ModelError.

        The fit sums the contexts of computed tokens, each counting itself: c = (pairs + tokens) / 2.
        """
        if len(coefficients) != 5:
            raise ModelError(
                f"a fit has 5 coefficients (step, token, context, sequence, history), not {len(coefficients)}"
            )
        step, token, context, sequence, history = map(float, coefficients)
        return cls(
            name,
            about,
            source,
            Coefficients(step=step, token=token + context / 2, pair=context / 2, sequence=sequence, context=history),
        )

    def save(self, path: Path) -> None:
        """Writes a file that `load` takes."""
        lines = [f"about = {_quote(self.about)}", f"source = {_quote(self.source)}", "", "[seconds]"]
        lines += [f"{field} = {value!r}" for field, value in msgspec.structs.asdict(self.coefficients).items()]
        path.write_text("\n".join(lines) + "\n")

    def seconds(self, prefill: Sequence[tuple[int, int]], sequences: int, context: int) -> float:
        """Of one step. prefill: (start, count) of each slice of a prompt, in tokens. sequences: those that decode;
        context: tokens in their pages, the ones being computed included. 0 for a step without work.
        """
        if not prefill:
            if not sequences:
                return 0.0
            base, per_sequence, per_token = self.decode_coefficients
            return base + per_sequence * sequences + per_token * context
        tokens = pairs = 0
        for start, count in prefill:
            tokens += count
            pairs += count * (2 * start + count)
        own = self.coefficients
        if not sequences:
            return self._prefill + own.token * tokens + own.pair * pairs
        return self._mixed + own.token * tokens + own.pair * pairs + own.sequence * sequences + own.context * context

    def __repr__(self) -> str:
        return f"StepTime({self.name!r})"


def names() -> list[str]:
    """Of the models that come with the package."""
    return sorted(path.stem for path in MODELS.glob("*.toml"))


def _quote(text: str) -> str:
    # JSON's strings are TOML's too, but for pairs of surrogates, which this leaves out.
    return json.dumps(text, ensure_ascii=False)
