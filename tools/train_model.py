"""The model of `mini` for training: parameters in three flat masters, the forward pass in chunk form, one decode step.

Tokens of a batch lie as [N chunks, B sequences, 64]; everything but the convolution's halo, the scan and attention sees
flat tokens only. Weights are rounded in every forward pass to what the checkpoint stores: bf16, fp32 or MXFP4.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from reference.checkpoint import expected
from reference.config import Config
from reference.mxfp4 import GROUP, SCALES

from .train_kda import CHUNK, kda_chunks

HALO = 3  # earlier tokens that the convolution reads
FLASH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def bare(name: str) -> str:
    """A checkpoint name without its prefix."""
    return name.removeprefix("language_model.").removeprefix("model.")


def up(x: Tensor) -> Tensor:
    return x.float() if x.dtype is torch.bfloat16 else x


def normed(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = up(x)
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * up(w)).to(x.dtype)


def situ(a: Tensor, u: Tensor, beta: float, linear: float) -> Tensor:
    a, u = up(a), up(u)
    return beta * torch.tanh(a / beta) * torch.sigmoid(a) * (linear * torch.tanh(u / linear))


def mix_weights(sources: tuple, norm: Tensor, proj: Tensor, eps: float) -> list[Tensor]:
    """Softmax weights [.., 1] of the sources [.., D] (SPEC.md 4.1)."""
    key = up(norm) * up(proj[0])
    logits = []
    for v in map(up, sources):
        logits.append((v * key).sum(-1, keepdim=True) * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps))
    top = logits[0]
    for x in logits[1:]:
        top = torch.maximum(top, x)
    powers = [(x - top).exp() for x in logits]
    total = sum(powers[1:], powers[0])
    return [p / total for p in powers]


def attn_res(p, blocks: tuple, norm, proj, out_norm, eps: float):
    """The mix of `blocks` and the updated prefix p, normed by `out_norm` unless that is None (SPEC.md 4.1)."""
    mixed = up(p)
    if blocks:
        sources = (*blocks, p)
        weights = mix_weights(sources, norm, proj, eps)
        mixed = sum((a * up(v) for a, v in zip(weights[1:], sources[1:], strict=True)), weights[0] * up(sources[0]))
    if out_norm is not None:
        mixed = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + eps) * up(out_norm)
    return mixed.to(p.dtype)


def kda_inputs(proj, halo, conv, f_b, A_log, dt_bias, cfg: Config):
    """proj [m, c, q|k|v|g|f_a|b|padding] and halo [m, 3, q|k|v], the tokens before it.

    Returns q, k, v, log-decay [m, H, c, 128] and beta [m, H, c] (SPEC.md 5.2 to 5.4).
    """
    c, W, H, K = proj.shape[1], cfg.kda_width, cfg.heads, cfg.kda_dim
    x = up(torch.cat([halo, proj[..., : 3 * W]], 1))
    y = F.silu(sum((x[:, j : j + c] * conv[:, j] for j in range(1, HALO + 1)), x[:, :c] * conv[:, 0]))
    q, k, v = (t.unflatten(-1, (H, K)).transpose(1, 2) for t in y.split(W, -1))
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + cfg.l2_eps) * K**-0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + cfg.l2_eps)
    raw_g = up(proj[..., 4 * W : 4 * W + K] @ f_b.T)
    z = (raw_g + dt_bias).unflatten(-1, (H, K)) * A_log.exp()[:, None]
    log_decay = cfg.gate_floor * torch.sigmoid(z)
    beta = torch.sigmoid(up(proj[..., 4 * W + K : 4 * W + K + H])).transpose(1, 2)
    return q, k, v, log_decay.transpose(1, 2), beta


def kda_output(own, read, S, gate, o_norm, w_o, cfg: Config):
    """own, read [m*H, c, 128], S [m*H, K, V], gate [m, c, C] -> [m, c, D] (SPEC.md 5.6, 5.7)."""
    o = (own + read @ S).unflatten(0, (-1, cfg.heads)).transpose(1, 2)  # [m, c, H, V]
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + cfg.eps) * o_norm
    return (o.flatten(2) * torch.sigmoid(up(gate))).to(w_o.dtype) @ w_o.T


def mla_inputs(x, w, cfg: Config):
    """x [.., D] -> q, k [.., H, 192], v [.., H, 128], gate [.., C]; not absorbed (SPEC.md 6)."""
    q_a, q_norm, q_b, kv_a, kv_norm, kv_b, g = w
    q = (normed(x @ q_a.T, q_norm, cfg.lora_eps) @ q_b.T).unflatten(-1, (cfg.heads, cfg.q_dim))
    latent, pe = (x @ kv_a.T).split((cfg.kv_lora, cfg.rope), -1)
    kv = (normed(latent, kv_norm, cfg.lora_eps) @ kv_b.T).unflatten(-1, (cfg.heads, cfg.nope + cfg.v_dim))
    k, v = kv.split((cfg.nope, cfg.v_dim), -1)
    pe = pe.unsqueeze(-2).expand(*k.shape[:-1], cfg.rope)
    return q, torch.cat([k, pe], -1), v, x @ g.T


def gated_output(o, gate, w_o):
    return (up(o) * torch.sigmoid(up(gate))).to(w_o.dtype) @ w_o.T


def mlp(h, gate, up_, down, cfg: Config):
    return situ(h @ gate.T, h @ up_.T, cfg.situ_beta, cfg.situ_linear_beta).to(h.dtype) @ down.T


def moe(h, w, bias, w13, w2, cfg: Config):
    """h [n, D] -> the layer's output [n, D], and how often each expert was chosen [E] (SPEC.md 8).

    w13 [E, 2, I, L], w2 [E, L, I]. All experts run; the combine weight of those not chosen is zero.
    """
    gate, down, norm, up_, s_gate, s_up, s_down = w
    s = torch.sigmoid(up(h) @ up(gate).T)
    with torch.no_grad():
        chosen = torch.zeros_like(s).scatter_(-1, (s + bias).topk(cfg.topk, -1).indices, 1.0)
    s = s * chosen
    weights = s / (s.sum(-1, keepdim=True) + 1e-20)
    gu = ((h @ down.T) @ w13.flatten(0, 2).T).unflatten(-1, (cfg.experts, 2, cfg.expert_inter))
    m = situ(gu[..., 0, :], gu[..., 1, :], cfg.situ_beta, cfg.situ_linear_beta) * weights.unsqueeze(-1)
    y = m.to(h.dtype).flatten(1) @ w2.transpose(1, 2).flatten(0, 1)
    routed = normed(y, norm, cfg.eps) @ up_.T
    return routed + mlp(h, s_gate, s_up, s_down, cfg), chosen.sum(0)


def token_losses(h, norm, head, targets, eps: float):
    """h [n, D], targets [n] -> cross entropy in nats [n], and log Z [n]."""
    logits = up(normed(h, norm, eps) @ head.T)
    z = logits.logsumexp(-1)
    hit = targets.unsqueeze(-1) == torch.arange(head.shape[0], device=h.device)
    return z - torch.where(hit, logits, 0.0).sum(-1), z


class FakeMxfp4(torch.autograd.Function):
    """reference.mxfp4.fake_quant without its checks, which wait for the device; the gradient passes through."""

    @staticmethod
    def forward(ctx, w, scales):
        x = w.unflatten(-1, (-1, GROUP))
        mantissa, exponent = torch.frexp(x.abs().amax(-1, keepdim=True))
        scale = scales[(exponent - 2 - (mantissa <= 0.75).int() + 127).clamp_min(0)]
        a = x.abs() / scale
        a = torch.where(a < 2, (a * 2).round() / 2, torch.where(a < 4, a.round(), (a / 2).round() * 2))
        return (a * scale).copysign(x).flatten(-2)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Mini:
    """Parameters and passes of one model.

    masters: {"bf16", "f32"} flat fp32 vectors of all dense tensors by stored dtype, {"w13" [L, E, 2, I, latent],
    "w2" [L, E, latent, I]} of the experts. bias [L, E] fp32 is moved by the load, not by a gradient.
    act: dtype of activations; run: wraps pure parts of the forward pass (a compiler, or nothing).
    """

    def __init__(self, cfg: Config, *, device, act, run=lambda f: f, seed: int = 0, master=torch.float32):
        self.cfg, self.act, self.run = cfg, act, run
        self.moe_layers = range(cfg.dense_layers, cfg.layers)
        self.shapes = {torch.bfloat16: {}, torch.float32: {}}
        for name, (shape, dtype) in expected(cfg).items():
            name = bare(name)
            if dtype is not torch.uint8 and not name.endswith("e_score_correction_bias"):
                self.shapes[dtype][name] = (cfg.heads,) if name.endswith("A_log") else shape
        f32 = self.shapes[torch.float32]  # A_log last: its odd width would misalign what follows
        self.shapes[torch.float32] = dict(sorted(f32.items(), key=lambda item: item[0].endswith("A_log")))
        g = torch.Generator().manual_seed(seed)
        made = initial(cfg, self.shapes, g)
        E, I, L, n = cfg.experts, cfg.expert_inter, cfg.latent, len(self.moe_layers)
        flat = {
            "bf16": torch.cat([made[k].flatten() for k in self.shapes[torch.bfloat16]]),
            "f32": torch.cat([made[k].flatten() for k in self.shapes[torch.float32]]),
            "w13": torch.randn(n, E, 2, I, L, generator=g) * L**-0.5,
            "w2": torch.randn(n, E, L, I, generator=g) * I**-0.5,
        }
        self.masters = {k: t.to(device, master).requires_grad_() for k, t in flat.items()}
        self.bias = torch.zeros(n, E, device=device, dtype=master)
        unused = cfg.in_proj_width - 4 * cfg.kda_width - cfg.kda_dim - cfg.heads
        self.padding = torch.zeros(unused, cfg.hidden, device=device, dtype=act)
        self.scales = SCALES.to(device, master)
        self.probe = None  # called with (what, where, tensor) when set; for reports, on uncompiled passes

    def weights(self) -> dict:
        """The tensors a forward pass uses, by name without prefix; "w13" and "w2" are stacks over MoE layers."""
        out = {}
        for group, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32)):
            shapes, flat = self.shapes[dtype], self.masters[group]
            if group == "bf16":
                flat = flat.to(torch.bfloat16).to(self.act)
            parts = flat.split([math.prod(s) for s in shapes.values()])
            out |= {name: t.view(shape) for t, (name, shape) in zip(parts, shapes.items(), strict=True)}
        for name in ("w13", "w2"):
            out[name] = FakeMxfp4.apply(self.masters[name], self.scales).to(self.act).unbind(0)
        return out

    def _take(self, w: dict, layer: int, part: str, *names: str) -> tuple:
        return tuple(w[f"layers.{layer}.{part}{name}.weight"] for name in names)

    def _mix(self, w: dict, layer: int, site: str, prefix, delta, blocks):
        """One call of the attention residuals: site "self_attention", "mlp", or "final"."""
        if site == "final":
            norm, proj, out = w["output_attn_res_norm.weight"], w["output_attn_res_proj.weight"], None
        else:
            out_name = {"self_attention": "input_layernorm", "mlp": "post_attention_layernorm"}[site]
            norm, proj, out = self._take(w, layer, "", f"{site}_res_norm", f"{site}_res_proj", out_name)
        p = prefix if delta is None else prefix + delta
        x = self.run(attn_res)(p, tuple(blocks), norm, proj, out, self.cfg.eps)
        if self.probe and blocks:
            mean = [a.mean() for a in mix_weights((*blocks, p), norm, proj, self.cfg.eps)]
            self.probe("attn_res", f"{layer}.{site}", torch.stack(mean))
        return p, x

    def layers(self, w: dict, x: Tensor, attention) -> tuple[Tensor, Tensor]:
        """Embedded tokens [.., D] -> final mix [.., D] and expert counts [L, E]; attention(w, layer, x) differs between
        whole sequences and one decode step (SPEC.md 2, 4.2)."""
        cfg, prefix, delta, blocks, loads = self.cfg, x, None, [], []
        for l in range(cfg.layers):
            writes = l % cfg.block == 0
            prefix, x = self._mix(w, l, "self_attention", prefix, delta, blocks)
            if writes:
                blocks = [*blocks, prefix]
            a = attention(w, l, x)
            prefix, h = self._mix(w, l, "mlp", *((a, None) if writes else (prefix, a)), blocks)
            if cfg.is_dense(l):
                delta = self.run(mlp)(h, *self._take(w, l, "mlp.", "gate_proj", "up_proj", "down_proj"), cfg)
                continue
            i, names = l - cfg.dense_layers, [f"routed_expert_{n}" for n in ("down_proj", "norm", "up_proj")]
            names = ["gate", *names, *(f"shared_experts.{n}_proj" for n in ("gate", "up", "down"))]
            dense = self._take(w, l, "block_sparse_moe.", *names)
            delta, load = self.run(moe)(h.flatten(0, -2), dense, self.bias[i], w["w13"][i], w["w2"][i], cfg)
            delta = delta.view_as(h)
            loads.append(load)
        return self._mix(w, cfg.layers, "final", prefix, delta, blocks)[1], torch.stack(loads)

    def embed(self, w: dict, tokens: Tensor) -> Tensor:
        """As a product with one-hot rows: exact, and its gradient needs no sort."""
        table = w["embed_tokens.weight"]
        return (tokens.unsqueeze(-1) == torch.arange(len(table), device=tokens.device)).to(table.dtype) @ table

    def kda_weights(self, w: dict, l: int) -> tuple:
        """Fused input projection, convolution taps [3C, 4], and the rest of one KDA layer."""
        at = f"layers.{l}.self_attn."
        rows = self._take(w, l, "self_attn.", "q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj")
        w_in = torch.cat([*rows, self.padding])
        conv = torch.cat([c[:, 0] for c in self._take(w, l, "self_attn.", "q_conv1d", "k_conv1d", "v_conv1d")])
        gates = (*self._take(w, l, "self_attn.", "f_b_proj"), w[at + "A_log"], w[at + "dt_bias"])
        return w_in, conv, gates, self._take(w, l, "self_attn.", "o_norm", "o_proj")

    def mla_weights(self, w: dict, l: int) -> tuple:
        names = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "g_proj")
        return self._take(w, l, "self_attn.", *names), w[f"layers.{l}.self_attn.o_proj.weight"]

    def attend(self, w: dict, l: int, x: Tensor, N: int) -> Tensor:
        """Attention of layer l over whole sequences of N chunks: x [N * B, CHUNK, D] -> the same shape."""
        cfg, B, c = self.cfg, len(x) // N, x.shape[1]
        if cfg.is_mla(l):
            inputs, w_o = self.mla_weights(w, l)
            q, k, v, gate = self.run(mla_inputs)(x, inputs, cfg)
            v = F.pad(v, (0, cfg.q_dim - cfg.v_dim))  # flash attention wants one width
            q, k, v = (t.unflatten(0, (N, B)).permute(1, 3, 0, 2, 4).flatten(2, 3) for t in (q, k, v))
            with sdpa_kernel([*FLASH, SDPBackend.MATH] if x.device.type == "cpu" else FLASH):
                o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=cfg.softmax_scale)
            o = o[..., : cfg.v_dim].unflatten(2, (N, c)).permute(2, 0, 3, 1, 4).flatten(3)
            return self.run(gated_output)(o.flatten(0, 1), gate, w_o)
        w_in, conv, gates, (o_norm, w_o) = self.kda_weights(w, l)
        C = cfg.kda_width
        proj = x @ w_in.T
        halo = F.pad(proj[:-B, -HALO:, : 3 * C], (0, 0, 0, 0, B, 0))  # a sequence's previous chunk lies B rows before
        q, k, v, log_decay, beta = self.run(kda_inputs)(proj, halo, conv, *gates, cfg)
        if self.probe:
            self.probe("log_decay", str(l), log_decay)
        q, k, v, log_decay, beta = (t.unflatten(0, (N, B)).flatten(1, 2) for t in (q, k, v, log_decay, beta))
        own, read, S = kda_chunks(q, k, v, beta, log_decay, self.act, self.run)
        return self.run(kda_output)(own, read, S, proj[..., 3 * C : 4 * C], o_norm, w_o, cfg)

    def losses(self, w: dict, x: Tensor, y: Tensor):
        """x, y [N, B, CHUNK] int64 -> cross entropy in nats [N, B, CHUNK], log Z of the same shape, loads [L, E]."""
        if x.shape[-1] != CHUNK:
            raise ValueError(f"tokens have shape {tuple(x.shape)}; allowed is [N, B, {CHUNK}]")
        h, loads = self.layers(w, self.embed(w, x.flatten(0, 1)), partial(self.attend, N=len(x)))
        head = w["norm.weight"], w["lm_head.weight"]
        ce, z = self.run(token_losses)(h.flatten(0, 1), *head, y.flatten(), self.cfg.eps)
        return ce.view(x.shape), z.view(x.shape), loads


def initial(cfg: Config, shapes: dict, g: torch.Generator) -> dict:
    """First values by name. Decays start log-uniform in time constants of 1 to 2000 tokens."""
    out = {}
    for name, shape in sorted((shapes[torch.bfloat16] | shapes[torch.float32]).items()):  # A_log before dt_bias
        noise, fan = torch.randn(shape, generator=g), shape[-1]
        leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
        if leaf == "A_log":
            out[name] = (1 + 15 * torch.rand(shape, generator=g)).log()
        elif leaf == "dt_bias":
            tau = torch.exp(torch.rand(shape, generator=g) * math.log(2000.0))
            z = torch.logit((-1 / cfg.gate_floor) / tau.clamp_min(1.0))
            rate = out[name.replace("dt_bias", "A_log")].exp().repeat_interleave(cfg.kda_dim)
            out[name] = z / rate
        elif leaf.endswith("conv1d"):
            out[name] = noise * 0.2 + F.pad(torch.ones(*shape[:-1], 1), (shape[-1] - 1, 0))
        elif leaf.endswith("res_proj"):
            out[name] = noise * 0.05
        elif leaf.endswith("norm"):
            out[name] = torch.ones(shape)
        else:
            outputs = ("o_proj", "down_proj", "routed_expert_up_proj", "lm_head")
            scale = {"embed_tokens": 0.5, "f_b_proj": 0.2 * fan**-0.5}.get(leaf, 0.7 * fan**-0.5)
            out[name] = noise * (0.5 * fan**-0.5 if leaf in outputs else scale)
    return out
