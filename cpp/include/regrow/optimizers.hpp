// The update rules a server can run, and how much state each keeps behind a row's weights. The arithmetic
// itself is in src/kernels.inl; names and numerics follow FBGEMM's CPU optimizers.
#pragma once

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#include "regrow/kernels.hpp"

namespace regrow {

inline constexpr std::string_view optimizer_names[optimizer_count] = {
    "sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam"};

inline Optimizer optimizer_from_name(std::string_view name) {
  for (int index = 0; index < optimizer_count; ++index)
    if (optimizer_names[index] == name) return static_cast<Optimizer>(index);
  std::string message = "unknown optimizer '" + std::string(name) + "'; choose one of ";
  for (int index = 0; index < optimizer_count; ++index)
    message += (index ? ", " : "") + std::string(optimizer_names[index]);
  throw std::invalid_argument(message);
}

inline int64_t state_floats(Optimizer optimizer, int64_t dim) {
  switch (optimizer) {
    case Optimizer::sgd:
      return 0;
    case Optimizer::momentum:
      return dim;
    case Optimizer::adagrad:
      return dim;
    case Optimizer::rowwise_adagrad:
      return 1;
    case Optimizer::adam:
      return 2 * dim;
    case Optimizer::partial_rowwise_adam:
      return dim + 1;
  }
  return 0;
}

// A record is [weights | state], padded to 16 bytes.
inline int64_t record_floats(Optimizer optimizer, int64_t dim) {
  return (dim + state_floats(optimizer, dim) + 3) / 4 * 4;
}

inline bool counts_steps(Optimizer optimizer) {
  return optimizer == Optimizer::adam || optimizer == Optimizer::partial_rowwise_adam;
}

// The numbers of a rule as the caller gave them.
struct OptimizerSettings {
  double learning_rate = 0.0;
  double eps = 1e-8;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double momentum = 0.9;
  double weight_decay = 0.0;
};

// The numbers as the kernels use them at one step. Powers are taken in double precision, once per call.
inline UpdateNumbers numbers_at(const OptimizerSettings& settings, int64_t step) {
  const auto bias = [step](double beta) {
    const double rounded = static_cast<float>(beta);
    return static_cast<float>(1.0 - std::pow(rounded, static_cast<double>(step)));
  };
  UpdateNumbers numbers{};
  numbers.learning_rate = static_cast<float>(settings.learning_rate);
  numbers.eps = static_cast<float>(settings.eps);
  numbers.beta1 = static_cast<float>(settings.beta1);
  numbers.beta2 = static_cast<float>(settings.beta2);
  numbers.momentum = static_cast<float>(settings.momentum);
  numbers.weight_decay = static_cast<float>(settings.weight_decay);
  numbers.bias1 = bias(settings.beta1);
  numbers.bias2 = bias(settings.beta2);
  return numbers;
}

}  // namespace regrow
