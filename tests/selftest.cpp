// A self-test of the C++ kernels that needs neither Python nor torch: for a machine at hand, or for
// another one under an emulator.
//
// In:  nothing; it is linked with all kernels/*.cpp. Out: a line for each kernel; at the first value
// that is wrong a message and exit status 1. Each kernel is compared with its formula, written here
// as plain loops over doubles. Inputs are small, of odd sizes, in fp32 and bf16, from a fixed
// generator.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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
i64 nanoinfer_norm_rope_store(int, int, int, void*, void*, void*, const void*, const void*,
                              const void*, const void*, const void*, const i64*, const i64*,
                              const float*, const i64*, i64, i64, i64, i64, i64, i64, i64, i64,
                              i64, i64, i64, i64, i64, i64, float, int);
void nanoinfer_silu_mul(int, void*, const void*, i64, i64, i64, int);
i64 nanoinfer_store_kv(void*, void*, const void*, const void*, const i64*, i64, i64, i64, i64, i64,
                       int);
i64 nanoinfer_paged_attention(int, void*, const void*, const void*, const void*, const int32_t*,
                              const int32_t*, const int32_t*, i64, i64, i64, i64, i64, i64, i64,
                              i64, i64, float, int);
i64 nanoinfer_draw_wide(const float*, i64, uint32_t, uint32_t, float);
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
template <class T> double half_step() { return is_bf16<T> ? 1. / 256 : 1. / (1 << 23); }

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
// relative: in half steps of the type, for as many roundings.
template <class T>
void expect(const char* what, const Vec<T>& found, const Vec<double>& expected, double roundings,
            double absolute = 1e-6) {
  num_cases++;
  for (size_t i = 0; i < expected.size(); i++) {
    const double allowed = absolute + roundings * half_step<T>() * std::fabs(expected[i]);
    if (!(std::fabs(value(found[i]) - expected[i]) <= allowed))
      fail(what, i, value(found[i]), expected[i]);
  }
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

Vec<double> turned(const Vec<double>& x, const float* cos, const float* sin, i64 R, i64 offset,
                   bool is_interleaved, int sign) {
  Vec<double> y = x;
  for (i64 i = 0; i < R / 2; i++) {
    const i64 a = offset + (is_interleaved ? 2 * i : i), b = a + (is_interleaved ? 1 : R / 2);
    y[a] = x[a] * cos[i] - x[b] * sign * sin[i];
    y[b] = x[b] * cos[i] + x[a] * sign * sin[i];
  }
  return y;
}

double silu(double x) { return x / (1 + std::exp(-x)); }

// -- The kernels ----------------------------------------------------------------------------------

template <class T, class Weight> void test_rms_norm(i64 N) {
  const i64 rows = 5, pitch = N + 3, strides[6] = {pitch, 0, pitch, 0, pitch, 0};
  const int wide = std::is_same_v<Weight, float>;
  const auto x = random_numbers<T>(rows * pitch), residual = random_numbers<T>(rows * pitch);
  const auto gate = random_numbers<T>(rows * pitch);
  const auto weight = random_numbers<Weight>(N);
  Vec<T> y = poison<T>(rows * N), added = y;
  Vec<double> plain, gated, sums, fused;
  Vec<T> rounded_sums;
  for (i64 t = 0; t < rows; t++) {
    const i64 at = t * pitch;
    for (double one : normed(&x[at], weight.data(), N, 0.5)) plain.push_back(one);
    for (i64 i = 0; i < N; i++) gated.push_back(plain[t * N + i] * silu(value(gate[at + i])));
    for (i64 i = 0; i < N; i++) sums.push_back(value(x[at + i]) + value(residual[at + i]));
    for (i64 i = 0; i < N; i++) rounded_sums.push_back(make<T>(sums[t * N + i]));
    for (double one : normed(&rounded_sums[t * N], weight.data(), N)) fused.push_back(one);
  }
  nanoinfer_rms_norm(is_bf16<T>, wide, y.data(), nullptr, x.data(), nullptr, nullptr,
                     weight.data(), rows, 1, N, strides, EPS, 0.5, THREADS);
  expect("rms_norm", y, plain, 2.5 + 4 * !is_bf16<T>);
  nanoinfer_rms_norm(is_bf16<T>, wide, y.data(), nullptr, x.data(), nullptr, gate.data(),
                     weight.data(), rows, 1, N, strides, EPS, 0.5, THREADS);
  expect("rms_norm, gate", y, gated, 3.5 + 8 * !is_bf16<T>);
  nanoinfer_rms_norm(is_bf16<T>, wide, y.data(), added.data(), x.data(), residual.data(), nullptr,
                     weight.data(), rows, 1, N, strides, EPS, 1, THREADS);
  expect_bits("rms_norm, sum", added, rounded_sums);
  expect("rms_norm of the sum", y, fused, 2.5 + 4 * !is_bf16<T>);
}

double from_e4m3(uint8_t x) {
  const int exponent = (x >> 3) & 15, mantissa = x & 7;
  const double size = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return x & 128 ? -size : size;
}

template <class T> double largest(const T* x, i64 n) {
  double amax = 0;
  for (i64 i = 0; i < n; i++)
    if (std::fabs(value(x[i])) > amax) amax = std::fabs(value(x[i]));
  return amax;
}

template <class T> void test_rms_norm_quantized() {
  const i64 rows = 5, N = 96, group = 8, G = N / group, height = 8;
  const i64 strides[6] = {N}, packed[3] = {4, 4 * height, 1}, plain[3] = {G, 4, 1};
  const auto x = random_numbers<T>(rows * N), weight = random_numbers<T>(N);
  for (int is_packed : {0, 1}) {
    Vec<uint8_t> values(rows * N, 127), bytes(G * height);
    Vec<float> scales(rows * G, NAN);
    Vec<T> copy = poison<T>(rows * N);
    void* out = is_packed ? (void*)bytes.data() : (void*)scales.data();
    nanoinfer_rms_norm_quantized(is_bf16<T>, !is_bf16<T>, values.data(), out, copy.data(), nullptr,
                                 x.data(), nullptr, weight.data(), rows, N, strides, group,
                                 is_packed, is_packed ? packed : plain, EPS, 1, THREADS);
    for (i64 t = 0; t < rows; t++) {
      const Vec<double> row = normed(&x[t * N], weight.data(), N);
      for (i64 i = 0; i < N; i++) {
        const double exact = value(copy[t * N + i]);
        if (std::fabs(exact - row[i]) > 1e-6 + 2.5 / 256 * std::fabs(row[i]))
          fail("rms_norm_quantized, copy", t * N + i, exact, row[i]);
        const i64 g = i / group;
        double scale = largest(&copy[t * N + g * group], group) / 448;
        if (is_packed) scale = std::ldexp(1, int(std::ceil(std::log2(scale))));
        const double stored =
            is_packed ? std::ldexp(1, bytes[g / 4 * 4 * height + t * 4 + g % 4] - 127)
                      : scales[t * G + g];
        if (std::fabs(stored - scale) > 1e-6 * scale)
          fail("rms_norm_quantized, scale", t * G + g, stored, scale);
        const double found = from_e4m3(values[t * N + i]) * scale;
        if (std::fabs(found - exact) > std::fabs(exact) / 16 + scale / 1024 * 1.01)
          fail("rms_norm_quantized, value", t * N + i, found, exact);
      }
    }
    num_cases++;
  }
}

template <class T> void test_rotary(i64 D, i64 R, i64 offset, bool is_interleaved, bool is_mrope) {
  const i64 rows = 7, H = 3, KV = 2, P = 11;
  const auto q = random_numbers<T>(rows * H * D), k = random_numbers<T>(rows * KV * D);
  const auto table = random_numbers<float>(P * R);
  Vec<i64> positions(3 * rows), axes(R);
  for (i64 i = 0; i < 3 * rows; i++) positions[i] = (i * 5 + 3) % P;
  for (i64 c = 0; c < R; c++) axes[c] = c % (R / 2) % 3;
  for (int is_conjugate : {0, 1}) {
    Vec<T> q_out = poison<T>(q.size()), k_out = poison<T>(k.size());
    if (nanoinfer_rotary(is_bf16<T>, is_interleaved, is_conjugate, q_out.data(), k_out.data(),
                         q.data(), k.data(), positions.data(), is_mrope ? axes.data() : nullptr,
                         table.data(), rows, H, KV, D, P, R, offset, H * D, D, KV * D, D,
                         THREADS) != -1)
      fail("rotary, status", 0, 0, -1);
    const auto check = [&](const Vec<T>& in, const Vec<T>& out, i64 heads) {
      Vec<double> expected;
      for (i64 t = 0; t < rows; t++) {
        Vec<float> row(R);
        for (i64 c = 0; c < R; c++)
          row[c] = table[positions[is_mrope ? axes[c] * rows + t : t] * R + c];
        for (i64 h = 0; h < heads; h++) {
          Vec<double> head(D);
          for (i64 d = 0; d < D; d++) head[d] = value(in[(t * heads + h) * D + d]);
          for (double one : turned(head, row.data(), row.data() + R / 2, R, offset,
                                   is_interleaved, is_conjugate ? -1 : 1))
            expected.push_back(one);
        }
      }
      expect("rotary", out, expected, 1.01);
    };
    check(q, q_out, H);
    check(k, k_out, KV);
  }
  positions[4] = P;
  Vec<T> untouched = poison<T>(q.size()), out = untouched;
  const i64 invalid = nanoinfer_rotary(is_bf16<T>, 0, 0, out.data(), out.data(), q.data(), k.data(),
                                       positions.data(), nullptr, table.data(), rows, H, KV, D, P,
                                       R, offset, H * D, D, KV * D, D, THREADS);
  if (invalid != 4) fail("rotary, bad position", 0, invalid, 4);
  expect_bits("rotary, nothing written", out, untouched);
}

template <class T> void test_norm_rope_store(bool has_norms) {
  const i64 rows = 5, H = 4, KV = 2, D = 20, R = 8, offset = 4, P = 9, slots_in_all = 12;
  const i64 pitch = (H + 2 * KV) * D;
  const auto qkv = random_numbers<T>(rows * pitch);
  const auto q_weight = random_numbers<T>(D), k_weight = random_numbers<T>(D);
  const auto table = random_numbers<float>(P * R);
  const Vec<i64> positions = {8, 0, 3, 3, 1}, slots = {11, 4, 6, 5, 7};
  Vec<T> out = poison<T>(rows * H * D), k_cache(slots_in_all * KV * D), v_cache = k_cache;
  const T *q = qkv.data(), *k = q + H * D, *v = k + KV * D;
  if (nanoinfer_norm_rope_store(
          is_bf16<T>, !is_bf16<T>, 0, out.data(), k_cache.data(), v_cache.data(), q, k, v,
          has_norms ? q_weight.data() : nullptr, has_norms ? k_weight.data() : nullptr,
          positions.data(), nullptr, table.data(), slots.data(), rows, H, KV, D, P, R, offset,
          slots_in_all, pitch, D, pitch, D, pitch, D, EPS, THREADS) != -1)
    fail("norm_rope_store, status", 0, 0, -1);
  const auto head = [&](const T* x, const T* weight, i64 t) {
    Vec<double> y(D);
    for (i64 d = 0; d < D; d++) y[d] = value(x[d]);
    if (has_norms) y = normed(x, weight, D);
    const float* row = &table[positions[t] * R];
    return turned(y, row, row + R / 2, R, offset, false, 1);
  };
  Vec<double> queries, keys(k_cache.size());
  Vec<T> values(v_cache.size());
  for (i64 t = 0; t < rows; t++) {
    for (i64 h = 0; h < H; h++)
      for (double one : head(q + t * pitch + h * D, q_weight.data(), t)) queries.push_back(one);
    for (i64 h = 0; h < KV; h++) {
      const Vec<double> key = head(k + t * pitch + h * D, k_weight.data(), t);
      for (i64 d = 0; d < D; d++) {
        keys[(slots[t] * KV + h) * D + d] = key[d];
        values[(slots[t] * KV + h) * D + d] = v[t * pitch + h * D + d];
      }
    }
  }
  const double absolute = is_bf16<T> ? 0.1 : 1e-5;  // a difference of two products of up to 8
  expect("norm_rope_store, q", out, queries, 3, absolute);
  expect("norm_rope_store, k", k_cache, keys, 3, absolute);
  expect_bits("norm_rope_store, v", v_cache, values);
}

template <class T> void test_silu_mul(i64 N) {
  const i64 rows = 3, pitch = 2 * N + 1;
  const auto x = random_numbers<T>(rows * pitch);
  Vec<T> y = poison<T>(rows * N);
  nanoinfer_silu_mul(is_bf16<T>, y.data(), x.data(), rows, N, pitch, THREADS);
  Vec<double> expected;
  for (i64 t = 0; t < rows; t++)
    for (i64 i = 0; i < N; i++)
      expected.push_back(silu(value(x[t * pitch + i])) * value(x[t * pitch + N + i]));
  expect("silu_mul", y, expected, 2.1 + 6 * !is_bf16<T>);
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

// Sequences: 1 new token of 10, a chunk of 5 of 9, a prompt of 70, one of length 0.
template <class T> void test_paged_attention(i64 H, i64 KV, i64 D) {
  const i64 B = 4, S = 4, M = 18, blocks = 26, T_ = 76;
  const Vec<int32_t> lens = {10, 9, 70, 0}, bounds = {0, 1, 6, 76, 76};
  Vec<int32_t> tables(S * M, 0);
  int32_t next = blocks - 1;
  for (i64 s = 0; s < S; s++)
    for (i64 b = 0; b * B < lens[s]; b++) tables[s * M + b] = next--;
  const auto q = random_numbers<T>(T_ * H * D);
  auto k = random_numbers<T>(blocks * B * KV * D), v = random_numbers<T>(blocks * B * KV * D);
  const float scale = 1 / std::sqrt(float(D));
  Vec<T> out = poison<T>(q.size());
  if (nanoinfer_paged_attention(is_bf16<T>, out.data(), q.data(), k.data(), v.data(), tables.data(),
                                lens.data(), bounds.data(), T_, S, M, blocks, B, H, KV, D, H * D,
                                scale, THREADS) != -1)
    fail("paged_attention, status", 0, 0, -1);
  Vec<double> expected(q.size());
  for (i64 s = 0; s < S; s++)
    for (i64 t = bounds[s]; t < bounds[s + 1]; t++)
      for (i64 h = 0; h < H; h++) {
        const i64 position = lens[s] - (bounds[s + 1] - t);
        double total = 0, *row = &expected[(t * H + h) * D];
        for (i64 j = 0; j <= position; j++) {
          const i64 slot = tables[s * M + j / B] * B + j % B, at = (slot * KV + h / (H / KV)) * D;
          double score = 0;
          for (i64 d = 0; d < D; d++) score += value(q[(t * H + h) * D + d]) * value(k[at + d]);
          const double weight = std::exp(score * scale);
          total += weight;
          for (i64 d = 0; d < D; d++) row[d] += weight * value(v[at + d]);
        }
        for (i64 d = 0; d < D; d++) row[d] /= total;
      }
  expect("paged_attention", out, expected, 2, is_bf16<T> ? 1e-2 : 1e-5);
}

void test_draw_wide() {
  const i64 V = 1000;
  const uint32_t mask = (1u << 24) - 1, key = 12345;
  const auto mix = [](uint32_t x) {
    x = (x ^ (x >> 16)) * 0x85ebca6bu;
    x = (x ^ (x >> 13)) * 0xc2b2ae35u;
    return x ^ (x >> 16);
  };
  Vec<float> scores(V);
  for (float& score : scores) score = random_number() - 2;
  for (float threshold : {-INFINITY, -2.f}) {
    i64 best = 0;
    double highest = -INFINITY;
    for (i64 i = 0; i < V; i++) {
      const double u = ((mix(key ^ mix(i)) & mask) + 0.5) / (mask + 1.0);
      const double noisy = scores[i] - std::log(-std::log(u));
      if (scores[i] >= threshold && noisy > highest) highest = noisy, best = i;
    }
    const i64 found = nanoinfer_draw_wide(scores.data(), V, key, 0, threshold);
    if (found != best) fail("draw_wide", 0, found, best);
    num_cases++;
  }
}

template <class T> void test_all_of(void (*of_size)(i64)) {
  for (i64 N : {1, 5, 64, 80, 130}) of_size(N);
}

int main() {
  test_all_of<float>(test_rms_norm<float, float>);
  test_all_of<bf16>(test_rms_norm<bf16, bf16>);
  test_all_of<bf16>(test_rms_norm<bf16, float>);
  done("rms_norm");
  test_rms_norm_quantized<float>();
  test_rms_norm_quantized<bf16>();
  done("rms_norm_quantized");
  for (bool is_interleaved : {false, true})
    for (bool is_mrope : {false, true}) {
      test_rotary<float>(64, 64, 0, is_interleaved, is_mrope);
      test_rotary<bf16>(50, 12, 38, is_interleaved, is_mrope);
    }
  done("rotary");
  for (bool has_norms : {false, true}) {
    test_norm_rope_store<float>(has_norms);
    test_norm_rope_store<bf16>(has_norms);
  }
  done("norm_rope_store");
  test_all_of<float>(test_silu_mul<float>);
  test_all_of<bf16>(test_silu_mul<bf16>);
  done("silu_mul");
  test_store_kv();
  done("store_kv");
  test_paged_attention<float>(4, 2, 32);
  test_paged_attention<bf16>(4, 2, 32);
  test_paged_attention<float>(9, 3, 20);
  test_paged_attention<bf16>(9, 3, 20);
  done("paged_attention");
  test_draw_wide();
  done("draw_wide");
  return 0;
}
