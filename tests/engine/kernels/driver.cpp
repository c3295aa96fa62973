// Calls every kernel over odd sizes in buffers of exactly the size that it may touch, for the address and
// undefined-behaviour sanitizers, and for instruction sets that only an emulator runs. Products are compared roughly;
// the tests in Python compare everything. Exit status 0: nothing was found.

#include "kernels.cpp"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

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

    Packed(Team* team, Kind kind, int64_t n, int64_t k) : bias(numbers<float>(n)), weight(numbers<float>(n * k)) {
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

template <class T>
void products(Team* team) {
    for (int kind = 0; kind < NUM_KINDS; kind++)
        for (int64_t n : {1, 31, 70})
            for (int64_t k : {1, 33, 130, 1100}) {
                Packed packed(team, Kind(kind), n, k);
                for (int64_t m : {1, 2, 5, 30}) {
                    const auto x = numbers<T>(m * k);
                    std::vector<T> out(m * n);
                    const bool is_bf16 = sizeof(T) == 2;
                    baton_linear(team, &packed.linear, x.data(), k, is_bf16, m, out.data(), is_bf16);
                    compare(packed, x, out, m);
                }
            }
}

template <class T>
void layers(Team* team, int heads, int kv_heads, int dim, int block_size, int window, float soft_cap) {
    const int hidden = 37, inner = 51, num_blocks = 40;
    const Kind kind = sizeof(T) == 2 ? BF16 : F32;
    const int64_t layer_stride = 2ll * kv_heads * block_size * dim;
    auto cache = numbers<T>(num_blocks * 2 * layer_stride);
    const AttentionShape shape{heads, kv_heads, dim, block_size, 2 * layer_stride, layer_stride, 0.2f, soft_cap, window,
                               sizeof(T) == 2, cache.data()};
    Packed qkv(team, kind, (heads + 2 * kv_heads) * dim, hidden), out(team, kind, hidden, heads * dim);
    Packed gate_up(team, kind, 2 * inner, hidden), down(team, kind, hidden, inner), head(team, kind, 77, hidden);
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
    baton_layer(team, &layer, &shape, &batch, 1, x.data(), cos.data(), sin.data());
    std::vector<float> logits(28 * 77);
    baton_head(team, &head.linear, norm.data(), 1e-5f, x.data(), 28, logits.data());
    const int64_t stride = (heads + 2 * kv_heads) * dim;
    const auto rows = numbers<T>(28 * stride);
    std::vector<T> attended(28 * heads * dim);
    baton_attention(team, &shape, &batch, 0, rows.data(), rows.data() + heads * dim, stride, sizeof(T) == 2, attended.data());
}

}  // namespace

int main() {
    for (int threads : {1, 3}) {
        Team* team = baton_team(threads);
        products<float>(team);
        products<bf16>(team);
        for (int dim : {2, 10, 64, 80})
            for (int block_size : {3, 16}) {
                layers<float>(team, 6, 2, dim, block_size, 0, 0);
                layers<bf16>(team, 9, 1, dim, block_size, 0, 0);
                layers<float>(team, 4, 4, dim, block_size, 30, 2.0f);
            }
        baton_team_end(team);
    }
    std::puts("nothing found");
}
