// float32 rows into a plane, behind the rows that are there. Program: FORMAT, KEYS, HEADS, SIZE; after quant/rows.cu.
// The arithmetic is that of `quant.reference`, `quant.blocks` and `quant.fp8`, operation by operation.

namespace {

// 1/x, and 0 where that is not finite.
DEVICE float inverse(float scale) {
    const float inverted = 1.0f / scale;
    return isfinite(inverted) ? inverted : 0.0f;
}

// -- numbers as they are: N of them a thread --------------------------------------------------------------------

template <int F>
DEVICE u32 narrow(float x) {
    if constexpr (F == F16) return float_to_half(x);
    else if constexpr (F == BF16) return float_to_bf16(x);
    else if constexpr (F == FP8) return float_to_fp8(x);
    else return __float_as_uint(x);
}

template <int F, int N>
DEVICE void write_plain(const float* from, u8* row, int channel) {
    constexpr int item = Row<F, N, true>::BYTES / N, align = aligned_at(item * SIZE);
    u32 in[N], out[(N * item + 3) / 4] = {};
    load_words<4 * N, N == 4 ? 16 : 4>(reinterpret_cast<const u8*>(from), in);
#pragma unroll
    for (int i = 0; i < N; ++i) out[i * item / 4] |= narrow<F>(__uint_as_float(in[i])) << (8 * (i * item % 4));
    store_words<N * item, smaller(aligned_at(N * item), align)>(row + channel * item, out);
}

// -- blocks of 32: eight lanes of four channels each ---------------------------------------------------------------

constexpr int PER_LANE = 4, BLOCK_LANES = GROUP / PER_LANE;

// The extreme number of a block that comes first: `key` of it is the largest, ties go to the lower lane. Groups of
// lanes that meet are neighbours, so that what the lower group has found is before what the other has.
DEVICE float first_largest(float number, float key) {
#pragma unroll
    for (int step = 1; step < BLOCK_LANES; step *= 2) {
        const float other = __shfl_xor_sync(ALL_LANES, number, step), other_key = __shfl_xor_sync(ALL_LANES, key, step);
        const bool lower = (threadIdx.x & step) != 0;
        if (lower ? other_key >= key : other_key > key) number = other, key = other_key;
    }
    return number;
}

template <class Key>
DEVICE float first_by(const float (&x)[PER_LANE], Key key) {
    float number = x[0];
#pragma unroll
    for (int i = 1; i < PER_LANE; ++i)
        if (key(x[i]) > key(number)) number = x[i];
    return first_largest(number, key(number));
}

struct Magnitude { DEVICE float operator()(float x) const { return fabsf(x); } };
struct Most { DEVICE float operator()(float x) const { return x; } };
struct Least { DEVICE float operator()(float x) const { return -x; } };

DEVICE void write_q8_0(const float (&x)[PER_LANE], u8* block, int lane, bool real) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) largest = fmaxf(largest, fabsf(x[i]));
    const float scale = lanes_max<BLOCK_LANES>(largest) / 127.0f, by = inverse(scale);
    u32 word[1] = {0};
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) word[0] |= ((u32)(int)roundf(x[i] * by) & 255u) << (8 * i);
    if (!real) return;
    store_words<4, 2>(block + 2 + 4 * lane, word);
    if (lane == 0) store<u16>(block, float_to_half(scale));
}

// Codes of four bits: bytes of channels j and j + 16 are put together by the lanes of the former.
DEVICE u32 paired(u32 codes) { return codes | __shfl_xor_sync(ALL_LANES, codes, BLOCK_LANES / 2) << 4; }

DEVICE void write_q5_1(const float (&x)[PER_LANE], u8* block, int lane, bool real) {
    const float least = first_by(x, Least()), scale = (first_by(x, Most()) - least) / 31.0f, by = inverse(scale);
    u32 low = 0, fifth = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const float product = (x[i] - least) * by;
        const u32 code = (u32)fminf(truncf(product + 0.5f), 31.0f);
        low |= (code & 15u) << (8 * i), fifth |= (code >> 4) << (PER_LANE * lane + i);
    }
    fifth = lanes_or<BLOCK_LANES>(fifth);
    const u32 bytes = paired(low);
    if (!real) return;
    if (lane < BLOCK_LANES / 2) store(block + 8 + 4 * lane, bytes);
    if (lane == 0) store(block, make_uint2(float_to_half(scale) | (u32)float_to_half(least) << 16, fifth));
}

DEVICE void write_q4_0(const float (&x)[PER_LANE], u8* block, int lane, bool real) {
    const float scale = first_by(x, Magnitude()) / -8.0f, by = inverse(scale);
    u32 low = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const float product = x[i] * by;
        low |= (u32)fminf(truncf(product + 8.5f), 15.0f) << (8 * i);
    }
    u32 bytes[1] = {paired(low)};
    if (!real) return;
    if (lane < BLOCK_LANES / 2) store_words<4, 2>(block + 2 + 4 * lane, bytes);
    if (lane == 0) store<u16>(block, float_to_half(scale));
}

// -- q8_2f: a warp per group of channels ------------------------------------------------------------------------------

DEVICE void write_q8_2f(const float* from, const float* field, u8* row, int group, int lane) {
    using Plane = Row<Q8_2F, SIZE, KEYS>;
    constexpr int wide = KEYS ? GROUP : SIZE, align = aligned_at(Plane::BYTES);
    const int start = group * wide, end = min(start + wide, SIZE);
    float largest = 0.0f;
    for (int channel = start + lane; channel < end; channel += LANES)
        largest = fmaxf(largest, fabsf(field ? from[channel] / field[channel] : from[channel]));
    const float scale = fmaxf(lanes_max(largest) / 127.0f, 1e-12f);
    for (int channel = start + lane; channel < end; channel += LANES) {
        const float x = field ? from[channel] / field[channel] : from[channel];
        row[Plane::CODES + channel] = (u8)(int)fminf(fmaxf(roundf(x / scale), -127.0f), 127.0f);
    }
    const u32 bits[1] = {__float_as_uint(scale)};
    if (lane == 0) store_words<4, smaller(4, align)>(row + 4 * group, bits);
}

// What the kernel does, as a template: what formats have no use for is then not compiled.
template <int F, int S>
DEVICE void append_rows(const float* __restrict__ rows, u8* __restrict__ plane, const float* __restrict__ field, int start,
                        int count, int capacity) {
    constexpr int bytes = Row<F, S, KEYS>::BYTES;
    const u32 thread = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
    if constexpr (F == Q8_2F) {
        constexpr u32 groups = Row<Q8_2F, S, true>::GROUPS, units = HEADS * (KEYS ? groups : 1);
        for (u32 unit = thread / LANES; unit < (u32)count * units; unit += stride / LANES) {
            const u32 row = unit / units, head = unit % units / (units / HEADS), group = unit % (units / HEADS);
            const int at = start + (int)row;
            if (at < 0 || at >= capacity) continue;
            write_q8_2f(rows + ((size_t)row * HEADS + head) * S, field ? field + head * S : nullptr,
                        plane + ((size_t)at * HEADS + head) * bytes, (int)group, (int)(thread % LANES));
        }
    } else if constexpr (F == Q8_0 || F == Q5_1 || F == Q4_0) {
        constexpr u32 blocks = HEADS * S / GROUP, block_bytes = bytes / (S / GROUP), per_warp = LANES / BLOCK_LANES;
        const u32 total = (u32)count * blocks, rounded = (total + per_warp - 1) / per_warp * per_warp;
        for (u32 unit = thread / BLOCK_LANES; unit < rounded; unit += stride / BLOCK_LANES) {
            // Lanes without a block of their own take the last, for the others to have somebody to talk to.
            const u32 block = min(unit, total - 1), lane = thread % BLOCK_LANES;
            const int at = start + (int)(block / blocks);
            const bool real = unit < total && at >= 0 && at < capacity;
            u8* const to = plane + ((size_t)(real ? at : 0) * blocks + block % blocks) * block_bytes;
            u32 bits[PER_LANE];
            load_words<16, 16>(reinterpret_cast<const u8*>(rows + (size_t)block * GROUP + lane * PER_LANE), bits);
            float x[PER_LANE];
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i) x[i] = __uint_as_float(bits[i]);
            if constexpr (F == Q8_0) write_q8_0(x, to, lane, real);
            else if constexpr (F == Q5_1) write_q5_1(x, to, lane, real);
            else write_q4_0(x, to, lane, real);
        }
    } else {
        constexpr int n = S % 4 ? 1 : 4;
        constexpr u32 units = HEADS * S / n;
        for (u32 unit = thread; unit < (u32)count * units; unit += stride) {
            const u32 row = unit / units, within = unit % units * n;
            const int at = start + (int)row;
            if (at < 0 || at >= capacity) continue;
            write_plain<F, n>(rows + (size_t)unit * n, plane + ((size_t)at * HEADS + within / S) * bytes, within % S);
        }
    }
}

}  // namespace

// Row i of `rows` (count, HEADS, SIZE) to physical row length - base + i of `plane`, which has `capacity` of them;
// what does not fit is left out. `field` (HEADS, SIZE) or null. Any grid; blocks are whole warps; count * HEADS * SIZE
// is below 2^31.
extern "C" __global__ void __launch_bounds__(256)
append(const float* __restrict__ rows, u8* __restrict__ plane, const float* __restrict__ field, const int* __restrict__ length,
       const int* __restrict__ base, int count, int capacity) {
    append_rows<FORMAT, SIZE>(rows, plane, field, *length - *base, count, capacity);
}
