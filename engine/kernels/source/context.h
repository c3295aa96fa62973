// What attention reads: blocks where they lie, [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], the
// sequences of a step, and rows of Q.
#pragma once

#include <cmath>
#include <vector>

#include "matmul.h"

namespace {

constexpr int TILE = 64;  // tokens of the context at a time
constexpr int MAX_HEAD_DIM = 512;

alignas(64) const float ZEROS[MAX_HEAD_DIM] = {};

struct AttentionShape {
    int32_t num_heads, num_kv_heads, head_dim, block_size;
    int64_t block_stride, layer_stride;  // elements of the cache
    float scale, soft_cap;               // soft_cap 0: none
    int32_t window, is_bf16;             // tokens that a query sees, itself included, 0: all; type of the cache
    void* cache;
    const float* sinks;  // of a layer: for each head a score in the sum of weights that has no V; null: none
};

struct Batch {  // of sequences, in the order of their tokens
    int32_t num_sequences, num_tokens;
    const int32_t* num_before;    // tokens whose K and V are in the cache
    const int32_t* num_new;       // tokens of this step
    const int32_t* table_starts;  // where each sequence's block ids begin in `tables`
    const int32_t* tables;
};

// Where K and V of the tokens of a tile lie.
template <class T>
struct Rows {
    const T *keys[TILE], *values[TILE];

    // Processors do not see ahead from block to block. Bytes `first` to `stop` of a row:
    static void fetch(const T* row, int64_t first, int64_t stop) {
        for (int64_t byte = first; byte < stop; byte += 64)
            __builtin_prefetch(reinterpret_cast<const char*>(row) + byte, 0, 2);
    }
    void fetch_keys(int from, int to, int head_dim) const {
        for (int i = from; i < to; i++) fetch(keys[i], 0, int64_t(sizeof(T)) * head_dim);
    }
    void fetch_values(int from, int to, int head_dim) const {
        for (int i = from; i < to; i++) fetch(values[i], 0, int64_t(sizeof(T)) * head_dim);
    }
};

template <class T>
struct Context {
    const AttentionShape& shape;
    const T* plane;  // of the layer and KV head, in block 0
    const int32_t* table;

    // Rows of tokens start, start + 1, ...; zeros before `first`, whose blocks may belong to others by now, and from
    // `stop` on.
    void rows(int start, int first, int stop, Rows<T>& to) const {
        const int64_t values_offset = int64_t(shape.num_kv_heads) * shape.block_size * shape.head_dim;
        const T* zeros = reinterpret_cast<const T*>(ZEROS);
        int i = 0;
        for (; i < TILE && start + i < first; i++) to.keys[i] = to.values[i] = zeros;
        const int end = std::min(TILE, stop - start);
        while (i < end) {
            const int block = (start + i) / shape.block_size, slot = (start + i) % shape.block_size;
            const int after = std::min(end, i + shape.block_size - slot);
            const T* key = plane + table[block] * shape.block_stride + int64_t(slot) * shape.head_dim;
            for (; i < after; i++, key += shape.head_dim) {
                to.keys[i] = key;
                to.values[i] = key + values_offset;
            }
        }
        for (; i < TILE; i++) to.keys[i] = to.values[i] = zeros;
    }
};

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

// Q as it comes and the result as it is wanted: rows of heads, `stride` elements apart.
struct Heads {
    void* data;
    int64_t stride;
    bool is_bf16;
};

struct AttentionTask {
    int32_t sequence, first_row, head, query, num_queries, start, stop;
    int32_t part;  // where its sums go if there are others of the same queries, else -1
};

inline void emit(const Heads& out, int64_t row, int64_t column, const float* values, float factor, int count) {
    const int64_t first = row * out.stride + column;
    if (out.is_bf16)
        for (int i = 0; i < count; i++) narrow(static_cast<bf16*>(out.data) + first + i, values[i] * factor);
    else
        for (int i = 0; i < count; i++) static_cast<float*>(out.data)[first + i] = values[i] * factor;
}

// What the sums of a head are multiplied with: `total` weights, relative to the largest score.
inline float share(const AttentionShape& shape, int head, float most, float total) {
    return 1.0f / (shape.sinks ? total + std::exp(shape.sinks[head] - most) : total);
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
