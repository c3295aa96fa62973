// Baton's kernels for CPUs, compiled once for each instruction set (engine/kernels/build.py), called through ctypes.
// Pointers and sizes come from engine/kernels/library.py, which checks shapes and types.

#include "layer.h"
#include "permission.h"
#include "sample.h"

#define BATON extern "C" __attribute__((visibility("default")))

namespace {

template <class T>
void linear(Team& team, const Linear& linear, const T* x, int64_t stride, int64_t m, Output out) {
    const Operand operand(team, linear, m);
    for_rows(team, m, operand.row_bytes, [&](int64_t row) {
        operand.fill(row, [&](auto* to) { copy_row(x + row * stride, to, linear.k); });
    });
    multiply(team, linear, operand.memory, out, m);
}

}  // namespace

BATON Team* baton_team(int num_threads) {
#if defined(__AMX_BF16__)
    ask_for_tiles();  // before there are threads; choice.py chose this variant only if the answer was yes
#endif
    return new Team(num_threads);
}
BATON void baton_team_end(Team* team) { delete team; }

BATON int baton_lanes() { return LANES; }
BATON int64_t baton_packed_bytes(int kind, int64_t n, int64_t k) { return packed_bytes(Kind(kind), n, k); }

// `weight` [n, k], rows next to each other.
BATON void baton_pack(Team* team, int kind, const void* weight, int is_bf16, int64_t n, int64_t k, void* to) {
    std::lock_guard<std::mutex> lock(team->turn);
    if (is_bf16)
        pack(*team, Kind(kind), static_cast<const bf16*>(weight), n, k, static_cast<uint8_t*>(to));
    else
        pack(*team, Kind(kind), static_cast<const float*>(weight), n, k, static_cast<uint8_t*>(to));
}

BATON int64_t baton_grouped_bytes(int layout, int64_t n, int64_t k) {
    return (n + PANEL - 1) / PANEL * grouped_panel_bytes(layout, k);
}

// Rows of a weight as `pack_grouped` has them.
BATON void baton_pack_grouped(
    Team* team, int layout, const uint8_t* codes, const uint8_t* heads, const uint8_t* blocks, int64_t n, int64_t k,
    void* to) {
    std::lock_guard<std::mutex> lock(team->turn);
    pack_grouped(*team, Layout(layout), codes, heads, blocks, n, k, static_cast<uint8_t*>(to));
}

// Rows `rows` [m] of a weight of kind F32, BF16 or GROUPED, `out` [m, k] float32.
BATON void baton_look_up(Team* team, const Linear* weights, const int64_t* rows, int64_t m, float* out) {
    std::lock_guard<std::mutex> lock(team->turn);
    const auto* packed = static_cast<const uint8_t*>(weights->packed);
    if (weights->kind == GROUPED)
        look_up(*team, Layout(weights->layout), packed, weights->k, rows, m, out);
    else
        look_up(*team, Kind(weights->kind), packed, weights->k, rows, m, out);
}

// `x` [m, k] and `out` [m, n], rows `x_stride` and n elements apart, both of one type.
BATON void baton_linear(
    Team* team, const Linear* weights, const void* x, int64_t x_stride, int x_is_bf16, int64_t m, void* out,
    int out_is_bf16) {
    std::lock_guard<std::mutex> lock(team->turn);
    const Output output{out, weights->n, bool(out_is_bf16), false, nullptr};
    if (x_is_bf16)
        linear(*team, *weights, static_cast<const bf16*>(x), x_stride, m, output);
    else
        linear(*team, *weights, static_cast<const float*>(x), x_stride, m, output);
}

// Writes `kv` [num_tokens, 2 * num_kv_heads, head_dim] into layer `layer` of the cache, then `q` [num_tokens, num_heads,
// head_dim] attends to it; `out` is like `q`. Rows are `stride` elements apart; all are of one type.
BATON void baton_attention(
    Team* team, const AttentionShape* shape, const Batch* batch, int layer, const void* q, const void* kv, int64_t stride,
    int is_bf16, void* out) {
    std::lock_guard<std::mutex> lock(team->turn);
    const int64_t dim = shape->head_dim, plane = shape->block_size * dim;
    for_tokens(*team, *batch, 4 * shape->num_kv_heads * dim, [&](int64_t row, int sequence, int position) {
        const int64_t to = slot(*shape, *batch, sequence, position) + layer * shape->layer_stride;
        for (int i = 0; i < 2 * shape->num_kv_heads; i++)
            for (int64_t d = 0; d < dim; d++) {
                const int64_t from = row * stride + i * dim + d;
                const float value = is_bf16 ? widen(static_cast<const bf16*>(kv)[from]) : static_cast<const float*>(kv)[from];
                if (shape->is_bf16)
                    narrow(static_cast<bf16*>(shape->cache) + to + i * plane + d, value);
                else
                    static_cast<float*>(shape->cache)[to + i * plane + d] = value;
            }
    });
    const Heads queries{const_cast<void*>(q), stride, bool(is_bf16)};
    const Heads result{out, shape->num_heads * dim, bool(is_bf16)};
    if (shape->is_bf16)
        attention<bf16>(*team, *shape, *batch, layer, queries, result);
    else
        attention<float>(*team, *shape, *batch, layer, queries, result);
}

// What a layer is computed with.
struct LayerCall {
    const Layer* layer;
    const AttentionShape* shape;
    const float *cos, *sin;
};

// Bytes of a struct that Python fills, by its name here; 0 if there is none of that name. library.py compares.
BATON int64_t baton_struct_bytes(const char* name) {
    const struct {
        const char* name;
        size_t bytes;
    } sizes[] = {
        {"Linear", sizeof(Linear)}, {"AttentionShape", sizeof(AttentionShape)}, {"Batch", sizeof(Batch)},
        {"Layer", sizeof(Layer)}, {"LayerCall", sizeof(LayerCall)}, {"Asked", sizeof(Asked)},
    };
    for (const auto& one : sizes)
        if (std::strcmp(one.name, name) == 0) return int64_t(one.bytes);
    return 0;
}

// Layers number `first` and, in all, `count` of `calls`, one after the other; see `run_layer`.
BATON void baton_layers(Team* team, const LayerCall* calls, const Batch* batch, int first, int count, float* hidden) {
    std::lock_guard<std::mutex> lock(team->turn);
    for (int index = first; index < first + count; index++) {
        const LayerCall& call = calls[index];
        if (call.shape->is_bf16)
            run_layer<bf16>(*team, *call.layer, *call.shape, *batch, index, hidden, call.cos, call.sin);
        else
            run_layer<float>(*team, *call.layer, *call.shape, *batch, index, hidden, call.cos, call.sin);
    }
}

// Half of layer `index` of `calls`; see `run_half`. For a layer of which other processes compute other parts.
BATON void baton_half_layer(
    Team* team, const LayerCall* calls, const Batch* batch, int index, int is_mlp, const float* hidden, float* given) {
    std::lock_guard<std::mutex> lock(team->turn);
    const LayerCall& call = calls[index];
    if (call.shape->is_bf16)
        run_half<bf16>(*team, *call.layer, *call.shape, *batch, index, is_mlp, hidden, call.cos, call.sin, given);
    else
        run_half<float>(*team, *call.layer, *call.shape, *batch, index, is_mlp, hidden, call.cos, call.sin, given);
}

// Rows of x [rows of all, k] through `count` MLPs, which take `num_rows` [count] of them in turn; see `run_mlps`. Float32,
// rows next to each other.
BATON void baton_mlps(
    Team* team, const Linear* gate_up, const Linear* down, int activation, const int64_t* num_rows, int64_t count,
    const float* x, float* out) {
    std::lock_guard<std::mutex> lock(team->turn);
    run_mlps(*team, gate_up, down, activation, num_rows, count, x, out);
}

// `out` [m, n] float32: the norm of `hidden` [m, k], times the weights of the head.
BATON void baton_head(Team* team, const Linear* head, const float* norm, float eps, const float* hidden, int64_t m, float* out) {
    std::lock_guard<std::mutex> lock(team->turn);
    norm_product(*team, *head, norm, eps, hidden, m, {out, head->n, false, false, nullptr});
}

// `tokens` [m]: the best of each row of what `baton_head` would give; of equal ones the first, and NaN above all. `kept`
// [m, n] gets the rows themselves, unless it is null.
BATON void baton_best_tokens(
    Team* team, const Linear* head, const float* norm, float eps, const float* hidden, int64_t m, int64_t* tokens,
    float* kept) {
    std::lock_guard<std::mutex> lock(team->turn);
    best_columns(*team, *head, norm, eps, hidden, m, tokens, kept);
}

// A token for each row of `logits` [m, n]; row i of `logprobs` [m, 1 + most_top] and `ids` [m, most_top] has what
// `asked[i]` wants of them. See `sample_row`.
BATON void baton_sample(
    Team* team, const Asked* asked, const float* logits, int64_t m, int64_t n, int64_t most_top, int64_t* tokens,
    float* logprobs, int64_t* ids) {
    std::lock_guard<std::mutex> lock(team->turn);
    team->run(int(m), [&](int row, int thread) {
        const Row own(team->scratch(thread, Row::bytes(n)), n);
        tokens[row] = sample_row(own, logits + row * n, asked[row], logprobs + row * (1 + most_top), ids + row * most_top);
    });
}
