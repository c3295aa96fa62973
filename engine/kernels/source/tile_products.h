// Products in tiles: up to 32 rows of x times 32 rows of the weight, or 16 times 64, in four tiles of sums.
//
// A packed panel has pairs of bfloat16 outermost, so 16 of its rows of pairs are a tile as they stand. Each result is one
// chain of additions of what 32 elements of k give, whatever the shape of the tiles and whichever row it is.
#pragma once

#include "matmul.h"

#if BATON_TILES

namespace {

// The tiles' numbers: four of sums, row of tiles by row of tiles, then those of x, then those of weights.
enum : int { SUMS = 0, X = 4, WEIGHTS = 6 };

constexpr int64_t PANEL_STRIDE = PANEL * 4;                       // bytes from one pair of a panel to the next
constexpr int64_t STEP_BYTES = TILE_DEPTH / 2 * PANEL_STRIDE;     // of a panel, that a step over k multiplies
static_assert(PANEL == 2 * TILE_COLUMNS);

// Sums of ROWS times 2 * PANELS tiles. `steps` of TILE_DEPTH elements of k: those of x are `x_step` bytes apart.
template <int ROWS, int PANELS>
struct TileBlock {
    static constexpr int COLUMNS = 2 * PANELS;
    static_assert(ROWS * COLUMNS <= 4);

    template <class Function, int... I>
    static void each_of(const Function& function, std::integer_sequence<int, I...>) {
        (function(std::integral_constant<int, I>()), ...);
    }
    template <int COUNT, class Function>
    static void each(const Function& function) {
        each_of(function, std::make_integer_sequence<int, COUNT>());
    }

    static void zero() {
        each<ROWS * COLUMNS>([](auto i) { zero_tile<SUMS + i()>(); });
    }

    // Sums are [rows, PANELS * PANEL] in memory, `stride` bytes apart.
    static void load(const float* from, int64_t stride) {
        each<ROWS * COLUMNS>([&](auto i) {
            const auto* row = reinterpret_cast<const uint8_t*>(from) + i() / COLUMNS * TILE_ROWS * stride;
            load_tile<SUMS + i()>(row + i() % COLUMNS * TILE_BYTES, stride);
        });
    }
    static void store(float* to, int64_t stride) {
        each<ROWS * COLUMNS>([&](auto i) {
            auto* row = reinterpret_cast<uint8_t*>(to) + i() / COLUMNS * TILE_ROWS * stride;
            store_tile<SUMS + i()>(row + i() % COLUMNS * TILE_BYTES, stride);
        });
    }

    // One step: rows of x `stride` bytes apart, panels `bytes` apart.
    static void step(const bf16* x, int64_t stride, const uint8_t* panel, int64_t bytes) {
        each<ROWS>([&](auto r) { load_tile<X + r()>(reinterpret_cast<const uint8_t*>(x) + r() * TILE_ROWS * stride, stride); });
        each<COLUMNS>([&](auto c) {
            constexpr int W = WEIGHTS + c() % 2;
            load_tile<W>(panel + c() / 2 * bytes + c() % 2 * TILE_BYTES, PANEL_STRIDE);
            each<ROWS>([&](auto r) { multiply_tiles<SUMS + r() * COLUMNS + c(), X + r(), W>(); });
        });
    }

    // `steps` of them, asking for weights `ahead` bytes behind those that are read, unless that is 0.
    static void run(const bf16* x, int64_t stride, const uint8_t* panel, int64_t bytes, int64_t steps, int64_t ahead) {
        for (int64_t i = 0; i < steps; i++, x += TILE_DEPTH, panel += STEP_BYTES) {
            for (int64_t line = 0; line < STEP_BYTES && ahead != 0; line += 64)
                for (int p = 0; p < PANELS; p++) __builtin_prefetch(panel + p * bytes + ahead + line, 0, 2);
            step(x, stride, panel, bytes);
        }
    }
};

// Shapes for `rows` rows of x, at most two tiles of them.
inline TileShapes shapes_for(int64_t rows) {
    TileShapes shapes;
    for (int tile = 0; tile < NUM_TILES; tile++) shapes.set(tile, TILE_ROWS);
    const int first = int(std::min<int64_t>(rows, TILE_ROWS)), second = int(rows - first);
    if (second == 0) {
        for (int tile = SUMS; tile < WEIGHTS; tile++) shapes.set(tile, first);
    } else {
        for (int tile : {SUMS + 2, SUMS + 3, X + 1}) shapes.set(tile, second);
    }
    return shapes;
}

// Sums [rows, PANELS * PANEL] of a block to where the product's results go.
inline void finish_rows(const Product& p, int64_t row, int64_t rows, int64_t column, int64_t columns, const float* sums) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns && column + c < p.n; c += LANES)
            finish_vector(p, row + r, column + c, load(sums + r * columns + c));
}

template <int ROWS, int PANELS>
void compute_tile_block(const Product& p, int64_t row, int64_t rows, int64_t panel, int64_t ahead, float* scratch) {
    using Block = TileBlock<ROWS, PANELS>;
    constexpr int64_t COLUMNS = PANELS * PANEL;
    const int64_t bytes = panel_bytes(BF16, p.k), steps = p.k / TILE_DEPTH, stride = p.stride * 2;
    const uint8_t* weights = p.packed + panel * bytes;
    const auto* x = static_cast<const bf16*>(p.a) + row * p.stride;
    auto* last = reinterpret_cast<uint8_t*>(scratch);
    float* sums = scratch + 2 * STEP_BYTES / 4;
    const int64_t rest = bytes - steps * STEP_BYTES;  // rows of x are padded with zeros; panels are not
    for (int i = 0; i < PANELS && rest > 0; i++) {
        std::memcpy(last + i * STEP_BYTES, weights + i * bytes + steps * STEP_BYTES, rest);
        std::memset(last + i * STEP_BYTES + rest, 0, STEP_BYTES - rest);
    }
    const bool is_plain = !p.out.is_bf16 && !p.out.add && p.out.bias == nullptr && (panel + PANELS) * PANEL <= p.n;
    for (int64_t first = 0; first < rows; first += ROWS * TILE_ROWS) {
        Block::zero();
        Block::run(x + first * p.stride, stride, weights, bytes, steps, first == 0 ? ahead : 0);
        if (rest > 0) Block::step(x + first * p.stride + steps * TILE_DEPTH, stride, last, STEP_BYTES);
        if (is_plain) {
            Block::store(p.out.at<float>(row + first, panel * PANEL), p.out.stride * 4);
            continue;
        }
        Block::store(sums, COLUMNS * 4);
        finish_rows(p, row + first, std::min<int64_t>(rows - first, ROWS * TILE_ROWS), panel * PANEL, COLUMNS, sums);
    }
}

// Rows of x that stay in the second-level cache, times some panels: whole blocks of two tiles' rows, then the others.
inline void compute_in_tiles(const Product& p, int64_t row, int64_t rows, int64_t panel, int64_t panels, float* scratch) {
    constexpr int64_t WHOLE = 2 * TILE_ROWS;
    const int64_t bytes = panel_bytes(BF16, p.k), whole = rows / WHOLE * WHOLE;
    if (whole > 0) {
        const Tiles tiles(shapes_for(WHOLE));
        for (int64_t i = 0; i < panels; i++)
            compute_tile_block<2, 1>(p, row, whole, panel + i, ahead_of(1, bytes).distance, scratch);
    }
    const int64_t others = rows - whole;
    if (others == 0) return;
    const Tiles tiles(shapes_for(others));
    for (int64_t i = 0; i < panels;) {
        const int64_t at_once = others <= TILE_ROWS && i + 1 < panels ? 2 : 1;
        const int64_t ahead = whole > 0 ? 0 : ahead_of(at_once, bytes).distance;
        if (others > TILE_ROWS)
            compute_tile_block<2, 1>(p, row + whole, others, panel + i, ahead, scratch);
        else if (at_once == 2)
            compute_tile_block<1, 2>(p, row + whole, others, panel + i, ahead, scratch);
        else
            compute_tile_block<1, 1>(p, row + whole, others, panel + i, ahead, scratch);
        i += at_once;
    }
}

// Sums of a group [rows, PANEL], of which `group` is the head: they are scaled, and added to `totals`.
inline void add_groups_sums(float* totals, const float* sums, int64_t rows, const float* group, const float* x_sums,
                            int64_t x_sums_stride) {
    Floats scales[2], minima[2];
    for (int c = 0; c < 2; c++) {
        const Words pair = load_as<Words>(group + c * LANES);
        scales[c] = even(pair), minima[c] = odd(pair) - even(pair) * INT4_EXCESS;
    }
    for (int64_t r = 0; r < rows; r++)
        for (int c = 0; c < 2; c++) {
            const int64_t at = r * PANEL + c * LANES;
            store(totals + at, load(totals + at) + load(sums + at) * scales[c] +
                                   broadcast(x_sums[r * x_sums_stride]) * minima[c]);
        }
}

// `rows` rows of x times `k` weights of a panel, added to `totals` [rows, PANEL]. `group(i)` is the `i`-th group as
// `widen_panel` leaves it, and is called for the next one before that is multiplied. While tiles multiply a group, vectors
// add up the one before, whose sums are at `sums`.
template <int ROWS, class Group>
void run_groups(float* totals, float* sums, const Product& p, int64_t row, int64_t rows, int64_t start, int64_t k,
                const Group& group) {
    using Block = TileBlock<ROWS, 1>;
    const auto* first = static_cast<const bf16*>(p.a) + row * p.stride;
    const float* x_sums = int4_sums(p, first, start);
    const int64_t x_sums_stride = int4_sums_stride(p.stride), count = (k + INT4_GROUP - 1) / INT4_GROUP;
    const float *before = nullptr, *now = group(0);
    for (int64_t i = 0; i < count; i++) {
        const float* next = i + 1 < count ? group(i + 1) : nullptr;
        Block::zero();
        Block::run(first + start + i * INT4_GROUP, p.stride * 2, reinterpret_cast<const uint8_t*>(now + PANEL), 0,
                   INT4_GROUP / TILE_DEPTH, 0);
        if (i > 0) add_groups_sums(totals, sums, rows, before, x_sums + i - 1, x_sums_stride);
        Block::store(sums, PANEL * 4);
        before = now;
        now = next;
    }
    add_groups_sums(totals, sums, rows, before, x_sums + count - 1, x_sums_stride);
}

// The same with INT4: each group is widened to bfloat16, which holds it exactly, and its sums are scaled. With
// many rows a stretch of a panel is widened once; with few a group at a time, so that it stays in the nearest cache.
inline void compute_int4_in_tiles(const Product& p, int64_t row, int64_t rows, int64_t panel, int64_t panels, float* scratch) {
    constexpr int64_t WHOLE = 2 * TILE_ROWS, SUMS_SIZE = WHOLE * PANEL, LENGTH = MAX_STRETCH - K_MULTIPLE;
    static_assert(wide_floats(LENGTH) + SUMS_SIZE <= wide_floats(MAX_STRETCH));  // see scratch_floats
    constexpr int64_t AT_ONCE = 4;  // groups: the one before, the one that is multiplied, the next one
    const int64_t bytes = panel_bytes(INT4, p.k), whole = rows / WHOLE * WHOLE, others = rows - whole;
    float *wide = scratch, *sums = scratch + wide_floats(LENGTH), *totals = sums + SUMS_SIZE;
    for (int64_t i = panel; i < panel + panels; i++) {
        const uint8_t* packed = p.packed + i * bytes;
        std::memset(totals, 0, rows * PANEL * sizeof(float));
        if (rows <= WHOLE) {
            auto group = [&](int64_t number) {
                const uint8_t* from = packed + number * group_bytes(INT4);
                float* to = wide + number % AT_ONCE * wide_group_words(INT4);
                for (int64_t line = 0; line < group_bytes(INT4); line += 64) __builtin_prefetch(from + 8192 + line, 0, 2);
                widen_panel<INT4>(from, INT4_GROUP, to);
                return to;
            };
            const Tiles tiles(shapes_for(rows));
            if (rows > TILE_ROWS)
                run_groups<2>(totals, sums, p, row, rows, 0, p.k, group);
            else
                run_groups<1>(totals, sums, p, row, rows, 0, p.k, group);
        }
        for (int64_t start = 0; start < p.k && rows > WHOLE; start += LENGTH) {
            const int64_t k = std::min(p.k - start, LENGTH);
            auto group = [&](int64_t number) { return wide + number * wide_group_words(INT4); };
            widen_panel<INT4>(packed + panel_bytes(INT4, start), k, wide);
            {
                const Tiles tiles(shapes_for(WHOLE));
                for (int64_t at = 0; at < whole; at += WHOLE)
                    run_groups<2>(totals + at * PANEL, sums, p, row + at, WHOLE, start, k, group);
            }
            if (others == 0) continue;
            const Tiles tiles(shapes_for(others));
            float* own = totals + whole * PANEL;
            if (others > TILE_ROWS)
                run_groups<2>(own, sums, p, row + whole, others, start, k, group);
            else
                run_groups<1>(own, sums, p, row + whole, others, start, k, group);
        }
        finish_rows(p, row, rows, i * PANEL, PANEL, totals);
    }
}

}  // namespace

#endif
