// Calls every kernel over odd sizes in buffers of exactly the size that it may touch, for the address and
// undefined-behaviour sanitizers, and for instruction sets that only an emulator runs. Products, whole layers and attention
// are compared roughly; the tests in Python compare everything. Exit status 0: nothing was found.

#include "kernels.cpp"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>

namespace {

template <class T>
std::vector<T> numbers(size_t count) {
    static std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<T> values(count);
    for (auto& value : values) narrow(&value, normal(random));
    return values;
}

struct Packed {
    std::unique_ptr<uint8_t[]> memory;
    std::vector<float> bias, weight;
    Linear linear;

    Packed(Team* team, Kind kind, int64_t n, int64_t k, float scale = 1)
        : bias(numbers<float>(n)), weight(numbers<float>(n * k)) {
        for (float& one : weight) one *= scale;
        memory = std::make_unique<uint8_t[]>(packed_bytes(kind, n, k));
        baton_pack(team, kind, weight.data(), 0, n, k, memory.get());
        linear = {memory.get(), bias.data(), n, k, kind, 0};
    }
};

// Errors that the kinds may have, in the order of `Kind`, relative to the size of a sum of such terms with random signs.
const double KIND_ERROR[NUM_KINDS] = {1e-5, 2e-2, 5e-2, 0.5};

template <class T>
void compare(const Packed& packed, const std::vector<T>& x, const std::vector<T>& out, int64_t m) {
    const int64_t n = packed.linear.n, k = packed.linear.k;
    double error = 0, size = 0;
    for (int64_t row = 0; row < m; row++)
        for (int64_t column = 0; column < n; column++) {
            double expected = packed.bias[column];
            size += expected * expected;
            for (int64_t i = 0; i < k; i++) {
                const double term = double(widen(x[row * k + i])) * packed.weight[column * k + i];
                expected += term;
                size += term * term;
            }
            const double difference = widen(out[row * n + column]) - expected;
            error += difference * difference;
        }
    const double most = KIND_ERROR[packed.linear.kind] + (sizeof(T) == 2 ? 1e-2 : 0);
    if (!(std::sqrt(error) <= most * std::sqrt(size))) {
        std::printf("kind %d, m %d, n %d, k %d: error %g\n", packed.linear.kind, int(m), int(n), int(k), std::sqrt(error / size));
        std::exit(1);
    }
}

// Rows of what was packed exactly: the numbers themselves, or rounded to bfloat16.
void rows_looked_up(Team* team, const Packed& packed) {
    const int64_t n = packed.linear.n, k = packed.linear.k;
    std::vector<int64_t> rows(n);
    for (int64_t i = 0; i < n; i++) rows[i] = n - 1 - i;
    std::vector<float> found(n * k);
    baton_look_up(team, &packed.linear, rows.data(), n, found.data());
    for (int64_t i = 0; i < n * k; i++) {
        float expected = packed.weight[(n - 1 - i / k) * k + i % k];
        if (packed.linear.kind == BF16) {
            bf16 rounded;
            narrow(&rounded, expected);
            expected = widen(rounded);
        }
        if (found[i] != expected) {
            std::printf("kind %d, n %d, k %d: row %d\n", packed.linear.kind, int(n), int(k), int(rows[i / k]));
            std::exit(1);
        }
    }
}

template <class T>
void products(Team* team) {
    for (int kind = 0; kind < NUM_KINDS; kind++)
        for (int64_t n : {1, 31, 70})
            for (int64_t k : {1, 33, 130, 1100}) {
                Packed packed(team, Kind(kind), n, k);
                if (kind == F32 || kind == BF16) rows_looked_up(team, packed);
                for (int64_t m : {1, 2, 5, 30, 50}) {
                    const auto x = numbers<T>(m * k);
                    std::vector<T> out(m * n);
                    const bool is_bf16 = sizeof(T) == 2;
                    baton_linear(team, &packed.linear, x.data(), k, is_bf16, m, out.data(), is_bf16);
                    compare(packed, x, out, m);
                }
            }
}

// What a layer computes, one token at a time and in double.
using Doubles = std::vector<double>;
double widen(double value) { return value; }

Doubles product(const Packed& packed, const Doubles& x) {
    Doubles out(packed.bias.begin(), packed.bias.end());
    for (size_t row = 0; row < out.size(); row++)
        for (size_t i = 0; i < x.size(); i++) out[row] += x[i] * packed.weight[row * x.size() + i];
    return out;
}

Doubles normed(const double* x, size_t size, const float* weight, double eps) {
    Doubles out(x, x + size);
    if (weight == nullptr) return out;
    double squares = 0;
    for (double one : out) squares += one * one;
    for (size_t i = 0; i < size; i++) out[i] *= weight[i] / std::sqrt(squares / double(size) + eps);
    return out;
}

Doubles activated(int activation, const Doubles& gate_up) {
    Doubles out(gate_up.size() / 2);
    for (size_t i = 0; i < out.size(); i++) {
        const double gate = gate_up[i], inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate);
        const double opened = activation == SILU ? gate / (1 + std::exp(-gate)) : gate / 2 * (1 + std::tanh(inner));
        out[i] = opened * gate_up[out.size() + i];
    }
    return out;
}

// One query of one head.
template <class T>
Doubles attended(const AttentionShape& shape, const T* cache, const Batch& batch, int layer, int sequence, int position,
                 int head, const double* q) {
    const int64_t dim = shape.head_dim, plane = shape.block_size * dim;
    const int64_t key = layer * shape.layer_stride + head / (shape.num_heads / shape.num_kv_heads) * plane;
    const int64_t value = key + shape.num_kv_heads * plane;
    Doubles out(dim);
    double total = shape.sinks == nullptr ? 0 : std::exp(double(shape.sinks[head]));
    for (int token = shape.window > 0 ? std::max(0, position + 1 - shape.window) : 0; token <= position; token++) {
        const int64_t at = slot(shape, batch, sequence, token);
        double score = 0;
        for (int64_t d = 0; d < dim; d++) score += q[d] * widen(cache[at + key + d]) * shape.scale;
        if (shape.soft_cap > 0) score = shape.soft_cap * std::tanh(score / shape.soft_cap);
        total += std::exp(score);
        for (int64_t d = 0; d < dim; d++) out[d] += std::exp(score) * widen(cache[at + value + d]);
    }
    for (double& one : out) one /= total;
    return out;
}

// K and V of one token, `heads` after each other, into the cache.
template <class T>
void keep(const AttentionShape& shape, T* cache, const Batch& batch, int layer, int sequence, int position,
          const double* heads) {
    T* to = cache + slot(shape, batch, sequence, position) + layer * shape.layer_stride;
    for (int i = 0; i < 2 * shape.num_kv_heads; i++)
        for (int d = 0; d < shape.head_dim; d++)
            narrow(to + int64_t(i) * shape.block_size * shape.head_dim + d, float(heads[i * shape.head_dim + d]));
}

// Calls `token(row, sequence, position)` for each new token, one after the other.
template <class Token>
void each_token(const Batch& batch, const Token& token) {
    for (int s = 0, row = 0; s < batch.num_sequences; s++)
        for (int i = 0; i < batch.num_new[s]; i++) token(row++, s, batch.num_before[s] + i);
}

// `num_layers` of the same weights over `hidden`; `weights` are those of `layer`, in its order.
template <class T>
Doubles layers_in_double(const Layer& layer, const Packed (&weights)[4], const AttentionShape& shape, T* cache,
                         const Batch& batch, int num_layers, const float* cos, const float* sin,
                         const std::vector<float>& hidden) {
    const Packed &qkv = weights[0], &out = weights[1], &gate_up = weights[2], &down = weights[3];
    const int64_t size = out.linear.n, dim = shape.head_dim, half = layer.rotary_dim / 2;
    Doubles x(hidden.begin(), hidden.end());
    for (int index = 0; index < num_layers; index++) {
        std::vector<Doubles> heads(batch.num_tokens);
        each_token(batch, [&](int row, int sequence, int position) {
            Doubles& own = heads[row] = product(qkv, normed(&x[row * size], size, layer.input_norm, layer.eps));
            for (int i = 0; i < shape.num_heads + shape.num_kv_heads; i++) {
                double* head = &own[i * dim];
                const Doubles from = normed(head, dim, i < shape.num_heads ? layer.q_norm : layer.k_norm, layer.eps);
                std::copy(from.begin(), from.end(), head);
                for (int64_t d = 0; d < half; d++) {
                    const double c = cos[position * half + d], s = sin[position * half + d];
                    head[d] = from[d] * c - from[half + d] * s;
                    head[half + d] = from[half + d] * c + from[d] * s;
                }
            }
            keep(shape, cache, batch, index, sequence, position, &own[shape.num_heads * dim]);
        });
        each_token(batch, [&](int row, int sequence, int position) {
            Doubles all;
            for (int head = 0; head < shape.num_heads; head++) {
                const Doubles one = attended(shape, cache, batch, index, sequence, position, head, &heads[row][head * dim]);
                all.insert(all.end(), one.begin(), one.end());
            }
            double* own = &x[row * size];
            const Doubles given = normed(product(out, all).data(), size, layer.out_norm, layer.eps);
            for (int64_t i = 0; i < size; i++) own[i] += given[i];
            const Doubles gates = product(gate_up, normed(own, size, layer.mlp_norm, layer.eps));
            const Doubles inner = activated(layer.activation, gates);
            const Doubles added = normed(product(down, inner).data(), size, layer.down_norm, layer.eps);
            for (int64_t i = 0; i < size; i++) own[i] += added[i];
        });
    }
    return x;
}

template <class T, class U>
void compare(const std::string& what, const std::vector<T>& actual, const std::vector<U>& expected, double most) {
    double error = 0, size = 0;
    for (size_t i = 0; i < expected.size(); i++) {
        const double wanted = widen(expected[i]), difference = widen(actual[i]) - wanted;
        error += difference * difference;
        size += wanted * wanted;
    }
    if (actual.size() == expected.size() && std::sqrt(error) <= most * std::sqrt(size)) return;
    std::printf("%s: error %g\n", what.c_str(), std::sqrt(error / size));
    std::exit(1);
}

template <class T>
void layers(Team* team, int heads, int kv_heads, int dim, int block_size, int window, float soft_cap) {
    const int hidden = 37, inner = 51, num_blocks = 40;
    const Kind kind = sizeof(T) == 2 ? BF16 : F32;
    const int64_t layer_stride = 2ll * kv_heads * block_size * dim;
    auto cache = numbers<T>(num_blocks * 2 * layer_stride);
    const auto sinks = numbers<float>(heads);
    const AttentionShape shape{heads, kv_heads, dim, block_size, 2 * layer_stride, layer_stride, 0.2f, soft_cap, window,
                               sizeof(T) == 2, cache.data(), window > 0 ? sinks.data() : nullptr};
    // As small as in a model, so that scores stay in a range in which an error of bfloat16 changes little.
    auto packed = [&](int64_t n, int64_t k) { return Packed(team, kind, n, k, 1 / std::sqrt(float(k))); };
    const Packed weights[] = {packed((heads + 2 * kv_heads) * dim, hidden), packed(hidden, heads * dim),
                              packed(2 * inner, hidden), packed(hidden, inner)};
    const Packed &qkv = weights[0], &out = weights[1], &gate_up = weights[2], &down = weights[3];
    const Packed head(team, kind, 77, hidden);
    const auto norm = numbers<float>(hidden), cos = numbers<float>(700 * dim), sin = numbers<float>(700 * dim);
    const auto head_norm = numbers<float>(dim);
    const bool is_gemma = window > 0;
    const float *given_norm = is_gemma ? norm.data() : nullptr, *qk_norm = is_gemma ? head_norm.data() : nullptr;
    const Layer layer{norm.data(), norm.data(), given_norm, given_norm, qk_norm, qk_norm,
                      qkv.linear, out.linear, gate_up.linear, down.linear,
                      1e-5f, is_gemma ? dim / 4 * 2 : dim, is_gemma ? GELU_TANH : SILU, 0};
    const std::vector<int32_t> before{0, 20, 600, 3}, counts{17, 1, 1, 9};
    std::vector<int32_t> starts, tables;
    for (size_t s = 0; s < before.size(); s++) {
        starts.push_back(int(tables.size()));
        for (int i = 0; i * block_size < before[s] + counts[s]; i++) tables.push_back((i * 7 + int(s)) % num_blocks);
    }
    const Batch batch{4, 28, before.data(), counts.data(), starts.data(), tables.data()};
    auto x = numbers<float>(28 * hidden);
    const LayerCall call{&layer, &shape, cos.data(), sin.data()}, calls[] = {call, call};
    auto y = x;
    const double most = sizeof(T) == 2 ? 2e-2 : 1e-5;
    const std::string of = " of " + std::to_string(heads) + " heads of " + std::to_string(dim) + " in blocks of " +
                           std::to_string(block_size) + (sizeof(T) == 2 ? ", bfloat16" : ", float32");
    auto own_cache = cache;
    const Doubles expected = layers_in_double(layer, weights, shape, own_cache.data(), batch, 2, cos.data(), sin.data(), x);
    baton_layers(team, calls, &batch, 0, 2, x.data());
    for (int index : {0, 1}) baton_layers(team, calls, &batch, index, 1, y.data());
    if (x != y) {
        std::puts("two layers in one call");
        std::exit(1);
    }
    compare("layers" + of, x, expected, most);
    compare("K and V" + of, cache, own_cache, most);
    std::vector<float> logits(28 * 77), kept(28 * 77);
    baton_head(team, &head.linear, norm.data(), 1e-5f, x.data(), 28, logits.data());
    std::vector<int64_t> tokens(28);
    baton_best_tokens(team, &head.linear, norm.data(), 1e-5f, x.data(), 28, tokens.data(), kept.data());
    if (logits != kept) {
        std::puts("logits beside the best tokens");
        std::exit(1);
    }
    for (int row = 0; row < 28; row++)
        if (best_of(&logits[row * 77], 77).column != tokens[row]) {
            std::printf("row %d: token %d\n", row, int(tokens[row]));
            std::exit(1);
        }
    const int64_t stride = (heads + 2 * kv_heads) * dim;
    const auto rows = numbers<T>(28 * stride);
    std::vector<T> given(28 * heads * dim);
    own_cache = cache;
    baton_attention(team, &shape, &batch, 0, rows.data(), rows.data() + heads * dim, stride, sizeof(T) == 2, given.data());
    Doubles values, all;
    for (T value : rows) values.push_back(widen(value));
    each_token(batch, [&](int row, int sequence, int position) {
        keep(shape, own_cache.data(), batch, 0, sequence, position, &values[row * stride + heads * dim]);
    });
    if (cache != own_cache) {
        std::puts("K and V of attention alone");
        std::exit(1);
    }
    each_token(batch, [&](int row, int sequence, int position) {
        for (int i = 0; i < heads; i++) {
            const double* q = &values[row * stride + i * dim];
            const Doubles one = attended(shape, own_cache.data(), batch, 0, sequence, position, i, q);
            all.insert(all.end(), one.begin(), one.end());
        }
    });
    compare("attention" + of, given, all, sizeof(T) == 2 ? 1e-2 : 1e-5);
}

// MLPs of different numbers of rows, and none, in one call.
void mlps(Team* team) {
    const int64_t hidden = 70, inner = 45;
    const std::vector<int64_t> num_rows{3, 0, 1, 50};
    for (int kind = 0; kind < NUM_KINDS; kind++) {
        std::vector<Packed> gate_ups, downs;
        std::vector<Linear> gate_up_linears, down_linears;
        for (size_t i = 0; i < num_rows.size(); i++) {
            gate_ups.emplace_back(team, Kind(kind), 2 * inner, hidden, 1 / std::sqrt(float(hidden)));
            downs.emplace_back(team, Kind(kind), hidden, inner, 1 / std::sqrt(float(inner)));
            gate_up_linears.push_back(gate_ups.back().linear), down_linears.push_back(downs.back().linear);
        }
        const auto x = numbers<float>(54 * hidden);
        std::vector<float> out(54 * hidden);
        baton_mlps(team, gate_up_linears.data(), down_linears.data(), SILU, num_rows.data(), 4, x.data(), out.data());
        Doubles expected;
        for (size_t i = 0, row = 0; i < num_rows.size(); i++)
            for (int64_t end = row + num_rows[i]; int64_t(row) < end; row++) {
                const Doubles own(&x[row * hidden], &x[row * hidden] + hidden);
                const Doubles one = product(downs[i], activated(SILU, product(gate_ups[i], own)));
                expected.insert(expected.end(), one.begin(), one.end());
            }
        compare("MLPs of kind " + std::to_string(kind), out, expected, KIND_ERROR[kind] / 2);
    }
}

// A head of two parts of unlike kinds gives what each of them gives.
void parts(Team* team) {
    const int64_t k = 130, m = 28, split = 45, n = split + 33;
    const Packed first(team, F32, split, k), second(team, INT8, n - split, k);
    const Linear both[] = {first.linear, second.linear}, head{both, nullptr, n, k, PARTS, 2};
    const auto norm = numbers<float>(k), x = numbers<float>(m * k);
    std::vector<float> left(m * split), right(m * (n - split)), linear(m * n), logits(m * n), kept(m * n);
    auto joined = [&] {
        std::vector<float> rows;
        for (int64_t row = 0; row < m; row++) {
            rows.insert(rows.end(), &left[row * split], &left[row * split] + split);
            rows.insert(rows.end(), &right[row * (n - split)], &right[row * (n - split)] + n - split);
        }
        return rows;
    };
    baton_linear(team, &both[0], x.data(), k, 0, m, left.data(), 0);
    baton_linear(team, &both[1], x.data(), k, 0, m, right.data(), 0);
    baton_linear(team, &head, x.data(), k, 0, m, linear.data(), 0);
    bool is_right = linear == joined();
    baton_head(team, &both[0], norm.data(), 1e-5f, x.data(), m, left.data());
    baton_head(team, &both[1], norm.data(), 1e-5f, x.data(), m, right.data());
    baton_head(team, &head, norm.data(), 1e-5f, x.data(), m, logits.data());
    std::vector<int64_t> tokens(m), alone(m);
    baton_best_tokens(team, &head, norm.data(), 1e-5f, x.data(), m, tokens.data(), kept.data());
    baton_best_tokens(team, &head, norm.data(), 1e-5f, x.data(), m, alone.data(), nullptr);
    is_right &= logits == joined() && kept == logits && tokens == alone;
    for (int64_t row = 0; row < m; row++) is_right &= best_of(&logits[row * n], n).column == tokens[row];
    if (!is_right) {
        std::puts("a head of two parts");
        std::exit(1);
    }
}

}  // namespace

// Every format of grouped weights: each row that is looked up against products with unit vectors, and against what its
// codes mean, of which the first and the last are looked at.
void grouped(Team* team) {
    const int64_t n = 45;
    const int bits[NUM_CODES] = {4, 5, 6, 8, 8};
    std::mt19937 random(2);
    for (int codes = 0; codes < NUM_CODES; codes++)
        for (int scales = 0; scales < NUM_SCALES; scales++) {
            const int64_t group = scales == TWO_LEVELS || scales == TWO_SIGNED ? 256 : 32, k = 5 * 256;
            const int number = codes | scales << 4 | int(group) << 8;
            const Layout layout(number);
            std::vector<uint8_t> values(n * k), heads(n * (k / group) * layout.head_width()), blocks(n * k / 32 * 2);
            for (auto& value : values) value = uint8_t(random() % (1 << bits[codes])) & (codes == FP8 ? 0xf7 : 0xff);
            for (auto& value : blocks) value = uint8_t(random());
            const bool single = scales == SINGLE || scales == SINGLE_PAIR;
            const uint32_t factor = single ? 0x3f000000 : 0x3800;  // 0.5
            for (size_t i = 0; i < heads.size(); i += single ? 4 : 2) std::memcpy(&heads[i], &factor, single ? 4 : 2);
            auto memory = std::make_unique<uint8_t[]>(baton_grouped_bytes(number, n, k));
            baton_pack_grouped(team, number, values.data(), heads.data(), blocks.data(), n, k, memory.get());
            const Linear linear{memory.get(), nullptr, n, k, GROUPED, number};
            std::vector<int64_t> rows(n);
            for (int64_t i = 0; i < n; i++) rows[i] = n - 1 - i;
            std::vector<float> found(n * k);
            baton_look_up(team, &linear, rows.data(), n, found.data());
            for (int64_t m : {1, 2, 30}) {
                std::vector<float> x(m * k), out(m * n);
                for (int64_t i = 0; i < m; i++) x[i * k + 37 * i] = 1.0f;
                baton_linear(team, &linear, x.data(), k, 0, m, out.data(), 0);
                for (int64_t i = 0; i < m; i++)
                    for (int64_t row = 0; row < n; row++)
                        if (out[i * n + row] != found[(n - 1 - row) * k + 37 * i]) {
                            std::printf("codes %d, scales %d: row %d\n", codes, scales, int(row));
                            std::exit(1);
                        }
            }
            if (codes == FP8) continue;
            for (int64_t i : {int64_t(0), n * k - 1}) {
                const int64_t block = i / 32;
                float scale = 0.5f, minimum = -0.5f * float(1 << (bits[codes] - 1));
                if (scales == HALF_PAIR || scales == SINGLE_PAIR) minimum = 0.5f;
                if (scales == TWO_LEVELS) scale = 0.5f * blocks[block * 2], minimum = -0.5f * blocks[block * 2 + 1];
                if (scales == TWO_SIGNED) {
                    const float level = int8_t(blocks[block * 2 + i % 32 / 16]);
                    scale *= level, minimum *= level;
                }
                const float expected = values[i] * scale + minimum, actual = found[(n - 1 - i / k) * k + i % k];
                if (!(std::abs(expected - actual) <= 1e-5f * (1 + std::abs(minimum)))) {
                    std::printf("codes %d, scales %d: %g, not %g\n", codes, scales, actual, expected);
                    std::exit(1);
                }
            }
        }
}

// Rows of odd sizes in which everything is asked for, one after the other and all at once; drawn tokens are allowed ones.
void samples(Team* team) {
    for (int64_t n : {1, 33, 700, 5003}) {
        const int64_t m = 6, most_top = std::min<int64_t>(n, 20);
        const auto logits = numbers<float>(m * n), values = numbers<float>(3);
        const std::vector<int64_t> some{0, n / 2, n + 5};
        const Ids none{nullptr, nullptr, 0}, ids{some.data(), values.data(), 3};
        std::vector<uint8_t> mask((n + 31) / 32 * 4, 0x55);
        const Asked plain{none, none, none, none, none, nullptr, 0.6, 1, 1, 0, 1, 0, 0, 0, -1};
        std::vector<Asked> asked(m, plain);
        asked[0].temperature = 0, asked[0].num_top = int32_t(most_top);
        asked[1].penalised = asked[1].biased = ids, asked[1].repetition = 2;
        asked[2].allowed = ids, asked[2].top_p = 0.9;
        asked[3].mask = mask.data(), asked[3].top_k = int32_t((n + 1) / 2), asked[3].num_top = 0;
        asked[4].top_k = 3, asked[4].top_p = 0.5, asked[4].min_p = 0.1f;
        asked[5].allowed = asked[5].banned = ids;
        std::vector<int64_t> tokens(m), top(m * most_top);
        std::vector<float> logprobs(m * (1 + most_top));
        baton_sample(team, asked.data(), logits.data(), m, n, most_top, tokens.data(), logprobs.data(), top.data());
        bool is_right = tokens[0] == best_of(logits.data(), n).column && top[0] == tokens[0] && tokens[5] == -1;
        is_right &= (tokens[2] == 0 || tokens[2] == n / 2) && tokens[3] % 2 == 0;
        for (int64_t token : tokens) is_right &= token < n;
        if (!is_right) {
            std::printf("samples of %d tokens\n", int(n));
            std::exit(1);
        }
    }
}

int main() {
    for (int threads : {1, 3}) {
        Team* team = baton_team(threads);
        grouped(team);
        samples(team);
        mlps(team);
        parts(team);
        products<float>(team);
        products<bf16>(team);
        for (int dim : {2, 10, 64, 80})
            for (int block_size : {3, 16}) {
                layers<float>(team, 6, 2, dim, block_size, 0, 0);
                layers<bf16>(team, 9, 1, dim, block_size, 0, 0);
                layers<bf16>(team, 6, 2, dim, block_size, 30, 2.0f);
                layers<float>(team, 4, 4, dim, block_size, 30, 2.0f);
            }
        baton_team_end(team);
    }
    std::puts("nothing found");
}
