"""The host harness finds what it is there to find, and computes what a device computes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_harness import ORDERS, HostLauncher, barriers, survivors, without_barrier

import warmkv.kernels
from warmkv.kernels.cuda.launch import Program
from warmkv.kernels.errors import KernelError

PRELUDE = Program(("cuda/prelude.cu",))
by_order = pytest.mark.parametrize("order", ORDERS)


def run(
    source: str, *arguments: Any, order: str = "forward", grid: int = 1, block: int = 64, shared: int = 0, seed: int = 0
) -> None:
    """A kernel ``k`` behind the prelude."""
    launcher = HostLauncher(order, seed=seed, edit=lambda text: f'{text}\n#line 1 "tried.cu"\n{source}')
    launcher.launch(PRELUDE, "k", (grid, 1, 1), block, arguments, shared=shared)


def ints(count: int, fill: int = -7) -> Any:
    return np.full(count, fill, np.int32)


# -- what kernels compute -----------------------------------------------------------------------------------------

REVERSED = """
extern "C" __global__ void k(const int* in, int* out) {
    __shared__ int kept[64];
    kept[threadIdx.x] = in[blockIdx.x * 64 + threadIdx.x];
    __syncthreads();
    out[blockIdx.x * 64 + threadIdx.x] = kept[63 - threadIdx.x];
}
"""


@by_order
def test_blocks_exchange_through_shared_memory(order: str) -> None:
    given, out = np.arange(320, dtype=np.int32), ints(320)
    run(REVERSED, given, out, order=order, grid=5)
    np.testing.assert_array_equal(out.reshape(5, 64), given.reshape(5, 64)[:, ::-1])


@by_order
def test_dynamic_shared_memory_is_as_large_as_asked_for(order: str) -> None:
    source = """
    extern "C" __global__ void k(int* out) {
        DYNAMIC_SHARED(bytes);
        int* const kept = (int*)bytes;
        kept[threadIdx.x] = threadIdx.x;
        __syncthreads();
        out[threadIdx.x] = kept[(threadIdx.x + 1) % blockDim.x];
    }"""
    out = ints(96)
    run(source, out, order=order, block=96, shared=384)
    np.testing.assert_array_equal(out, np.roll(np.arange(96), -1))
    with pytest.raises(KernelError, match="outside of every array"):
        run(source, out, order=order, block=96, shared=380)


@by_order
@pytest.mark.parametrize("block", [32, 64, 96])
def test_shuffles_read_the_lane_they_name(order: str, block: int) -> None:
    source = """
    extern "C" __global__ void k(int* out) {
        const int lane = threadIdx.x % 32, mine = 100 * threadIdx.x, n = blockDim.x;
        out[threadIdx.x] = __shfl_xor_sync(ALL_LANES, mine, 5);
        out[n + threadIdx.x] = __shfl_up_sync(ALL_LANES, mine, 3);
        out[2 * n + threadIdx.x] = __shfl_down_sync(ALL_LANES, mine, 3);
        out[3 * n + threadIdx.x] = __shfl_sync(ALL_LANES, mine, 35);
        out[4 * n + threadIdx.x] = __shfl_sync(ALL_LANES, mine, lane / 2);
        out[5 * n + threadIdx.x] = __shfl_down_sync(ALL_LANES, mine, 5, 8);
        out[6 * n + threadIdx.x] = __ballot_sync(ALL_LANES, lane % 3 == 0);
        out[7 * n + threadIdx.x] = __any_sync(ALL_LANES, threadIdx.x == 40) * 2 + __all_sync(ALL_LANES, lane < 32);
    }"""
    out = ints(8 * block)
    run(source, out, order=order, block=block)
    thread = np.arange(block)
    warp, lane = thread // 32 * 32, thread % 32
    want = [
        warp + (lane ^ 5), np.where(lane < 3, thread, thread - 3), np.where(lane > 28, thread, thread + 3), warp + 3,
        warp + lane // 2, np.where(lane % 8 > 2, thread, thread + 5),
    ]  # fmt: skip
    np.testing.assert_array_equal(out.reshape(8, block)[:6], 100 * np.stack(want))
    assert set(out.reshape(8, block)[6]) == {sum(1 << at for at in range(0, 32, 3))}
    np.testing.assert_array_equal(out.reshape(8, block)[7], 1 + 2 * (thread // 32 == 1) * (block > 40))


@by_order
def test_reductions_of_the_prelude(order: str) -> None:
    source = """
    extern "C" __global__ void k(const float* in, float* out, int* bits) {
        const float x = in[threadIdx.x];
        out[threadIdx.x] = lanes_sum(x);
        out[64 + threadIdx.x] = lanes_max<8>(x);
        bits[threadIdx.x] = (int)lanes_or<16>(1u << (threadIdx.x % 32));
    }"""
    given = np.random.default_rng(0).integers(-50, 50, 64).astype(np.float32)
    out, bits = np.zeros(128, np.float32), ints(64)
    run(source, given, out, bits, order=order)
    np.testing.assert_array_equal(out[:64], given.reshape(2, 32).sum(axis=1).repeat(32))
    np.testing.assert_array_equal(out[64:], given.reshape(8, 8).max(axis=1).repeat(8))
    np.testing.assert_array_equal(bits.view(np.uint32), np.array([0xFFFF, 0xFFFF0000] * 2, np.uint32).repeat(16))


def test_atomics_count_every_thread() -> None:
    source = """
    extern "C" __global__ void k(int* total) {
        __shared__ int part;
        if (threadIdx.x == 0) part = 0;
        __syncthreads();
        atomicAdd(&part, (int)threadIdx.x);
        __syncthreads();
        if (threadIdx.x == 0) atomicAdd(total, part);
    }"""
    total = ints(1, 0)
    run(source, total, grid=3, order="shuffled")
    assert total[0] == 3 * sum(range(64))


@pytest.mark.parametrize("align", [1, 2, 4, 8, 16])
def test_words_come_and_go_at_every_alignment(align: int) -> None:
    source = f"""
    extern "C" __global__ void k(const u8* in, u8* out) {{
        u32 words[12];
        load_words<48, {align}>(in + {align} * threadIdx.x, words);
        store_words<48, {align}>(out + {max(align, 48) + (-48 % align)} * threadIdx.x, words);
        u32 few[1];
        load_words<{min(align, 4)}, {align}>(in + {align} * threadIdx.x, few);
        if (few[0] != (words[0] & (u32)((1ull << {8 * min(align, 4)}) - 1))) out[0] = 77;
    }}"""
    given = np.random.default_rng(2).integers(0, 70, 1024).astype(np.uint8)
    raw = np.zeros(64 * 48 + 16, np.uint8)
    out = raw[-raw.ctypes.data % 16 :][: 64 * 48]
    placed = np.zeros(1024 + 64 * 16, np.uint8)
    placed = placed[-placed.ctypes.data % 16 :][:1200]
    placed[:1024] = given
    run(source, placed, out)
    want = np.stack([placed[align * thread : align * thread + 48] for thread in range(64)])
    np.testing.assert_array_equal(out.reshape(64, 48), want)


# -- what it finds ------------------------------------------------------------------------------------------------


@by_order
def test_shared_memory_begins_as_nan_in_every_block(order: str) -> None:
    source = """
    extern "C" __global__ void k(float* out) {
        __shared__ float kept[64];
        out[blockIdx.x * 64 + threadIdx.x] = kept[threadIdx.x];
        kept[threadIdx.x] = 1.0f;
    }"""
    out = np.zeros(192, np.float32)
    run(source, out, order=order, grid=3)
    assert np.isnan(out).all()


@by_order
def test_a_missing_barrier_is_a_race_in_every_order(order: str) -> None:
    with pytest.raises(KernelError, match=r"k of cuda/prelude.cu: block .* thread \d+ (reads|writes) what .* with no barrier"):
        run(REVERSED.replace("__syncthreads();", ""), ints(64), ints(64), order=order)


@by_order
@pytest.mark.parametrize(
    "access", ["kept[0] = threadIdx.x;", "if (threadIdx.x == 40) kept[3] = 1; else out[threadIdx.x] = kept[3];"]
)
def test_two_threads_at_one_place_are_a_race(order: str, access: str) -> None:
    source = f'extern "C" __global__ void k(int* out) {{ __shared__ int kept[8]; {access} }}'
    with pytest.raises(KernelError, match="shared memory"):
        run(source, ints(64), order=order)


@by_order
def test_lanes_are_ordered_by_syncwarp_and_not_by_shuffles(order: str) -> None:
    source = """
    extern "C" __global__ void k(int* out) {
        __shared__ int kept[64];
        kept[threadIdx.x] = threadIdx.x;
        %s
        out[threadIdx.x] = kept[threadIdx.x ^ 1];
        %s
        kept[threadIdx.x] = 5;
    }"""
    out = ints(64)
    run(source % ("__syncwarp();", "__syncwarp();"), out, order=order)
    np.testing.assert_array_equal(out, np.arange(64) ^ 1)
    shuffle = "__shfl_xor_sync(ALL_LANES, 1, 1);"
    for between in ((shuffle, "__syncwarp();"), ("__syncwarp();", shuffle), ("", "__syncwarp();"), ("__syncwarp();", "")):
        with pytest.raises(KernelError, match="no barrier between"):
            run(source % between, out, order=order)


@by_order
@pytest.mark.parametrize("body, message", [
    ("const int at = blockIdx.x * 32 + threadIdx.x; out[at] = out[95 - at];", "(reads|writes) what is (read|written) by another"),
    ("out[threadIdx.x] = 1;", "writes what was written by another"),
    ("if (!threadIdx.x) out[0] = 1; __syncthreads(); if (threadIdx.x == 1) out[0] = 2;", "writes what was written by another"),
    ("((u8*)out)[3 * threadIdx.x] = 1; out[8 * (threadIdx.x / 8)] += 1;", "by another at byte"),
], ids=["moved in place", "two blocks", "two blocks, each in order", "bytes of a word"])  # fmt: skip
def test_threads_that_meet_in_an_array_are_a_race(order: str, body: str, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        run(f'extern "C" __global__ void k(int* out) {{ {body} }}', ints(96), order=order, grid=3, block=32)


@by_order
def test_threads_of_a_block_may_meet_in_an_array_behind_a_barrier(order: str) -> None:
    out = ints(96)
    run("""extern "C" __global__ void k(int* out, int* count) {
        int* const mine = out + 32 * blockIdx.x;
        mine[threadIdx.x] = threadIdx.x;
        __syncthreads();
        const int sum = mine[threadIdx.x] + mine[31 - threadIdx.x];
        __syncthreads();
        mine[31 - threadIdx.x] = sum;
        atomicAdd(count, 1);
    }""", out, count := ints(1, 0), order=order, grid=3, block=32)  # fmt: skip
    assert (out == 31).all() and count[0] == 96


def test_syncwarp_does_not_order_warps() -> None:
    with pytest.raises(KernelError, match="no barrier between"):
        run(REVERSED.replace("__syncthreads", "__syncwarp"), ints(64), ints(64))


@by_order
@pytest.mark.parametrize(
    "body, message",
    [
        ("if (threadIdx.x < 63) __syncthreads();", "has ended"),
        ("if (threadIdx.x < 32) { __syncthreads(); }\nelse { __syncthreads(); }", "waits at the barrier"),
        ("if (threadIdx.x < 31) __syncwarp();\nelse __syncthreads();", "never come|waits for its warp"),
        ("if (threadIdx.x == 5) return;\nout[threadIdx.x] = __shfl_xor_sync(ALL_LANES, 3, 1);", "takes no part"),
        ("out[threadIdx.x] = __shfl_sync(0xfffffffeu, 3, 1);", "not in its mask"),
        ("if (threadIdx.x % 32 < 16) out[threadIdx.x] = __shfl_sync(0xffffu, 3, 16);", "takes no part"),
    ],
)
def test_threads_that_do_not_meet_are_found(order: str, body: str, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        run(f'extern "C" __global__ void k(int* out) {{\n{body}\n}}', ints(64), order=order)


@pytest.mark.parametrize(
    "access, message",
    [
        ("out[threadIdx.x + 1] = 1;", "writes 4 bytes outside of every array, 0 bytes from the end of array 0"),
        ("out[-1] = 1;", "writes 4 bytes outside of every array, -260 bytes"),
        ("out[0] = in[8];", "reads 4 bytes outside of every array, 0 bytes from the end of array 1"),
        ("out[0] = *(const int*)((const u8*)in + 29);", "reads 4 bytes outside|not aligned"),
        ("out[0] = ((const u8*)in)[32];", "reads 1 bytes outside"),
        ("out[0] = (int)load<uint4>((const u8*)in + 8).x;", "access of 16 bytes is not aligned"),
        ("out[0] = load<u16>((const u8*)in + 1);", "access of 2 bytes is not aligned"),
        ("atomicAdd(out + 64, 1);", "outside of every array"),
    ],
)
def test_accesses_outside_of_arrays_and_not_aligned_are_found(access: str, message: str) -> None:
    raw = np.zeros(64, np.int32)
    given = raw[(-raw.ctypes.data % 16) // 4 :][:8]
    with pytest.raises(KernelError, match=message):
        run(f'extern "C" __global__ void k(int* out, const int* in) {{ {access} }}', ints(64), given)


def test_a_view_of_an_array_ends_where_the_view_does() -> None:
    whole = ints(100)
    with pytest.raises(KernelError, match="outside of every array"):
        run('extern "C" __global__ void k(int* out) { out[threadIdx.x] = 1; }', whole[20:83])
    assert whole[:20].tolist() == [-7] * 20 and whole[83:].tolist() == [-7] * 17


def test_a_launch_that_failed_leaves_the_next_one_alone() -> None:
    for _ in range(3):
        with pytest.raises(KernelError):
            run(REVERSED, ints(64), ints(63))
        out = ints(64)
        run(REVERSED, np.arange(64, dtype=np.int32), out)
        assert out.tolist() == list(range(63, -1, -1))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "0 arguments, expected 3"),
        ((np.zeros(4), np.int32(1)), "2 arguments"),
        ((np.zeros(4), np.int32(1), np.int32(1)), "argument 2 is not what"),
        ((np.zeros(4), np.int64(1), np.float32(1)), "argument 1 is not what"),
        ((np.int64(4), np.int32(1), np.float32(1)), "argument 0 is not what"),
        ((np.zeros(4), 1, np.float32(1)), "argument 1 is int"),
        ((np.zeros((4, 4)).T[:3], np.int32(1), np.float32(1)), "argument 0 is not contiguous"),
    ],
)
def test_arguments_are_what_the_kernel_takes(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        run('extern "C" __global__ void k(float* out, int n, float x) {}', *arguments)


def test_an_array_that_is_not_given_is_null() -> None:
    out = ints(1)
    run('extern "C" __global__ void k(const int* in, int* out) { out[0] = in == nullptr; }', None, out, block=1)
    assert out[0] == 1


def test_sources_that_do_not_compile_say_where() -> None:
    with pytest.raises(KernelError, match=r"tried\.cu:2:\d+: error"):
        run('extern "C" __global__ void k() {\nnothing_like_this(1);\n}')
    with pytest.raises(KernelError, match="no such kernel"):
        HostLauncher().launch(PRELUDE, "absent", (1, 1, 1), 1, ())
    with pytest.raises(KernelError, match="no CUDA source cuda/absent.cu"):
        HostLauncher().launch(Program(("cuda/absent.cu",)), "k", (1, 1, 1), 1, ())
    for grid, block in (((0, 1, 1), 1), ((1, 1, 1), 0), ((1, 1, 1), 1025)):
        with pytest.raises(KernelError, match="a grid of"):
            HostLauncher().launch(PRELUDE, "absent", grid, block, ())


# -- programs without one of their barriers ---------------------------------------------------------------------------


def test_a_barrier_that_nothing_needs_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    source = REVERSED.replace("= kept[63 - threadIdx.x];", "= kept[63 - threadIdx.x];\n    __syncthreads();  // __syncwarp() too")
    monkeypatch.setattr(sys.modules["cuda_harness.barriers"], "read", lambda path: source)
    path = "tried.cu"
    lines = [number for number, line in enumerate(source.splitlines(), 1) if "__syncthreads" in line]
    assert barriers(path) == lines and len(lines) == 2

    def exercise(launcher: HostLauncher) -> None:
        edit = launcher.edit
        assert edit is not None
        mutant, out = edit(source), ints(64)
        launcher = HostLauncher("shuffled", edit=lambda text: text + mutant)
        launcher.launch(PRELUDE, "k", (1, 1, 1), 64, (np.arange(64, dtype=np.int32), out))
        np.testing.assert_array_equal(out, np.arange(64)[::-1])

    assert survivors(path, exercise) == lines[1:]
    with pytest.raises(AssertionError, match="no barrier in line 1"):
        without_barrier(path, 1)


def test_every_source_with_barriers_is_tried_without_each_of_them() -> None:
    here = Path(__file__).resolve().parent
    tried = {path for test in here.glob("test_*.py") for path in re.findall(r'survivors\("([^"]+)"', test.read_text())}
    kernels = Path(warmkv.kernels.__file__).resolve().parent
    paths = {path.relative_to(kernels).as_posix() for path in kernels.rglob("*.cu")}
    assert {path for path in paths if barriers(path)} == tried


def test_without_a_compiler_who_asks_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["cuda_harness.host"], "compiler_missing", lambda: "no g++ here")
    with pytest.raises(pytest.skip.Exception, match="no g.. here"):
        HostLauncher()
