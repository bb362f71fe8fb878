// Rotated rows as the numbers they stand for: `reference.reconstruct`, in its order of operations, to be compiled
// without contraction. One warp a row of a head.
//
// Behind append.cu, which says what is defined.

namespace {

DEVICE float length_at(const u8* at) { return half_to_float((u16)(at[0] | at[1] << 8)); }

// Add what codes, or from channel SIZE on signs, stand for.
DEVICE void add_units(Warped<SIZE>& row, const u8* from, int first, int lane) {
    using W = Warped<SIZE>;
#pragma unroll
    for (int piece = 0; piece < W::PIECES; ++piece) {
        const int slot = piece * W::EACH;
        float units[W::EACH] = {};
        if (W::within(slot, lane)) Kept::unit(from, first + W::channel(slot, lane), units);
#pragma unroll
        for (int i = 0; i < W::EACH; ++i) row.x[slot + i] += units[i];
    }
}

DEVICE void decode_row(const u8* from, float* to, float* stage, const float* table, float scale, float kappa, int lane) {
    Warped<SIZE> row;
    row.clear();
    if constexpr (Kept::SIGNED) {
        add_units(row, from, SIZE, lane);
        row.transform(stage, table, scale, lane);
        row.multiply(length_at(from + Kept::NORM + 2) * kappa, table + SIZE, lane);
    }
    add_units(row, from, 0, lane);
    row.transform(stage, table, scale, lane);
    row.multiply(length_at(from + Kept::NORM), table, lane);
    row.store(to, lane);
}

}  // namespace

// Fill `out`, `count` rows of a head each, from row `first` of the plane on. `kappa` weighs the signs. Any grid.
extern "C" __global__ void decode_turned(
    const u8* __restrict__ plane, float* __restrict__ out, const float* __restrict__ table, float scale, float kappa,
    i64 first, i64 count) {
    __shared__ __align__(16) float stages[WARPS][Warped<SIZE>::STAGE];
    const int lane = threadIdx.x % LANES, warp = own_warp();
#pragma unroll 1
    for (i64 index = (i64)blockIdx.x * WARPS + warp; index < count; index += (i64)gridDim.x * WARPS)
        decode_row(plane + (first + index) * Kept::BYTES, out + index * SIZE, stages[warp], table, scale, kappa, lane);
}
