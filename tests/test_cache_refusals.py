"""Values that the cache variants do not allow, each named."""

import itertools
from dataclasses import replace

import pytest
import torch
from test_cache_variants import B, C, P, rows

from equivalence.cases import tiny
from reference import kda, mla
from reference.mla import CACHE_WRITE_FP8
from reference.stage import ContractError, f8


@pytest.mark.parametrize("name, value, text", [
    ("mla_cache", "int8", "mla_cache 'int8': allowed are 'bf16', 'fp8'"),
    ("kda_state", "fp16", "kda_state 'fp16': allowed are 'fp32', 'bf16'"),
    *itertools.product(("cache_scale", "query_scale"), (0.0, -1.0, float("nan"), float("inf"), 1e-60), ("finite",)),
])  # fmt: skip
def test_wrong_variants_are_named(name, value, text):
    with pytest.raises(ValueError, match=text):
        replace(tiny, **{name: value})


def test_contracts_of_the_variants():
    x, cache = rows(), torch.zeros(P, B, 576).to(f8)
    CACHE_WRITE_FP8.check(x | dict(cache_scale=C, cache=cache))
    for bad, text in (
        (dict(cache_scale=C.double()), "cache_scale is torch.float64; allowed is torch.float32"),
        (dict(cache_scale=-C), "cache_scale holds -0.046875; allowed are finite numbers above 0"),
        (dict(cache_scale=C * torch.nan), "cache_scale holds nan"),
        (dict(cache_scale=C.expand(2)), "cache_scale has 1 = 2; allowed is 1"),
        (dict(cache=cache.bfloat16()), "cache is torch.bfloat16; allowed is torch.float8_e4m3fn"),
    ):
        with pytest.raises(ContractError, match=text):
            CACHE_WRITE_FP8.check(x | dict(cache_scale=C, cache=cache) | bad)
    assert (mla.CACHE_WRITE_FP8.base, kda.RECURRENCE_BF16.base) == ("mla.cache_write", "kda.recurrence")
