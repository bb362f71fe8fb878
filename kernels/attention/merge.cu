// Attention over parts as attention over their union: each part counts as its total, below the highest top. A block
// merges one row; its threads share the parts, since there are few rows and reading one part after the other waits.
//
// SIZE channels of a row, THREADS of a block, whole warps.

#define NOTHING __uint_as_float(0xff800000u)

namespace {
// Channels of a thread, threads of a part, and parts side by side.
constexpr int WIDE = SIZE % 4 ? 1 : 4;
constexpr int ACROSS = SIZE / WIDE < THREADS ? SIZE / WIDE : THREADS;
constexpr int BESIDE = THREADS / ACROSS;
}  // namespace

// Fill `out` (rows, SIZE) from `outs` (parts, rows, SIZE), `tops` and `totals` (parts, rows); of rows, `heads` by
// `heads`, `sinks` (heads,) or null are one part more, without a value.
extern "C" __global__ void __launch_bounds__(THREADS) merge(
    const float* outs, const float* tops, const float* totals, const float* sinks, float* out, int parts, int rows, int heads) {
    __shared__ float highest[THREADS / LANES], part_totals[BESIDE], sums[BESIDE][ACROSS * WIDE];
    const int thread = threadIdx.x, row = blockIdx.x, group = thread / ACROSS;

    const float sink = sinks ? sinks[row % heads] : NOTHING;
    float top = sink;
    for (int part = thread; part < parts; part += THREADS) top = fmaxf(top, tops[(i64)part * rows + row]);
    top = lanes_max(top);
    if (thread % LANES == 0) highest[thread / LANES] = top;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < THREADS / LANES; ++warp) top = fmaxf(top, highest[warp]);
    const float anchor = top == NOTHING ? 0.0f : top;

    // More than one turn only where a row is wider than a block, which has one part at a time then.
    for (int first = thread % ACROSS * WIDE; first < SIZE; first += ACROSS * WIDE) {
        float total = group == 0 ? expf(sink - anchor) : 0.0f, sum[WIDE] = {};
        if (group < BESIDE) {
#pragma unroll 4
            for (int part = group; part < parts; part += BESIDE) {
                const i64 at = (i64)part * rows + row;
                u32 words[WIDE];
                load_words<4 * WIDE, 4 * WIDE>((const u8*)(outs + at * SIZE + first), words);
                const float weight = expf(tops[at] - anchor) * totals[at];
                total += weight;
                // What saw nothing may hold anything.
#pragma unroll
                for (int i = 0; i < WIDE; ++i)
                    if (weight != 0.0f) sum[i] = fmaf(weight, __uint_as_float(words[i]), sum[i]);
            }
        }
        if (BESIDE > 1) {
            if (group < BESIDE) {
#pragma unroll
                for (int i = 0; i < WIDE; ++i) sums[group][first + i] = sum[i];
                if (first == 0) part_totals[group] = total;
            }
            __syncthreads();
#pragma unroll 4
            for (int other = 1; other < BESIDE; ++other) {
                total += part_totals[other];
#pragma unroll
                for (int i = 0; i < WIDE; ++i) sum[i] += sums[other][first + i];
            }
        }
        if (group == 0)
#pragma unroll
            for (int i = 0; i < WIDE; ++i) out[(i64)row * SIZE + first + i] = total == 0.0f ? 0.0f : sum[i] / total;
    }
}
