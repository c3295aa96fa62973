// Products with packed weights: out[m, n] = sum over k of x[m, k] * weight[n, k], in float32.
//
// A weight is packed in panels of PANEL rows, k outermost, so that a panel is read front to back. Each result is one
// chain of fused multiply-adds over k = 0, 1, ... in one lane, in whatever tile it is computed: a row's bits depend
// neither on the other rows of the batch nor on the number of threads. Quantised weights have such a chain for each
// group: x times the integers. Its end times the group's scale is added to the result, and with INT4 the sum of the
// group's x times the minimum: two additions a group instead of one for each weight. Where the CPU multiplies pairs of
// bfloat16, INT4 does so too, two weights at a time.
#pragma once

#include <algorithm>
#include <array>
#include <limits>

#include "team.h"
#include "tiles.h"
#include "vector.h"

namespace {

enum Kind : int { F32 = 0, BF16 = 1, INT8 = 2, INT4 = 3, NUM_KINDS = 4, GROUPED = 5 };  // GROUPED: grouped.h

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
constexpr int64_t MAX_STRETCH = 1024;  // of k with many rows: what x and weights of it take stays in a core's caches

#if BATON_BF16_PAIRS
using Bf16Operand = bf16;
#else
using Bf16Operand = float;
#endif

// Rows of a tile that widens weights on its way: pairs of bfloat16 need registers, of which AVX2 has 16.
constexpr int tile_rows(Kind kind) { return kind == BF16 && LANES == 8 ? 4 : MAX_ROWS; }

// With more rows than these, weights are widened to memory first, and read from there by each tile.
constexpr int few_rows(Kind kind) { return kind == INT4 ? MAX_ROWS : 24; }

// What x has to be made of before it is multiplied by a weight of that kind.
constexpr bool takes_bf16(Kind kind) { return (kind == BF16 || kind == INT4) && std::is_same<Bf16Operand, bf16>::value; }
constexpr int64_t operand_size(Kind kind) { return takes_bf16(kind) ? 2 : 4; }
template <Kind K>
using OperandOf = typename std::conditional<takes_bf16(K), bf16, float>::type;

constexpr bool has_groups(Kind kind) { return kind == INT8 || kind == INT4; }
constexpr int group_size(Kind kind) { return kind == INT8 ? INT8_GROUP : INT4_GROUP; }
constexpr int64_t group_bytes(Kind kind) { return PANEL * (kind == INT8 ? 4 + INT8_GROUP : 4 + INT4_GROUP / 2); }

// Elements of a row of an operand behind its k, padded: for INT4 the sum of each group, as float32.
inline int64_t group_sums_size(Kind kind, int64_t k) {
    return kind == INT4 ? round_up(k, K_MULTIPLE) / INT4_GROUP * 4 / operand_size(kind) : 0;
}

// Elements from one row of an operand to the next: never a power of two, or the rows of a tile share few cache sets.
inline int64_t operand_stride(Kind kind, int64_t k) {
    return round_up(round_up(k, K_MULTIPLE) + group_sums_size(kind, k), 64) + 64 / operand_size(kind);
}

// Of `k` weights of each row of a panel.
inline int64_t panel_bytes(Kind kind, int64_t k) {
    switch (kind) {
        case F32: return k * PANEL * 4;
        case BF16: return (k + 1) / 2 * PANEL * 4;
        case INT8: return (k + INT8_GROUP - 1) / INT8_GROUP * group_bytes(INT8);
        default: return (k + INT4_GROUP - 1) / INT4_GROUP * group_bytes(INT4);
    }
}

inline int64_t packed_bytes(Kind kind, int64_t n, int64_t k) { return (n + PANEL - 1) / PANEL * panel_bytes(kind, k); }

// ---------------------------------------------------------------------------------------------------- packing

inline int8_t nearest(float value, int lowest, int highest) {
    float rounded = __builtin_rintf(value);
    return int8_t(rounded < lowest ? lowest : rounded > highest ? highest : rounded);
}

// Words of 4 bytes, `word(row, i)` the i-th of a row, `LANES` of them from there on `vector(row, i)`: those of equal
// number become neighbours. Some lines of the cache of each row at a time, so that what is read and written stays there
// and the memory of each row is read ahead.
template <class Row, class Word, class Vector>
void transpose(int64_t words, const Row& row, uint8_t* to, const Word& word, const Vector& vector) {
    constexpr int64_t BLOCK = 64;
    static_assert(BLOCK % LANES == 0);
    const int64_t whole = words / LANES * LANES;
    for (int64_t block = 0; block < whole; block += BLOCK) {
        const int64_t stop = std::min(block + BLOCK, whole);
        for (int first = 0; first < PANEL; first += LANES) {
            for (int64_t start = block; start < stop; start += LANES) {
                Floats square[LANES];
                for (int i = 0; i < LANES; i++) square[i] = row(first + i) ? vector(row(first + i), start) : Floats{};
                transpose(square);
                for (int i = 0; i < LANES; i++) std::memcpy(to + ((start + i) * PANEL + first) * 4, &square[i], 4 * LANES);
            }
        }
    }
    for (int64_t i = whole; i < words; i++) {
        for (int column = 0; column < PANEL; column++) {
            const auto* from = row(column);
            const auto value = from ? word(from, i) : decltype(word(from, i)){};
            static_assert(sizeof value == 4);
            std::memcpy(to + (i * PANEL + column) * 4, &value, 4);
        }
    }
}

// Pairs of bfloat16, each a word: the `i`-th of a row, and `LANES` of them from there on.
inline std::array<bf16, 2> pair_of(const bf16* from, int64_t i) { return {from[2 * i], from[2 * i + 1]}; }
inline std::array<bf16, 2> pair_of(const float* from, int64_t i) {
    std::array<bf16, 2> pair;
    for (int half = 0; half < 2; half++) narrow(&pair[half], from[2 * i + half]);
    return pair;
}
inline Floats pairs_of(const bf16* from, int64_t i) { return load_as<Floats>(from + 2 * i); }
inline Floats pairs_of(const float* from, int64_t i) {
    bf16 pairs[2 * LANES];
    for (int half = 0; half < 2; half++) store(pairs + half * LANES, load(from + 2 * i + half * LANES));
    return load_as<Floats>(pairs);
}

// Which four bits of a word hold the i-th of its eight weights. Neighbours that are multiplied as a pair stand in the two
// halves of the word.
constexpr int int4_place(int i) { return takes_bf16(INT4) ? i / 2 + i % 2 * 4 : i; }

// `row(i)`: the i-th of the panel's weight rows, or null behind the last.
template <class T, class Row>
void pack_panel(Kind kind, int64_t k, const Row& row, uint8_t* to) {
    auto at = [&](int column, int64_t i) { return i < k && row(column) ? widen(row(column)[i]) : 0.0f; };
    if (kind == F32) {
        auto one = [](const T* from, int64_t i) { return widen(from[i]); };
        transpose(k, row, to, one, [](const T* from, int64_t i) { return load(from + i); });
        return;
    }
    if (kind == BF16) {
        auto pair = [](const T* from, int64_t i) { return pair_of(from, i); };
        transpose(k / 2, row, to, pair, [](const T* from, int64_t i) { return pairs_of(from, i); });
        for (int column = 0; k % 2 && column < PANEL; column++) {
            bf16 pair[2];
            narrow(&pair[0], at(column, k - 1));
            narrow(&pair[1], 0.0f);
            std::memcpy(to + (k / 2 * PANEL + column) * 4, pair, 4);
        }
        return;
    }
    const int group = kind == INT8 ? INT8_GROUP : INT4_GROUP;
    for (int64_t start = 0; start < k; start += group, to += group_bytes(kind)) {
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
                        quants |= uint32_t(nearest((value - minimum) * inverse, 0, 15)) << (4 * int4_place(i));
                    }
                    std::memcpy(to + (PANEL + word * PANEL + column) * 4, &quants, 4);
                }
            }
        }
    }
}

// Calls `task(panel)` for each of `n` rows' panels, neighbours by one thread: memory comes in huge pages when it is touched
// first, and each of the threads that do so together clears the page, of which one is used.
template <class Task>
void write_panels(Team& team, int64_t n, int64_t bytes, const Task& task) {
    constexpr int64_t HUGE_PAGE = 2 << 20;
    const int64_t panels = (n + PANEL - 1) / PANEL, share = panels / (4 * team.num_threads());
    const int64_t together = std::max(share, (HUGE_PAGE + bytes - 1) / bytes);
    team.run(int((panels + together - 1) / together), [&](int part, int) {
        for (int64_t panel = part * together; panel < std::min(panels, (part + 1) * together); panel++) task(panel);
    });
}

template <class T>
void pack(Team& team, Kind kind, const T* weight, int64_t n, int64_t k, uint8_t* to) {
    const int64_t bytes = panel_bytes(kind, k);
    write_panels(team, n, bytes, [&](int64_t panel) {
        auto row = [&](int column) {
            const int64_t index = panel * PANEL + column;
            return index < n ? weight + index * k : nullptr;
        };
        pack_panel<T>(kind, k, row, to + panel * bytes);
    });
}

// Some rows of a weight of kind F32 or BF16 as float32, `out` [m, k].
inline void look_up(Team& team, Kind kind, const uint8_t* packed, int64_t k, const int64_t* rows, int64_t m, float* out) {
    const int64_t bytes = panel_bytes(kind, k);
    team.run(int(m), [&](int index, int) {
        const uint8_t* from = packed + rows[index] / PANEL * bytes + rows[index] % PANEL * 4;
        float* to = out + index * k;
        if (kind == F32) {
            for (int64_t i = 0; i < k; i++) std::memcpy(to + i, from + i * PANEL * 4, 4);
            return;
        }
        for (int64_t i = 0; i < k; i++) {
            bf16 value;
            std::memcpy(&value, from + i / 2 * PANEL * 4 + i % 2 * 2, 2);
            to[i] = widen(value);
        }
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

// Processors fetch ahead within a page of 4 KiB only, and a panel is a few pages: with few rows, most of the time goes by
// in waiting for the first lines of pages. So tiles ask for weights in advance, into the second-level cache. `fetch` is
// called at element `i` of k for each vector `column` of what a tile reads, at `from`.
struct NothingAhead {
    void fetch(const uint8_t*, int, int64_t) const {}
};

// So many bytes behind what the tile reads.
struct Ahead {
    int64_t distance;
    void fetch(const uint8_t* from, int column, int64_t) const {
        if (column % 2 * LANES * 4 % 64 == 0) __builtin_prefetch(from + distance, 0, 2);
    }
};

// The packed weights that will be widened next, while a tile reads those that were.
struct NextPacked {
    const uint8_t* packed;
    int64_t step;  // bytes for each element of k
    void fetch(const uint8_t*, int column, int64_t i) const {
        if (column == 0) __builtin_prefetch(packed + i * step, 0, 2);
    }
};

// One tile: R rows of x times P neighbouring panels.
template <Kind K, int R, int P>
struct Tile;

template <int R, int P>
struct Tile<F32, R, P> {
    template <class A>
    static void run(Sums<R, P>& sums, const float* a, int64_t stride, const uint8_t* panel, int64_t bytes, int64_t k,
                    const A& ahead) {
        for (int64_t i = 0; i < k; i++) {
            Floats w[2 * P];
#pragma GCC unroll 8
            for (int c = 0; c < 2 * P; c++) {
                const uint8_t* from = panel + (c / 2) * bytes + (i * PANEL + (c % 2) * LANES) * 4;
                ahead.fetch(from, c, i);
                w[c] = load_as<Floats>(from);
            }
            multiply_add<R, P>(sums, a + i, stride, w);
        }
    }
};

#if BATON_BF16_PAIRS
template <int R, int P>
struct Tile<BF16, R, P> {
    template <class A>
    static void run(Sums<R, P>& sums, const bf16* a, int64_t stride, const uint8_t* panel, int64_t bytes, int64_t k,
                    const A& ahead) {
        for (int64_t i = 0; i < (k + 1) / 2; i++) {
            Words w[2 * P];
#pragma GCC unroll 8
            for (int c = 0; c < 2 * P; c++) {
                const uint8_t* from = panel + (c / 2) * bytes + (i * PANEL + (c % 2) * LANES) * 4;
                ahead.fetch(from, c, i);
                w[c] = load_as<Words>(from);
            }
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                uint32_t pair;
                std::memcpy(&pair, a + r * stride + 2 * i, 4);
                const Words x = broadcast(pair);
#pragma GCC unroll 8
                for (int c = 0; c < 2 * P; c++) sums.of[r][c] = multiply_add_pairs(sums.of[r][c], x, w[c]);
            }
        }
    }
};
#else
template <int R, int P>
struct Tile<BF16, R, P> {
    template <class A>
    static void run(Sums<R, P>& sums, const float* a, int64_t stride, const uint8_t* panel, int64_t bytes, int64_t k,
                    const A& ahead) {
        for (int64_t i = 0; i < (k + 1) / 2; i++) {
            Words pairs[2 * P];
            Floats w[2 * P];
#pragma GCC unroll 8
            for (int c = 0; c < 2 * P; c++) {
                const uint8_t* from = panel + (c / 2) * bytes + (i * PANEL + (c % 2) * LANES) * 4;
                ahead.fetch(from, c, i);
                pairs[c] = load_as<Words>(from);
            }
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

// Sums of one group, and what they add to the result.
template <int R, int P>
inline void add_group(Sums<R, P>& sums, const Sums<R, P>& group, const Floats (&scales)[2 * P]) {
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int c = 0; c < 2 * P; c++) sums.of[r][c] += group.of[r][c] * scales[c];
}

template <int R, int P>
struct Tile<INT8, R, P> {
    template <class A>
    static void run(Sums<R, P>& sums, const float* a, int64_t stride, const uint8_t* panel, int64_t bytes, int64_t k,
                    const A& ahead) {
        for (int64_t start = 0; start < k; start += INT8_GROUP, panel += group_bytes(INT8)) {
            Sums<R, P> group{};
            for (int i = 0; i < INT8_GROUP; i++) {
                Floats w[2 * P];
                for (int p = 0; p < P && i * PANEL % 64 == 0; p++) ahead.fetch(panel + p * bytes + i * PANEL, 0, i);
#pragma GCC unroll 8
                for (int c = 0; c < 2 * P; c++) {
                    const uint8_t* from = panel + (c / 2) * bytes + PANEL * 4 + i * PANEL + (c % 2) * LANES;
                    w[c] = load(reinterpret_cast<const int8_t*>(from));
                }
                multiply_add<R, P>(group, a + start + i, stride, w);
            }
            Floats scales[2 * P];
#pragma GCC unroll 8
            for (int c = 0; c < 2 * P; c++) {
                const uint8_t* from = panel + (c / 2) * bytes + (c % 2) * LANES * 4;
                ahead.fetch(from + PANEL * INT8_GROUP, c, 0);  // the end of the group, which is as long as its scales
                scales[c] = load_as<Floats>(from);
            }
            add_group<R, P>(sums, group, scales);
        }
    }
};

// A word of eight weights is multiplied in INT4_STEPS steps: `int4_factors` makes what step STEP multiplies with what
// `int4_operand` makes of the elements of x, which `prepare_int4` has prepared.
#if BATON_BF16_PAIRS

// Two weights at a time, one of each half of the word: four bits in the middle of bfloat16's mantissa, under the exponent
// of 16, are 16 more than their value. What that is too much goes off the minimum (`add_int4_group`).
constexpr int INT4_STEPS = 4;
constexpr float INT4_EXCESS = 16.0f;
using Int4Factors = Words;

template <int STEP>
inline Words int4_factors(Words quants) {
    const Words shifted = STEP == 0 ? quants << 3 : quants >> (4 * STEP - 3);
#if defined(__AVX512F__)
    constexpr int AND_THEN_OR = 0xea;
    return (Words)_mm512_ternarylogic_epi32((__m512i)shifted, _mm512_set1_epi32(0x00780078), _mm512_set1_epi32(0x41804180),
                                            AND_THEN_OR);
#else
    return (shifted & 0x00780078u) | 0x41804180u;
#endif
}
inline Words int4_operand(const bf16* x) {
    uint32_t pair;
    std::memcpy(&pair, x, 4);
    return broadcast(pair);
}
inline Floats int4_multiply_add(Floats sum, Words x, Words w) { return multiply_add_pairs(sum, x, w); }

// Of a row of x [k, padded with zeros]: the sums of its groups go behind it.
inline void prepare_int4(bf16* row, int64_t k) {
    bf16* group_sums = row + round_up(k, K_MULTIPLE);
    for (int64_t start = 0; start < round_up(k, K_MULTIPLE); start += INT4_GROUP, group_sums += 2) {
        Floats totals = load(row + start);
        for (int i = LANES; i < INT4_GROUP; i += LANES) totals += load(row + start + i);
        const float total = sum(totals);
        std::memcpy(group_sums, &total, sizeof total);
    }
}

#else

// Four bits of a word stay where they are and become 16^place times their value, for which x is divided: both are exact.
// Only the highest four are shifted, for their sign.
constexpr int INT4_STEPS = 8;
constexpr float INT4_EXCESS = 0.0f;
using Int4Factors = Floats;

template <int STEP>
inline Floats int4_factors(Words quants) {
    if constexpr (STEP == 7)
        return __builtin_convertvector((Ints)(quants >> 28), Floats);
    else
        return __builtin_convertvector((Ints)(quants & (15u << (4 * STEP))), Floats);
}
inline Floats int4_operand(const float* x) { return broadcast(*x); }
inline Floats int4_multiply_add(Floats sum, Floats x, Floats w) { return sum + x * w; }

alignas(64) const float INT4_DIVIDED[16] = {
    1, 0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-16f, 0x1p-20f, 0x1p-24f, 1,
    1, 0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-16f, 0x1p-20f, 0x1p-24f, 1,
};

// Of a row of x [k, padded with zeros]: the sums of its groups go behind it, then each element is divided.
inline void prepare_int4(float* row, int64_t k) {
    float* group_sums = row + round_up(k, K_MULTIPLE);
    for (int64_t start = 0; start < round_up(k, K_MULTIPLE); start += INT4_GROUP) {
        Floats total{};
        for (int64_t i = start; i < start + INT4_GROUP; i += LANES) {
            const Floats x = load(row + i);
            total += x;
            store(row + i, x * load(INT4_DIVIDED + i % 8));
        }
        group_sums[start / INT4_GROUP] = sum(total);
    }
}

#endif

using Int4Steps = std::make_integer_sequence<int, INT4_STEPS>;

// All of one word of a group, for COLUMNS of the tile's columns from FIRST on: so many that the words and all sums stay in
// registers.
template <int R, int P, int FIRST, int COLUMNS, int... STEP>
inline void multiply_add_int4(Sums<R, P>& group, const OperandOf<INT4>* a, int64_t stride, const uint8_t* words,
                              int64_t bytes, const Ahead& ahead, std::integer_sequence<int, STEP...>) {
    Words quants[COLUMNS];
#pragma GCC unroll 8
    for (int c = 0; c < COLUMNS; c++) {
        const uint8_t* from = words + ((FIRST + c) / 2) * bytes + ((FIRST + c) % 2) * LANES * 4;
        ahead.fetch(from, FIRST + c, 0);
        quants[c] = load_as<Words>(from);
    }
    auto add = [&](auto step) {
        Int4Factors w[COLUMNS];
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; c++) w[c] = int4_factors<step()>(quants[c]);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const auto x = int4_operand(a + r * stride + step() * (8 / INT4_STEPS));
#pragma GCC unroll 8
            for (int c = 0; c < COLUMNS; c++) {
                Floats& sum = group.of[r][FIRST + c];
                sum = int4_multiply_add(sum, x, w[c]);
            }
        }
    };
    (add(std::integral_constant<int, STEP>()), ...);
}

// What the scales and minima of a group make of its sums. `x_sums`: of the first row; the next row's stand `stride` behind.
template <int R, int P, class A>
inline void add_int4_group(Sums<R, P>& sums, const Sums<R, P>& group, const uint8_t* pairs, int64_t bytes,
                           const A& ahead, const float* x_sums, int64_t stride) {
#pragma GCC unroll 8
    for (int c = 0; c < 2 * P; c++) {
        const uint8_t* from = pairs + (c / 2) * bytes + (c % 2) * LANES * 4;
        ahead.fetch(from, c, 0);
        const Words pair = load_as<Words>(from);
        const Floats scale = even(pair);
        Floats minimum = odd(pair);
        if constexpr (INT4_EXCESS != 0) minimum -= scale * INT4_EXCESS;
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) sums.of[r][c] += group.of[r][c] * scale + broadcast(x_sums[r * stride]) * minimum;
    }
}

constexpr int64_t int4_sums_stride(int64_t stride) { return stride * operand_size(INT4) / 4; }

template <int R, int P>
struct Tile<INT4, R, P> {
    static void run(Sums<R, P>& sums, const OperandOf<INT4>* a, int64_t stride, const uint8_t* panel, int64_t bytes,
                    int64_t k, const Ahead& ahead, const float* x_sums) {
        constexpr int COLUMNS = 2 * P < 4 ? 2 * P : 4;
        for (int64_t start = 0; start < k; start += INT4_GROUP, panel += group_bytes(INT4)) {
            Sums<R, P> group{};
            for (int word = 0; word < INT4_GROUP / 8; word++) {
                const uint8_t* words = panel + (1 + word) * PANEL * 4;
                const auto* x = a + start + word * 8;
                multiply_add_int4<R, P, 0, COLUMNS>(group, x, stride, words, bytes, ahead, Int4Steps());
                if constexpr (2 * P > COLUMNS)
                    multiply_add_int4<R, P, COLUMNS, COLUMNS>(group, x, stride, words, bytes, ahead, Int4Steps());
            }
            add_int4_group<R, P>(sums, group, panel, bytes, ahead, x_sums + start / INT4_GROUP, int4_sums_stride(stride));
        }
    }
};

// Quantised weights that were widened to memory, in floats or in pairs of bfloat16: what a group begins with stays in
// front of its values.
constexpr int64_t wide_group_words(Kind kind) { return PANEL * (1 + group_size(kind) * operand_size(kind) / 4); }

template <Kind K, int R>
void run_wide(Sums<R, 1>& sums, const OperandOf<K>* a, int64_t stride, const uint8_t* panel, int64_t k,
              const NextPacked& next, const float* x_sums) {
    constexpr Kind WIDENED = takes_bf16(K) ? BF16 : F32;
    for (int64_t start = 0; start < k; start += group_size(K), panel += 4 * wide_group_words(K)) {
        Sums<R, 1> group{};
        const NextPacked ahead{next.packed + start * next.step, next.step * 4 / operand_size(K)};
        Tile<WIDENED, R, 1>::run(group, a + start, stride, panel + PANEL * 4, 0, group_size(K), ahead);
        if constexpr (K == INT4) {
            const float* group_sums = x_sums + start / INT4_GROUP;
            add_int4_group<R, 1>(sums, group, panel, 0, NothingAhead(), group_sums, int4_sums_stride(stride));
        } else {
            const Floats scales[2] = {load_as<Floats>(panel), load_as<Floats>(panel + LANES * 4)};
            add_group<R, 1>(sums, group, scales);
        }
    }
}

// Where results go: `add` keeps what is there and adds, as a residual stream asks.
struct Output {
    void* data;
    int64_t stride;  // elements
    bool is_bf16;
    bool add;            // only if not is_bf16
    const float* bias;   // null, or one for each column
    int64_t first_row = 0, first_column = 0;  // of the result that stands at `data`

    template <class T>
    T* at(int64_t row, int64_t column) const {
        return static_cast<T*>(data) + (row - first_row) * stride + column - first_column;
    }
};

inline void put(const Output& out, int64_t row, int64_t column, int64_t columns, const float* values) {
    for (int64_t i = 0; i < columns; i++) {
        const float value = values[i] + (out.bias ? out.bias[column + i] : 0.0f);
        if (out.is_bf16)
            narrow(out.at<bf16>(row, column + i), value);
        else if (out.add)
            *out.at<float>(row, column + i) += value;
        else
            *out.at<float>(row, column + i) = value;
    }
}

struct Product {
    Kind kind;
    const uint8_t* packed;
    int64_t n, k;
    const void* a;
    int64_t stride;  // of `a`, elements
    Output out;
    int32_t layout = 0;  // of GROUPED
};

inline int64_t grouped_panel_bytes(int32_t layout, int64_t k);
inline void compute_grouped(const Product& p, int64_t row, int64_t rows, int64_t panel, int64_t panels, float* scratch);
#if BATON_TILES
inline void compute_in_tiles(const Product& p, int64_t row, int64_t rows, int64_t panel, int64_t panels, float* scratch);
inline void compute_int4_in_tiles(const Product& p, int64_t row, int64_t rows, int64_t panel, int64_t panels, float* scratch);
#endif

// Stretch of k, from `start` to `stop`, of a panel's products. What comes before is in `partial`, [rows, PANEL], unless
// there is nothing; sums that have more to come go there. So a result stays one chain of additions.
struct Stretch {
    const uint8_t* weights;  // of the first panel, at `start`
    int64_t start, stop;
    float* partial;  // null if the stretch is all of k
    Ahead ahead;     // of packed weights
    NextPacked next;  // if these were widened
};

// How a tile reads weights: as they are packed, or as `widen_panel` left them.
enum Source { PACKED, WIDE };

// The sums of LANES columns, of which some may be behind the last.
inline void finish_vector(const Product& p, int64_t row, int64_t column, Floats sums) {
    if (!p.out.is_bf16 && column + LANES <= p.n) {
        float* to = p.out.at<float>(row, column);
        if (p.out.bias) sums += load(p.out.bias + column);
        store(to, p.out.add ? load(to) + sums : sums);
    } else if (column < p.n) {
        float values[LANES];
        store(values, sums);
        put(p.out, row, column, std::min<int64_t>(LANES, p.n - column), values);
    }
}

template <int R, int P>
inline void finish(const Product& p, int64_t row, int64_t panel, const Sums<R, P>& sums) {
    for (int r = 0; r < R; r++)
        for (int c = 0; c < 2 * P; c++) finish_vector(p, row + r, panel * PANEL + c * LANES, sums.of[r][c]);
}

// Sums of the groups from `start` on of a row of x.
inline const float* int4_sums(const Product& p, const void* row, int64_t start) {
    const auto* behind = static_cast<const uint8_t*>(row) + round_up(p.k, K_MULTIPLE) * operand_size(INT4);
    return reinterpret_cast<const float*>(behind) + start / INT4_GROUP;
}

template <Kind K, Source S, int R, int P>
void compute(const Product& p, int64_t row, int64_t panel, const Stretch& stretch) {
    const auto* first = static_cast<const OperandOf<K>*>(p.a) + row * p.stride;
    const auto* a = first + stretch.start;
    const int64_t k = stretch.stop - stretch.start;
    Sums<R, P> sums{};
    if (stretch.start > 0)
        for (int r = 0; r < R; r++)
            for (int c = 0; c < 2 * P; c++) sums.of[r][c] = load(stretch.partial + r * PANEL + c * LANES);
    if constexpr (S == WIDE && has_groups(K)) {
        run_wide<K, R>(sums, a, p.stride, stretch.weights, k, stretch.next, int4_sums(p, first, stretch.start));
    } else if constexpr (S == WIDE) {
        Tile<F32, R, P>::run(sums, a, p.stride, stretch.weights, 0, k, stretch.next);
    } else if constexpr (K == INT4) {
        const float* x_sums = int4_sums(p, first, stretch.start);
        Tile<K, R, P>::run(sums, a, p.stride, stretch.weights, panel_bytes(K, p.k), k, stretch.ahead, x_sums);
    } else {
        Tile<K, R, P>::run(sums, a, p.stride, stretch.weights, panel_bytes(K, p.k), k, stretch.ahead);
    }
    if (stretch.stop == p.k) return finish<R, P>(p, row, panel, sums);
    for (int r = 0; r < R; r++)
        for (int c = 0; c < 2 * P; c++) store(stretch.partial + r * PANEL + c * LANES, sums.of[r][c]);
}

// What lies behind `bytes` of packed weights, `k` of each row of a panel, as the tiles with these ask for it.
inline NextPacked next_packed(const uint8_t* packed, int64_t bytes, int64_t k) {
    return {packed + bytes, (bytes + k - 1) / k};
}

// All rows in tiles of nearly equal size. The first asks for weights in advance.
template <Kind K, Source S, int... R>
void compute_rows(const Product& p, int64_t row, int64_t rows, int64_t panel, Stretch stretch,
                  std::integer_sequence<int, R...>) {
    using Function = void (*)(const Product&, int64_t, int64_t, const Stretch&);
    static constexpr Function functions[] = {compute<K, S, R + 1, 1>...};
    constexpr int64_t MAX = S == WIDE ? MAX_ROWS : tile_rows(K);
    const int64_t tiles = (rows + MAX - 1) / MAX;
    float* partial = stretch.partial;
    for (int64_t t = 0; t < tiles; t++) {
        const int64_t start = rows * t / tiles, count = rows * (t + 1) / tiles - start;
        stretch.partial = partial + start * PANEL;
        functions[count - 1](p, row + start, panel, stretch);
        stretch.ahead = {0};
        stretch.next = {stretch.weights, 0};
    }
}

constexpr auto ROW_COUNTS = std::make_integer_sequence<int, MAX_ROWS>();

// Floats that `k` weights of each row of a panel take at most if they are widened, with what each group begins with.
constexpr int64_t wide_floats(int64_t k) { return (k + k / INT4_GROUP) * PANEL; }

template <int... STEP>
inline void widen_int4(Words quants, float* to, std::integer_sequence<int, STEP...>) {
    (store(to + STEP * PANEL, (Floats)int4_factors<STEP>(quants)), ...);
}

// Weights of one panel as float32, [k, PANEL], or in pairs: the very factors that `Tile` computes for itself.
template <Kind K>
void widen_panel(const uint8_t* from, int64_t k, float* to) {
    if constexpr (K == BF16) {
        for (int c = 0; c < 2; c++)
            for (int64_t i = 0; i < k; i += 2) {
                const Words pairs = load_as<Words>(from + (i / 2 * PANEL + c * LANES) * 4);
                store(to + i * PANEL + c * LANES, even(pairs));
                store(to + (i + 1) * PANEL + c * LANES, odd(pairs));
            }
    }
    if constexpr (has_groups(K)) {
        for (int64_t start = 0; start < k; start += group_size(K), from += group_bytes(K)) {
            std::memcpy(to, from, PANEL * 4);
            to += PANEL;
            const uint8_t* quants = from + PANEL * 4;
            for (int i = 0; i < 2 * group_size(K) && K == INT8; i++)
                store(to + i * LANES, load(reinterpret_cast<const int8_t*>(quants) + i * LANES));
            for (int word = 0; word < group_size(K) / 8 && K == INT4; word++)
                for (int c = 0; c < 2; c++)
                    widen_int4(load_as<Words>(quants + (word * PANEL + c * LANES) * 4),
                               to + word * INT4_STEPS * PANEL + c * LANES, Int4Steps());
            to += wide_group_words(K) - PANEL;
        }
    }
}

// How many panels a tile of so few rows takes: enough sums to keep the pipelines full. INT4 in pairs is limited by memory,
// which gives one stream the fastest.
constexpr int panels_at_once(Kind kind, int64_t rows) {
#if BATON_TILES
    if (kind == BF16) return rows <= TILE_ROWS ? 2 : 1;
#endif
    if (rows == 1 && kind == INT4) return takes_bf16(INT4) ? 1 : 4;
    return rows <= 2 ? 2 : 1;
}

// A tile of several panels asks for those of the next one if they are short: so it meets the beginning of each.
inline Ahead ahead_of(int64_t panels, int64_t bytes) {
    return {panels > 1 && panels * bytes <= (128 << 10) ? panels * bytes : 8192};
}

// Rows of x that stay in the second-level cache, times some panels. With few rows weights are widened in registers,
// tile by tile. With many rows a stretch of a panel is widened once.
template <Kind K>
void compute_block(const Product& p, int64_t row, int64_t rows, int64_t panel, int64_t panels, float* scratch) {
    const int64_t bytes = panel_bytes(K, p.k);
    const uint8_t* weights = p.packed + panel * bytes;
    if (rows <= few_rows(K)) {
        const int at_once = panels_at_once(K, rows);
        for (int64_t i = 0; i < panels;) {
            Stretch at{weights + i * bytes, 0, p.k, scratch, ahead_of(at_once, bytes), {}};
            if (at_once == 1 || i + at_once > panels) {
                at.ahead = ahead_of(1, bytes);
                compute_rows<K, PACKED>(p, row, rows, panel + i++, at, ROW_COUNTS);
                continue;
            }
            if (rows == 1)
                compute<K, PACKED, 1, panels_at_once(K, 1)>(p, row, panel + i, at);
            else
                compute<K, PACKED, 2, panels_at_once(K, 2)>(p, row, panel + i, at);
            i += at_once;
        }
        return;
    }
    constexpr bool is_direct = K == F32 || (K == BF16 && std::is_same<Bf16Operand, bf16>::value);
    const int64_t stretches = (p.k + MAX_STRETCH - 1) / MAX_STRETCH;
    const int64_t length = round_up((p.k + stretches - 1) / stretches, K_MULTIPLE);
    for (int64_t i = 0; i < panels; i++)
        for (int64_t start = 0; start < p.k; start += length) {
            const int64_t stop = std::min(p.k, start + length);
            const uint8_t* packed = weights + i * bytes + panel_bytes(K, start);
            Stretch at{packed, start, stop, scratch + wide_floats(length), ahead_of(1, bytes), {}};
            if constexpr (is_direct) {
                compute_rows<K, PACKED>(p, row, rows, panel + i, at, ROW_COUNTS);
            } else {
                widen_panel<K>(packed, stop - start, scratch);
                at.weights = reinterpret_cast<const uint8_t*>(scratch);
                at.next = next_packed(packed, panel_bytes(K, stop - start), stop - start);
                compute_rows<K, WIDE>(p, row, rows, panel + i, at, ROW_COUNTS);
            }
        }
}

// A product's tasks: blocks of rows of x that stay in the second-level cache, times some panels.
struct Tasks {
    int64_t blocks, panels, per_task, count;  // `count` tasks for each block, of `per_task` panels
    bool is_weight_larger;                    // what is larger comes from memory, and only once
    int64_t m;

    // Where a block begins: with tiles, behind whole ones.
    int64_t first_row(int64_t block) const {
        const int64_t row = m * block / blocks;
#if BATON_TILES
        return std::min(m, round_up(row, 2 * TILE_ROWS));
#else
        return row;
#endif
    }

    Tasks(const Team& team, const Product& p, int64_t rows) : m(rows) {
        constexpr int64_t BLOCK_BYTES = 320 << 10;
        constexpr int64_t TASK_BYTES = 48 << 10;  // of weights, so that claiming a task costs little
        const int64_t bytes = p.kind == GROUPED ? grouped_panel_bytes(p.layout, p.k) : panel_bytes(p.kind, p.k);
        panels = (p.n + PANEL - 1) / PANEL;
        int64_t block = BLOCK_BYTES / (std::min(p.stride, MAX_STRETCH) * operand_size(p.kind)) / MAX_ROWS * MAX_ROWS;
        block = std::max<int64_t>(block, MAX_ROWS);
        blocks = (m + block - 1) / block;
        per_task = std::max<int64_t>((TASK_BYTES + bytes - 1) / bytes, (panels + 63) / 64);
        per_task = std::max<int64_t>(1, std::min(per_task, panels / (4 * team.num_threads())));
        if (per_task > 1) per_task = round_up(per_task, panels_at_once(p.kind, m));
        count = (panels + per_task - 1) / per_task;
        is_weight_larger = panels * bytes > m * p.stride * operand_size(p.kind);
    }
};

// Calls `with(block, task, thread)` for each.
template <class With>
void for_tasks(Team& team, const Tasks& tasks, const With& with) {
    team.run(int(tasks.blocks * tasks.count), [&](int index, int thread) {
        if (tasks.is_weight_larger)
            with(index % tasks.blocks, index / tasks.blocks, thread);
        else
            with(index / tasks.count, index % tasks.count, thread);
    });
}

constexpr int64_t scratch_floats(int64_t rows) { return wide_floats(MAX_STRETCH) + PANEL * rows; }

inline void compute_task(const Product& p, int64_t row, int64_t rows, int64_t first, int64_t count, float* scratch) {
    switch (p.kind) {
        case F32: return compute_block<F32>(p, row, rows, first, count, scratch);
#if BATON_TILES
        case BF16: return compute_in_tiles(p, row, rows, first, count, scratch);
#else
        case BF16: return compute_block<BF16>(p, row, rows, first, count, scratch);
#endif
        case INT8: return compute_block<INT8>(p, row, rows, first, count, scratch);
        case GROUPED: return compute_grouped(p, row, rows, first, count, scratch);
#if BATON_TILES
        default: return compute_int4_in_tiles(p, row, rows, first, count, scratch);
#else
        default: return compute_block<INT4>(p, row, rows, first, count, scratch);
#endif
    }
}

inline void multiply(Team& team, const Product& p, int64_t m) {
    const Tasks tasks(team, p, m);
    for_tasks(team, tasks, [&](int64_t block, int64_t task, int thread) {
        const int64_t row = tasks.first_row(block), rows = tasks.first_row(block + 1) - row;
        const int64_t first = task * tasks.per_task, count = std::min(tasks.per_task, tasks.panels - first);
        compute_task(p, row, rows, first, count, static_cast<float*>(team.scratch(thread, 4 * scratch_floats(rows))));
    });
}

// A result and its column.
struct Best {
    float value;
    int64_t column;
};

// As torch's argmax has it: NaN is the largest, and of equal ones the first counts.
inline bool is_better(float value, float than) { return value > than || (value != value && than == than); }

inline Best best_of(const float* values, int64_t count) {
    constexpr int64_t STRETCH = 64 * LANES;
    constexpr int SIDE = 4;  // vectors side by side: none waits for the one before
    constexpr float LEAST = -std::numeric_limits<float>::infinity();
    Best best{LEAST, 0};  // first only the stretch that has it
    for (int64_t start = 0; start < count; start += STRETCH) {
        const int64_t end = std::min(start + STRETCH, count);
        Floats most[SIDE];
        Ints is_nan{};
        for (Floats& one : most) one = broadcast(LEAST);
        int64_t i = start;
        for (; i + SIDE * LANES <= end; i += SIDE * LANES)
            for (int side = 0; side < SIDE; side++) {
                const Floats next = load(values + i + side * LANES);
                most[side] = larger(next, most[side]);
                is_nan |= next != next;
            }
        float value = largest(larger(larger(most[0], most[1]), larger(most[2], most[3])));
        bool has_nan = false;
        for (int lane = 0; lane < LANES; lane++) has_nan |= is_nan[lane] != 0;
        for (; i < end; i++) {
            value = std::max(value, values[i]);
            has_nan |= values[i] != values[i];
        }
        if (has_nan) {
            const float* nan = std::find_if(values + start, values + end, [](float one) { return one != one; });
            return {*nan, nan - values};
        }
        if (value > best.value) best = {value, start};
    }
    while (values[best.column] != best.value) best.column++;
    return best;
}

// The best column of each of the `m` rows of a product. Its results are kept in rows of `stride` at `kept`, unless that
// is null: while they are in the cache. `out` of `p` is ignored but for the bias. `memory(bytes)`: for one `Best` a task
// and row.
template <class Memory>
void find_best(Team& team, Product p, int64_t m, Best* to, float* kept, int64_t stride, const Memory& memory) {
    const Tasks tasks(team, p, m);
    auto* bests = static_cast<Best*>(memory(sizeof(Best) * m * tasks.count));
    for_tasks(team, tasks, [&](int64_t block, int64_t task, int thread) {
        const int64_t row = tasks.first_row(block), rows = tasks.first_row(block + 1) - row;
        const int64_t first = task * tasks.per_task, count = std::min(tasks.per_task, tasks.panels - first);
        const int64_t column = first * PANEL, columns = std::min(count * PANEL, p.n - column);
        auto* scratch = static_cast<float*>(team.scratch(thread, 4 * (scratch_floats(rows) + rows * columns)));
        float* results = scratch + scratch_floats(rows);
        Product part = p;
        part.out = {results, columns, false, false, p.out.bias, row, column};
        compute_task(part, row, rows, first, count, scratch);
        for (int64_t r = 0; r < rows; r++) {
            const Best best = best_of(results + r * columns, columns);
            bests[(row + r) * tasks.count + task] = {best.value, column + best.column};
            if (kept != nullptr)
                std::memcpy(kept + (row + r) * stride + column, results + r * columns, sizeof(float) * columns);
        }
    });
    for (int64_t row = 0; row < m; row++) {
        const Best* of_row = bests + row * tasks.count;
        to[row] = of_row[0];
        for (int64_t task = 1; task < tasks.count; task++)
            if (is_better(of_row[task].value, to[row].value)) to[row] = of_row[task];
    }
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
