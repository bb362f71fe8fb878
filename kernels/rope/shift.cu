// Stored keys moved by a number of positions, where they lie: `rope.reference.shift`, to the bit where products are
// not contracted. FORMAT is F32, F16 or BF16; SIZE channels a head, of which TURNED turn in pairs, NEOX (i and
// i + TURNED / 2) or not (2i and 2i + 1).

#if FORMAT == 1
typedef float Number;
DEVICE float wide(float x) { return x; }
DEVICE float narrow(float x) { return x; }
#elif FORMAT == 2
typedef u16 Number;
DEVICE float wide(u16 x) { return half_to_float(x); }
DEVICE u16 narrow(float x) { return float_to_half(x); }
#else
typedef u16 Number;
DEVICE float wide(u16 x) { return bf16_to_float(x); }
DEVICE u16 narrow(float x) { return float_to_bf16(x); }
#endif

// Turn `count` heads of rows that follow one another from `first` on; `table` (2, TURNED / 2) are cosines, then
// sines. A thread a pair.
extern "C" __global__ void shift(Number* keys, const float* table, i64 first, i64 count) {
    const i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= count * (TURNED / 2)) return;
    const int pair = (int)(index % (TURNED / 2));
    Number* row = keys + (first + index / (TURNED / 2)) * SIZE;
    Number &left = row[NEOX ? pair : 2 * pair], &right = row[NEOX ? pair + TURNED / 2 : 2 * pair + 1];
    const float a = wide(left), b = wide(right), cosine = table[pair], sine = table[TURNED / 2 + pair];
    left = narrow(a * cosine - b * sine);
    right = narrow(a * sine + b * cosine);
}
