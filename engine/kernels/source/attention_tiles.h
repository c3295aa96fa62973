// Attention of many rows in tiles of 16 rows of 64 bytes (tiles.h), for K and V in bfloat16.
//
// A row is one query of one head; a task has rows of one sequence and of heads that share K and V. It takes SPAN tokens of
// the context at a time: K is transposed and V interleaved, both in pairs and once for all rows; then 32 rows at a time are
// multiplied by K, weighed, and multiplied by V. Q and the weights are rounded to bfloat16, scores and sums are float32.
//
// Spans are counted from the first token of the sequence, and nothing that a row gets depends on the other rows of a tile:
// its bits depend neither on who else is in the batch nor on how the work is cut into tasks.
#pragma once

#include "context.h"
#include "tiles.h"

namespace {

constexpr bool HAS_TILES = BATON_TILES;
constexpr int TILED_ROWS = 192;  // of a task, unless one query has more

// Queries of a task: fewer if there are not four tasks for each thread then.
inline int tiled_queries(int64_t rows_of_all, int group, int num_threads) {
    const int64_t rows = round_up(rows_of_all / (4 * num_threads), 32);
    return std::max(1, int(std::min<int64_t>(std::max<int64_t>(rows, 32), TILED_ROWS)) / group);
}

#if BATON_TILES

static_assert(LANES == TILE_COLUMNS && TILE_ROWS == TILE_COLUMNS);
constexpr int64_t TILE_SIZE = TILE_ROWS * TILE_BYTES;  // bytes
constexpr int SPAN = 128;                              // tokens of the context that are weighed together
constexpr int SPAN_TILES = SPAN / TILE_COLUMNS;
constexpr float LOG2_E = 1.4426950408889634f;

// 2^x for x of 0 at most, right to 18 bits, of which weights keep 8; 0 where that is denormal. NaN stays NaN.
inline Floats power_of_two(Floats x) {
#if defined(__AVX512F__)
    const Floats r = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    Floats p = r * 1.35341679e-2f + 5.20114606e-2f;
    p = p * r + 2.41442757e-1f;
    p = p * r + 6.93003834e-1f;
    p = p * r + 1.00000259f;
    const __mmask16 is_normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return (Floats)_mm512_maskz_scalef_ps(is_normal, (__m512)p, (__m512)x);
#else
    return decay(x * 0.6931471805599453f);
#endif
}

// Both as bfloat16, one behind the other.
inline void store_both(void* to, Floats first, Floats second) {
#if defined(__AVX512BF16__)
    const auto values = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    std::memcpy(to, &values, sizeof values);
#else
    store(static_cast<bf16*>(to), first);
    store(static_cast<bf16*>(to) + LANES, second);
#endif
}

template <class T>
inline void store_some(T* to, Floats value, int count) {
    if (count == LANES) return store(to, value);
    T values[LANES];
    store(values, value);
    std::memcpy(to, values, sizeof(T) * count);
}

// Lane i of the result is the largest lane of `rows[i]`.
inline Floats largest_of_each(Floats (&rows)[LANES]) {
#pragma GCC unroll 5
    for (int half = LANES / 2; half > 0; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) rows[i] = larger(low(rows[i], rows[i + half]), high(rows[i], rows[i + half]));
    return rows[0];
}

// Whole tiles: `step` bytes from one to the next of what is summed up, `next` to the next tile of rows or columns.
struct TilesAt {
    const uint8_t* data;
    int64_t next, step;
};

// R by C tiles of a result, tiles of rows `c_next` bytes apart: c = a * b over `steps`, or c + a * b.
template <int R, int C>
inline void product_of_tiles(TilesAt a, TilesAt b, int steps, uint8_t* c, int64_t c_next, bool add) {
    if (add) {
        load_tile<0>(c, TILE_BYTES);
        if constexpr (C > 1) load_tile<1>(c + TILE_SIZE, TILE_BYTES);
        if constexpr (R > 1) load_tile<2>(c + c_next, TILE_BYTES);
        if constexpr (R > 1 && C > 1) load_tile<3>(c + c_next + TILE_SIZE, TILE_BYTES);
    } else {
        zero_tile<0>();
        if constexpr (C > 1) zero_tile<1>();
        if constexpr (R > 1) zero_tile<2>();
        if constexpr (R > 1 && C > 1) zero_tile<3>();
    }
    for (int i = 0; i < steps; i++, a.data += a.step, b.data += b.step) {
        load_tile<4>(a.data, TILE_BYTES);
        load_tile<6>(b.data, TILE_BYTES);
        multiply_tiles<0, 4, 6>();
        if constexpr (C > 1) {
            load_tile<7>(b.data + b.next, TILE_BYTES);
            multiply_tiles<1, 4, 7>();
        }
        if constexpr (R > 1) {
            load_tile<5>(a.data + a.next, TILE_BYTES);
            multiply_tiles<2, 5, 6>();
            if constexpr (C > 1) multiply_tiles<3, 5, 7>();
        }
    }
    store_tile<0>(c, TILE_BYTES);
    if constexpr (C > 1) store_tile<1>(c + TILE_SIZE, TILE_BYTES);
    if constexpr (R > 1) store_tile<2>(c + c_next, TILE_BYTES);
    if constexpr (R > 1 && C > 1) store_tile<3>(c + c_next + TILE_SIZE, TILE_BYTES);
}

// One task. Its memory is whole tiles.
class TiledAttention {
   public:
    static int64_t bytes(int rows, int dim) { return Sizes(rows, dim).all() * TILE_SIZE; }

    // Row r is query r / group of the task, query i stands at `position + i`. No row sees a token before `first`, nor one
    // from `stop` on.
    TiledAttention(void* memory, const Context<bf16>& context, int rows, int group, int position, int first, int stop)
        : context_(context), shape_(context.shape), size_(rows, context.shape.head_dim), rows_(rows), first_(first),
          stop_(stop) {
        auto* next = static_cast<uint8_t*>(memory);
        auto take = [&](int64_t count) {
            uint8_t* taken = next;
            next += count * TILE_SIZE;
            return taken;
        };
        q_ = take(size_.q), keys_ = take(size_.keys), values_ = take(size_.values), sums_ = take(size_.sums);
        scores_ = take(size_.scores);
        most_ = reinterpret_cast<float*>(take(size_.states));
        total_ = reinterpret_cast<float*>(take(size_.states));
        sees_from_ = reinterpret_cast<int32_t*>(take(size_.states));
        sees_to_ = reinterpret_cast<int32_t*>(take(size_.states));
        for (int row = 0; row < size_.row_tiles * TILE_ROWS; row++) {
            const int after = position + row / group + 1;
            sees_from_[row] = shape_.window > 0 ? std::max(0, after - shape_.window) : 0;
            sees_to_[row] = std::min(after, stop);
        }
    }

    // `from`: head_dim elements.
    template <class T>
    void set_query(int row, const T* from) {
        for (int step = 0, left = shape_.head_dim; step < size_.steps; step++, left -= TILE_DEPTH, from += TILE_DEPTH) {
            uint8_t* to = q_ + (row / TILE_ROWS * size_.steps + step) * TILE_SIZE + row % TILE_ROWS * TILE_BYTES;
            if (left >= TILE_DEPTH) {
                store_both(to, load(from), load(from + LANES));
            } else {
                T values[TILE_DEPTH] = {};
                std::memcpy(values, from, sizeof(T) * left);
                store_both(to, load(values), load(values + LANES));
            }
        }
    }

    void run() {
        TileShapes shapes;
        for (int tile = 0; tile < NUM_TILES; tile++) shapes.set(tile, TILE_ROWS);
        const Tiles tiles(shapes);
        for (int row = 0; row < size_.row_tiles * TILE_ROWS; row++) most_[row] = -1e30f, total_[row] = 0;
        std::memset(sums_, 0, size_.sums * TILE_SIZE);
        for (int span = first_ / SPAN * SPAN; span < stop_; span += SPAN) {
            pack(span);
            for (int tile = 0; tile < size_.row_tiles; tile += 2) {
                if (tile + 1 < size_.row_tiles)
                    attend<2>(tile, span);
                else
                    attend<1>(tile, span);
            }
        }
    }

    // Of a row: the largest score, and the sum of the weights relative to it.
    float most(int row) const { return most_[row] / LOG2_E; }
    float total(int row) const { return total_[row]; }
    // Of a row: 16 sums of V, weighed, from number 16 * `column` on.
    float* sums_at(int row, int column) const {
        return reinterpret_cast<float*>(sums_ + (row / TILE_ROWS * size_.columns + column) * TILE_SIZE) +
               row % TILE_ROWS * TILE_COLUMNS;
    }

   private:
    struct Sizes {  // in tiles
        int row_tiles, steps, columns;  // of rows; of a head as pairs of a row of K; of a head as columns of V
        int64_t q, keys, values, sums, scores, states;

        Sizes(int rows, int dim)
            : row_tiles((rows + TILE_ROWS - 1) / TILE_ROWS), steps((dim + TILE_DEPTH - 1) / TILE_DEPTH),
              columns((dim + TILE_COLUMNS - 1) / TILE_COLUMNS), q(row_tiles * steps), keys(SPAN_TILES * steps),
              values(SPAN_TILES / 2 * columns), sums(row_tiles * columns), scores(2 * SPAN_TILES),
              states((row_tiles + TILE_COLUMNS - 1) / TILE_COLUMNS) {}
        int64_t all() const { return q + keys + values + sums + scores + 4 * states; }
    };

    // K and V of a span, 32 tokens at a time, of those that some row sees.
    void pack(int span) {
        const int dim = shape_.head_dim;
        for (int tile = span; tile < std::min(span + SPAN, stop_); tile += TILE) {
            Rows<bf16> rows;
            context_.rows(tile, first_, stop_, rows);
            for (int i = 0; i < TILE && tile + i < stop_; i += TILE_DEPTH) {
                if (tile + i + TILE_DEPTH <= first_) continue;
                const int number = (tile + i - span) / TILE_DEPTH;
                pack_keys(rows.keys + i, dim, 2 * number);
                pack_keys(rows.keys + i + TILE_COLUMNS, dim, 2 * number + 1);
                pack_values(rows.values + i, dim, number);
            }
        }
    }

    // Of 16 tokens: row i of a tile has elements 2 * i and 2 * i + 1 of each.
    void pack_keys(const bf16* const* keys, int dim, int tile) {
        for (int step = 0; step < size_.steps; step++) {
            auto* to = reinterpret_cast<float*>(keys_ + (tile * size_.steps + step) * TILE_SIZE);
            const int d = step * TILE_DEPTH;
            Floats square[LANES];
            for (int i = 0; i < LANES; i++) square[i] = (Floats)load_pairs(keys[i] + d, dim - d);
            transpose(square);
            for (int i = 0; i < LANES; i++) store(to + i * TILE_COLUMNS, square[i]);
        }
    }

    // Of 32 tokens: row i of a tile has the same elements of tokens 2 * i and 2 * i + 1.
    void pack_values(const bf16* const* values, int dim, int step) {
        for (int column = 0; column < size_.columns; column++) {
            auto* to = reinterpret_cast<float*>(values_ + (step * size_.columns + column) * TILE_SIZE);
            const int d = column * TILE_COLUMNS, left = std::min(LANES, dim - d);
            for (int i = 0; i < TILE_DEPTH; i += 2) {
                const Words pair = zero_extended(values[i] + d, left) | zero_extended(values[i + 1] + d, left) << 16;
                store(to + i / 2 * TILE_COLUMNS, (Floats)pair);
            }
        }
    }

    // R tiles of rows, and what they see of a span.
    template <int R>
    void attend(int tile, int span) {
        const int row = tile * TILE_ROWS, last = std::min(rows_, row + R * TILE_ROWS) - 1;
        const int from = std::max(sees_from_[row] - span, 0), to = std::min(sees_to_[last] - span, SPAN);
        if (from >= to) return;
        const int first = from / TILE_DEPTH, stop = (to + TILE_DEPTH - 1) / TILE_DEPTH;  // 32 tokens each
        const int64_t q_next = size_.steps * TILE_SIZE, scores_next = SPAN_TILES * TILE_SIZE, sums_next = size_.columns * TILE_SIZE;
        const TilesAt q{q_ + tile * q_next, q_next, TILE_SIZE};
        for (int step = first; step < stop; step++) {
            const TilesAt keys{keys_ + 2 * step * q_next, q_next, TILE_SIZE};
            product_of_tiles<R, 2>(q, keys, size_.steps, scores_ + 2 * step * TILE_SIZE, scores_next, false);
        }
        const bool is_plain = shape_.soft_cap == 0 && sees_from_[last] <= span + first * TILE_DEPTH &&
                              span + stop * TILE_DEPTH <= sees_to_[row];
        for (int r = 0; r < R; r++)
            if (is_plain)
                weigh<true>(row + r * TILE_ROWS, scores_ + r * scores_next, span, 2 * first, 2 * stop);
            else
                weigh<false>(row + r * TILE_ROWS, scores_ + r * scores_next, span, 2 * first, 2 * stop);
        const TilesAt weights{scores_ + 2 * first * TILE_SIZE, scores_next, 2 * TILE_SIZE};
        for (int column = 0; column < size_.columns; column += 2) {
            const TilesAt values{values_ + (first * size_.columns + column) * TILE_SIZE, TILE_SIZE, sums_next};
            uint8_t* sums = sums_ + (tile * size_.columns + column) * TILE_SIZE;
            if (column + 1 < size_.columns)
                product_of_tiles<R, 2>(weights, values, stop - first, sums, sums_next, true);
            else
                product_of_tiles<R, 1>(weights, values, stop - first, sums, sums_next, true);
        }
    }

    // The scores of 16 rows for tiles `first` to `stop` of a span's tokens become weights, in place: those of two tiles are
    // bfloat16 where the first was. What was summed up before is rescaled to the new largest score.
    template <bool IS_PLAIN>
    void weigh(int row, uint8_t* scores, int span, int first, int stop) {
        const int count = std::min(LANES, rows_ - row);
        auto at = [&](int r, int tile) { return reinterpret_cast<float*>(scores + tile * TILE_SIZE + r * TILE_BYTES); };
        const bool is_capped = !IS_PLAIN && shape_.soft_cap > 0;
        Floats largest[LANES] = {};
        for (int r = 0; r < count; r++) {
            const int from = sees_from_[row + r] - span, to = sees_to_[row + r] - span;
            Floats most = broadcast(-__builtin_inff());
            for (int tile = first; tile < stop; tile++) {
                Floats score = load(at(r, tile));
                if (!IS_PLAIN) {
                    if (is_capped) score = capped(score);
                    const Ints token = lane_numbers() + tile * TILE_COLUMNS, is_seen = (token >= from) & (token < to);
                    score = either(is_seen, score, broadcast(-__builtin_inff()));
                    store(at(r, tile), score);
                }
                most = larger(score, most);
            }
            largest[r] = most;
        }
        const float scale = is_capped ? LOG2_E : shape_.scale * LOG2_E;
        const Floats before = load(most_ + row), now = larger(largest_of_each(largest) * scale, before);
        store(most_ + row, now);
        Floats totals[LANES] = {};
        for (int r = 0; r < count; r++) {
            const float most = most_[row + r];
            for (int tile = first; tile < stop; tile += 2) {
                const Floats a = power_of_two(load(at(r, tile)) * scale - most);
                const Floats b = power_of_two(load(at(r, tile + 1)) * scale - most);
                store_both(at(r, tile), a, b);
                totals[r] += a + b;
            }
        }
        const Floats factor = either(before == now, broadcast(1.0f), power_of_two(before - now));  // 2^0 is not quite 1
        store(total_ + row, load(total_ + row) * factor + sums(totals));
        float factors[LANES];
        store(factors, factor);
        for (int r = 0; r < count; r++)
            for (int column = 0; column < size_.columns && factors[r] != 1.0f; column++) {
                float* sums = sums_at(row + r, column);
                store(sums, load(sums) * factors[r]);
            }
    }

    Floats capped(Floats score) const {
        const Floats doubled = score * (2.0f * shape_.scale / shape_.soft_cap);
        return (1.0f - 2.0f / (exponential(doubled) + 1.0f)) * shape_.soft_cap;
    }

    const Context<bf16>& context_;
    const AttentionShape& shape_;
    const Sizes size_;
    const int rows_, first_, stop_;
    uint8_t* q_;       // [tile of rows][step], pairs
    uint8_t* keys_;    // [tile of tokens][step], pairs
    uint8_t* values_;  // [32 tokens][column], pairs
    uint8_t* sums_;    // [tile of rows][column], float32
    uint8_t* scores_;  // of two tiles of rows: [tile of rows][tile of tokens], float32
    float* most_;      // by row, times log2(e)
    float* total_;     // by row
    int32_t *sees_from_, *sees_to_;  // by row: the tokens that it sees
};

// A task whose rows are those of the queries from `task.query` on; the first stands at `position`, and no query sees a token
// before `first`.
inline void attend_in_tiles(Team& team, int thread, const Context<bf16>& context, const AttentionTask& task, int position,
                            int first, const Heads& q, const Heads& out) {
    const AttentionShape& shape = context.shape;
    const int group = shape.num_heads / shape.num_kv_heads, dim = shape.head_dim, rows = task.num_queries * group;
    TiledAttention attention(team.scratch(thread, TiledAttention::bytes(rows, dim)), context, rows, group, position, first,
                             task.stop);
    auto row_of = [&](int r) { return task.first_row + task.query + r / group; };
    auto head_of = [&](int r) { return task.head * group + r % group; };
    for (int r = 0; r < rows; r++) {
        const int64_t at = row_of(r) * q.stride + head_of(r) * dim;
        if (q.is_bf16)
            attention.set_query(r, static_cast<const bf16*>(q.data) + at);
        else
            attention.set_query(r, static_cast<const float*>(q.data) + at);
    }
    attention.run();
    for (int r = 0; r < rows; r++) {
        const float factor = share(shape, head_of(r), attention.most(r), attention.total(r));
        const int64_t at = row_of(r) * out.stride + head_of(r) * dim;
        for (int column = 0; column < dim; column += TILE_COLUMNS) {
            const Floats values = load(attention.sums_at(r, column / TILE_COLUMNS)) * factor;
            const int count = std::min(TILE_COLUMNS, dim - column);
            if (out.is_bf16)
                store_some(static_cast<bf16*>(out.data) + at + column, values, count);
            else
                store_some(static_cast<float*>(out.data) + at + column, values, count);
        }
    }
}

#endif

}  // namespace
