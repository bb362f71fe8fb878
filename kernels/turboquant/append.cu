// Quantise-append of rotated rows: the bytes of `reference.encode_keys`, `encode_values` and `encode_plain_keys`, in
// their order of operations, to be compiled without contraction. One warp a row of a head.
//
// A row whose length is no finite float16 has no bytes here: it is stored as a row of zeros and counted in
// `refused`, so that nothing that reads the plane meets a NaN and whoever synchronises can see that it happened.
//
// FORMAT, SIZE, WARPS a block, what `rows.cu` needs, and BOUND_i: float32 bits of the positive bounds, from the least.

#ifndef BOUND_1
#define BOUND_1 0
#define BOUND_2 0
#endif

namespace {

using Kept = Turned<FORMAT, SIZE>;
// Rows shorter than this have no direction, residuals not longer than this no signs.
constexpr float TINY = 1e-12f;

// The codes of rotated coordinates; what they leave over is left in the row.
DEVICE void take_codes(Warped<SIZE>& row, u32 (&codes)[Warped<SIZE>::SLOTS]) {
    constexpr int half = 1 << (Kept::BITS - 1);
    const float bounds[4] = {0.0f, __uint_as_float(BOUND_0), __uint_as_float(BOUND_1), __uint_as_float(BOUND_2)};
#pragma unroll
    for (int slot = 0; slot < row.SLOTS; ++slot) {
        const float found = row.x[slot];
        float level = -Kept::level(half - 1);
        codes[slot] = 0;
#pragma unroll
        for (int step = 1; step < 2 * half; ++step) {
            const bool reached = found >= (step < half ? -bounds[half - step] : bounds[step - half]);
            codes[slot] = reached ? step : codes[slot];
            level = reached ? (step < half ? -Kept::level(half - 1 - step) : Kept::level(step - half)) : level;
        }
        row.x[slot] = found - level;
    }
}

// The bits of a lane, BITS for each of its channels in a piece of the row, to their place in a run of them.
template <int BITS>
DEVICE void store_packed(u8* run, u32 bits, int piece, int lane) {
    using W = Warped<SIZE>;
    constexpr int field = BITS * W::EACH, sharing = field < 8 ? 8 / field : 1;
    if constexpr (sharing > 1) bits = lanes_or<sharing>(bits << field * (lane % sharing));
    if (lane % sharing || !W::within(piece * W::EACH, lane)) return;
    u8* to = run + (piece * LANES + lane) * field / 8;
#pragma unroll
    for (int byte = 0; byte < (field + 7) / 8; ++byte) to[byte] = (u8)(bits >> (8 * byte));
}

// One bit of each channel of a lane in a piece, as `bit_of` a slot says.
template <class BitOf>
DEVICE void store_bits(u8* run, int piece, int lane, BitOf bit_of) {
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < Warped<SIZE>::EACH; ++i) bits |= (bit_of(piece * Warped<SIZE>::EACH + i) ? 1u : 0u) << i;
    store_packed<1>(run, bits, piece, lane);
}

DEVICE void store_codes(u8* to, const u32 (&codes)[Warped<SIZE>::SLOTS], bool there, int lane) {
    using W = Warped<SIZE>;
#pragma unroll
    for (int piece = 0; piece < W::PIECES; ++piece) {
        if constexpr (Kept::BITS == 2) {
            u32 bits = 0;
#pragma unroll
            for (int i = 0; i < W::EACH; ++i) bits |= codes[piece * W::EACH + i] << (2 * i);
            store_packed<2>(to, there ? bits : 0, piece, lane);
        } else {
#pragma unroll
            for (int bit = 0; bit < 3; ++bit)
                store_bits(to + bit * Kept::OCTETS, piece, lane, [&](int slot) { return there && (codes[slot] >> bit & 1u); });
        }
    }
}

DEVICE void store_length(u8* to, float length, int lane) {
    const u32 bits = float_to_half(length);
    if (lane < 2) to[lane] = (u8)(bits >> (8 * lane));
}

// The signs of what is left over, and its length.
DEVICE void store_rest(u8* to, Warped<SIZE>& row, bool there, float* stage, const float* table, float scale, int lane) {
    const float left = row.length(stage, lane);
    const bool directed = there && left > TINY;
    row.divide(directed ? left : 1.0f);
    row.multiply(1.0f, table + SIZE, lane);
    row.transform(stage, table, scale, lane);
#pragma unroll
    for (int piece = 0; piece < row.PIECES; ++piece)
        store_bits(to + Kept::SIGNS, piece, lane, [&](int slot) { return directed && row.x[slot] >= 0.0f; });
    store_length(to + Kept::NORM + 2, there ? left : 0.0f, lane);
}

DEVICE void append_row(const float* from, u8* to, float* stage, const float* table, int* refused, float scale, int lane) {
    Warped<SIZE> row;
    row.load(from, lane);
    float norm = row.length(stage, lane);
    if (!(norm < 65520.0f)) {
        if (lane == 0) atomicAdd(refused, 1);
        norm = 0.0f;
    }
    const bool there = norm >= TINY;
    row.multiply(there ? 1.0f / norm : 0.0f, table, lane);
    row.transform(stage, table, scale, lane);
    u32 codes[Warped<SIZE>::SLOTS];
    take_codes(row, codes);
    store_codes(to, codes, there, lane);
    store_length(to + Kept::NORM, there ? norm : 0.0f, lane);
    if constexpr (Kept::SIGNED) store_rest(to, row, there, stage, table, scale, lane);
}

}  // namespace

// Row i of `rows` (count, heads, SIZE) to physical row length - base + i of `plane`, which has `capacity` of them; what
// does not fit is left out. Any grid.
extern "C" __global__ void append_turned(
    const float* __restrict__ rows, u8* __restrict__ plane, const int* __restrict__ length, const int* __restrict__ base,
    const float* __restrict__ table, int* refused, float scale, int count, int heads, int capacity) {
    __shared__ __align__(16) float stages[WARPS][SIZE];
    const int lane = threadIdx.x % LANES, warp = own_warp();
    const i64 start = (i64)(*length - *base) * heads, end = (i64)capacity * heads;
#pragma unroll 1
    for (i64 index = (i64)blockIdx.x * WARPS + warp; index < (i64)count * heads; index += (i64)gridDim.x * WARPS) {
        const i64 at = start + index;
        if (at >= 0 && at < end)
            append_row(rows + index * SIZE, plane + at * Kept::BYTES, stages[warp], table, refused, scale, lane);
    }
}
