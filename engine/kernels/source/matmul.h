// Products with packed weights: out[m, n] = sum over k of x[m, k] * weight[n, k], in float32.
//
// A weight is packed in panels of PANEL rows, k outermost, so that a panel is read front to back. Each result is one
// chain of fused multiply-adds over k = 0, 1, ... in one lane, in whatever tile it is computed: a row's bits depend
// neither on the other rows of the batch nor on the number of threads.
#pragma once

#include <algorithm>

#include "team.h"
#include "vector.h"

namespace {

enum Kind : int { F32 = 0, BF16 = 1, INT8 = 2, INT4 = 3, NUM_KINDS = 4 };

#if defined(__AVX512F__)
constexpr int MAX_ROWS = 12;  // of a tile: 24 sums, 2 weights, 1 activation in 32 registers
#elif defined(__AVX2__)
constexpr int MAX_ROWS = 6;
#else
constexpr int MAX_ROWS = 12;
#endif
constexpr int PANEL = 2 * LANES;  // rows of the weight
constexpr int INT8_GROUP = 64;    // weights that share a scale
constexpr int INT4_GROUP = 32;    // weights that share a scale and a minimum
constexpr int K_MULTIPLE = 64;    // rows of an operand are padded with zeros to this

#if defined(__AVX512BF16__)
using Bf16Operand = bf16;
#else
using Bf16Operand = float;
#endif

// What x has to be made of before it is multiplied by a weight of that kind.
inline bool takes_bf16(Kind kind) { return kind == BF16 && std::is_same<Bf16Operand, bf16>::value; }
inline int64_t operand_size(Kind kind) { return takes_bf16(kind) ? 2 : 4; }

// Elements from one row of an operand to the next: never a power of two, or the rows of a tile share few cache sets.
inline int64_t operand_stride(Kind kind, int64_t k) { return round_up(k, K_MULTIPLE) + 64 / operand_size(kind); }

inline int64_t panel_bytes(Kind kind, int64_t k) {
    switch (kind) {
        case F32: return k * PANEL * 4;
        case BF16: return (k + 1) / 2 * PANEL * 4;
        case INT8: return (k + INT8_GROUP - 1) / INT8_GROUP * PANEL * (4 + INT8_GROUP);
        default: return (k + INT4_GROUP - 1) / INT4_GROUP * PANEL * (4 + INT4_GROUP / 2);
    }
}

inline int64_t packed_bytes(Kind kind, int64_t n, int64_t k) { return (n + PANEL - 1) / PANEL * panel_bytes(kind, k); }

// ---------------------------------------------------------------------------------------------------- packing

inline int8_t nearest(float value, int lowest, int highest) {
    float rounded = __builtin_rintf(value);
    return int8_t(rounded < lowest ? lowest : rounded > highest ? highest : rounded);
}

// `row(i)`: the i-th of the panel's weight rows, or null behind the last.
template <class T, class Row>
void pack_panel(Kind kind, int64_t k, const Row& row, uint8_t* to) {
    auto at = [&](int column, int64_t i) { return i < k && row(column) ? widen(row(column)[i]) : 0.0f; };
    if (kind == F32) {
        for (int64_t i = 0; i < k; i++)
            for (int column = 0; column < PANEL; column++) reinterpret_cast<float*>(to)[i * PANEL + column] = at(column, i);
        return;
    }
    if (kind == BF16) {
        for (int64_t i = 0; i < k; i += 2)
            for (int column = 0; column < PANEL; column++) {
                bf16 pair[2];
                narrow(&pair[0], at(column, i));
                narrow(&pair[1], at(column, i + 1));
                std::memcpy(to + (i / 2 * PANEL + column) * 4, pair, 4);
            }
        return;
    }
    const int group = kind == INT8 ? INT8_GROUP : INT4_GROUP;
    const int64_t group_bytes = kind == INT8 ? PANEL * (4 + INT8_GROUP) : PANEL * (4 + INT4_GROUP / 2);
    for (int64_t start = 0; start < k; start += group, to += group_bytes) {
        for (int column = 0; column < PANEL; column++) {
            const int64_t stop = std::min<int64_t>(start + group, k);
            float most = at(column, start), least = most;
            for (int64_t i = start; i < stop; i++) {
                most = std::max(most, at(column, i));
                least = std::min(least, at(column, i));
            }
            if (kind == INT8) {
                const float scale = std::max(most, -least) / 127.0f;
                const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
                std::memcpy(to + column * 4, &scale, 4);
                auto* quants = reinterpret_cast<int8_t*>(to + PANEL * 4);
                for (int i = 0; i < group; i++)
                    quants[i * PANEL + column] = nearest(at(column, start + i) * inverse, -127, 127);
            } else {
                bf16 pair[2];  // scale and minimum, as they will be read
                narrow(&pair[1], least);
                const float minimum = widen(pair[1]);
                narrow(&pair[0], (most - minimum) / 15.0f);
                const float scale = widen(pair[0]), inverse = scale > 0 ? 1.0f / scale : 0.0f;
                std::memcpy(to + column * 4, pair, 4);
                for (int word = 0; word < group / 8; word++) {
                    uint32_t quants = 0;
                    for (int i = 0; i < 8; i++) {
                        const float value = at(column, start + word * 8 + i);
                        quants |= uint32_t(nearest((value - minimum) * inverse, 0, 15)) << (4 * i);
                    }
                    std::memcpy(to + (PANEL + word * PANEL + column) * 4, &quants, 4);
                }
            }
        }
    }
}

template <class T>
void pack(Team& team, Kind kind, const T* weight, int64_t n, int64_t k, uint8_t* to) {
    const int64_t bytes = panel_bytes(kind, k);
    team.run(int((n + PANEL - 1) / PANEL), [&](int panel, int) {
        auto row = [&](int column) {
            const int64_t index = int64_t(panel) * PANEL + column;
            return index < n ? weight + index * k : nullptr;
        };
        pack_panel<T>(kind, k, row, to + panel * bytes);
    });
}

// ------------------------------------------------------------------------------------------------------- tiles

template <int R, int P>
struct Sums {
    Floats of[R][2 * P];
};

template <int R, int P>
inline void multiply_add(Sums<R, P>& sums, const float* a, int64_t stride, const Floats (&w)[2 * P]) {
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
        const Floats x = broadcast(a[r * stride]);
#pragma GCC unroll 8
        for (int c = 0; c < 2 * P; c++) sums.of[r][c] += x * w[c];
    }
}

// One tile: R rows of x times P neighbouring panels.
template <Kind K, int R, int P>
struct Tile;

template <int R, int P>
struct Tile<F32, R, P> {
    static void run(Sums<R, P>& sums, const float* a, int64_t stride, const uint8_t* panel, int64_t bytes, int64_t k) {
        for (int64_t i = 0; i < k; i++) {
            Floats w[2 * P];
#pragma GCC unroll 8
            for (int c = 0; c < 2 * P; c++)
                w[c] = load_as<Floats>(panel + (c / 2) * bytes + (i * PANEL + (c % 2) * LANES) * 4);
            multiply_add<R, P>(sums, a + i, stride, w);
        }
    }
};

#if defined(__AVX512BF16__)
template <int R, int P>
struct Tile<BF16, R, P> {
    static void run(Sums<R, P>& sums, const bf16* a, int64_t stride, const uint8_t* panel, int64_t bytes, int64_t k) {
        for (int64_t i = 0; i < (k + 1) / 2; i++) {
            Words w[2 * P];
#pragma GCC unroll 8
            for (int c = 0; c < 2 * P; c++)
                w[c] = load_as<Words>(panel + (c / 2) * bytes + (i * PANEL + (c % 2) * LANES) * 4);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                uint32_t pair;
                std::memcpy(&pair, a + r * stride + 2 * i, 4);
                const auto x = (__m512bh)broadcast(pair);
#pragma GCC unroll 8
                for (int c = 0; c < 2 * P; c++)
                    sums.of[r][c] = (Floats)_mm512_dpbf16_ps((__m512)sums.of[r][c], x, (__m512bh)w[c]);
            }
        }
    }
};
#else
template <int R, int P>
struct Tile<BF16, R, P> {
    static void run(Sums<R, P>& sums, const float* a, int64_t stride, const uint8_t* panel, int64_t bytes, int64_t k) {
        for (int64_t i = 0; i < (k + 1) / 2; i++) {
            Words pairs[2 * P];
            Floats w[2 * P];
#pragma GCC unroll 8
            for (int c = 0; c < 2 * P; c++)
                pairs[c] = load_as<Words>(panel + (c / 2) * bytes + (i * PANEL + (c % 2) * LANES) * 4);
#pragma GCC unroll 8
            for (int c = 0; c < 2 * P; c++) w[c] = even(pairs[c]);
            multiply_add<R, P>(sums, a + 2 * i, stride, w);
#pragma GCC unroll 8
            for (int c = 0; c < 2 * P; c++) w[c] = odd(pairs[c]);
            multiply_add<R, P>(sums, a + 2 * i + 1, stride, w);
        }
    }
};
#endif

template <int R, int P>
struct Tile<INT8, R, P> {
    static void run(Sums<R, P>& sums, const float* a, int64_t stride, const uint8_t* panel, int64_t bytes, int64_t k) {
        for (int64_t start = 0; start < k; start += INT8_GROUP, panel += PANEL * (4 + INT8_GROUP)) {
            Floats scales[2 * P];
#pragma GCC unroll 8
            for (int c = 0; c < 2 * P; c++)
                scales[c] = load_as<Floats>(panel + (c / 2) * bytes + (c % 2) * LANES * 4);
            for (int i = 0; i < INT8_GROUP; i++) {
                Floats w[2 * P];
#pragma GCC unroll 8
                for (int c = 0; c < 2 * P; c++) {
                    const uint8_t* from = panel + (c / 2) * bytes + PANEL * 4 + i * PANEL + (c % 2) * LANES;
                    w[c] = load(reinterpret_cast<const int8_t*>(from)) * scales[c];
                }
                multiply_add<R, P>(sums, a + start + i, stride, w);
            }
        }
    }
};

template <int R, int P>
struct Tile<INT4, R, P> {
    static void run(Sums<R, P>& sums, const float* a, int64_t stride, const uint8_t* panel, int64_t bytes, int64_t k) {
#if defined(__AVX512F__)
        const Floats values = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        auto value = [&](Words quants) { return __builtin_shuffle(values, (Ints)quants); };  // takes the low 4 bits
#else
        auto value = [&](Words quants) { return __builtin_convertvector((Ints)(quants & 15), Floats); };
#endif
        for (int64_t start = 0; start < k; start += INT4_GROUP, panel += PANEL * (4 + INT4_GROUP / 2)) {
            Words pairs[2 * P];
#pragma GCC unroll 8
            for (int c = 0; c < 2 * P; c++)
                pairs[c] = load_as<Words>(panel + (c / 2) * bytes + (c % 2) * LANES * 4);
            for (int word = 0; word < INT4_GROUP / 8; word++) {
                Words quants[2 * P];
#pragma GCC unroll 8
                for (int c = 0; c < 2 * P; c++)
                    quants[c] = load_as<Words>(panel + (c / 2) * bytes + (PANEL + word * PANEL + (c % 2) * LANES) * 4);
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++) {
                    Floats w[2 * P];
#pragma GCC unroll 8
                    for (int c = 0; c < 2 * P; c++) {
                        w[c] = value(quants[c]) * even(pairs[c]) + odd(pairs[c]);
                        quants[c] >>= 4;
                    }
                    multiply_add<R, P>(sums, a + start + word * 8 + i, stride, w);
                }
            }
        }
    }
};

// Where results go: `add` keeps what is there and adds, as a residual stream asks.
struct Output {
    void* data;
    int64_t stride;  // elements
    bool is_bf16;
    bool add;            // only if not is_bf16
    const float* bias;   // null, or one for each column
};

inline void put(const Output& out, int64_t row, int64_t column, int64_t columns, const float* values) {
    for (int64_t i = 0; i < columns; i++) {
        const float value = values[i] + (out.bias ? out.bias[column + i] : 0.0f);
        if (out.is_bf16)
            narrow(static_cast<bf16*>(out.data) + row * out.stride + column + i, value);
        else if (out.add)
            static_cast<float*>(out.data)[row * out.stride + column + i] += value;
        else
            static_cast<float*>(out.data)[row * out.stride + column + i] = value;
    }
}

struct Product {
    Kind kind;
    const uint8_t* packed;
    int64_t n, k;
    const void* a;
    int64_t stride;  // of `a`, elements
    Output out;
};

template <Kind K, int R, int P>
void compute(const Product& p, int64_t row, int64_t panel) {
    using Operand = typename std::conditional<K == BF16, Bf16Operand, float>::type;
    const int64_t bytes = panel_bytes(K, p.k);
    Sums<R, P> sums{};
    Tile<K, R, P>::run(
        sums, static_cast<const Operand*>(p.a) + row * p.stride, p.stride, p.packed + panel * bytes, bytes, p.k);
    for (int r = 0; r < R; r++)
        for (int c = 0; c < 2 * P; c++) {
            const int64_t column = panel * PANEL + c * LANES;
            if (!p.out.is_bf16 && column + LANES <= p.n) {
                float* to = static_cast<float*>(p.out.data) + (row + r) * p.out.stride + column;
                Floats value = sums.of[r][c];
                if (p.out.bias) value += load(p.out.bias + column);
                store(to, p.out.add ? load(to) + value : value);
            } else if (column < p.n) {
                float values[LANES];
                store(values, sums.of[r][c]);
                put(p.out, row + r, column, std::min<int64_t>(LANES, p.n - column), values);
            }
        }
}

template <Kind K, int... R>
void compute_rows(const Product& p, int64_t row, int rows, int64_t panel, std::integer_sequence<int, R...>) {
    using Function = void (*)(const Product&, int64_t, int64_t);
    static constexpr Function functions[] = {compute<K, R + 1, 1>...};
    functions[rows - 1](p, row, panel);
}

// Rows in tiles of nearly equal size, panels one by one; few rows take two panels at once, to keep the pipelines full.
template <Kind K>
void compute_block(const Product& p, int64_t row, int64_t rows, int64_t panel, int64_t panels) {
    for (int64_t i = 0; i < panels;) {
        if (rows <= 2 && i + 2 <= panels) {
            if (rows == 1)
                compute<K, 1, 2>(p, row, panel + i);
            else
                compute<K, 2, 2>(p, row, panel + i);
            i += 2;
            continue;
        }
        const int64_t tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t start = rows * t / tiles, stop = rows * (t + 1) / tiles;
            compute_rows<K>(p, row + start, int(stop - start), panel + i, std::make_integer_sequence<int, MAX_ROWS>());
        }
        i++;
    }
}

inline void multiply(Team& team, const Product& p, int64_t m) {
    constexpr int64_t BLOCK_BYTES = 192 << 10;  // of x: stays in the second-level cache while panels pass by
    constexpr int64_t TASK_BYTES = 48 << 10;    // of weights, so that claiming a task costs little
    const int64_t bytes = panel_bytes(p.kind, p.k), panels = (p.n + PANEL - 1) / PANEL;
    int64_t block = BLOCK_BYTES / (p.stride * operand_size(p.kind)) / MAX_ROWS * MAX_ROWS;
    block = std::max<int64_t>(block, MAX_ROWS);
    const int64_t blocks = (m + block - 1) / block;
    int64_t per_task = std::max<int64_t>((TASK_BYTES + bytes - 1) / bytes, (panels + 63) / 64);
    per_task = std::max<int64_t>(1, std::min(per_task, panels / (4 * team.num_threads())));
    per_task += per_task > 1 && per_task % 2;
    const int64_t tasks = (panels + per_task - 1) / per_task;
    team.run(int(blocks * tasks), [&](int index, int) {
        const int64_t b = index / tasks, first = index % tasks * per_task;
        const int64_t row = m * b / blocks, rows = m * (b + 1) / blocks - row;
        const int64_t count = std::min(per_task, panels - first);
        switch (p.kind) {
            case F32: return compute_block<F32>(p, row, rows, first, count);
            case BF16: return compute_block<BF16>(p, row, rows, first, count);
            case INT8: return compute_block<INT8>(p, row, rows, first, count);
            default: return compute_block<INT4>(p, row, rows, first, count);
        }
    });
}

// Work that is done row by row, in tasks that are worth a claim.
template <class Row>
void for_rows(Team& team, int64_t rows, int64_t bytes_per_row, const Row& row) {
    const int64_t per_task = std::max<int64_t>(1, (32 << 10) / std::max<int64_t>(bytes_per_row, 1));
    team.run(int((rows + per_task - 1) / per_task), [&](int task, int) {
        for (int64_t i = task * per_task; i < std::min(rows, (task + 1) * per_task); i++) row(i);
    });
}

}  // namespace
