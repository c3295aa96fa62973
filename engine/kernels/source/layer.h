// What stands between a layer's products, and the whole layer in one call. The residual stream is float32.
#pragma once

#include "attention.h"
#include "grouped.h"
#include "tile_products.h"

namespace {

// A weight, or several of unlike kinds one below the other: `kind` is then `PARTS`, and `packed` an array of them.
struct Linear {
    const void* packed;
    const float* bias;  // or null; a part has its own
    int64_t n, k;
    int32_t kind;
    int32_t layout;  // of GROUPED; the number of PARTS
};

constexpr int PARTS = 6;

enum Activation { SILU = 0, GELU_TANH = 1 };

struct Layer {
    const float *input_norm, *mlp_norm;  // of what attention and the MLP take
    const float *out_norm, *down_norm;   // of what they give, or null
    const float *q_norm, *k_norm;        // of each head, or null
    Linear qkv, out, gate_up, down;      // without packed gate_up the layer ends after attention
    float eps;
    int32_t rotary_dim, activation, padding;
};

enum Buffer { OPERAND = 0, PRODUCT = 1, ATTENDED = 2, GIVEN = 3 };

inline Product product(const Linear& linear, const void* operand, Output out) {
    const Kind kind = Kind(linear.kind);
    out.bias = linear.bias;
    return {kind, static_cast<const uint8_t*>(linear.packed), linear.n, linear.k, operand,
            operand_stride(kind, linear.k), out, linear.layout};
}

// out = operand * weights of `linear`, whose results lie next to each other in rows of `out`.
inline void multiply(Team& team, const Linear& linear, const void* operand, const Output& out, int64_t m) {
    if (linear.kind != PARTS) return multiply(team, product(linear, operand, out), m);
    const auto* parts = static_cast<const Linear*>(linear.packed);
    Output at = out;
    for (int32_t i = 0; i < linear.layout; i++) {
        multiply(team, product(parts[i], operand, at), m);
        at.data = static_cast<uint8_t*>(at.data) + parts[i].n * (out.is_bf16 ? 2 : 4);
    }
}

// Memory for `m` rows of x as a product with these weights takes it.
struct Operand {
    Kind kind;
    int64_t k, row_bytes;
    uint8_t* memory;

    Operand(Team& team, const Linear& linear, int64_t m)
        : kind(Kind(linear.kind)), k(linear.k), row_bytes(operand_stride(kind, k) * operand_size(kind)),
          memory(static_cast<uint8_t*>(team.buffer(OPERAND, m * row_bytes))) {}

    // Calls `with(row)`, a pointer to float or bf16 as the kind asks, and fills what lies behind its k elements.
    template <class With>
    void fill(int64_t row, const With& with) const {
        auto finish = [&](auto* to) {
            with(to);
            for (int64_t i = k; i < round_up(k, K_MULTIPLE); i++) to[i] = 0;
        };
        if (takes_bf16(kind))
            finish(reinterpret_cast<bf16*>(memory + row * row_bytes));
        else
            finish(reinterpret_cast<float*>(memory + row * row_bytes));
        if (kind == INT4) prepare_int4(reinterpret_cast<OperandOf<INT4>*>(memory + row * row_bytes), k);
    }
};

// x / sqrt(mean(x^2) + eps) * weight
template <class T>
void rms_norm(const float* x, const float* weight, int64_t size, float eps, T* to) {
    Floats squares{};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) squares += load(x + i) * load(x + i);
    float total = sum(squares);
    for (; i < size; i++) total += x[i] * x[i];
    const float factor = 1.0f / std::sqrt(total / float(size) + eps);
    for (i = 0; i + LANES <= size; i += LANES) store(to + i, load(x + i) * factor * load(weight + i));
    for (; i < size; i++) narrow(to + i, x[i] * factor * weight[i]);
}

// gate * sigmoid(inner(gate)) * up. GELU by its tanh is gate * sigmoid(1.5957691 * (gate + 0.044715 * gate^3)).
template <class T>
void activate_and_mul(int activation, const float* gate, const float* up, int64_t size, T* to) {
    const float linear = activation == GELU_TANH ? 1.5957691216057308f : 1.0f;
    const float cubic = activation == GELU_TANH ? linear * 0.044715f : 0.0f;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const Floats g = load(gate + i);
        store(to + i, g / (1.0f + exponential(-(g * (linear + cubic * g * g)))) * load(up + i));
    }
    for (; i < size; i++) {
        const float g = gate[i];
        narrow(to + i, g / (1.0f + std::exp(-(g * (linear + cubic * g * g)))) * up[i]);
    }
}

// The two halves of a head's rotary part are the pairs; `cos` and `sin` have `half` elements.
inline void rotate(float* head, const float* cos, const float* sin, int half) {
    int i = 0;
    for (; i + LANES <= half; i += LANES) {
        const Floats a = load(head + i), b = load(head + half + i), c = load(cos + i), s = load(sin + i);
        store(head + i, a * c - b * s);
        store(head + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        const float a = head[i], b = head[half + i];
        head[i] = a * cos[i] - b * sin[i];
        head[half + i] = b * cos[i] + a * sin[i];
    }
}

template <class From, class To>
void copy_row(const From* from, To* to, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(to + i, load(from + i));
    for (; i < size; i++) narrow(to + i, widen(from[i]));
}

inline void norm_product(Team& team, const Linear& linear, const float* norm, float eps, const float* hidden, int64_t m,
                         const Output& out) {
    const Operand operand(team, linear, m);
    for_rows(team, m, operand.row_bytes, [&](int64_t row) {
        operand.fill(row, [&](auto* to) { rms_norm(hidden + row * linear.k, norm, linear.k, eps, to); });
    });
    multiply(team, linear, operand.memory, out, m);
}

// For each row the column of the largest of what `norm_product` would give, which `kept` gets unless it is null.
inline void best_columns(Team& team, const Linear& linear, const float* norm, float eps, const float* hidden, int64_t m,
                         int64_t* to, float* kept) {
    const Operand operand(team, linear, m);
    for_rows(team, m, operand.row_bytes, [&](int64_t row) {
        operand.fill(row, [&](auto* at) { rms_norm(hidden + row * linear.k, norm, linear.k, eps, at); });
    });
    const bool has_parts = linear.kind == PARTS;
    const auto* parts = has_parts ? static_cast<const Linear*>(linear.packed) : &linear;
    auto* bests = static_cast<Best*>(team.buffer(PRODUCT, sizeof(Best) * 2 * m));
    Best* of_part = bests + m;
    int64_t column = 0;
    for (int32_t i = 0; i < (has_parts ? linear.layout : 1); column += parts[i++].n) {
        const Product p = product(parts[i], operand.memory, {nullptr, 0, false, false, nullptr});
        find_best(team, p, m, i == 0 ? bests : of_part, kept == nullptr ? nullptr : kept + column, linear.n,
                  [&](int64_t bytes) { return team.buffer(GIVEN, bytes); });
        for (int64_t row = 0; row < m && i > 0; row++)
            if (is_better(of_part[row].value, bests[row].value)) bests[row] = {of_part[row].value, column + of_part[row].column};
    }
    for (int64_t row = 0; row < m; row++) to[row] = bests[row].column;
}

// hidden += x * weights of `linear`, through a norm on the way if there is one.
inline void add_product(Team& team, const Linear& linear, const void* operand, const float* norm, float eps, int64_t m,
                        float* hidden) {
    if (norm == nullptr) {
        multiply(team, linear, operand, {hidden, linear.n, false, true, nullptr}, m);
        return;
    }
    auto* given = static_cast<float*>(team.buffer(GIVEN, sizeof(float) * m * linear.n));
    multiply(team, linear, operand, {given, linear.n, false, false, nullptr}, m);
    for_rows(team, m, sizeof(float) * linear.n, [&](int64_t row) {
        float *from = given + row * linear.n, *to = hidden + row * linear.n;
        rms_norm(from, norm, linear.n, eps, from);
        for (int64_t i = 0; i < linear.n; i++) to[i] += from[i];
    });
}

// What the product with `down` takes: the activated gates of `gate_up` [m, gates and what they open].
inline Operand activated(Team& team, const Linear& down, int activation, const float* gate_up, int64_t m) {
    const Operand operand(team, down, m);
    for_rows(team, m, operand.row_bytes, [&](int64_t row) {
        const float* gate = gate_up + row * 2 * down.k;
        operand.fill(row, [&](auto* to) { activate_and_mul(activation, gate, gate + down.k, down.k, to); });
    });
    return operand;
}

// `count` MLPs one after the other: MLP i takes the next `num_rows[i]` rows of x and gives as many of `out`.
inline void run_mlps(Team& team, const Linear* gate_up, const Linear* down, int activation, const int64_t* num_rows,
                     int64_t count, const float* x, float* out) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t m = num_rows[i];
        if (m == 0) continue;
        const Operand operand(team, gate_up[i], m);
        for_rows(team, m, operand.row_bytes, [&](int64_t row) {
            operand.fill(row, [&](auto* to) { copy_row(x + row * gate_up[i].k, to, gate_up[i].k); });
        });
        auto* gates = static_cast<float*>(team.buffer(PRODUCT, sizeof(float) * m * gate_up[i].n));
        multiply(team, gate_up[i], operand.memory, {gates, gate_up[i].n, false, false, nullptr}, m);
        const Operand inner = activated(team, down[i], activation, gates, m);
        multiply(team, down[i], inner.memory, {out, down[i].n, false, false, nullptr}, m);
        x += m * gate_up[i].k;
        out += m * down[i].n;
    }
}

// Attention of one layer over `hidden` [num_tokens, hidden_size], up to the product with `out`, whose operand it
// returns. `cos` and `sin` have a row of rotary_dim / 2 for each position.
template <class T>
Operand attend(Team& team, const Layer& layer, const AttentionShape& shape, const Batch& batch, int index,
               const float* hidden, const float* cos, const float* sin) {
    const int64_t m = batch.num_tokens, dim = shape.head_dim, plane = shape.block_size * dim;
    const int half = layer.rotary_dim / 2;
    auto* qkv = static_cast<float*>(team.buffer(PRODUCT, sizeof(float) * m * layer.qkv.n));
    norm_product(team, layer.qkv, layer.input_norm, layer.eps, hidden, m, {qkv, layer.qkv.n, false, false, nullptr});
    for_tokens(team, batch, 4 * layer.qkv.n, [&](int64_t row, int sequence, int position) {
        float* heads = qkv + row * layer.qkv.n;
        for (int i = 0; i < shape.num_heads + shape.num_kv_heads; i++) {
            float* head = heads + i * dim;
            const float* norm = i < shape.num_heads ? layer.q_norm : layer.k_norm;
            if (norm != nullptr) rms_norm(head, norm, dim, layer.eps, head);
            rotate(head, cos + int64_t(position) * half, sin + int64_t(position) * half, half);
        }
        T* to = static_cast<T*>(shape.cache) + slot(shape, batch, sequence, position) + index * shape.layer_stride;
        for (int i = 0; i < 2 * shape.num_kv_heads; i++)
            copy_row(heads + (shape.num_heads + i) * dim, to + i * plane, dim);
    });
    const int64_t q_size = shape.num_heads * dim;
    auto* attended = static_cast<float*>(team.buffer(ATTENDED, sizeof(float) * m * q_size));
    attention<T>(team, shape, batch, index, {qkv, layer.qkv.n, false}, {attended, q_size, false});
    const Operand out(team, layer.out, m);
    for_rows(team, m, out.row_bytes, [&](int64_t row) {
        out.fill(row, [&](auto* to) { copy_row(attended + row * q_size, to, q_size); });
    });
    return out;
}

// The MLP of one layer, up to the product with `down`, whose operand it returns.
inline Operand open_gates(Team& team, const Layer& layer, const float* hidden, int64_t m) {
    auto* gate_up = static_cast<float*>(team.buffer(PRODUCT, sizeof(float) * m * layer.gate_up.n));
    norm_product(team, layer.gate_up, layer.mlp_norm, layer.eps, hidden, m,
                 {gate_up, layer.gate_up.n, false, false, nullptr});
    return activated(team, layer.down, layer.activation, gate_up, m);
}

// One layer of a decoder over `hidden` [num_tokens, hidden_size], in place.
template <class T>
void run_layer(Team& team, const Layer& layer, const AttentionShape& shape, const Batch& batch, int index, float* hidden,
               const float* cos, const float* sin) {
    const int64_t m = batch.num_tokens;
    const Operand out = attend<T>(team, layer, shape, batch, index, hidden, cos, sin);
    add_product(team, layer.out, out.memory, layer.out_norm, layer.eps, m, hidden);
    if (layer.gate_up.packed == nullptr) return;
    const Operand down = open_gates(team, layer, hidden, m);
    add_product(team, layer.down, down.memory, layer.down_norm, layer.eps, m, hidden);
}

// What a layer's attention, or its MLP, gives: `given` is like `hidden`, which stays. Norms behind them are left out.
template <class T>
void run_half(Team& team, const Layer& layer, const AttentionShape& shape, const Batch& batch, int index, bool is_mlp,
              const float* hidden, const float* cos, const float* sin, float* given) {
    const int64_t m = batch.num_tokens;
    const Linear& last = is_mlp ? layer.down : layer.out;
    const Operand operand = is_mlp ? open_gates(team, layer, hidden, m)
                                   : attend<T>(team, layer, shape, batch, index, hidden, cos, sin);
    multiply(team, last, operand.memory, {given, last.n, false, false, nullptr}, m);
}

}  // namespace
