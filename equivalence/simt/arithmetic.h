// Arithmetic of one lane. Each helper of opcodes.py is a function here; pred is all ones or zero.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint8_t u8;
typedef int8_t s8;
typedef uint16_t u16;
typedef int16_t s16;
typedef uint32_t u32;
typedef int32_t s32;
typedef uint64_t u64;
typedef int64_t s64;
typedef float f32;
typedef u16 bf16;
typedef u16 f16;
typedef u32 pred;  // all ones or zero
#define LANES for (int l = 0; l < 32; l++)
#define FN static inline __attribute__((always_inline))

FN f32 as_f32(u32 x) { f32 y; memcpy(&y, &x, 4); return y; }
FN u32 bits_f32(f32 x) { u32 y; memcpy(&y, &x, 4); return y; }

// ---- integers

#define SIZED(T, U, W) \
    FN T add_##T(T a, T b) { return (T)((U)a + (U)b); } \
    FN T sub_##T(T a, T b) { return (T)((U)a - (U)b); } \
    FN T mul_##T(T a, T b) { return (T)((u64)(U)a * (u64)(U)b); } \
    FN T mad_##T(T a, T b, T c) { return (T)((u64)(U)a * (u64)(U)b + (u64)(U)c); } \
    FN T min_##T(T a, T b) { return a < b ? a : b; } \
    FN T max_##T(T a, T b) { return a > b ? a : b; } \
    FN T shr_##T(T a, u32 n) { return n < W ? (T)(a >> n) : (T)(a < 0 ? -1 : 0); } \
    FN pred eq_##T(T a, T b) { return a == b ? ~0u : 0; } \
    FN pred ne_##T(T a, T b) { return a != b ? ~0u : 0; } \
    FN pred lt_##T(T a, T b) { return a < b ? ~0u : 0; } \
    FN pred le_##T(T a, T b) { return a <= b ? ~0u : 0; } \
    FN pred gt_##T(T a, T b) { return a > b ? ~0u : 0; } \
    FN pred ge_##T(T a, T b) { return a >= b ? ~0u : 0; }
SIZED(u16, u16, 16) SIZED(s16, u16, 16) SIZED(u32, u32, 32) SIZED(s32, u32, 32) SIZED(u64, u64, 64) SIZED(s64, u64, 64)
// Division by zero gives all ones, as the hardware does; the smallest number by -1 gives itself.
#define UNSIGNED(T) \
    FN T div_##T(T a, T b) { return b ? a / b : (T)~(T)0; } \
    FN T rem_##T(T a, T b) { return b ? a % b : a; } \
    FN T and_##T(T a, T b) { return a & b; } \
    FN T or_##T(T a, T b) { return a | b; } \
    FN T xor_##T(T a, T b) { return a ^ b; } \
    FN T not_##T(T a) { return (T)~a; } \
    FN T shl_##T(T a, u32 n) { return n < 8 * sizeof(T) ? (T)(a << n) : 0; } \
    FN T selp_##T(T a, T b, pred p) { return p ? a : b; }
UNSIGNED(u16) UNSIGNED(u32) UNSIGNED(u64)
#define SIGNED(T, U) \
    FN T neg_##T(T a) { return (T)(0 - (U)a); } \
    FN T abs_##T(T a) { return a < 0 ? neg_##T(a) : a; } \
    FN T div_##T(T a, T b) { return b == 0 ? (T)-1 : b == -1 ? neg_##T(a) : a / b; } \
    FN T rem_##T(T a, T b) { return b == 0 ? a : b == -1 ? 0 : a % b; }
SIGNED(s16, u16) SIGNED(s32, u32) SIGNED(s64, u64)
#define WIDE(T, D) \
    FN D mulwide_##T(T a, T b) { return (D)a * (D)b; } \
    FN D madwide_##T(T a, T b, D c) { return (D)((u64)((D)a * (D)b) + (u64)c); } \
    FN T mulhi_##T(T a, T b) { return (T)(((D)a * (D)b) >> (8 * sizeof(T))); }
WIDE(u16, u32) WIDE(s16, s32) WIDE(u32, u64) WIDE(s32, s64)
FN u64 mulhi_u64(u64 a, u64 b) { return (u64)(((unsigned __int128)a * b) >> 64); }
FN s64 mulhi_s64(s64 a, s64 b) { return (s64)(((__int128)a * b) >> 64); }

FN pred and_pred(pred a, pred b) { return a & b; }
FN pred or_pred(pred a, pred b) { return a | b; }
FN pred xor_pred(pred a, pred b) { return a ^ b; }
FN pred not_pred(pred a) { return ~a; }
FN pred mov_pred(pred a) { return a; }

FN u32 lop3(u32 a, u32 b, u32 c, u32 t) {
    u32 r = 0;
    for (int i = 0; i < 8; i++)
        if (t >> i & 1) r |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return r;
}
FN u32 prmt(u32 a, u32 b, u32 s) {
    u64 w = (u64)b << 32 | a;
    u32 r = 0;
    for (int i = 0; i < 4; i++) {
        u32 n = s >> 4 * i & 15, v = w >> 8 * (n & 7) & 255;
        r |= (n & 8 ? (v & 128 ? 255u : 0u) : v) << 8 * i;
    }
    return r;
}
FN u32 bfe_u32(u32 a, u32 at, u32 n) {
    at &= 255, n &= 255;
    u32 x = at < 32 ? a >> at : 0;
    return n < 32 ? x & ((1u << n) - 1) : x;
}
FN s32 bfe_s32(s32 a, u32 at, u32 n) {
    at &= 255, n &= 255;
    if (!n) return 0;
    s64 x = (s64)a >> (at < 63 ? at : 63);
    return n < 32 && at + n < 32 ? (s32)((u32)x << (32 - n)) >> (32 - n) : (s32)x;
}
FN u32 bfi(u32 a, u32 b, u32 at, u32 n) {
    at &= 255, n &= 255;
    u64 mask = at < 32 ? ((n < 32 ? 1ull << n : 1ull << 32) - 1) << at : 0;
    return (u32)((b & ~mask) | (at < 32 ? (u64)a << at & mask : 0));
}
FN u32 popc(u32 a) { return __builtin_popcount(a); }
FN u32 clz(u32 a) { return a ? __builtin_clz(a) : 32; }
FN u32 brev(u32 a) { u32 r = 0; for (int i = 0; i < 32; i++) r |= (a >> i & 1) << (31 - i); return r; }
FN u32 shfl_wrap(u32 a, u32 b, u32 n) { n &= 31; return n ? b << n | a >> (32 - n) : b; }
FN u32 shfr_wrap(u32 a, u32 b, u32 n) { n &= 31; return n ? a >> n | b << (32 - n) : a; }
FN u32 mapa(u32 a, u32 rank) { return (a & 0xffffff) | rank << 24; }

FN u32 pack2_u32(u16 a, u16 b) { return a | (u32)b << 16; }
FN u64 pack2_u64(u32 a, u32 b) { return a | (u64)b << 32; }
FN u64 pack4_u64(u16 a, u16 b, u16 c, u16 d) { return a | (u64)b << 16 | (u64)c << 32 | (u64)d << 48; }
FN u16 pack2_u16(u8 a, u8 b) { return a | b << 8; }
FN u32 pack4_u32(u8 a, u8 b, u8 c, u8 d) { return a | b << 8 | (u32)c << 16 | (u32)d << 24; }
FN u16 part_u32_u16(u32 a, u32 at) { return a >> at; }
FN u32 part_u64_u32(u64 a, u32 at) { return a >> at; }
FN u16 part_u64_u16(u64 a, u32 at) { return a >> at; }
FN u8 part_u16_u8(u16 a, u32 at) { return a >> at; }
FN u8 part_u32_u8(u32 a, u32 at) { return a >> at; }

// ---- floating point

#define NAN32 as_f32(0x7fffffffu)
FN f32 add_f32(f32 a, f32 b) { return a + b; }
FN f32 sub_f32(f32 a, f32 b) { return a - b; }
FN f32 mul_f32(f32 a, f32 b) { return a * b; }
FN f32 neg_f32(f32 a) { return as_f32(bits_f32(a) ^ 0x80000000u); }
FN f32 abs_f32(f32 a) { return as_f32(bits_f32(a) & 0x7fffffffu); }
FN f32 min_f32(f32 a, f32 b) {
    if (a != a || b != b) return a == a ? a : b == b ? b : NAN32;
    return a == b ? as_f32(bits_f32(a) | bits_f32(b)) : a < b ? a : b;
}
FN f32 max_f32(f32 a, f32 b) {
    if (a != a || b != b) return a == a ? a : b == b ? b : NAN32;
    return a == b ? as_f32(bits_f32(a) & bits_f32(b)) : a > b ? a : b;
}
FN f32 minnan_f32(f32 a, f32 b) { return a != a || b != b ? NAN32 : min_f32(a, b); }
FN f32 maxnan_f32(f32 a, f32 b) { return a != a || b != b ? NAN32 : max_f32(a, b); }
FN f32 saturate(f32 a) { return a > 0 ? (a < 1 ? a : 1) : 0; }  // NaN gives 0
FN f32 fma_rn(f32 a, f32 b, f32 c) { return fmaf(a, b, c); }
// Towards minus infinity: the product is exact in double, and so is the error of the one addition.
FN f32 fma_rm(f32 a, f32 b, f32 c) {
    double p = (double)a * b, s = p + c, v = s - p, e = (p - (s - v)) + (c - v);
    f32 r = (f32)s;
    if (isfinite(s) && ((double)r > s || ((double)r == s && e < 0))) r = nextafterf(r, -INFINITY);
    return r;
}
FN f32 div_rn(f32 a, f32 b) { return a / b; }
FN f32 rcp_rn(f32 a) { return 1.0f / a; }
FN f32 sqrt_rn(f32 a) { return sqrtf(a); }
FN f32 flush(f32 a) { return fabsf(a) < 0x1p-126f ? copysignf(0.0f, a) : a; }
FN f32 ex2_approx(f32 a) { return (f32)exp2((double)a); }
FN f32 lg2_approx(f32 a) { return (f32)log2((double)a); }
FN f32 rcp_approx(f32 a) { return 1.0f / a; }
FN f32 rsqrt_approx(f32 a) { return (f32)(1.0 / sqrt((double)a)); }
FN f32 sqrt_approx(f32 a) { return sqrtf(a); }
FN f32 sin_approx(f32 a) { return (f32)sin((double)a); }
FN f32 cos_approx(f32 a) { return (f32)cos((double)a); }
FN f32 tanh_approx(f32 a) { return (f32)tanh((double)a); }
#define FTZ(F) FN f32 F##_approx_ftz(f32 a) { return flush(F##_approx(flush(a))); }
FTZ(ex2) FTZ(lg2) FTZ(rcp) FTZ(rsqrt) FTZ(sqrt) FTZ(sin) FTZ(cos) FTZ(tanh)
#define COMPARED(OP, E) FN pred OP##_f32(f32 a, f32 b) { return (E) ? ~0u : 0; }
COMPARED(eq, a == b) COMPARED(ne, a < b || a > b) COMPARED(lt, a < b) COMPARED(le, a <= b) COMPARED(gt, a > b)
COMPARED(ge, a >= b) COMPARED(equ, !(a < b || a > b)) COMPARED(neu, a != b) COMPARED(ltu, !(a >= b))
COMPARED(leu, !(a > b)) COMPARED(gtu, !(a <= b)) COMPARED(geu, !(a < b)) COMPARED(num, a == a && b == b)
COMPARED(nan, a != a || b != b)

// A double to a type of fewer than 51 bits, rounded once: x + error is the exact value, |error| below half an ulp of x.
FN double odd(double x, double error) {
    u64 w;
    memcpy(&w, &x, 8);
    if (error != 0 && isfinite(x) && !(w & 1)) w += (error > 0) == (x > 0) ? 1 : -1;
    memcpy(&x, &w, 8);
    return x;
}
FN double exact_fma(double a, double b, double c) {  // a * b exact; rounded to odd
    double p = a * b, s = p + c, v = s - p;
    return odd(s, (p - (s - v)) + (c - v));
}

FN f32 cvt_f32_bf16(bf16 a) { return as_f32((u32)a << 16); }
FN bf16 cvt_bf16_f32(f32 a) {
    u32 w = bits_f32(a);
    return a != a ? 0x7fff : (w + 0x7fff + (w >> 16 & 1)) >> 16;
}
FN f32 cvt_f32_f16(f16 a) {
    u32 s = (u32)(a & 0x8000) << 16, e = a >> 10 & 31, m = a & 1023;
    if (e == 31) return m ? NAN32 : as_f32(s | 0x7f800000u);
    return as_f32(s | bits_f32(e ? as_f32((e + 112) << 23 | m << 13) : (f32)m * 0x1p-24f));
}
// To a float of m mantissa bits, to nearest even; codes above `most` become `beyond`.
FN u32 narrow(double a, int bias, int m, u32 most, u32 beyond, u32 nan, int width) {
    u32 sign = signbit(a) ? 1u << (width - 1) : 0;
    if (a != a) return nan;
    double x = fabs(a);
    int e;
    frexp(x, &e);
    e = x == 0 || e - 1 < 1 - bias ? 1 - bias : e - 1;
    double n = isinf(x) ? 1e30 : rint(ldexp(x, m - e));
    if (n > 1e29) return sign | beyond;
    u64 code = (u64)n + ((u64)(e + bias - 1) << m);
    return sign | (code > most ? beyond : (u32)code);
}
FN f16 half_of(double a) { return narrow(a, 15, 10, 0x7bff, 0x7c00, 0x7fff, 16); }
FN bf16 brain_of(double a) { return narrow(a, 127, 7, 0x7f7f, 0x7f80, 0x7fff, 16); }
FN f16 cvt_f16_f32(f32 a) { return half_of(a); }
FN u32 cvt_bf16x2_f32(f32 hi, f32 lo) { return (u32)cvt_bf16_f32(hi) << 16 | cvt_bf16_f32(lo); }
FN u32 cvt_f16x2_f32(f32 hi, f32 lo) { return (u32)half_of(hi) << 16 | half_of(lo); }
FN u16 cvt_e4m3x2_f32(f32 hi, f32 lo) {
    return narrow(hi, 7, 3, 0x7e, 0x7e, 0x7f, 8) << 8 | narrow(lo, 7, 3, 0x7e, 0x7e, 0x7f, 8);
}
FN u16 cvt_e5m2x2_f32(f32 hi, f32 lo) {
    return narrow(hi, 15, 2, 0x7b, 0x7b, 0x7f, 8) << 8 | narrow(lo, 15, 2, 0x7b, 0x7b, 0x7f, 8);
}
FN u8 cvt_e2m1x2_f32(f32 hi, f32 lo) { return narrow(hi, 1, 1, 7, 7, 7, 4) << 4 | narrow(lo, 1, 1, 7, 7, 7, 4); }
FN u32 cvt_f16x2_e5m2x2(u16 a) { return (u32)(a & 0xff00) << 16 | (u32)(a & 0xff) << 8; }
FN f16 half_e4m3(u8 a) {
    u32 s = (u32)(a & 0x80) << 8, e = a >> 3 & 15, m = a & 7;
    if ((a & 0x7f) == 0x7f) return 0x7fff;
    return s | (e ? (e + 8) << 10 | m << 7 : half_of(m * 0x1p-9));
}
FN u32 cvt_f16x2_e4m3x2(u16 a) { return (u32)half_e4m3(a >> 8) << 16 | half_e4m3(a & 255); }
FN f16 half_e2m1(u8 a) {
    u32 s = (u32)(a & 8) << 12, e = a >> 1 & 3, m = a & 1;
    return s | (e ? (e + 14) << 10 | m << 9 : m ? 0x3800 : 0);
}
FN u32 cvt_f16x2_e2m1x2(u8 a) { return (u32)half_e2m1(a >> 4) << 16 | half_e2m1(a & 15); }

#define ROUNDED(R, F) \
    FN f32 cvt_##R##_f32(f32 a) { return F(a); } \
    FN s32 cvt_##R##_s32(f32 a) { \
        double x = F((double)a); \
        return x != x ? 0 : x >= 0x1p31 ? INT32_MAX : x < -0x1p31 ? INT32_MIN : (s32)x; \
    } \
    FN u32 cvt_##R##_u32(f32 a) { \
        double x = F((double)a); \
        return x != x || x < 0 ? 0 : x >= 0x1p32 ? UINT32_MAX : (u32)x; \
    } \
    FN s64 cvt_##R##_s64(f32 a) { \
        double x = F((double)a); \
        return x != x ? INT64_MIN : x >= 0x1p63 ? INT64_MAX : x < -0x1p63 ? INT64_MIN : (s64)x; \
    } \
    FN u64 cvt_##R##_u64(f32 a) { \
        double x = F((double)a); \
        return x != x ? 1ull << 63 : x < 0 ? 0 : x >= 0x1p64 ? UINT64_MAX : (u64)x; \
    }
ROUNDED(rzi, trunc) ROUNDED(rni, rint) ROUNDED(rmi, floor) ROUNDED(rpi, ceil)

FN f32 lo_f32(u64 a) { return as_f32((u32)a); }
FN f32 hi_f32(u64 a) { return as_f32((u32)(a >> 32)); }
FN u64 two_f32(f32 lo, f32 hi) { return bits_f32(lo) | (u64)bits_f32(hi) << 32; }
FN u64 add_f32x2(u64 a, u64 b) { return two_f32(lo_f32(a) + lo_f32(b), hi_f32(a) + hi_f32(b)); }
FN u64 sub_f32x2(u64 a, u64 b) { return two_f32(lo_f32(a) - lo_f32(b), hi_f32(a) - hi_f32(b)); }
FN u64 mul_f32x2(u64 a, u64 b) { return two_f32(lo_f32(a) * lo_f32(b), hi_f32(a) * hi_f32(b)); }
FN u64 fma_f32x2(u64 a, u64 b, u64 c) {
    return two_f32(fmaf(lo_f32(a), lo_f32(b), lo_f32(c)), fmaf(hi_f32(a), hi_f32(b), hi_f32(c)));
}
// Sums and products of two halves are right when rounded to fp32 first; fma goes through rounding to odd.
#define HALF(T, UP, DOWN) \
    FN T add_##T(T a, T b) { return DOWN(UP(a) + UP(b)); } \
    FN T sub_##T(T a, T b) { return DOWN(UP(a) - UP(b)); } \
    FN T mul_##T(T a, T b) { return DOWN(UP(a) * UP(b)); } \
    FN u32 add_##T##x2(u32 a, u32 b) { return (u32)DOWN(UP(a >> 16) + UP(b >> 16)) << 16 | DOWN(UP(a) + UP(b)); } \
    FN u32 sub_##T##x2(u32 a, u32 b) { return (u32)DOWN(UP(a >> 16) - UP(b >> 16)) << 16 | DOWN(UP(a) - UP(b)); } \
    FN u32 mul_##T##x2(u32 a, u32 b) { return (u32)DOWN(UP(a >> 16) * UP(b >> 16)) << 16 | DOWN(UP(a) * UP(b)); } \
    FN f32 add_f32_##T(T a, f32 b) { return UP(a) + b; } \
    FN f32 sub_f32_##T(T a, f32 b) { return UP(a) - b; } \
    FN f32 fma_f32_##T(T a, T b, f32 c) { return fmaf(UP(a), UP(b), c); }
#define bf16_up(x) cvt_f32_bf16((u16)(x))
#define f16_up(x) cvt_f32_f16((u16)(x))
HALF(bf16, bf16_up, cvt_bf16_f32) HALF(f16, f16_up, cvt_f16_f32)
FN bf16 fma_bf16(bf16 a, bf16 b, bf16 c) { return brain_of(exact_fma(bf16_up(a), bf16_up(b), bf16_up(c))); }
FN f16 fma_f16(f16 a, f16 b, f16 c) { return half_of(exact_fma(f16_up(a), f16_up(b), f16_up(c))); }
FN u32 fma_bf16x2(u32 a, u32 b, u32 c) { return (u32)fma_bf16(a >> 16, b >> 16, c >> 16) << 16 | fma_bf16(a, b, c); }
FN u32 fma_f16x2(u32 a, u32 b, u32 c) { return (u32)fma_f16(a >> 16, b >> 16, c >> 16) << 16 | fma_f16(a, b, c); }
