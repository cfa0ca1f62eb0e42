"""The part of `translate` for asynchronous work: mbarriers, copies, fences, warpgroup matrix multiplication."""

import re

from .ir import Const, Op, Read
from .parse import Statement

SCOPES = ("cta", "cluster", "gpu", "sys")


class Asynchronous:
    def op_mapa(self, s: Statement) -> Op:
        if s.op != "mapa.shared::cluster.u32":
            raise s.unsupported()
        args = self.read(s, s.operands[1], "u32"), self.read(s, s.operands[2], "u32")
        return self.make(s, "pure", out=(self.reg(s, s.operands[0]),), result="u32", args=args, more={"helper": "mapa"})

    def op_mbarrier(self, s: Statement) -> Op:
        op = s.op.replace(".shared::cta", ".shared").replace(".release.cta", "").replace(".acquire.cta", "")
        address = next((t for t in s.operands if t.startswith("[")), None)
        at = address and self.address(s, address)
        if op == "mbarrier.init.shared.b64":
            return self.make(s, "mbar_init", at=at, args=(self.read(s, s.operands[1], "u32"),))
        if op == "mbarrier.inval.shared.b64":
            return self.make(s, "mbar_init", at=at, args=(Read(Const(0), "u32"),))
        if m := re.fullmatch(r"mbarrier\.(arrive|arrive\.expect_tx|expect_tx)(?:\.noComplete)?\.shared\.b64", op):
            after = s.operands[s.operands.index(address) + 1 :]
            amount = self.read(s, after[0], "u32") if after else Read(Const(1), "u32")
            one, none = Read(Const(1), "u32"), Read(Const(0), "u32")
            arrivals, tx = {"arrive": (amount, none), "arrive.expect_tx": (one, amount), "expect_tx": (none, amount)}[
                m[1]
            ]
            return self.make(s, "mbar_arrive", at=at, args=(arrivals, tx))
        if op in ("mbarrier.try_wait.parity.shared.b64", "mbarrier.test_wait.parity.shared.b64"):
            out = (self.reg(s, s.operands[0]),)
            return self.make(s, "mbar_wait", out=out, result="pred", at=at, args=(self.read(s, s.operands[2], "u32"),))
        raise s.unsupported()

    def op_cp(self, s: Statement) -> Op:
        op = re.sub(r"\.L2::(cache_hint|\d+B)", "", s.op).replace("shared::cta", "shared")
        if m := re.fullmatch(r"cp\.async\.(ca|cg)\.shared\.global", op):
            if len(s.operands) > 4:
                raise s.unsupported("a cache policy operand")
            size = int(s.operands[2], 0)
            read = self.read(s, s.operands[3], "u32") if len(s.operands) > 3 else Read(Const(size), "u32")
            return self.make(s, "cp_async", at=self.address(s, s.operands[0]), args=(read,),
                             more={"source": self.address(s, s.operands[1]), "bytes": size})  # fmt: skip
        if op in ("cp.async.commit_group", "cp.async.wait_all"):
            kind = "cp_commit" if "commit_group" in op else "cp_wait"
            return self.make(s, kind, more={"keep": 0, "all": True})
        if op == "cp.async.wait_group":
            return self.make(s, "cp_wait", more={"keep": int(s.operands[0], 0), "all": False})
        if m := re.fullmatch(r"cp\.async\.mbarrier\.arrive(\.noinc)?\.shared\.b64", op):
            if not m[1]:
                raise s.unsupported("only the .noinc form is executed")
            return self.make(s, "cp_arrive", at=self.address(s, s.operands[0]))
        if re.fullmatch(r"cp\.async\.bulk\.shared(::cluster)?\.global\.mbarrier::complete_tx::bytes", op):
            more = {"source": self.address(s, s.operands[1]), "bar": self.address(s, s.operands[3])}
            return self.make(s, "bulk", at=self.address(s, s.operands[0]),
                             args=(self.read(s, s.operands[2], "u32"),), more=more)  # fmt: skip
        if re.fullmatch(r"cp\.async\.bulk\.global\.shared\.bulk_group", op):
            return self.make(s, "bulk_store", at=self.address(s, s.operands[0]),
                             args=(self.read(s, s.operands[2], "u32"),),
                             more={"source": self.address(s, s.operands[1])})  # fmt: skip
        if op == "cp.async.bulk.commit_group":
            return self.make(s, "bulk_commit")
        if m := re.fullmatch(r"cp\.async\.bulk\.wait_group(\.read)?", op):
            return self.make(s, "bulk_wait", more={"keep": int(s.operands[0], 0), "read": bool(m[1])})
        if s.op.startswith("cp.async.bulk.prefetch.L2"):
            return []
        raise s.unsupported()

    def op_griddepcontrol(self, s: Statement) -> Op:
        return self.make(s, "pdl", more={"wait": s.parts[1] == "wait"})

    def op_fence(self, s: Statement) -> Op:
        scope = next((p for p in s.parts if p in SCOPES), "gpu")
        kind = "proxy" if "proxy" in s.parts else "mbarrier_init" if "mbarrier_init" in s.parts else "memory"
        if kind != "proxy":
            return self.make(s, "fence", more={"scope": scope, "what": kind})
        if not s.parts[2].startswith("async"):  # aliases and tensor maps: nothing that is executed here
            return self.make(s, "fence", more={"scope": scope, "what": "other"})
        text = s.op.partition("async")[2]
        spaces = [name for name in ("shared", "global") if name in text] or ["shared", "global"]
        return self.make(s, "fence", more={"scope": scope, "what": "proxy", "spaces": spaces})

    op_membar = op_fence

    def op_wgmma(self, s: Statement) -> Op:
        forms = {f"wgmma.{op}.sync.aligned": kind for op, kind in
                 (("fence", "wg_fence"), ("commit_group", "wg_commit"), ("wait_group", "wg_wait"))}  # fmt: skip
        if kind := forms.get(s.op):
            return self.make(s, kind, more={"keep": int(s.operands[0], 0)} if kind == "wg_wait" else {})
        m = re.fullmatch(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.\2", s.op)
        if not m or int(m[1]) % 8 or not 8 <= int(m[1]) <= 256:
            raise s.unsupported()
        d, n, registers = self.vector(s, s.operands[0]), int(m[1]), s.operands[1].startswith("{")
        a = self.vector(s, s.operands[1])
        if len(s.operands) != (7 if registers else 8) or len(d) != n // 2 or (registers and len(a) != 4):
            raise s.unsupported("another number of operands")
        scale, sign_a, sign_b, *trans = s.operands[3:]
        signs = {"1": 1, "-1": -1}
        if sign_a not in signs or sign_b not in signs or not set(trans) <= {"0", "1"}:
            raise s.unsupported("allowed are scales 1 and -1, transpositions 0 and 1")
        trans = [t == "1" for t in ["0", *trans][-2:]]
        args = (self.read(s, scale, "pred"), self.read(s, s.operands[2], "u64"))
        args += tuple(self.read(s, t, "u32" if registers else "u64") for t in a)
        out = tuple(self.reg(s, t) for t in d)
        if None in out or len(set(out)) < len(out):
            raise s.unsupported("accumulators are different registers")
        return self.make(s, "wgmma", out=out, result="f32", args=args,
                         more=dict(n=n, type=m[2], signs=(signs[sign_a], signs[sign_b]), trans=trans))  # fmt: skip
