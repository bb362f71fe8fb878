// What every program begins with: types, conversions by integer arithmetic, loads of known alignment, and
// reductions over lanes. No headers: NVRTC compiles this without any, and so does a C++ compiler that is told
// what a thread is.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__

// Shared memory whose size a launch decides.
#ifndef DYNAMIC_SHARED
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#endif

// For those who check addresses: a device traps on wide accesses that are not aligned.
#ifndef CHECK_ALIGNED
#define CHECK_ALIGNED(address, bytes)
#endif

constexpr int LANES = 32;
constexpr u32 ALL_LANES = 0xffffffffu;
// Devices hand out memory aligned to more; planes and rows of floats begin so.
constexpr int BASE_ALIGN = 16;

// The largest power of two, up to BASE_ALIGN, that divides `bytes`: how well what lies at multiples of it is aligned.
DEVICE constexpr int aligned_at(int bytes) {
    int align = BASE_ALIGN;
    while (bytes % align) align /= 2;
    return align;
}

DEVICE constexpr int smaller(int a, int b) { return a < b ? a : b; }

// -- conversions: to the nearest, ties to even, NaN stays NaN ------------------------------------------------

DEVICE float half_to_float(u16 half) {
#ifdef __CUDA_ARCH__
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(half));
    return wide;
#else
    const u32 sign = (u32)(half & 0x8000u) << 16, magnitude = half & 0x7fffu;
    if (magnitude >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    // Its exponent is 112 short of float32's; the product is exact, subnormal numbers included.
    return __uint_as_float(sign | __float_as_uint(__uint_as_float(magnitude << 13) * __uint_as_float(0x77800000u)));
#endif
}

DEVICE u16 float_to_half(float wide) {
    const u32 bits = __float_as_uint(wide), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (u16)(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
#ifdef __CUDA_ARCH__
    u16 half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(wide));
    return half;
#else
    if (magnitude >= 0x47800000u) return (u16)(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {
        // Subnormal: at 0.5 the last bit of float32 is the last bit of float16, so that the addition rounds.
        const float rounded = __uint_as_float(magnitude) + 0.5f;
        return (u16)(sign | (__float_as_uint(rounded) - 0x3f000000u));
    }
    return (u16)(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
#endif
}

DEVICE float bf16_to_float(u16 brain) { return __uint_as_float((u32)brain << 16); }

DEVICE u16 float_to_bf16(float wide) {
    const u32 bits = __float_as_uint(wide);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)((bits >> 16) | 0x40u);
    return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// e4m3fn: 1 sign, 4 exponent bits of bias 7, 3 of mantissa; no infinity, NaN is all ones.
DEVICE float fp8_to_float(u8 code) {
    const u32 sign = (u32)(code & 0x80u) << 24, magnitude = code & 0x7fu;
    if (magnitude == 0x7fu) return __uint_as_float(sign | 0x7fc00000u);
    return __uint_as_float(sign | __float_as_uint(__uint_as_float(magnitude << 20) * __uint_as_float(0x7b800000u)));
}

// What is larger than the largest number, 448, becomes that.
DEVICE u8 float_to_fp8(float wide) {
    const u32 bits = __float_as_uint(wide), sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (u8)(sign | 0x7fu);
    if (magnitude >= 0x43e00000u) return (u8)(sign | 0x7eu);
    if (magnitude < 0x3c800000u) {
        // Subnormal, in steps of 2^-9: the last bit of float32 at 2^14.
        const float rounded = __uint_as_float(magnitude) + 16384.0f;
        return (u8)(sign | (__float_as_uint(rounded) - 0x46800000u));
    }
    return (u8)(sign | ((magnitude - 0x3c000000u + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20));
}

// -- bytes ---------------------------------------------------------------------------------------------------

template <class T>
DEVICE T load(const u8* from) {
    CHECK_ALIGNED(from, sizeof(T));
    return *reinterpret_cast<const T*>(from);
}

template <class T>
DEVICE void store(u8* to, T value) {
    CHECK_ALIGNED(to, sizeof(T));
    *reinterpret_cast<T*>(to) = value;
}

// BYTES bytes from an address aligned to ALIGN as little-endian words, in the widest loads there are for it.
template <int BYTES, int ALIGN>
DEVICE void load_words(const u8* from, u32 (&words)[(BYTES + 3) / 4]) {
    if constexpr (ALIGN >= 16 && BYTES % 16 == 0) {
#pragma unroll
        for (int i = 0; i < BYTES / 16; ++i) {
            const uint4 four = load<uint4>(from + 16 * i);
            words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
        }
    } else if constexpr (ALIGN >= 8 && BYTES % 8 == 0) {
#pragma unroll
        for (int i = 0; i < BYTES / 8; ++i) {
            const uint2 two = load<uint2>(from + 8 * i);
            words[2 * i] = two.x, words[2 * i + 1] = two.y;
        }
    } else if constexpr (ALIGN >= 4 && BYTES % 4 == 0) {
#pragma unroll
        for (int i = 0; i < BYTES / 4; ++i) words[i] = load<u32>(from + 4 * i);
    } else if constexpr (ALIGN >= 2 && BYTES % 2 == 0) {
#pragma unroll
        for (int i = 0; i < (BYTES + 3) / 4; ++i) {
            words[i] = load<u16>(from + 4 * i);
            if (4 * i + 2 < BYTES) words[i] |= (u32)load<u16>(from + 4 * i + 2) << 16;
        }
    } else {
#pragma unroll
        for (int i = 0; i < (BYTES + 3) / 4; ++i) words[i] = 0;
#pragma unroll
        for (int i = 0; i < BYTES; ++i) words[i / 4] |= (u32)from[i] << (8 * (i % 4));
    }
}

// The other way round.
template <int BYTES, int ALIGN>
DEVICE void store_words(u8* to, const u32 (&words)[(BYTES + 3) / 4]) {
    if constexpr (ALIGN >= 16 && BYTES % 16 == 0) {
#pragma unroll
        for (int i = 0; i < BYTES / 16; ++i)
            store(to + 16 * i, make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]));
    } else if constexpr (ALIGN >= 8 && BYTES % 8 == 0) {
#pragma unroll
        for (int i = 0; i < BYTES / 8; ++i) store(to + 8 * i, make_uint2(words[2 * i], words[2 * i + 1]));
    } else if constexpr (ALIGN >= 4 && BYTES % 4 == 0) {
#pragma unroll
        for (int i = 0; i < BYTES / 4; ++i) store(to + 4 * i, words[i]);
    } else if constexpr (ALIGN >= 2 && BYTES % 2 == 0) {
#pragma unroll
        for (int i = 0; i < BYTES / 2; ++i) store(to + 2 * i, (u16)(words[i / 2] >> (16 * (i % 2))));
    } else {
#pragma unroll
        for (int i = 0; i < BYTES; ++i) to[i] = (u8)(words[i / 4] >> (8 * (i % 4)));
    }
}

// -- lanes: reductions over groups of WIDTH neighbours, all lanes of the warp taking part -----------------------

template <int WIDTH = LANES>
DEVICE float lanes_sum(float x) {
#pragma unroll
    for (int step = WIDTH / 2; step; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

template <int WIDTH = LANES>
DEVICE float lanes_max(float x) {
#pragma unroll
    for (int step = WIDTH / 2; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

template <int WIDTH = LANES>
DEVICE u32 lanes_or(u32 x) {
#pragma unroll
    for (int step = WIDTH / 2; step; step /= 2) x |= __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}
