// What PyTorch has no good kernel for in a step of generation on a CPU, in float32: attention over paged keys and
// values, and small operations in a row that are one here. kernels.py and paged.py call it.

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define inlined static inline __attribute__((always_inline))

inlined vec all(float x) { return x - (vec){}; }

inlined vec where(ivec yes, vec a, vec b) { return (vec)(((ivec)a & yes) | ((ivec)b & ~yes)); }

inlined float sum_of(vec x) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}

inlined float max_of(vec x) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
    return x[0];
}

// e to the x, which is kept within 87 of 0. Cephes' polynomial.
inlined vec exp_of(vec x) {
    x = where(x < -87.0f, all(-87.0f), where(x > 87.0f, all(87.0f), x));
    vec shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (vec)(((ivec)shifted + 127) << 23);
}

// Rotary positions of one head: x * cos + (the halves of x swapped, the first negative) * sin, times `by`.
inlined void rotate(float *to, const float *x, const float *cos, const float *sin, int64_t width, float by) {
    int64_t half = width / 2;
    for (int64_t w = 0; w < half; w++) to[w] = (x[w] * cos[w] - x[w + half] * sin[w]) * by;
    for (int64_t w = half; w < width; w++) to[w] = (x[w] * cos[w] + x[w - half] * sin[w]) * by;
}

// ---------------------------------------------------------------- attention
//
// Each request's queries read its own slots, where they lie. The sums are those of FlashAttention (Dao et al., 2022):
// blocks of keys, a running maximum and a running sum for each row. A row is one query of one head; rows whose heads
// share keys are computed together, so that each key is fetched once. The order of additions for a row depends on
// nothing but its own request.

#define KEYS 64 // of a block: scores of one row are four vectors
#define ROWS 32 // of a task at most: scores, sums and turned keys stay in the first cache
#define TURN 16 // rows from which on it pays to turn a block of keys, so that products need no sum across lanes
#define HIDDEN -1e30f

typedef struct {
    const float *query;
    float *keys, *values, *out;
    const int64_t *slots;            // read, request after request
    const int64_t *spans;            // of each: first query, queries, first of its slots, slots
    int64_t query_head, query_token; // strides, in floats
    int64_t heads, groups, key_width, value_width, window;
    const float *new_keys, *new_values; // of this step, [groups, tokens, width]; or none: they are written already
    const int64_t *write;               // the slots they go to
    int64_t new_count, key_head, key_token, value_head, value_token;
    const float *cos, *sin; // [tokens, width], for queries and new keys that are not rotated yet; or none
    float scale;
} Call;

// Write what is new into its slots.
inlined void put(const Call *call) {
    int64_t groups = call->groups, kw = call->key_width, vw = call->value_width;
    for (int64_t t = 0; t < call->new_count; t++)
        for (int64_t g = 0; g < groups; g++) {
            const float *key = call->new_keys + t * call->key_token + g * call->key_head;
            float *to = call->keys + (call->write[t] * groups + g) * kw;
            if (call->cos)
                rotate(to, key, call->cos + t * kw, call->sin + t * kw, kw, 1);
            else
                memcpy(to, key, kw * sizeof(float));
            memcpy(call->values + (call->write[t] * groups + g) * vw,
                   call->new_values + t * call->value_token + g * call->value_head, vw * sizeof(float));
        }
}

// Sums of 16 vectors, one in each lane: halves, quarters, pairs and lanes of two vectors become one vector's.
#define FROM(s, l) (((l) & ~(2 * s - 1)) + (l) % s + ((l) / s % 2 ? LANES : 0))
#define LANES_FROM(s, o) \
    FROM(s, 0) + o, FROM(s, 1) + o, FROM(s, 2) + o, FROM(s, 3) + o, FROM(s, 4) + o, FROM(s, 5) + o, FROM(s, 6) + o, \
    FROM(s, 7) + o, FROM(s, 8) + o, FROM(s, 9) + o, FROM(s, 10) + o, FROM(s, 11) + o, FROM(s, 12) + o, \
    FROM(s, 13) + o, FROM(s, 14) + o, FROM(s, 15) + o
#define FOLD(s) \
    for (int i = 0; i < s; i++) \
        x[i] = __builtin_shufflevector(x[i], x[i + s], LANES_FROM(s, 0)) + \
               __builtin_shufflevector(x[i], x[i + s], LANES_FROM(s, s));
inlined vec sums_of(vec *x) {
    FOLD(8) FOLD(4) FOLD(2) FOLD(1)
    return x[0];
}

// scores[key] of `count` keys, each of W floats, for one row. `keys` has entries up to a multiple of LANES.
inlined void by_row(int W, const float *query, const float *const *keys, int count, float *scores) {
    for (int at = 0; at < count; at += LANES) {
        vec parts[LANES];
        for (int j = 0; j < LANES; j++) {
            parts[j] = *(const vec *)query * *(const vec *)keys[at + j];
            for (int w = LANES; w < W; w += LANES)
                parts[j] += *(const vec *)(query + w) * *(const vec *)(keys[at + j] + w);
        }
        *(vec *)(scores + at) = sums_of(parts);
    }
}

// the same of a block that is turned: [W][KEYS]
inlined void by_columns(int R, int W, const float *query, const float *turned, float *scores) {
    vec sums[R][KEYS / LANES];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < KEYS / LANES; v++) sums[r][v] = (vec){};
    for (int w = 0; w < W; w++)
        for (int v = 0; v < KEYS / LANES; v++) {
            vec key = *(const vec *)(turned + w * KEYS + v * LANES);
            for (int r = 0; r < R; r++) sums[r][v] += query[r * W + w] * key;
        }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < KEYS / LANES; v++) *(vec *)(scores + r * KEYS + v * LANES) = sums[r][v];
}

// sums[row] += weights[row][key] * value, for R rows
inlined void add_values(int R, int W, const float *weights, const float *const *values, int count, float *sums) {
    for (int w = 0; w < W; w += 4 * LANES) {
        int vecs = W - w < 4 * LANES ? (W - w) / LANES : 4;
        vec part[R][4];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < vecs; v++) part[r][v] = *(const vec *)(sums + r * W + w + v * LANES);
        for (int j = 0; j < count; j++)
            for (int v = 0; v < vecs; v++) {
                vec value = *(const vec *)(values[j] + w + v * LANES);
                for (int r = 0; r < R; r++) part[r][v] += weights[r * KEYS + j] * value;
            }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < vecs; v++) *(vec *)(sums + r * W + w + v * LANES) = part[r][v];
    }
}

// Ask for the keys and values of slots [from, to), for all groups: they lie side by side, and the next block's are on
// their way while this one is computed. Worth it for a lone query only: more have enough to do.
inlined void fetch(const Call *call, const int64_t *slots, int64_t from, int64_t to) {
    int64_t keys = call->groups * call->key_width, values = call->groups * call->value_width;
    for (int64_t j = from; j < to; j++) {
        for (int64_t w = 0; w < keys; w += LANES) __builtin_prefetch(call->keys + slots[j] * keys + w, 0, 2);
        for (int64_t w = 0; w < values; w += LANES) __builtin_prefetch(call->values + slots[j] * values + w, 0, 2);
    }
}

#define STRIPS(R, CALL) \
    switch (R) { \
    case 1: { enum { N = 1 }; CALL; break; } \
    case 2: { enum { N = 2 }; CALL; break; } \
    case 3: { enum { N = 3 }; CALL; break; } \
    default: { enum { N = 4 }; CALL; break; } \
    }

// Queries [first, first + count) of a span, for the heads of one group. W and V: widths in whole vectors.
inlined void task(const Call *call, int W, int V, const int64_t *span, int group, int64_t first, int count) {
    int share = call->heads / call->groups, rows = share * count;
    int64_t kw = call->key_width, vw = call->value_width, total = span[3];
    int64_t position = total - span[1] + first; // of the first query
    const int64_t *slots = call->slots + span[2];
    float query[ROWS * W], sums[ROWS * V], scores[ROWS * KEYS], top[ROWS], weight[ROWS];
    float key_block[W * KEYS], value_block[V == vw ? 1 : V * KEYS];
    const float *keys[KEYS], *values[KEYS];
    memset(sums, 0, sizeof sums);
    if (W != kw) {
        memset(query, 0, sizeof query);
        memset(key_block, 0, sizeof key_block);
    }
    if (V != vw) memset(value_block, 0, sizeof value_block);
    for (int q = 0; q < count; q++)
        for (int h = 0; h < share; h++) {
            int64_t token = span[0] + first + q;
            const float *from = call->query + (group * share + h) * call->query_head + token * call->query_token;
            float *to = query + (q * share + h) * W;
            if (call->cos)
                rotate(to, from, call->cos + token * kw, call->sin + token * kw, kw, call->scale);
            else
                for (int w = 0; w < kw; w++) to[w] = from[w] * call->scale;
        }
    for (int r = 0; r < rows; r++) top[r] = HIDDEN, weight[r] = 0;

    int64_t begin = call->window && position >= call->window ? position - call->window + 1 : 0;
    int64_t end = position + count; // the last query sees itself
    for (int64_t at = begin; at < end; at += KEYS) {
        int n = end - at < KEYS ? end - at : KEYS;
        if (group == 0 && count == 1)
            fetch(call, slots, at == begin ? at : at + KEYS, at + 2 * KEYS < end ? at + 2 * KEYS : end);
        for (int j = 0; j < n; j++) {
            keys[j] = call->keys + (slots[at + j] * call->groups + group) * kw;
            values[j] = call->values + (slots[at + j] * call->groups + group) * vw;
        }
        if (V != vw)
            for (int j = 0; j < n; j++) values[j] = memcpy(value_block + j * V, values[j], vw * sizeof(float));
        if (rows >= TURN) {
            for (int j = 0; j < n; j++)
                for (int w = 0; w < kw; w++) key_block[w * KEYS + j] = keys[j][w];
            for (int j = n; j < KEYS; j++)
                for (int w = 0; w < kw; w++) key_block[w * KEYS + j] = 0;
            for (int r = 0; r < rows; r += 4)
                STRIPS(rows - r, by_columns(N, W, query + r * W, key_block, scores + r * KEYS))
        } else {
            if (W != kw)
                for (int j = 0; j < n; j++) keys[j] = memcpy(key_block + j * W, keys[j], kw * sizeof(float));
            for (int j = n; j % LANES; j++) keys[j] = keys[n - 1];
            for (int r = 0; r < rows; r++) by_row(W, query + r * W, keys, n, scores + r * KEYS);
        }
        for (int r = 0; r < rows; r++) {
            float *score = scores + r * KEYS;
            int64_t sees = position + r / share + 1 - at; // keys of this block before that
            int to = sees < n ? sees : n, from = 0;
            if (call->window && sees - call->window > 0) from = sees - call->window;
            for (int j = 0; j < from && j < KEYS; j++) score[j] = HIDDEN;
            for (int j = to < 0 ? 0 : to; j < KEYS; j++) score[j] = HIDDEN;
            if (to <= from) {
                memset(score, 0, KEYS * sizeof(float));
                continue;
            }
            vec most = *(vec *)score;
            for (int v = 1; v < KEYS / LANES; v++) {
                vec x = *(vec *)(score + v * LANES);
                most = where(x > most, x, most);
            }
            float highest = max_of(most);
            if (highest > top[r] || top[r] == HIDDEN) {
                float shrink = exp_of(all(top[r] - highest))[0];
                for (int w = 0; w < V; w += LANES) *(vec *)(sums + r * V + w) *= shrink;
                weight[r] *= shrink;
                top[r] = highest;
            }
            vec added = {};
            for (int v = 0; v < KEYS / LANES; v++) {
                vec x = *(vec *)(score + v * LANES), e = exp_of(x - top[r]);
                e = where(x == HIDDEN, (vec){}, e);
                *(vec *)(score + v * LANES) = e;
                added += e;
            }
            weight[r] += sum_of(added);
        }
        for (int r = 0; r < rows; r += 4)
            STRIPS(rows - r, add_values(N, V, scores + r * KEYS, values, n, sums + r * V))
    }
    for (int q = 0; q < count; q++)
        for (int h = 0; h < share; h++) {
            int r = q * share + h;
            float *to = call->out + ((span[0] + first + q) * call->heads + group * share + h) * vw;
            for (int w = 0; w < vw; w++) to[w] = sums[r * V + w] / weight[r];
        }
}

#define TASK(NAME, W, V) \
    static __attribute__((noinline)) void NAME( \
        const Call *call, const int64_t *span, int group, int64_t first, int count) { \
        task(call, W, V, span, group, first, count); \
    }
#define WHOLE(WIDTH) (int)((WIDTH + LANES - 1) / LANES * LANES)
TASK(task_64, 64, 64)
TASK(task_128, 128, 128)
TASK(task_any, WHOLE(call->key_width), WHOLE(call->value_width))

// Writes the new keys and values, then attends. `tasks` [count, 3]: a span, the first of its queries that the task is
// for, and how many.
void headway_attend(const Call *call, const int64_t *tasks, int64_t count, int threads) {
    int64_t width = call->key_width == call->value_width ? call->key_width : 0;
    if (call->new_keys) put(call);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t i = 0; i < count; i++) {
        const int64_t *one = tasks + 3 * i, *span = call->spans + 4 * one[0];
        for (int group = 0; group < call->groups; group++)
            (width == 64 ? task_64 : width == 128 ? task_128 : task_any)(call, span, group, one[1], (int)one[2]);
    }
}

// ---------------------------------------------------------------- small operations in a row

#define SHARE 16384 // numbers for which another thread is worth waking

// out = x / sqrt(mean(x^2) + eps) * weight, for each of `rows` rows of `width`.
void headway_rms(const float *x, const float *weight, float *out, int64_t rows, int64_t width, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > SHARE)
    for (int64_t r = 0; r < rows; r++) {
        const float *row = x + r * width;
        float *to = out + r * width, total = 0;
        vec sums = {};
        int64_t w = 0;
        for (; w + LANES <= width; w += LANES) {
            vec part = *(const vec *)(row + w);
            sums += part * part;
        }
        for (; w < width; w++) total += row[w] * row[w];
        float by = 1 / sqrtf((total + sum_of(sums)) / width + eps);
        for (w = 0; w < width; w++) to[w] = row[w] * by * weight[w];
    }
}

// out = gate / (1 + e^-gate) * up. Rows of gate and up lie `gate_row` and `up_row` numbers apart.
void headway_silu_mul(const float *gate, const float *up, float *out, int64_t rows, int64_t width, int64_t gate_row,
                      int64_t up_row, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > SHARE)
    for (int64_t r = 0; r < rows; r++) {
        const float *g = gate + r * gate_row, *u = up + r * up_row;
        float *to = out + r * width;
        int64_t w = 0;
        for (; w + LANES <= width; w += LANES) {
            vec x = *(const vec *)(g + w);
            *(vec *)(to + w) = x / (1.0f + exp_of(-x)) * *(const vec *)(u + w);
        }
        for (; w < width; w++) to[w] = g[w] / (1 + expf(-g[w])) * u[w];
    }
}

// Rotary positions of [tokens, heads, width], by cos and sin [tokens, width]. A head and a token of x lie `x_head` and
// `x_token` numbers apart.
void headway_rope(const float *x, const float *cos, const float *sin, float *out, int64_t tokens, int64_t heads,
                  int64_t width, int64_t x_token, int64_t x_head, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * heads * width > SHARE)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++)
            rotate(out + (t * heads + h) * width, x + t * x_token + h * x_head, cos + t * width, sin + t * width,
                   width, 1);
}
