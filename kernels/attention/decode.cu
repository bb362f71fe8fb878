// Decode attention: queries of the newest positions over the rows of one KV head, a range of rows per block.
//
// Warps work on their own until the end. ACROSS lanes share a row, each with some octets of it, so that a warp
// takes 32 / ACROSS rows side by side and ROWS of those one after the other: all their bytes are on the way before
// the first is used. HEADS query heads a warp use what was read; CHUNKS warps beside each other cover more heads of
// the group, ROW_WARPS warps more rows.
//
// Logits of a step are ROWS * HEADS sums over ACROSS lanes. Adding them up halves what a lane holds with each
// exchange, so that in the end a lane has HELD of them, in order: rows are told apart by the first exchanges, heads
// by the later ones. Exponentials are taken there, once, and handed round.
//
// KEY_FORMAT, KEY_SIZE, VALUE_FORMAT, VALUE_SIZE; SHARED_BY query heads a KV head; the shape as above (`tiling.py`),
// ROWS and ACROSS powers of two, BESIDE blocks of a processor. Sums are float32; a running maximum is taken off each
// exponent.

using Keys = Span<KEY_FORMAT, KEY_SIZE, true>;
using Values = Span<VALUE_FORMAT, VALUE_SIZE, false>;

DEVICE constexpr int octets_of(int width) { return (width + OCTET - 1) / OCTET; }
constexpr int KEY_OCTETS = octets_of(Keys::WIDTH), VALUE_OCTETS = octets_of(Values::WIDTH);
// Octets of a lane.
constexpr int KEY_PARTS = (KEY_OCTETS + ACROSS - 1) / ACROSS, VALUE_PARTS = (VALUE_OCTETS + ACROSS - 1) / ACROSS;
constexpr int SLOTS = LANES / ACROSS;
constexpr int STEP = SLOTS * ROWS;
constexpr int SCORES = ROWS * HEADS;
constexpr int BLOCK_HEADS = CHUNKS * HEADS;
// The lowest exchange that tells rows apart.
constexpr int ROW_EXCHANGE = ACROSS / smaller(ROWS, ACROSS);

DEVICE constexpr int held_of(int count, int across) {
    return across == 1 ? count : held_of(count % 2 ? count : count / 2, across / 2);
}
constexpr int HELD = held_of(SCORES, ACROSS);
// Heads among them.
constexpr int KNOWN = smaller(HELD, HEADS);

// Sums over ACROSS lanes: COUNT numbers of each lane to the ones it holds.
template <int COUNT, int EXCHANGE>
DEVICE void add_up(float (&x)[SCORES], int lane) {
    if constexpr (EXCHANGE == 0) {
        return;
    } else if constexpr (COUNT % 2) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) x[i] += __shfl_xor_sync(ALL_LANES, x[i], EXCHANGE);
        add_up<COUNT, EXCHANGE / 2>(x, lane);
    } else {
        const bool upper = lane & EXCHANGE;
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i) {
            const float given = upper ? x[i] : x[i + COUNT / 2], kept = upper ? x[i + COUNT / 2] : x[i];
            x[i] = kept + __shfl_xor_sync(ALL_LANES, given, EXCHANGE);
        }
        add_up<COUNT / 2, EXCHANGE / 2>(x, lane);
    }
}

// The first logit that a lane holds.
DEVICE int held_from(int lane) {
    int first = 0, count = SCORES;
#pragma unroll
    for (int exchange = ACROSS / 2; exchange; exchange /= 2)
        if (count % 2 == 0) {
            count /= 2;
            if (lane & exchange) first += count;
        }
    return first;
}

// Logit `index` from who holds it, lanes of the slot counted from `slot` on; `x` are KEPT numbers, for heads or all.
template <int KEPT>
DEVICE float handed(const float (&x)[KEPT], int index, int slot) {
    int lane = 0, count = SCORES;
#pragma unroll
    for (int exchange = ACROSS / 2; exchange; exchange /= 2)
        if (count % 2 == 0) {
            count /= 2;
            if (index >= count) index -= count, lane += exchange;
        }
    if constexpr (ACROSS == 1) return x[index % KEPT];
    return __shfl_sync(ALL_LANES, x[index % KEPT], slot + lane);
}

// The logit of what is not there.
#define NOTHING __uint_as_float(0xff800000u)

// e^(x - top) where top is the largest: 0 where there is nothing.
DEVICE float below(float x, float top) { return expf(x - (top == NOTHING ? 0.0f : top)); }

// Fill, per split of the rows, (queries, heads) `tops` and `totals` and (queries, heads, VALUE_SIZE) `out`, as
// `attention.reference.Attended` has them; `sinks` (heads,) count where there is one split, which then is the
// result. Queries (queries, heads, key WIDTH) stand at positions that follow one another, the first of them
// `newest` before `length`; fields are (KV heads, size) or null.
extern "C" __global__ void __launch_bounds__(LANES* CHUNKS* ROW_WARPS, BESIDE) attend(
    const float* queries, const u8* keys, const u8* values, const float* key_field, const float* value_field,
    const float* sinks, const int* length, const int* base, float* out, float* tops, float* totals, int newest,
    int query_count, int kv_heads, int key_bytes, int value_bytes, int capacity, int window, int splits, float scale, float softcap) {
    __shared__ float warp_tops[ROW_WARPS][BLOCK_HEADS], warp_totals[ROW_WARPS][BLOCK_HEADS];
    // Octets of a channel number side by side, an odd number apart: neither side meets itself in a bank.
    constexpr int APART = VALUE_OCTETS | 1;
    __shared__ float sums[BLOCK_HEADS][OCTET * APART];

    const int thread = threadIdx.x, warp = thread / LANES, lane = thread % ACROSS, slot = thread % LANES / ACROSS;
    const int chunk = warp % CHUNKS, row_warp = warp / CHUNKS;
    const int split = blockIdx.x % splits, query = blockIdx.x / splits;
    const int kv_head = blockIdx.y % kv_heads, block_head = blockIdx.y / kv_heads * BLOCK_HEADS;

    // What this query sees, and of it the part of this block, in physical rows.
    const int behind = *length - newest + query + 1;
    const int last = min(behind - *base, capacity);
    const int first = max((window ? max(behind - window, 0) : 0) - *base, 0);
    const int span = max(last - first, 0), tile = STEP * ROW_WARPS;
    const int share = (span / splits + (span % splits != 0) + tile - 1) / tile * tile;
    const int begin = min(first + split * share, max(last, first)), end = min(begin + share, last);

    float q[HEADS][KEY_PARTS][OCTET], sum[HEADS][VALUE_PARTS][OCTET];
#pragma unroll
    for (int head = 0; head < HEADS; ++head) {
        const int shared = block_head + chunk * HEADS + head;
        const float* from = queries + ((i64)query * kv_heads * SHARED_BY + kv_head * SHARED_BY + shared) * Keys::WIDTH;
#pragma unroll
        for (int part = 0; part < KEY_PARTS; ++part)
#pragma unroll
            for (int i = 0; i < OCTET; ++i) {
                const int channel = OCTET * (lane + part * ACROSS) + i;
                const bool there = shared < SHARED_BY && channel < Keys::WIDTH;
                q[head][part][i] = there ? from[channel] * scale : 0.0f;
                if (there && key_field) q[head][part][i] *= key_field[kv_head * KEY_SIZE + channel];
            }
#pragma unroll
        for (int part = 0; part < VALUE_PARTS; ++part)
#pragma unroll
            for (int i = 0; i < OCTET; ++i) sum[head][part][i] = 0.0f;
    }
    float top[KNOWN], total[KNOWN];
#pragma unroll
    for (int i = 0; i < KNOWN; ++i) top[i] = NOTHING, total[i] = 0.0f;

    const u8 *key_rows = keys + (i64)kv_head * key_bytes, *value_rows = values + (i64)kv_head * value_bytes;
    const i64 key_apart = (i64)kv_heads * key_bytes, value_apart = (i64)kv_heads * value_bytes;
    const int held = held_from(lane);
    for (int at = begin + row_warp * STEP; at < end; at += tile) {
        typename Keys::Raw key[ROWS][KEY_PARTS];
        typename Values::Raw value[ROWS][VALUE_PARTS];
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            const int from = min(at + row * SLOTS + slot, end - 1);
#pragma unroll
            for (int part = 0; part < KEY_PARTS; ++part)
                key[row][part] = Keys::load(key_rows + from * key_apart, min(lane + part * ACROSS, KEY_OCTETS - 1));
        }
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            const int from = min(at + row * SLOTS + slot, end - 1);
#pragma unroll
            for (int part = 0; part < VALUE_PARTS; ++part)
                value[row][part] = Values::load(value_rows + from * value_apart, min(lane + part * ACROSS, VALUE_OCTETS - 1));
        }

        float score[SCORES];
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
#pragma unroll
            for (int head = 0; head < HEADS; ++head) score[row * HEADS + head] = 0.0f;
#pragma unroll
            for (int part = 0; part < KEY_PARTS; ++part) {
                const int octet = lane + part * ACROSS;
                float k[OCTET];
                Keys::read(key[row][part], octet, k);
                const bool there = KEY_OCTETS % ACROSS == 0 || octet < KEY_OCTETS;
#pragma unroll
                for (int i = 0; i < OCTET; ++i) {
                    if (!there) k[i] = 0.0f;
#pragma unroll
                    for (int head = 0; head < HEADS; ++head)
                        score[row * HEADS + head] = fmaf(q[head][part][i], k[i], score[row * HEADS + head]);
                }
            }
        }
        add_up<SCORES, ACROSS / 2>(score, lane);

        float most[KNOWN], fade[KNOWN], weight[HELD];
#pragma unroll
        for (int i = 0; i < KNOWN; ++i) most[i] = top[i];
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            float logit = score[i];
            if (softcap > 0.0f) logit = softcap * tanhf(logit / softcap);
            weight[i] = at + (held + i) / HEADS * SLOTS + slot < end ? logit : NOTHING;
            most[i % KNOWN] = fmaxf(most[i % KNOWN], weight[i]);
        }
#pragma unroll
        for (int i = 0; i < KNOWN; ++i) {
#pragma unroll
            for (int exchange = ACROSS / 2; exchange >= ROW_EXCHANGE && exchange; exchange /= 2)
                most[i] = fmaxf(most[i], __shfl_xor_sync(ALL_LANES, most[i], exchange));
            fade[i] = below(top[i], most[i]);
            top[i] = most[i];
            total[i] *= fade[i];
        }
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            weight[i] = below(weight[i], top[i % KNOWN]);
            total[i % KNOWN] += weight[i];
        }

#pragma unroll
        for (int head = 0; head < HEADS; ++head) {
            const float faded = handed(fade, head, slot * ACROSS);
#pragma unroll
            for (int part = 0; part < VALUE_PARTS; ++part)
#pragma unroll
                for (int i = 0; i < OCTET; ++i) sum[head][part][i] *= faded;
        }
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            float given[HEADS];
#pragma unroll
            for (int head = 0; head < HEADS; ++head) given[head] = handed(weight, row * HEADS + head, slot * ACROSS);
            // Weights of rows that are not there are 0, but the values in their place may be infinite.
            if (at + row * SLOTS + slot < end) {
#pragma unroll
                for (int part = 0; part < VALUE_PARTS; ++part) {
                    float v[OCTET];
                    Values::read(value[row][part], lane + part * ACROSS, v);
#pragma unroll
                    for (int i = 0; i < OCTET; ++i)
#pragma unroll
                        for (int head = 0; head < HEADS; ++head)
                            sum[head][part][i] = fmaf(given[head], v[i], sum[head][part][i]);
                }
            }
        }
    }

    // Slots of the warp, then warps of the block.
    float warp_top[HEADS];
#pragma unroll
    for (int i = 0; i < KNOWN; ++i)
#pragma unroll
        for (int exchange = ACROSS / 2; exchange >= ROW_EXCHANGE && exchange; exchange /= 2)
            total[i] += __shfl_xor_sync(ALL_LANES, total[i], exchange);
#pragma unroll
    for (int head = 0; head < HEADS; ++head) {
        const float mine = handed(top, head, slot * ACROSS);
        float most = mine, whole = handed(total, head, slot * ACROSS);
#pragma unroll
        for (int exchange = ACROSS; exchange < LANES; exchange *= 2)
            most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, exchange));
        const float faded = below(mine, most);
        whole *= faded;
#pragma unroll
        for (int exchange = ACROSS; exchange < LANES; exchange *= 2)
            whole += __shfl_xor_sync(ALL_LANES, whole, exchange);
#pragma unroll
        for (int part = 0; part < VALUE_PARTS; ++part)
#pragma unroll
            for (int i = 0; i < OCTET; ++i) {
                sum[head][part][i] *= faded;
#pragma unroll
                for (int exchange = ACROSS; exchange < LANES; exchange *= 2)
                    sum[head][part][i] += __shfl_xor_sync(ALL_LANES, sum[head][part][i], exchange);
            }
        warp_top[head] = most;
        if (thread % LANES == 0) {
            warp_tops[row_warp][chunk * HEADS + head] = most;
            warp_totals[row_warp][chunk * HEADS + head] = whole;
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int turn = 0; turn < ROW_WARPS; ++turn) {
        if (row_warp == turn && slot == 0) {
#pragma unroll
            for (int head = 0; head < HEADS; ++head) {
                const int index = chunk * HEADS + head;
                float most = NOTHING;
#pragma unroll
                for (int other = 0; other < ROW_WARPS; ++other) most = fmaxf(most, warp_tops[other][index]);
                const float faded = below(warp_top[head], most);
#pragma unroll
                for (int part = 0; part < VALUE_PARTS; ++part) {
                    const int octet = lane + part * ACROSS;
#pragma unroll
                    for (int i = 0; i < OCTET; ++i)
                        if (octet < VALUE_OCTETS) {
                            float* to = &sums[index][i * APART + octet];
                            *to = (turn ? *to : 0.0f) + sum[head][part][i] * faded;
                        }
                }
            }
        }
        __syncthreads();
    }
    const int heads = kv_heads * SHARED_BY;
#pragma unroll 1
    for (int index = 0; index < BLOCK_HEADS && block_head + index < SHARED_BY; ++index) {
        const int head = kv_head * SHARED_BY + block_head + index;
        float most = NOTHING, whole = 0.0f;
#pragma unroll
        for (int other = 0; other < ROW_WARPS; ++other) most = fmaxf(most, warp_tops[other][index]);
        const float own = most;
        if (splits == 1 && sinks) {
            most = fmaxf(most, sinks[head]);
            whole = below(sinks[head], most);
        }
#pragma unroll
        for (int other = 0; other < ROW_WARPS; ++other)
            whole += warp_totals[other][index] * below(warp_tops[other][index], most);
        const i64 to = (i64)split * query_count * heads + (i64)query * heads + head;
        const float share_of_it = whole == 0.0f ? 0.0f : below(own, most) / whole;
        for (int channel = thread; channel < VALUE_SIZE; channel += LANES * CHUNKS * ROW_WARPS) {
            const float field = value_field ? value_field[kv_head * VALUE_SIZE + channel] : 1.0f;
            out[to * VALUE_SIZE + channel] = sums[index][channel % OCTET * APART + channel / OCTET] * share_of_it * field;
        }
        if (thread == 0 && splits > 1) tops[to] = most, totals[to] = whole;
    }
}
