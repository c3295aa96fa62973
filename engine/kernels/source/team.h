// A team of threads that stays: forking a job costs a store, joining costs a load.
//
// A job is a number of tasks. Whoever is free claims the next one, the caller too, so a thread that the system does
// not run holds up nothing but the task it has claimed: with more threads than cores a job is slower, and ends.
// Threads without work spin for a while, then yield, then sleep.
#pragma once

#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace {

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

constexpr int SPINS = 2000;   // some 30 us
constexpr int YIELDS = 2000;  // about a millisecond on a core of one's own

class Team {
   public:
    explicit Team(int num_threads) {
        try {
            for (int i = 1; i < num_threads; i++) threads_.emplace_back([this, i] { work(i); });
        } catch (const std::system_error&) {
            // The system has no more threads: those that are there do the work.
        }
        num_threads_ = 1 + int(threads_.size());
        scratch_.resize(num_threads_);
    }

    ~Team() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        awake_.notify_all();
        for (auto& thread : threads_) thread.join();
        for (auto& scratch : scratch_) std::free(scratch.memory);
        for (auto& memory : buffers_) std::free(memory.memory);
    }

    int num_threads() const { return num_threads_; }

    // Calls `task(index, thread)` for each index below `count`, in any order; returns when all have returned.
    template <class Task>
    void run(int count, const Task& task) {
        if (count <= 1 || threads_.empty()) {
            for (int i = 0; i < count; i++) task(i, 0);
            return;
        }
        function_.store([](const void* argument, int index, int thread) {
            (*static_cast<const Task*>(argument))(index, thread);
        }, std::memory_order_relaxed);
        argument_.store(&task, std::memory_order_relaxed);
        count_.store(count, std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        const uint64_t job = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
        ticket_.store(job << 32 | uint32_t(count));  // in one order with num_asleep_: see sleep()
        if (num_asleep_.load()) {
            std::lock_guard<std::mutex> lock(mutex_);
            awake_.notify_all();
        }
        while (take_one(0)) {
        }
        for (int round = 0; done_.load(std::memory_order_acquire) != count; round++) {
            if (round < SPINS)
                relax();
            else
                sched_yield();
        }
    }

    // A thread's own memory, as it was left or garbage. Valid until the thread asks again.
    void* scratch(int thread, size_t bytes) { return grown(scratch_[thread], bytes); }

    // Memory of the caller's, by number. Valid until it is asked for again.
    void* buffer(int number, size_t bytes) { return grown(buffers_[number], bytes); }

    // Held by whoever uses the team: it serves one caller at a time.
    std::mutex turn;

   private:
    struct Memory {
        void* memory = nullptr;
        size_t bytes = 0;
    };
    using Function = void (*)(const void*, int, int);

    static void* grown(Memory& memory, size_t bytes) {
        if (memory.bytes < bytes) {
            std::free(memory.memory);
            bytes = (bytes + bytes / 4 + 4095) / 4096 * 4096;
            memory.memory = std::aligned_alloc(4096, bytes);
            if (!memory.memory) std::abort();
            memory.bytes = bytes;
        }
        return memory.memory;
    }

    // The ticket is the job's number and how many of its tasks nobody has claimed. It changes with every claim, and a
    // job ends only when all claimed tasks have: if the exchange succeeds, what was read before it is that job's.
    bool take_one(int thread) {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while (uint32_t left = uint32_t(ticket)) {
            Function function = function_.load(std::memory_order_relaxed);
            const void* argument = argument_.load(std::memory_order_relaxed);
            int count = count_.load(std::memory_order_relaxed);
            if (ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
                function(argument, count - int(left), thread);
                done_.fetch_add(1, std::memory_order_release);
                return true;
            }
        }
        return false;
    }

    void work(int thread) {
        for (int idle = 0;;) {
            if (take_one(thread)) {
                idle = 0;
            } else if (++idle < SPINS) {
                relax();
            } else if (idle < SPINS + YIELDS) {
                sched_yield();
            } else {
                idle = 0;
                if (!sleep()) return;
            }
        }
    }

    // Until there is a job; false if there will be none. Either this thread sees the new ticket, or the one who wrote
    // it sees that a thread is asleep.
    bool sleep() {
        std::unique_lock<std::mutex> lock(mutex_);
        num_asleep_.fetch_add(1);
        awake_.wait(lock, [this] { return stopping_ || uint32_t(ticket_.load()); });
        num_asleep_.fetch_sub(1);
        return !stopping_;
    }

    std::vector<std::thread> threads_;
    std::vector<Memory> scratch_;
    Memory buffers_[8];
    int num_threads_ = 1;
    alignas(128) std::atomic<uint64_t> ticket_{0};
    std::atomic<Function> function_{nullptr};
    std::atomic<const void*> argument_{nullptr};
    std::atomic<int> count_{0};
    alignas(128) std::atomic<int> done_{0};
    alignas(128) std::atomic<int> num_asleep_{0};
    std::mutex mutex_;
    std::condition_variable awake_;
    bool stopping_ = false;
};

}  // namespace
