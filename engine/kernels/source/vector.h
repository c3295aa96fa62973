// Vectors of floats as wide as the instruction set that this file is compiled for, in GCC's and clang's vector types.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

// Whether this instruction set multiplies pairs of bfloat16 and adds both products to a float32.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) || defined(BATON_PLAIN_TILES)
#define BATON_BF16_PAIRS 1
#else
#define BATON_BF16_PAIRS 0
#endif

namespace {

#if defined(__AVX512F__) || defined(BATON_PLAIN_TILES)  // tiles.h
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

using bf16 = uint16_t;

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

template <class V, class T>
inline V load_as(const T* from) {
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline Floats load(const float* from) { return load_as<Floats>(from); }
inline Floats load(const bf16* from) { return (Floats)(__builtin_convertvector(load_as<Halves>(from), Words) << 16); }

inline Floats load(const int8_t* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)load_as<Bytes>(from)));
#elif defined(__AVX2__)  // compilers make a dozen instructions of the line below
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
    return __builtin_convertvector(load_as<Bytes>(from), Floats);
#endif
}

inline Floats broadcast(float value) { return value - Floats{}; }  // 0 + value would be computed: it turns -0 into 0
inline Words broadcast(uint32_t value) { return Words{} + value; }

inline float widen(float value) { return value; }
inline float widen(bf16 value) {
    uint32_t bits = uint32_t(value) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

// The two bfloat16 of each lane, lower half first.
inline Floats even(Words pairs) { return (Floats)(pairs << 16); }
inline Floats odd(Words pairs) { return (Floats)(pairs & 0xffff0000u); }

#if BATON_BF16_PAIRS
// sum + both products of each lane, in float32: x86 rounds to nearest, Arm to odd.
inline Floats multiply_add_pairs(Floats sum, Words a, Words b) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#elif defined(BATON_PLAIN_TILES)
    return sum + (even(a) * even(b) + odd(a) * odd(b));
#else
    return (Floats)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
#endif
}
#endif

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }
// To nearest, ties to even; NaN stays NaN.
inline Halves rounded(Floats value) {
    Words bits = (Words)value;
    Words result = (bits + (0x7fffu + ((bits >> 16) & 1))) >> 16;
    Words is_nan = (Words)(value != value);
    return __builtin_convertvector((result & ~is_nan) | (is_nan & 0x7fc0u), Halves);
}
inline void store(bf16* to, Floats value) {
    Halves halves = rounded(value);
    std::memcpy(to, &halves, sizeof halves);
}
inline void narrow(float* to, float value) { *to = value; }
inline void narrow(bf16* to, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    *to = value != value ? 0x7fc0 : bf16((bits + (0x7fffu + ((bits >> 16) & 1))) >> 16);
}

inline Floats either(Ints condition, Floats yes, Floats no) {
    return (Floats)(((Ints)yes & condition) | ((Ints)no & ~condition));
}
// b if either is NaN.
#if defined(__AVX512F__)
inline Floats larger(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }
inline Floats smaller(Floats a, Floats b) { return (Floats)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__)
inline Floats larger(Floats a, Floats b) { return (Floats)_mm256_max_ps((__m256)a, (__m256)b); }
inline Floats smaller(Floats a, Floats b) { return (Floats)_mm256_min_ps((__m256)a, (__m256)b); }
#else
inline Floats larger(Floats a, Floats b) { return either(a > b, a, b); }
inline Floats smaller(Floats a, Floats b) { return either(a < b, a, b); }
#endif

// Lanes number `I` of a and b together: those of b follow those of a.
template <int... I>
inline Floats shuffled(Floats a, Floats b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, I...);
#else  // GCC knows the other name only since its version 12
    return __builtin_shuffle(a, b, Ints{I...});
#endif
}

template <int STEP, size_t... I>
inline Floats rotated_by(Floats value, std::index_sequence<I...>) {
    return shuffled<int((I + STEP) % LANES)...>(value, value);
}
template <int STEP>
inline Floats rotated(Floats value) {
    return rotated_by<STEP>(value, std::make_index_sequence<LANES>());
}

template <int STEP = LANES / 2>
inline float sum(Floats value) {
    if constexpr (STEP == 0)
        return value[0];
    else
        return sum<STEP / 2>(value + rotated<STEP>(value));
}
template <int STEP = LANES / 2>
inline float largest(Floats value) {
    if constexpr (STEP == 0)
        return value[0];
    else
        return largest<STEP / 2>(larger(value, rotated<STEP>(value)));
}

// 0, 1, 2, ...
template <size_t... I>
inline Ints count_up(std::index_sequence<I...>) {
    return Ints{int(I)...};
}
inline Ints lane_numbers() { return count_up(std::make_index_sequence<LANES>()); }

// e^x to 2 units in the last place for x from -87 to 88; 0 below, so that minus infinity gives 0. NaN stays NaN.
// `decay`: for x of 0 at most, as weights of attention are.
inline Floats decay(Floats x) {
#if defined(__AVX512F__)
    const Floats n = (Floats)_mm512_roundscale_ps((__m512)(x * 1.44269504088896341f), _MM_FROUND_TO_NEAREST_INT);
    const Floats from = x;
#else
    const Floats from = larger(broadcast(-87.0f), x);
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const Floats shifted = from * 1.44269504088896341f + magic;
    const Floats n = shifted - magic;
#endif
    const Floats r = from - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
#if defined(__AVX512F__)
    const __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    return (Floats)_mm512_maskz_scalef_ps(counts, (__m512)p, (__m512)n);
#else
    const Floats scale = (Floats)(((Ints)shifted << 23) + (Ints)broadcast(1.0f));
    return either(x < -87.0f, Floats{}, p * scale);
#endif
}
inline Floats exponential(Floats x) { return decay(smaller(broadcast(88.0f), x)); }

// Lanes 0, 1, ... of a and b in turn: the first half of both, and the second.
template <size_t... I>
inline Floats interleave_low(Floats a, Floats b, std::index_sequence<I...>) {
    return shuffled<int(I / 2 + (I % 2) * LANES)...>(a, b);
}
template <size_t... I>
inline Floats interleave_high(Floats a, Floats b, std::index_sequence<I...>) {
    return shuffled<int(LANES / 2 + I / 2 + (I % 2) * LANES)...>(a, b);
}
inline Floats low(Floats a, Floats b) { return interleave_low(a, b, std::make_index_sequence<LANES>()); }
inline Floats high(Floats a, Floats b) { return interleave_high(a, b, std::make_index_sequence<LANES>()); }

// Of neighbouring lanes of a and b together: the first of each two, and the second. `low` and `high` put them back.
template <int FROM, size_t... I>
inline Floats every_second(Floats a, Floats b, std::index_sequence<I...>) {
    return shuffled<int(2 * I + FROM)...>(a, b);
}
inline Floats firsts(Floats a, Floats b) { return every_second<0>(a, b, std::make_index_sequence<LANES>()); }
inline Floats seconds(Floats a, Floats b) { return every_second<1>(a, b, std::make_index_sequence<LANES>()); }

// With as many rows as lanes: lane i of the result is the sum of all lanes of `rows[i]`. Fewer give part of that: those
// number j, j + N, j + 2 * N, ... of the rows first, then the results of all j.
template <int N>
inline Floats sums(Floats (&rows)[N]) {
#pragma GCC unroll 5
    for (int half = N / 2; half > 0; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) rows[i] = low(rows[i], rows[i + half]) + high(rows[i], rows[i + half]);
    return rows[0];
}

inline void transpose(Floats (&rows)[LANES]) {
    Floats next[LANES];
#pragma GCC unroll 5
    for (int level = 1; level < LANES; level *= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = low(rows[i], rows[i + LANES / 2]);
            next[2 * i + 1] = high(rows[i], rows[i + LANES / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) rows[i] = next[i];
    }
}

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace
