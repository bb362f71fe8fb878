// What CUDA adds to C++, for a host compiler: one fiber is one thread (runtime.cpp). Put before the sources of a
// program, with WARMKV_KERNEL of each of its kernels behind them.
#pragma GCC visibility push(hidden)

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// In a section of its own, which the runtime fills with NaN before each block. `used`: other threads see it.
#define __shared__ static __attribute__((section("warmkv_shared"), used))
#define DYNAMIC_SHARED(name) unsigned char* const name = warmkv_dynamic
#define CHECK_ALIGNED(address, bytes) warmkv_check_aligned(address, bytes)

typedef __SIZE_TYPE__ size_t;

struct warmkv_dim { unsigned x, y, z; };
extern "C" {
extern warmkv_dim warmkv_thread, warmkv_block, warmkv_threads, warmkv_grid;
extern unsigned char* warmkv_dynamic;
void warmkv_barrier(const char* file, int line);
unsigned long long warmkv_meet(int kind, unsigned mask, unsigned long long value, int operand, int width, const char* file, int line);
void warmkv_check_aligned(const void* address, unsigned long bytes);
void warmkv_check_atomic(const void* address, unsigned long bytes);
}
#define threadIdx warmkv_thread
#define blockIdx warmkv_block
#define blockDim warmkv_threads
#define gridDim warmkv_grid
constexpr int warpSize = 32;

#define __syncthreads() warmkv_barrier(__FILE__, __LINE__)
#define __syncwarp(...) warmkv_sync(__FILE__, __LINE__ __VA_OPT__(, ) __VA_ARGS__)
#define __shfl_sync(...) warmkv_shuffle<1>(__FILE__, __LINE__, __VA_ARGS__)
#define __shfl_xor_sync(...) warmkv_shuffle<2>(__FILE__, __LINE__, __VA_ARGS__)
#define __shfl_up_sync(...) warmkv_shuffle<3>(__FILE__, __LINE__, __VA_ARGS__)
#define __shfl_down_sync(...) warmkv_shuffle<4>(__FILE__, __LINE__, __VA_ARGS__)
#define __ballot_sync(mask, what) ((unsigned)warmkv_meet(5, mask, (what) ? 1 : 0, 0, 32, __FILE__, __LINE__))
#define __any_sync(mask, what) (__ballot_sync(mask, what) != 0)
#define __all_sync(mask, what) (__ballot_sync(mask, !(what)) == 0)
#define __threadfence() ((void)0)
#define __threadfence_block() ((void)0)

inline void warmkv_sync(const char* file, int line, unsigned mask = 0xffffffffu) { warmkv_meet(0, mask, 0, 0, 32, file, line); }

template <int KIND, class T>
inline T warmkv_shuffle(const char* file, int line, unsigned mask, T value, int operand, int width = 32) {
    static_assert(sizeof(T) <= 8, "shuffles move at most 8 bytes");
    unsigned long long bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    bits = warmkv_meet(KIND, mask, bits, operand, width, file, line);
    __builtin_memcpy(&value, &bits, sizeof(T));
    return value;
}

#define WARMKV_VECTOR(name, type, bytes2, bytes4)                                                                  \
    struct __attribute__((aligned(bytes2))) name##2 { type x, y; };                                                \
    struct name##3 { type x, y, z; };                                                                              \
    struct __attribute__((aligned(bytes4))) name##4 { type x, y, z, w; };                                          \
    inline name##2 make_##name##2(type x, type y) { return {x, y}; }                                               \
    inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
WARMKV_VECTOR(float, float, 8, 16)
WARMKV_VECTOR(int, int, 8, 16)
WARMKV_VECTOR(uint, unsigned, 8, 16)
WARMKV_VECTOR(short, short, 4, 8)
WARMKV_VECTOR(ushort, unsigned short, 4, 8)
WARMKV_VECTOR(char, signed char, 2, 4)
WARMKV_VECTOR(uchar, unsigned char, 2, 4)

#define WARMKV_BITS(name, to, from) inline to name(from x) { to y; __builtin_memcpy(&y, &x, sizeof(y)); return y; }
WARMKV_BITS(__float_as_uint, unsigned, float)
WARMKV_BITS(__float_as_int, int, float)
WARMKV_BITS(__uint_as_float, float, unsigned)
WARMKV_BITS(__int_as_float, float, int)

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline int abs(int a) { return a < 0 ? -a : a; }

#define WARMKV_MATH1(name, builtin) inline float name(float x) { return builtin(x); }
WARMKV_MATH1(fabsf, __builtin_fabsf)
WARMKV_MATH1(sqrtf, __builtin_sqrtf)
WARMKV_MATH1(expf, __builtin_expf)
WARMKV_MATH1(exp2f, __builtin_exp2f)
WARMKV_MATH1(logf, __builtin_logf)
WARMKV_MATH1(log2f, __builtin_log2f)
WARMKV_MATH1(tanhf, __builtin_tanhf)
WARMKV_MATH1(sinf, __builtin_sinf)
WARMKV_MATH1(cosf, __builtin_cosf)
WARMKV_MATH1(truncf, __builtin_truncf)
WARMKV_MATH1(floorf, __builtin_floorf)
WARMKV_MATH1(ceilf, __builtin_ceilf)
WARMKV_MATH1(rintf, __builtin_rintf)
WARMKV_MATH1(roundf, __builtin_roundf)
WARMKV_MATH1(__expf, __builtin_expf)
WARMKV_MATH1(__logf, __builtin_logf)
inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
inline float fminf(float a, float b) { return __builtin_fminf(a, b); }
inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float copysignf(float a, float b) { return __builtin_copysignf(a, b); }
inline float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
inline int __float2int_rn(float x) { return (int)__builtin_rintf(x); }
inline int __float2int_rz(float x) { return (int)x; }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)((((unsigned long long)high << 32) | low) >> (shift & 31));
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned select) {
    const unsigned long long both = ((unsigned long long)high << 32) | low;
    unsigned out = 0;
    for (int i = 0; i < 4; ++i) out |= (unsigned)((both >> (8 * ((select >> (4 * i)) & 7))) & 255) << (8 * i);
    return out;
}
inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 4; ++i) sum += (int)(signed char)(a >> (8 * i)) * (int)(signed char)(b >> (8 * i));
    return sum;
}
template <class T>
inline T __ldg(const T* from) { return *from; }

// One thread runs at a time, so that reading and writing is atomic.
template <class T>
inline __attribute__((no_sanitize_thread, noinline)) T warmkv_add(T* at, T what) {
    warmkv_check_atomic(at, sizeof(T));
    const T old = *at;
    *at = old + what;
    return old;
}
template <class T>
inline __attribute__((no_sanitize_thread, noinline)) T warmkv_exchange(T* at, T what) {
    warmkv_check_atomic(at, sizeof(T));
    const T old = *at;
    *at = what;
    return old;
}
inline int atomicAdd(int* at, int what) { return warmkv_add(at, what); }
inline unsigned atomicAdd(unsigned* at, unsigned what) { return warmkv_add(at, what); }
inline float atomicAdd(float* at, float what) { return warmkv_add(at, what); }
inline int atomicExch(int* at, int what) { return warmkv_exchange(at, what); }
inline unsigned atomicExch(unsigned* at, unsigned what) { return warmkv_exchange(at, what); }
inline unsigned atomicInc(unsigned* at, unsigned most) { return warmkv_exchange(at, *at >= most ? 0u : *at + 1u); }

// -- kernels by name ------------------------------------------------------------------------------------------

template <class T> struct warmkv_kind { static constexpr int value = sizeof(T); };
template <class T> struct warmkv_kind<T*> { static constexpr int value = 'w'; };
template <class T> struct warmkv_kind<const T*> { static constexpr int value = 0; };
template <> struct warmkv_kind<float> { static constexpr int value = 'f'; };
template <int... I> struct warmkv_numbers {};

template <class... A, int... I>
inline __attribute__((no_sanitize_thread)) void warmkv_apply(void (*kernel)(A...), void** arguments, warmkv_numbers<I...>) {
    kernel(*(__typeof__(A)*)arguments[I]...);
}
template <class... A>
inline __attribute__((no_sanitize_thread)) void warmkv_apply(void (*kernel)(A...), void** arguments) {
    warmkv_apply(kernel, arguments, warmkv_numbers<__integer_pack(sizeof...(A))...>());
}
template <class... A>
inline __attribute__((no_sanitize_thread)) int warmkv_describe(void (*)(A...), int* kinds) {
    const int all[] = {warmkv_kind<A>::value..., 0};
    for (int i = 0; i < (int)sizeof...(A); ++i) kinds[i] = all[i];
    return (int)sizeof...(A);
}
// Not looked at: what reads arguments is not the kernel.
#define WARMKV_KERNEL(name)                                                                                         \
    extern "C" __attribute__((visibility("default"), no_sanitize_thread)) void warmkv_run_##name(void** arguments) { \
        warmkv_apply(name, arguments);                                                                               \
    }                                                                                                                \
    extern "C" __attribute__((visibility("default"), no_sanitize_thread)) int warmkv_kinds_##name(int* kinds) {      \
        return warmkv_describe(name, kinds);                                                                         \
    }
