// Eight channels of a head's packed row at once, in two steps: bytes into registers, then numbers. `Row.read` does
// both; here the bytes of many rows are on their way before the first is looked at.
//
// Rows of blocks lie at even addresses: they are read as the words around them. So up to 4 bytes beyond a row are
// touched, which is what planes are padded for.

constexpr int OCTET = 8;

// Span<FORMAT, SIZE, KEYS> has
//   WIDTH                     numbers of a row
//   Raw                       an octet of it as loaded
//   load(row, octet)
//   read(raw, octet, out)     its numbers; 0 behind the last channel
// This one is for heads that are no multiple of eight channels.
template <int FORMAT, int SIZE, bool KEYS, bool WHOLE = SIZE % OCTET == 0>
struct Span {
    static constexpr int WIDTH = Row<FORMAT, SIZE, KEYS>::WIDTH;
    struct Raw {
        float number[OCTET];
    };

    static DEVICE Raw load(const u8* row, int octet) {
        Raw raw;
#pragma unroll
        for (int i = 0; i < OCTET; ++i) {
            const int channel = OCTET * octet + i;
            raw.number[i] = channel < WIDTH ? Row<FORMAT, SIZE, KEYS>::at(row, channel) : 0.0f;
        }
        return raw;
    }

    static DEVICE void read(const Raw& raw, int, float (&out)[OCTET]) {
#pragma unroll
        for (int i = 0; i < OCTET; ++i) out[i] = raw.number[i];
    }
};

template <int ITEM, int SIZE, class Number>
struct PlainSpan {
    static constexpr int WIDTH = SIZE;
    struct Raw {
        u32 word[OCTET * ITEM / 4];
    };

    static DEVICE Raw load(const u8* row, int octet) {
        Raw raw;
        load_words<OCTET * ITEM, smaller(aligned_at(OCTET * ITEM), aligned_at(ITEM * SIZE))>(row + OCTET * ITEM * octet, raw.word);
        return raw;
    }

    static DEVICE void read(const Raw& raw, int, float (&out)[OCTET]) {
#pragma unroll
        for (int i = 0; i < OCTET; ++i) out[i] = Number::of(raw.word[i * ITEM / 4] >> (8 * (i * ITEM % 4)));
    }
};

template <int SIZE, bool KEYS> struct Span<F32, SIZE, KEYS, true> : PlainSpan<4, SIZE, Float> {};
template <int SIZE, bool KEYS> struct Span<F16, SIZE, KEYS, true> : PlainSpan<2, SIZE, Half> {};
template <int SIZE, bool KEYS> struct Span<BF16, SIZE, KEYS, true> : PlainSpan<2, SIZE, Brain> {};
template <int SIZE, bool KEYS> struct Span<FP8, SIZE, KEYS, true> : PlainSpan<1, SIZE, Eight> {};

// Byte `index` of a word as a float: written into the mantissa of 2^23, since conversions run at a quarter of the pace.
DEVICE float byte_of(u32 word, int index) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440u | index)) - 8388608.0f;
}

// As `byte_of`, of a signed byte.
DEVICE float signed_of(u32 word, int index) { return byte_of(word ^ 0x80808080u, index) - 128.0f; }

// Eight bytes from an even address on.
DEVICE uint2 words_around(const u8* at) {
    const int past = (int)((u64)at & 3u);
    const u32 a = load<u32>(at - past), b = load<u32>(at - past + 4), c = load<u32>(at - past + 8);
    return make_uint2((u32)(((u64)b << 32 | a) >> (8 * past)), (u32)(((u64)c << 32 | b) >> (8 * past)));
}

// Scales, float32, then signed bytes. The field is the caller's to multiply by.
template <int SIZE, bool KEYS>
struct Span<Q8_2F, SIZE, KEYS, true> {
    static constexpr int WIDTH = SIZE;
    struct Raw {
        u32 code[2];
        float scale;
    };

    static DEVICE Raw load(const u8* row, int octet) {
        Raw raw;
        load_words<OCTET, 4>(row + Row<Q8_2F, SIZE, KEYS>::CODES + OCTET * octet, raw.code);
        raw.scale = ::load<float>(row + (KEYS ? OCTET * octet / GROUP * 4 : 0));
        return raw;
    }

    static DEVICE void read(const Raw& raw, int, float (&out)[OCTET]) {
#pragma unroll
        for (int i = 0; i < OCTET; ++i) out[i] = signed_of(raw.code[i / 4], i % 4) * raw.scale;
    }
};

template <int SIZE, bool KEYS>
struct Span<Q8_0, SIZE, KEYS, true> {
    static constexpr int WIDTH = SIZE;
    struct Raw {
        uint2 codes;
        u16 scale;
    };

    static DEVICE Raw load(const u8* row, int octet) {
        const u8* block = row + octet / 4 * 34;
        return {words_around(block + 2 + octet % 4 * OCTET), ::load<u16>(block)};
    }

    static DEVICE void read(const Raw& raw, int, float (&out)[OCTET]) {
        const float scale = half_to_float(raw.scale);
#pragma unroll
        for (int i = 0; i < OCTET; ++i) out[i] = signed_of(i < 4 ? raw.codes.x : raw.codes.y, i % 4) * scale;
    }
};

// Nibbles of four bytes, those of channels 0 to 15 of a block low, of 16 to 31 high.
DEVICE u32 nibbles(u32 word, int octet) { return word >> (octet % 4 / 2 * 4) & 0x0f0f0f0fu; }

template <int SIZE, bool KEYS>
struct Span<Q5_1, SIZE, KEYS, true> {
    static constexpr int WIDTH = SIZE;
    struct Raw {
        uint2 head, codes;
    };

    static DEVICE Raw load(const u8* row, int octet) {
        const u8* block = row + octet / 4 * 24;
        return {::load<uint2>(block), ::load<uint2>(block + 8 + octet % 2 * OCTET)};
    }

    static DEVICE void read(const Raw& raw, int octet, float (&out)[OCTET]) {
        const float scale = half_to_float((u16)raw.head.x), least = half_to_float((u16)(raw.head.x >> 16));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            // Four bits, each to the lowest of a byte.
            const u32 fifths = ((raw.head.y >> (octet % 4 * OCTET + 4 * half) & 15u) * 0x00204081u) & 0x01010101u;
            const u32 codes = nibbles(half ? raw.codes.y : raw.codes.x, octet) | fifths << 4;
#pragma unroll
            for (int i = 0; i < 4; ++i) out[4 * half + i] = byte_of(codes, i) * scale + least;
        }
    }
};

template <int SIZE, bool KEYS>
struct Span<Q4_0, SIZE, KEYS, true> {
    static constexpr int WIDTH = SIZE;
    struct Raw {
        uint2 codes;
        u16 scale;
    };

    static DEVICE Raw load(const u8* row, int octet) {
        const u8* block = row + octet / 4 * 18;
        return {words_around(block + 2 + octet % 2 * OCTET), ::load<u16>(block)};
    }

    static DEVICE void read(const Raw& raw, int octet, float (&out)[OCTET]) {
        const float scale = half_to_float(raw.scale);
#pragma unroll
        for (int i = 0; i < OCTET; ++i)
            out[i] = (byte_of(nibbles(i < 4 ? raw.codes.x : raw.codes.y, octet), i % 4) - 8.0f) * scale;
    }
};
