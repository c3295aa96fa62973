// Products with weights that a file holds quantised: codes of 4, 5, 6 or 8 bits, and factors that a group of them share.
//
// All of these formats say weight = code * scale + minimum (or an 8-bit float * scale). They differ in the bits of a
// code, and in how scale and minimum are written; both are kept as the file has them, so that nothing is rounded again.
// A panel is a row of groups; a group is its factors, then blocks of 32 weights, each with its own factors if the format
// has two levels, and codes in words: the low 4 bits of 8 weights in a word, then what the codes have above.
#pragma once

#include "matmul.h"

namespace {

enum Codes : int { CODES4 = 0, CODES5 = 1, CODES6 = 2, CODES8 = 3, FP8 = 4, NUM_CODES = 5 };  // FP8: e4m3

enum Scales : int {
    HALF = 0,          // scale as float16; minimum is half of the codes' range below zero
    HALF_PAIR = 1,     // scale and minimum as float16
    SINGLE = 2,        // scale as float32; minimum as for HALF
    SINGLE_PAIR = 3,   // scale and minimum as float32
    TWO_LEVELS = 4,    // two float16 for the group, a byte each for a block of 32: their products are scale and -minimum
    TWO_SIGNED = 5,    // float16 for the group, a signed byte for each 16; minimum as for HALF
    NUM_SCALES = 6,
};

constexpr int GROUPED_BLOCK = 32;

struct Layout {
    Codes codes;
    Scales scales;
    int64_t group;  // weights that share the first level of factors: 32, 64, 128 or 256

    explicit Layout(int32_t number) : codes(Codes(number & 15)), scales(Scales(number >> 4 & 15)), group(number >> 8) {}

    int64_t head_width() const { return scales == HALF || scales == TWO_SIGNED ? 2 : scales == SINGLE_PAIR ? 8 : 4; }
    bool has_two_levels() const { return scales == TWO_LEVELS || scales == TWO_SIGNED; }
    int64_t block_bytes() const {
        constexpr int64_t codes_bytes[NUM_CODES] = {16, 20, 24, 32, 32};
        return PANEL * (codes_bytes[codes] + (has_two_levels() ? 2 : 0));
    }
    int64_t group_bytes() const { return PANEL * head_width() + group / GROUPED_BLOCK * block_bytes(); }
    int64_t panel_bytes(int64_t k) const { return k / group * group_bytes(); }
};

// ---------------------------------------------------------------------------------------------------- packing

inline void put_bits(uint8_t* words, int column, int64_t word, int shift, uint32_t bits) {
    uint8_t* at = words + (word * PANEL + column) * 4;
    uint32_t value;
    std::memcpy(&value, at, 4);
    value |= bits << shift;
    std::memcpy(at, &value, 4);
}

// `codes` [32], one to a byte, of row `column`.
inline void pack_codes(Codes kind, const uint8_t* codes, int column, uint8_t* words) {
    for (int i = 0; i < GROUPED_BLOCK; i++) {
        const uint32_t code = codes[i];
        if (kind == CODES8 || kind == FP8) {
            put_bits(words, column, i / 4, 8 * (i % 4), code);
            continue;
        }
        put_bits(words, column, i / 8, 4 * (i % 8), code & 15);
        if (kind == CODES5) put_bits(words, column, 4, i, code >> 4 & 1);
        if (kind == CODES6) put_bits(words, column, 4 + i / 16, 2 * (i % 16), code >> 4 & 3);
    }
}

// `codes` [n, k] one to a byte, `heads` [n, k / group, head_width] bytes, `blocks` [n, k / 32, 2] bytes or null.
inline void pack_grouped(Team& team, const Layout& layout, const uint8_t* codes, const uint8_t* heads,
                         const uint8_t* blocks, int64_t n, int64_t k, uint8_t* to) {
    const int64_t bytes = layout.panel_bytes(k), width = layout.head_width(), groups = k / layout.group;
    write_panels(team, n, bytes, [&](int64_t panel) {
        uint8_t* group = to + panel * bytes;
        std::memset(group, 0, bytes);
        for (int64_t g = 0; g < groups; g++, group += layout.group_bytes())
            for (int column = 0; column < PANEL && panel * PANEL + column < n; column++) {
                const int64_t row = panel * PANEL + column;
                const uint8_t* head = heads + (row * groups + g) * width;
                for (int64_t word = 0; word < width; word += 4) {
                    const int64_t size = std::min<int64_t>(4, width);
                    std::memcpy(group + word * PANEL + column * size, head + word, size);
                }
                uint8_t* block = group + PANEL * width;
                for (int64_t i = g * layout.group; i < (g + 1) * layout.group; i += GROUPED_BLOCK) {
                    uint8_t* words = block;
                    if (layout.has_two_levels()) {
                        std::memcpy(block + column * 2, blocks + (row * k + i) / GROUPED_BLOCK * 2, 2);
                        words += 2 * PANEL;
                    }
                    pack_codes(layout.codes, codes + row * k + i, column, words);
                    block += layout.block_bytes();
                }
            }
    });
}

// ---------------------------------------------------------------------------------------------------- unpacking

inline Floats widen_halves(Halves values) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps((__m256i)values);
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtph_ps((__m128i)values);
#elif defined(BATON_PLAIN_TILES)
    const Words bits = __builtin_convertvector(values, Words), sign = (bits & 0x8000u) << 16;
    const Floats size = (Floats)((bits & 0x7fffu) << 13) * 0x1p112f;
    const Words is_endless = (Words)(size >= 0x1p16f) & 0x7f800000u;
    return (Floats)((Words)size | is_endless | sign);
#else
    typedef __fp16 HalfFloats __attribute__((vector_size(LANES * 2)));
    return __builtin_convertvector((HalfFloats)values, Floats);
#endif
}

// The low 4 bits of each lane.
inline Floats int4_values(Words quants) {
#if defined(__AVX512F__)
    const Floats values = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#if defined(__clang__)
    return (Floats)_mm512_permutexvar_ps((__m512i)quants, (__m512)values);
#else
    return __builtin_shuffle(values, (Ints)quants);  // looks at no more than these bits
#endif
#else
    return __builtin_convertvector((Ints)(quants & 15), Floats);
#endif
}

inline Floats from_integers(Words values) { return __builtin_convertvector((Ints)values, Floats); }

struct Factors {
    Floats scale, minimum;
};

template <Codes C>
constexpr float below_zero() {
    return C == CODES4 ? -8.0f : C == CODES5 ? -16.0f : C == CODES6 ? -32.0f : C == CODES8 ? -128.0f : 0.0f;
}

// Of the 16 weights number `part` of a block, for the panel's columns from `lanes` on.
template <Codes C>
inline Factors factors(const Layout& layout, const uint8_t* head, const uint8_t* block, int lanes, int part) {
    Factors result;
    switch (layout.scales) {
        case HALF:
            result.scale = widen_halves(load_as<Halves>(head + lanes * 2));
            break;
        case SINGLE:
            result.scale = load_as<Floats>(head + lanes * 4);
            break;
        case SINGLE_PAIR:
            return {load_as<Floats>(head + lanes * 4), load_as<Floats>(head + (PANEL + lanes) * 4)};
        case TWO_SIGNED: {
            const Words both = __builtin_convertvector(load_as<Halves>(block + lanes * 2), Words);
            const Ints signed_byte = (Ints)(part ? both << 16 : both << 24) >> 24;
            result.scale = widen_halves(load_as<Halves>(head + lanes * 2)) * __builtin_convertvector(signed_byte, Floats);
            break;
        }
        default: {
            const Words pair = load_as<Words>(head + lanes * 4);
            result.scale = widen_halves(__builtin_convertvector(pair & 0xffffu, Halves));
            result.minimum = widen_halves(__builtin_convertvector(pair >> 16, Halves));
            if (layout.scales == HALF_PAIR) return result;
            const Words both = __builtin_convertvector(load_as<Halves>(block + lanes * 2), Words);
            result.scale *= from_integers(both & 255u);
            result.minimum *= -from_integers(both >> 8);
            return result;
        }
    }
    if (C == FP8) result.scale *= 0x1p120f;  // what `code` gives is as much too small
    result.minimum = result.scale * below_zero<C>();
    return result;
}

// Of weight `i` of a block, whose words begin at `words`.
template <Codes C>
inline Floats code(const uint8_t* words, int lanes, int i) {
    auto word = [&](int number) { return load_as<Words>(words + (number * PANEL + lanes) * 4); };
    if (C == CODES4) return int4_values(word(i / 8) >> (4 * (i % 8)));
    if (C == CODES8) return from_integers(word(i / 4) >> (8 * (i % 4)) & 255u);
    if (C == FP8) {  // sign, 4 bits of exponent, 3 of mantissa: as float32, with an exponent that is 120 too small
        const Words byte = word(i / 4) >> (8 * (i % 4)) & 255u;
        return (Floats)((byte & 128u) << 24 | (byte & 127u) << 20);
    }
    const Words low = word(i / 8) >> (4 * (i % 8)) & 15u;
    const int at = C == CODES5 ? i : 2 * (i % 16);
    const Words high = word(C == CODES5 ? 4 : 4 + i / 16);
    const uint32_t mask = C == CODES5 ? 16u : 48u;
    return from_integers(low | ((at < 4 ? high << (4 - at) : high >> (at - 4)) & mask));
}

template <Codes C>
inline Floats weight(const Factors& factors, const uint8_t* words, int lanes, int i) {
    if (C == FP8) return code<C>(words, lanes, i) * factors.scale;
    return code<C>(words, lanes, i) * factors.scale + factors.minimum;
}

// Calls `with(i, part of 16, head, block, words)` for each 16 weights of the first `k`.
template <class With>
inline void for_each_part(const Layout& layout, const uint8_t* group, int64_t k, const With& with) {
    const int64_t skip = layout.has_two_levels() ? 2 * PANEL : 0;
    for (int64_t i = 0; i < k; group += layout.group_bytes()) {
        const uint8_t* block = group + PANEL * layout.head_width();
        for (int64_t stop = i + layout.group; i < stop; i += GROUPED_BLOCK, block += layout.block_bytes())
            for (int part = 0; part < 2; part++) with(i + 16 * part, part, group, block, block + skip);
    }
}

template <Codes C>
void widen_grouped(const Layout& layout, const uint8_t* from, int64_t k, float* to) {
    for_each_part(layout, from, k,
                  [&](int64_t i, int part, const uint8_t* head, const uint8_t* block, const uint8_t* words) {
                      for (int lanes = 0; lanes < PANEL; lanes += LANES) {
                          const Factors f = factors<C>(layout, head, block, lanes, part);
#pragma GCC unroll 16
                          for (int j = 0; j < 16; j++)
                              store(to + (i + j) * PANEL + lanes, weight<C>(f, words, lanes, 16 * part + j));
                      }
                  });
}

// -------------------------------------------------------------------------------------------------------- tiles

template <Codes C, int R, int P>
void compute_few(const Product& p, const Layout& layout, int64_t row, int64_t panel) {
    const float* a = static_cast<const float*>(p.a) + row * p.stride;
    const int64_t bytes = layout.panel_bytes(p.k), half = layout.block_bytes() / 2;
    const Ahead ahead = ahead_of(P, bytes);
    Sums<R, P> sums{};
    for_each_part(layout, p.packed + panel * bytes, p.k,
                  [&](int64_t i, int part, const uint8_t* head, const uint8_t* block, const uint8_t* words) {
                      for (int c = 0; c < P; c++)
                          for (int64_t line = 0; line < half; line += 64)
                              ahead.fetch(block + c * bytes + part * half + line, 0, 0);
                      Factors f[2 * P];
#pragma GCC unroll 4
                      for (int c = 0; c < 2 * P; c++) {
                          const int64_t offset = c / 2 * bytes;
                          f[c] = factors<C>(layout, head + offset, block + offset, c % 2 * LANES, part);
                      }
#pragma GCC unroll 16
                      for (int j = 0; j < 16; j++) {
                          Floats w[2 * P];
#pragma GCC unroll 4
                          for (int c = 0; c < 2 * P; c++)
                              w[c] = weight<C>(f[c], words + c / 2 * bytes, c % 2 * LANES, 16 * part + j);
                          multiply_add<R, P>(sums, a + i + j, p.stride, w);
                      }
                  });
    finish<R, P>(p, row, panel, sums);
}

// As `compute_block`: one or two rows widen weights in registers, more widen a stretch of a panel to memory first.
template <Codes C>
void compute_grouped_block(const Product& p, const Layout& layout, int64_t row, int64_t rows, int64_t panel,
                           int64_t panels, float* scratch) {
    if (rows <= 2) {
        for (int64_t i = 0; i < panels; i++) {
            const bool two = i + 2 <= panels;
            if (rows == 1)
                two ? compute_few<C, 1, 2>(p, layout, row, panel + i) : compute_few<C, 1, 1>(p, layout, row, panel + i);
            else
                two ? compute_few<C, 2, 2>(p, layout, row, panel + i) : compute_few<C, 2, 1>(p, layout, row, panel + i);
            i += two;
        }
        return;
    }
    for (int64_t i = 0; i < panels; i++) {
        const uint8_t* weights = p.packed + (panel + i) * layout.panel_bytes(p.k);
        for (int64_t start = 0; start < p.k; start += MAX_STRETCH) {  // a multiple of any group
            const int64_t stop = std::min(p.k, start + MAX_STRETCH);
            const uint8_t* packed = weights + layout.panel_bytes(start);
            widen_grouped<C>(layout, packed, stop - start, scratch);
            Stretch at{reinterpret_cast<const uint8_t*>(scratch), start, stop, scratch + MAX_STRETCH * PANEL, {}, {}};
            at.next = next_packed(packed, layout.panel_bytes(stop - start), stop - start);
            compute_rows<F32, WIDE>(p, row, rows, panel + i, at, ROW_COUNTS);
        }
    }
}

inline void compute_grouped(const Product& p, int64_t row, int64_t rows, int64_t panel, int64_t panels, float* scratch) {
    const Layout layout(p.layout);
    switch (layout.codes) {
        case CODES4: return compute_grouped_block<CODES4>(p, layout, row, rows, panel, panels, scratch);
        case CODES5: return compute_grouped_block<CODES5>(p, layout, row, rows, panel, panels, scratch);
        case CODES6: return compute_grouped_block<CODES6>(p, layout, row, rows, panel, panels, scratch);
        case CODES8: return compute_grouped_block<CODES8>(p, layout, row, rows, panel, panels, scratch);
        default: return compute_grouped_block<FP8>(p, layout, row, rows, panel, panels, scratch);
    }
}

inline int64_t grouped_panel_bytes(int32_t layout, int64_t k) { return Layout(layout).panel_bytes(k); }

inline void widen_grouped(const Layout& layout, const uint8_t* from, int64_t k, float* to) {
    switch (layout.codes) {
        case CODES4: return widen_grouped<CODES4>(layout, from, k, to);
        case CODES5: return widen_grouped<CODES5>(layout, from, k, to);
        case CODES6: return widen_grouped<CODES6>(layout, from, k, to);
        case CODES8: return widen_grouped<CODES8>(layout, from, k, to);
        default: return widen_grouped<FP8>(layout, from, k, to);
    }
}

// Some rows of a weight as float32, `out` [m, k]: what an embedding looks up.
inline void look_up(Team& team, const Layout& layout, const uint8_t* packed, int64_t k, const int64_t* rows, int64_t m,
                    float* out) {
    const int64_t bytes = layout.panel_bytes(k);
    team.run(int(m), [&](int index, int thread) {
        auto* scratch = static_cast<float*>(team.scratch(thread, sizeof(float) * PANEL * MAX_STRETCH));
        const uint8_t* panel = packed + rows[index] / PANEL * bytes;
        for (int64_t start = 0; start < k; start += MAX_STRETCH) {
            const int64_t count = std::min(k - start, MAX_STRETCH);
            widen_grouped(layout, panel + layout.panel_bytes(start), count, scratch);
            for (int64_t i = 0; i < count; i++) out[index * k + start + i] = scratch[i * PANEL + rows[index] % PANEL];
        }
    });
}

}  // namespace
