// Mixture of experts, on a CPU: the twin of moe_ref.
//
// In:  x [T, E], router logits [T, X], weights of all experts in blocks (blocks.h). Out: y [T, E].
// Invariant: experts are added in their order, in fp32, and rounded once: the bits of a row of y
// depend on its own x only, not on its neighbours or the number of threads.
//
// A visit is a (token, chosen expert) pair. Visits are sorted by expert; then two products:
//
//     inner [visit][I]  = silu(gate x) * up x       an item: an expert, 64 columns of I
//     y [token][64]    += weight * (down inner)     an item: 64 columns of E, all experts
//
// so that no two threads write the same number, and each weight is read once.
#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

#include "blocks.h"

namespace {

template <class T> struct Mixture {
  T* y;
  const T* x;
  const float* logits;
  const uint32_t *gate_up, *down;  // units of 32 bits
  int64_t num_tokens, E, I, X, x_stride, logits_stride, top_k;
  bool is_normalised;

  int64_t visits = num_tokens * top_k;
  int64_t units_of(int64_t rows, int64_t columns) const {  // of a weight, whole blocks of rows
    return (rows + BLOCK - 1) / BLOCK * BLOCK * (columns * sizeof(T) / 4);
  }
  int64_t half = units_of(I, E), whole = units_of(E, I);

  std::vector<int32_t> chosen = std::vector<int32_t>(visits);  // expert of each visit
  std::vector<float> weights = std::vector<float>(visits);
  std::vector<int64_t> first = std::vector<int64_t>(X + 1);    // sorted visit of each expert
  std::vector<int64_t> order = std::vector<int64_t>(visits);   // sorted -> visit
  std::unique_ptr<Operand<T>[]> rows{new Operand<T>[visits * E]};
  std::unique_ptr<Operand<T>[]> inner{new Operand<T>[visits * I]};

  // The largest first; of equal ones the lowest.
  void choose(int64_t t, float* p) {
    const float* row = logits + t * logits_stride;
    const float top = *std::max_element(row, row + X);
    float total = 0, kept = 0;
    for (int64_t e = 0; e < X; e++) total += p[e] = std::exp(row[e] - top);
    for (int64_t i = t * top_k; i < (t + 1) * top_k; i++) {
      const int64_t e = std::max_element(p, p + X) - p;
      chosen[i] = e;
      kept += weights[i] = p[e] / total;
      p[e] = -1;
    }
    for (int64_t i = t * top_k; is_normalised && i < (t + 1) * top_k; i++)
      weights[i] /= kept;
  }

  void sort() {
    for (int32_t e : chosen) first[e + 1]++;
    std::partial_sum(first.begin(), first.end(), first.begin());
    std::vector<int64_t> next(first.begin(), first.end() - 1);
    for (int64_t i = 0; i < visits; i++) order[next[chosen[i]]++] = i;
  }

  // f(first visit, how many) of an expert, as many at a time as the cache holds.
  template <class F> void in_panels(int64_t e, F f) const {
    for (int64_t i = first[e]; i < first[e + 1]; i += PANEL)
      f(i, std::min(PANEL, first[e + 1] - i));
  }

  // Columns n .. n + BLOCK of an expert's inner rows. sums: of gate and up, PANEL rows each; then
  // what `multiply` needs.
  void open(int64_t e, int64_t n, float* sums) const {
    const uint32_t* gate = gate_up + e * 2 * half;
    float* of_up = sums + PANEL * BLOCK;
    uint32_t* own = (uint32_t*)(of_up + PANEL * BLOCK);
    in_panels(e, [&](int64_t i, int64_t count) {
      const Shape shape{count, I, E, int64_t(E * sizeof(Operand<T>))};
      const char* from = (const char*)(rows.get() + i * E);
      multiply<T, vf>(from, shape, gate, n, BLOCK, sums, own);
      multiply<T, vf>(from, shape, gate + half, n, BLOCK, of_up, own);
      for (int64_t m = 0; m < count; m++) {
        Operand<T>* out = inner.get() + (i + m) * I + n;
        T gates[BLOCK];
        for (int64_t c = 0; c < BLOCK; c += W) {  // rounded as the reference rounds
          store(gates + c, load(sums + m * BLOCK + c));
          store(gates + c, silu(load(gates + c)));
        }
        for (int64_t c = 0; c < BLOCK; c++) {
          T up;
          narrow(of_up[m * BLOCK + c], &up);
          narrow(widen(gates[c]) * widen(up), gates + c);
        }
        to_operands(gates, std::min(BLOCK, I - n), out);
      }
    });
  }

  // Columns n .. n + BLOCK of all rows of y. sums: as above; total: one row for each token.
  void close(int64_t n, float* sums, float* total) const {
    std::fill(total, total + num_tokens * BLOCK, 0.f);
    for (int64_t e = 0; e < X; e++)
      in_panels(e, [&](int64_t i, int64_t count) {
        const Shape shape{count, E, I, int64_t(I * sizeof(Operand<T>))};
        multiply<T, vf>((const char*)(inner.get() + i * I), shape, down + e * whole, n, BLOCK,
                        sums, (uint32_t*)(sums + 2 * PANEL * BLOCK));
        for (int64_t m = 0; m < count; m++) {
          const int64_t visit = order[i + m];
          float* to = total + visit / top_k * BLOCK;
          for (int64_t c = 0; c < BLOCK; c++) to[c] += weights[visit] * sums[m * BLOCK + c];
        }
      });
    for (int64_t t = 0; t < num_tokens; t++)
      for (int64_t c = 0; c < std::min(BLOCK, E - n); c++)
        narrow(total[t * BLOCK + c], y + t * E + n + c);
  }

  void run(int threads) {
    const int64_t inner_blocks = (I + BLOCK - 1) / BLOCK, blocks = (E + BLOCK - 1) / BLOCK;
#pragma omp parallel num_threads(threads)
    {
      std::vector<float> p(X);
#pragma omp for
      for (int64_t t = 0; t < num_tokens; t++) choose(t, p.data());
#pragma omp single
      sort();
#pragma omp for
      for (int64_t i = 0; i < visits; i++) {
        const T* from = x + order[i] / top_k * x_stride;
        to_operands(from, E, rows.get() + i * E);
      }
      const Floats sums = allocate(2 * PANEL * BLOCK + SPLIT_UNITS<T>);
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < X * inner_blocks; i++)
        open(i / inner_blocks, i % inner_blocks * BLOCK, sums.get());
      const std::unique_ptr<float[]> total(new float[num_tokens * BLOCK]);
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < blocks; i++) close(i * BLOCK, sums.get(), total.get());
    }
  }
};

}  // namespace

extern "C" void nanoinfer_moe(int is_bf16, int is_normalised, void* y, const void* x,
                              const float* logits, const uint32_t* gate_up, const uint32_t* down,
                              int64_t T, int64_t E, int64_t I, int64_t X, int64_t x_stride,
                              int64_t logits_stride, int64_t top_k, int threads) {
  const auto run = [&](auto* typed) {
    using V = std::remove_pointer_t<decltype(typed)>;
    Mixture<V>{typed, (const V*)x, logits,        gate_up, down,  T, E, I, X,
               x_stride,           logits_stride, top_k,   is_normalised != 0}
        .run(threads);
  };
  is_bf16 ? run((bf16*)y) : run((float*)y);
}
