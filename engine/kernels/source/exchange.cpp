// Sums, lists and exchanged rows of values over the ranks that compute one model together: processes of one host with
// memory in common.
//
//     line of rank 0 | line of rank 1 | ... | slots 0 and 1 of rank 0 | slots 0 and 1 of rank 1 | ...
//
// An exchange is a turn. In a turn each rank writes its values to one of its two slots, says in its line that they are
// there, waits until all others have said so, and reads their slots. The next turn takes the other slots, so nobody
// waits for those who still read: who has written in turn t + 1 has read everything of turn t, and a slot of turn t is
// written again in turn t + 2 only, which begins when all have written in turn t + 1.
//
// A library of its own, whichever kernels compute: called through ctypes by engine/ranks/shared_memory.py.

#include <sched.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>
#include <vector>

#define BATON extern "C" __attribute__((visibility("default")))

// The loader takes what the CPU has.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define BATON_WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define BATON_WIDE
#endif

namespace {

using bf16 = uint16_t;

constexpr int SPINS = 2000;                        // some 30 us: what ranks that keep pace are apart
constexpr int YIELDS = 50;                         // then a rank leaves its core to who has work
constexpr int64_t LOOK_NS = 100 * 1000 * 1000;     // asleep, it looks so often whether the other one lives
constexpr int64_t WHOLE_SUM_BYTES = 32 << 10;      // up to which each rank adds up everything itself: one turn

struct alignas(128) RankLine {  // processors fetch lines of 64 bytes in pairs
    std::atomic<uint32_t> turn;        // the last one for which this rank has written its values
    std::atomic<uint32_t> num_asleep;  // ranks that sleep until `turn` changes
    std::atomic<uint32_t> has_failed;  // the rank will not go on
};
static_assert(sizeof(RankLine) == 128 && std::atomic<uint32_t>::is_always_lock_free);

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

constexpr int64_t TILE = 512;  // sums that stay in a core's first cache while rank after rank is added

// `out` [count]: the sums of `first` [size, count], rows `apart` elements apart.
BATON_WIDE void add_rows(const float* first, int64_t apart, int size, int64_t count, float* out) {
    for (int64_t start = 0; start < count; start += TILE) {
        const int64_t num = std::min(TILE, count - start);
        float sums[TILE];
        std::memcpy(sums, first + start, num * sizeof(float));
        for (int row = 1; row < size; row++) {
            const float* more = first + row * apart + start;
            for (int64_t i = 0; i < num; i++) sums[i] += more[i];
        }
        std::memcpy(out + start, sums, num * sizeof(float));
    }
}

// The same in float32, rounded to nearest once, ties to even; NaN stays NaN.
BATON_WIDE void add_rows(const bf16* first, int64_t apart, int size, int64_t count, bf16* out) {
    for (int64_t start = 0; start < count; start += TILE) {
        const int64_t num = std::min(TILE, count - start);
        float sums[TILE];
        for (int row = 0; row < size; row++) {
            const bf16* more = first + row * apart + start;
            for (int64_t i = 0; i < num; i++) {
                const uint32_t bits = uint32_t(more[i]) << 16;
                float value;
                std::memcpy(&value, &bits, 4);
                sums[i] = row ? sums[i] + value : value;
            }
        }
        for (int64_t i = 0; i < num; i++) {
            uint32_t bits;
            std::memcpy(&bits, &sums[i], 4);
            const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
            out[start + i] = bf16(sums[i] != sums[i] ? 0x7fc0 : rounded);
        }
    }
}

class Exchange {
   public:
    using IsLost = int (*)(int rank);

    // `has_core`: others that are waited for run meanwhile, so that it is worth to wait on the core.
    Exchange(void* memory, int rank, int size, int64_t slot_bytes, bool has_core, IsLost is_lost)
        : lines_(static_cast<RankLine*>(memory)), slots_(reinterpret_cast<uint8_t*>(lines_ + size)), rank_(rank),
          size_(size), slot_bytes_(slot_bytes), spins_(has_core ? SPINS : 0), is_lost_(is_lost),
          num_sent_(size_t(size) * size) {}

    static int64_t memory_bytes(int size, int64_t slot_bytes) { return size * (sizeof(RankLine) + 2 * slot_bytes); }

    void fail() {
        lines_[rank_].has_failed.store(1);
        wake();
    }

    // Sums `values` over all ranks in place, added in float32 in the order of ranks and rounded once. Returns the rank
    // that is lost; -1 if none is. So do all others here.
    template <class T>
    int add_up(T* values, int64_t count) {
        const int64_t most = slot_bytes_ / int64_t(sizeof(T));
        for (int64_t start = 0; start < count; start += most) {
            const int64_t num = std::min(most, count - start);
            const bool whole = num * int64_t(sizeof(T)) <= WHOLE_SUM_BYTES;
            if (int lost = whole ? add_whole(values + start, num) : add_parts(values + start, num); lost >= 0) return lost;
        }
        return -1;
    }

    // `from` [rows, row_bytes] of each rank, next to each other in `to` [rows, size, row_bytes].
    int gather(const uint8_t* from, int64_t rows, int64_t row_bytes, uint8_t* to) {
        const int64_t width = std::min(row_bytes, slot_bytes_), height = std::max<int64_t>(1, slot_bytes_ / width);
        for (int64_t row = 0; row < rows; row += height) {
            const int64_t num_rows = std::min(height, rows - row);
            for (int64_t start = 0; start < row_bytes; start += width) {  // once, unless a row is longer than a slot
                const int64_t num_bytes = std::min(width, row_bytes - start);
                turn_++;
                std::memcpy(slot<uint8_t>(rank_), from + row * row_bytes + start, num_rows * num_bytes);
                if (int lost = meet(); lost >= 0) return lost;
                for (int rank = 0; rank < size_; rank++)
                    for (int64_t i = 0; i < num_rows; i++)
                        std::memcpy(
                            to + ((row + i) * size_ + rank) * row_bytes + start, slot<uint8_t>(rank) + i * num_bytes,
                            num_bytes);
            }
        }
        return -1;
    }

    // All to all, in two halves: how many rows come is known after the first, and so where they go. Both return the rank
    // that is lost, or -1.
    //
    // A rank's rows for others are one run of bytes, which passes through its slot piece by piece. The first piece has
    // the numbers of rows before it. `from` [sum of counts, row_bytes]: the first `counts[0]` rows are for rank 0, and
    // so on. `num_from` [size]: how many rows come from each rank.
    int send(const uint8_t* from, const int64_t* counts, int64_t row_bytes, int64_t* num_from) {
        turn_++;
        std::memcpy(slot<uint8_t>(rank_), counts, counts_bytes());
        std::memcpy(num_sent_.data() + rank_ * size_, counts, counts_bytes());
        write_piece(from, row_bytes, 0, slot_bytes_ - counts_bytes(), slot<uint8_t>(rank_) + counts_bytes());
        if (int lost = meet(); lost >= 0) return lost;
        for (int rank = 0; rank < size_; rank++) {
            std::memcpy(num_sent_.data() + rank * size_, slot<uint8_t>(rank), counts_bytes());
            num_from[rank] = num_sent(rank, rank_);
        }
        return -1;
    }

    // Right after `send`, of the same rows. `to` [sum of num_from, row_bytes].
    int receive(const uint8_t* from, int64_t row_bytes, uint8_t* to) {
        int64_t longest = 0;
        for (int rank = 0; rank < size_; rank++) longest = std::max(longest, num_for_others(rank) * row_bytes);
        int64_t skipped = counts_bytes();
        for (int64_t start = 0;;) {
            const int64_t num = slot_bytes_ - skipped;
            read_piece(from, row_bytes, start, num, skipped, to);
            start += num;
            if (start >= longest) return -1;
            skipped = 0;
            turn_++;
            write_piece(from, row_bytes, start, slot_bytes_, slot<uint8_t>(rank_));
            if (int lost = meet(); lost >= 0) return lost;
        }
    }

   private:
    int64_t counts_bytes() const { return size_ * int64_t(sizeof(int64_t)); }
    int64_t num_sent(int from, int to) const { return num_sent_[from * size_ + to]; }

    // Rows that `from` sends to ranks before `to`, but for itself.
    int64_t num_before(int from, int to) const {
        int64_t num = 0;
        for (int rank = 0; rank < to; rank++)
            if (rank != from) num += num_sent(from, rank);
        return num;
    }

    int64_t num_for_others(int from) const { return num_before(from, size_); }

    // Bytes `start` to `start + num` of what this rank has for others, or as many of them as there are.
    void write_piece(const uint8_t* from, int64_t row_bytes, int64_t start, int64_t num, uint8_t* out) const {
        const int64_t own = num_before(rank_, rank_) * row_bytes;  // where the rows for itself stand, left out
        const int64_t end = std::min(start + num, num_for_others(rank_) * row_bytes);
        if (start >= end) return;
        const int64_t middle = std::clamp(own, start, end);
        std::memcpy(out, from + start, middle - start);
        std::memcpy(out + (middle - start), from + num_sent(rank_, rank_) * row_bytes + middle, end - middle);
    }

    // What of those bytes of each rank is for this one. They lie `skipped` bytes behind the beginning of its slot.
    void read_piece(const uint8_t* from, int64_t row_bytes, int64_t start, int64_t num, int64_t skipped, uint8_t* to) const {
        for (int rank = 0; rank < size_; rank++) {
            const int64_t size = num_sent(rank, rank_) * row_bytes;
            if (rank == rank_) {
                if (start == 0) std::memcpy(to, from + num_before(rank_, rank_) * row_bytes, size);
            } else {
                const int64_t begin = num_before(rank, rank_) * row_bytes;
                const int64_t first = std::max(begin, start), end = std::min(begin + size, start + num);
                if (first < end)
                    std::memcpy(to + (first - begin), slot<uint8_t>(rank) + skipped + (first - start), end - first);
            }
            to += size;
        }
    }

    template <class T>
    T* slot(int rank) const {
        return reinterpret_cast<T*>(slots_ + (2 * rank + (turn_ & 1)) * slot_bytes_);
    }

    template <class T>
    int add_whole(T* values, int64_t count) {
        turn_++;
        std::memcpy(slot<T>(rank_), values, count * sizeof(T));
        if (int lost = meet(); lost >= 0) return lost;
        add(0, count, values);
        return -1;
    }

    // Each rank adds up a part of the values in one turn, and all read the sums in the next.
    template <class T>
    int add_parts(T* values, int64_t count) {
        const int64_t part = (count + size_ - 1) / size_;
        const auto begin_of = [&](int rank) { return std::min(count, rank * part); };
        const int64_t begin = begin_of(rank_), end = begin_of(rank_ + 1);
        turn_++;
        std::memcpy(slot<T>(rank_), values, count * sizeof(T));
        if (int lost = meet(); lost >= 0) return lost;
        add(begin, end, values + begin);
        turn_++;
        std::memcpy(slot<T>(rank_), values + begin, (end - begin) * sizeof(T));
        if (int lost = meet(); lost >= 0) return lost;
        for (int rank = 0; rank < size_; rank++)
            if (rank != rank_)
                std::memcpy(values + begin_of(rank), slot<T>(rank), (begin_of(rank + 1) - begin_of(rank)) * sizeof(T));
        return -1;
    }

    // The sums of elements `begin` to `end` of all ranks' slots.
    template <class T>
    void add(int64_t begin, int64_t end, T* out) const {
        add_rows(slot<T>(0) + begin, 2 * slot_bytes_ / int64_t(sizeof(T)), size_, end - begin, out);
    }

    // Says that this rank has written, and waits until all others have. Returns who is lost, or -1.
    int meet() {
        lines_[rank_].turn.store(turn_);  // in one order with num_asleep: see wait_for
        wake();
        for (int i = 1; i < size_; i++) {
            const int other = (rank_ + i) % size_;
            if (!wait_for(other)) return other;
        }
        return -1;
    }

    bool wait_for(int other) {
        RankLine& line = lines_[other];
        const auto is_there = [&](uint32_t turn) { return int32_t(turn - turn_) >= 0; };
        for (int round = 0;; round++) {
            if (is_there(line.turn.load(std::memory_order_acquire))) return true;
            if (line.has_failed.load(std::memory_order_relaxed)) return false;
            if (round < spins_) {
                relax();
            } else if (round < spins_ + YIELDS) {
                sched_yield();
            } else {
                line.num_asleep.fetch_add(1);
                const uint32_t turn = line.turn.load();
                const bool in_vain = !is_there(turn) && !sleep_until_changed(line.turn, turn);
                line.num_asleep.fetch_sub(1);
                if (in_vain && is_lost_(other)) return false;
            }
        }
    }

    void wake() {
        RankLine& own = lines_[rank_];
        if (own.num_asleep.load() == 0) return;
#if defined(__linux__)
        syscall(SYS_futex, &own.turn, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
    }

    // False if a while has passed.
    static bool sleep_until_changed(std::atomic<uint32_t>& word, uint32_t value) {
#if defined(__linux__)
        const timespec longest{0, LOOK_NS};
        return syscall(SYS_futex, &word, FUTEX_WAIT, value, &longest, nullptr, 0) == 0 || errno != ETIMEDOUT;
#else
        for (int i = 0; i < 1000; i++) {
            if (word.load() != value) return true;
            usleep(LOOK_NS / 1000 / 1000);
        }
        return false;
#endif
    }

    RankLine* lines_;
    uint8_t* slots_;
    int rank_, size_;
    int64_t slot_bytes_;
    int spins_;
    IsLost is_lost_;
    uint32_t turn_ = 0;
    std::vector<int64_t> num_sent_;  // in an all to all, by who sends and who receives
};

}  // namespace

BATON int64_t baton_exchange_bytes(int size, int64_t slot_bytes) { return Exchange::memory_bytes(size, slot_bytes); }
BATON Exchange* baton_exchange(
    void* memory, int rank, int size, int64_t slot_bytes, int has_core, int (*is_lost)(int)) {
    return new Exchange(memory, rank, size, slot_bytes, has_core, is_lost);
}
BATON void baton_exchange_end(Exchange* exchange) { delete exchange; }
BATON void baton_exchange_fail(Exchange* exchange) { exchange->fail(); }

// All return the rank that is lost, or -1.
BATON int baton_add_up(Exchange* exchange, void* values, int is_bf16, int64_t count) {
    return is_bf16 ? exchange->add_up(static_cast<bf16*>(values), count) : exchange->add_up(static_cast<float*>(values), count);
}
BATON int baton_gather(Exchange* exchange, const void* from, int64_t rows, int64_t row_bytes, void* to) {
    return exchange->gather(static_cast<const uint8_t*>(from), rows, row_bytes, static_cast<uint8_t*>(to));
}
BATON int baton_send(Exchange* exchange, const void* from, const int64_t* counts, int64_t row_bytes, int64_t* num_from) {
    return exchange->send(static_cast<const uint8_t*>(from), counts, row_bytes, num_from);
}
BATON int baton_receive(Exchange* exchange, const void* from, int64_t row_bytes, void* to) {
    return exchange->receive(static_cast<const uint8_t*>(from), row_bytes, static_cast<uint8_t*>(to));
}
