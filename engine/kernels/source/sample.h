// From a row of logits to a token, as engine/sampling/sampler.py has it with torch. A row is worked through by one thread, in its
// cache, so what a row gives depends neither on the other rows nor on the number of threads.
//
//     logits -> changed -> weights e^((x - largest) / temperature) -> the least weight kept -> drawn
//               (penalties, bias, bans, mask)    sums and largest of each segment say what need not be looked at
//
// Nothing is sorted but the weights of one bucket: that in which top-k or top-p ends.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "matmul.h"

namespace {

// Token ids, and a number for each of them if there are such.
struct Ids {
    const int64_t* ids;
    const float* numbers;
    int64_t count;
};

// What one request asks of its row: `ASKED` of library.py.
struct Asked {
    Ids penalised, biased, allowed, banned;  // `allowed` empty: any
    Ids bad;                                 // banned too
    const uint8_t* mask;                     // a bit for each token, lowest first, in whole words; nullptr: any
    double uniform, top_p;
    float temperature, min_p, repetition, presence, frequency;
    int32_t top_k;    // 0: off
    int32_t num_top;  // -1: no logprobs

    bool has_ids() const { return penalised.count || biased.count || allowed.count || banned.count || bad.count; }

    bool is_masked_out(int64_t token) const { return mask != nullptr && !((mask[token / 8] >> (token % 8)) & 1); }
};

constexpr float NONE = -std::numeric_limits<float>::infinity();
constexpr int64_t SEGMENT = 256;  // values whose sum and largest are known; a multiple of all LANES

constexpr int BUCKET_SHIFT = 18;  // of a float's bits: a bucket has weights that differ by 3 % at most
constexpr int64_t NUM_BUCKETS = (0x3f800000 >> BUCKET_SHIFT) + 1;  // up to weight 1
struct Buckets {
    double mass[NUM_BUCKETS];
    int64_t count[NUM_BUCKETS];
};

// One row in a thread's own memory, filled up with minus infinity to whole segments.
struct Row {
    Buckets* buckets;
    double* sums;  // of segments
    float* most;
    float* values;  // logits, later weights
    float* found;   // as many, in any order
    int64_t size, num_segments;

    static int64_t bytes(int64_t n) {
        const int64_t segments = (n + SEGMENT - 1) / SEGMENT;
        return int64_t(sizeof(Buckets)) + segments * (8 + 4 + 2 * 4 * SEGMENT);
    }

    Row(void* memory, int64_t n) : size(n), num_segments((n + SEGMENT - 1) / SEGMENT) {
        buckets = static_cast<Buckets*>(memory);
        sums = reinterpret_cast<double*>(buckets + 1);
        most = reinterpret_cast<float*>(sums + num_segments);
        values = most + num_segments;
        found = values + num_segments * SEGMENT;
    }

    void fill(const float* logits) const {
        std::memcpy(values, logits, sizeof(float) * size);
        std::fill(values + size, values + num_segments * SEGMENT, NONE);
    }
};

template <class Use>
void each(const Ids& ids, int64_t size, const Use& use) {
    for (int64_t i = 0; i < ids.count; i++)
        if (ids.ids[i] >= 0 && ids.ids[i] < size) use(ids.ids[i], i);
}

inline void apply_mask(float* values, const uint8_t* mask, int64_t size) {
    const Words bit = (Words{} + 1u) << (Words)lane_numbers();
    for (int64_t start = 0; start < size; start += 32) {
        uint32_t word;
        std::memcpy(&word, mask + start / 8, 4);
        for (int i = 0; i < 32; i += LANES, word >>= LANES) {
            const Ints is_on = (broadcast(word) & bit) != 0;
            store(values + start + i, either(is_on, load(values + start + i), broadcast(NONE)));
        }
    }
}

inline void change(const Row& row, const Asked& asked) {
    float* values = row.values;
    each(asked.penalised, row.size, [&](int64_t id, int64_t i) {
        const float value = values[id], count = asked.penalised.numbers[i];
        const float repeated = value > 0 ? value / asked.repetition : value * asked.repetition;
        values[id] = repeated - ((count > 0 ? asked.presence : 0.0f) + asked.frequency * count);
    });
    each(asked.biased, row.size, [&](int64_t id, int64_t i) { values[id] += asked.biased.numbers[i]; });
    if (asked.allowed.count) {
        int64_t count = 0;
        each(asked.allowed, row.size, [&](int64_t id, int64_t) { row.found[count++] = values[id]; });
        std::fill(values, values + row.size, NONE);
        count = 0;
        each(asked.allowed, row.size, [&](int64_t id, int64_t) { values[id] = row.found[count++]; });
    }
    for (const Ids* ids : {&asked.banned, &asked.bad}) each(*ids, row.size, [&](int64_t id, int64_t) { values[id] = NONE; });
    if (asked.mask != nullptr) apply_mask(values, asked.mask, row.size);
}

// The sum of e^((x - largest) / temperature), which replace the row's values if `IS_KEPT`; else `most` are of the values.
// NaN or infinite if the row is not of numbers.
template <bool IS_KEPT>
double weigh(const Row& row, float largest_value, float temperature) {
    const float factor = 1.0f / std::max(temperature, std::numeric_limits<float>::min());
    double total = 0;
    for (int64_t segment = 0; segment < row.num_segments; segment++) {
        float* values = row.values + segment * SEGMENT;
        Floats added{}, most = broadcast(NONE);
        for (int64_t i = 0; i < SEGMENT; i += LANES) {
            const Floats value = load(values + i), weight = exponential((value - largest_value) * factor);
            if (IS_KEPT) store(values + i, weight);
            added += weight;
            most = larger(most, IS_KEPT ? weight : value);
        }
        row.most[segment] = largest(most);
        total += row.sums[segment] = sum(added);
    }
    return total;
}

// A number that so many of the row's are at least as large as: one for each segment.
inline float bound(const Row& row, int64_t rank) {
    if (rank > row.num_segments) return NONE;
    std::copy(row.most, row.most + row.num_segments, row.found);
    std::nth_element(row.found, row.found + rank - 1, row.found + row.num_segments, std::greater<float>());
    return row.found[rank - 1];
}

// The likeliest `count` tokens, one at least, of a row of logits whose `most` are known; of equal ones the first.
inline void likeliest(const Row& row, int64_t count, float log_sum, float* logprobs, int64_t* ids) {
    const float least = bound(row, count);
    int64_t num_found = 0;
    for (int64_t segment = 0; segment < row.num_segments; segment++) {
        if (row.most[segment] < least) continue;
        const int64_t end = std::min((segment + 1) * SEGMENT, row.size);
        for (int64_t id = segment * SEGMENT; id < end; id++) {
            const float value = row.values[id];
            if (value < least || (num_found == count && value <= logprobs[count - 1])) continue;
            int64_t place = num_found < count ? num_found++ : count - 1;
            for (; place > 0 && logprobs[place - 1] < value; place--)
                logprobs[place] = logprobs[place - 1], ids[place] = ids[place - 1];
            logprobs[place] = value, ids[place] = id;
        }
    }
    for (int64_t i = 0; i < count; i++) logprobs[i] -= log_sum;
}

inline int64_t bucket_of(float weight) {
    int32_t bits;
    std::memcpy(&bits, &weight, 4);
    return std::min<int64_t>(bits >> BUCKET_SHIFT, NUM_BUCKETS - 1);
}

// The weights of a row that are at least `least`, likeliest first.
class Ranking {
   public:
    Ranking(const Row& row, float least) : buckets_(*row.buckets), found_(row.found) {
        for (int64_t segment = 0; segment < row.num_segments; segment++) {
            const float* values = row.values + segment * SEGMENT;
            if (row.most[segment] < least) continue;
            for (int64_t i = 0; i < SEGMENT; i++) {
                found_[count_] = values[i];
                count_ += values[i] >= least && values[i] > 0;
            }
        }
        std::memset(&buckets_, 0, sizeof buckets_);
        for (int64_t i = 0; i < count_; i++) {
            const int64_t bucket = bucket_of(found_[i]);
            buckets_.count[bucket]++;
            buckets_.mass[bucket] += found_[i];
        }
    }

    struct Cut {
        float least;
        double mass;
    };

    // The first token that is number `count` or with which the mass reaches `mass`, and the mass up to it; least 0 if
    // there is none.
    Cut cut(int64_t count, double mass) {
        int64_t seen = 0;
        double reached = 0;
        for (int64_t bucket = NUM_BUCKETS - 1; bucket >= 0; bucket--) {
            if (seen + buckets_.count[bucket] < count && reached + buckets_.mass[bucket] < mass) {
                seen += buckets_.count[bucket], reached += buckets_.mass[bucket];
                continue;
            }
            float* end = std::partition(found_, found_ + count_, [&](float one) { return bucket_of(one) == bucket; });
            std::sort(found_, end, std::greater<float>());
            for (float* one = found_; one < end; one++) {
                reached += *one;
                if (++seen >= count || reached >= mass) return {*one, reached};
            }
        }
        return {0, reached};
    }

   private:
    Buckets& buckets_;
    float* found_;
    int64_t count_ = 0;
};

// The least weight that a request keeps: top-k, then top-p of what is left, and min-p. Those that tie with it are kept.
inline float least_kept(const Row& row, const Asked& asked, double total) {
    const double most = std::numeric_limits<double>::infinity();
    const int64_t all = std::numeric_limits<int64_t>::max();
    const float by_share = asked.min_p;  // the largest weight is 1
    if (asked.top_k > 0) {
        const float least = bound(row, asked.top_k);
        if (asked.top_p >= 1) return std::max(by_share, Ranking(row, std::max(least, by_share)).cut(asked.top_k, most).least);
        Ranking ranking(row, least);
        const Ranking::Cut cut = ranking.cut(asked.top_k, most);
        return std::max({by_share, cut.least, ranking.cut(asked.top_k, asked.top_p * cut.mass).least});
    }
    if (asked.top_p >= 1) return by_share;
    // All tokens below this together have less than the mass that is left out.
    const float least = float(0.999 * (1 - asked.top_p) * total / double(row.size));
    return std::max(by_share, Ranking(row, std::max(least, by_share)).cut(all, asked.top_p * total).least);
}

// In the order of the vocabulary, so that tokens of equal weight come in one order whatever the batch.
inline int64_t draw(const Row& row, float least, double total, double uniform) {
    if (least > 0) {
        total = 0;
        for (int64_t segment = 0; segment < row.num_segments; segment++) {
            Floats added{};
            if (row.most[segment] >= least)
                for (int64_t i = segment * SEGMENT; i < (segment + 1) * SEGMENT; i += LANES) {
                    const Floats weight = load(row.values + i);
                    added += either(weight >= broadcast(least), weight, Floats{});
                }
            total += row.sums[segment] = sum(added);
        }
    }
    double left = uniform * total;
    int64_t chosen = 0;
    for (int64_t segment = 0; segment < row.num_segments; segment++) {
        if (row.sums[segment] == 0) continue;
        chosen = segment;
        if (left < row.sums[segment]) break;
        left -= row.sums[segment];
    }
    int64_t token = chosen * SEGMENT;  // the last one kept, if rounding has left something
    for (int64_t id = token; id < (chosen + 1) * SEGMENT; id++) {
        const float weight = row.values[id];
        if (weight < least || weight == 0) continue;
        token = id;
        if (left < weight) break;
        left -= weight;
    }
    return token;
}

// The token, or -1 if none is allowed. `logprobs` [1 + num_top]: its own, and those of the likeliest tokens `ids`
// [num_top], all of them as the model has it.
inline int64_t sample_row(const Row& row, const float* logits, const Asked& asked, float* logprobs, int64_t* ids) {
    Best best = best_of(logits, row.size);
    float log_sum = 0;
    // If the mask leaves the likeliest token, that is the likeliest of those which it leaves.
    const bool is_best = !asked.has_ids() && !asked.is_masked_out(best.column);
    if (!is_best || asked.temperature > 0 || asked.num_top >= 0) row.fill(logits);
    if (asked.num_top >= 0) {
        log_sum = best.value + float(std::log(weigh<false>(row, best.value, 1.0f)));
        if (asked.num_top > 0 && std::isfinite(log_sum)) likeliest(row, asked.num_top, log_sum, logprobs + 1, ids);
        for (int64_t i = 0; i < asked.num_top && !std::isfinite(log_sum); i++)
            ids[i] = i, logprobs[1 + i] = std::numeric_limits<float>::quiet_NaN();
    }
    if (!is_best || asked.temperature > 0) change(row, asked);
    if (!is_best) best = best_of(row.values, row.size);
    if (best.value == NONE) return -1;
    int64_t token = best.column;
    if (asked.temperature > 0) {
        const double total = weigh<true>(row, best.value, asked.temperature);
        if (std::isfinite(total)) token = draw(row, least_kept(row, asked, total), total, asked.uniform);
    }
    if (asked.num_top >= 0) logprobs[0] = logits[token] - log_sum;
    return token;
}

}  // namespace
