"""Small stand-in checkpoints that several test modules share."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from reference.checkpoint import Checkpoint
from reference.config import deep
from tools.stand_in import STATISTICS, make

# Every kind of layer, four blocks of attention residuals, and widths that two ranks can share.
small = replace(
    deep, name="small", layers=6, mla_layers=(3, 5), heads=2, block=2, experts=16, topk=4, expert_inter=64,
    shared_inter=64,
)  # fmt: skip
PROMPTS = ([256, *b"hello, hello"], [256, *b"ab"], [256, *b"aaaaaaaaaaaaaaaaaaaaaaaaa"], [256, *b"2 + 2"])


kept: list[TemporaryDirectory] = []  # removed when the tests end


@cache
def stand_in(statistics: tuple[str, ...] = STATISTICS, seed: int = 0, config=small) -> Checkpoint:
    """A stand-in in a temporary folder, made once; not to be changed. Its tensors lie in 18 files."""
    kept.append(TemporaryDirectory(prefix="k3-stand-in-"))
    folder = Path(kept[-1].name) / "weights"
    make(folder, config, statistics, seed, shards=18)
    return Checkpoint(folder)
