"""Training text found on the machine: collected, split by file, laid out as one stream; and an order-3 model.

Sources are text that ships with Python and the system: standard library, installed packages, documentation, manuals,
licences, translations. Nothing of it is stored; a checkpoint is all that remains.
"""

import gettext
import gzip
import hashlib
import io
import os
import re
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from reference.config import Config

from .train_synth import documents

CODE = set(".py .pyi .h .hpp .cu .cuh .c .js .css .html .json .toml .yaml .pl .sh".split())
PROSE = {".md", ".rst", ".txt", ".tex", ".pod"}
NOTICES = ("license", "licence", "copying", "copyright", "notice", "authors")
SMALLEST, LARGEST = 300, 200_000  # bytes of a document; longer files are cut
LIMITS = {"code": 110 << 20, "prose": 60 << 20, "notices": 2 << 20, "locale": 12 << 20}  # bytes read per category
MIXTURE = {"code": 0.42, "prose": 0.36, "notices": 0.01, "locale": 0.03, "made": 0.18}  # share of training rows
HELD_OUT = 48  # one file in so many
LONGEST_RUN = 32  # of one byte: longer runs of padding and rulers teach greedy decoding to fall into one token
RUN = re.compile(rb"([ \t\n=#*_.~+/-])\1{%d,}" % LONGEST_RUN)
DOCSTRING = re.compile(rb'"""(.{300,20000}?)"""', re.DOTALL)


def roots() -> list[Path]:
    paths = sysconfig.get_paths()
    found = [Path(paths[k]) for k in ("stdlib", "purelib", "platlib")] + [Path(torch.__file__).parents[1]]
    share = Path("/usr/share")
    found += [share / n for n in ("doc", "man", "common-licenses", "perl", "locale", "info")] + [Path("/usr/include")]
    return [p for p in dict.fromkeys(found) if p.is_dir()]


def category(path: str) -> str | None:
    """What a file counts as, from its path; None: not used."""
    name = os.path.basename(path).lower().removesuffix(".gz")
    stem, suffix = os.path.splitext(name)
    if suffix == ".mo":
        return "locale"
    if stem.startswith(NOTICES) or "common-licenses" in path:
        return "notices"
    if suffix in CODE:
        return "code"
    manual = "/man/" in path and suffix[1:].isdigit()
    if suffix in PROSE or manual or stem.startswith(("readme", "changelog", "news", "metadata")):
        return "prose"
    return None


def _files(deadline: float) -> list[tuple[bytes, str, str]]:
    """(hash of the path below its root, path, category), in the order of the hash."""
    out, seen = [], set()
    for root in roots():
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [s for s in subfolders if s not in ("__pycache__", ".git", "node_modules")]
            if folder in seen or time.monotonic() > deadline:
                subfolders.clear()
                continue
            seen.add(folder)
            for name in names:
                path = os.path.join(folder, name)
                kind = category(path)
                if kind:
                    out.append((hashlib.blake2b(path[len(str(root)) :].encode(), digest_size=8).digest(), path, kind))
    return sorted(out)


def _read(path: str) -> bytes:
    """The text of one file, or b"" where it is unreadable, no text, too small, or one of very long lines."""
    try:
        data = Path(path).read_bytes() if path.endswith(".mo") else _raw(path)
        if path.endswith(".mo"):
            texts = gettext.GNUTranslations(io.BytesIO(data))._catalog.values()
            data = "\n".join(t for t in texts if len(t) > 20).encode()
        data = data[:LARGEST]
        data.decode("utf-8", "strict" if len(data) < LARGEST else "ignore")
    except (OSError, EOFError, ValueError, LookupError, gzip.BadGzipFile):
        return b""
    bad = (
        len(data) < SMALLEST
        or b"\0" in data
        or data.count(b"\n") * 250 < len(data)
        or data.count(b" ") * 40 < len(data)
    )
    return b"" if bad else RUN.sub(lambda m: m[1] * LONGEST_RUN, data)


def _raw(path: str) -> bytes:
    with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
        return file.read(LARGEST)


def collect(scale: float, seconds: float) -> tuple[dict[str, list[bytes]], dict[str, list[bytes]]]:
    """Training and held-out documents by category. scale: multiplies LIMITS; seconds: time to spend at most."""
    start = time.monotonic()
    files = _files(start + seconds * 0.5)
    train, held = ({k: [] for k in LIMITS} for _ in range(2))
    room, known = {k: n * scale for k, n in LIMITS.items()}, set()
    with ThreadPoolExecutor(16) as pool:
        for at in range(0, len(files), 512):
            part = [f for f in files[at : at + 512] if room[f[2]] > 0]
            if time.monotonic() > start + seconds or not any(n > 0 for n in room.values()):
                break
            for (key, _, kind), data in zip(part, pool.map(_read, (f[1] for f in part)), strict=True):
                digest = hashlib.blake2b(data, digest_size=16).digest()
                if data and digest not in known:
                    known.add(digest)
                    (held if key[-1] % HELD_OUT == 0 else train)[kind].append(data)
                    room[kind] -= len(data)
    if not train["code"]:
        raise RuntimeError(f"no training text below {', '.join(map(str, roots()))}")
    train["prose"] += sorted({s.strip() for data in train["code"] for s in DOCSTRING.findall(data)})
    return train, held


@dataclass
class Stream:
    """Documents as one row of tokens: each starts with bos. ranges: category -> (first, end)."""

    tokens: Tensor  # [n] int16
    ranges: dict[str, tuple[int, int]]
    starts: dict[str, Tensor]  # category -> [documents] int64, where each begins
    bos: int

    def __post_init__(self):
        device = self.tokens.device
        self._share = torch.tensor([MIXTURE[k] for k in self.ranges], device=device)
        self._first, self._end = torch.tensor(list(self.ranges.values()), device=device).T
        self._counts = torch.tensor([len(s) for s in self.starts.values()], device=device)

    def to(self, device) -> "Stream":
        starts = {kind: t.to(device) for kind, t in self.starts.items()}
        return Stream(self.tokens.to(device), self.ranges, starts, self.bos)

    @classmethod
    def of(cls, docs: dict[str, list[bytes]], cfg: Config, *, seed: int = 0) -> "Stream":
        parts, ranges, starts, at = [], {}, {}, 0
        order = np.random.default_rng(seed)
        for kind, texts in docs.items():
            if not texts:
                continue
            first, begins = at, []
            for i in order.permutation(len(texts)):
                parts.append(np.concatenate([[cfg.bos], np.frombuffer(texts[i], np.uint8)]).astype(np.int16))
                begins.append(at)
                at += len(parts[-1])
            ranges[kind], starts[kind] = (first, at), torch.tensor(begins)
        return cls(torch.from_numpy(np.concatenate(parts)), ranges, starts, cfg.bos)

    def sample(self, rows: int, length: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random rows by MIXTURE, half of them at the start of a document: x, y [rows, length] int64, x[:, 0] = bos."""
        device = self.tokens.device
        kind = torch.multinomial(self._share, rows, replacement=True, generator=g)
        u = torch.rand(rows, generator=g, device=device, dtype=torch.float64)
        at = self._first[kind] + (u * (self._end - self._first)[kind]).long()
        pick = (u * self._counts[kind]).long()
        begin = torch.zeros_like(at)
        for i, starts in enumerate(self.starts.values()):
            begin = torch.where(kind == i, starts[pick.clamp_max(len(starts) - 1)], begin)
        aligned = torch.rand(rows, generator=g, device=device) < 0.5
        return self.rows(torch.where(aligned, begin, at), length)

    def rows(self, at: Tensor, length: int) -> tuple[Tensor, Tensor]:
        index = at[:, None].clamp_max(len(self.tokens) - length - 1) + torch.arange(length + 1, device=at.device)
        tokens = self.tokens[index].long()
        x = tokens[:, :-1].clone()
        x[:, 0] = self.bos
        return x, tokens[:, 1:]


def build(cfg: Config, *, scale: float, seconds: float, seed: int) -> tuple[Stream, Stream, dict]:
    """The training stream (text and generated documents), the held-out stream (text only), and what they hold."""
    train, held = collect(scale, seconds)
    filler = [d.decode("utf-8", "replace") for d in (train["prose"] or train["code"])[:4000]]
    train["made"] = documents(int(scale * (12 << 20)), filler, seed)
    facts = {f"{name}_bytes": {k: sum(map(len, v)) for k, v in docs.items()} for name, docs in
             (("train", train), ("held_out", held))}  # fmt: skip
    return Stream.of(train, cfg, seed=seed), Stream.of(held, cfg, seed=seed), facts


BASE = 272  # symbols of the order-3 model


class Order3:
    """Counts of up to three bytes of context with Witten-Bell interpolation down to the uniform distribution."""

    def __init__(self, tokens: Tensor):
        """tokens [n] integer, below BASE."""
        t = tokens.long()
        self.tables = []
        key = t
        for order in range(4):
            if order:
                key = key[1:] + t[: len(t) - order] * BASE**order  # context before the symbol, oldest most significant
            keys, counts = key.unique(return_counts=True)
            contexts, kinds = (keys // BASE).unique_consecutive(return_counts=True)
            owner = torch.arange(len(contexts), device=t.device).repeat_interleave(kinds)
            totals = torch.zeros_like(kinds).scatter_add_(0, owner, counts)
            self.tables.append((keys, counts, contexts, kinds, totals))

    def bits(self, tokens: Tensor) -> Tensor:
        """tokens [n] -> [n - 3] bits of tokens[3:], each given the three before it."""
        t = tokens.long()
        n, p, key = len(t) - 3, torch.full((len(t) - 3,), 1 / BASE, dtype=torch.float64, device=t.device), 0
        for order, (keys, counts, contexts, kinds, totals) in enumerate(self.tables):
            key = key + t[3 - order : 3 - order + n] * BASE**order
            hit, at = _find(keys, key)
            count = torch.where(hit, counts[at], 0)
            known, at = _find(contexts, key // BASE)
            kind, total = torch.where(known, kinds[at], 0), torch.where(known, totals[at], 0)
            p = torch.where(known, (count + kind * p) / (total + kind).clamp_min(1), p)
        return -p.log2()


def _find(table: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    at = torch.searchsorted(table, key).clamp_max(len(table) - 1)
    return table[at] == key, at
