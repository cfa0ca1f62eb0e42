"""Measured configurations of the skinny GEMM: (N, K) -> tokens M -> configuration.

One H200, 2026-11-29 (M up to 8: kernels of commit 3826f06, before the proxy fence of bulk copies; from 16 on: of commit
d778157) and 2026-11-30 (wgmma: of commit 75bdc6d; for 64 tokens, but for 2112 x 7168, of commit 4dbe023; for
6288 x 7168 and 7168 x 1536 with weights fetched by whole lines; for 4 and 8 tokens of commit 67efff8). Each entry is
the fastest of a sweep; times are microseconds per call, medians of CUDA graph replays over weights rotated through at
least eight copies and 240 MB, first ours, then torch.mm in the same run. Tokens without an entry take that of the next
larger M, or an estimate. All entries as they stand, and with the fence, are timed in tools/bench/results/.
"""

from .linear_direct import DirectConfig
from .linear_fma import FmaConfig
from .linear_mma import MmaConfig
from .linear_wgmma import WgmmaConfig

TUNED: dict[tuple[int, int], dict[int, FmaConfig | MmaConfig | DirectConfig]] = {
    (6288, 7168): {
        1: FmaConfig(1, 28, 4, 262),  # 21.18, 25.54
        2: MmaConfig(48, 1, 1, 8, 512, 4, 1, True),  # 22.02, 26.17
        4: MmaConfig(48, 1, 1, 8, 256, 7, 1, True),  # 22.48, 25.52
        8: MmaConfig(48, 1, 1, 8, 256, 7, 1, True),  # 23.62, 24.70
        16: MmaConfig(48, 1, 1, 8, 256, 6, 2, True),  # 24.62, 25.47
        32: MmaConfig(224, 4, 7, 1, 64, 5, 4, False),  # 28.20, 25.99
        64: MmaConfig(192, 3, 6, 1, 64, 5, 2, False),  # 33.75, 24.95
    },
    (2112, 7168): {
        1: MmaConfig(16, 1, 1, 8, 512, 12, 1, True),  # 7.88, 12.26
        2: MmaConfig(16, 1, 1, 8, 512, 11, 1, True),  # 8.49, 12.54
        4: MmaConfig(16, 1, 1, 8, 512, 10, 1, True),  # 8.88, 12.27
        8: MmaConfig(16, 1, 1, 8, 512, 8, 1, True),  # 9.68, 12.62
        16: MmaConfig(64, 3, 1, 8, 256, 5, 2, True),  # 9.77, 13.06
        32: MmaConfig(64, 3, 1, 8, 256, 4, 2, True),  # 11.33, 13.42
        64: MmaConfig(144, 8, 3, 2, 32, 6, 4, False),  # 15.44, 13.88
    },
    (1536, 7168): {
        1: FmaConfig(1, 14, 4, 384),  # 6.28, 9.48
        2: MmaConfig(16, 1, 1, 8, 512, 11, 1, True),  # 6.92, 9.43
        4: MmaConfig(16, 1, 1, 8, 512, 10, 1, True),  # 7.09, 9.66
        8: MmaConfig(16, 1, 1, 8, 512, 8, 1, True),  # 8.09, 9.53
        16: MmaConfig(64, 4, 1, 8, 256, 5, 2, True),  # 7.75, 9.95
        32: MmaConfig(64, 4, 1, 8, 256, 4, 2, True),  # 8.96, 10.09
        64: MmaConfig(128, 8, 4, 2, 128, 4, 4, False),  # 11.87, 10.07
    },
    (7168, 1536): {
        1: FmaConfig(2, 3, 14, 128),  # 6.17, 7.95
        2: FmaConfig(1, 6, 14, 128),  # 6.32, 7.92
        4: MmaConfig(32, 1, 1, 8, 256, 5, 1, True),  # 6.53, 7.90
        8: MmaConfig(64, 1, 1, 8, 256, 5, 1, True),  # 6.79, 7.86
        16: MmaConfig(64, 1, 1, 8, 256, 5, 1, True),  # 7.25, 7.95
        32: MmaConfig(64, 1, 1, 8, 256, 4, 2, True),  # 8.69, 8.04
        64: MmaConfig(128, 2, 4, 2, 128, 4, 4, False),  # 11.74, 8.12
    },
    (2304, 1536): {
        1: FmaConfig(1, 6, 6, 384),  # 2.53, 5.11
        2: FmaConfig(1, 6, 8, 288),  # 3.17, 5.09
        4: MmaConfig(16, 1, 1, 8, 512, 3, 1, True),  # 3.49, 5.11
        16: MmaConfig(96, 8, 1, 4, 192, 1, 2, True),  # 4.16, 5.12
        32: MmaConfig(64, 3, 1, 4, 64, 7, 4, False),  # 5.12, 5.17
        64: MmaConfig(96, 5, 3, 2, 64, 4, 4, False),  # 7.89, 5.25
    },
    (1536, 128): {
        1: FmaConfig(4, 1, 10, 39),  # 1.12, 2.52
        2: FmaConfig(1, 1, 14, 110),  # 1.45, 2.54
        16: DirectConfig(8, 1),  # 1.05, 2.55
        32: DirectConfig(8, 1),  # 1.18, 2.57
        64: DirectConfig(16, 2),  # 1.56, 2.59
    },
}

# Where sm_90a's own form is faster still; the other targets stay with the table above.
HOPPER: dict[tuple[int, int], dict[int, WgmmaConfig]] = {
    (6288, 7168): {
        8: WgmmaConfig(3, 3, 4, 4, 4, 2),  # 23.37, 24.78
        16: WgmmaConfig(1, 3, 4, 4, 4, 2),  # 23.84, 24.37
        32: WgmmaConfig(3, 3, 4, 4, 4, 2),  # 24.30, 25.20
        64: WgmmaConfig(3, 3, 4, 4, 2, 4, 4),  # 25.32, 24.84
    },
    (2112, 7168): {
        4: WgmmaConfig(1, 6, 8, 8, 2, 1),  # 8.57, 13.64
        8: WgmmaConfig(1, 6, 8, 8, 2, 1),  # 8.62, 13.48
        16: WgmmaConfig(1, 6, 8, 8, 4, 2),  # 8.88, 12.65
        32: WgmmaConfig(1, 6, 8, 4, 4, 2),  # 9.87, 12.89
        64: WgmmaConfig(3, 8, 4, 2, 8, 4),  # 12.23, 13.23
    },
    (1536, 7168): {
        4: WgmmaConfig(1, 7, 8, 8, 2, 1),  # 6.69, 10.40
        8: WgmmaConfig(1, 7, 8, 8, 2, 1),  # 6.73, 10.31
        16: WgmmaConfig(1, 8, 8, 8, 4, 2),  # 7.05, 9.62
        32: WgmmaConfig(1, 7, 8, 4, 4, 2),  # 7.90, 9.83
        64: WgmmaConfig(2, 8, 4, 4, 4, 8, 4),  # 9.20, 10.23
    },
    (7168, 1536): {
        4: WgmmaConfig(1, 2, 8, 8, 3, 2),  # 6.36, 8.41
        8: WgmmaConfig(1, 2, 8, 8, 3, 2),  # 6.44, 8.48
        16: WgmmaConfig(1, 3, 4, 4, 4, 2),  # 6.67, 7.76
        32: WgmmaConfig(3, 3, 4, 4, 4, 2),  # 7.54, 7.88
        64: WgmmaConfig(3, 3, 4, 4, 4, 4, 2),  # 8.68, 8.95
    },
    (2304, 1536): {
        4: WgmmaConfig(1, 6, 8, 8, 1, 1),  # 3.05, 5.46
        8: WgmmaConfig(1, 6, 8, 8, 1, 1),  # 3.11, 5.49
        16: WgmmaConfig(1, 4, 8, 8, 2, 2),  # 3.64, 5.09
        32: WgmmaConfig(1, 6, 8, 4, 2, 2),  # 4.13, 5.15
        64: WgmmaConfig(1, 3, 8, 8, 2, 4, 4),  # 4.78, 5.30
    },
}
