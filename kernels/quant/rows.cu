// Rows of one head as formats store them (`quant.packed`), read channel by channel or some at a time.

// Numbers of formats are those of `schema.identity.PlaneFormat`.
constexpr int F32 = 1, F16 = 2, BF16 = 3, Q8_2F = 5, Q8_0 = 6, Q5_1 = 7, Q4_0 = 8, FP8 = 9;
// Channels that share a scale in keys of q8_2f, and in blocks.
constexpr int GROUP = 32;

// Row<format, size, keys> has (in capitals these are constants of programs)
//   BYTES                     of a row
//   WIDTH                     numbers it reads as: `size` for all formats here
//   ALIGN                     of a row's address, rows lying back to back from an aligned plane on
//   at(row, channel)          one number
//   read<N>(row, channel, out)  N of them from a channel on that N divides; N is 1, 2, 4, 8, 16 or 32 and divides `size`
// The field of q8_2f is the caller's to multiply by: it belongs to the query, or to the sum.
template <int F, int S, bool K>
struct Row;

template <int BYTES_>
struct Stored {
    static constexpr int BYTES = BYTES_;
    static constexpr int ALIGN = aligned_at(BYTES_);
};

// Numbers of ITEM bytes each, one after the other.
template <int ITEM, int S, class Number>
struct Plain : Stored<ITEM * S> {
    static constexpr int WIDTH = S;

    template <int N>
    static DEVICE void read(const u8* row, int channel, float (&out)[N]) {
        u32 words[(N * ITEM + 3) / 4];
        load_words<N * ITEM, smaller(aligned_at(N * ITEM), aligned_at(ITEM * S))>(row + ITEM * channel, words);
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] = Number::of(words[i * ITEM / 4] >> (8 * (i * ITEM % 4)));
    }

    static DEVICE float at(const u8* row, int channel) {
        float one[1];
        read(row, channel, one);
        return one[0];
    }
};

struct Float { static DEVICE float of(u32 bits) { return __uint_as_float(bits); } };
struct Half { static DEVICE float of(u32 bits) { return half_to_float((u16)bits); } };
struct Brain { static DEVICE float of(u32 bits) { return bf16_to_float((u16)bits); } };
struct Eight { static DEVICE float of(u32 bits) { return fp8_to_float((u8)bits); } };

template <int S, bool K> struct Row<F32, S, K> : Plain<4, S, Float> {};
template <int S, bool K> struct Row<F16, S, K> : Plain<2, S, Half> {};
template <int S, bool K> struct Row<BF16, S, K> : Plain<2, S, Brain> {};
template <int S, bool K> struct Row<FP8, S, K> : Plain<1, S, Eight> {};

// N signed bytes from `codes` on, aligned to ALIGN, as floats times `scale`.
template <int N, int ALIGN>
DEVICE void read_signed(const u8* codes, float scale, float (&out)[N]) {
    u32 words[(N + 3) / 4];
    load_words<N, ALIGN>(codes, words);
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = (float)(signed char)(words[i / 4] >> (8 * (i % 4))) * scale;
}

// Scales, float32, then int8 codes. Keys have a scale per 32 channels, values one.
template <int S, bool K>
struct Row<Q8_2F, S, K> : Stored<S + 4 * (K ? (S + GROUP - 1) / GROUP : 1)> {
    static constexpr int WIDTH = S;
    static constexpr int GROUPS = K ? (S + GROUP - 1) / GROUP : 1;
    static constexpr int CODES = 4 * GROUPS;

    template <int N>
    static DEVICE void read(const u8* row, int channel, float (&out)[N]) {
        constexpr int align = aligned_at(S + CODES);
        u32 scale[1];
        load_words<4, smaller(4, align)>(row + (K ? 4 * (channel / GROUP) : 0), scale);
        read_signed<N, smaller(smaller(aligned_at(CODES), aligned_at(N)), align)>(
            row + CODES + channel, __uint_as_float(scale[0]), out);
    }

    static DEVICE float at(const u8* row, int channel) {
        float one[1];
        read(row, channel, one);
        return one[0];
    }
};

// Blocks of 32 channels: a float16 scale and 32 int8 codes.
template <int S, bool K>
struct Row<Q8_0, S, K> : Stored<S / GROUP * 34> {
    static_assert(S % GROUP == 0, "q8_0 has blocks of 32 channels");
    static constexpr int WIDTH = S;

    template <int N>
    static DEVICE void read(const u8* row, int channel, float (&out)[N]) {
        const u8* block = row + channel / GROUP * 34;
        read_signed<N, smaller(2, N)>(block + 2 + channel % GROUP, half_to_float(load<u16>(block)), out);
    }

    static DEVICE float at(const u8* row, int channel) {
        float one[1];
        read(row, channel, one);
        return one[0];
    }
};

// N codes of 4 bits of a block of 32, from `channel` of it on: byte j has those of channels j and j + 16.
template <int N, int ALIGN>
DEVICE void read_nibbles(const u8* bytes, int channel, u32 (&codes)[N]) {
    constexpr int half = smaller(N, 16);
    u32 words[(half + 3) / 4];
    load_words<half, smaller(ALIGN, half)>(bytes + channel % 16, words);
    const int shift = channel & 16 ? 4 : 0;
#pragma unroll
    for (int i = 0; i < N; ++i) codes[i] = (words[i % 16 / 4] >> (8 * (i % 4) + (i < 16 ? shift : 4))) & 15u;
}

// A float16 scale and least number, the fifth bits, and 16 bytes of the four lower ones.
template <int S, bool K>
struct Row<Q5_1, S, K> : Stored<S / GROUP * 24> {
    static_assert(S % GROUP == 0, "q5_1 has blocks of 32 channels");
    static constexpr int WIDTH = S;

    template <int N>
    static DEVICE void read(const u8* row, int channel, float (&out)[N]) {
        const u8* block = row + channel / GROUP * 24;
        const uint2 head = load<uint2>(block);
        const float scale = half_to_float((u16)head.x), least = half_to_float((u16)(head.x >> 16));
        const u32 fifth = head.y >> (channel % GROUP);
        u32 codes[N];
        read_nibbles<N, 8>(block + 8, channel % GROUP, codes);
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] = (float)(codes[i] | ((fifth >> i) & 1u) << 4) * scale + least;
    }

    static DEVICE float at(const u8* row, int channel) {
        float one[1];
        read(row, channel, one);
        return one[0];
    }
};

// A float16 scale and 16 bytes of codes, from -8 on.
template <int S, bool K>
struct Row<Q4_0, S, K> : Stored<S / GROUP * 18> {
    static_assert(S % GROUP == 0, "q4_0 has blocks of 32 channels");
    static constexpr int WIDTH = S;

    template <int N>
    static DEVICE void read(const u8* row, int channel, float (&out)[N]) {
        const u8* block = row + channel / GROUP * 18;
        const float scale = half_to_float(load<u16>(block));
        u32 codes[N];
        read_nibbles<N, 2>(block + 2, channel % GROUP, codes);
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] = (float)((int)codes[i] - 8) * scale;
    }

    static DEVICE float at(const u8* row, int channel) {
        float one[1];
        read(row, channel, one);
        return one[0];
    }
};
