// Attention over Baton's blocks where they lie: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
//
// A query's result is computed over tiles of TILE tokens from the first token that it sees, so it does not depend on
// other sequences; that of a prompt in bfloat16 over spans of tiles, if there are such (attention_tiles.h). One token of a
// sequence is split over stretches of SPLIT tokens, always, whoever else is there.
// Slots behind a sequence's last token are never read: zeros stand in for them.
#pragma once

#include "attention_tiles.h"

namespace {

constexpr int SPLIT = 512;   // tokens of the context that one task of a single token sees
constexpr int QUERIES = 48;  // rows (queries times heads that share K and V) of a task with several tokens
constexpr int FEW_ROWS = 8;  // up to here K is read as it lies; with more rows it pays to transpose it

template <class T>
inline Floats load_some(const T* from, int count) {
    T values[LANES] = {};
    std::memcpy(values, from, sizeof(T) * count);
    return load(values);
}

// c[R, PANEL] (+)= a[R, k] * panel[k, PANEL]
template <Kind K, int R, class A>
void small_tile(const A* a, int64_t a_stride, const uint8_t* panel, int k, float* c, int64_t c_stride, bool add) {
    Sums<R, 1> sums;
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
        for (int i = 0; i < 2; i++) sums.of[r][i] = add ? load(c + r * c_stride + i * LANES) : Floats{};
    Tile<K, R, 1>::run(sums, a, a_stride, panel, 0, k, NothingAhead());
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
        for (int i = 0; i < 2; i++) store(c + r * c_stride + i * LANES, sums.of[r][i]);
}

template <Kind K, class A, int... R>
void small_rows(int rows, const A* a, int64_t a_stride, const uint8_t* panel, int k, float* c, int64_t c_stride, bool add,
                std::integer_sequence<int, R...>) {
    using Function = void (*)(const A*, int64_t, const uint8_t*, int, float*, int64_t, bool);
    static constexpr Function functions[] = {small_tile<K, R + 1, A>...};
    functions[rows - 1](a, a_stride, panel, k, c, c_stride, add);
}

// c[rows, columns] (+)= a[rows, k] * b[k, columns]; columns a multiple of PANEL, b in panels as weights of kind K are.
template <Kind K, class A>
void small_product(int rows, int columns, const A* a, int64_t a_stride, const void* b, int64_t bytes, int k, float* c,
                   int64_t c_stride, bool add) {
    const int tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
    auto* panel = static_cast<const uint8_t*>(b);
    for (int column = 0; column < columns; column += PANEL, panel += bytes)
        for (int t = 0; t < tiles; t++) {
            const int start = rows * t / tiles, count = rows * (t + 1) / tiles - start;
            small_rows<K, A>(count, a + start * a_stride, a_stride, panel, k, c + start * c_stride + column, c_stride, add,
                             ROW_COUNTS);
        }
}

// A thread's memory for one task.
struct Workspace {
    float *q, *sums, *scores, *keys, *values, *most, *total;
    int64_t width;  // head_dim in whole pairs of vectors

    static int64_t floats(int rows, int64_t width) {
        return rows * (2 * width + TILE + 2) + 2 * TILE * width + 64;
    }
    Workspace(float* memory, int rows, int64_t width) : width(width) {
        q = memory;
        sums = q + rows * width;
        scores = sums + rows * width;
        keys = scores + rows * TILE;
        values = keys + TILE * width;
        most = values + TILE * width;
        total = most + rows;
    }
};

// PANEL elements of a row of K or V. Those of bfloat16 are the first of each two, then the second: a shift and a mask
// widen them. Few rows of Q stand in that order too (`spread`), and so do their sums of V.
inline void load_spread(const float* from, Floats (&to)[2]) {
    to[0] = load(from);
    to[1] = load(from + LANES);
}
inline void load_spread(const bf16* from, Floats (&to)[2]) {
    const Words pairs = load_as<Words>(from);
    to[0] = even(pairs);
    to[1] = odd(pairs);
}
// The same with zeros from `count` on.
template <class T>
void load_spread(const T* from, int64_t count, Floats (&to)[2]) {
    T values[PANEL] = {};
    load_spread(static_cast<T*>(std::memcpy(values, from, sizeof(T) * count)), to);
}

template <class T>
void spread(float* row, int64_t width) {
    for (int64_t i = 0; i < width && std::is_same<T, bf16>::value; i += PANEL) {
        const Floats a = load(row + i), b = load(row + i + LANES);
        store(row + i, firsts(a, b));
        store(row + i + LANES, seconds(a, b));
    }
}
template <class T>
void put_back(float* row, int64_t width) {
    for (int64_t i = 0; i < width && std::is_same<T, bf16>::value; i += PANEL) {
        const Floats a = load(row + i), b = load(row + i + LANES);
        store(row + i, low(a, b));
        store(row + i + LANES, high(a, b));
    }
}

// Calls `with(integral_constant<R>)` for the number of rows.
template <int R = 1, class With>
void for_few(int rows, const With& with) {
    if (rows == R)
        with(std::integral_constant<int, R>());
    else if constexpr (R < FEW_ROWS)
        for_few<R + 1>(rows, with);
}

// Scores of few rows: each is a sum over the lanes of products along head_dim.
template <int R, class T>
void few_scores(const Workspace& w, int head_dim, const Rows<T>& context, const Rows<T>& next) {
    constexpr int REGISTERS = LANES == 8 ? 16 : 32;
    constexpr int KEYS = REGISTERS == 16 ? (R <= 3 ? 2 : 1) : R <= 4 ? 4 : 2;  // at a time: sums and q stay in registers
    constexpr int STEP = LANES / KEYS;
    const float* q = w.q;
    const int64_t width = w.width, whole = head_dim / PANEL * PANEL;
    for (int first = 0; first < TILE; first += LANES) {
        Floats parts[R][STEP];
        for (int j = 0; j < STEP; j++) {
            Floats products[R][KEYS];
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int i = 0; i < KEYS; i++) products[r][i] = Floats{};
            const T* const* keys = context.keys + first + j;
            auto add = [&](int64_t d, int i, const Floats(&key)[2]) {
#pragma GCC unroll 8
                for (int r = 0; r < R; r++)
                    for (int c = 0; c < 2; c++) products[r][i] += load(q + r * width + d + c * LANES) * key[c];
            };
            next.fetch_keys(first + j * KEYS, first + (j + 1) * KEYS, head_dim);
            for (int64_t d = 0; d < whole; d += PANEL)
#pragma GCC unroll 4
                for (int i = 0; i < KEYS; i++) {
                    Floats key[2];
                    load_spread(keys[i * STEP] + d, key);
                    add(d, i, key);
                }
#pragma GCC unroll 4
            for (int i = 0; i < KEYS && whole < head_dim; i++) {
                Floats key[2];
                load_spread(keys[i * STEP] + whole, head_dim - whole, key);
                add(whole, i, key);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) parts[r][j] = sums(products[r]);
        }
        for (int r = 0; r < R; r++) store(w.scores + r * TILE + first, sums(parts[r]));
    }
}

// The same for many: K is transposed into the workspace first, in panels.
template <class T>
void many_scores(const Workspace& w, int rows, int head_dim, const T* const* keys) {
    const int64_t panel = w.width * PANEL;
    for (int first = 0; first < TILE; first += LANES)
        for (int d = 0; d < head_dim; d += LANES) {
            Floats square[LANES];
            for (int i = 0; i < LANES; i++)
                square[i] = d + LANES <= head_dim ? load(keys[first + i] + d)
                                                  : load_some(keys[first + i] + d, head_dim - d);
            transpose(square);
            float* to = w.keys + first / PANEL * panel + first % PANEL;
            for (int i = 0; i < LANES && d + i < head_dim; i++) store(to + (d + i) * PANEL, square[i]);
        }
    small_product<F32>(rows, TILE, w.q, w.width, w.keys, panel * 4, head_dim, w.scores, TILE, false);
}

// Columns from `column` on of the sums of few rows: PANELS panels, or what is left of one. `fetch(i)` is called at each
// token.
template <int R, int PANELS, class T, class Fetch>
void few_sums(const Workspace& w, int64_t column, int64_t columns, const T* const* values, int count, const Fetch& fetch) {
    Sums<R, PANELS> sums;
    const float* scores = w.scores;
    float* to = w.sums + column;
    const int64_t width = w.width;
    for (int r = 0; r < R; r++)
        for (int c = 0; c < 2 * PANELS; c++) sums.of[r][c] = load(to + r * width + c * LANES);
    auto add = [&](int i, int p, const Floats(&value)[2]) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
            for (int c = 0; c < 2; c++) sums.of[r][2 * p + c] += broadcast(scores[r * TILE + i]) * value[c];
    };
    Floats value[2];
    if (columns < PANELS * PANEL)
        for (int i = 0; i < count; i++) {
            fetch(i);
            load_spread(values[i] + column, columns, value);
            add(i, 0, value);
        }
    else
        for (int i = 0; i < count; i++) {
            fetch(i);
#pragma GCC unroll 2
            for (int p = 0; p < PANELS; p++) {
                load_spread(values[i] + column + p * PANEL, value);
                add(i, p, value);
            }
        }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < 2 * PANELS; c++) store(to + r * width + c * LANES, sums.of[r][c]);
}

template <int R, class T>
void weigh_for_few(const Workspace& w, int head_dim, const T* const* values, int count, const Rows<T>& next) {
    constexpr int PANELS = LANES == 8 ? (R <= 2 ? 2 : 1) : 4 * R + 3 <= 32 ? 2 : 1;  // or sums leave the registers
    // Each pass over the tokens asks for its columns of the next tile's V, token by token: a core has few misses under
    // way at once, and waits if it asks for more.
    auto fetch = [&](int64_t column, int64_t columns) {
        const int64_t first = round_up(column * sizeof(T), 64), stop = (column + columns) * sizeof(T);
        return [&next, first, stop](int i) { Rows<T>::fetch(next.values[i], first, stop); };
    };
    int64_t column = 0;
    for (constexpr int64_t COLUMNS = PANELS * PANEL; column + COLUMNS <= head_dim; column += COLUMNS)
        few_sums<R, PANELS>(w, column, COLUMNS, values, count, fetch(column, COLUMNS));
    for (; column < head_dim; column += PANEL) {
        const int64_t columns = std::min<int64_t>(PANEL, head_dim - column);
        few_sums<R, 1>(w, column, columns, values, count, fetch(column, columns));
    }
    next.fetch_values(count, TILE, head_dim);
}

template <class T>
void prepare_many(const Workspace&, int) {}

template <class T>
void weigh_for_many(const Workspace& w, int rows, int head_dim, const T* const* values, int count) {
    for (int i = 0; i < count; i++)
        for (int d = 0; d < w.width; d += LANES)
            store(w.values + d / PANEL * TILE * PANEL + i * PANEL + d % PANEL,
                  d + LANES <= head_dim ? load(values[i] + d)
                  : d < head_dim        ? load_some(values[i] + d, head_dim - d)
                                        : Floats{});
    small_product<F32>(rows, int(w.width), w.scores, TILE, w.values, TILE * PANEL * 4, count, w.sums, w.width, true);
}

#if BATON_BF16_PAIRS

// Each row of `columns` floats (a multiple of LANES) becomes bfloat16 where it stands: `2 * stride` of them apart.
inline const bf16* round_rows(float* values, int rows, int64_t stride, int64_t columns) {
    for (int r = 0; r < rows; r++)
        for (int64_t i = 0; i < columns; i += LANES) {
#if defined(__AVX512BF16__)
            const auto halves = _mm512_cvtneps_pbh((__m512)load(values + r * stride + i));
#elif defined(BATON_PLAIN_TILES)
            const auto halves = rounded(load(values + r * stride + i));
#else
            const auto halves = vcvt_bf16_f32((float32x4_t)load(values + r * stride + i));
#endif
            std::memcpy(reinterpret_cast<bf16*>(values + r * stride) + i, &halves, sizeof halves);
        }
    return reinterpret_cast<const bf16*>(values);
}

// With many rows of a cache in bfloat16, Q and the weights are rounded to it, and products are those of pairs: of
// neighbours in a row of K, and of neighbouring tokens in V.
template <>
void prepare_many<bf16>(const Workspace& w, int rows) {
    round_rows(w.q, rows, w.width, w.width);
}

template <>
void many_scores<bf16>(const Workspace& w, int rows, int head_dim, const bf16* const* keys) {
    const int64_t panel = w.width / 2 * PANEL;
    for (int first = 0; first < TILE; first += LANES)
        for (int d = 0; d < head_dim; d += 2 * LANES) {
            Floats square[LANES];
            for (int i = 0; i < LANES; i++) square[i] = (Floats)load_pairs(keys[first + i] + d, head_dim - d);
            transpose(square);
            float* to = w.keys + first / PANEL * panel + d / 2 * PANEL + first % PANEL;
            for (int i = 0; i < LANES; i++) store(to + i * PANEL, square[i]);
        }
    small_product<BF16>(rows, TILE, reinterpret_cast<const bf16*>(w.q), 2 * w.width, w.keys, panel * 4, head_dim, w.scores,
                        TILE, false);
}

template <>
void weigh_for_many<bf16>(const Workspace& w, int rows, int head_dim, const bf16* const* values, int count) {
    for (int i = 0; i < count; i += 2)
        for (int d = 0; d < w.width; d += LANES) {
            const int left = std::min(LANES, std::max(0, head_dim - d));
            const Words pair = zero_extended(values[i] + d, left) | zero_extended(values[i + 1] + d, left) << 16;
            store(w.values + d / PANEL * (TILE / 2 * PANEL) + i / 2 * PANEL + d % PANEL, (Floats)pair);
        }
    const bf16* weights = round_rows(w.scores, rows, TILE, TILE);
    small_product<BF16>(rows, int(w.width), weights, 2 * TILE, w.values, TILE / 2 * PANEL * 4, count, w.sums, w.width, true);
}

#endif

// Scores of one row become weights; what was summed before is rescaled to the new largest score.
inline void soften(const Workspace& w, int r, const AttentionShape& shape, int tile, int from, int to) {
    constexpr int VECTORS = TILE / LANES;
    float* scores = w.scores + r * TILE;
    const bool is_whole = from <= tile && tile + TILE <= to;
    const float minus_infinity = -__builtin_inff();
    Floats score[VECTORS], most = broadcast(w.most[r]);
#pragma GCC unroll 16
    for (int i = 0; i < VECTORS; i++) score[i] = load(scores + i * LANES) * shape.scale;
    if (shape.soft_cap > 0)
        for (Floats& one : score)
            one = (1.0f - 2.0f / (exponential(one * (2.0f / shape.soft_cap)) + 1.0f)) * shape.soft_cap;
    if (!is_whole)
#pragma GCC unroll 16
        for (int i = 0; i < VECTORS; i++) {
            const Ints token = lane_numbers() + (tile + i * LANES);
            score[i] = either((token >= from) & (token < to), score[i], Floats{} + minus_infinity);
        }
#pragma GCC unroll 16
    for (int i = 0; i < VECTORS; i++) most = larger(score[i], most);
    const float now = largest(most);
    Floats total{};
#pragma GCC unroll 16
    for (int i = 0; i < VECTORS; i++) {
        const Floats weight = decay(score[i] - now);
        store(scores + i * LANES, weight);
        total += weight;
    }
    if (now != w.most[r]) {
        const float factor = std::exp(w.most[r] - now);
        for (int64_t d = 0; d < w.width; d += LANES) store(w.sums + r * w.width + d, load(w.sums + r * w.width + d) * factor);
        w.total[r] *= factor;
        w.most[r] = now;
    }
    w.total[r] += sum(total);
}

// Rows of w.q, each one query of one head: row r is query r / group of the task. Query i stands at position
// `position + i`. Leaves sums over V, their weights' total and the largest score, for tokens `start` to `stop`.
template <class T>
struct Attending {
    const Workspace& w;
    const Context<T>& context;
    int rows, group, position, first, stop;  // `first`: the first token that any of them sees

    void soften_all(int tile) const {
        const AttentionShape& shape = context.shape;
        for (int r = 0; r < rows; r++) {
            const int last = position + r / group + 1;
            soften(w, r, shape, tile, shape.window > 0 ? last - shape.window : 0, std::min(last, stop));
        }
    }

    // Calls `score(rows, next rows)` and `weigh(rows, count, next rows)` for each tile; `upcoming(rows)` says what comes after them.
    template <class Upcoming, class Score, class Weigh>
    void for_tiles(int start, const Upcoming& upcoming, const Score& score, const Weigh& weigh) const {
        Rows<T> both[2];
        context.rows(start, first, stop, both[0]);
        for (int tile = start, i = 0; tile < stop; tile += TILE, i ^= 1) {
            Rows<T>& next = both[i ^ 1];
            if (tile + TILE < stop)
                context.rows(tile + TILE, first, stop, next);
            else
                upcoming(next);
            score(both[i], next);
            soften_all(tile);
            weigh(both[i], std::min(TILE, stop - tile), next);
        }
    }

    template <int R, class Upcoming>
    void few(int start, const Upcoming& upcoming) const {
        const int dim = context.shape.head_dim;
        for (int r = 0; r < R; r++) spread<T>(w.q + r * w.width, w.width);
        for_tiles(
            start, upcoming, [&](const Rows<T>& here, const Rows<T>& next) { few_scores<R>(w, dim, here, next); },
            [&](const Rows<T>& here, int count, const Rows<T>& next) {
                weigh_for_few<R>(w, dim, here.values, count, next);
            });
        for (int r = 0; r < R; r++) put_back<T>(w.sums + r * w.width, w.width);
    }

    template <class Upcoming>
    void many(int start, const Upcoming& upcoming) const {
        const int dim = context.shape.head_dim;
        prepare_many<T>(w, rows);
        for_tiles(
            start, upcoming,
            [&](const Rows<T>& here, const Rows<T>& next) {
                next.fetch_keys(0, TILE, dim);
                many_scores<T>(w, rows, dim, here.keys);
            },
            [&](const Rows<T>& here, int count, const Rows<T>& next) {
                next.fetch_values(0, TILE, dim);
                weigh_for_many<T>(w, rows, dim, here.values, count);
            });
    }

    template <class Upcoming>
    void run(int start, const Upcoming& upcoming) const {
        for (int r = 0; r < rows; r++) {
            w.most[r] = -1e30f;
            w.total[r] = 0;
        }
        std::memset(w.sums, 0, sizeof(float) * rows * w.width);
        if (rows > FEW_ROWS) return many(start, upcoming);
        for_few(rows, [&](auto count) { few<count()>(start, upcoming); });
    }
};

template <class T>
void attention(Team& team, const AttentionShape& shape, const Batch& batch, int layer, const Heads& q, const Heads& out) {
    const int group = shape.num_heads / shape.num_kv_heads, dim = shape.head_dim;
    const int64_t width = round_up(dim, PANEL), part_floats = group * (width + 2);
    const int queries = std::max(1, QUERIES / group);
    // With tiles, all rows of a sequence are computed alike, however many its last task has.
    auto is_tiled = [&](int count) { return HAS_TILES && std::is_same<T, bf16>::value && count > 1 && count * group > FEW_ROWS; };
    std::vector<AttentionTask> tiled, tasks, merges;
    int64_t tiled_rows = 0;
    for (int s = 0; s < batch.num_sequences; s++)
        if (is_tiled(batch.num_new[s])) tiled_rows += batch.num_new[s] * shape.num_heads;
    const int tiled_each = tiled_queries(tiled_rows, group, team.num_threads());
    int parts = 0;
    for (int s = 0, row = 0; s < batch.num_sequences; row += batch.num_new[s], s++)
        for (int head = 0; head < shape.num_kv_heads; head++) {
            const int before = batch.num_before[s], count = batch.num_new[s];
            if (count < 1) continue;
            if (count > 1) {
                const int most = is_tiled(count) ? tiled_each : queries;
                for (int i = 0; i < count; i += most) {
                    const int number = std::min(most, count - i);
                    (is_tiled(count) ? tiled : tasks).push_back({s, row, head, i, number, 0, before + i + number, -1});
                }
                continue;
            }
            const int first = shape.window > 0 ? std::max(0, before + 1 - shape.window) / SPLIT * SPLIT : 0;
            if (before + 1 - first <= SPLIT) {
                tasks.push_back({s, row, head, 0, 1, first, before + 1, -1});
                continue;
            }
            merges.push_back({s, row, head, 0, 1, first, before + 1, parts});
            for (int start = first; start <= before; start += SPLIT)
                tasks.push_back({s, row, head, 0, 1, start, std::min(start + SPLIT, before + 1), parts++});
        }
    const T* planes = static_cast<const T*>(shape.cache) + layer * shape.layer_stride;
    auto context_of = [&](const AttentionTask& task) {
        const T* plane = planes + int64_t(task.head) * shape.block_size * dim;
        return Context<T>{shape, plane, batch.tables + batch.table_starts[task.sequence]};
    };
    auto position_of = [&](const AttentionTask& task) { return batch.num_before[task.sequence] + task.query; };
    auto seen_from = [&](const AttentionTask& task) {
        return shape.window > 0 ? std::max(0, position_of(task) - shape.window + 1) : 0;
    };
    auto start_of = [&](const AttentionTask& task) { return std::max(task.start, seen_from(task) / TILE * TILE); };
    auto* partial = static_cast<float*>(team.buffer(7, sizeof(float) * (parts * part_floats + 1)));
    auto cost = [&](const AttentionTask& task) { return int64_t(task.num_queries) * (task.stop - seen_from(task)); };
    std::stable_sort(tiled.begin(), tiled.end(), [&](auto& a, auto& b) { return cost(a) > cost(b); });
    team.run(int(tiled.size() + tasks.size()), [&](int index, int thread) {
        if (index < int(tiled.size())) {
            const AttentionTask& task = tiled[index];
            if constexpr (HAS_TILES && std::is_same<T, bf16>::value)
                attend_in_tiles(team, thread, context_of(task), task, position_of(task), seen_from(task), q, out);
            return;
        }
        index -= int(tiled.size());
        // The longest first, which come last in a prompt.
        const AttentionTask& task = tasks[tasks.size() - 1 - index];
        const int rows = task.num_queries * group;
        Workspace w(static_cast<float*>(team.scratch(thread, sizeof(float) * Workspace::floats(rows, width))), rows, width);
        for (int r = 0; r < rows; r++) {
            const int64_t row = task.first_row + task.query + r / group, column = (task.head * group + r % group) * dim;
            float* to = w.q + r * width;
            if (q.is_bf16)
                for (int d = 0; d < dim; d++) to[d] = widen(static_cast<const bf16*>(q.data)[row * q.stride + column + d]);
            else
                std::memcpy(to, static_cast<const float*>(q.data) + row * q.stride + column, sizeof(float) * dim);
            for (int64_t d = dim; d < width; d++) to[d] = 0;
        }
        const Context<T> context = context_of(task);
        const Attending<T> attending{w, context, rows, group, position_of(task), seen_from(task), task.stop};
        attending.run(start_of(task), [&](Rows<T>& to) {
            const int64_t next = int64_t(tasks.size()) - 1 - index - team.num_threads();
            if (next < 0) return context.rows(0, 0, 0, to);
            context_of(tasks[next]).rows(start_of(tasks[next]), seen_from(tasks[next]), tasks[next].stop, to);
        });
        if (task.part >= 0) {
            float* to = partial + task.part * part_floats;
            std::memcpy(to, w.sums, sizeof(float) * group * width);
            std::memcpy(to + group * width, w.most, sizeof(float) * group);
            std::memcpy(to + group * (width + 1), w.total, sizeof(float) * group);
            return;
        }
        for (int r = 0; r < rows; r++) {
            const int q_head = task.head * group + r % group;
            emit(out, task.first_row + task.query + r / group, q_head * dim, w.sums + r * width,
                 share(shape, q_head, w.most[r], w.total[r]), dim);
        }
    });
    for_rows(team, merges.size(), sizeof(float) * part_floats, [&](int64_t index) {
        const AttentionTask& merge = merges[index];
        const int count = (merge.stop - merge.start + SPLIT - 1) / SPLIT;
        for (int g = 0; g < group; g++) {
            const float* first = partial + merge.part * part_floats;
            float most = -1e30f, total = 0;
            for (int i = 0; i < count; i++) most = std::max(most, first[i * part_floats + group * width + g]);
            float sums[MAX_HEAD_DIM] = {};
            for (int i = 0; i < count; i++) {
                const float* part = first + i * part_floats;
                const float factor = std::exp(part[group * width + g] - most);
                total += part[group * (width + 1) + g] * factor;
                for (int d = 0; d < dim; d++) sums[d] += part[g * width + d] * factor;
            }
            const int q_head = merge.head * group + g;
            emit(out, merge.first_row, q_head * dim, sums, share(shape, q_head, most, total), dim);
        }
    });
}

}  // namespace
