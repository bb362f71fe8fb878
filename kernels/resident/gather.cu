// Rows that stay, brought together at the front of a plane: out to a scratch and back, since threads that move them
// in place would write what others have yet to read. Program: WORD, the bytes of an access, which divide a row's.

namespace {
template <int BYTES> struct Word;
template <> struct Word<1> { using type = u8; };
template <> struct Word<2> { using type = u16; };
template <> struct Word<4> { using type = u32; };
template <> struct Word<8> { using type = uint2; };
template <> struct Word<16> { using type = uint4; };
}  // namespace

// Rows at `kept` (count,) of `plane`, which has `rows` of them of `row_words` WORDs each, to `scratch`; zeros for rows
// it has not. Any grid; less than 2^31 words.
extern "C" __global__ void gather(
    const u8* __restrict__ plane, const int* __restrict__ kept, int count, int rows, int row_words, u8* __restrict__ scratch) {
    using T = typename Word<WORD>::type;
    const u32 total = (u32)count * (u32)row_words, stride = gridDim.x * blockDim.x;
    for (u32 at = blockIdx.x * blockDim.x + threadIdx.x; at < total; at += stride) {
        const u32 row = (u32)kept[at / (u32)row_words], word = at % (u32)row_words;
        T found = {};
        if (row < (u32)rows) found = load<T>(plane + ((size_t)row * (u32)row_words + word) * WORD);
        store(scratch + (size_t)at * WORD, found);
    }
}

// `words` WORDs of `scratch` to the front of `plane`.
extern "C" __global__ void put(const u8* __restrict__ scratch, int words, u8* __restrict__ plane) {
    const u32 stride = gridDim.x * blockDim.x;
    for (u32 at = blockIdx.x * blockDim.x + threadIdx.x; at < (u32)words; at += stride)
        store(plane + (size_t)at * WORD, load<typename Word<WORD>::type>(scratch + (size_t)at * WORD));
}
