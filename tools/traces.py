"""Golden traces: what the law made of fixed prompts, so that a change to it is seen at once.

    python -m tools.traces [--write]

Every stage of a prefill and of a decode step of two rows is evaluated on the inputs of an `exact` run, in all three
modes. Of every tensor it makes, SAMPLES elements are kept, for `exact` a signed sum over all elements and the RMS, too.
Bits are compared only where arithmetic cannot differ between machines: the weights, which come from integers, and the
routes and tokens. Elsewhere the limits allow another order of summation and another libm, and nothing else.
"""

import hashlib
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import golden
from reference import mxfp4
from reference.config import Config, deep, mini
from reference.decoder import Decoder, Model
from reference.layout import CheckpointError, full_name, layer_table, top_table
from reference.numerics import exact, fused, unfused
from reference.state import DecodeState
from reference.weights import all_weights

from .common import check_target, out, replacing, write_json

FOLDER = Path(golden.__file__).parent / "traces"
MODELS = {c.name: c for c in (mini, deep)}
PROMPTS = ([256, *b"def f(x):\n    return "], [65, 66])
FED = ([97, 48], [32, 49])  # tokens of the two decode steps; the second is recorded
SAMPLES = 8
ROUNDED = (fused, unfused)
# Float64: every stage errs by about 2^-49 of its values (blocked sums of up to 576 terms), and the layers amplify that:
# with noise of this size mini moves by 2e-13 of a tensor's RMS, deep by 2.4e-12. A factor of 40 on top.
EXACT = 1e-10
# One stage in float32 from the same inputs: 512 terms in another order, at most 2^-24 sqrt(512) of the RMS or so.
FP32 = 2.0**-17
# Rounded to bf16: an fp32 error of that size turns over one rounding in 2^9 or so, by one unit; a moved rounding point
# turns over a tenth of them at least.
SHARE = 0.02


class Integers:
    """A source of weights for `all_weights` that holds the same bits on every machine: sums of four frozen 16-bit
    integers (numpy's RandomState), scaled by one multiplication. A tensor depends on seed and name only."""

    def __init__(self, config: Config, seed: int):
        self.config, self.seed = config, seed

    def top(self) -> dict[str, Tensor]:
        return {name: self._make(full_name(name), *spec) for name, spec in top_table(self.config).items()}

    def layer(self, layer: int) -> dict[str, Tensor]:
        return {n: self._make(full_name(n, layer), *spec) for n, spec in layer_table(self.config, layer).items()}

    def _noise(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """About normal with standard deviation 1.15, multiples of 2^-15."""
        key = int.from_bytes(hashlib.sha256(f"{self.seed} {name}".encode()).digest()[:4], "little")
        drawn = np.random.RandomState(key).randint(0, 1 << 16, (4, *shape), dtype=np.uint16)
        return torch.from_numpy(drawn.sum(0, dtype=np.int32) - (1 << 17)).float() * 2.0**-15

    def _make(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        matrix, _, kind = name.rpartition(".weight")
        if dtype is torch.uint8:
            width = shape[1] * (2 if kind == "_packed" else mxfp4.GROUP)
            codes, scales = mxfp4.quant(self._noise(matrix, (shape[0], width)) * width**-0.5)
            return codes if kind == "_packed" else scales
        noise = self._noise(name, shape)
        if name.endswith("A_log"):  # rates of 1 to 15, as logarithms
            return torch.where(torch.arange(shape[0]) < self.config.heads, (noise + 2) * 0.6875, 0.0)
        if name.endswith("e_score_correction_bias"):
            return noise * 2.0**-6
        if name.endswith(("embed_tokens.weight", "dt_bias")):
            return noise.to(dtype)
        if len(shape) == 1:
            return (1 + noise * 0.125).to(dtype)
        return (noise * (4 if name.endswith("lm_head.weight") else 1) * shape[-1] ** -0.5).to(dtype)


@dataclass(frozen=True)
class Change:
    """One trace that is not what was recorded. error and limit in the unit that `unit` names."""

    model: str
    key: str  # "decode 07.kda.conv q", or "weights"
    mode: str
    error: float
    limit: float
    unit: str

    def __str__(self) -> str:
        return f"{self.model} {self.key} ({self.mode}): {self.unit} {self.error:.3g}, allowed is {self.limit:.3g}"


class Tracer(Decoder):
    """Decodes in `exact` and keeps what every stage makes, while `phase` is set."""

    def __init__(self, model: Model, state: DecodeState):
        super().__init__(model, state, exact)
        self.phase, self.keys, self.exact, self.rounded, self.choices = "", [], [], [], hashlib.blake2b(digest_size=16)

    def execute(self, step, tensors, made):
        if self.phase and (not made.prefill or step.stage.prefill_fn):
            values = step.stage.call(tensors, step.attrs, exact, prefill=made.prefill)
            lowered = {n: _store(t, step.stage.by_name[n].dtype) for n, t in tensors.items()}
            other = [step.stage.call(lowered, step.attrs, num, prefill=made.prefill) for num in ROUNDED]
            for name, value in values.items():
                dtype = step.stage.by_name[name].dtype
                if dtype.is_floating_point:
                    self.keys.append(f"{self.phase} {step.key} {name}")
                    self.exact.append(_summary(value))
                    self.rounded.append(torch.cat([_samples(_store(o[name], dtype)).float() for o in other]))
                else:
                    self.choices.update(value.to(torch.int64).numpy().tobytes())
        super().execute(step, tensors, made)


def _store(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.to(dtype) if t.dtype.is_floating_point else t


def _samples(t: Tensor) -> Tensor:
    flat = t.flatten()
    return flat[(torch.arange(SAMPLES) * 2654435761 + 40503) % len(flat)]


def _summary(t: Tensor) -> Tensor:
    """The samples, a sum with signs that follow no pattern of the tensor, and the RMS. Float64."""
    flat = t.flatten().double()
    signs = 1 - 2 * ((torch.arange(len(flat)) * 2654435761 >> 13) & 1).double()
    return torch.cat([_samples(flat), (flat @ signs)[None], flat.square().mean().sqrt()[None]])


@cache
def weights(config: Config) -> dict:
    return all_weights(Integers(config, 1), config)


def record(config: Config, tracer=Tracer) -> dict[str, np.ndarray]:
    """Run the law: keys [n], exact [n, SAMPLES + 2] f64, rounded [n, 2 * SAMPLES] f32, logits f64, digests."""
    model = Model(config, weights(config))
    d = tracer(model, DecodeState(config, slots=4, pages=12, page_size=4, num=exact, order=2))
    requests = [d.state.open() for _ in PROMPTS]
    d.phase = "prefill" if config is mini else ""
    d.prefill(requests[0], PROMPTS[0])
    d.phase = ""
    d.prefill(requests[1], PROMPTS[1])
    d.decode(requests, FED[0])
    d.phase = "decode"
    space = d.decode(requests, FED[1])
    held = hashlib.blake2b(digest_size=16)
    for (name, layer), t in sorted(model.weights.items(), key=str):
        held.update(f"{name} {layer} {t.dtype} {tuple(t.shape)}".encode())
        held.update(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return dict(
        keys=np.array(d.keys), exact=torch.stack(d.exact).numpy(), rounded=torch.stack(d.rounded).numpy(),
        logits=space.act["vocab_logits"].numpy(), weights=np.array(held.hexdigest()),
        choices=np.array(d.choices.hexdigest()),
    )  # fmt: skip


def load(name: str) -> dict[str, np.ndarray]:
    """The recorded traces of a model. Raises CheckpointError naming the file that is missing or no such record."""
    file = FOLDER / f"{name}.npz"
    try:
        with np.load(file, allow_pickle=False) as found:
            made = {k: found[k] for k in ("keys", "exact", "rounded", "logits", "weights", "choices")}
    except FileNotFoundError:
        raise CheckpointError(f"{file}: the file is missing; python -m tools.traces --write makes it") from None
    except Exception as error:
        raise CheckpointError(f"{file}: no record of traces ({' '.join(str(error).split())[:80]})") from None
    n = len(made["keys"])
    if made["exact"].shape != (n, SAMPLES + 2) or made["rounded"].shape != (n, 2 * SAMPLES):
        raise CheckpointError(f"{file}: traces of {made['exact'].shape}; allowed are {(n, SAMPLES + 2)}")
    return made


def compare(model: str, old: dict[str, np.ndarray], new: dict[str, np.ndarray]) -> list[Change]:
    """What changed, in the order of the walk. Where the weights differ nothing else is compared."""
    if str(old["weights"]) != str(new["weights"]):
        return [Change(model, "weights", "bits", 1, 0, "digests that differ")]
    before = {str(k): i for i, k in enumerate(old["keys"])}
    after = {str(k): i for i, k in enumerate(new["keys"])}
    out = [Change(model, k, "exact", 1, 0, "steps no longer made") for k in before if k not in after]
    out += [Change(model, k, "exact", 1, 0, "new steps") for k in after if k not in before]
    same = [k for k in after if k in before]
    i, j = [before[k] for k in same], [after[k] for k in same]
    out += _exact(model, same, old["exact"][i], new["exact"][j])
    for n, num in enumerate(ROUNDED):
        part = slice(n * SAMPLES, (n + 1) * SAMPLES)
        out += _rounded(model, same, num.mode, old["rounded"][i, part], new["rounded"][j, part], old["exact"][i, -1])
    if str(old["choices"]) != str(new["choices"]):
        out.append(Change(model, "experts and tokens", "bits", 1, 0, "digests that differ"))
    off = float(np.abs(old["logits"] - new["logits"]).max() / np.sqrt(np.square(old["logits"]).mean()))
    if not off <= EXACT:
        out.append(Change(model, "logits", "exact", off, EXACT, "max error over RMS"))
    return out


def _exact(model, keys, old, new) -> list[Change]:
    size = old[:, -1:]
    off = np.abs(old - new) / np.where(size > 0, size, 1)
    off[:, SAMPLES] /= 2**8  # a sum of up to 2^16 terms
    off = np.where(np.isnan(old) & np.isnan(new) | (old == new), 0, off).max(-1)
    far = [(k, e) for k, e in zip(keys, off, strict=True) if not e <= EXACT]
    return [Change(model, k, "exact", e, EXACT, "max error over RMS") for k, e in far]


def _rounded(model, keys, mode, old, new, size) -> list[Change]:
    """fp32 within FP32 of the RMS; what is bf16 equal, but for few elements of a stage that are one unit off."""
    out, turned, seen = [], Counter(), Counter()
    for key, a, b, rms in zip(keys, old, new, size, strict=True):
        stage = f"{key.split()[0]} {key.split()[1].split('.', 1)[-1]} {key.split()[2]}"
        coarse = bool((a.view(np.int32) & 0xFFFF == 0).all())
        off = np.abs(a - b)
        unit = np.abs(a) * 2.0**-7 if coarse else 0
        worst = float((off / (unit + FP32 * max(rms, 1e-30))).max())
        if not worst <= 1:
            out.append(Change(model, key, mode, worst, 1, "error in units of its limit"))
        turned[stage] += int((a != b).sum()) if coarse else 0
        seen[stage] += SAMPLES
    for stage, count in turned.items():
        limit = max(1, SHARE * seen[stage])
        if count > limit:
            out.append(Change(model, stage, mode, count, limit, "bf16 values of all layers that differ"))
    return out


def main(write: bool, json: str | None = None) -> int:
    """Print what changed, and with write=True keep it. 0: nothing changed or it is kept; 1: something changed; 2: a
    record cannot be used. json: where the changes go, as `write_json` takes it. Raises OSError, before any work, for
    records that cannot be written."""
    found, kept, compared = [], [], 0
    if write:
        FOLDER.mkdir(exist_ok=True)
        for name in MODELS:
            check_target(str(FOLDER / f"{name}.npz"))
    for name, config in MODELS.items():
        try:
            old = load(name)
        except CheckpointError as error:
            if not write:
                print(f"traces: {error}", file=sys.stderr)
                return 2
            old = None
        new = record(config)
        changes = compare(name, old, new) if old else []
        found += changes
        if old and str(old["weights"]) == str(new["weights"]):
            compared += len({*map(str, old["keys"])} & {*map(str, new["keys"])})
        for change in changes:
            out.print(str(change), markup=False)
        if write and (changes or not old):
            with replacing(FOLDER / f"{name}.npz") as work, work.open("wb") as file:
                np.savez_compressed(file, **new)
            kept.append(name)
    out.print(
        f"{compared} traces compared, {len(found)} changed{'; recorded anew: ' + ', '.join(kept) if kept else ''}"
    )
    write_json(dict(changes=[asdict(change) for change in found], kept=write), json)
    return int(len(found) > 0 and not write)


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--write"]):
        sys.exit("usage: python -m tools.traces [--write]")
    sys.exit(main(sys.argv[1:] == ["--write"]))
