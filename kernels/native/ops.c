/* The small operations of a decoder layer for few rows on a CPU, one row at a time on one thread.
 *
 * A small model's decode calls some twenty operators a layer, each worth a few microseconds of
 * dispatch; these take four. Plain C, no headers of PyTorch: it compiles in a second. Every row is
 * computed alike whatever other rows there are. Included once a scalar type by the block below. */

#ifndef SCALAR

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float f32_load(float x) { return x; }
static inline float f32_store(float x) { return x; }

static inline float bf16_load(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* Round to nearest even; a NaN stays one. */
static inline uint16_t bf16_store(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* exp by range reduction and a polynomial of degree 5 (Cephes' coefficients), about 1 ulp; written
 * so that compilers vectorise it. 0 below the least normal float. */
static inline float exp_f32(float x) {
    float clamped = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float n = nearbyintf(clamped * 1.44269504f);
    float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return x < -87.0f ? 0.0f : p * scale;
}

#define NAME(op) op##_f32
#define SCALAR float
#define LOAD f32_load
#define STORE f32_store
#include "ops.c"
#undef NAME
#undef SCALAR
#undef LOAD
#undef STORE

#define NAME(op) op##_bf16
#define SCALAR uint16_t
#define LOAD bf16_load
#define STORE bf16_store
#include "ops.c"

#else

/* total = x + residual (where there is one), out = total / rms(total) * weight; both rounded to the
 * type before the product, as transformers rounds them. */
void NAME(add_rms_norm)(const SCALAR *x, int64_t stride_x, const SCALAR *residual,
                        int64_t stride_residual, const SCALAR *weight, SCALAR *total, SCALAR *out,
                        int64_t rows, int64_t hidden, float eps) {
    for (int64_t row = 0; row < rows; row++) {
        const SCALAR *in = x + row * stride_x;
        if (residual) {
            const SCALAR *other = residual + row * stride_residual;
            SCALAR *sum = total + row * hidden;
            for (int64_t i = 0; i < hidden; i++) sum[i] = STORE(LOAD(in[i]) + LOAD(other[i]));
            in = sum;
        }
        float square = 0.0f;
#pragma omp simd reduction(+ : square)
        for (int64_t i = 0; i < hidden; i++) square += LOAD(in[i]) * LOAD(in[i]);
        float scale = 1.0f / sqrtf(square / (float)hidden + eps);
        SCALAR *result = out + row * hidden;
        for (int64_t i = 0; i < hidden; i++)
            result[i] = STORE(LOAD(STORE(LOAD(in[i]) * scale)) * LOAD(weight[i]));
    }
}

/* out = silu(gate) * up; a row of x is gate, then up. */
void NAME(silu_and_mul)(const SCALAR *x, int64_t stride, SCALAR *out, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; row++) {
        const SCALAR *gate = x + row * stride, *up = gate + width;
        SCALAR *result = out + row * width;
        for (int64_t i = 0; i < width; i++) {
            float g = LOAD(gate[i]);
            result[i] = STORE(LOAD(STORE(g / (1.0f + exp_f32(-g)))) * LOAD(up[i]));
        }
    }
}

static void NAME(rotate)(const SCALAR *in, SCALAR *out, const float *cos_sin, int64_t head_dim,
                         int64_t rotary_dim) {
    int64_t half = rotary_dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float first = LOAD(in[i]), second = LOAD(in[i + half]);
        float cosine = cos_sin[i], sine = cos_sin[half + i];
        out[i] = STORE(first * cosine - second * sine);
        out[i + half] = STORE(second * cosine + first * sine);
    }
    memcpy(out + rotary_dim, in + rotary_dim, (size_t)(head_dim - rotary_dim) * sizeof(SCALAR));
}

/* Rotate q into out, and k into its slot beside v. Heads of a row lie side by side. */
void NAME(rope_store_kv)(const SCALAR *q, int64_t stride_q, const SCALAR *k, int64_t stride_k,
                         const SCALAR *v, int64_t stride_v, const int64_t *positions,
                         const float *cos_sin, int64_t rotary_dim, SCALAR *k_cache,
                         SCALAR *v_cache, const int64_t *loc, SCALAR *out, int64_t tokens,
                         int64_t q_heads, int64_t kv_heads, int64_t head_dim) {
    int64_t kv_size = kv_heads * head_dim;
    for (int64_t t = 0; t < tokens; t++) {
        const float *angles = cos_sin + positions[t] * rotary_dim;
        for (int64_t h = 0; h < q_heads; h++)
            NAME(rotate)(q + t * stride_q + h * head_dim, out + (t * q_heads + h) * head_dim,
                         angles, head_dim, rotary_dim);
        for (int64_t h = 0; h < kv_heads; h++)
            NAME(rotate)(k + t * stride_k + h * head_dim,
                         k_cache + loc[t] * kv_size + h * head_dim, angles, head_dim, rotary_dim);
        memcpy(v_cache + loc[t] * kv_size, v + t * stride_v, (size_t)kv_size * sizeof(SCALAR));
    }
}

static inline float NAME(dot)(const float *restrict a, const SCALAR *restrict b, int64_t size) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += a[i] * LOAD(b[i]);
    return sum;
}

/* One query over keys begin .. end - 1 of one head, softmax in float32, scores capped by
 * softcap * tanh(score / softcap) where softcap is above 0. `place` is where the head
 * begins in a slot; scores has room for a score a key, query and acc for a head each. */
static void NAME(attend_head)(const float *restrict query, const SCALAR *restrict k_cache,
                              const SCALAR *restrict v_cache, const int32_t *restrict slots,
                              int64_t begin, int64_t end, int64_t kv_size, int64_t place,
                              int64_t head_dim, float softcap, float *restrict scores,
                              float *restrict acc, SCALAR *restrict out) {
    float best = -INFINITY, total = 0.0f;
    for (int64_t t = begin; t < end; t++) {
        scores[t] = NAME(dot)(query, k_cache + slots[t] * kv_size + place, head_dim);
        if (softcap > 0.0f) scores[t] = softcap * tanhf(scores[t] / softcap);
        best = scores[t] > best ? scores[t] : best;
    }
    for (int64_t t = begin; t < end; t++) scores[t] = exp_f32(scores[t] - best);
    for (int64_t i = 0; i < head_dim; i++) acc[i] = 0.0f;
    for (int64_t t = begin; t < end; t++) {
        const SCALAR *restrict value = v_cache + slots[t] * kv_size + place;
        float weight = scores[t];
        total += weight;
        for (int64_t i = 0; i < head_dim; i++) acc[i] += weight * LOAD(value[i]);
    }
    for (int64_t i = 0; i < head_dim; i++) out[i] = STORE(acc[i] / total);
}

/* One query a request over its keys. `table` holds the slots of a request's tokens, a row a
 * request. scratch: the longest end, plus two heads. */
void NAME(attend_decode)(const SCALAR *q, const SCALAR *k_cache, const SCALAR *v_cache,
                         const int32_t *table, int64_t stride_table, const int64_t *table_rows,
                         const int64_t *begins, const int64_t *ends, SCALAR *out, float *scratch,
                         int64_t requests, int64_t q_heads, int64_t kv_heads, int64_t head_dim,
                         float scale, float softcap) {
    int64_t group = q_heads / kv_heads, kv_size = kv_heads * head_dim;
    float *query = scratch, *acc = scratch + head_dim, *scores = scratch + 2 * head_dim;
    for (int64_t r = 0; r < requests; r++) {
        const int32_t *slots = table + table_rows[r] * stride_table;
        for (int64_t h = 0; h < q_heads; h++) {
            const SCALAR *head = q + (r * q_heads + h) * head_dim;
            for (int64_t i = 0; i < head_dim; i++) query[i] = scale * LOAD(head[i]);
            NAME(attend_head)(query, k_cache, v_cache, slots, begins[r], ends[r], kv_size,
                              (h / group) * head_dim, head_dim, softcap, scores, acc,
                              out + (r * q_heads + h) * head_dim);
        }
    }
}

#endif
