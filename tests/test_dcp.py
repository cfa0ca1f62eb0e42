"""Context parallelism: where tokens lie, and partial attention over ranks against unsplit attention (SPEC.md 11)."""

from math import log

import pytest
import torch

from equivalence.compare import half_ulp
from reference import dcp
from reference.mla import ATTENTION
from reference.numerics import exact, fused
from reference.shard import Mesh
from reference.stage import ContractError, bf16

SIZES = (1, 2, 4, 8, 16)
H, PAGE, PAGES = 2, 4, 12  # local heads; rows of a page on a rank
SCALE = dict(scale=192**-0.5)
# Rows of one step: visible lengths. Three queries of one request, causal; one token (15 of 16 ranks hold none); a null
# row; a request that ends inside a logical page.
LENS = torch.tensor([21, 22, 23, 1, 0, 38], dtype=torch.int32)


@pytest.mark.parametrize("N", (*SIZES, 3))
@pytest.mark.parametrize("I", (1, 2, 4, 16))
def test_indices_equal_counting(N, I):
    held = [[] for _ in range(N)]
    for t in range(300):
        if t:
            lengths = [int(dcp.local_length(torch.tensor(t), N, I, r)) for r in range(N)]
            assert lengths == [len(h) for h in held]
        rank = t // I % N
        assert int(dcp.owner(torch.tensor(t), N, I)) == rank
        assert int(dcp.local_index(torch.tensor(t), N, I)) == len(held[rank])
        held[rank].append(t)


@pytest.mark.parametrize("N", SIZES[1:])
@pytest.mark.parametrize("I", (1, 2, 4))
def test_localized_slots_fill_pages_without_gaps(N, I):
    """40 tokens on permuted pages: every token has one row on one rank, its local index within its own pages."""
    pages = torch.tensor([7, 2, 9, 4, 1, 3, 8, 5, 6, 10])
    t = torch.arange(40)
    span = PAGE * N
    index = dict(slot_mapping=torch.cat([pages[t // span] * span + t % span, torch.tensor([0])]), lens=LENS)
    owners = torch.zeros(40, dtype=torch.int64)
    for rank in range(N):
        seat = Mesh(N, N, interleave=I).at(rank)
        got = dcp.localize(index, seat, PAGE)
        rows = got["slot_mapping"][:-1]
        local = dcp.local_index(t, N, I)
        assert torch.equal(rows, torch.where(rows > 0, pages[local // PAGE] * PAGE + local % PAGE, 0))
        assert got["slot_mapping"][-1] == 0
        owners += rows > 0
        assert int((rows > 0).sum()) == int(dcp.local_length(torch.tensor(40), N, I, rank))
        assert got["lens"].dtype == torch.int32 and got["lens"].sum() <= LENS.sum()
    assert (owners == 1).all()


def case(N: int, I: int, num):
    """A cache of tokens in one piece, and the same tokens dealt out to N ranks; rows of no token are NaN."""
    g = torch.Generator().manual_seed(N * 31 + I)
    dtype = torch.float64 if num is exact else bf16
    span, owners = PAGE * N, torch.tensor([0, 0, 0, 1, 2, 3])  # request of each row; 2 has no tokens
    width = -(-int(LENS.max()) // span)
    deal = (torch.randperm(PAGES * 4, generator=g) + 1)[: 4 * width].view(4, width)
    q = torch.randn(N, len(LENS), H, 576, generator=g).to(dtype) * 3
    whole = torch.full((PAGES * 4 + 1, span, 576), torch.nan, dtype=dtype)
    parts = torch.full((N, PAGES * 4 + 1, PAGE, 576), torch.nan, dtype=dtype)
    for request, length in ((0, 23), (1, 1), (3, 38)):
        rows = torch.randn(length, 576, generator=g).to(dtype)
        for t in range(length):
            page = int(deal[request, t // span])
            whole[page, t % span] = rows[t]
            local = int(dcp.local_index(torch.tensor(t), N, I))
            parts[t // I % N, page, local % PAGE] = rows[t]
    return q, deal[owners].int(), whole, parts


def split_attention(N, I, num, *, home, base, extra=0, declared=None):
    """Every rank's merged output and LSE: ([N, T, H, 512], [N, T, H]). extra: rows seen too many on rank 0."""
    q, table, _, parts = case(N, I, num)
    heads = dcp.GATHER_HEADS.call(dict(parts=q), {}, num)["q_lat"]
    o, lse = [], []
    for rank in range(N):
        lens = dcp.local_length(LENS, N, I, rank)
        lens = (lens + extra * (rank == 0)).clamp_max(PAGE * table.shape[1])
        cache = parts[rank].nan_to_num(0.0) if extra else parts[rank]
        got = ATTENTION.call(dict(q_lat=heads, block_table=table, lens=lens, cache=cache), SCALE, num)
        empty = lens == 0
        got["o_lat"][empty], got["lse"][empty] = torch.nan, (torch.nan, torch.inf, -torch.inf)[rank % 3]
        o.append(got["o_lat"])
        lse.append(dcp.TO_BASE_2.call(dict(lse=got["lse"]), {}, num)["lse_2"] if base == "2" else got["lse"])
    o, lse, made = torch.stack(o), torch.stack(lse), []
    for rank in range(N):
        attrs = dict(base=declared or base, rank=rank)
        made.append((dcp.MERGE if home == "all_to_all" else dcp.WEIGH).call(
            (dict(parts=o) if home == "all_to_all" else dict(o=o[rank])) | dict(lses=lse), attrs, num))  # fmt: skip
    if home == "reduce_scatter":
        weighted = torch.stack([m["out"] for m in made])
        for rank, m in enumerate(made):
            attrs = dict(accumulate="fp32", rank=rank)
            m["o_lat"] = dcp.SCATTER_HEADS.call(dict(parts=weighted), attrs, num)["o_lat"]
    return torch.stack([m["o_lat"] for m in made]), torch.stack([m["lse"] for m in made]), (o, lse)


def unsplit(N, I, num):
    """The same from one cache; q and cache are the mode's, the arithmetic is float64."""
    q, table, whole, _ = case(N, I, num)
    args = dict(block_table=table, lens=LENS, cache=whole.double())
    got = [ATTENTION.call(args | dict(q_lat=heads.double()), SCALE, exact) for heads in q]
    return torch.stack([g["o_lat"] for g in got]), torch.stack([g["lse"] for g in got])


WAYS = [(home, base) for home in ("reduce_scatter", "all_to_all") for base in ("e", "2")]
LIMIT = 1e-12


def error(got, want):
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("home, base", WAYS)
@pytest.mark.parametrize("I", (1, 2, 4))
@pytest.mark.parametrize("N", SIZES)
def test_split_attention_equals_unsplit(N, I, home, base):
    """Empty shards hold NaN outputs and NaN, +inf or -inf LSEs; a null row has no shard that is not empty."""
    o, lse, _ = split_attention(N, I, exact, home=home, base=base)
    want, want_lse = unsplit(N, I, exact)
    assert error(o, want) < LIMIT and not o[:, 4].any()
    lse = lse / dcp.LOG2_E if base == "2" else lse
    live = LENS > 0
    assert error(lse[:, live], want_lse[:, live]) < LIMIT and (lse[:, ~live] == -torch.inf).all()


MUTANTS = {
    "one row too many": dict(extra=1), "base e taken for 2": dict(base="e", declared="2"),
    "base 2 taken for e": dict(base="2", declared="e"),
}  # fmt: skip


@pytest.mark.parametrize("home", ("reduce_scatter", "all_to_all"))
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_of_split_attention_fail(name, home):
    o, _, _ = split_attention(4, 2, exact, home=home, **(dict(base="e") | MUTANTS[name]))
    assert error(o, unsplit(4, 2, exact)[0]) > 1e-3


def test_the_limit_is_sharp():
    want = unsplit(4, 2, exact)[0]
    assert error(want * (1 + 1.5 * LIMIT), want) > LIMIT


def rounding_bound(N, I, home, base, parts, want):
    """Bound per element of the merged output in production rounding.

    Half a unit in the last place of each rank's output times its share, of each weighted output (reduce-scatter) and of
    the result. Shares: an LSE in fp32 is off by half a unit, its exponential by as much again relative to 1, and N
    terms are added; attention itself: 576 terms in scores of magnitude s, 40 rows.
    """
    o, lse = (t.double() for t in parts)
    lse = torch.where(lse.isfinite(), lse, -torch.inf)
    share = dcp.shares(lse, base, exact)[0][..., None]  # [N, T, N * H, 1]
    o = o.nan_to_num()
    slack = (half_ulp(o, bf16) * share).sum(0)
    if home == "reduce_scatter":
        slack = slack + half_ulp(o * share, bf16).sum(0)
    largest = lse[lse.isfinite()].abs().max()
    relative = 2.0**-24 * (4 * largest + 576 * 4 + 40 + N)
    slack = slack + relative * (o.abs() * share).sum(0)
    return slack.unflatten(1, (N, H)).transpose(0, 1) + half_ulp(want, bf16) * 2


@pytest.mark.parametrize("home, base", WAYS)
@pytest.mark.parametrize("N, I", [(2, 4), (4, 1), (8, 2), (16, 1)])
def test_split_attention_in_production_rounding_is_within_its_bound(N, I, home, base):
    o, _, parts = split_attention(N, I, fused, home=home, base=base)
    want = unsplit(N, I, fused)[0]
    bound = rounding_bound(N, I, home, base, parts, want)
    assert ((o.double() - want).abs() <= bound).all()
    one_unit_off = o.double() + 2 * half_ulp(want, bf16)
    assert not ((one_unit_off - want).abs() <= bound).all()


def test_far_scores_merge_without_overflow():
    """LSEs of +-1e4: shares are exact where exp(LSE) is not finite."""
    lses = torch.tensor([[[1e4]], [[1e4]], [[-1e4]], [[-torch.inf]]])
    for base in dcp.BASES:
        w, lse = dcp.shares(lses, base, fused)
        assert w.flatten().tolist() == [0.5, 0.5, 0, 0]
        assert float(lse) == float(torch.tensor(1e4 + (1 if base == "2" else log(2)), dtype=torch.float32))


def test_undeclared_bases_are_refused_and_pages_must_hold_whole_interleaves():
    args = dict(o=torch.zeros(1, 2, 512), lses=torch.zeros(2, 1, 2))
    with pytest.raises(ContractError) as raised:
        dcp.WEIGH.call(args, dict(base="10", rank=0), fused)
    assert str(raised.value) == "LSE base '10'; allowed are 'e', '2'"
    index = dict(slot_mapping=torch.tensor([9]), lens=torch.tensor([3]))
    with pytest.raises(ContractError) as raised:
        dcp.localize(index, Mesh(2, 2, interleave=3).at(0), 4)
    assert str(raised.value) == "pages of 4 rows with interleave 3; allowed are divisors of the page size"
    assert index["slot_mapping"].tolist() == [9] and index["lens"].tolist() == [3]


def test_contracts():
    N, T = 2, 3
    o, lses = torch.zeros(N, T, N * H, 512).to(bf16), torch.zeros(N, T, N * H)
    own = dict(o_lat=torch.zeros(T, H, 512).to(bf16), lse=torch.zeros(T, H))
    dcp.MERGE.check(dict(parts=o, lses=lses) | own)
    with pytest.raises(ContractError, match=r"dcp.merge: lses has Y = 3; allowed is 4"):
        dcp.MERGE.check(dict(parts=o, lses=lses[..., :3]) | own)
    with pytest.raises(ContractError, match=r"dcp.merge: lses is torch.bfloat16; allowed is torch.float32"):
        dcp.MERGE.check(dict(parts=o, lses=lses.bfloat16()) | own)
