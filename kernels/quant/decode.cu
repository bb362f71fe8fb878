// Rows of a plane as float32. Program: FORMAT, KEYS, HEADS, SIZE; after quant/rows.cu.

namespace {
using Plane = Row<FORMAT, SIZE, KEYS>;
// A thread writes 16 bytes where rows allow that, its neighbours the next: stores of a warp are whole lines.
constexpr int N = SIZE % 4 ? 1 : 4;
constexpr u32 UNITS = HEADS * SIZE / N;
}  // namespace

// `rows` rows from `first` on to `out` (rows, HEADS, SIZE); `field` (HEADS, SIZE) or null. Any grid; the number of
// threads and that of groups of N numbers are below 2^31.
extern "C" __global__ void __launch_bounds__(256)
decode(const u8* __restrict__ plane, const float* __restrict__ field, int first, int rows, float* __restrict__ out) {
    const u32 total = (u32)rows * UNITS, stride = gridDim.x * blockDim.x;
    for (u32 unit = blockIdx.x * blockDim.x + threadIdx.x; unit < total; unit += stride) {
        const u32 row = unit / UNITS, within = unit % UNITS * N, head = within / SIZE;
        float x[N];
        Plane::template read<N>(plane + ((size_t)(first + row) * HEADS + head) * Plane::BYTES, within % SIZE, x);
        if (field) {
            u32 by[N];
            load_words<4 * N, N == 4 ? 16 : 4>(reinterpret_cast<const u8*>(field + within), by);
#pragma unroll
            for (int i = 0; i < N; ++i) x[i] *= __uint_as_float(by[i]);
        }
        u32 words[N];
#pragma unroll
        for (int i = 0; i < N; ++i) words[i] = __float_as_uint(x[i]);
        store_words<4 * N, N == 4 ? 16 : 4>(reinterpret_cast<u8*>(out + (size_t)unit * N), words);
    }
}
