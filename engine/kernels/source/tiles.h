// Tiles of AMX: eight registers of up to 16 rows of 64 bytes, and one instruction that multiplies two of them.
//
// Tiles belong to a thread. `Tiles` configures them for the time of its life, and releases them, as what they hold would
// be saved at each switch of threads. The process needs the system's permission first (permission.h).
//
// BATON_PLAIN_TILES replaces the instructions by plain code with the same bits, and makes vectors as wide as the layout of
// tiles asks, so that whatever multiplies in tiles is tested on every CPU.
#pragma once

#include "vector.h"

#if defined(BATON_PLAIN_TILES)
#include <cmath>
#include <cstdio>
#include <cstdlib>
#endif

#if defined(__AMX_BF16__) || defined(BATON_PLAIN_TILES)
#define BATON_TILES 1
#else
#define BATON_TILES 0
#endif

#if BATON_TILES

namespace {

constexpr int NUM_TILES = 8;
constexpr int TILE_ROWS = 16;         // at most
constexpr int TILE_BYTES = 64;        // of a row, at most
constexpr int TILE_COLUMNS = 16;      // of a result: float32
constexpr int TILE_DEPTH = 32;        // bfloat16 of a row

// Rows of each tile, and bytes of a row: what LDTILECFG reads.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int num_rows, int num_bytes = TILE_BYTES) {
        rows[tile] = uint8_t(num_rows);
        bytes[tile] = uint16_t(num_bytes);
    }
};
static_assert(sizeof(TileShapes) == 64);

#if !defined(BATON_PLAIN_TILES)

inline void configure_tiles(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
inline void release_tiles() { asm volatile("tilerelease"); }

template <int T>
inline void zero_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
}

// Rows of memory are `stride` bytes apart.
template <int T>
inline void load_tile(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline void store_tile(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}

// Tile C [rows, columns] float32 += A [rows, depth] bfloat16 * B [depth / 2, columns, 2] bfloat16: B has pairs of
// neighbours in depth side by side. Elements that are denormal count as 0, and so do sums. The sum over the even
// elements of depth and that over the odd ones are each a chain of fused multiply-adds from 0 on; C gets both as one.
template <int C, int A, int B>
inline void multiply_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#else

struct PlainTiles {
    TileShapes shapes;
    uint8_t memory[NUM_TILES][TILE_ROWS][TILE_BYTES];
};
inline PlainTiles& plain_tiles() {
    static thread_local PlainTiles tiles{};
    return tiles;
}

inline void tiles_have(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "tiles: %s\n", what);
    std::abort();
}

inline void configure_tiles(const TileShapes& shapes) {
    for (int tile = 0; tile < NUM_TILES; tile++)
        tiles_have(shapes.rows[tile] <= TILE_ROWS && shapes.bytes[tile] <= TILE_BYTES, "a shape is too large");
    plain_tiles() = {};
    plain_tiles().shapes = shapes;
}
inline void release_tiles() {
    plain_tiles() = {};
    plain_tiles().shapes.palette = 0;
}

template <int T>
inline int plain_rows() {
    const int rows = plain_tiles().shapes.palette == 1 ? plain_tiles().shapes.rows[T] : 0;
    tiles_have(rows > 0, "a tile is not configured");
    return rows;
}

template <int T>
inline void zero_tile() {
    plain_rows<T>();
    std::memset(plain_tiles().memory[T], 0, sizeof plain_tiles().memory[T]);
}

template <int T>
inline void load_tile(const void* from, int64_t stride) {
    zero_tile<T>();
    for (int row = 0; row < plain_rows<T>(); row++)
        std::memcpy(plain_tiles().memory[T][row], static_cast<const uint8_t*>(from) + row * stride,
                    plain_tiles().shapes.bytes[T]);
}
template <int T>
inline void store_tile(void* to, int64_t stride) {
    for (int row = 0; row < plain_rows<T>(); row++)
        std::memcpy(static_cast<uint8_t*>(to) + row * stride, plain_tiles().memory[T][row],
                    plain_tiles().shapes.bytes[T]);
}

inline float no_denormal(float value) { return std::fabs(value) < 0x1p-126f ? std::copysign(0.0f, value) : value; }

template <int C, int A, int B>
inline void multiply_tiles() {
    PlainTiles& tiles = plain_tiles();
    const int rows = plain_rows<A>(), depth = tiles.shapes.bytes[A] / 4, columns = tiles.shapes.bytes[B] / 4;
    tiles_have(plain_rows<C>() == rows && plain_rows<B>() == depth && tiles.shapes.bytes[C] == columns * 4,
               "shapes do not fit");
    auto element = [](const uint8_t* row, int i) { return no_denormal(widen(load_as<bf16>(row + 2 * i))); };
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < columns; column++) {
            float halves[2] = {0.0f, 0.0f};
            for (int i = 0; i < depth; i++)
                for (int half = 0; half < 2; half++) {
                    const float a = element(tiles.memory[A][row], 2 * i + half);
                    const float b = element(tiles.memory[B][i], 2 * column + half);
                    halves[half] = no_denormal(std::fma(a, b, halves[half]));
                }
            uint8_t* at = tiles.memory[C][row] + 4 * column;
            const float both = no_denormal(halves[0] + halves[1]);
            const float sum = no_denormal(no_denormal(load_as<float>(at)) + both);
            std::memcpy(at, &sum, 4);
        }
}

#endif

// Tiles of a thread, from here to the end of the block.
class Tiles {
   public:
    explicit Tiles(const TileShapes& shapes) { configure_tiles(shapes); }
    ~Tiles() { release_tiles(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

}  // namespace

#endif
