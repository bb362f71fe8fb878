// What surrounds attention over rotated rows, one warp a row: queries are turned once, before, and sums once, behind.
//
// SIZE, WARPS a block. Any grid.

// Fill `out`, (count, SIZE) or, where `again`, (count, 2 SIZE): queries q' under the polar rotation and, behind each,
// kappa q'' under both. Rows read by `Row` then score by a dot product.
extern "C" __global__ void turn_queries(
    const float* __restrict__ queries, float* __restrict__ out, const float* __restrict__ table, float scale, float kappa,
    int again, int count) {
    __shared__ __align__(16) float stages[WARPS][Warped<SIZE>::STAGE];
    const int lane = threadIdx.x % LANES, warp = own_warp();
#pragma unroll 1
    for (i64 index = (i64)blockIdx.x * WARPS + warp; index < count; index += (i64)gridDim.x * WARPS) {
        float* to = out + index * (again ? 2 * SIZE : SIZE);
        Warped<SIZE> row;
        row.load(queries + index * SIZE, lane);
        row.multiply(1.0f, table, lane);
        row.transform(stages[warp], table, scale, lane);
        row.store(to, lane);
        if (!again) continue;
        row.multiply(1.0f, table + SIZE, lane);
        row.transform(stages[warp], table, scale * kappa, lane);
        row.store(to + SIZE, lane);
    }
}

// Turn sums (count, SIZE) of rotated values back, where they lie.
extern "C" __global__ void turn_back(float* __restrict__ sums, const float* __restrict__ table, float scale, int count) {
    __shared__ __align__(16) float stages[WARPS][Warped<SIZE>::STAGE];
    const int lane = threadIdx.x % LANES, warp = own_warp();
#pragma unroll 1
    for (i64 index = (i64)blockIdx.x * WARPS + warp; index < count; index += (i64)gridDim.x * WARPS) {
        Warped<SIZE> row;
        row.load(sums + index * SIZE, lane);
        row.transform(stages[warp], table, scale, lane);
        row.multiply(1.0f, table, lane);
        row.store(sums + index * SIZE, lane);
    }
}
