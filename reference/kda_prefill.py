"""KDA for many tokens of one request: the convolution over the whole sequence and the delta rule in chunk form.

With G_t the log-decay summed from the chunk's start, the states inside a chunk are
S_t = S_0 e^{G_t} + sum_{j<=t} u_j (k_j e^{G_t - G_j})ᵀ, and the writes u solve a unit lower-triangular system.
Exponents are split around the chunk's middle, so that with 16 tokens and decays above e^-5 none exceeds e^±45 (float32
holds e^88).
Source: SPEC.md 5; the derivation is ours and is tested against the token recurrence.
"""

import torch
from torch.nn.functional import pad, silu

from .kda import CONV, RECURRENCE, RECURRENCE_BF16, gates, unit_keys

CHUNK = 16


@CONV.prefill
def conv(x, conv_weight, slots, conv, *, num):
    """x [T, 3C] of one request, slots [1]. Returns q, k, v [T, H, 128] and the window after the last token."""
    line = torch.cat([conv[slots.long().clamp_min(0)][0], x.to(conv.dtype)])  # [3 + T, 3C]
    taps = num.up(line).unfold(0, 4, 1)  # [T, 3C, 4]
    y = num.chain(silu((taps * num.up(conv_weight).mT).sum(-1)))
    q, k, v = y.unflatten(-1, (3, -1, 128)).unbind(1)
    return dict(q=q, k=k, v=v, conv=line[None, -3:])


@RECURRENCE.prefill
def recurrence(q, k, v, raw_g, b, A_log, dt_bias, slots, recurrent, *, num):
    """The delta rule over T tokens of one request, slots [1]; equals T single steps up to reassociation."""
    tokens = q.shape[0]
    q, k = unit_keys(q, k, num)
    log_decay, beta = gates(raw_g, b, A_log, dt_bias, num)

    def chunks(x):  # [T, H, n] -> [chunks, H, 16, n]; padding tokens have k = v = 0 and no decay
        return pad(x, (0, 0, 0, 0, 0, -tokens % CHUNK)).unflatten(0, (-1, CHUNK)).transpose(1, 2)

    q, k, v, beta = chunks(q), chunks(k), chunks(num.up(v)), chunks(beta[..., None])
    G = chunks(log_decay).cumsum(2)
    middle = G[:, :, CHUNK // 2 - 1, None]
    k_read, k_write, q_read = k * (G - middle).exp(), k * (middle - G).exp(), q * (G - middle).exp()
    A = (beta * (k_read @ k_write.mT)).tril(-1)  # [chunks, H, 16, 16]: what token t reads of write j < t
    P = (q_read @ k_write.mT).tril()
    q_carry, k_carry = q * G.exp(), k * G.exp()  # what a token reads of the state at the chunk's start
    k_leave, decay = k * (G[:, :, -1:] - G).exp(), G[:, :, -1:].exp()
    unit = torch.eye(CHUNK, dtype=A.dtype, device=A.device)
    solve = torch.linalg.solve_triangular(unit + A, beta * unit, upper=False, unitriangular=True)

    S, out = num.up(recurrent[slots.long().clamp_min(0)][0]), []  # [H, V, K]
    for c in range(q.shape[0]):
        u = solve[c] @ (v[c] - k_carry[c] @ S.mT)  # [H, 16, V]
        out.append(q_carry[c] @ S.mT + P[c] @ u)
        S = S * decay[c] + u.mT @ k_leave[c]
    o = torch.stack(out).transpose(1, 2).flatten(0, 1)[:tokens]
    return dict(o=num.chain(o), recurrent=S[None])


@RECURRENCE_BF16.prefill
def recurrence_bf16(*tensors, num, **named):
    """The same with a bf16 state: it is rounded once, behind the last token, and not after each as in single steps."""
    made = recurrence(*tensors, num=num, **named)
    return made | dict(recurrent=num.round(made["recurrent"]))
