"""After training: export in the checkpoint layout, reading it back, and what the log says about the trained model."""

import math
import shutil
from pathlib import Path

import torch

from reference import mxfp4
from reference.checkpoint import Checkpoint, expected, write

from .train_corpus import Order3, Stream
from .train_kda import CHUNK
from .train_model import Mini, bare

LIMIT = 16 << 20  # bytes of a checkpoint folder


def layout(t: torch.Tensor) -> torch.Tensor:
    """[B, T] -> [T / CHUNK, B, CHUNK], the order in which the model takes tokens."""
    return t.unflatten(1, (-1, CHUNK)).transpose(0, 1).contiguous()


@torch.no_grad()
def export(model: Mini, folder: Path) -> int:
    """Write the model as a checkpoint of one shard, and return the folder's bytes. RuntimeError above LIMIT."""
    dense = model.weights()
    packed = {"w13": mxfp4.quant(model.masters["w13"].cpu()), "w2": mxfp4.quant(model.masters["w2"].cpu())}

    def tensors():
        for name, (shape, dtype) in expected(model.cfg).items():
            short = bare(name)
            if ".experts." in short:
                yield name, _expert(short, packed, model.cfg.dense_layers)
            elif short.endswith("e_score_correction_bias"):
                yield name, model.bias[int(short.split(".")[1]) - model.cfg.dense_layers].to(dtype)
            else:
                out = torch.zeros(shape, dtype=dtype)
                out[: len(dense[short])] = dense[short].to("cpu", dtype)  # A_log is stored with a zero tail
                yield name, out

    if folder.exists():
        shutil.rmtree(folder)
    write(folder, model.cfg, tensors())
    size = sum(f.stat().st_size for f in folder.iterdir())
    if size > LIMIT:
        raise RuntimeError(f"{folder}: {size} bytes; allowed are {LIMIT}")
    return size


def _expert(name: str, packed: dict, first: int) -> torch.Tensor:
    _, layer, _, _, expert, which, kind = name.split(".")
    part = packed["w2" if which == "w2" else "w13"][kind == "weight_scale"][int(layer) - first, int(expert)]
    return part if which == "w2" else part[int(which == "w3")]


@torch.no_grad()
def load(model: Mini, folder: Path) -> None:
    """Replace the model's parameters by a checkpoint's: what is measured afterwards is what was written."""
    file, first = Checkpoint(folder), model.cfg.dense_layers
    full = {bare(name): name for name in expected(model.cfg)}
    for group, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32)):
        parts = [file.tensor(full[n]).flatten()[: math.prod(shape)] for n, shape in model.shapes[dtype].items()]
        model.masters[group].copy_(torch.cat(parts))
    for short, name in full.items():
        place = int(short.split(".")[1]) - first if short.startswith("layers.") else None
        if short.endswith("weight_packed"):
            w = mxfp4.dequant(file.tensor(name), file.tensor(name.replace("_packed", "_scale")), torch.float32)
            *_, expert, which, _ = short.split(".")
            target = model.masters["w2" if which == "w2" else "w13"][place, int(expert)]
            (target if which == "w2" else target[int(which == "w3")]).copy_(w)
        elif short.endswith("e_score_correction_bias"):
            model.bias[place].copy_(file.tensor(name))


def evaluate(model: Mini, held: Stream, order3: Order3, *, rows: int, length: int, batches: int) -> dict:
    """Bits per byte on held-out text, of the model and of the order-3 model on the same bytes, and expert use.

    Gradients stay enabled, so that a compiled model need not be compiled again; none is computed.
    """
    device = held.tokens.device
    length = min(length, (len(held.tokens) - 8) // CHUNK * CHUNK)
    last = len(held.tokens) - length - 1
    at = torch.linspace(3, last, rows * batches, device=device, dtype=torch.float64).long()
    other = order3.bits(held.tokens)
    kinds = list(held.ranges)
    sums, loads = torch.zeros(len(kinds), 3, device=device, dtype=torch.float64), 0
    for part in at.split(rows):
        x, y = held.rows(part, length)
        ce, _, used = model.losses(model.weights(), layout(x), layout(y))
        bits = ce.detach().transpose(0, 1).flatten(1).double() / torch.log(torch.tensor(2.0))
        place = part[:, None] + 1 + torch.arange(length, device=device)
        real = (y < 256).double()
        values = torch.stack([bits * real, other[place - 3] * real, real], -1)
        ends = torch.tensor([end for _, end in held.ranges.values()], device=device)
        sums.index_add_(0, torch.bucketize(place, ends, right=True).flatten(), values.flatten(0, 1))
        loads = loads + used.detach()
    total = sums.sum(0).tolist()
    shares = (loads / loads.sum(-1, keepdim=True)).cpu()
    return {
        "held_out_bytes_scored": int(total[2]),
        "bits_per_byte": round(total[0] / total[2], 4),
        "order3_bits_per_byte": round(total[1] / total[2], 4),
        "by_category": {
            k: [round(v / max(s[2], 1), 4) for v in s[:2]] for k, s in zip(kinds, sums.tolist(), strict=True)
        },
        "expert_share_min": [round(v, 5) for v in shares.min(-1).values.tolist()],
        "expert_share_max": [round(v, 5) for v in shares.max(-1).values.tolist()],
        "every_expert_used": bool((shares > 0).all()),
    }  # fmt: skip


@torch.no_grad()
def internals(model: Mini, held: Stream, *, rows: int, length: int) -> dict:
    """Decay quantiles per KDA layer and mean source weights per call of the attention residuals, on held-out text."""
    run, model.run, seen = model.run, lambda f: f, {"log_decay": {}, "attn_res": {}}
    model.probe = lambda what, where, tensor: seen[what].update({where: tensor.float().cpu()})
    length = min(length, (len(held.tokens) - 8) // CHUNK * CHUNK)
    at = torch.linspace(3, len(held.tokens) - length - 1, rows, device=held.tokens.device, dtype=torch.float64).long()
    model.losses(model.weights(), *map(layout, held.rows(at, length)))
    model.run, model.probe = run, None
    quantiles = torch.tensor([0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99])

    def decays(t):
        t = t.flatten()
        return [round(v, 5) for v in t[:: len(t) // 1_000_000 + 1].quantile(quantiles).exp().tolist()]

    return {
        "decay_quantile_levels": [round(v, 2) for v in quantiles.tolist()],
        "decay_quantiles": {k: decays(t) for k, t in seen["log_decay"].items()},
        "attn_res_mean_weights": {k: [round(v, 4) for v in t.tolist()] for k, t in seen["attn_res"].items()},
    }
