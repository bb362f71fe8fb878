// Runs a kernel's threads as fibers of one host thread, and looks at every access they make.
//
// A fiber runs until it waits: for its block (__syncthreads) or for lanes of its warp (__syncwarp, shuffles). Which
// runs next is the launch's order. Sources are compiled with -fsanitize=thread, whose callbacks (__tsan_*) are
// defined here: an access outside the launch's arrays, a wide access that is not aligned, and two accesses of
// different threads to a byte of shared memory or of an array, one of them a write, with no barrier between them,
// end the launch with a message. Nothing orders blocks.
#include <csetjmp>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#define VISIBLE extern "C" __attribute__((visibility("default")))

struct Dim { unsigned x, y, z; };
extern "C" {
Dim warmkv_thread, warmkv_block, warmkv_threads, warmkv_grid;
unsigned char* warmkv_dynamic;
// The ends of a section whose name is an identifier, and of the library.
extern unsigned char __start_warmkv_shared[] __attribute__((weak, visibility("hidden")));
extern unsigned char __stop_warmkv_shared[] __attribute__((weak, visibility("hidden")));
extern const char __ehdr_start __attribute__((visibility("hidden")));
extern const char _end __attribute__((visibility("hidden")));
}

namespace {

constexpr int MOST_THREADS = 1024, LANES = 32;
constexpr size_t STACK = 256 << 10;
enum State { READY, AT_BARRIER, AT_MEETING, DONE };
enum Order { FORWARD, REVERSE, SHUFFLED };

struct Fiber {
#if defined(__x86_64__)
    void* stack;
#else
    ucontext_t context;
#endif
    State state;
    const char* file;
    int line;
    int kind, operand, width;
    unsigned mask;
    unsigned long long value;
};

// Of a byte of an array that a kernel may write: threads of the launch, counted from 1, and blocks.
struct Mark {
    uint32_t writer, writer_block, write_epoch, reader, reader_block, read_epoch;
};
struct Range {
    uintptr_t start, end;
    Mark* marks;
};

Fiber fibers[MOST_THREADS];
unsigned char* stacks;
int threads, current;
void (*kernel)(void**);
void** arguments;
Range ranges[64];
int range_count, last_range;
char failure[512];
bool failed;
uint64_t random_state;

// -- switching ------------------------------------------------------------------------------------------------

#if defined(__x86_64__)
void* scheduler_stack;
extern "C" void warmkv_switch(void** from, void* to);
asm(R"(
.text
.local warmkv_switch
.type warmkv_switch,@function
warmkv_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size warmkv_switch,.-warmkv_switch
)");
void leave() { warmkv_switch(&fibers[current].stack, scheduler_stack); }
#else
ucontext_t scheduler_context;
void leave() { swapcontext(&fibers[current].context, &scheduler_context); }
#endif

void body() {
    kernel(arguments);
    fibers[current].state = DONE;
    leave();
    abort();
}

void prepare(int thread) {
    Fiber& fiber = fibers[thread];
    fiber.state = READY;
    unsigned char* const base = stacks + STACK * thread;
#if defined(__x86_64__)
    void** top = (void**)(base + STACK - 64);
    *--top = nullptr;
    *--top = (void*)body;
    top -= 6;
    memset(top, 0, 6 * sizeof(void*));
    fiber.stack = top;
#else
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = base;
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, body, 0);
#endif
}

void resume(int thread) {
    current = thread;
    warmkv_thread.x = (unsigned)thread;
#if defined(__x86_64__)
    warmkv_switch(&scheduler_stack, fibers[thread].stack);
#else
    swapcontext(&scheduler_context, &fibers[thread].context);
#endif
}

void note(const char* format, ...) {
    if (failed) return;
    failed = true;
    int at = snprintf(failure, sizeof failure, "block (%u,%u,%u): ", warmkv_block.x, warmkv_block.y, warmkv_block.z);
    va_list more;
    va_start(more, format);
    vsnprintf(failure + at, sizeof failure - at, format, more);
    va_end(more);
}

uint64_t drawn() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

// -- shared memory: who touched a byte last, and what came between ------------------------------------------------

// Threads are ordered by barriers of the block (`epoch`) and by __syncwarp of their warp (`turns`). Shuffles order
// nothing in memory.
struct Cell {
    uint32_t write_epoch, write_turn, read_epoch, read_turn;
    int16_t writer, reader, read_warp;
};
constexpr int16_t SEVERAL = -1;
Cell* cells;
size_t cell_count, static_bytes, dynamic_bytes;
uint32_t epoch = 1, turns[MOST_THREADS / LANES];

void race(const char* what, int other, size_t at) {
    note("thread %d %s thread %d%s at byte %zu of shared memory, with no barrier between them", current, what,
         other < 0 ? 0 : other, other < 0 ? " and others" : "", at);
    leave();
}

bool written_before(const Cell& cell) {
    if (cell.write_epoch != epoch || cell.writer == current) return true;
    return cell.writer / LANES == current / LANES && cell.write_turn != turns[current / LANES];
}

void touch(size_t at, size_t bytes, bool writes) {
    const int warp = current / LANES;
    for (size_t byte = at; byte < at + bytes; ++byte) {
        Cell& cell = cells[byte];
        if (!written_before(cell)) race(writes ? "writes what was written by" : "reads what is written by", cell.writer, byte);
        const bool fresh = cell.read_epoch == epoch;
        if (writes) {
            if (fresh && cell.read_warp != warp) race("writes what is read by", cell.reader, byte);
            if (fresh && cell.read_turn == turns[warp] && cell.reader != current) race("writes what is read by", cell.reader, byte);
            cell.writer = (int16_t)current, cell.write_epoch = epoch, cell.write_turn = turns[warp];
        } else if (!fresh || (cell.read_warp == warp && cell.read_turn != turns[warp])) {
            cell.reader = (int16_t)current, cell.read_warp = (int16_t)warp, cell.read_epoch = epoch, cell.read_turn = turns[warp];
        } else if (cell.read_warp != warp) {
            cell.read_warp = SEVERAL, cell.reader = SEVERAL;
        } else if (cell.reader != current) {
            cell.reader = SEVERAL;
        }
    }
}

// -- arrays that are written: the same, but that there are other blocks -----------------------------------------------

constexpr uint32_t MANY = ~0u;
uint32_t block_number;

// Whether what this thread does comes behind what another did.
bool behind(uint32_t other, uint32_t block, uint32_t when, uint32_t me) {
    return !other || other == me || (block == block_number && when != epoch);
}

void mark(const Range& range, uintptr_t at, size_t bytes, bool writes) {
    const uint32_t me = block_number * (uint32_t)threads + (uint32_t)current + 1;
    for (uintptr_t byte = at; byte < at + bytes; ++byte) {
        Mark& found = range.marks[byte - range.start];
        const char* what = nullptr;
        if (!behind(found.writer, found.writer_block, found.write_epoch, me))
            what = writes ? "writes what was written by" : "reads what is written by";
        else if (writes && !behind(found.reader, found.reader_block, found.read_epoch, me))
            what = "writes what is read by";
        if (what) {
            note("thread %d %s another at byte %zu of array %d, with no barrier between them", current, what,
                 (size_t)(byte - range.start), (int)(&range - ranges));
            leave();
        }
        if (writes) {
            found.writer = me, found.writer_block = block_number, found.write_epoch = epoch;
        } else if (behind(found.reader, found.reader_block, found.read_epoch, me)) {
            found.reader = me, found.reader_block = block_number, found.read_epoch = epoch;
        } else {
            found.reader = MANY, found.read_epoch = epoch;
            if (found.reader_block != block_number) found.reader_block = MANY;
        }
    }
}

// -- every access ---------------------------------------------------------------------------------------------

bool within(uintptr_t at, size_t bytes, uintptr_t start, uintptr_t end) { return at >= start && at + bytes <= end; }

void access(const void* address, size_t bytes, bool writes, bool counts = true) {
    const uintptr_t at = (uintptr_t)address;
    if (range_count && within(at, bytes, ranges[last_range].start, ranges[last_range].end)) {
        if (ranges[last_range].marks && counts) mark(ranges[last_range], at, bytes, writes);
        return;
    }
    const uintptr_t shared = (uintptr_t)__start_warmkv_shared, dynamic = (uintptr_t)warmkv_dynamic;
    if (within(at, bytes, shared, shared + static_bytes)) {
        if (counts) touch(at - shared, bytes, writes);
        return;
    }
    if (within(at, bytes, dynamic, dynamic + dynamic_bytes)) {
        if (counts) touch(static_bytes + at - dynamic, bytes, writes);
        return;
    }
    if (within(at, bytes, (uintptr_t)stacks + STACK * current, (uintptr_t)stacks + STACK * (current + 1))) return;
    if (within(at, bytes, (uintptr_t)&__ehdr_start, (uintptr_t)&_end)) return;
    for (int i = 0; i < range_count; ++i)
        if (within(at, bytes, ranges[i].start, ranges[i].end)) {
            last_range = i;
            if (ranges[i].marks && counts) mark(ranges[i], at, bytes, writes);
            return;
        }
    long long off = 0;
    int nearest = -1;
    for (int i = 0; i < range_count; ++i) {
        const long long distance = (long long)at - (long long)ranges[i].end;
        if (nearest < 0 || llabs(distance) < llabs(off)) nearest = i, off = distance;
    }
    note("thread %d %s %zu bytes outside of every array, %lld bytes from the end of array %d", current,
         writes ? "writes" : "reads", bytes, off, nearest);
    leave();
}

void aligned(const void* address, size_t bytes) {
    if ((uintptr_t)address % bytes == 0) return;
    note("thread %d: an access of %zu bytes is not aligned", current, bytes);
    leave();
}

// -- lanes that wait for each other ---------------------------------------------------------------------------

const char* const KINDS[] = {"__syncwarp", "__shfl_sync", "__shfl_xor_sync", "__shfl_up_sync", "__shfl_down_sync", "__ballot_sync"};

int source_of(const Fiber& fiber, int lane) {
    const int start = lane / fiber.width * fiber.width, end = start + fiber.width, by = fiber.operand;
    int from = lane;
    if (fiber.kind == 1) from = start + (by & (fiber.width - 1));
    if (fiber.kind == 2) from = (lane ^ by) < end ? lane ^ by : lane;
    if (fiber.kind == 3) from = lane - by >= start ? lane - by : lane;
    if (fiber.kind == 4) from = lane + by < end ? lane + by : lane;
    return from;
}

// Lets lanes go on that have all come to one place. Returns whether there were any.
bool meet(int warp) {
    const int first = warp * LANES, last = first + LANES < threads ? first + LANES : threads;
    const unsigned there = last - first == LANES ? ~0u : (1u << (last - first)) - 1;
    bool any = false;
    for (int lead = first; lead < last; ++lead) {
        const Fiber& one = fibers[lead];
        if (one.state != AT_MEETING) continue;
        const unsigned named = one.mask & there;
        if (!(named >> (lead - first) & 1u)) {
            note("thread %d at %s in %s(%d) is not in its mask %08x", lead, KINDS[one.kind], one.file, one.line, one.mask);
            return false;
        }
        bool all = true;
        unsigned taking = 0;
        for (int lane = first; lane < last; ++lane) {
            if (!(named >> (lane - first) & 1u) || fibers[lane].state == DONE) continue;
            const Fiber& other = fibers[lane];
            all = all && other.state == AT_MEETING && other.kind == one.kind && other.mask == one.mask && other.line == one.line
                && !strcmp(other.file, one.file);
            taking |= 1u << (lane - first);
        }
        if (!all) continue;
        unsigned long long results[LANES] = {}, ballot = 0;
        for (int lane = first; lane < last; ++lane)
            if (taking >> (lane - first) & 1u) ballot |= (unsigned long long)(fibers[lane].value != 0) << (lane - first);
        for (int lane = first; lane < last; ++lane) {
            if (!(taking >> (lane - first) & 1u)) continue;
            const Fiber& fiber = fibers[lane];
            if (fiber.kind >= 1 && fiber.kind <= 4) {
                const int from = source_of(fiber, lane - first);
                if (!(taking >> from & 1u)) {
                    note("thread %d at %s in %s(%d) reads lane %d, which takes no part", lane, KINDS[fiber.kind], fiber.file,
                         fiber.line, from);
                    return false;
                }
                results[lane - first] = fibers[first + from].value;
            } else {
                results[lane - first] = ballot;
            }
        }
        if (one.kind == 0 && taking == there) ++turns[warp];
        for (int lane = first; lane < last; ++lane)
            if (taking >> (lane - first) & 1u) fibers[lane].value = results[lane - first], fibers[lane].state = READY;
        any = true;
    }
    return any;
}

// -- a block --------------------------------------------------------------------------------------------------

void permute(int* numbers, int count, int order) {
    for (int i = 0; i < count; ++i) numbers[i] = order == REVERSE ? count - 1 - i : i;
    if (order == SHUFFLED)
        for (int i = count - 1; i > 0; --i) {
            const int other = (int)(drawn() % (uint64_t)(i + 1)), kept = numbers[i];
            numbers[i] = numbers[other], numbers[other] = kept;
        }
}

// Whether some lane of a warp can run; runs each that can once, in order.
bool step(int warp, int order) {
    int lanes[LANES];
    const int first = warp * LANES, count = first + LANES < threads ? LANES : threads - first;
    permute(lanes, count, order);
    bool any = false;
    for (int i = 0; i < count && !failed; ++i)
        if (fibers[first + lanes[i]].state == READY) {
            resume(first + lanes[i]);
            any = true;
        }
    return any;
}

void pass_barrier() {
    const Fiber* at = nullptr;
    int waiting = -1, gone = -1;
    for (int thread = 0; thread < threads; ++thread) {
        const Fiber& fiber = fibers[thread];
        if (fiber.state == AT_MEETING)
            return note("thread %d waits for its warp at %s in %s(%d), others of which never come", thread, KINDS[fiber.kind],
                        fiber.file, fiber.line);
        if (fiber.state == DONE) {
            gone = thread;
            continue;
        }
        if (at && (at->line != fiber.line || strcmp(at->file, fiber.file)))
            return note("thread %d waits at the barrier in %s(%d), thread %d at that in %s(%d)", waiting, at->file, at->line,
                        thread, fiber.file, fiber.line);
        at = &fiber, waiting = thread;
    }
    if (at && gone >= 0)
        return note("thread %d waits at the barrier in %s(%d), thread %d has ended", waiting, at->file, at->line, gone);
    ++epoch;
    for (int thread = 0; thread < threads; ++thread)
        if (fibers[thread].state == AT_BARRIER) fibers[thread].state = READY;
}

void run_block(int order) {
    memset(__start_warmkv_shared, 0xff, static_bytes);
    memset(warmkv_dynamic, 0xff, dynamic_bytes);
    ++epoch;
    for (int thread = 0; thread < threads; ++thread) prepare(thread);
    const int warps = (threads + LANES - 1) / LANES;
    int queue[MOST_THREADS / LANES];
    for (;;) {
        permute(queue, warps, order);
        bool any = false;
        for (int i = 0; i < warps && !failed; ++i) {
            // As far as it can go, ahead of all others; shuffled, sometimes not.
            while (!failed && (step(queue[i], order) || meet(queue[i]))) {
                any = true;
                if (order == SHUFFLED && drawn() % 4 == 0) break;
            }
        }
        if (failed) return;
        if (any) continue;
        bool over = true;
        for (int thread = 0; thread < threads; ++thread) over = over && fibers[thread].state == DONE;
        if (over) return;
        pass_barrier();
        if (failed) return;
    }
}

}  // namespace

// -- what sources call ----------------------------------------------------------------------------------------

extern "C" {

void warmkv_barrier(const char* file, int line) {
    Fiber& fiber = fibers[current];
    fiber.state = AT_BARRIER, fiber.file = file, fiber.line = line;
    leave();
}

unsigned long long warmkv_meet(int kind, unsigned mask, unsigned long long value, int operand, int width, const char* file, int line) {
    Fiber& fiber = fibers[current];
    fiber.state = AT_MEETING, fiber.kind = kind, fiber.mask = mask, fiber.value = value, fiber.operand = operand;
    fiber.width = width, fiber.file = file, fiber.line = line;
    leave();
    return fiber.value;
}

void warmkv_check_aligned(const void* address, unsigned long bytes) { aligned(address, bytes); }
void warmkv_check_atomic(const void* address, unsigned long bytes) {
    aligned(address, bytes);
    access(address, bytes, true, false);
}

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define ACCESS(name, bytes)                                                                           \
    void __tsan_read##name(void* at) { aligned(at, bytes), access(at, bytes, false); }                \
    void __tsan_write##name(void* at) { aligned(at, bytes), access(at, bytes, true); }                \
    void __tsan_unaligned_read##name(void* at) { access(at, bytes, false); }                          \
    void __tsan_unaligned_write##name(void* at) { access(at, bytes, true); }
ACCESS(1, 1)
ACCESS(2, 2)
ACCESS(4, 4)
ACCESS(8, 8)
ACCESS(16, 16)
void __tsan_read_range(void* at, unsigned long bytes) { access(at, bytes, false); }
void __tsan_write_range(void* at, unsigned long bytes) { access(at, bytes, true); }
}

// Runs `run` over a grid. `sizes` are grid x, y, z, threads a block, bytes of dynamic shared memory, order, seed and
// the number of arrays, whose first and last addresses are `arrays`, each pair before whether it may be written.
// Returns null, or what went wrong.
VISIBLE const char* warmkv_launch(void (*run)(void**), void** given, const long long* sizes, const unsigned long long* arrays) {
    if (!stacks) {
        void* const got = mmap(nullptr, STACK * MOST_THREADS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (got == MAP_FAILED) return "no memory for stacks";
        stacks = (unsigned char*)got;
    }
    kernel = run, arguments = given, failed = false, failure[0] = 0;
    warmkv_grid = {(unsigned)sizes[0], (unsigned)sizes[1], (unsigned)sizes[2]};
    threads = (int)sizes[3];
    warmkv_threads = {(unsigned)threads, 1, 1};
    warmkv_thread = {0, 0, 0};
    const int order = (int)sizes[5];
    random_state = (uint64_t)sizes[6] * 0x9e3779b97f4a7c15ull | 1;
    range_count = (int)sizes[7], last_range = 0;
    for (int i = 0; i < range_count; ++i) {
        const uintptr_t start = (uintptr_t)arrays[3 * i], end = (uintptr_t)arrays[3 * i + 1];
        ranges[i] = {start, end, arrays[3 * i + 2] ? (Mark*)calloc(end - start + 1, sizeof(Mark)) : nullptr};
    }
    static_bytes = (size_t)(__stop_warmkv_shared - __start_warmkv_shared), dynamic_bytes = (size_t)sizes[4];
    if (cell_count < static_bytes + dynamic_bytes) {
        free(cells);
        cell_count = static_bytes + dynamic_bytes;
        cells = (Cell*)calloc(cell_count, sizeof(Cell));
    }
    warmkv_dynamic = (unsigned char*)aligned_alloc(64, (dynamic_bytes + 64) / 64 * 64);
    const long long blocks = sizes[0] * sizes[1] * sizes[2];
    // Blocks run in the order of threads; shuffled, from a drawn one on.
    const long long start = order == SHUFFLED ? (long long)(drawn() % (uint64_t)blocks) : 0;
    for (long long number = 0; number < blocks && !failed; ++number) {
        const long long block = order == REVERSE ? blocks - 1 - number : (number + start) % blocks;
        block_number = (uint32_t)block;
        warmkv_block = {(unsigned)(block % sizes[0]), (unsigned)(block / sizes[0] % sizes[1]), (unsigned)(block / sizes[0] / sizes[1])};
        run_block(order);
    }
    for (int i = 0; i < range_count; ++i) free(ranges[i].marks);
    free(warmkv_dynamic);
    warmkv_dynamic = nullptr;
    return failed ? failure : nullptr;
}
