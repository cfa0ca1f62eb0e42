// Memory, warps, barriers and the scheduler.
// One warp executes one block at a time, all of its lanes that stand there together, the lowest block first. A CTA's
// warps take turns; clusters run one after the other, and start together only where one waits for another.
#define RESERVED 1024u
#define PARKED 0x10000000  // a lane that waits; the block it goes on with is in the low bits
#define EXITED 0x7fffffff
#define CLUSTER_BARRIER 16  // number of the cluster's barrier beside the CTA's 0..15
#define WARP_BARRIER 17
#define BUDGET 100000  // blocks of a warp before others get their turn
#define PATIENCE 2000  // rounds without any event before waiting lanes count as deadlocked

enum { OK, BAD_ADDRESS, MISALIGNED, BAD_SHARED, NO_BARRIER, TOO_MANY, NOT_HERE, DEADLOCK, TRAP, NO_MEMORY,
       NO_WARPGROUP, NOT_UNIFORM, DESCRIPTOR };

typedef struct { u64 base, size; } Span;
typedef struct {
    u64 params[64];
    Span spans[64];
    u32 count, grid[3], block[3], cluster[3], smem;
    s32 fault, line;
    u64 address, blocks;
    u32 cta[3], thread;
} Launch;

typedef struct { u64 expected : 20, pending : 20; s64 tx : 23; u64 phase : 1; } Mbar;
typedef struct Cluster Cluster;
typedef struct {
    Launch *launch;
    Cluster *cluster;
    u32 id[3], rank, live, arrived[16], need[16];
    u8 *smem, *warps;
} Cta;
struct Cluster { u32 size, live, arrived, phase; Cta *ctas; };
typedef struct {
    s32 pc[32];
    u32 m[32];  // all ones for lanes that execute the present block
    u32 tid[3][32], bar[32], seen[32];  // seen: the cluster barrier's phase that ends a lane's wait
    u64 issued;  // a hash of the lines of its wgmma, the last of which is in `last`
    s32 last;
    u32 index, stuck;  // stuck: lanes that have polled in vain, asleep until the warp's next turn
    Cta *cta;
} Warp;
typedef void (*Block)(void *);

static u64 events;
static u32 hint, n_warps, warp_bytes;
static u8 dummy[64];

static u8 *fail(Warp *w, int l, s32 why, s32 line, u64 address) {
    Launch *L = w->cta->launch;
    if (!L->fault) {
        L->fault = why, L->line = line, L->address = address;
        memcpy(L->cta, w->cta->id, 12);
        L->thread = 32 * w->index + l;
    }
    return dummy;
}

// ---- memory

static __attribute__((noinline)) u8 *global_at(Warp *w, int l, u64 a, u32 size, s32 line) {
    Launch *L = w->cta->launch;
    if (__builtin_expect(a % size, 0)) return fail(w, l, MISALIGNED, line, a);
    for (u32 i = 0; i <= L->count; i++) {
        u32 s = i ? i - 1 : hint;
        u64 at = a - L->spans[s].base;
        if (at < L->spans[s].size && at + size <= L->spans[s].size) {
            hint = s;
            return (u8 *)a;
        }
    }
    return fail(w, l, BAD_ADDRESS, line, a);
}
static __attribute__((noinline)) u8 *shared_at(Warp *w, int l, u64 a, u32 align, u32 size, int anywhere, s32 line) {
    Cta *c = w->cta;
    u32 rank = (u32)a >> 24, at = a & 0xffffff;
    if (at % align) return fail(w, l, MISALIGNED, line, a);
    if (a >> 32 || (anywhere ? rank >= c->cluster->size : rank != c->rank) || at < RESERVED ||
        at + size > c->launch->smem)
        return fail(w, l, BAD_SHARED, line, a);
    return c->cluster->ctas[rank].smem + at;
}
FN u32 lanes_of(const u32 *m) {
    u32 bits = 0;
    LANES bits |= m[l] & 1u << l;
    return bits;
}

#define ATOMIC(T) \
    FN T atomic_##T(u8 *p, int op, T a, T b) { \
        T x, y; \
        memcpy(&x, p, sizeof x); \
        switch (op) { \
            case 0: y = x + a; break; \
            case 1: y = x < a ? x : a; break; \
            case 2: y = x > a ? x : a; break; \
            case 3: y = (T)((u64)x & (u64)a); break; \
            case 4: y = (T)((u64)x | (u64)a); break; \
            case 5: y = (T)((u64)x ^ (u64)a); break; \
            case 6: y = a; break; \
            case 7: y = x == a ? b : x; break; \
            case 8: y = x >= a ? 0 : x + 1; break; \
            default: y = x == 0 || x > a ? a : x - 1; \
        } \
        memcpy(p, &y, sizeof y); \
        return x; \
    }
ATOMIC(u32) ATOMIC(s32) ATOMIC(u64) ATOMIC(s64) ATOMIC(f32)

// ---- barriers

static void release(Cta *c, u32 bar) {
    events++;
    for (u32 i = 0; i < n_warps; i++) {
        Warp *w = (Warp *)(c->warps + (u64)i * warp_bytes);
        LANES if (w->pc[l] != EXITED && w->pc[l] >= PARKED && w->bar[l] == bar) w->pc[l] &= ~PARKED;
    }
}
static void settle(Cta *c, u32 bar) {
    u32 need = c->need[bar] ? c->need[bar] : c->live;
    if (!c->arrived[bar] || c->arrived[bar] < need) return;
    c->arrived[bar] = 0;
    release(c, bar);
}
static void settle_cluster(Cluster *k) {
    if (!k->arrived || k->arrived < k->live) return;
    k->arrived = 0;
    k->phase++;
    for (u32 i = 0; i < k->size; i++) release(k->ctas + i, CLUSTER_BARRIER);
}
static void park(Warp *w, const u32 *m, u32 bar, s32 next) {
    LANES if (m[l]) w->pc[l] = PARKED | next, w->bar[l] = bar;
}
static void bar_sync(Warp *w, const u32 *m, u32 bar, u32 count, s32 next, s32 line) {
    Cta *c = w->cta;
    if (bar > 15) { fail(w, 0, NO_BARRIER, line, bar); return; }
    park(w, m, bar, next);
    c->arrived[bar] += __builtin_popcount(lanes_of(m));
    c->need[bar] = count;
    settle(c, bar);
}
static void settle_warp(Warp *w) {
    LANES if (w->pc[l] != EXITED && (w->pc[l] < PARKED || w->bar[l] != WARP_BARRIER)) return;
    LANES if (w->pc[l] != EXITED) w->pc[l] &= ~PARKED;
}
static void warp_sync(Warp *w, const u32 *m, s32 next) {
    park(w, m, WARP_BARRIER, next);
    settle_warp(w);
}
static void leave(Warp *w, const u32 *m) {
    Cta *c = w->cta;
    u32 n = __builtin_popcount(lanes_of(m));
    LANES if (m[l]) w->pc[l] = EXITED;
    c->live -= n, c->cluster->live -= n;
    events++;
    for (u32 b = 0; b < 16; b++) if (!c->need[b]) settle(c, b);
    settle_cluster(c->cluster);
    settle_warp(w);
}
static void cluster_arrive(Warp *w, const u32 *m) {
    Cluster *k = w->cta->cluster;
    LANES if (m[l]) w->seen[l] = k->phase + 1;
    k->arrived += __builtin_popcount(lanes_of(m));
    settle_cluster(k);
}
static void cluster_wait(Warp *w, const u32 *m, s32 next) {
    LANES if (m[l]) {
        int done = w->cta->cluster->phase >= w->seen[l];
        w->pc[l] = done ? next : PARKED | next;
        w->bar[l] = CLUSTER_BARRIER;
    }
}
static void mbar_init(Warp *w, int l, u64 a, u32 n, s32 line) {
    Mbar b = {.expected = n, .pending = n};
    memcpy(shared_at(w, l, a, 8, 8, 0, line), &b, 8);
}
static void mbar_update(Warp *w, int l, u64 a, u32 arrivals, s64 tx, s32 line) {
    Mbar b;
    u8 *p = shared_at(w, l, a, 8, 8, 1, line);
    memcpy(&b, p, 8);
    if (b.expected == 0xfffff || !b.expected) { fail(w, l, NO_BARRIER, line, a); return; }
    if (b.pending < arrivals) { fail(w, l, TOO_MANY, line, a); return; }
    b.pending -= arrivals, b.tx += tx;
    if (!b.pending && !b.tx) b.phase ^= 1, b.pending = b.expected, events++;
    memcpy(p, &b, 8);
}
static pred mbar_passed(Warp *w, int l, u64 a, u32 parity, s32 line) {
    Mbar b;
    memcpy(&b, shared_at(w, l, a, 8, 8, 0, line), 8);
    if (b.expected == 0xfffff || !b.expected) { fail(w, l, NO_BARRIER, line, a); return 0; }
    if (b.phase != (parity & 1)) return ~0u;
    w->stuck |= 1u << l;
    return 0;
}
static void bulk(Warp *w, int l, u64 to, u64 from, u32 n, u64 bar, s32 line) {
    if (n % 16) { fail(w, l, MISALIGNED, line, n); return; }
    if (n) {
        u8 *q = shared_at(w, l, to, 16, n, 1, line);
        global_at(w, l, from, 16, line), global_at(w, l, from + n - 16, 16, line);
        if (w->cta->launch->fault) return;
        memcpy(q, (u8 *)from, n);
    }
    mbar_update(w, l, bar, 0, -(s64)n, line);
}

static void bulk_store(Warp *w, int l, u64 to, u64 from, u32 n, s32 line) {
    if (n % 16) { fail(w, l, MISALIGNED, line, n); return; }
    if (!n) return;
    u8 *p = shared_at(w, l, from, 16, n, 0, line);
    global_at(w, l, to, 16, line), global_at(w, l, to + n - 16, 16, line);
    if (!w->cta->launch->fault) memcpy((u8 *)to, p, n);
}

// ---- warps

static void shfl(Warp *w, const u32 *m, int mode, const u32 *a, const u32 *b, const u32 *c, u32 *out, u32 *valid,
                 s32 line) {
    u32 in[32], from[32], ok[32];
    LANES {
        int seg = c[l] >> 8 & 31, cl = c[l] & 31, n = b[l] & 31, low = l & seg, high = low | (cl & ~seg), j;
        j = mode == 0 ? low | (n & ~seg) : mode == 1 ? l ^ n : mode == 2 ? l - n : l + n;
        ok[l] = (mode == 2 ? j >= high : j <= high) ? ~0u : 0;
        from[l] = ok[l] ? j : l;
    }
    memcpy(in, a, sizeof in);
    LANES if (m[l]) {
        if (!m[from[l]]) { fail(w, l, NOT_HERE, line, from[l]); return; }
        if (out) out[l] = in[from[l]];
        if (valid) valid[l] = ok[l];
    }
}
FN f32 part(u32 x, int half, int brain) {
    u16 v = x >> 16 * half;
    return brain ? cvt_f32_bf16(v) : cvt_f32_f16(v);
}
static void mma(int k, int brain, const u32 *const *in, u32 *const *out) {
    double A[16][16], B[16][8], C[16][8];
    const u32 *const *a = in, *const *b = in + k / 4, *const *c = b + k / 8;
    LANES {
        int g = l >> 2, t = 2 * (l & 3);
        for (int i = 0; i < k / 4; i++)
            for (int h = 0; h < 2; h++) A[g + 8 * (i & 1)][t + 8 * (i >> 1) + h] = part(a[i][l], h, brain);
        for (int i = 0; i < k / 8; i++)
            for (int h = 0; h < 2; h++) B[t + 8 * i + h][g] = part(b[i][l], h, brain);
        for (int i = 0; i < 4; i++) C[g + 8 * (i >> 1)][t + (i & 1)] = as_f32(c[i][l]);
    }
    for (int i = 0; i < 16; i++)
        for (int p = 0; p < k; p++)
            for (int j = 0; j < 8; j++) C[i][j] += A[i][p] * B[p][j];
    LANES for (int i = 0; i < 4; i++)
        if (out[i]) out[i][l] = bits_f32((f32)C[(l >> 2) + 8 * (i >> 1)][2 * (l & 3) + (i & 1)]);
}
static void ldmatrix(Warp *w, const u64 *at, int n, int trans, u32 *const *out, s32 line) {
    for (int j = 0; j < n; j++) {
        u16 tile[8][8];
        for (int r = 0; r < 8; r++) memcpy(tile[r], shared_at(w, 8 * j + r, at[8 * j + r], 16, 16, 0, line), 16);
        if (!out[j]) continue;
        LANES {
            int r = l >> 2, c = 2 * (l & 3);
            out[j][l] = trans ? tile[c][r] | (u32)tile[c + 1][r] << 16 : tile[r][c] | (u32)tile[r][c + 1] << 16;
        }
    }
}
FN void whole(Warp *w, const u32 *m, s32 line) {
    LANES if (!m[l] && w->pc[l] != EXITED) { fail(w, l, NOT_HERE, line, l); return; }
}

// ---- the scheduler

static void run_warp(Warp *w, const Block *blocks) {
    Launch *L = w->cta->launch;
    w->stuck = 0;
    for (u32 n = 0; n < BUDGET && !L->fault; n++) {
        s32 low = EXITED;
        LANES low = !(w->stuck >> l & 1) && w->pc[l] < low ? w->pc[l] : low;
        if (low >= PARKED) return;
        LANES w->m[l] = !(w->stuck >> l & 1) && w->pc[l] == low ? ~0u : 0;
        L->blocks++;
        blocks[low](w);
    }
}
static int open_cta(Cluster *k, Launch *L, u32 rank, const u32 *base) {
    Cta *c = k->ctas + rank;
    u32 *cl = L->cluster, threads = L->block[0] * L->block[1] * L->block[2];
    u32 in[3] = {rank % cl[0], rank / cl[0] % cl[1], rank / cl[0] / cl[1]};
    *c = (Cta){.launch = L, .cluster = k, .rank = rank, .live = threads};
    for (int i = 0; i < 3; i++) c->id[i] = base[i] * cl[i] + in[i];
    c->smem = aligned_alloc(1024, (L->smem + 2047) / 1024 * 1024);
    c->warps = calloc(n_warps, warp_bytes);
    if (!c->smem || !c->warps) return 0;
    memset(c->smem, 0xff, L->smem);  // NaN, and no barrier
    for (u32 i = 0; i < n_warps; i++) {
        Warp *w = (Warp *)(c->warps + (u64)i * warp_bytes);
        w->cta = c, w->index = i;
        LANES {
            u32 t = 32 * i + l;
            w->pc[l] = t < threads ? 0 : EXITED;
            w->tid[0][l] = t % L->block[0];
            w->tid[1][l] = t / L->block[0] % L->block[1];
            w->tid[2][l] = t / L->block[0] / L->block[1];
        }
    }
    k->live += threads;
    return 1;
}
// The warps of a warpgroup must have issued the same multiplications.
static void check_warpgroups(Cluster *k) {
    for (u32 i = 0; i < k->size; i++)
        for (u32 j = 0; j < n_warps / 4 * 4; j++) {
            Warp *w = (Warp *)(k->ctas[i].warps + (u64)j * warp_bytes);
            Warp *first = (Warp *)(k->ctas[i].warps + (u64)(j / 4 * 4) * warp_bytes);
            if (w->issued != first->issued) fail(w, 0, NO_WARPGROUP, w->last > first->last ? w->last : first->last, j);
        }
}
static void close_cluster(Cluster *k) {
    for (u32 i = 0; i < k->size; i++) free(k->ctas[i].smem), free(k->ctas[i].warps);
    free(k->ctas);
    k->ctas = 0;
}
static int open_cluster(Cluster *k, Launch *L, u32 n) {
    u32 g[3], size = L->cluster[0] * L->cluster[1] * L->cluster[2];
    for (int i = 0; i < 3; i++) g[i] = L->grid[i] / L->cluster[i];
    u32 base[3] = {n % g[0], n / g[0] % g[1], n / g[0] / g[1]};
    *k = (Cluster){.size = size, .ctas = calloc(size, sizeof(Cta))};
    int ok = k->ctas != 0;
    for (u32 i = 0; ok && i < size; i++) ok = open_cta(k, L, i, base);
    return ok;
}
static void report_waiting(Launch *L, Cluster *open, u32 n) {
    for (u32 i = 0; i < n; i++)
        for (u32 r = 0; open[i].live && r < open[i].size; r++)
            for (u32 j = 0; j < n_warps; j++) {
                Warp *w = (Warp *)(open[i].ctas[r].warps + (u64)j * warp_bytes);
                LANES if (w->pc[l] != EXITED) {
                    fail(w, l, DEADLOCK, w->pc[l] & ~PARKED, w->pc[l] >= PARKED);
                    return;
                }
            }
}
static int run_grid(Launch *L, const Block *blocks, u32 bytes) {
    u32 total = 1, opened = 0, first = 0, quiet = 0;
    for (int i = 0; i < 3; i++) total *= L->grid[i] / L->cluster[i];
    n_warps = (L->block[0] * L->block[1] * L->block[2] + 31) / 32, warp_bytes = (bytes + 63) / 64 * 64, hint = 0;
    Cluster *open = calloc(total, sizeof(Cluster));
    if (!open) return L->fault = NO_MEMORY;
    while (first < total && !L->fault) {
        if (opened == first && !open_cluster(open + opened++, L, first)) L->fault = NO_MEMORY;
        u64 before = events;
        for (u32 i = first; i < opened && !L->fault; i++)
            for (u32 r = 0; open[i].live && r < open[i].size && !L->fault; r++)
                for (u32 j = 0; j < n_warps; j++)
                    run_warp((Warp *)(open[i].ctas[r].warps + (u64)j * warp_bytes), blocks);
        while (first < opened && !open[first].live) check_warpgroups(open + first), close_cluster(open + first++);
        quiet = events == before ? quiet + 1 : 0;
        if (quiet && opened < total) {
            if (!open_cluster(open + opened, L, opened)) L->fault = NO_MEMORY;
            opened++;
            quiet = 0;
        } else if (quiet > PATIENCE) {
            report_waiting(L, open, opened);
        }
    }
    for (u32 i = first; i < opened; i++) if (open[i].ctas) close_cluster(open + i);
    free(open);
    return L->fault;
}
