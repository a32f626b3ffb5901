// The choice of tokens: the largest logits, and draws with noise.

#include <functional>
#include <utility>
#include <vector>

#include "kernels.h"
#include "vectors.h"

namespace emssd {
namespace {

template <class T>
void argmax_rows(const Logits& logits, int64_t* to) {
  using L = Lane<T>;
  using Vector = typename L::Vector;
  using Sum = typename L::Sum;
  const int64_t size = logits.size, stride = logits.stride;
  const T* all = static_cast<const T*>(logits.data);
  parallel_for(logits.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* from = all + row * stride;
      Vector largest_seen(-std::numeric_limits<Sum>::infinity());
      Vector nothing = {};  // NaN once an entry is not finite
      int64_t at = 0;
      for (; at + kPage <= size; at += kPage) {
        const Vector entries = L::widen(from + at);
        nothing += entries * Sum{0};
        largest_seen = larger(entries, largest_seen);
      }
      Sum largest_entry = largest(largest_seen), none = total(nothing);
      for (; at < size; ++at) {
        const Sum entry = static_cast<Sum>(from[at]);
        none += entry * 0;
        largest_entry = std::max(largest_entry, entry);
      }
      int64_t place = size;
      if (none != 0) {
        for (place = 0; place < size && !std::isnan(static_cast<Sum>(from[place]));) ++place;
      }
      if (place == size) {
        for (place = 0; place + 1 < size && static_cast<Sum>(from[place]) != largest_entry;) ++place;
      }
      to[row] = place;
    }
  });
}

template <class T>
void top_rows(const Logits& logits, int64_t k, double scale, double* to) {
  using L = Lane<T>;
  using Vector = typename L::Vector;
  using Sum = typename L::Sum;
  const int64_t rows = logits.rows, size = logits.size, stride = logits.stride;
  const T* all = static_cast<const T*>(logits.data);
  parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
    std::vector<std::pair<Sum, int64_t>> top(k);
    for (int64_t row = begin; row < end; ++row) {
      const T* from = all + row * stride;
      for (int64_t place = 0; place < k; ++place) top[place] = {-std::numeric_limits<Sum>::infinity(), place};
      int64_t found = 0;  // places of `top` that are taken
      const auto look = [&](int64_t at) {
        const Sum entry = static_cast<Sum>(from[at]);
        if (std::isnan(entry) || (found == k && !(entry > top[k - 1].first))) return;
        int64_t place = found < k ? found++ : k - 1;
        for (; place > 0 && entry > top[place - 1].first; --place) top[place] = top[place - 1];
        top[place] = {entry, at};
      };
      int64_t at = 0;
      for (; at < std::min(k, size); ++at) look(at);
      for (; at < size && at % kPage != 0; ++at) look(at);
      for (; at + kPage <= size; at += kPage) {
        if (!(largest(L::widen(from + at)) <= top[k - 1].first) || found < k)
          for (int64_t lane = 0; lane < kPage; ++lane) look(at + lane);
      }
      for (; at < size; ++at) look(at);
      const Sum high = top[0].first, by = static_cast<Sum>(scale);
      Vector shares = {};
      for (at = 0; at + kPage <= size; at += kPage) {
        const Vector below = (L::widen(from + at) - high) * by;
        shares += where_equal(below, below, exponential(below), below);
      }
      double sum = total(shares);
      for (; at < size; ++at) sum += std::exp((static_cast<Sum>(from[at]) - high) * by);
      for (int64_t place = 0; place < k; ++place) {
        to[row * k + place] = static_cast<double>(top[place].second);
        to[(rows + row) * k + place] = static_cast<double>((top[place].first - high) * by) - std::log(sum);
      }
    }
  });
}

inline uint64_t splitmix64(uint64_t value) {
  value += 0x9E3779B97F4A7C15u;
  value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9u;
  value = (value ^ value >> 27) * 0x94D049BB133111EBu;
  return value ^ value >> 31;
}

inline uint32_t fmix32(uint32_t bits) {
  bits ^= bits >> 16;
  bits *= 0x85EBCA6Bu;
  bits ^= bits >> 13;
  bits *= 0xC2B2AE35u;
  return bits ^ bits >> 16;
}

// The noise of one position: emssd/sampling/noise.py in the same words.
struct Noise {
  uint32_t low, high;

  Noise(int64_t key, int64_t position) {
    const uint64_t state = splitmix64(static_cast<uint64_t>(key) ^ splitmix64(static_cast<uint64_t>(position)));
    low = static_cast<uint32_t>(state), high = static_cast<uint32_t>(state >> 32);
  }

  uint32_t bits(uint32_t token) const { return fmix32(fmix32(token * 0x9E3779B9u + low) ^ high); }
};

inline double gumbel(uint32_t bits) { return -std::log(-std::log((bits + 0.5) * 0x1p-32)); }

// log(1 + x) for -0.3 < x < 0.42, to two units in the last place of a float or so: Cephes' logf.
inline float logarithm_near_one(float x) {
  float sum = 7.0376836292e-2f;
  for (const float next : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                           2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f}) {
    sum = sum * x + next;
  }
  return x + x * x * (sum * x - 0.5f);
}

// log(value) of an ordinary positive float. `near` is value - 1, and stands for it where the value is from 0.707 to 1.414.
inline float logarithm(float value, float near) {
  uint32_t bits, near_bits, rest_bits;
  std::memcpy(&bits, &value, sizeof(bits)), std::memcpy(&near_bits, &near, sizeof(near_bits));
  const int32_t exponent = static_cast<int32_t>(bits - 0x3f3504f3u) >> 23;  // of 2; the rest is from 0.707 to 1.414
  bits -= static_cast<uint32_t>(exponent) << 23;
  float rest;
  std::memcpy(&rest, &bits, sizeof(rest));
  rest -= 1;
  std::memcpy(&rest_bits, &rest, sizeof(rest_bits));
  const uint32_t far = exponent == 0 ? 0 : ~0u;  // masks, as GCC makes no vectors of a loop with a branch
  rest_bits = (rest_bits & far) | (near_bits & ~far);
  std::memcpy(&rest, &rest_bits, sizeof(rest));
  return logarithm_near_one(rest) + static_cast<float>(exponent) * 0.693147181f;
}

// The same noise in float, wrong by at most 1e-5.
inline float gumbel_in_float(uint32_t bits) {
  const float uniform = (static_cast<float>(bits) + 0.5f) * 0x1p-32f;
  const float rest = (static_cast<float>(~bits) + 0.5f) * 0x1p-32f;  // 1 - uniform, also where that is tiny
  const float waiting = -logarithm(uniform, -rest);
  return -logarithm(waiting, waiting - 1);
}

// What is done to a row of logits before a token is drawn, as in emssd/sampling/params.py.
struct Warp {
  double temperature, top_k, top_p, min_p;
};

// Draws tokens. A token's score is its logit divided by the temperature, and its total is score and noise. The largest total
// wins, among the tokens that top-k, top-p and min-p leave.
//
// Totals are computed in double, and only for tokens whose upper bound, a float, reaches the best total so far. The bound
// gets kSlack on top, for what floats may be wrong by. Shares of the probability are known to kShareError.
// Where rounding could decide, here or in PyTorch, nothing is drawn: then PyTorch decides.
//
// All three limits leave the tokens above some score. So top-p need not sort: the best token of all is left if those with
// higher scores have less than top_p. If it is not left, no token with its score or a lower one is, and the rest races again.
template <class T>
class Sampler {
  using L = Lane<T>;
  using Sum = typename L::Sum;
  using Vector = typename L::Vector;

  static constexpr int64_t kChunk = 64;
  static constexpr Sum kNone = -std::numeric_limits<Sum>::infinity();
  static constexpr double kLeastNoise = -3.13, kMostNoise = 22.88;  // of 32 bits
  static constexpr double kSlack = 1e-3;       // ten times what floats of the size of a bound are wrong by
  static constexpr double kShareError = 2e-5;  // 1.8e-7 times at most 14, the mean logarithm of a weight, for both sums
  static constexpr double kLogError = 1e-12;   // of a logarithm in double, of any libm
  static constexpr double kLargest = 0x1p32;   // score whose last bit is far below kSlack
  static constexpr double kColdest = 1e-7, kHottest = 1e6;  // temperatures whose reciprocals are ordinary floats

 public:
  // The token of a row [size]; -1 for none: rounding could decide, or a logit is NaN, or the largest not finite.
  int64_t draw(const T* row, int64_t size, Noise noise, const Warp& warp) {
    values_ = row, tokens_ = nullptr, size_ = size, temperature_ = warp.temperature;
    if (!(temperature_ >= kColdest && temperature_ <= kHottest)) return -1;
    if constexpr (std::is_same_v<T, double>) {  // different logits may have equal scores
      if (temperature_ != 1) divide();
    }
    by_ = static_cast<Sum>(1 / temperature_);
    if (!find_high() || !(std::fabs(score(high_)) < kLargest)) return -1;
    if (warp.top_k > 0 && warp.top_k < size) keep_top(static_cast<int64_t>(warp.top_k));
    const double limit = std::log(warp.min_p);  // -inf for none
    Sum floor = kNone;
    if (warp.min_p > 0) {  // surely not too high
      const double high = static_cast<double>(high_);
      floor = static_cast<Sum>(high + (limit - kSlack) * temperature_ - std::fabs(high) * 0x1p-20);
    }
    for (;;) {  // until the best is one that is left; each turn raises the floor
      const Best best = race(noise, floor);
      if (best.token < 0 || !(best.total - best.second > kLogError + (std::fabs(best.total) + 32) * 0x1p-50)) return -1;
      if (best.value == high_) return best.token;
      const double below = score(best.value) - score(high_);
      if (below < limit - kLogError) {
        floor = best.value;
        continue;
      }
      if (below < limit + kLogError) return -1;
      if (warp.top_p >= 1) return best.token;
      const double share = share_above(best.value);
      if (share < warp.top_p - kShareError) return best.token;
      if (share <= warp.top_p + kShareError) return -1;
      floor = best.value;
    }
  }

  // The `width` tokens of a row [size] with the largest totals, the largest first, and how likely the target draws them:
  // the logarithm of what each has of the sum of e^(total * temperature / error) over the row. -inf stands behind the last
  // token that is left, and everywhere if a logit is NaN, or the largest not finite.
  //
  // Totals are compared in double, where a float says that they may be among the largest. The sum is of Sum's precision.
  void likeliest(const T* row, int64_t size, Noise noise, const Warp& warp, double error, int64_t width, double* tokens,
                 double* shares) {
    values_ = row, tokens_ = nullptr, size_ = size, temperature_ = warp.temperature;
    by_ = static_cast<Sum>(1 / temperature_);
    std::fill_n(tokens, width, 0.0), std::fill_n(shares, width, -std::numeric_limits<double>::infinity());
    if (!find_high()) return;
    if (warp.top_k > 0 && warp.top_k < size) keep_top(static_cast<int64_t>(warp.top_k));
    Sum floor = kNone;
    if (warp.min_p > 0) floor = static_cast<Sum>(static_cast<double>(high_) + std::log(warp.min_p) * temperature_);
    if (warp.top_p < 1) floor = std::max(floor, nucleus_floor(warp.top_p));
    const double pull = temperature_ / error;
    const Sum highest = find_exponents(noise, floor, static_cast<Sum>(1 / error), static_cast<Sum>(pull));
    Doubles all = {};
    int64_t found = 0;  // places of `shares` that are taken
    Sum bound = kNone;
    for (int64_t at = 0; at < size_; at += kChunk) {
      const Sum* exponents = exponents_.data() + at;
      int any = 0;
      for (int64_t lane = 0; lane < kChunk; ++lane) any |= exponents[lane] > bound;
      for (int64_t page = 0; page < kChunk; page += kPage) {
        all += converted<double>(weights(exponents + page, highest, 1));
      }
      for (int64_t lane = 0; any != 0 && lane < kChunk; ++lane) {
        if (!(exponents[lane] > bound)) continue;
        const uint32_t token = tokens_ == nullptr ? static_cast<uint32_t>(at + lane) : tokens_[at + lane];
        const double below = static_cast<double>(values_[at + lane]) - static_cast<double>(high_);
        const double total = below / error + pull * gumbel(noise.bits(token));
        if (found == width && !(total > shares[width - 1])) continue;
        int64_t place = found < width ? found++ : width - 1;
        for (; place > 0 && total > shares[place - 1]; --place) {
          shares[place] = shares[place - 1], tokens[place] = tokens[place - 1];
        }
        shares[place] = total, tokens[place] = static_cast<double>(token);
        const double least = shares[width - 1];  // what floats are wrong by grows with both parts of a total
        if (found == width) bound = static_cast<Sum>(least - (std::fabs(least) + 64 * pull) * 0x1p-18);
      }
    }
    const double whole = static_cast<double>(highest) + std::log(total(all));
    for (int64_t place = 0; place < found; ++place) shares[place] -= whole;
  }

 private:
  struct Best {
    int64_t token = -1;
    Sum value = kNone;
    double total = -std::numeric_limits<double>::infinity(), second = total;
  };

  double score(Sum value) const { return static_cast<double>(value) / temperature_; }

  // Calls use(values, place of the first) with kChunk at a time; behind the last are some of -inf. What is done with them
  // stands in plain loops.
  template <class Use>
  void each_chunk(const Use& use) const {
    Sum values[kChunk];
    for (int64_t at = 0; at < size_; at += kChunk) {
      const T* from = values_ + at;
      T rest[kChunk];
      if (size_ - at < kChunk) {
        std::fill_n(rest, kChunk, static_cast<T>(kNone));
        from = std::copy_n(from, size_ - at, rest) - (size_ - at);
      }
      for (int64_t page = 0; page < kChunk; page += kPage) {
        const Vector widened = L::widen(from + page);
        widened.store(values + page);
      }
      use(values, at);
    }
  }

  void divide() {
    scores_.resize(size_);
    for (int64_t at = 0; at < size_; ++at) scores_[at] = values_[at] / temperature_;
    values_ = scores_.data(), temperature_ = 1;
  }

  // Finds the largest value. Returns whether it is finite, and none is NaN.
  bool find_high() {
    Sum most[kChunk];
    std::fill_n(most, kChunk, kNone);
    int strange = 0;
    each_chunk([&](const Sum* values, int64_t) {
      for (int64_t lane = 0; lane < kChunk; ++lane) {
        strange |= values[lane] != values[lane];
        most[lane] = values[lane] > most[lane] ? values[lane] : most[lane];
      }
    });
    high_ = *std::max_element(most, most + kChunk);
    return strange == 0 && std::isfinite(high_);
  }

  // Leaves the k largest values, and those equal to the last of them. At least k are no smaller than the k-th largest of
  // many maxima, each of values of its own.
  void keep_top(int64_t k) {
    Sum bound = kNone;
    if (size_ >= 2 * k + kChunk) {
      const int64_t strip = std::max<int64_t>(1, size_ / (8 * k + kChunk));  // chunks that one maximum in each lane is of
      maxima_.clear();
      int64_t num = 0;
      each_chunk([&](const Sum* values, int64_t) {
        if (num++ % strip == 0) {
          maxima_.insert(maxima_.end(), values, values + kChunk);
          return;
        }
        Sum* most = maxima_.data() + maxima_.size() - kChunk;
        for (int64_t lane = 0; lane < kChunk; ++lane) most[lane] = values[lane] > most[lane] ? values[lane] : most[lane];
      });
      bound = kth_largest(k);
    }
    kept_.clear(), kept_tokens_.clear(), maxima_.clear();
    each_chunk([&](const Sum* values, int64_t at) {
      int found = 0;
      for (int64_t lane = 0; lane < kChunk; ++lane) found |= values[lane] >= bound;
      if (found == 0) return;
      for (int64_t lane = 0; lane < std::min(kChunk, size_ - at); ++lane) {
        if (!(values[lane] >= bound)) continue;
        kept_.push_back(values_[at + lane]), kept_tokens_.push_back(static_cast<uint32_t>(at + lane));
        maxima_.push_back(values[lane]);
      }
    });
    bound = kth_largest(k);
    int64_t left = 0;
    for (size_t place = 0; place < kept_.size(); ++place) {
      if (static_cast<Sum>(kept_[place]) >= bound) kept_[left] = kept_[place], kept_tokens_[left++] = kept_tokens_[place];
    }
    kept_tokens_.resize(left + kChunk);  // also for a last chunk that is not full
    values_ = kept_.data(), tokens_ = kept_tokens_.data(), size_ = left;
  }

  Sum kth_largest(int64_t k) {
    std::nth_element(maxima_.begin(), maxima_.begin() + (k - 1), maxima_.end(), std::greater<Sum>());
    return maxima_[k - 1];
  }

  // The tokens of a chunk, and the random bits of each.
  void draw_bits(Noise noise, int64_t at, uint32_t* tokens, uint32_t* bits) const {
    if (tokens_ != nullptr) std::copy_n(tokens_ + at, kChunk, tokens);
    for (int64_t lane = 0; lane < kChunk; ++lane) {
      if (tokens_ == nullptr) tokens[lane] = static_cast<uint32_t>(at + lane);
      bits[lane] = noise.bits(tokens[lane]);
    }
  }

  // The largest total of values above a floor, which is below the largest value, and the next one if it is near.
  //
  // A total is above another one only if -log(u) < e^(score - other). There 1 - u stands for -log(u), from below, and what
  // is linear between powers of 2 for the exponential function, from above.
  Best race(Noise noise, Sum floor) const {
    Best best;
    const double high = score(high_);
    double known = high + kLeastNoise - kSlack;  // a total that is reached
    float reach = static_cast<float>(high - known + kSlack);
    each_chunk([&](const Sum* values, int64_t at) {
      float above[kChunk];
      int any = 0;
      for (int64_t lane = 0; lane < kChunk; ++lane) {
        const float exponent = static_cast<float>((values[lane] - high_) * by_) + reach;
        above[lane] = exponent > kLowest ? exponent : kLowest;
        any |= exponent > static_cast<float>(-kMostNoise);
      }
      if (any == 0) return;
      uint32_t tokens[kChunk], bits[kChunk];
      draw_bits(noise, at, tokens, bits);
      int open[kChunk];
      any = 0;
      for (int64_t lane = 0; lane < kChunk; ++lane) {
        const int32_t whole = static_cast<int32_t>((above[lane] * 1.44269504f + 127.0f) * 0x1p23f);
        float most;
        std::memcpy(&most, &whole, sizeof(most));
        open[lane] = static_cast<float>(static_cast<int32_t>(~bits[lane] >> 8)) * 0x1p-24f < most;
        any |= open[lane];
      }
      if (any == 0) return;
      for (int64_t lane = 0; lane < kChunk; ++lane) {
        if (!open[lane] || !(values[lane] > floor)) continue;
        const double total = score(values[lane]) + gumbel(bits[lane]);
        if (total > best.total) {
          best = {static_cast<int64_t>(tokens[lane]), values[lane], total, best.total};
          known = std::max(known, total), reach = static_cast<float>(high - known + kSlack);
        } else {
          best.second = std::max(best.second, total);
        }
      }
    });
    return best;
  }

  // Writes (value - high_) * by + pull * noise for values from a floor on, and -inf for others. Returns the largest.
  Sum find_exponents(Noise noise, Sum floor, Sum by, Sum pull) {
    exponents_.resize(size_ + kChunk);
    Sum most[kChunk];
    std::fill_n(most, kChunk, kNone);
    each_chunk([&](const Sum* values, int64_t at) {
      uint32_t tokens[kChunk], bits[kChunk];
      Sum noises[kChunk];
      draw_bits(noise, at, tokens, bits);
      for (int64_t lane = 0; lane < kChunk; ++lane) {
        if constexpr (std::is_same_v<Sum, float>) {
          noises[lane] = gumbel_in_float(bits[lane]);
        } else {
          noises[lane] = gumbel(bits[lane]);
        }
      }
      Sum* to = exponents_.data() + at;
      for (int64_t lane = 0; lane < kChunk; ++lane) {
        const Sum exponent = (values[lane] - high_) * by + pull * noises[lane];
        to[lane] = values[lane] >= floor ? exponent : kNone;
        most[lane] = to[lane] > most[lane] ? to[lane] : most[lane];
      }
    });
    return *std::max_element(most, most + kChunk);
  }

  // e^((value - high) * by) of a page of values that are not above `high`.
  static Vector weights(const Sum* values, Sum high, Sum by) { return exponential((load<Vector>(values) - high) * by); }

  // The least value that top-p leaves: the last one, from the largest on, before which values have less than top_p.
  Sum nucleus_floor(double top_p) {
    exponents_.resize(size_ + kChunk);
    Doubles all = {};
    each_chunk([&](const Sum* values, int64_t at) {
      for (int64_t page = 0; page < kChunk; page += kPage) {
        const Vector found = weights(values + page, high_, by_);
        all += converted<double>(found);
        found.store(exponents_.data() + at + page);
      }
    });
    // All values whose share is less than `light` have less than 1 - top_p together.
    const double whole = total(all), limit = top_p * whole, light = (whole - limit) / static_cast<double>(size_);
    weighed_.clear();
    for (int64_t at = 0; at < size_; ++at) {
      if (exponents_[at] >= light) weighed_.emplace_back(static_cast<Sum>(values_[at]), exponents_[at]);
    }
    auto first = weighed_.begin(), last = weighed_.end();
    for (double before = 0; last - first > 1;) {
      const auto middle = first + (last - first) / 2;
      std::nth_element(first, middle, last, std::greater<>());
      double sum = before;
      for (auto each = first; each != middle; ++each) sum += each->second;
      if (sum < limit) {
        first = middle, before = sum;
      } else {
        last = middle;
      }
    }
    return first->first;
  }

  // What the values above one have of the probability.
  double share_above(Sum value) const {
    Doubles all = {}, above = {};
    each_chunk([&](const Sum* values, int64_t) {
      for (int64_t page = 0; page < kChunk; page += kPage) {
        Sum is_above[kPage];
        for (int64_t lane = 0; lane < kPage; ++lane) is_above[lane] = values[page + lane] > value;
        const Vector shares = weights(values + page, high_, by_);
        all += converted<double>(shares);
        above += converted<double>(shares * load<Vector>(is_above));
      }
    });
    return total(above) / total(all);
  }

  const T* values_;         // [size_] logits
  const uint32_t* tokens_;  // [size_] whose; null if they are all from 0 on
  int64_t size_;
  double temperature_;
  Sum high_, by_;  // the largest value; the reciprocal of the temperature
  std::vector<double> scores_;
  std::vector<Sum> maxima_, exponents_;
  std::vector<std::pair<Sum, Sum>> weighed_;  // values, and what they have of the probability up to a factor
  std::vector<T> kept_;
  std::vector<uint32_t> kept_tokens_;
};

// Calls use(sampler, place, its row, its noise, its warp) for each place.
template <class T, class Use>
void each_place(const Logits& logits, const Places& places, const Use& use) {
  parallel_for(places.num, 1, [&](int64_t begin, int64_t end) {
    Sampler<T> sampler;
    for (int64_t place = begin; place < end; ++place) {
      const double* warp = places.warps + place * 4;
      use(sampler, place, static_cast<const T*>(logits.data) + places.rows[place] * logits.stride,
          Noise(places.keys[place], places.positions[place]), Warp{warp[0], warp[1], warp[2], warp[3]});
    }
  });
}

// use(a number of the type).
template <class Use>
void with_type(Type type, const Use& use) {
  if (type == Type::bfloat16) return use(BFloat16{});
  if (type == Type::float32) return use(0.0f);
  use(0.0);
}

}  // namespace

void argmax(const Logits& logits, int64_t* best) {
  with_type(logits.type, [&](auto number) { argmax_rows<decltype(number)>(logits, best); });
}

void top(const Logits& logits, int64_t k, double scale, double* best) {
  with_type(logits.type, [&](auto number) { top_rows<decltype(number)>(logits, k, scale, best); });
}

void sample(const Logits& logits, const Places& places, int64_t* chosen) {
  with_type(logits.type, [&](auto number) {
    each_place<decltype(number)>(logits, places, [&](auto& sampler, int64_t place, auto* row, Noise noise, const Warp& warp) {
      chosen[place] = sampler.draw(row, logits.size, noise, warp);
    });
  });
}

void top_draws(const Logits& logits, const Places& places, double error, int64_t width, double* tokens, double* shares) {
  with_type(logits.type, [&](auto number) {
    each_place<decltype(number)>(logits, places, [&](auto& sampler, int64_t place, auto* row, Noise noise, const Warp& warp) {
      const int64_t to = place * width;
      sampler.likeliest(row, logits.size, noise, warp, error, width, tokens + to, shares + to);
    });
  });
}

void noise_bits(const Places& places, int64_t vocab_size, int64_t* bits) {
  for (int64_t place = 0; place < places.num; ++place) {
    const Noise noise(places.keys[place], places.positions[place]);
    for (int64_t token = 0; token < vocab_size; ++token) *bits++ = noise.bits(static_cast<uint32_t>(token));
  }
}

}  // namespace emssd
