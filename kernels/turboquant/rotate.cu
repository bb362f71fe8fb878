// Rotations of TurboQuant by one warp a row: the transform of `rotation.py`, in its order of operations.
//
// A lane holds EACH neighbouring channels of every PIECE = 32 * EACH of them, EACH as large as the size allows, up to
// eight: slot s is channel s / EACH * PIECE + lane * EACH + s % EACH. So butterflies are shuffles for the five strides
// from EACH on and stay within a lane for all others; only the matrix of the odd factor needs shared memory, `stage`,
// STAGE floats a warp. A table is the signs of the polar rotation, those of the second one, and that matrix.

constexpr int EACH_AT_MOST = 8;

// The number of the warp, handed round by a lane: so the compiler knows that all lanes have the same, and loops over
// rows of a warp get no second version for lanes that went elsewhere.
DEVICE int own_warp() { return __shfl_sync(ALL_LANES, (int)threadIdx.x / LANES, 0); }

template <int S>
struct Warped {
    static constexpr int SLOTS = (S + LANES - 1) / LANES;
    static constexpr int EACH = S % LANES ? 1 : smaller(SLOTS & -SLOTS, EACH_AT_MOST);
    static constexpr int PIECE = LANES * EACH;
    static constexpr int PIECES = SLOTS / EACH;
    static constexpr int RUN = S & -S;
    static constexpr int ACROSS = smaller(RUN, PIECE);
    static constexpr int PARTS = S / RUN;
    static constexpr int STAGE = PARTS > 1 ? S : 1;
    static constexpr int BYTES = 4 * EACH;
    static constexpr int ALIGN = aligned_at(BYTES);
    float x[SLOTS];

    static DEVICE int channel(int slot, int lane) { return slot / EACH * PIECE + lane * EACH + slot % EACH; }

    static DEVICE bool within(int slot, int lane) { return S % LANES == 0 || channel(slot, lane) < S; }

    DEVICE void clear() {
#pragma unroll
        for (int slot = 0; slot < SLOTS; ++slot) x[slot] = 0.0f;
    }

    // The numbers (S,) of a lane, at an address as aligned as `EACH` of them.
    static DEVICE void fetch(const float* row, float (&numbers)[SLOTS], int lane) {
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            u32 words[EACH] = {};
            const int slot = piece * EACH;
            if (within(slot, lane)) load_words<BYTES, ALIGN>(reinterpret_cast<const u8*>(row + channel(slot, lane)), words);
#pragma unroll
            for (int i = 0; i < EACH; ++i) numbers[slot + i] = __uint_as_float(words[i]);
        }
    }

    DEVICE void load(const float* row, int lane) { fetch(row, x, lane); }

    DEVICE void store(float* row, int lane) const {
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            u32 words[EACH];
            const int slot = piece * EACH;
#pragma unroll
            for (int i = 0; i < EACH; ++i) words[i] = __float_as_uint(x[slot + i]);
            if (within(slot, lane)) store_words<BYTES, ALIGN>(reinterpret_cast<u8*>(row + channel(slot, lane)), words);
        }
    }

    // Times one number, then times a sign a channel.
    DEVICE void multiply(float factor, const float* signs, int lane) {
        float sign[SLOTS];
        fetch(signs, sign, lane);
#pragma unroll
        for (int slot = 0; slot < SLOTS; ++slot) x[slot] = x[slot] * factor * sign[slot];
    }

    DEVICE void divide(float divisor) {
#pragma unroll
        for (int slot = 0; slot < SLOTS; ++slot) x[slot] = x[slot] / divisor;
    }

    // The whole row for all lanes to see, once all have read what was there before.
    DEVICE void share(float* stage, int lane) const {
        __syncwarp();
        store(stage, lane);
        __syncwarp();
    }

    // Euclidean length, squares added one after the other; the same in all lanes. This takes a stage of S floats.
    DEVICE float length(float* stage, int lane) const {
        share(stage, lane);
        float total = 0.0f;
#pragma unroll 4
        for (int at = 0; at < S; at += 4) {
            const float4 four = ::load<float4>(reinterpret_cast<const u8*>(stage + at));
            total += four.x * four.x;
            total += four.y * four.y;
            total += four.z * four.z;
            total += four.w * four.w;
        }
        return sqrtf(total);
    }

    DEVICE void transform(float* stage, const float* table, float scale, int lane) {
        if constexpr (PARTS > 1) mix(stage, table + 2 * S, lane);
#pragma unroll
        for (int stride = 1; stride < EACH; stride *= 2) pairs(stride);
#pragma unroll
        for (int stride = EACH; stride < ACROSS; stride *= 2) {
            // A product with 1 or -1 is exact: this is x + other, or other - x.
            const float sign = lane & (stride / EACH) ? -1.0f : 1.0f;
#pragma unroll
            for (int slot = 0; slot < SLOTS; ++slot)
                x[slot] = fmaf(sign, x[slot], __shfl_xor_sync(ALL_LANES, x[slot], stride / EACH));
        }
#pragma unroll
        for (int stride = PIECE; stride < RUN; stride *= 2) pairs(stride / LANES);
#pragma unroll
        for (int slot = 0; slot < SLOTS; ++slot) x[slot] *= scale;
    }

    // Butterflies of slots so far apart.
    DEVICE void pairs(int apart) {
#pragma unroll
        for (int slot = 0; slot < SLOTS; ++slot)
            if ((slot & apart) == 0) {
                const float low = x[slot], high = x[slot + apart];
                x[slot] = low + high;
                x[slot + apart] = low - high;
            }
    }

    // The matrix of the odd factor, parts added one after the other.
    DEVICE void mix(float* stage, const float* matrix, int lane) {
        share(stage, lane);
#pragma unroll
        for (int slot = 0; slot < SLOTS; ++slot) {
            const int row = channel(slot, lane) / RUN, column = channel(slot, lane) % RUN;
            float total = 0.0f;
            if (within(slot, lane))
                for (int part = 0; part < PARTS; ++part) total += matrix[row * PARTS + part] * stage[part * RUN + column];
            x[slot] = total;
        }
    }
};
