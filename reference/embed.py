"""Token embedding (SPEC.md 3)."""

from .stage import Stage, i64, index, output, weight, within

EMBED = Stage(
    "embed",
    "3",
    axes=dict(T="tokens in this step", N="vocabulary", D="hidden size"),
    tensors=(index("ids", "T", i64), weight("w", "N D"), output("prefix", "T D")),
    constraints=(within("ids", "N", low=0),),
    traffic=lambda d, attrs: 4 * d["T"] * d["D"],
)


@EMBED.law
def embed(ids, w, *, num):
    """ids [T] -> rows of w [N, D]; no scale, no position."""
    return dict(prefix=w[ids].to(num.storage(w.dtype)))
