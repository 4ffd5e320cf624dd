// The copy engine: tensor tiles and 1-D bulk rows between global and shared memory. One thread issues.
#pragma once

#include "gl.cuh"
#include "semaphore.cuh"
#include "sync.cuh"

namespace tkt::tma {

TKT_DEVICE void prefetch_map(const tensor_map& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// What L2 should do with the lines of a transfer: keep what others will read soon, drop what nobody will.
enum class keep { normal = 0, evict_first = 1, evict_last = 2 };

namespace detail {

template <keep KEEP>
TKT_DEVICE uint64_t policy() {
    uint64_t made;
    if constexpr (KEEP == keep::evict_first)
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(made));
    else
        asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(made));
    return made;
}

// The .shared::cta form: on sm_120a the .shared::cluster form becomes a call into the driver.
template <keep KEEP>
TKT_DEVICE void load_box(uint32_t to, const tensor_map& map, int col, int row, semaphore& sem) {
    if constexpr (KEEP == keep::normal)
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
            "l"(&map), "r"(col), "r"(row), "r"(shared_address(&sem))
            : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
            "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
            "l"(&map), "r"(col), "r"(row), "r"(shared_address(&sem)), "l"(policy<KEEP>())
            : "memory");
}

// Lands at the same offset in every block of the mask and completes on the same semaphore of each. In-cluster
// only: this is the block cluster of one GPU.
template <keep KEEP>
TKT_DEVICE void load_box_multicast(uint32_t to, const tensor_map& map, int col, int row, semaphore& sem,
                                   uint16_t blocks) {
    if constexpr (KEEP == keep::normal)
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
            "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
            "l"(&map), "r"(col), "r"(row), "r"(shared_address(&sem)), "h"(blocks)
            : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
            ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
            "l"(&map), "r"(col), "r"(row), "r"(shared_address(&sem)), "h"(blocks), "l"(policy<KEEP>())
            : "memory");
}

template <keep KEEP>
TKT_DEVICE void store_box(const tensor_map& map, int col, int row, uint32_t from) {
    if constexpr (KEEP == keep::normal)
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
                     "r"(col), "r"(row), "r"(from)
                     : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%1, %2}], [%3], %4;" ::
                "l"(&map),
            "r"(col), "r"(row), "r"(from), "l"(policy<KEEP>())
            : "memory");
}

}  // namespace detail

// `at` is in elements; parts outside the tensor arrive as zeros and still count as bytes.
template <keep KEEP = keep::normal, typename T, int ROWS, int COLS, typename GL>
TKT_DEVICE void load_async(st<T, ROWS, COLS>& to, const GL& from, coord at, semaphore& sem) {
    using tile = st<T, ROWS, COLS>;
#pragma unroll
    for (int p = 0; p < tile::kPanels; ++p)
        detail::load_box<KEEP>(to.address() + p * tile::kPanelBytes, from.template map<st<T, ROWS, tile::kWide>>(),
                               at.col + p * tile::kWide, at.row, sem);
}

template <keep KEEP = keep::normal, typename T, int ROWS, int COLS, typename GL>
TKT_DEVICE void load_async_multicast(st<T, ROWS, COLS>& to, const GL& from, coord at, semaphore& sem,
                                     uint16_t blocks) {
    using tile = st<T, ROWS, COLS>;
#pragma unroll
    for (int p = 0; p < tile::kPanels; ++p)
        detail::load_box_multicast<KEEP>(to.address() + p * tile::kPanelBytes,
                                         from.template map<st<T, ROWS, tile::kWide>>(), at.col + p * tile::kWide,
                                         at.row, sem, blocks);
}

// The writer of the tile has already fenced towards the async proxy. Parts outside the tensor are dropped.
template <keep KEEP = keep::normal, typename T, int ROWS, int COLS, typename GL>
TKT_DEVICE void store_async(const GL& to, const st<T, ROWS, COLS>& from, coord at) {
    using tile = st<T, ROWS, COLS>;
#pragma unroll
    for (int p = 0; p < tile::kPanels; ++p)
        detail::store_box<KEEP>(to.template map<st<T, ROWS, tile::kWide>>(), at.col + p * tile::kWide, at.row,
                                from.address() + p * tile::kPanelBytes);
}

// 1-D bulk copies; addresses and bytes are multiples of 16. A peer's memory is an ordinary address here.
TKT_DEVICE void load_bytes(void* to, const void* from, uint32_t bytes, semaphore& sem) {
    asm volatile(
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(to)),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(&sem))
        : "memory");
}
TKT_DEVICE void store_bytes(void* to, const void* from, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}

// One bulk group for everything this thread stored since the last commit.
TKT_DEVICE void commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// At most PENDING of this thread's groups are still writing: the rest is performed and may be announced.
template <int PENDING = 0>
TKT_DEVICE void store_async_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Shared memory of the older groups may be overwritten. Says nothing about the data being visible.
template <int PENDING = 0>
TKT_DEVICE void store_async_read_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

}  // namespace tkt::tma
