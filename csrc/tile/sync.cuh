// Fences between proxies, named block barriers (one registry: an id has one thread count), cluster barriers,
// and the register hand-over between warpgroups.
#pragma once

#include "base.cuh"

namespace tkt {

// Orders this thread's ordinary shared-memory accesses before later ones of the copy engine or tensor cores.
TKT_DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same for every state space: a gate needs it between its acquire and the first TMA load of what arrived.
TKT_DEVICE void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// A named barrier is a type, so its id cannot be used with two thread counts. Ids are handed out only in
// `barrier_registry`; id 0 belongs to __syncthreads.
template <int ID, int THREADS>
struct named_barrier {
    static_assert(ID > 0 && ID < 16 && THREADS % kWarpThreads == 0 && THREADS > 0);
    static constexpr int kId = ID;
    static constexpr int kThreads = THREADS;
    static TKT_DEVICE void sync() { asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory"); }
    static TKT_DEVICE void arrive() { asm volatile("bar.arrive %0, %1;" ::"n"(ID), "n"(THREADS) : "memory"); }
};

template <int CONSUMER_WARPS, int PRODUCER_WARPS = 1>
struct barrier_registry {
    using consumers = named_barrier<1, CONSUMER_WARPS * kWarpThreads>;
    using communicators = named_barrier<2, (CONSUMER_WARPS + PRODUCER_WARPS) * kWarpThreads>;
    template <int WARPS>  // of the producers: those that load rows by index
    using loaders = named_barrier<3, WARPS * kWarpThreads>;
};

TKT_DEVICE uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Every thread of every block of the cluster takes part.
TKT_DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// sm_90a only: the register file is one pool a block; producers give what consumers take.
template <int REGISTERS>
TKT_DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
TKT_DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

}  // namespace tkt
