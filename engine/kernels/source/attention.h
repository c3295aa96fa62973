// Attention over Baton's blocks where they lie: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
//
// A query's result is computed over tiles of TILE tokens from the first token that it sees, so it does not depend on
// other sequences. One token of a sequence is split over stretches of SPLIT tokens, always, whoever else is there.
// Slots behind a sequence's last token are never read: zeros stand in for them.
#pragma once

#include <cmath>
#include <vector>

#include "matmul.h"

namespace {

constexpr int TILE = 64;     // tokens of the context at a time
constexpr int SPLIT = 512;   // tokens of the context that one task of a single token sees
constexpr int QUERIES = 48;  // rows (queries times heads that share K and V) of a task with several tokens
constexpr int FEW_ROWS = 8;  // up to here K is read as it lies; with more rows it pays to transpose it
constexpr int MAX_HEAD_DIM = 512;

alignas(64) const float ZEROS[MAX_HEAD_DIM] = {};

struct AttentionShape {
    int32_t num_heads, num_kv_heads, head_dim, block_size;
    int64_t block_stride, layer_stride;  // elements of the cache
    float scale, soft_cap;               // soft_cap 0: none
    int32_t window, is_bf16;             // tokens that a query sees, itself included, 0: all; type of the cache
    void* cache;
};

struct Batch {  // of sequences, in the order of their tokens
    int32_t num_sequences, num_tokens;
    const int32_t* num_before;    // tokens whose K and V are in the cache
    const int32_t* num_new;       // tokens of this step
    const int32_t* table_starts;  // where each sequence's block ids begin in `tables`
    const int32_t* tables;
};

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
    Tile<K, R, 1>::run(sums, a, a_stride, panel, 0, k);
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

template <class T>
struct Context {
    const AttentionShape& shape;
    const T* plane;  // of the layer and KV head, in block 0
    const int32_t* table;

    // Rows of tokens start, start + 1, ...; zeros before `first`, whose blocks may belong to others by now, and from
    // `stop` on.
    void rows(int start, int first, int stop, const T** keys, const T** values) const {
        const int64_t values_offset = int64_t(shape.num_kv_heads) * shape.block_size * shape.head_dim;
        for (int i = 0; i < TILE; i++) {
            const int token = start + i;
            if (token < first || token >= stop) {
                keys[i] = values[i] = reinterpret_cast<const T*>(ZEROS);
                continue;
            }
            const int64_t block = table[token / shape.block_size];
            keys[i] = plane + block * shape.block_stride + int64_t(token % shape.block_size) * shape.head_dim;
            values[i] = keys[i] + values_offset;
        }
    }
};

// Scores of few rows: each is a sum over the lanes of products along head_dim.
template <class T>
void few_scores(const Workspace& w, int rows, int head_dim, const T** keys) {
    for (int first = 0; first < TILE; first += LANES)
        for (int r = 0; r < rows; r++) {
            const float* q = w.q + r * w.width;
            Floats products[LANES];
            const int whole = head_dim / LANES * LANES;
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                Floats product{};
                for (int d = 0; d < whole; d += LANES) product += load(q + d) * load(keys[first + i] + d);
                if (whole < head_dim) product += load(q + whole) * load_some(keys[first + i] + whole, head_dim - whole);
                products[i] = product;
            }
            store(w.scores + r * TILE + first, sums(products));
        }
}

// The same for many: K is transposed into the workspace first, in panels.
template <class T>
void many_scores(const Workspace& w, int rows, int head_dim, const T** keys) {
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

template <int R, class T>
void few_sums(const Workspace& w, const T** values, int count) {
    for (int64_t column = 0; column < w.width; column += PANEL) {
        Sums<R, 1> sums;
        for (int r = 0; r < R; r++)
            for (int c = 0; c < 2; c++) sums.of[r][c] = load(w.sums + r * w.width + column + c * LANES);
        for (int i = 0; i < count; i++) {
            const Floats row[2] = {load(values[i] + column), load(values[i] + column + LANES)};
            multiply_add<R, 1>(sums, w.scores + i, TILE, row);
        }
        for (int r = 0; r < R; r++)
            for (int c = 0; c < 2; c++) store(w.sums + r * w.width + column + c * LANES, sums.of[r][c]);
    }
}

template <class T>
void weigh_as_floats(const Workspace& w, int rows, int head_dim, const T** values, int count) {
    for (int i = 0; i < count; i++)
        for (int d = 0; d < w.width; d += LANES)
            store(w.values + d / PANEL * TILE * PANEL + i * PANEL + d % PANEL,
                  d + LANES <= head_dim ? load(values[i] + d)
                  : d < head_dim        ? load_some(values[i] + d, head_dim - d)
                                        : Floats{});
    small_product<F32>(rows, int(w.width), w.scores, TILE, w.values, TILE * PANEL * 4, count, w.sums, w.width, true);
}

template <class T>
void weigh_values(const Workspace& w, int rows, int head_dim, const T** values, int count) {
    if (head_dim == w.width) {
        switch (rows) {
            case 1: return few_sums<1>(w, values, count);
            case 2: return few_sums<2>(w, values, count);
            case 3: return few_sums<3>(w, values, count);
            case 4: return few_sums<4>(w, values, count);
            case 5: return few_sums<5>(w, values, count);
            case 6: return few_sums<6>(w, values, count);
        }
    }
    weigh_as_floats(w, rows, head_dim, values, count);
}

template <class T>
void prepare_many(const Workspace&, int) {}

template <class T>
void weigh_for_many(const Workspace& w, int rows, int head_dim, const T** values, int count) {
    weigh_as_floats(w, rows, head_dim, values, count);
}

#if defined(__AVX512BF16__)

// 2 * LANES bfloat16, zeros from `count` on, as words.
inline Words load_pairs(const bf16* from, int count) {
    if (count >= 2 * LANES) return load_as<Words>(from);
    bf16 values[2 * LANES] = {};
    if (count > 0) std::memcpy(values, from, sizeof(bf16) * count);
    return load_as<Words>(values);
}

inline Words zero_extended(const bf16* from, int count) {
    bf16 values[LANES] = {};
    if (count < LANES) from = static_cast<bf16*>(std::memcpy(values, from, sizeof(bf16) * count));
    return __builtin_convertvector(load_as<Halves>(from), Words);
}

// Each row of `columns` floats (a multiple of LANES) becomes bfloat16 where it stands: `2 * stride` of them apart.
inline const bf16* round_rows(float* values, int rows, int64_t stride, int64_t columns) {
    for (int r = 0; r < rows; r++)
        for (int64_t i = 0; i < columns; i += LANES) {
            const auto halves = _mm512_cvtneps_pbh((__m512)load(values + r * stride + i));
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
void many_scores<bf16>(const Workspace& w, int rows, int head_dim, const bf16** keys) {
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
void weigh_for_many<bf16>(const Workspace& w, int rows, int head_dim, const bf16** values, int count) {
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
    float* scores = w.scores + r * TILE;
    const bool is_whole = from <= tile && tile + TILE <= to;
    const float minus_infinity = -__builtin_inff();
    Floats most = broadcast(w.most[r]);
    for (int i = 0; i < TILE; i += LANES) {
        Floats score = load(scores + i) * shape.scale;
        if (shape.soft_cap > 0) {
            const Floats twice = score * (2.0f / shape.soft_cap);
            score = (1.0f - 2.0f / (exponential(twice) + 1.0f)) * shape.soft_cap;
        }
        if (!is_whole) {
            const Ints token = lane_numbers() + (tile + i);
            score = either((token >= from) & (token < to), score, Floats{} + minus_infinity);
        }
        store(scores + i, score);
        most = larger(score, most);
    }
    const float now = largest(most);
    Floats total{};
    for (int i = 0; i < TILE; i += LANES) {
        const Floats weight = exponential(load(scores + i) - now);
        store(scores + i, weight);
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

// Rows `first` ... of w.q, each one query of one head: row r is query r / group of the task. Query i stands at position
// `position + i`. Leaves sums over V, their weights' total and the largest score, for tokens `start` to `stop`.
template <class T>
void attend(const Workspace& w, const Context<T>& context, int rows, int group, int position, int start, int stop) {
    const AttentionShape& shape = context.shape;
    for (int r = 0; r < rows; r++) {
        w.most[r] = -1e30f;
        w.total[r] = 0;
    }
    std::memset(w.sums, 0, sizeof(float) * rows * w.width);
    const bool is_many = rows > FEW_ROWS;
    if (is_many) prepare_many<T>(w, rows);
    const int first = shape.window > 0 ? std::max(0, position - shape.window + 1) : 0;
    start = std::max(start, first / TILE * TILE);
    for (int tile = start; tile < stop; tile += TILE) {
        const T *keys[TILE], *values[TILE];
        context.rows(tile, first, stop, keys, values);
        if (is_many)
            many_scores<T>(w, rows, shape.head_dim, keys);
        else
            few_scores<T>(w, rows, shape.head_dim, keys);
        for (int r = 0; r < rows; r++) {
            const int last = position + r / group + 1;
            soften(w, r, shape, tile, shape.window > 0 ? last - shape.window : 0, std::min(last, stop));
        }
        const int count = std::min(TILE, stop - tile);
        if (is_many)
            weigh_for_many<T>(w, rows, shape.head_dim, values, count);
        else
            weigh_values<T>(w, rows, shape.head_dim, values, count);
    }
}

struct AttentionTask {
    int32_t sequence, first_row, head, query, num_queries, start, stop;
    int32_t part;  // where its sums go if there are others of the same queries, else -1
};

// Q as it comes and the result as it is wanted: rows of heads, `stride` elements apart.
struct Heads {
    void* data;
    int64_t stride;
    bool is_bf16;
};

inline void emit(const Heads& out, int64_t row, int64_t column, const float* values, float factor, int count) {
    for (int i = 0; i < count; i++)
        if (out.is_bf16)
            narrow(static_cast<bf16*>(out.data) + row * out.stride + column + i, values[i] * factor);
        else
            static_cast<float*>(out.data)[row * out.stride + column + i] = values[i] * factor;
}

template <class T>
void attention(Team& team, const AttentionShape& shape, const Batch& batch, int layer, const Heads& q, const Heads& out) {
    const int group = shape.num_heads / shape.num_kv_heads, dim = shape.head_dim;
    const int64_t width = round_up(dim, PANEL), part_floats = group * (width + 2);
    const int queries = std::max(1, QUERIES / group);
    std::vector<AttentionTask> tasks, merges;
    int parts = 0;
    for (int s = 0, row = 0; s < batch.num_sequences; row += batch.num_new[s], s++)
        for (int head = 0; head < shape.num_kv_heads; head++) {
            const int before = batch.num_before[s], count = batch.num_new[s];
            if (count < 1) continue;
            if (count > 1) {
                for (int i = 0; i < count; i += queries) {
                    const int number = std::min(queries, count - i);
                    tasks.push_back({s, row, head, i, number, 0, before + i + number, -1});
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
    auto* partial = static_cast<float*>(team.buffer(7, sizeof(float) * (parts * part_floats + 1)));
    team.run(int(tasks.size()), [&](int index, int thread) {
        // The longest first, which come last in a prompt.
        const AttentionTask& task = tasks[tasks.size() - 1 - index];
        const int rows = task.num_queries * group;
        Workspace w(static_cast<float*>(team.scratch(thread, sizeof(float) * Workspace::floats(rows, width))), rows, width);
        for (int r = 0; r < rows; r++) {
            const int64_t row = task.first_row + task.query + r / group, column = (task.head * group + r % group) * dim;
            float* to = w.q + r * width;
            for (int d = 0; d < dim; d++)
                to[d] = q.is_bf16 ? widen(static_cast<const bf16*>(q.data)[row * q.stride + column + d])
                                  : static_cast<const float*>(q.data)[row * q.stride + column + d];
            for (int64_t d = dim; d < width; d++) to[d] = 0;
        }
        const T* plane = static_cast<const T*>(shape.cache) + layer * shape.layer_stride +
                         int64_t(task.head) * shape.block_size * dim;
        const Context<T> context{shape, plane, batch.tables + batch.table_starts[task.sequence]};
        attend(w, context, rows, group, batch.num_before[task.sequence] + task.query, task.start, task.stop);
        if (task.part >= 0) {
            float* to = partial + task.part * part_floats;
            std::memcpy(to, w.sums, sizeof(float) * group * width);
            std::memcpy(to + group * width, w.most, sizeof(float) * group);
            std::memcpy(to + group * (width + 1), w.total, sizeof(float) * group);
            return;
        }
        for (int r = 0; r < rows; r++)
            emit(out, task.first_row + task.query + r / group, (task.head * group + r % group) * dim, w.sums + r * width,
                 1.0f / w.total[r], dim);
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
            emit(out, merge.first_row, (merge.head * group + g) * dim, sums, 1.0f / total, dim);
        }
    });
}

// Where the K of one token's KV head 0 goes in layer 0.
inline int64_t slot(const AttentionShape& shape, const Batch& batch, int sequence, int position) {
    const int64_t block = batch.tables[batch.table_starts[sequence] + position / shape.block_size];
    return block * shape.block_stride + int64_t(position % shape.block_size) * shape.head_dim;
}

// Calls `token(row, sequence, position)` for each new token.
template <class Token>
void for_tokens(Team& team, const Batch& batch, int64_t bytes_per_token, const Token& token) {
    std::vector<int32_t> sequences(batch.num_tokens), positions(batch.num_tokens);
    for (int s = 0, row = 0; s < batch.num_sequences; s++)
        for (int i = 0; i < batch.num_new[s]; i++, row++) {
            sequences[row] = s;
            positions[row] = batch.num_before[s] + i;
        }
    for_rows(team, batch.num_tokens, bytes_per_token, [&](int64_t row) { token(row, sequences[row], positions[row]); });
}

}  // namespace
