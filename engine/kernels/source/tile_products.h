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

// What a thread needs beside the tiles: what stands behind the last whole step of each panel, and sums on their way out.
constexpr int64_t TILE_SCRATCH = 2 * STEP_BYTES / 4 + 4 * TILE_ROWS * TILE_COLUMNS;

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

}  // namespace

#endif
