// Baton's kernels for CPUs, compiled once for each instruction set (engine/kernels/build.py), called through ctypes.
// Pointers and sizes come from engine/kernels/library.py, which checks shapes and types.

#include "matmul.h"

#define BATON extern "C" __attribute__((visibility("default")))

namespace {

struct Linear {
    const void* packed;
    const float* bias;  // or null
    int64_t n, k;
    int32_t kind, padding;
};

Product product(const Linear& linear, const void* operand, Output out) {
    const Kind kind = Kind(linear.kind);
    out.bias = linear.bias;
    return {kind, static_cast<const uint8_t*>(linear.packed), linear.n, linear.k, operand,
            operand_stride(kind, linear.k), out};
}

enum Buffer { OPERAND = 0 };

template <class T>
void linear(Team& team, const Linear& linear, const T* x, int64_t stride, int64_t m, Output out) {
    const Kind kind = Kind(linear.kind);
    const int64_t row_bytes = operand_stride(kind, linear.k) * operand_size(kind);
    auto* operand = static_cast<uint8_t*>(team.buffer(OPERAND, m * row_bytes));
    for_rows(team, m, row_bytes, [&](int64_t i) { to_operand(kind, x + i * stride, linear.k, operand + i * row_bytes); });
    multiply(team, product(linear, operand, out), m);
}

}  // namespace

BATON Team* baton_team(int num_threads) { return new Team(num_threads); }
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
