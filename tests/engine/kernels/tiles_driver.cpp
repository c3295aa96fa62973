// Prints the bits of products of tiles: with the instructions, or without (BATON_PLAIN_TILES). They are the same.

#include "tiles.h"

#include <cstdio>
#include <random>
#include <vector>

#include "permission.h"

namespace {

struct Lcg {  // the same numbers with every library
    uint32_t state = 1;
    uint32_t operator()() { return (state = state * 1664525u + 1013904223u) >> 8; }
};

// Of sizes from 2^-8 to 2^8, or with a scale beside: products and sums that are denormal.
std::vector<bf16> elements(Lcg& random, size_t count, int exponent) {
    std::vector<bf16> values(count);
    for (auto& value : values) {
        const uint32_t power = uint32_t(127 + exponent - 8) + random() % 17, bits = random();
        value = bf16((bits & 1) << 15 | power << 7 | (bits >> 1 & 0x7f));
        if (bits % 31 == 0) value = bf16(bits >> 8 & 0x807f);  // denormal
    }
    return values;
}

void products(int rows, int depth, int columns, int exponent) {
    Lcg random;
    const int a_stride = depth + 3, b_stride = 2 * columns + 1, c_stride = columns + 5;
    // No memory behind the last row: the address sanitizer sees what a tile reads too much.
    const auto a = elements(random, size_t(a_stride * (rows - 1) + depth), exponent);
    const auto b = elements(random, size_t(b_stride * (depth / 2 - 1) + 2 * columns), 0);
    std::vector<float> c(size_t(c_stride * (rows - 1) + columns), 0.25f), from_zero(c.size());
    TileShapes shapes;
    shapes.set(1, rows, 4 * columns), shapes.set(4, rows, 2 * depth), shapes.set(6, depth / 2, 4 * columns);
    shapes.set(2, rows, 4 * columns);
    {
        const Tiles tiles(shapes);
        load_tile<1>(c.data(), 4 * c_stride);
        load_tile<4>(a.data(), 2 * a_stride);
        load_tile<6>(b.data(), 2 * b_stride);
        for (int i = 0; i < 3; i++) multiply_tiles<1, 4, 6>();
        zero_tile<2>();
        multiply_tiles<2, 4, 6>();
        store_tile<1>(c.data(), 4 * c_stride);
        store_tile<2>(from_zero.data(), 4 * c_stride);
    }
    c.insert(c.end(), from_zero.begin(), from_zero.end());
    std::printf("%d %d %d %d:", rows, depth, columns, exponent);
    for (float value : c) {
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        std::printf(" %08x", unsigned(bits));
    }
    std::printf("\n");
}

}  // namespace

int main() {
#if !defined(BATON_PLAIN_TILES)
    if (ask_for_tiles() != 0) return 1;
#endif
    for (int exponent : {0, -110})
        for (int rows : {1, 5, 16})
            for (int depth : {2, 10, 32})
                for (int columns : {1, 7, 16}) products(rows, depth, columns, exponent);
}
