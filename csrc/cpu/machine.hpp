// The machine: a pool of seats that stand for SMs. A seat holds one block (CONSUMER_WARPS consumers and a producer)
// until the block is done; a block without a seat waits. Nothing here knows what a block computes.
#pragma once

#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include <cstdlib>

#include "wait.hpp"

namespace tkt {

// What runs on the machine: `kernel` by every thread of a block, `prepare` by one before its block starts.
struct Program {
    int warps;            // threads of a block
    size_t shared_bytes;  // shared memory of a block
    void (*prepare)(void* shared);
    void (*kernel)(Warp& warp, void* shared);
};

class Machine {
   public:
    // Null when the threads cannot be had. `rank` only decides which cores its seats are on.
    static Machine* open(const Program& program, int seats, int rank) {
        Machine* machine = new Machine(program, seats, rank);
        if (machine->start()) return machine;
        delete machine;
        return nullptr;
    }

    // All threads leave before the memory does.
    ~Machine() {
        closing_ = true;
        generation_.fetch_add(1, std::memory_order_release);
        futex_wake(generation_);
        for (int i = 0; i < started_; ++i) pthread_join(threads_[i].handle, nullptr);
        if (shared_ != MAP_FAILED) munmap(shared_, shared_stride() * seats_);
        free(order_);
        delete[] threads_;
        delete[] seat_;
    }

    int seats() const { return seats_; }

    // Runs all blocks of the launch and returns when every thread is out, however it ends.
    void run(Launch& launch, tkt_result* result) {
        launch_ = &launch;
        grid_ = launch.G.num_comp_blocks + launch.G.num_comm_blocks;
        seat_order(launch.machine);
        next_.store(0, std::memory_order_relaxed);
        cpu_ns_.store(0, std::memory_order_relaxed);
        running_.store(seats_ * program_.warps, std::memory_order_relaxed);
        begin_ns_ = end_ns_ = clock_ns(CLOCK_MONOTONIC);
        generation_.fetch_add(1, std::memory_order_release);
        futex_wake(generation_);
        for (uint32_t left; (left = running_.load(std::memory_order_acquire)) != 0;) futex_sleep(running_, left, 0);
        if (launch.end.load() != TKT_DONE) {  // no last block ran the tail
            reseed(launch.G);
            end_ns_ = clock_ns(CLOCK_MONOTONIC);
        }
        result->time_ns = end_ns_ - begin_ns_;
        result->cpu_ns = cpu_ns_.load(std::memory_order_relaxed);
        result->end = launch.end.load();
    }

   private:
    struct alignas(64) Seat {
        semaphore meet;  // all threads of the seat
        int block;
    };
    struct Thread {
        Machine* machine;
        pthread_t handle;
        int seat, index;
    };

    Machine(const Program& program, int seats, int rank)
        : program_(program),
          seats_(seats),
          rank_(rank),
          threads_(new Thread[seats * program.warps]),
          seat_(new Seat[seats]) {
        for (int s = 0; s < seats; ++s) init_semaphore(seat_[s].meet, program.warps);
    }

    size_t shared_stride() const { return (program_.shared_bytes + 4095) / 4096 * 4096; }

    bool start() {
        shared_ = mmap(nullptr, shared_stride() * seats_, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
        if (shared_ == MAP_FAILED) return false;
        pthread_attr_t small;
        pthread_attr_init(&small);
        pthread_attr_setstacksize(&small, 256 * 1024);
        const int threads = seats_ * program_.warps;
        for (; started_ < threads; ++started_) {
            Thread& thread = threads_[started_];
            thread = {this, {}, started_ / program_.warps, started_ % program_.warps};
            if (pthread_create(&thread.handle, &small, enter, &thread)) break;
        }
        pthread_attr_destroy(&small);
        return started_ == threads;
    }

    // A seat is a place, so its threads stay where they are: left alone, the scheduler gathers threads that wake each
    // other on one core. Threads go round the cores this process may use, one core further with each round, so that
    // producers and consumers mix. Where cores cannot be listed or chosen, threads go where they like.
    static void stay_on_core(int thread) {
        cpu_set_t allowed, one;
        if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
        const int cores = CPU_COUNT(&allowed);
        int before = (thread + thread / cores) % cores;
        int core = 0;
        while (!CPU_ISSET(core, &allowed) || before-- > 0) ++core;
        CPU_ZERO(&one);
        CPU_SET(core, &one);
        sched_setaffinity(0, sizeof one, &one);
    }

    static void* enter(void* argument) {
        const Thread* thread = static_cast<Thread*>(argument);
        const Machine& machine = *thread->machine;
        stay_on_core((machine.rank_ * machine.seats_ + thread->seat) * machine.program_.warps + thread->index);
        prctl(PR_SET_TIMERSLACK, 1000UL);  // naps are as long as they say
        thread->machine->live(thread->seat, thread->index);
        return nullptr;
    }

    // A thread's life: parked between launches; during one it serves the blocks its seat is given.
    void live(int seat, int index) {
        Seat& mine = seat_[seat];
        uint8_t* shared = static_cast<uint8_t*>(shared_) + shared_stride() * seat;
        uint32_t meetings = 0;
        for (uint32_t launches = 0;; ++launches) {
            while (generation_.load(std::memory_order_acquire) == launches) futex_sleep(generation_, launches, 0);
            if (closing_) return;
            Launch& launch = *launch_;
            const int64_t cpu = clock_ns(CLOCK_THREAD_CPUTIME_ID);
            for (;;) {
                if (index == 0) {
                    mine.block = next_block(launch);
                    if (mine.block >= 0) program_.prepare(shared);
                }
                meet(mine.meet, ++meetings, launch.G.backoff);
                if (mine.block < 0) break;
                Warp warp{launch, mine.block, index, "block"};
                program_.kernel(warp, shared);
                meet(mine.meet, ++meetings, launch.G.backoff);
                if (index == 0) block_done(launch);
            }
            cpu_ns_.fetch_add(clock_ns(CLOCK_THREAD_CPUTIME_ID) - cpu, std::memory_order_relaxed);
            if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) futex_wake(running_);
        }
    }

    // Every thread of the seat comes, because all waits of a block are bounded.
    static void meet(semaphore& bar, uint32_t meetings, int backoff) {
        arrive(bar);
        auto apart = [&] { return int32_t(bar.phase.load(std::memory_order_acquire) - meetings) < 0; };
        for (int i = 0; i < backoff && apart(); ++i) pause_once();
        for (int i = 0; i < YIELDS && apart(); ++i) sched_yield();
        while (apart()) {
            bar.sleepers.fetch_add(1, std::memory_order_seq_cst);
            const uint32_t seen = bar.phase.load(std::memory_order_seq_cst);
            if (int32_t(seen - meetings) < 0) futex_sleep(bar.phase, seen, 0);
            bar.sleepers.fetch_sub(1, std::memory_order_relaxed);
        }
    }

    int next_block(Launch& launch) {
        if (launch.stopped()) return -1;
        const int place = next_.fetch_add(1, std::memory_order_relaxed);
        return place < grid_ ? order_[place] : -1;
    }

    // The tail of the launch is run by the last block out: the plan can be replayed.
    void block_done(Launch& launch) {
        if (launch.stopped()) return;
        const int done = __atomic_fetch_add(&launch.G.dispensers[BLOCKS_DONE], 1, __ATOMIC_ACQ_REL);
        if (done != grid_ - 1) return;
        reseed(launch.G);
        end_ns_ = clock_ns(CLOCK_MONOTONIC);
    }

    static constexpr int BLOCKS_DONE = 2;

    static void reseed(const globals& G) {
        for (int b = 0; G.arrivals && b < G.num_pad_blocks; ++b)
            __atomic_store_n(&G.arrivals[b], G.pad - G.block_rows[b], __ATOMIC_RELAXED);
        for (int i = 0; G.combine && i < G.combine->num_counters; ++i)
            __atomic_store_n(&G.combine->counters[i], 0, __ATOMIC_RELAXED);
        for (int i = 0; i < 4; ++i) __atomic_store_n(&G.dispensers[i], 0, __ATOMIC_RELAXED);
    }

    // The order in which blocks get seats; hardware seats the lowest index first.
    void seat_order(const tkt_machine& machine) {
        order_ = static_cast<int*>(realloc(order_, sizeof(int) * grid_));
        for (int i = 0; i < grid_; ++i) order_[i] = machine.seating == 1 ? grid_ - 1 - i : i;
        if (machine.seating != 2) return;
        uint64_t state = machine.seating_seed;
        for (int i = grid_ - 1; i > 0; --i) {  // Fisher–Yates over splitmix64
            uint64_t z = state += 0x9e3779b97f4a7c15u;
            z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
            z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
            const int j = int((z ^ (z >> 31)) % uint64_t(i + 1));
            const int block = order_[i];
            order_[i] = order_[j];
            order_[j] = block;
        }
    }

    const Program program_;
    const int seats_, rank_;
    Thread* threads_;
    Seat* seat_;
    void* shared_ = MAP_FAILED;
    int started_ = 0;
    Launch* launch_ = nullptr;
    int* order_ = nullptr;
    int grid_ = 0;
    int64_t begin_ns_ = 0, end_ns_ = 0;
    bool closing_ = false;
    alignas(64) std::atomic<uint32_t> generation_{0};
    alignas(64) std::atomic<int> next_{0};
    alignas(64) std::atomic<uint32_t> running_{0};
    std::atomic<int64_t> cpu_ns_{0};
};

}  // namespace tkt
