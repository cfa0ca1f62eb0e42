// Matrix multiplication by warpgroups: each warp multiplies its 16 of the 64 rows of A, at once.

// Byte address in the CTA's shared memory of element (row, k) of a matrix descriptor; trans: neighbours differ in row.
FN u32 place(u64 d, u32 r, u32 k, int trans) {
    const u32 rows[4] = {1, 8, 4, 2}, units = rows[d >> 62];  // 16-byte units of a row of the swizzling pattern
    u32 start = (d & 0x3fff) << 4, lead = (d >> 16 & 0x3fff) << 4, stride = (d >> 32 & 0x3fff) << 4, at;
    if (trans && units == 1) at = r / 8 * stride + k / 8 * lead + k % 8 * 16;
    else if (trans) at = r / 8 % units * 16 + r / 8 / units * lead + k % 8 * 16 * units + k / 8 * stride;
    else at = r / 8 * stride + r % 8 * 16 * units + k / 8 * (units == 1 ? lead : 16);
    at += start;
    return (at ^ (at >> 7 & (units - 1)) << 4) + (trans ? r % 8 : k % 8) * 2;
}
// Elements (first + r, k) to to[r * by_row + k * by_k].
static void matrix(Warp *w, u64 d, u32 first, u32 rows, int trans, int brain, double *to, u32 by_row, u32 by_k, s32 line) {
    if (d & ~0xc0003fff3fff3fffull) { fail(w, 0, DESCRIPTOR, line, d); return; }
    for (u32 r = 0; r < rows; r += trans ? 8 : 1)
        for (u32 k = 0; k < 16; k += trans ? 1 : 8) {
            u16 unit[8];
            memcpy(unit, shared_at(w, 0, place(d, first + r, k, trans) | w->cta->rank << 24, 16, 16, 0, line), 16);
            for (u32 i = 0; i < 8; i++)
                to[(trans ? r + i : r) * by_row + (trans ? k : k + i) * by_k] = part(unit[i], 0, brain);
        }
}
FN int uniform(const u64 *x) {
    LANES if (x[l] != x[0]) return 0;
    return 1;
}
// a: the registers of A, or 0 for descriptor da.
static void wgmma(Warp *w, const u32 *m, u32 n, int brain, int sign, int trans_a, int trans_b, const u64 *scale,
                  const u64 *db, const u64 *da, const u32 *const *a, u32 *const *out, s32 line) {
    static double A[16][16], B[16 * 256], C[16][256];
    if (lanes_of(m) != ~0u || w->index / 4 * 4 + 4 > n_warps) { fail(w, 0, NO_WARPGROUP, line, w->index); return; }
    if (!uniform(scale) || !uniform(db) || !uniform(da)) { fail(w, 0, NOT_UNIFORM, line, 0); return; }
    w->issued = w->issued * 31 + line, w->last = line;
    matrix(w, db[0], 0, n, trans_b, brain, B, 1, n, line);
    if (!a) matrix(w, da[0], w->index % 4 * 16, 16, trans_a, brain, A[0], 16, 1, line);
    LANES {
        int g = l >> 2, t = 2 * (l & 3);
        for (int i = 0; a && i < 4; i++)
            for (int h = 0; h < 2; h++) A[g + 8 * (i & 1)][t + 8 * (i >> 1) + h] = part(a[i][l], h, brain);
        for (u32 i = 0; i < n / 2; i++)
            C[g + 8 * (i >> 1 & 1)][i / 4 * 8 + t + (i & 1)] = scale[0] ? as_f32(out[i][l]) : 0;
    }
    for (int i = 0; i < 16; i++)
        for (int p = 0; p < 16; p++) {
            double x = sign * A[i][p];
            for (u32 j = 0; j < n; j++) C[i][j] += x * B[p * n + j];
        }
    LANES for (u32 i = 0; i < n / 2; i++)
        out[i][l] = bits_f32((f32)C[(l >> 2) + 8 * (i >> 1 & 1)][i / 4 * 8 + 2 * (l & 3) + (i & 1)]);
}
