/* Products of some rows with a bfloat16 weight, summed in float32, over all threads.
 *
 * A few rows cost what reading the weight costs; bfloat16 halves that. The weight is packed in
 * panels: PANEL outputs of one input lie side by side, so that lanes are outputs and nothing is
 * summed across lanes. Output j and output LANES + j share a word, the latter in its upper half:
 * a shift widens the one, a mask the other. Each output is summed over the inputs in order,
 * whatever other rows there are. */

#include <stdint.h>
#include <string.h>

#define LANES 16
#define PANEL 32

#define MOST_ROWS 8 /* 16 sums, 2 weights and 1 input in the 32 registers of AVX-512 */

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

/* Round to nearest even; a NaN stays one. */
static inline halves narrow(floats from) {
    words bits = (words)from;
    words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    words is_nan = (words)(ints)(from != from);
    return __builtin_convertvector((rounded & ~is_nan) | (0x7fc0 & is_nan), halves);
}

static inline void put(void *y, int64_t at, floats sums, int to_bf16) {
    if (to_bf16) {
        halves half = narrow(sums);
        memcpy((uint16_t *)y + at, &half, sizeof half);
    } else {
        memcpy((float *)y + at, &sums, sizeof sums);
    }
}

/* y[t, at .. at + PANEL) = x[t] . panel + bias, for `rows` rows: a constant where it is inlined. */
static inline __attribute__((always_inline)) void multiply_rows(
    const float *x, int64_t k, const uint16_t *panel, const float *bias, void *y, int64_t at,
    int64_t n, int to_bf16, const int rows) {
    floats low[MOST_ROWS], high[MOST_ROWS];
    for (int t = 0; t < rows; t++) {
        memcpy(&low[t], bias, sizeof low[t]);
        memcpy(&high[t], bias + LANES, sizeof high[t]);
    }
    for (int64_t i = 0; i < k; i++, panel += PANEL) {
        words pair;
        memcpy(&pair, panel, sizeof pair);
        floats weight_low = (floats)(pair << 16), weight_high = (floats)(pair & 0xffff0000);
#pragma GCC unroll 8
        for (int t = 0; t < rows; t++) {
            floats input = x[t * k + i] - (floats){0};
            low[t] += weight_low * input;
            high[t] += weight_high * input;
        }
    }
    for (int t = 0; t < rows; t++) {
        put(y, t * n + at, low[t], to_bf16);
        put(y, t * n + at + LANES, high[t], to_bf16);
    }
}

static void multiply_panel(const float *x, int64_t rows, int64_t k, const uint16_t *panel,
                           const float *bias, void *y, int64_t at, int64_t n, int to_bf16) {
    for (; rows >= MOST_ROWS; rows -= MOST_ROWS, x += MOST_ROWS * k, at += MOST_ROWS * n)
        multiply_rows(x, k, panel, bias, y, at, n, to_bf16, MOST_ROWS);
    if (rows & 4) {
        multiply_rows(x, k, panel, bias, y, at, n, to_bf16, 4);
        x += 4 * k, at += 4 * n;
    }
    if (rows & 2) {
        multiply_rows(x, k, panel, bias, y, at, n, to_bf16, 2);
        x += 2 * k, at += 2 * n;
    }
    if (rows & 1) multiply_rows(x, k, panel, bias, y, at, n, to_bf16, 1);
}

/* x, y: float [rows, k] and [rows, n]; panels [n / PANEL, k, PANEL]; bias float [n]. */
void linear_f32(const float *x, const uint16_t *panels, const float *bias, float *y, int64_t rows,
                int64_t k, int64_t n, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t at = 0; at < n; at += PANEL)
        multiply_panel(x, rows, k, panels + at * k, bias + at, y, at, n, 0);
}

/* The same with x and y in bfloat16; wide_x is room for rows x k floats. */
void linear_bf16(const uint16_t *x, const uint16_t *panels, const float *bias, uint16_t *y,
                 float *wide_x, int64_t rows, int64_t k, int64_t n, int threads) {
    for (int64_t i = 0; i < rows * k; i++) {
        uint32_t bits = (uint32_t)x[i] << 16;
        memcpy(wide_x + i, &bits, sizeof bits);
    }
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t at = 0; at < n; at += PANEL)
        multiply_panel(wide_x, rows, k, panels + at * k, bias + at, y, at, n, 1);
}
