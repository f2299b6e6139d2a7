/* Weights of tokens and draws from them, in one pass each.
 *
 * Every operation rounds as the same line of kernels/sample/sample_rows_ref.py does: change both
 * together. Built without contraction, which would round a product and a sum once. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define TERMS 7

typedef struct {
    float lowest, log2_e, ln2_high, ln2_low, series[TERMS];
} Constants;

void exp_below_f32(float *restrict x, int64_t count, const Constants *constants) {
    const Constants c = *constants;
    for (int64_t i = 0; i < count; i++) {
        const float at = x[i] > c.lowest ? x[i] : c.lowest; /* NaN too is the lowest */
        const float power = floorf(at * c.log2_e + 0.5f);
        const float rest = at - power * c.ln2_high - power * c.ln2_low;
        float sum = c.series[0];
        for (int term = 1; term < TERMS; term++) sum = sum * rest + c.series[term];
        const int32_t bits = ((int32_t)power + 127) << 23;
        float scale;
        memcpy(&scale, &bits, sizeof scale);
        x[i] = sum * scale;
    }
}

/* weights [rows, width], row_stride elements from row to row. uniforms, out: [rows]. */
#define INVERT_CDF(NAME, REAL, UNIT)                                                               \
    void NAME(const REAL *weights, int64_t row_stride, const double *uniforms, int64_t *out,       \
              int64_t rows, int64_t width) {                                                       \
        for (int64_t r = 0; r < rows; r++) {                                                       \
            const REAL *row = weights + r * row_stride;                                            \
            int64_t total = 0, sum = 0, token = 0;                                                 \
            for (int64_t i = 0; i < width; i++) total += (int64_t)(row[i] * UNIT);                 \
            int64_t threshold = (int64_t)(uniforms[r] * (double)total);                            \
            if (threshold > total - 1) threshold = total - 1;                                      \
            for (; token < width; token++)                                                         \
                if ((sum += (int64_t)(row[token] * UNIT)) > threshold) break;                      \
            out[r] = token < width ? token : width - 1;                                            \
        }                                                                                          \
    }

INVERT_CDF(invert_cdf_f32, float, 0x1p43f)
INVERT_CDF(invert_cdf_f64, double, 0x1p43)
