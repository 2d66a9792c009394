// Decode attention as one writes it without intrinsics: loops of constant length, which the compiler vectorises.
//
// query [requests, heads, rows, D] and the KV are bfloat16, sums float32. Keys lie as [requests, kv_heads, blocks, D, BLOCK],
// values as [requests, kv_heads, blocks, BLOCK, D]. Row i of request r sees the keys below lengths[r] - rows + 1 + i.

#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

constexpr int64_t D = 64;
constexpr int64_t BLOCK = 128;

static inline float widen(uint16_t bits) {
  uint32_t word = uint32_t(bits) << 16;
  float number;
  std::memcpy(&number, &word, sizeof number);
  return number;
}

at::Tensor attend(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values, const at::Tensor& lengths,
                  double scaling) {
  const int64_t requests = query.size(0), heads = query.size(1), rows = query.size(2);
  const int64_t kv_heads = keys.size(1), blocks = keys.size(2), group = heads / kv_heads, count = group * rows;
  TORCH_CHECK(query.is_contiguous() && keys.is_contiguous() && values.is_contiguous() && query.size(3) == D);
  auto output = at::empty({requests, heads, rows, D}, query.options().dtype(at::kFloat));
  const auto* q = static_cast<const uint16_t*>(query.data_ptr());
  const auto* k = static_cast<const uint16_t*>(keys.data_ptr());
  const auto* v = static_cast<const uint16_t*>(values.data_ptr());
  const int64_t* length = lengths.data_ptr<int64_t>();
  float* out = output.data_ptr<float>();

#pragma omp parallel for schedule(dynamic)
  for (int64_t item = 0; item < requests * kv_heads; ++item) {
    const int64_t request = item / kv_heads, first = (request * heads + item % kv_heads * group) * rows;
    std::vector<float> wide(count * D), sums(count * D, 0.0f), top(count, -1e30f), total(count, 0.0f);
    alignas(64) static thread_local float key[D][BLOCK], value[BLOCK][D], score[BLOCK];
    for (int64_t at = 0; at < count * D; ++at) wide[at] = widen(q[first * D + at]) * float(scaling);
    for (int64_t block = 0; block * BLOCK < length[request]; ++block) {
      const uint16_t* key_bits = k + (item * blocks + block) * D * BLOCK;
      const uint16_t* value_bits = v + (item * blocks + block) * D * BLOCK;
      for (int64_t at = 0; at < D * BLOCK; ++at) key[0][at] = widen(key_bits[at]);
      for (int64_t at = 0; at < D * BLOCK; ++at) value[0][at] = widen(value_bits[at]);
      for (int64_t n = 0; n < count; ++n) {
        const int64_t seen = std::min(length[request] - rows + 1 + n % rows - block * BLOCK, BLOCK);
        if (seen <= 0) continue;
        for (int64_t j = 0; j < BLOCK; ++j) score[j] = 0.0f;
        for (int64_t d = 0; d < D; ++d) {
          const float factor = wide[n * D + d];
          for (int64_t j = 0; j < BLOCK; ++j) score[j] += factor * key[d][j];
        }
        float peak = top[n], mass = 0.0f;
        for (int64_t j = 0; j < BLOCK; ++j) score[j] = j < seen ? score[j] : -1e30f;
        for (int64_t j = 0; j < BLOCK; ++j) peak = std::max(peak, score[j]);
        for (int64_t j = 0; j < BLOCK; ++j) score[j] = std::exp(score[j] - peak);
        for (int64_t j = 0; j < BLOCK; ++j) mass += score[j];
        const float decay = std::exp(top[n] - peak);
        float sum[D];
        for (int64_t d = 0; d < D; ++d) sum[d] = sums[n * D + d] * decay;
        for (int64_t j = 0; j < BLOCK; ++j)
          for (int64_t d = 0; d < D; ++d) sum[d] += score[j] * value[j][d];
        for (int64_t d = 0; d < D; ++d) sums[n * D + d] = sum[d];
        top[n] = peak;
        total[n] = total[n] * decay + mass;
      }
    }
    for (int64_t n = 0; n < count; ++n)
      for (int64_t d = 0; d < D; ++d) out[(first + n) * D + d] = sums[n * D + d] / total[n];
  }
  return output;
}

TORCH_LIBRARY(decode_attention, library) {
  library.def("attend(Tensor query, Tensor keys, Tensor values, Tensor lengths, float scaling) -> Tensor", attend);
}
