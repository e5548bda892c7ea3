// A self-test of the C++ kernels that needs neither Python nor torch: for a machine at hand, or for
// another one under an emulator.
//
// In:  nothing; it is linked with all kernels/*.cpp. Out: a line for each kernel; at the first
// value that is wrong a message and exit status 1. Each kernel is compared with its formula, as
// plain loops over doubles; bit by bit, where it promises bits. Inputs are small, of odd sizes, in
// fp32 and bf16, from a fixed generator.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <type_traits>
#include <vector>

typedef uint16_t bf16;
typedef int64_t i64;
template <class T> using Vec = std::vector<T>;

extern "C" {
void nanoinfer_rms_norm(int, int, void*, void*, const void*, const void*, const void*, const void*,
                        i64, i64, i64, const i64*, float, float, int);
void nanoinfer_rms_norm_quantized(int, int, void*, void*, void*, void*, const void*, const void*,
                                  const void*, i64, i64, const i64*, i64, int, const i64*, float,
                                  float, int);
i64 nanoinfer_rotary(int, int, int, void*, void*, const void*, const void*, const i64*, const i64*,
                     const float*, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, int);
i64 nanoinfer_norm_rope_store(int, int, int, int, int, void*, void*, void*, float*, float*,
                              const void*, const void*, const void*, const void*, const void*,
                              const i64*, const i64*, const float*, const i64*, i64, i64, i64, i64,
                              i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, float, int);
void nanoinfer_silu_mul(int, void*, const void*, i64, i64, i64, int);
void nanoinfer_sigmoid_mul(int, void*, const void*, const void*, i64, i64, i64, i64, i64, int);
i64 nanoinfer_store_kv(void*, void*, const void*, const void*, const i64*, i64, i64, i64, i64, i64,
                       int);
i64 nanoinfer_paged_attention(int, int, int, void*, const void*, const void*, const void*,
                              const float*, const float*, const int32_t*, const int32_t*,
                              const int32_t*, i64, i64, i64, i64, i64, i64, i64, i64, i64, float,
                              int);
void nanoinfer_draw(float*, i64, i64, i64, const float*, const i64*, const float*, const float*,
                    const uint32_t*, i64*, int);
void nanoinfer_linear_bf16(int, void*, const void*, const void*, const bf16*, i64, i64, i64, i64,
                           i64, int);
void nanoinfer_linear_int8(int, int, void*, const void*, const void*, const float*, const float*,
                           const int32_t*, void*, i64, i64, i64, i64, i64, int);
void nanoinfer_moe(int, int, void*, const void*, const float*, const void*, const void*, i64, i64,
                   i64, i64, i64, i64, i64, int);
i64 nanoinfer_causal_conv(int, void*, void*, const void*, const float*, const int32_t*,
                          const int32_t*, const int32_t*, i64, i64, i64, i64, i64, i64, int);
i64 nanoinfer_gated_delta(int, void*, float*, const void*, const void*, const void*, const void*,
                          const void*, const float*, const float*, const int32_t*, const int32_t*,
                          const int32_t*, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64,
                          i64, int);
}

const int THREADS = 2;
const float EPS = 1e-5f;
int num_cases = 0;

double value(float x) { return x; }
double value(bf16 x) {
  const uint32_t bits = uint32_t(x) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
double value(uint8_t x) {  // E4M3
  const int exponent = (x >> 3) & 15, mantissa = x & 7;
  const double size = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return x & 128 ? -size : size;
}
template <class T> T make(double x) {
  if constexpr (std::is_same_v<T, bf16>) {
    const float y = x;
    uint32_t bits;
    std::memcpy(&bits, &y, 4);
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  } else {
    return x;
  }
}
template <class T> constexpr bool is_bf16 = std::is_same_v<T, bf16>;
template <class T> double half_step() { return is_bf16<T> ? 1. / (1 << 8) : 1. / (1 << 24); }

uint32_t state = 1;
double random_number() {  // in [-2, 2)
  state ^= state << 13, state ^= state >> 17, state ^= state << 5;
  return state / 1073741824. - 2;
}
template <class T> Vec<T> random_numbers(i64 n) {
  Vec<T> x(n);
  for (T& one : x) one = make<T>(random_number());
  return x;
}
template <class T> Vec<T> poison(i64 n) { return Vec<T>(n, make<T>(NAN)); }

void fail(const char* what, i64 at, double found, double expected) {
  std::printf("%s: element %lld is %.9g, need %.9g\n", what, (long long)at, found, expected);
  std::exit(1);
}
// roundings: how many the kernel does, each of at most half a step of the type.
template <class T>
void expect(const char* what, const Vec<T>& found, const Vec<double>& expected, double roundings,
            const Vec<double>& absolute) {
  num_cases++;
  for (size_t i = 0; i < expected.size(); i++) {
    const double allowed = absolute[i] + roundings * half_step<T>() * std::fabs(expected[i]);
    if (!(std::fabs(value(found[i]) - expected[i]) <= allowed))
      fail(what, i, value(found[i]), expected[i]);
  }
}
template <class T>
void expect(const char* what, const Vec<T>& found, const Vec<double>& expected, double roundings,
            double absolute = 0) {
  expect(what, found, expected, roundings, Vec<double>(expected.size(), absolute));
}
template <class T> void expect_bits(const char* what, const Vec<T>& found, const Vec<T>& expected) {
  num_cases++;
  for (size_t i = 0; i < expected.size(); i++)
    if (std::memcmp(&found[i], &expected[i], sizeof(T)))
      fail(what, i, value(found[i]), value(expected[i]));
}
void done(const char* kernel) {
  std::printf("%s ok (%d cases)\n", kernel, num_cases);
  num_cases = 0;
}

// -- The formulas ---------------------------------------------------------------------------------

template <class T, class Weight>
Vec<double> normed(const T* x, const Weight* weight, i64 N, double scale = 1) {
  double squares = 0;
  for (i64 i = 0; i < N; i++) squares += value(x[i]) * value(x[i]);
  Vec<double> y(N);
  for (i64 i = 0; i < N; i++)
    y[i] = value(x[i]) / std::sqrt(squares / N + EPS) * scale * value(weight[i]);
  return y;
}

// Pairs of one head: products rounded to floats, then their sum. They are volatile, for a compiler
// sees through the doubles and would make one instruction of a product and a sum.
template <class T>
void turn(T* y, const T* x, const float* angles, i64 D, i64 R, i64 offset, bool is_interleaved,
          int sign) {
  std::copy(x, x + D, y);
  for (i64 i = 0; i < R / 2; i++) {
    const i64 a = offset + (is_interleaved ? 2 * i : i), b = a + (is_interleaved ? 1 : R / 2);
    const double cos = angles[i], sin = sign * angles[R / 2 + i];
    const volatile float a_cos = value(x[a]) * cos, b_sin = value(x[b]) * sin;
    const volatile float b_cos = value(x[b]) * cos, a_sin = value(x[a]) * sin;
    y[a] = make<T>(a_cos - b_sin);
    y[b] = make<T>(b_cos + a_sin);
  }
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double silu(double x) { return x / (1 + std::exp(-x)); }

// A table [P, R] of angles, and three positions for each token.
struct Angles {
  i64 rows, P, R;
  Vec<float> table = random_numbers<float>(P * R);
  Vec<i64> positions = Vec<i64>(3 * rows), axes = Vec<i64>(R);

  Angles(i64 rows, i64 P, i64 R) : rows(rows), P(P), R(R) {
    for (i64 i = 0; i < 3 * rows; i++) positions[i] = (i * 5 + 3) % P;
    for (i64 c = 0; c < R; c++) axes[c] = c % (R / 2) % 3;
  }
  Vec<float> row(i64 t, bool is_mrope) const {
    Vec<float> angles(R);
    for (i64 c = 0; c < R; c++)
      angles[c] = table[positions[is_mrope ? axes[c] * rows + t : t] * R + c];
    return angles;
  }
};

// Sequences with states: a prompt, a chunk of 6, 1 token that stays in its slot, padding of length
// 0, two that go on from one slot, a prompt of 1 token; three rows of padding. Slots that nobody has
// left anything in are NaN, the null slot among them.
struct Sequences {
  i64 S = 7, tokens = 79, num_slots = 9;
  Vec<int32_t> bounds = {0, 65, 71, 72, 72, 74, 75, 76};
  Vec<int32_t> sources = {0, 2, 3, 0, 5, 5, 0}, slots = {1, 4, 3, 0, 6, 7, 8};

  template <class T> Vec<T> states(i64 size) const {
    Vec<T> all = poison<T>(num_slots * size);
    for (i64 slot : {2, 3, 5})
      for (i64 i = 0; i < size; i++) all[slot * size + i] = make<T>(random_number());
    return all;
  }
  // run() with one source, slot or bound of sequence 2 out of bounds.
  template <class F> void expect_refusals(const char* what, F run) {
    for (auto* indices : {&sources, &slots, &bounds})
      for (bool is_low : {true, false}) {
        int32_t& one = (*indices)[indices == &bounds ? 3 : 2];
        const int32_t good = one;
        one = is_low ? -1 : indices == &bounds ? tokens + 1 : num_slots;
        const i64 invalid = run();
        if (invalid != 2) fail(what, one, invalid, 2);
        one = good;
      }
  }
};

// -- The kernels ----------------------------------------------------------------------------------

template <class T, class Weight> void test_rms_norm(i64 N) {
  const i64 tokens = 3, H = 2, rows = tokens * H, head = N + 3, token = H * head + 1;
  const i64 strides[6] = {token, head, token, head, token, head};
  const int wide = std::is_same_v<Weight, float>;
  const auto x = random_numbers<T>(tokens * token), residual = random_numbers<T>(tokens * token);
  const auto gate = random_numbers<T>(tokens * token);
  const auto weight = random_numbers<Weight>(N);
  Vec<T> y = poison<T>(rows * N), added = y;
  Vec<double> plain, gated, fused;
  Vec<T> sums;
  for (i64 row = 0; row < rows; row++) {
    const i64 at = row / H * token + row % H * head;
    for (double one : normed(&x[at], weight.data(), N, 0.5)) plain.push_back(one);
    for (i64 i = 0; i < N; i++) gated.push_back(plain[row * N + i] * silu(value(gate[at + i])));
    for (i64 i = 0; i < N; i++) sums.push_back(make<T>(value(x[at + i]) + value(residual[at + i])));
    for (double one : normed(&sums[row * N], weight.data(), N)) fused.push_back(one);
  }
  nanoinfer_rms_norm(is_bf16<T>, wide, y.data(), nullptr, x.data(), nullptr, nullptr,
                     weight.data(), tokens, H, N, strides, EPS, 0.5, THREADS);
  expect("rms_norm", y, plain, is_bf16<T> ? 2.1 : 8);
  nanoinfer_rms_norm(is_bf16<T>, wide, y.data(), nullptr, x.data(), nullptr, gate.data(),
                     weight.data(), tokens, H, N, strides, EPS, 0.5, THREADS);
  expect("rms_norm, gate", y, gated, is_bf16<T> ? 3.1 : 16);
  nanoinfer_rms_norm(is_bf16<T>, wide, y.data(), added.data(), x.data(), residual.data(), nullptr,
                     weight.data(), tokens, H, N, strides, EPS, 1, THREADS);
  expect_bits("rms_norm, sum", added, sums);
  expect("rms_norm of the sum", y, fused, is_bf16<T> ? 2.1 : 8);
}

template <class T> double largest(const T* x, i64 n) {
  double amax = 0;
  for (i64 i = 0; i < n; i++) amax = std::max(amax, std::fabs(value(x[i])));
  return amax;
}

// The four layouts of scales; columns are as high as a multiple of four.
template <class T> void test_rms_norm_quantized(bool is_packed, bool is_column_major) {
  const i64 rows = 5, N = 96, group = 8, G = N / group, height = 8, strides[6] = {N, 0, N};
  const i64 row_step = !is_column_major ? G : is_packed ? 4 : 1;
  const i64 pack_step = is_column_major ? 4 * height : 4;
  const i64 step = is_column_major && !is_packed ? height : 1;
  const i64 scale_strides[3] = {row_step, pack_step, step};
  const auto x = random_numbers<T>(rows * N), residual = random_numbers<T>(rows * N);
  const auto weight = random_numbers<T>(N);
  Vec<uint8_t> values(rows * N, 127), again = values, bytes(G * height);
  Vec<float> scales(G * height, NAN);
  Vec<T> copy = poison<T>(rows * N), added = copy, sums;
  Vec<double> exact;
  for (i64 i = 0; i < rows * N; i++) sums.push_back(make<T>(value(x[i]) + value(residual[i])));
  for (i64 t = 0; t < rows; t++)
    for (double one : normed(&sums[t * N], weight.data(), N, 0.5)) exact.push_back(one);
  void* out = is_packed ? (void*)bytes.data() : (void*)scales.data();
  const auto run = [&](Vec<uint8_t>& to, T* rows_before) {
    nanoinfer_rms_norm_quantized(is_bf16<T>, !is_bf16<T>, to.data(), out, rows_before,
                                 added.data(), x.data(), residual.data(), weight.data(), rows, N,
                                 strides, group, is_packed, scale_strides, EPS, 0.5, THREADS);
  };
  run(again, nullptr);
  run(values, copy.data());
  expect_bits("rms_norm_quantized, without a copy", again, values);
  expect_bits("rms_norm_quantized, sum", added, sums);
  expect("rms_norm_quantized, copy", copy, exact, is_bf16<T> ? 2.1 : 8);
  for (i64 i = 0; i < rows * N; i++) {
    const i64 t = i / N, g = i % N / group;
    double scale = largest(&copy[i / group * group], group) / 448;
    if (is_packed) scale = std::ldexp(1, int(std::ceil(std::log2(scale))));
    const i64 at = t * row_step + g / 4 * pack_step + g % 4 * step;
    const double stored = is_packed ? std::ldexp(1, bytes[at] - 127) : scales[at];
    if (!(std::fabs(stored - scale) <= 1e-6 * scale))
      fail("rms_norm_quantized, scale", t * G + g, stored, scale);
    const double need = value(copy[i]) / stored, found = value(values[i]);
    const double half = std::ldexp(1, std::max(std::ilogb(need), -6) - 4);
    if (!(std::fabs(found - need) <= 1.0001 * half))
      fail("rms_norm_quantized, value", i, found, need);
  }
}

template <class T> void test_rotary(i64 D, i64 R, i64 offset, bool is_interleaved, bool is_mrope) {
  const i64 rows = 7, H = 3, KV = 2, P = 11;
  const auto q = random_numbers<T>(rows * H * D), k = random_numbers<T>(rows * KV * D);
  Angles angles(rows, P, R);
  const i64* axes = is_mrope ? angles.axes.data() : nullptr;
  const auto run = [&](Vec<T>& q_out, T* k_out, bool is_conjugate) {
    return nanoinfer_rotary(is_bf16<T>, is_interleaved, is_conjugate, q_out.data(), k_out, q.data(),
                            k_out ? k.data() : nullptr, angles.positions.data(), axes,
                            angles.table.data(), rows, H, KV, D, P, R, offset, H * D, D, KV * D, D,
                            THREADS);
  };
  for (int is_conjugate : {0, 1}) {
    Vec<T> q_out = poison<T>(q.size()), k_out = poison<T>(k.size()), alone = q_out;
    Vec<T> queries = q_out, keys = k_out;
    for (i64 t = 0; t < rows; t++) {
      const auto row = angles.row(t, is_mrope);
      const auto one = [&](Vec<T>& y, const Vec<T>& x, i64 head) {
        turn(&y[head * D], &x[head * D], row.data(), D, R, offset, is_interleaved,
             is_conjugate ? -1 : 1);
      };
      for (i64 h = 0; h < H; h++) one(queries, q, t * H + h);
      for (i64 h = 0; h < KV; h++) one(keys, k, t * KV + h);
    }
    const i64 status = std::max(run(q_out, k_out.data(), is_conjugate),
                                run(alone, nullptr, is_conjugate));
    if (status != -1) fail("rotary, status", 0, status, -1);
    expect_bits("rotary, q", q_out, queries);
    expect_bits("rotary, q alone", alone, queries);
    expect_bits("rotary, k", k_out, keys);
  }
  angles.positions[is_mrope ? rows + 4 : 4] = P;
  Vec<T> untouched = poison<T>(q.size()), out = untouched;
  const i64 invalid = run(out, nullptr, false);
  if (invalid != 4) fail("rotary, bad position", 0, invalid, 4);
  expect_bits("rotary, nothing written", out, untouched);
}

// The three kernels in turn, bit by bit.
template <class T> void test_norm_rope_store(bool has_norms, bool is_interleaved, bool is_mrope) {
  const i64 rows = 5, H = 4, KV = 2, D = 21, R = 8, offset = 5, P = 9, slots_in_all = 12;
  const i64 pitch = (H + 2 * KV) * D, strides[6] = {pitch, D};
  const auto qkv = random_numbers<T>(rows * pitch);
  const auto q_weight = random_numbers<T>(D), k_weight = random_numbers<T>(D);
  Angles angles(rows, P, R);
  Vec<i64> slots = {11, 4, 6, 5, 7};
  const T *q = qkv.data(), *k = q + H * D, *v = k + KV * D;
  const auto run = [&](Vec<T>& out, Vec<T>& k_cache, Vec<T>& v_cache) {
    return nanoinfer_norm_rope_store(
        is_bf16<T>, !is_bf16<T>, is_interleaved, false, false, out.data(), k_cache.data(),
        v_cache.data(), nullptr, nullptr, q, k, v, has_norms ? q_weight.data() : nullptr, has_norms ? k_weight.data() : nullptr,
        angles.positions.data(), is_mrope ? angles.axes.data() : nullptr, angles.table.data(),
        slots.data(), rows, H, KV, D, P, R, offset, slots_in_all, pitch, D, pitch, D, pitch, D, EPS,
        THREADS);
  };
  const auto in_turn = [&](const T* x, i64 heads, const Vec<T>& weight) {
    Vec<T> normed(rows * heads * D), y = normed;
    for (i64 i = 0; i < rows * heads; i++)
      std::copy_n(x + i / heads * pitch + i % heads * D, D, &normed[i * D]);
    if (has_norms)
      nanoinfer_rms_norm(is_bf16<T>, !is_bf16<T>, normed.data(), nullptr, x, nullptr, nullptr,
                         weight.data(), rows, heads, D, strides, EPS, 1, THREADS);
    for (i64 i = 0; i < rows * heads; i++)
      turn(&y[i * D], &normed[i * D], angles.row(i / heads, is_mrope).data(), D, R, offset,
           is_interleaved, 1);
    return y;
  };
  const Vec<T> queries = in_turn(q, H, q_weight), turned = in_turn(k, KV, k_weight);
  Vec<T> out = poison<T>(queries.size()), k_cache(slots_in_all * KV * D), v_cache = k_cache;
  Vec<T> keys = k_cache, values = k_cache;
  for (i64 t = 0; t < rows; t++) {
    std::copy_n(&turned[t * KV * D], KV * D, &keys[slots[t] * KV * D]);
    std::copy_n(v + t * pitch, KV * D, &values[slots[t] * KV * D]);
  }
  const i64 status = run(out, k_cache, v_cache);
  if (status != -1) fail("norm_rope_store, status", 0, status, -1);
  expect_bits("norm_rope_store, q", out, queries);
  expect_bits("norm_rope_store, k", k_cache, keys);
  expect_bits("norm_rope_store, v", v_cache, values);
  for (bool is_slot : {true, false}) {  // the position is looked at first
    (is_slot ? slots[2] : angles.positions[1]) = is_slot ? slots_in_all : -1;
    const i64 invalid = run(out, v_cache, k_cache), need = is_slot ? rows + 2 : 1;
    if (invalid != need) fail("norm_rope_store, bad slot or position", 0, invalid, need);
    expect_bits("norm_rope_store, nothing written", k_cache, keys);
    expect_bits("norm_rope_store, nothing written", v_cache, values);
  }
}

// What a byte of a cache in 8 bits stands for.
double decode(uint8_t code, bool is_e4m3) {
  return is_e4m3 ? value(code) : int8_t(code);
}

// Heads of D, times the normalised Hadamard matrix of the power of two in D.
Vec<double> rotated(const Vec<double>& x, i64 D) {
  const i64 size = D & -D;
  Vec<double> y(x.size());
  for (i64 i = 0; i < (i64)x.size(); i++)
    for (i64 j = 0; j < size; j++)
      y[i] += (__builtin_popcountll(i % D % size & j) % 2 ? -1 : 1) * x[i - i % D % size + j] /
              std::sqrt(double(size));
  return y;
}

// Keys without norm nor turn, and values, in 8 bits: half a step from what they were.
template <class T> void test_store_in_8_bits(i64 D, bool is_e4m3, bool is_rotated) {
  const i64 rows = 3, KV = 2, slots_in_all = 6, row = KV * D;
  const auto q = random_numbers<T>(rows * row), k = random_numbers<T>(rows * row);
  const auto v = random_numbers<T>(rows * row);
  const Vec<i64> positions = {0, 0, 0}, slots = {4, 1, 3};
  const Vec<float> table = {1, 0};
  Vec<T> out(rows * row);
  Vec<uint8_t> keys(slots_in_all * row), values = keys;
  Vec<float> k_scales(slots_in_all * KV), v_scales = k_scales;
  const i64 status = nanoinfer_norm_rope_store(
      is_bf16<T>, false, false, is_e4m3, is_rotated, out.data(), keys.data(), values.data(),
      k_scales.data(), v_scales.data(), q.data(), k.data(), v.data(), nullptr, nullptr,
      positions.data(), nullptr, table.data(), slots.data(), rows, KV, KV, D, 1, 2, 0, slots_in_all,
      row, D, row, D, row, D, EPS, THREADS);
  if (status != -1) fail("store in 8 bits, status", 0, status, -1);
  const auto check = [&](const Vec<T>& x, const Vec<uint8_t>& codes, const Vec<float>& scales) {
    Vec<double> right(x.begin(), x.end());
    for (i64 i = 0; i < rows * row; i++) right[i] = value(x[i]);
    if (is_rotated) right = rotated(right, D);
    for (i64 i = 0; i < rows * row; i++) {
      const i64 at = slots[i / row] * row + i % row;
      const double scale = scales[at / D], found = decode(codes[at], is_e4m3) * scale;
      const double step = is_e4m3 ? std::max(std::fabs(right[i]) / 8, scale / 512) : scale;
      if (std::fabs(found - right[i]) > 0.501 * step) fail("store in 8 bits", i, found, right[i]);
    }
  };
  check(k, keys, k_scales), check(v, values, v_scales);
  Vec<double> queries(q.size());
  for (i64 i = 0; i < rows * row; i++) queries[i] = value(q[i]);
  if (is_rotated) queries = rotated(queries, D);
  expect("store in 8 bits, q", out, queries, 1.1, 2e-6);
}

template <class T> void test_silu_mul(i64 N) {
  const i64 rows = 3, pitch = 2 * N + 1;
  auto x = random_numbers<T>(rows * pitch);
  Vec<double> expected;
  for (i64 t = 0; t < rows; t++)
    for (i64 i = 0; i < N; i++) {
      T& gate = x[t * pitch + i];
      gate = make<T>(value(gate) * 40);
      expected.push_back(silu(value(gate)) * value(x[t * pitch + N + i]));
    }
  Vec<T> y = poison<T>(rows * N);
  nanoinfer_silu_mul(is_bf16<T>, y.data(), x.data(), rows, N, pitch, THREADS);
  expect("silu_mul", y, expected, is_bf16<T> ? 2.1 : 12, 1e-37);
}

template <class T> void test_sigmoid_mul(i64 D) {
  const i64 tokens = 9, H = 7, head = 2 * D + 1, row = H * head + 3;
  const auto x = random_numbers<T>(tokens * H * D);
  auto gate = random_numbers<T>(tokens * row);
  Vec<double> expected;
  for (T& one : gate) one = make<T>(value(one) * 40);
  for (i64 i = 0; i < tokens * H * D; i++) {
    const T one = gate[i / D / H * row + i / D % H * head + i % D];
    expected.push_back(value(x[i]) * sigmoid(value(one)));
  }
  Vec<T> y = poison<T>(x.size());
  nanoinfer_sigmoid_mul(is_bf16<T>, y.data(), x.data(), gate.data(), tokens, H, D, row, head,
                        THREADS);
  expect("sigmoid_mul", y, expected, is_bf16<T> ? 2.1 : 12, 1e-37);
}

void test_store_kv() {
  const i64 rows = 3, width = 10, slots_in_all = 8;
  const auto k = random_numbers<float>(rows * width), v = random_numbers<float>(rows * width);
  Vec<float> k_cache(slots_in_all * width), v_cache = k_cache, keys = k_cache, values = k_cache;
  Vec<i64> slots = {6, 0, 3};
  const i64 row = width * 4;
  for (i64 t = 0; t < rows; t++)
    for (i64 i = 0; i < width; i++) {
      keys[slots[t] * width + i] = k[t * width + i];
      values[slots[t] * width + i] = v[t * width + i];
    }
  nanoinfer_store_kv(k_cache.data(), v_cache.data(), k.data(), v.data(), slots.data(), rows,
                     slots_in_all, row, row, row, THREADS);
  expect_bits("store_kv, k", k_cache, keys);
  expect_bits("store_kv, v", v_cache, values);
  slots = {1, 8, 2};
  const i64 invalid = nanoinfer_store_kv(k_cache.data(), v_cache.data(), k.data(), v.data(),
                                         slots.data(), rows, slots_in_all, row, row, row, THREADS);
  if (invalid != 1) fail("store_kv, bad slot", 0, invalid, 1);
  expect_bits("store_kv, nothing written", k_cache, keys);
}

// Sequences: 1 new token of 10, a chunk of 5 of 9, a prompt of 70, padding of length 0, 1 new token
// of 600 (joined from parts); two rows of padding. Slots that no sequence owns are NaN.
// In 8 bits, 1 (int8) or 2 (e4m3, turned): k and v are what the codes stand for.
template <class T> void test_paged_attention(i64 H, i64 KV, i64 D, int bits8 = 0) {
  const i64 B = 4, S = 5, M = 150, blocks = 175, tokens = 80, row = KV * D;
  const Vec<int32_t> lens = {10, 9, 70, 0, 600}, bounds = {0, 1, 6, 76, 77, 78};
  Vec<int32_t> tables(S * M, 0);
  int32_t next = blocks - 1;
  const auto q = random_numbers<T>(tokens * H * D);
  Vec<T> k = poison<T>(blocks * B * row), v = k, out = poison<T>(q.size());
  Vec<uint8_t> codes[2] = {Vec<uint8_t>(k.size(), 127), Vec<uint8_t>(k.size(), 127)};
  Vec<float> scales[2] = {Vec<float>(blocks * B * KV), Vec<float>(blocks * B * KV)};
  const auto slot = [&](i64 s, i64 j) { return tables[s * M + j / B] * B + j % B; };
  for (i64 s = 0; s < S; s++)
    for (i64 j = 0; j < lens[s]; j++) {
      if (j % B == 0) tables[s * M + j / B] = next--;
      for (int which : {0, 1})
        for (i64 i = 0; i < row; i++) {
          T& x = (which ? v : k)[slot(s, j) * row + i];
          x = make<T>(random_number());
          if (bits8 == 0) continue;
          const float scale = 0.005f * (1 + (slot(s, j) + i / D) % 3) / (bits8 == 2 ? 3 : 1);
          const uint8_t code = uint8_t(100 * value(x)) & 0xf7;  // never e4m3's NaN
          codes[which][slot(s, j) * row + i] = code;
          scales[which][slot(s, j) * KV + i / D] = scale;
          x = make<T>(float(decode(code, bits8 == 2)) * scale);
        }
    }
  const float scale = 1 / std::sqrt(float(D));
  const auto run = [&](Vec<T>& to) {
    const void* keys = bits8 ? (void*)codes[0].data() : k.data();
    const void* values = bits8 ? (void*)codes[1].data() : v.data();
    return nanoinfer_paged_attention(
        is_bf16<T>, bits8 == 2, bits8 == 2, to.data(), q.data(), keys, values,
        bits8 ? scales[0].data() : nullptr, bits8 ? scales[1].data() : nullptr, tables.data(),
        lens.data(), bounds.data(), tokens, S, M, blocks, B, H, KV, D, H * D, scale, THREADS);
  };
  const i64 status = run(out);
  if (status != -1) fail("paged_attention, status", 0, status, -1);
  Vec<double> expected(q.size()), squares(q.size());
  for (i64 s = 0; s < S; s++)
    for (i64 t = bounds[s]; t < bounds[s + 1]; t++)
      for (i64 h = 0; h < H; h++) {
        double total = 0, *sums = &expected[(t * H + h) * D];
        for (i64 j = 0; j <= lens[s] - (bounds[s + 1] - t); j++) {
          const i64 at = slot(s, j) * row + h / (H / KV) * D;
          double score = 0;
          for (i64 d = 0; d < D; d++) score += value(q[(t * H + h) * D + d]) * value(k[at + d]);
          const double weight = std::exp(score * scale);
          total += weight;
          for (i64 d = 0; d < D; d++) {
            const double product = weight * value(v[at + d]);
            sums[d] += product, squares[(t * H + h) * D + d] += product * product;
          }
        }
        for (i64 d = 0; d < D && total > 0; d++) {
          double& allowed = squares[(t * H + h) * D + d];
          allowed = 2e-6 + (is_bf16<T> ? 3 * half_step<T>() * std::sqrt(allowed) / total : 0);
          sums[d] /= total;
        }
      }
  for (i64 i = 0; bits8 == 2 && i < (i64)squares.size(); i += D)  // turned, they mix
    std::fill_n(&squares[i], D, *std::max_element(&squares[i], &squares[i] + D));
  // Weights are rounded to the values' type, each its own way: errors add up as their squares do.
  expect("paged_attention", out, bits8 == 2 ? rotated(expected, D) : expected, 1.1, squares);
  tables[2 * M] = blocks;
  if (run(out) != 2) fail("paged_attention, bad block", 0, run(out), 2);
}

const uint32_t MASK = (1u << 24) - 1;
uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}
// The key with which this id has the largest noise there is: mix() backwards.
uint32_t key_of(uint32_t id) {
  const auto divide = [](uint32_t x, uint32_t by) {  // modulo 2^32, Newton's iteration
    uint32_t inverse = by;
    for (int i = 0; i < 5; i++) inverse *= 2 - by * inverse;
    return x * inverse;
  };
  uint32_t x = divide(MASK ^ (MASK >> 16), 0xc2b2ae35u);
  x = divide(x ^ (x >> 13) ^ (x >> 26), 0x85ebca6bu);
  return x ^ (x >> 16) ^ mix(id);
}

struct Filters { float temperature; i64 top_k; float top_p, min_p; };

// The smallest score that is kept, by a full sort.
double threshold(const Vec<double>& scores, const Filters& filters) {
  Vec<double> kept;
  for (double score : scores)
    if (score > -INFINITY && score >= std::log(filters.min_p)) kept.push_back(score);
  std::sort(kept.begin(), kept.end(), std::greater<>());
  if (filters.top_k > 0 && filters.top_k < i64(kept.size())) {
    size_t count = filters.top_k;
    while (count < kept.size() && kept[count] == kept[count - 1]) count++;  // with all ties
    kept.resize(count);
  }
  if (filters.top_p >= 1) return kept.back();
  double total = 0, mass = 0;
  for (double score : kept) total += std::exp(score);
  for (double score : kept)
    if ((mass += std::exp(score)) >= filters.top_p * total) return score;
  return kept.back();
}

// kind 0: any numbers. 1: ties. 2: a third of the ids is forbidden. 3: nearly the same. Each filter
// with random keys, and with those that make the last id that is kept, and the first that is not,
// win if it can.
void test_draw(i64 V, int kind) {
  const Vec<Filters> all = {
      {0, 0, 1, 0},   {1, 0, 1, 0},    {0.5, 0, 1, 0},  {0.1, 0, 0.99, 0},  {0, 3, 0.5, 0.5},
      {1, 3, 1, 0},   {1, 70, 1, 0},   {2, 900, 1, 0},  {1, 9999, 1, 0},    {1, 0, 1, 0.2},
      {1, 0, 1, 1},   {1, 0, 0.5, 0},  {2, 0, 0.9, 0},  {1, 0, 1e-6, 0},    {1, 10, 0.7, 0},
      {2, 0, 0.8, 0.1}, {2, 500, 0.9, 0.1}, {1, 2000, 0.9, 0}};
  const i64 each = 7, R = all.size() * each, stride = V + 3;
  Vec<float> logits = poison<float>(R * stride), temperatures, top_p, min_p;
  Vec<i64> top_k, expected, ids(R, -1);
  Vec<uint32_t> keys;
  for (i64 r = 0; r < R; r++) {
    const Filters& filters = all[r / each];
    float* row = &logits[r * stride];
    for (i64 i = 0; i < V; i++) {
      row[i] = kind == 1 ? std::round(random_number() * 4) : random_number() * 3;
      if (kind == 2 && i % 3 == 1) row[i] = -INFINITY;
      if (kind == 3) row[i] /= 1000;
    }
    const float top = *std::max_element(row, row + V);
    Vec<double> scores(V);
    for (i64 i = 0; i < V; i++)  // rounded as the kernel rounds
      scores[i] = filters.temperature == 0 ? row[i] : (row[i] - top) / filters.temperature;
    const double least = filters.temperature == 0 ? top : threshold(scores, filters);
    i64 last = 0, next = 0;
    for (i64 i = 0; i < V; i++) {
      if (scores[i] == least) last = i;
      if (scores[i] < least && (scores[next] >= least || scores[i] > scores[next])) next = i;
    }
    const i64 which = r % each;
    keys.push_back(which == 0 ? key_of(last) : which == 1 ? key_of(next) : mix(r + 99));
    i64 best = -1;
    double highest = -INFINITY;
    for (i64 i = 0; i < V; i++) {
      const double u = ((mix(keys[r] ^ mix(i)) & MASK) + 0.5) / (MASK + 1.0);
      const double noisy = scores[i] - (filters.temperature == 0 ? 0 : std::log(-std::log(u)));
      if (scores[i] >= least && noisy > highest) highest = noisy, best = i;
    }
    expected.push_back(best);
    temperatures.push_back(filters.temperature), top_k.push_back(filters.top_k);
    top_p.push_back(filters.top_p), min_p.push_back(filters.min_p);
  }
  for (int threads : {1, THREADS, 3}) {
    Vec<float> scores = logits;
    nanoinfer_draw(scores.data(), R, V, stride, temperatures.data(), top_k.data(), top_p.data(),
                   min_p.data(), keys.data(), ids.data(), threads);
    for (i64 r = 0; r < R; r++) {
      if (ids[r] != expected[r]) fail("draw", r, ids[r], expected[r]);
      for (i64 i = V; i < stride; i++)
        if (scores[r * stride + i] == scores[r * stride + i]) fail("draw, beside", r, i, NAN);
    }
    num_cases++;
  }
}

// W [N, K] as [N / 64][K / P][64][P]; rows that fill up the last block are poison.
template <class T> Vec<T> blocks_of(const Vec<T>& weight, i64 N, i64 K, T filling) {
  const i64 P = 4 / sizeof(T), num_blocks = (N + 63) / 64;
  Vec<T> blocks(num_blocks * 64 * K, filling);
  for (i64 n = 0; n < N; n++)
    for (i64 k = 0; k < K; k++)
      blocks[((n / 64 * (K / P) + k / P) * 64 + n % 64) * P + k % P] = weight[n * K + k];
  return blocks;
}

// All rows at once, and the first 1, 2, ... of them with any number of threads: the same bits.
// run(x, out, M, y_stride, threads)
template <class T, class Out, class F>
Vec<Out> test_rows(const char* what, const Vec<T>& x, i64 M, i64 N, i64 x_stride, F run) {
  const i64 y_stride = N + 3;
  Vec<Out> all = poison<Out>(M * y_stride);
  run(x.data(), all.data(), M, y_stride, THREADS);
  for (i64 i = 0; i < M * y_stride; i++)
    if (i % y_stride >= N && value(all[i]) == value(all[i])) fail(what, i, value(all[i]), NAN);
  for (i64 rows = 1; rows <= std::min<i64>(M, 20); rows++) {
    const i64 first = M - rows;  // the last ones: at other places in their tiles
    Vec<Out> some = poison<Out>(rows * y_stride);
    run(x.data() + first * x_stride, some.data(), rows, y_stride, 1 + rows % 4);
    expect_bits(what, some, Vec<Out>(all.begin() + first * y_stride, all.end()));
  }
  Vec<Out> dense;
  for (i64 i = 0; i < M * y_stride; i++)
    if (i % y_stride < N) dense.push_back(all[i]);
  return dense;
}

// Integers: all sums are exact. Then any numbers, within K roundings of the sum.
template <class Out> void test_linear_bf16(i64 M, i64 N, i64 K, bool has_bias) {
  for (bool is_exact : {true, false}) {
    const i64 x_stride = K + 5;
    auto x = random_numbers<bf16>(M * x_stride), weight = random_numbers<bf16>(N * K);
    auto bias = random_numbers<bf16>(N);
    if (is_exact)
      for (auto* numbers : {&x, &weight, &bias})
        for (bf16& one : *numbers) one = make<bf16>(std::round(value(one) * 4));
    const auto blocks = blocks_of<bf16>(weight, N, K, make<bf16>(NAN));
    const auto found = test_rows<bf16, Out>(
        "linear_bf16, rows", x, M, N, x_stride,
        [&](const bf16* from, Out* to, i64 rows, i64 y_stride, int threads) {
          nanoinfer_linear_bf16(!is_bf16<Out>, to, from, blocks.data(),
                                has_bias ? bias.data() : nullptr, rows, N, K, x_stride, y_stride,
                                threads);
        });
    Vec<double> sums(M * N);
    double size = 0;
    for (i64 m = 0; m < M; m++)
      for (i64 n = 0; n < N; n++) {
        double sum = has_bias ? value(bias[n]) : 0;
        for (i64 k = 0; k < K; k++) sum += value(x[m * x_stride + k]) * value(weight[n * K + k]);
        sums[m * N + n] = sum, size = std::max(size, std::fabs(sum));
      }
    expect("linear_bf16", found, sums, 1, is_exact ? 0 : K * half_step<float>() * (size + 4));
  }
}

template <class T, class Out> void test_linear_int8(i64 M, i64 N, i64 K, bool has_bias) {
  const i64 x_stride = K + 5;
  auto x = random_numbers<T>(M * x_stride);
  Vec<int8_t> weight(N * K);
  for (int8_t& one : weight) one = std::lround(random_number() * 63.5);
  const auto bias = random_numbers<float>(N);
  Vec<float> scales(N);
  Vec<int32_t> sums_of_w(N);
  for (i64 n = 0; n < N; n++) {
    scales[n] = (3 + random_number()) / 100;
    for (i64 k = 0; k < K; k++) sums_of_w[n] += weight[n * K + k];
  }
  for (i64 m = 0; m < M; m++)  // rows of many sizes; of zeros, all above and all below 0
    for (i64 k = 0; k < K; k++) {
      const double shifted = value(x[m * x_stride + k]) + (m == 2 ? 3 : m == 3 ? -3 : 0);
      x[m * x_stride + k] = make<T>(m == 1 ? 0 : std::ldexp(shifted, m % 7));
    }
  x[0] = make<T>(127.5), x[1] = make<T>(-127.5);  // rounded, this range is 257 wide
  const auto blocks = blocks_of<int8_t>(weight, N, K, 77);
  Vec<char> scratch(M * (K + 8));
  const auto found = test_rows<T, Out>(
      "linear_int8, rows", x, M, N, x_stride,
      [&](const T* from, Out* to, i64 rows, i64 y_stride, int threads) {
        nanoinfer_linear_int8(is_bf16<T>, !is_bf16<Out>, to, from, blocks.data(),
                              has_bias ? bias.data() : nullptr, scales.data(), sums_of_w.data(),
                              scratch.data(), rows, N, K, x_stride, y_stride, threads);
      });
  Vec<double> expected;
  double size = 0;
  for (i64 m = 0; m < M; m++) {
    float low = 0, high = 0;
    for (i64 k = 0; k < K; k++) {
      low = std::min<float>(low, value(x[m * x_stride + k]));
      high = std::max<float>(high, value(x[m * x_stride + k]));
    }
    const float factor = std::max(high - low, 1e-4f) / 255;
    const i64 zero = std::lrint(-low / factor);
    for (i64 n = 0; n < N; n++) {
      i64 sum = 0;
      for (i64 k = 0; k < K; k++) {
        const i64 step = std::lrint(float(value(x[m * x_stride + k])) / factor) + zero;
        sum += (std::min<i64>(std::max<i64>(step, 0), 255) - zero) * weight[n * K + k];
      }
      expected.push_back(double(sum) * factor * scales[n] + (has_bias ? bias[n] : 0));
      size = std::max(size, std::fabs(expected.back()));
    }
  }
  expect("linear_int8", found, expected, is_bf16<Out> ? 1 : 4, 4 * half_step<float>() * size);
}

// Logits are few numbers: many are equal. What nobody may read is NaN: weights of the expert that
// nobody chose, which has its share of the softmax; rows that fill up a block; between rows.
template <class T> void test_moe(i64 M, i64 E, i64 I, bool is_normalised) {
  const i64 X = 7, top_k = 3, unused = 4, x_stride = E + 3, logits_stride = X + 2;
  Vec<T> x = poison<T>(M * x_stride), y = poison<T>(M * E), in_blocks[2];
  Vec<float> logits = poison<float>(M * logits_stride);
  Vec<Vec<T>> gate(X), up(X), down(X);
  for (i64 e = 0; e < X; e++)
    for (auto* weight : {&gate[e], &up[e], &down[e]}) {
      const bool is_down = weight == &down[e];
      *weight = e == unused ? poison<T>(E * I) : random_numbers<T>(E * I);
      const auto blocks = blocks_of<T>(*weight, is_down ? E : I, is_down ? I : E, make<T>(NAN));
      in_blocks[is_down].insert(in_blocks[is_down].end(), blocks.begin(), blocks.end());
    }
  Vec<double> expected(M * E), squares(M * E);
  for (i64 t = 0; t < M; t++) {
    T* row = &x[t * x_stride];
    float* scores = &logits[t * logits_stride];
    for (i64 i = 0; i < E; i++) row[i] = make<T>(random_number());
    double total = 0, kept = 0;
    Vec<i64> order(X);
    for (i64 e = 0; e < X; e++) {
      scores[e] = e == unused ? -2.5 : std::round(random_number() * 4) / 4;
      total += std::exp(scores[e]), order[e] = e;
    }
    std::stable_sort(order.begin(), order.end(),
                     [&](i64 a, i64 b) { return scores[a] > scores[b]; });
    order.resize(top_k);
    for (i64 e : order) kept += std::exp(scores[e]);
    for (i64 e : order)
      for (i64 i = 0; i < I; i++) {
        double of_gate = 0, of_up = 0;
        for (i64 k = 0; k < E; k++) {
          of_gate += value(row[k]) * value(gate[e][i * E + k]);
          of_up += value(row[k]) * value(up[e][i * E + k]);
        }
        const double weight = std::exp(scores[e]) / (is_normalised ? kept : total);
        for (i64 n = 0; n < E; n++) {
          const double product = weight * silu(of_gate) * of_up * value(down[e][n * I + i]);
          expected[t * E + n] += product, squares[t * E + n] += product * product;
        }
      }
  }
  const auto run = [&](Vec<T>& to, i64 first, int threads) {
    nanoinfer_moe(is_bf16<T>, is_normalised, to.data(), &x[first * x_stride],
                  &logits[first * logits_stride], in_blocks[0].data(), in_blocks[1].data(),
                  M - first, E, I, X, x_stride, logits_stride, top_k, threads);
  };
  run(y, 0, THREADS);
  // What is inside is rounded to x's type: errors add up as their squares do.
  for (double& one : squares) one = (is_bf16<T> ? 6 : 60) * half_step<T>() * std::sqrt(one);
  expect("moe", y, expected, 1.1, squares);
  for (i64 rows = 1; rows <= std::min<i64>(M, 20); rows++) {  // the last ones: the same bits
    Vec<T> some = poison<T>(rows * E);
    run(some, M - rows, 1 + rows % 4);
    expect_bits("moe, rows", some, Vec<T>(y.end() - rows * E, y.end()));
  }
}

// Of multiples of 1/16 all sums are exact.
template <class T> void test_causal_conv(i64 C) {
  for (i64 K : {1, 2, 4}) {
    Sequences all;
    const i64 stride = C + 3, size = (K - 1) * C;
    auto x = random_numbers<T>(all.tokens * stride), state = all.states<T>(size);
    auto weight = random_numbers<float>(K * C);
    for (auto* numbers : {&x, &state})
      for (T& one : *numbers) one = make<T>(std::round(value(one) * 16) / 16);
    for (float& one : weight) one = std::round(one * 16) / 16;
    const Vec<T> before = state, nothing = poison<T>(all.tokens * C), zeros(C);
    Vec<T> states = state, y = nothing, alone = y;
    Vec<double> expected;
    for (i64 s = 0; s < all.S; s++) {
      const i64 first = all.bounds[s], n = all.bounds[s + 1] - first, source = all.sources[s];
      const auto row = [&](i64 t) -> const T* {  // of the sequence, its past too
        if (t >= 0) return &x[(first + t) * stride];
        return source == 0 ? zeros.data() : &before[source * size + (K - 1 + t) * C];
      };
      for (i64 i = 0; i < n * C; i++) {
        double sum = 0;
        for (i64 j = 0; j < K; j++)
          sum += weight[j * C + i % C] * value(row(i / C - K + 1 + j)[i % C]);
        expected.push_back(silu(value(make<T>(sum))));
      }
      for (i64 j = 0; j < K - 1 && n > 0; j++)
        std::copy_n(row(n - K + 1 + j), C, &states[all.slots[s] * size + j * C]);
    }
    const auto run = [&](Vec<T>& to, Vec<T>& kept, i64 s, i64 S, int threads) {
      return nanoinfer_causal_conv(is_bf16<T>, to.data(), kept.data(), x.data(), weight.data(),
                                   &all.bounds[s], &all.sources[s], &all.slots[s], S, all.tokens,
                                   C, K, all.num_slots, stride, threads);
    };
    all.expect_refusals("causal_conv, bad sequence",
                        [&] { return run(y, state, 0, all.S, THREADS); });
    expect_bits("causal_conv, nothing written", y, nothing);
    expect_bits("causal_conv, nothing written", state, before);
    const i64 status = run(y, state, 0, all.S, THREADS);
    if (status != -1) fail("causal_conv, status", 0, status, -1);
    expect("causal_conv", y, expected, is_bf16<T> ? 1.1 : 12);
    expect_bits("causal_conv, state", state, states);
    state = before;
    for (i64 s = 0; s < all.S; s++) run(alone, state, s, 1, 1 + s);
    expect_bits("causal_conv, one by one", alone, y);
    expect_bits("causal_conv, state, one by one", state, states);
  }
}

// Rows of q and k are of many sizes, for what is added to their squares to count.
template <class T> void test_gated_delta(i64 DK, i64 DV) {
  Sequences all;
  const i64 HK = 2, HV = 6, head = DK * DV, size = HV * head;
  const i64 qs = HK * DK + 1, ks = qs + 1, vs = HV * DV + 3, as = HV + 1, bs = HV + 2;
  auto q = random_numbers<T>(all.tokens * qs), k = random_numbers<T>(all.tokens * ks);
  auto a = random_numbers<T>(all.tokens * as), b = random_numbers<T>(all.tokens * bs);
  const auto v = random_numbers<T>(all.tokens * vs);
  const auto A_log = random_numbers<float>(HV), dt_bias = random_numbers<float>(HV);
  for (size_t i = 0; i < q.size(); i++) q[i] = make<T>(std::ldexp(value(q[i]), i / qs % 4 * -4));
  for (size_t i = 0; i < k.size(); i++) k[i] = make<T>(std::ldexp(value(k[i]), i / ks % 3 * -6));
  for (T& one : a) one = make<T>(value(one) * 12);
  for (T& one : b) one = make<T>(value(one) * 4);
  auto state = all.states<float>(size);
  const Vec<float> before = state;
  const auto unit = [&](const T* x) {
    double squares = 1e-6;
    for (i64 i = 0; i < DK; i++) squares += value(x[i]) * value(x[i]);
    Vec<double> y(DK);
    for (i64 i = 0; i < DK; i++) y[i] = value(x[i]) / std::sqrt(squares);
    return y;
  };
  Vec<double> states(before.begin(), before.end()), expected(all.bounds[all.S] * HV * DV);
  for (i64 i = 0; i < all.S * HV; i++) {
    const i64 s = i / HV, h = i % HV, shared = h / (HV / HK) * DK, source = all.sources[s];
    double* S = &states[all.slots[s] * size + h * head];
    for (i64 t = all.bounds[s]; t < all.bounds[s + 1]; t++) {
      if (t == all.bounds[s])
        for (i64 j = 0; j < head; j++) S[j] = source ? before[source * size + h * head + j] : 0;
      const double softplus = std::log1p(std::exp(value(a[t * as + h]) + dt_bias[h]));
      const double fade = std::exp(-std::exp(A_log[h]) * softplus);
      const double beta = sigmoid(value(b[t * bs + h]));
      const Vec<double> query = unit(&q[t * qs + shared]), key = unit(&k[t * ks + shared]);
      for (i64 d = 0; d < DV; d++) {
        double answer = 0, &out = expected[(t * HV + h) * DV + d];
        for (i64 j = 0; j < DK; j++) S[j * DV + d] *= fade, answer += key[j] * S[j * DV + d];
        const double error = value(v[t * vs + h * DV + d]) - answer;
        for (i64 j = 0; j < DK; j++) {
          S[j * DV + d] += key[j] * beta * error;
          out += query[j] * S[j * DV + d] / std::sqrt(DK);
        }
      }
    }
  }
  const Vec<T> nothing = poison<T>(all.tokens * HV * DV);
  Vec<T> out = nothing, alone = out;
  const auto run = [&](Vec<T>& to, i64 s, i64 S, int threads) {
    return nanoinfer_gated_delta(
        is_bf16<T>, to.data(), state.data(), q.data(), k.data(), v.data(), a.data(), b.data(),
        A_log.data(), dt_bias.data(), &all.bounds[s], &all.sources[s], &all.slots[s], S, all.tokens,
        HK, HV, DK, DV, all.num_slots, qs, ks, vs, as, bs, threads);
  };
  all.expect_refusals("gated_delta, bad sequence", [&] { return run(out, 0, all.S, THREADS); });
  expect_bits("gated_delta, nothing written", out, nothing);
  expect_bits("gated_delta, nothing written", state, before);
  const i64 status = run(out, 0, all.S, THREADS);
  if (status != -1) fail("gated_delta, status", 0, status, -1);
  expect("gated_delta", out, expected, 1.1, 2e-6);
  const Vec<float> after = state;
  expect_bits("gated_delta, null slot", Vec<float>(after.begin(), after.begin() + size),
              poison<float>(size));
  expect("gated_delta, state", Vec<float>(after.begin() + size, after.end()),
         Vec<double>(states.begin() + size, states.end()), 1.1, 2e-6);
  state = before;
  for (i64 s = 0; s < all.S; s++) run(alone, s, 1, 1 + s);
  expect_bits("gated_delta, one by one", alone, out);
  expect_bits("gated_delta, state, one by one", state, after);
}

template <class T> void test_all_of(void (*of_size)(i64)) {
  for (i64 N : {1, 5, 64, 80, 130, 300}) of_size(N);
}

int main() {
  test_all_of<float>(test_rms_norm<float, float>);
  test_all_of<bf16>(test_rms_norm<bf16, bf16>);
  test_all_of<bf16>(test_rms_norm<bf16, float>);
  done("rms_norm");
  for (bool is_packed : {false, true})
    for (bool is_column_major : {false, true}) {
      test_rms_norm_quantized<float>(is_packed, is_column_major);
      test_rms_norm_quantized<bf16>(is_packed, is_column_major);
    }
  done("rms_norm_quantized");
  for (bool is_interleaved : {false, true})
    for (bool is_mrope : {false, true}) {
      test_rotary<float>(64, 64, 0, is_interleaved, is_mrope);
      test_rotary<bf16>(50, 12, 38, is_interleaved, is_mrope);
    }
  done("rotary");
  for (bool has_norms : {false, true})
    for (bool other : {false, true}) {
      test_norm_rope_store<float>(has_norms, other, !other);
      test_norm_rope_store<bf16>(has_norms, other, other);
    }
  for (bool is_e4m3 : {true, false})
    for (bool is_rotated : {true, false}) {
      test_store_in_8_bits<float>(22, is_e4m3, is_rotated);
      test_store_in_8_bits<bf16>(64, is_e4m3, is_rotated);
    }
  done("norm_rope_store");
  test_all_of<float>(test_silu_mul<float>);
  test_all_of<bf16>(test_silu_mul<bf16>);
  done("silu_mul");
  test_all_of<float>(test_sigmoid_mul<float>);
  test_all_of<bf16>(test_sigmoid_mul<bf16>);
  done("sigmoid_mul");
  test_store_kv();
  done("store_kv");
  test_paged_attention<float>(4, 2, 32);
  test_paged_attention<bf16>(4, 2, 32);
  test_paged_attention<float>(9, 3, 18);
  test_paged_attention<bf16>(9, 3, 18);
  for (int bits8 : {1, 2}) {
    test_paged_attention<float>(4, 2, 32, bits8);
    test_paged_attention<bf16>(9, 3, 18, bits8);
  }
  done("paged_attention");
  for (i64 V : {1, 5, 64, 1003})
    for (int kind : {0, 1, 2, 3}) test_draw(V, kind);
  done("draw");
  for (i64 N : {5, 64, 100, 192})
    for (i64 K : {32, 96})
      for (bool has_bias : {false, true}) {
        test_linear_bf16<float>(20, N, K, has_bias);
        test_linear_bf16<bf16>(20, N, K, has_bias);
      }
  test_linear_bf16<float>(20, 100, 544, true);  // more steps than a chunk has
  test_linear_bf16<bf16>(200, 80, 544, true);   // many rows; an odd number of half blocks
  test_linear_bf16<bf16>(600, 64, 96, true);
  done("linear_bf16");
  for (i64 N : {5, 64, 100, 192})
    for (i64 K : {4, 96})
      for (bool has_bias : {false, true}) {
        test_linear_int8<float, float>(20, N, K, has_bias);
        test_linear_int8<bf16, bf16>(20, N, K, has_bias);
        test_linear_int8<bf16, float>(20, N, K, has_bias);
      }
  test_linear_int8<bf16, float>(20, 100, 1056, true);
  test_linear_int8<bf16, bf16>(600, 64, 96, true);
  done("linear_int8");
  for (bool is_normalised : {false, true}) {
    test_moe<float>(20, 67, 35, is_normalised);
    test_moe<bf16>(20, 70, 130, is_normalised);
    test_moe<float>(5, 130, 64, is_normalised);
    test_moe<bf16>(1200, 10, 6, is_normalised);
  }
  done("moe");
  test_all_of<float>(test_causal_conv<float>);
  test_all_of<bf16>(test_causal_conv<bf16>);
  done("causal_conv");
  for (i64 DK : {5, 33})
    for (i64 DV : {7, 64, 270}) {
      test_gated_delta<float>(DK, DV);
      test_gated_delta<bf16>(DK, DV);
    }
  done("gated_delta");
  return 0;
}
