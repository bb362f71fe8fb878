// Rotated rows of one head (`turboquant.block`), read as numbers in rotated space. With n and rho the lengths of a
// row and of what its codes leave over:
//
//     TQ_KEY      n c[code_i], one a channel, then n rho sign_i, one a channel: their query is q', then kappa q''
//     TQ_VALUE    n c[code_i]
//     TQ3         n c[code_i], three bits a code
//
// So a score is a dot product like any other. KEY_LEVEL_i and VALUE_LEVEL_i are float32 bits of the positive levels
// of either side, from the least; a side that is not rotated has none.

constexpr int TQ_KEY = 13, TQ_VALUE = 14, TQ3 = 15;

#ifndef KEY_LEVEL_0
#define KEY_LEVEL_0 0
#define KEY_LEVEL_1 0
#endif
#ifndef KEY_LEVEL_2
#define KEY_LEVEL_2 0
#define KEY_LEVEL_3 0
#endif
#ifndef VALUE_LEVEL_0
#define VALUE_LEVEL_0 0
#define VALUE_LEVEL_1 0
#endif

// Where things lie in a row.
template <int F, int S>
struct Turned : Stored<S * (F == TQ_VALUE ? 2 : 3) / 8 + (F == TQ_KEY ? 4 : 2)> {
    static_assert(S % 8 == 0, "rotated rows are whole bytes for multiples of 8 channels only");
    using Stored<S * (F == TQ_VALUE ? 2 : 3) / 8 + (F == TQ_KEY ? 4 : 2)>::BYTES;
    static constexpr bool SIGNED = F == TQ_KEY;
    static constexpr int BITS = F == TQ3 ? 3 : 2;
    static constexpr int OCTETS = S / 8;
    static constexpr int SIGNS = S / 4;
    static constexpr int NORM = S * (BITS + SIGNED) / 8;
    static constexpr int LENGTHS = SIGNED ? 4 : 2;
    static constexpr int ALIGN = aligned_at(BYTES);
    static constexpr int PAIRED = smaller(2, ALIGN);
    static constexpr int MEASURED = smaller(aligned_at(NORM), ALIGN);
    static constexpr int WIDTH = SIGNED ? 2 * S : S;

    // Eight numbers as they are stored: their bits, and the lengths of the row.
    struct Raw {
        u32 bits, lengths;
    };

    static DEVICE float level(int rank) {
        if constexpr (F == TQ_VALUE) return __uint_as_float(rank ? VALUE_LEVEL_1 : VALUE_LEVEL_0);
        return __uint_as_float(rank == 0 ? KEY_LEVEL_0 : rank == 1 ? KEY_LEVEL_1 : rank == 2 ? KEY_LEVEL_2 : KEY_LEVEL_3);
    }

    static DEVICE Raw load_raw(const u8* row, int octet) {
        u32 word[1], lengths[1];
        if constexpr (BITS == 3) {
            word[0] = row[octet] | (u32)row[OCTETS + octet] << 8 | (u32)row[2 * OCTETS + octet] << 16;
        } else if (SIGNED && octet >= OCTETS) {
            word[0] = row[SIGNS + octet - OCTETS];
        } else {
            load_words<2, PAIRED>(row + 2 * octet, word);
        }
        load_words<LENGTHS, MEASURED>(row + NORM, lengths);
        return {word[0], lengths[0]};
    }

    // N of eight numbers, from `channel` on, which N divides.
    template <int N>
    static DEVICE void numbers(Raw raw, int channel, float (&out)[N]) {
        const float norm = half_to_float((u16)raw.lengths);
        if constexpr (BITS == 3) {
            eighths(raw.bits >> channel % 8, norm, out);
        } else {
            float inner = norm * level(0), outer = norm * level(1);
            u32 codes = raw.bits;
            if (SIGNED && channel >= S) {
                // As upper bits of codes that have one level: lanes which read signs go along with those of codes.
                codes = apart(codes) << 1;
                inner = outer = norm * half_to_float((u16)(raw.lengths >> 16));
            }
            quarters(codes >> 2 * (channel % 8), inner, outer, out);
        }
    }

    // Eight bits, each to the lower of two.
    static DEVICE u32 apart(u32 bits) {
        bits = (bits | bits << 4) & 0x0f0fu;
        bits = (bits | bits << 2) & 0x3333u;
        return (bits | bits << 1) & 0x5555u;
    }

    // `number` where the bit is set, else its negative.
    static DEVICE float signed_by(float number, u32 bits, int bit) {
        return __uint_as_float(__float_as_uint(number) ^ ((~bits << (31 - bit)) & 0x80000000u));
    }

    // Codes of two bits: the outer level where both are equal, positive where the upper one is set.
    template <int N>
    static DEVICE void quarters(u32 codes, float inner, float outer, float (&out)[N]) {
        const u32 differ = codes ^ codes >> 1;
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] = signed_by(differ >> 2 * i & 1u ? inner : outer, codes, 2 * i + 1);
    }

    // Codes of three bits, a byte of each: the upper bit is the sign, the others count levels of it, for negative ones
    // from the outermost on.
    template <int N>
    static DEVICE void eighths(u32 codes, float norm, float (&out)[N]) {
        const float levels[4] = {norm * level(0), norm * level(1), norm * level(2), norm * level(3)};
        const u32 sign = codes >> 16, low = ~(codes ^ sign), high = ~(codes >> 8 ^ sign);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float near = low >> i & 1u ? levels[1] : levels[0], far = low >> i & 1u ? levels[3] : levels[2];
            out[i] = signed_by(high >> i & 1u ? far : near, sign, i);
        }
    }

    template <int N>
    static DEVICE void read(const u8* row, int channel, float (&out)[N]) {
        if constexpr (N <= 8) {
            numbers(load_raw(row, channel / 8), channel, out);
        } else {
#pragma unroll
            for (int i = 0; i < N / 8; ++i) {
                float eight[8];
                numbers(load_raw(row, channel / 8 + i), channel + 8 * i, eight);
#pragma unroll
                for (int j = 0; j < 8; ++j) out[8 * i + j] = eight[j];
            }
        }
    }

    static DEVICE float at(const u8* row, int channel) {
        float one[1];
        read(row, channel, one);
        return one[0];
    }

    // As `read`, N at most eight, of a row whose lengths are 1: levels, or signs.
    template <int N>
    static DEVICE void unit(const u8* row, int channel, float (&out)[N]) {
        numbers(Raw{load_raw(row, channel / 8).bits, 0x3c003c00u}, channel, out);
    }
};

template <int S, bool KEYS> struct Row<TQ_KEY, S, KEYS> : Turned<TQ_KEY, S> {};
template <int S, bool KEYS> struct Row<TQ_VALUE, S, KEYS> : Turned<TQ_VALUE, S> {};
template <int S, bool KEYS> struct Row<TQ3, S, KEYS> : Turned<TQ3, S> {};
